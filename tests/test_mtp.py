"""Targets with multi-token prediction layers: recognised, and drafted with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_archs

from localspec import mtp
from localspec.cli.inspect import describe
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.sampling import SamplingParams

PLAIN = DraftOptions(tokens=0)
OPTIONS = {"n_ctx": 256, "n_threads": 1, "kv_type": "f32", "flash_attn": False}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_archs.build_qwen35(tmp_path_factory.mktemp("mtp") / "t.gguf")


def prompt(seed: int, n: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(36, 300, n).tolist()


def test_recognised(target: Path, tmp_path: Path) -> None:
    with GgufFile(target) as file:
        assert mtp.n_mtp_layers(file) == 1 and mtp.can_draft(file)
        assert describe(file)["mtp_layers"] == 1
        assert describe(file)["drafts_with_mtp"] is True
    none = tiny_archs.build_qwen35(tmp_path / "none.gguf", mtp=0)
    with GgufFile(none) as file:
        assert mtp.n_mtp_layers(file) == 0 and not mtp.can_draft(file)
        assert "drafts_with_mtp" not in describe(file)
    with pytest.raises(LocalspecError, match="has no multi-token prediction layers"):
        Engine.load(none, "mtp", **OPTIONS)
    two = tiny_archs.build_qwen35(tmp_path / "two.gguf", mtp=2)
    with GgufFile(two) as file:
        assert describe(file)["drafts_with_mtp"] is False
    with pytest.raises(LocalspecError, match="cannot draft with the multi-token"):
        Engine.load(two, "mtp", **OPTIONS)


@pytest.mark.parametrize("options", [DraftOptions(tokens=4), DraftOptions(tokens=8, width=3)])
def test_greedy_text_is_the_targets(target: Path, options: DraftOptions) -> None:
    accepted = 0
    with Engine.load(target, **OPTIONS) as plain, Engine.load(target, "mtp", **OPTIONS) as fast:
        for seed in range(4):
            expected = plain.complete(prompt(seed), max_tokens=50, draft=PLAIN)
            result = fast.complete(prompt(seed), max_tokens=50, draft=options)
            assert result.token_ids == expected.token_ids
            accepted += sum(r.accepted for r in result.rounds)
    assert accepted > 30


def test_a_shortened_conversation_drafts_as_a_fresh_one(target: Path) -> None:
    chain = DraftOptions(tokens=4)
    with (
        Engine.load(target, "mtp", **OPTIONS) as used,
        Engine.load(target, "mtp", **OPTIONS) as fresh,
    ):
        used.complete(prompt(1), max_tokens=30, draft=chain)
        used.complete([*prompt(1)[:25], *prompt(2)], max_tokens=10, draft=chain)
        again = used.complete(prompt(1)[:30], max_tokens=30, draft=chain)
        expected = fresh.complete(prompt(1)[:30], max_tokens=30, draft=chain)
    assert again.token_ids == expected.token_ids
    assert [r.accepted for r in again.rounds] == [r.accepted for r in expected.rounds]


def test_states_are_the_targets_own(target: Path) -> None:
    """The state paired with a token is the target's, of the position before: by hand."""
    with Engine.load(target, "mtp", **OPTIONS) as engine:
        tokens = prompt(3, 12)
        drafter = engine._drafter
        assert isinstance(drafter, mtp.MtpDrafter)
        states = np.concatenate(
            [engine._target.features(n) for _, n in engine._target.prefill(tokens)]
        )
        drafter.absorb(states, tokens)
        row = drafter.propose(77).root()[0].copy()
        drafter.context.clear()
        shifted = np.concatenate([np.zeros((1, states.shape[1]), np.float32), states])
        drafter.context.decode(
            [*tokens, 77], np.arange(13), outputs=[False] * 12 + [True], states=shifted
        )
        assert np.abs(drafter.context.logits()[0] - row).max() < 0.02


def test_auto_policy_and_sampling(target: Path) -> None:
    with Engine.load(target, "mtp", **OPTIONS) as engine:
        expected = engine.complete(prompt(0), max_tokens=40, draft=PLAIN)
        assert engine.complete(prompt(0), max_tokens=40).token_ids == expected.token_ids
        params = SamplingParams(temperature=0.7, seed=3)
        result = engine.complete(prompt(0), params, max_tokens=40, draft=DraftOptions(tokens=4))
        assert len(result.token_ids) == 40 or result.finish_reason == "stop"
