"""The recorded runs of the reference evaluator: every output, round and number."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import same_text

from localspec.convert import convert
from localspec.engine import DraftOptions, Engine
from localspec.tree import Block

GOLDEN = Path(
    os.environ.get("LOCALSPEC_GOLDEN", Path(__file__).resolve().parents[1] / "../shared/golden")
)
pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden data (set LOCALSPEC_GOLDEN)"),
]
NAMES = ("dspark-vanilla", "dspark-gated", "dspark-rnn", "dspark-vanilla-b16")
TARGET = GOLDEN / "tiny-qwen3" / "tiny-qwen3-f32.gguf"


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("golden") / f"{name}.gguf"
    convert(GOLDEN / name, TARGET, path, outtype="f32")
    with Engine.load(TARGET, path, n_ctx=256, n_threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def runs(name: str) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = json.loads((GOLDEN / name / "golden.json").read_text())
    assert len(runs) == 12
    return runs


def recorder(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of every proposal from now on: base logits, hidden states, the greedy chain's confidence."""
    drafter = engine._drafter
    assert drafter is not None
    propose: Callable[..., Block] = drafter.propose
    records = []

    def recording(anchor: int, depth: int | None = None) -> Block:
        block = propose(anchor)
        assert block.hidden is not None
        base, hidden, heads = block.logits.copy(), block.hidden.copy(), drafter.heads
        every, state, parent = np.arange(base.shape[1]), heads.root_state(), anchor
        if block.baked is not None:
            base -= heads.bias(heads.embed(block.baked), every)
        sure = []
        for d in range(block.depth):
            tokens = np.array([parent])
            sure.append(heads.confidence(tokens, hidden[d])[0])
            latent, state = heads.latent(tokens, hidden[d], state)
            parent = int((base[d] + heads.bias(latent, every)[0]).argmax())
        records.append((base, hidden, np.array(sure)))
        n = min(depth or block.depth, block.depth)
        return replace(
            block,
            logits=block.logits[:n],
            hidden=block.hidden[:n],
            baked=None if block.baked is None else block.baked[:n],
        )

    monkeypatch.setattr(drafter, "propose", recording)
    return records


def test_chains_reproduce_every_round(
    name: str, engine: Engine, runs: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    recorded = np.load(GOLDEN / name / "golden.npz")
    records = recorder(engine, monkeypatch)
    assert engine._drafter is not None
    chain = DraftOptions(tokens=engine._drafter.info.block_size)
    compared = 0
    for number, run in enumerate(runs):
        records.clear()
        prompt = run["prompt_ids"]
        result = engine.complete(prompt, max_tokens=80, draft=chain, stop_token_ids=[2])
        assert prompt + result.token_ids == run["output_ids"]
        accepted = [r.accepted for r in result.rounds]
        expected = [r["accepted"] for r in run["rounds"]]
        if result.finish_reason == "length":  # the last round is cut at the limit
            assert accepted.pop() <= expected.pop()
        assert accepted == expected
        for index, (base, hidden, sure) in enumerate(records):
            np.testing.assert_allclose(sure, run["rounds"][index]["conf"], atol=5e-3)
            key = f"p{number}_r{index}"
            if f"{key}_hidden" in recorded:
                np.testing.assert_allclose(hidden, recorded[f"{key}_hidden"], atol=2e-2)
                np.testing.assert_allclose(base, recorded[f"{key}_base"], atol=2e-2)
                compared += 1
    assert compared == sum(key.endswith("_hidden") for key in recorded.files) > 0


def test_trees_of_every_size_give_the_same_outputs(engine: Engine, runs: list[dict[str, Any]]):
    taus = []
    for n in (1, 3, 7, 15, 31, 63):
        tokens = rounds = 0
        for run in runs:
            prompt = run["prompt_ids"]
            result = engine.complete(
                prompt, max_tokens=80, draft=DraftOptions(tokens=n, width=4), stop_token_ids=[2]
            )
            assert same_text(engine, prompt, run["output_ids"][len(prompt) :], result.token_ids)
            assert all(r.verified <= n for r in result.rounds)
            tokens += len(result.token_ids) - 1
            rounds += len(result.rounds)
        taus.append(tokens / rounds)
    print("accepted length of N = 1, 3, 7, 15, 31, 63:", np.round(taus, 3))
    assert taus == sorted(taus)
    assert taus[3] > taus[1]
