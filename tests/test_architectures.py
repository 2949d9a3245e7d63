"""Targets whose memory is not one plain KV cache: sliding windows and recurrent states."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import tiny_archs

from localspec.drafting import MAX_ROLLBACK
from localspec.engine import DraftOptions, Engine
from localspec.llama import Context, ContextOptions, Model
from localspec.target import Target
from localspec.tree import DraftTree, merge_branch

PLAIN = DraftOptions(tokens=0)
CONTEXT = DraftOptions(tokens=8, context=True)
BUILD = {
    "gemma3": tiny_archs.build_gemma3,
    "lfm2": tiny_archs.build_lfm2,
    "mamba": tiny_archs.build_mamba,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("archs")
    return {arch: build(folder / f"{arch}.gguf") for arch, build in BUILD.items()}


def load(path: Path) -> Engine:
    return Engine.load(path, n_ctx=512, n_threads=1, kv_type="f32", flash_attn=False)


def prompt(seed: int, repeats: int = 1) -> list[int]:
    """Random tokens, repeated, so that the context has something to offer."""
    part = np.random.default_rng(seed).integers(36, 300, 60).tolist()
    return part * repeats + part[:7]


@pytest.mark.parametrize("arch", ["gemma3", "lfm2"])
def test_drafts_from_the_context_do_not_change_the_text(files: dict[str, Path], arch: str):
    accepted = 0
    with load(files[arch]) as plain, load(files[arch]) as fast:
        for seed in range(4):
            ids = prompt(seed, 3)
            expected = plain.complete(ids, max_tokens=120, draft=PLAIN)
            result = fast.complete(ids, max_tokens=120, draft=CONTEXT)
            assert result.token_ids == expected.token_ids
            accepted += sum(r.accepted for r in result.rounds)
    assert accepted > 40


def test_trees_see_through_sliding_windows_what_paths_see_alone(files: dict[str, Path]):
    """A random tree far beyond the window, against every path decoded alone."""
    model = Model(files["gemma3"])
    options = ContextOptions(n_ctx=512, n_seq_max=32, n_threads=1, kv_type="f32", flash_attn=False)
    ids = prompt(9, 3)
    tree = DraftTree.empty()
    rng = np.random.default_rng(1)
    for _ in range(6):
        shared = (
            [] if len(tree) == 0 else tree.token[tree.path(int(rng.integers(len(tree))))].tolist()
        )
        chain = shared + rng.integers(36, 300, 3).tolist()
        tree = merge_branch(tree, chain, [-float(i) for i in range(len(chain))])
    assert len(tree.leaves) > 3
    context, alone = Context(model, options), Context(model, options)
    target, single = Target(context), Target(alone)
    for _ in target.prefill(ids):
        pass
    logits = target.verify(50, tree).copy()
    for node in range(len(tree)):
        single.cut(0)
        path = [50, *tree.token[tree.path(node)].tolist()]
        for _ in single.prefill(ids + path):
            pass
        np.testing.assert_allclose(single.logits()[0], logits[node + 1], atol=2e-4)
    leaf = max(tree.leaves, key=lambda n: int(tree.depth[n]))
    target.commit(tree.path(leaf))
    for _ in target.prefill([60]):
        pass
    single.cut(0)
    for _ in single.prefill([*ids, 50, *tree.token[tree.path(leaf)].tolist(), 60]):
        pass
    np.testing.assert_allclose(single.logits()[0], target.logits()[0], atol=2e-4)
    context.close()
    alone.close()
    model.close()


def test_hybrid_targets_draft_chains_within_the_rollback(files: dict[str, Path]):
    with load(files["lfm2"]) as engine:
        assert engine._target.context.rollback == MAX_ROLLBACK
        result = engine.complete(
            prompt(0, 3), max_tokens=60, draft=DraftOptions(tokens=64, width=4, context=True)
        )
        assert 0 < max(r.verified for r in result.rounds) <= MAX_ROLLBACK


def test_a_target_without_rollback_decodes_plainly_with_one_warning(
    files: dict[str, Path], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING, "localspec"), load(files["mamba"]) as engine:
        result = engine.complete(prompt(0, 3), max_tokens=30, draft=CONTEXT)
        again = engine.complete(prompt(0, 3), max_tokens=30, draft=PLAIN)
    assert all(r.verified == 0 for r in result.rounds)
    assert result.token_ids == again.token_ids
    warnings = [r for r in caplog.records if r.name == "localspec"]
    assert len(warnings) == 1
    assert "decoding plainly" in warnings[0].message


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "mamba"])
def test_conversations_are_extended_and_cut_back(files: dict[str, Path], arch: str):
    """A prompt that shares a beginning with the cache gives what a fresh engine gives."""
    with load(files[arch]) as engine:
        for ids in (prompt(1, 2), [*prompt(1, 2), 70, 71], prompt(1, 1), prompt(2, 1)):
            result = engine.complete(ids, max_tokens=20, draft=CONTEXT)
            with load(files[arch]) as fresh:
                assert fresh.complete(ids, max_tokens=20, draft=PLAIN).token_ids == result.token_ids
