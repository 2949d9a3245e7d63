"""Verification of trees against decoding every path alone; what commits and cuts leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import prompt_of

import tiny
from localspec import loading
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.llama import Context, ContextOptions, Model
from localspec.target import Target
from localspec.tree import ROOT, DraftTree

LAYERS = (1, 2, 3)
# Float32 all the way: what is left is the order of sums (a few 1e-6 at logits of 10).
EXACT = {"kv_type": "f32", "flash_attn": False}
NEAR = 1e-4


@pytest.fixture(scope="module")
def model(tiny_target) -> Iterator[Model]:
    model = Model(tiny_target.gguf)
    yield model
    model.close()


@pytest.fixture
def make(model) -> Iterator[Callable[..., Target]]:
    """Makes targets; closes their contexts."""
    contexts: list[Context] = []

    def get(model: Model = model, **options: Any) -> Target:
        options = {"n_ctx": 512, "n_seq_max": 32, "n_threads": 1, "layer_inputs": LAYERS} | options
        contexts.append(Context(model, ContextOptions(**(EXACT | options))))
        return Target(contexts[-1])

    yield get
    for context in contexts:
        context.close()


def feed(target: Target, tokens) -> tuple[np.ndarray, np.ndarray]:
    """Prefill; (logits of the last token, features of all)."""
    parts = [target.features(n) for _, n in target.prefill(list(tokens))]
    return target.logits()[-1].copy(), np.concatenate(parts)


def random_tree(rng: np.random.Generator, n: int, vocab: int = 320, most_leaves: int = 32):
    token, parent, depth, seen = [], [], [], set()
    for i in range(n):
        p = int(rng.integers(-1, i)) if rng.random() < 0.5 else i - 1
        t = int(rng.integers(tiny.FIRST_BYTE, vocab))
        if (p, t) in seen:
            t = next(x for x in range(vocab) if (p, x) not in seen)
        seen.add((p, t))
        token.append(t)
        parent.append(p)
        depth.append(1 if p == ROOT else depth[p] + 1)
    tree = DraftTree(
        np.array(token, np.int32),
        np.array(parent, np.int32),
        np.array(depth, np.int32),
        -np.array(depth, np.float32),
    ).prune_leaves(most_leaves)
    tree.validate()
    return tree


@contextmanager
def plain(make, prompt) -> Iterator[Callable[[list[int]], np.ndarray]]:
    """Tokens -> logits after prompt and tokens, each decoded from the prompt on, alone."""
    target = make()
    feed(target, prompt)

    def logits(tokens: list[int]) -> np.ndarray:
        target.cut(len(prompt))
        return feed(target, tokens)[0]

    yield logits


@pytest.mark.parametrize("seed", range(6))
def test_every_row_equals_its_path_decoded_alone(make, seed):
    rng = np.random.default_rng(seed)
    prompt, tree, anchor = prompt_of(seed), random_tree(rng, 4 + 6 * seed), 70
    target = make()
    feed(target, prompt)
    found = target.verify(anchor, tree).copy()
    features = target.features(len(tree) + 1)
    alone = make()
    feed(alone, prompt)
    for node in range(-1, len(tree)):
        path = [] if node == ROOT else tree.path(node)
        alone.cut(len(prompt))
        row, feature = feed(alone, [anchor, *tree.token[path].tolist()])
        np.testing.assert_allclose(found[node + 1], row, atol=NEAR)
        np.testing.assert_allclose(features[node + 1], feature[-1], atol=NEAR)
    # The tolerance is tight: rows of other nodes are far away.
    assert np.abs(found[1] - found[0]).max() > 1000 * NEAR


@pytest.mark.parametrize("tree", [DraftTree.empty(), DraftTree.chain([50, 51, 52])])
def test_plain_decoding_and_chains_are_trees_too(make, tree):
    prompt = prompt_of(0)
    target = make(n_seq_max=1)
    feed(target, prompt)
    found = target.verify(60, tree)
    assert found.shape == (len(tree) + 1, 320)
    with plain(make, prompt) as logits:
        for i in range(len(tree) + 1):
            np.testing.assert_allclose(found[i], logits([60, *tree.token[:i].tolist()]), atol=NEAR)


@pytest.mark.parametrize("seed", range(3))
def test_after_the_commit_of_any_path_decoding_goes_on_as_if_fresh(make, seed):
    rng = np.random.default_rng(seed)
    prompt, tree, after = prompt_of(seed), random_tree(rng, 12), [80, 81]
    target = make()
    feed(target, prompt)
    with plain(make, prompt) as logits:
        for node in range(-1, len(tree)):
            path = [] if node == ROOT else tree.path(node)
            target.cut(len(prompt))
            target.verify(70, tree)
            target.commit(path)
            assert target.n_past == len(prompt) + 1 + len(path)
            assert target.context.seq_end(0) == target.n_past - 1
            row, _ = feed(target, after)
            expected = logits([70, *tree.token[path].tolist(), *after])
            np.testing.assert_allclose(row, expected, atol=NEAR)


@pytest.mark.parametrize("n_batch", [1, 3, 16, 200])
def test_prefill_gives_the_same_in_chunks_of_any_size(make, n_batch):
    prompt = prompt_of(1, 60)
    logits, features = feed(make(), prompt)
    target = make(n_batch=n_batch, n_ctx=256)
    spans, parts = [], []
    for start, n in target.prefill(prompt):
        spans.append((start, n))
        parts.append(target.features(n))
    assert [s for s, _ in spans] == list(range(0, 60, n_batch))
    assert sum(n for _, n in spans) == 60 == target.n_past
    assert target.logits().shape == (1, 320)
    np.testing.assert_allclose(target.logits()[0], logits, atol=NEAR)
    np.testing.assert_allclose(np.concatenate(parts), features, atol=NEAR)


def test_features_are_the_layer_inputs_in_the_order_asked_for(make):
    prompt = prompt_of(2)
    forward = make()
    _, found = feed(forward, prompt)
    _, turned = feed(make(layer_inputs=(3, 1)), prompt)
    np.testing.assert_allclose(turned[:, :96], found[:, 192:], atol=NEAR)
    np.testing.assert_allclose(turned[:, 96:], found[:, :96], atol=NEAR)
    # Rows by index, as a copy: the next pass must not change them.
    forward.verify(60, DraftTree.chain([61, 62]))
    rows = forward.features([2, 0])
    whole = forward.features(3)
    assert (rows == whole[[2, 0]]).all()
    kept = rows.copy()
    forward.commit([])
    feed(forward, [90])
    assert (rows == kept).all()


def test_cut_forgets(make):
    prompt = prompt_of(3, 40)
    expected, _ = feed(make(), [*prompt[:25], 77, 78])
    target = make()
    feed(target, prompt)
    target.verify(60, random_tree(np.random.default_rng(0), 9))  # left unfinished
    assert target.cut(25) == 25 == target.n_past
    assert target.context.seq_end(0) == 24
    assert target.context.seq_end(1) == -1
    np.testing.assert_allclose(feed(target, [77, 78])[0], expected, atol=NEAR)
    assert target.cut(1000) == 27
    assert target.cut(0) == 0 and target.context.seq_end(0) == -1
    np.testing.assert_allclose(feed(target, [*prompt[:25], 77, 78])[0], expected, atol=NEAR)


def state_size(target: Target) -> int:
    """Bytes of the saved state: grows with every cell that any sequence holds."""
    context = target.context
    return int(context._api.llama_state_get_size(context.handle))


def test_many_rounds_leave_exactly_the_committed_cells(make):
    rng = np.random.default_rng(0)
    target = make()
    committed = prompt_of(0)
    feed(target, committed)
    for _ in range(400):
        if target.n_past > 350:
            n = target.cut(int(rng.integers(1, 40)))
            committed = committed[:n]
            feed(target, [70])
            committed.append(70)
        tree = random_tree(rng, int(rng.integers(0, 25)))
        anchor = int(rng.integers(300))
        target.verify(anchor, tree)
        node = int(rng.integers(-1, len(tree)))
        path = [] if node == ROOT else tree.path(node)
        target.commit(path)
        committed += [anchor, *tree.token[path].tolist()]
        assert target.n_past == len(committed)
        assert target.context.seq_end(0) == len(committed) - 1
    assert all(target.context.seq_end(s) == -1 for s in range(1, 32))
    fresh = make()
    feed(fresh, committed)
    row, _ = feed(target, [70])
    expected, _ = feed(fresh, [70])
    np.testing.assert_allclose(row, expected, atol=NEAR)
    assert state_size(target) == state_size(fresh)
    # The measure sees one leaked cell.
    feed(fresh, [71])
    assert state_size(target) < state_size(fresh)
    # The cache can still be filled to the last cell.
    feed(target, [70] * (target.context.n_ctx - target.n_past))
    with pytest.raises(LocalspecError, match=r"context of \d+ tokens is full"):
        feed(target, [70])


def test_trees_with_more_leaves_than_ids_are_pruned_by_the_engine(load, monkeypatch):
    leaves: list[int] = []
    verify = Target.verify

    def counting(self: Target, anchor: int, tree: DraftTree) -> np.ndarray:
        leaves.append(len(tree.leaves))
        return verify(self, anchor, tree)

    monkeypatch.setattr(Target, "verify", counting)
    prompt, draft = prompt_of(4), DraftOptions(tokens=20, width=5)
    wide = load("vanilla").complete(prompt, max_tokens=40, draft=draft)
    assert max(leaves) > 3
    leaves.clear()
    monkeypatch.setattr(loading, "MAX_LEAVES", 3)
    engine: Engine = load("vanilla")
    assert engine._target.max_leaves == 3
    found = engine.complete(prompt, max_tokens=40, draft=draft)
    assert found.token_ids == wide.token_ids
    assert max(leaves) == 3
    assert all(r.verified >= 3 for r in found.rounds[:-1])


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory) -> Iterator[Model]:
    """Quantised caches need heads of 32 values at least."""
    built = tiny.build_target(tmp_path_factory.mktemp("wide"), head_dim=32, tied=True)
    assert isinstance(built.gguf, Path)
    model = Model(built.gguf)
    yield model
    model.close()


def test_trees_in_a_quantised_cache(make, wide_heads):
    rng, prompt = np.random.default_rng(5), prompt_of(5)
    cache = {"kv_type": "q8_0", "flash_attn": True}
    target, alone, exact = (make(wide_heads, **o) for o in (cache, cache, {}))
    for t in (target, alone, exact):
        feed(t, prompt)
    tree = random_tree(rng, 16)
    found = target.verify(70, tree).copy()
    differences = []
    for node in range(len(tree)):
        tokens = [70, *tree.token[tree.path(node)].tolist()]
        alone.cut(len(prompt))
        exact.cut(len(prompt))
        row, truth = feed(alone, tokens)[0], feed(exact, tokens)[0]
        differences.append(np.abs(truth - row).max())
        # Rounding of the cache itself is the yardstick.
        np.testing.assert_allclose(found[node + 1], row, atol=0.02)
    assert max(differences) > 1e-4
    path = tree.path(tree.leaves[-1])
    target.commit(path)
    alone.cut(len(prompt))
    feed(alone, [70, *tree.token[path].tolist()])
    np.testing.assert_allclose(feed(target, [75])[0], feed(alone, [75])[0], atol=0.02)


def test_a_cache_type_that_does_not_fit_the_heads_is_an_error(make):
    with pytest.raises(LocalspecError, match="cannot create a context"):
        make(kv_type="q8_0", flash_attn=True)
