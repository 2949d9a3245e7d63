"""The draft tree, and its builder against an enumeration of the definition."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from localspec.errors import LocalspecError
from localspec.heads import Heads, Linear
from localspec.tree import ROOT, Block, DraftTree, build_tree

F = np.float32


# ---- the builder


@dataclass
class Case:
    """Random heads and one block; `logits` are base logits."""

    kind: str
    vocab: int
    anchor: int
    w1: np.ndarray
    w2: np.ndarray
    mixer: tuple[np.ndarray, np.ndarray] | None
    logits: np.ndarray
    hidden: np.ndarray
    sure: tuple[np.ndarray, np.ndarray]  # the confidence head

    @property
    def heads(self) -> Heads:
        return Heads(
            self.kind,
            self.w1.shape[1],
            self.w1.__getitem__,
            self.w2.__getitem__,
            self.mixer and Linear(*self.mixer),
            Linear(*self.sure),
        )

    @property
    def block(self) -> Block:
        return Block(self.anchor, self.logits, self.hidden)

    def baked(self, parents: np.ndarray) -> Block:
        """The same block with the bias of some parents in its logits, as llama.cpp hands it out."""
        logits = self.logits + self.w1[parents] @ self.w2.T
        return Block(self.anchor, logits.astype(F), self.hidden, parents.astype(np.int32))


def make_case(kind: str, vocab: int, depth: int, rank: int, scale: float, seed: int) -> Case:
    rng, width = np.random.default_rng(seed), 3

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(F)

    inputs = {"vanilla": 0, "gated": width + rank, "rnn": width + 2 * rank}[kind]
    outputs = {"vanilla": 0, "gated": rank, "rnn": 3 * rank}[kind]
    return Case(
        kind,
        vocab,
        int(rng.integers(vocab)),
        normal(vocab, rank),
        F(scale) * normal(vocab, rank),
        (normal(outputs, inputs), normal(outputs)) if outputs else None,
        F(scale) * normal(depth, vocab),
        normal(depth, width),
        (normal(1, width + rank), normal(1)),
    )


cases = st.builds(
    make_case,
    kind=st.sampled_from(["vanilla", "gated", "rnn"]),
    vocab=st.integers(2, 12),
    depth=st.integers(1, 4),
    rank=st.integers(1, 4),
    scale=st.sampled_from([0.3, 1.0, 3.0]),
    seed=st.integers(0, 2**32 - 1),
)


def sig(x):
    return 1 / (1 + np.exp(-x))


def definition(case: Case, budget: int, children: int, frontier: int, confidence: float = 0):
    """PCTree as it is defined, in float64 and token by token.

    Returns ({path of tokens: score} of the best nodes, smallest difference that decided anything).
    """
    w1, w2 = case.w1.astype(float), case.w2.astype(float)
    level = [((), 0.0, np.zeros(w1.shape[1]))]
    everything, margin = [], math.inf
    for d in range(len(case.logits)):
        h, grown = case.hidden[d].astype(float), []
        for path, score, state in level:
            u, after = w1[path[-1] if path else case.anchor], state
            if case.kind == "vanilla":
                latent = u
            elif case.kind == "gated":
                g, b = case.mixer
                latent = sig(g @ np.concatenate([h, u]) + b) * u
            else:
                j, b = case.mixer
                gate, c, o = np.split(j @ np.concatenate([state, u, h]) + b, 3)
                after = sig(gate) * state + (1 - sig(gate)) * np.tanh(c)
                latent = np.tanh(o)
            z = [case.logits[d, v] + w2[v] @ latent for v in range(case.vocab)]
            norm = math.log(sum(math.exp(x) for x in z))
            ranked = sorted(range(case.vocab), key=lambda v: -z[v])
            if children < case.vocab:
                margin = min(margin, z[ranked[children - 1]] - z[ranked[children]])
            weight, bias = case.sure
            score += confidence * math.log(sig(weight[0] @ np.concatenate([h, u]) + bias[0]))
            grown += [((*path, v), score + z[v] - norm, after) for v in ranked[:children]]
        grown.sort(key=lambda node: -node[1])
        if frontier < len(grown):
            margin = min(margin, grown[frontier - 1][1] - grown[frontier][1])
        level = grown[:frontier]
        everything += level
    everything.sort(key=lambda node: -node[1])
    if budget < len(everything):
        margin = min(margin, everything[budget - 1][1] - everything[budget][1])
    return {path: score for path, score, _ in everything[:budget]}, margin


def nodes_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {
        tuple(tree.token[tree.path(i)].tolist()): float(tree.score[i]) for i in range(len(tree))
    }


def assert_same_nodes(tree: DraftTree, expected: dict[tuple[int, ...], float], tolerance: float):
    found = nodes_of(tree)
    assert len(found) == len(tree)
    assert found.keys() == expected.keys()
    for path, score in found.items():
        assert score == pytest.approx(expected[path], abs=tolerance)


def assert_is_a_tree(tree: DraftTree):
    tree.validate()
    for node, parent in enumerate(tree.parent.tolist()):
        assert tree.score[node] <= (0 if parent == ROOT else tree.score[parent])


@settings(max_examples=300, derandomize=True, deadline=None)
@given(cases, st.integers(1, 40), st.integers(1, 13), st.integers(1, 20))
def test_builder_equals_the_definition(case, budget, children, frontier):
    expected, margin = definition(case, budget, children, frontier)
    assume(margin > 1e-4)  # else rounding decides
    tree = build_tree(case.block, case.heads, budget=budget, children=children, frontier=frontier)
    assert_is_a_tree(tree)
    assert_same_nodes(tree, expected, 1e-4)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(cases, st.sampled_from([0.25, 1.0, 3.0]), st.integers(1, 20))
def test_the_confidence_head_weighs_the_children_of_a_parent(case, weight, budget):
    expected, margin = definition(case, budget, 3, 8, weight)
    assume(margin > 1e-4)
    tree = build_tree(
        case.block, case.heads, budget=budget, children=3, frontier=8, confidence=weight
    )
    assert_is_a_tree(tree)
    assert_same_nodes(tree, expected, 1e-4)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(cases, st.data())
def test_baked_logits_give_the_tree_of_the_base_logits(case, data):
    case.kind, case.mixer = "vanilla", None
    parents = np.array([data.draw(st.integers(0, case.vocab - 1)) for _ in case.logits])
    expected, margin = definition(case, 12, 3, 6)
    assume(margin > 1e-3)
    tree = build_tree(case.baked(parents), case.heads, budget=12, children=3, frontier=6)
    assert_same_nodes(tree, expected, 1e-3)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(cases, st.sampled_from([10.0, 30.0, 60.0]), st.integers(1, 20))
def test_extreme_logits_still_give_a_tree(case, factor, budget):
    case.logits, case.w2 = case.logits * F(factor), case.w2 * F(factor)
    # Matrix products set the "invalid" flag now and then for lanes nobody reads.
    with np.errstate(divide="raise", over="raise"):
        tree = build_tree(case.block, case.heads, budget=budget, children=3, frontier=8)
    assert np.isfinite(tree.score).all()
    assert_is_a_tree(tree)


def test_a_sure_parent_does_not_drown_an_unsure_sibling():
    # After token 0 logits reach 150, after token 1 all are 0: e^-150 is nothing in float32.
    w1 = np.array([[0, 0], [0, 0], [0, 0], [1, 0]], F)
    w1[0] = [1, 0]
    w1[1] = [0, 1]
    w2 = np.array([[150, 0], [0, 0], [0, 0], [0, 0]], F)
    logits = np.array([[3, 2.9, -9, -9], [0, 0, 0, 0]], F)
    block = Block(2, logits, None)
    heads = Heads("vanilla", 2, w1.__getitem__, w2.__getitem__)
    tree = build_tree(block, heads, budget=6, children=2, frontier=4)
    assert np.isfinite(tree.score).all()
    assert_is_a_tree(tree)
    after_one = nodes_of(tree)[1, 0]
    assert after_one == pytest.approx(float(tree.score[1]) - math.log(4), abs=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_width_one_is_the_greedy_chain(kind):
    case = make_case(kind, 12, 4, 3, 1.0, 5)
    tree = build_tree(case.block, case.heads, budget=4, children=1, frontier=1)
    (expected,) = [p for p in definition(case, 4, 1, 1)[0] if len(p) == 4]
    assert tree.token.tolist() == list(expected)
    assert tree.parent.tolist() == [-1, 0, 1, 2] and tree.depth.tolist() == [1, 2, 3, 4]


def test_budget_bounds():
    case = make_case("vanilla", 5, 3, 2, 1.0, 0)
    options = {"children": 2, "frontier": 100}
    assert len(build_tree(case.block, case.heads, budget=0, **options)) == 0
    assert len(build_tree(case.block, case.heads, budget=1, **options)) == 1
    assert len(build_tree(case.block, case.heads, budget=1000, **options)) == 2 + 4 + 8


def test_larger_budgets_only_add_nodes():
    case = make_case("rnn", 12, 4, 3, 1.0, 1)
    trees = [
        nodes_of(build_tree(case.block, case.heads, budget=n, children=3, frontier=20)).keys()
        for n in range(20)
    ]
    for small, large in itertools.pairwise(trees):
        assert small < large


@pytest.mark.parametrize("baked", [False, True])
def test_a_shortlist_changes_scores_by_little(baked):
    # Logits of the shape models give: few likely tokens, a long tail, biases of a few units.
    rng = np.random.default_rng(0)
    vocab, depth, rank = 20000, 5, 16
    logits = (2.0 * rng.normal(size=(depth, vocab)) + 6 * rng.random((depth, vocab)) ** 40).astype(
        F
    )
    case = Case(
        "vanilla",
        vocab,
        3,
        rng.normal(size=(vocab, rank)).astype(F),
        (0.25 * rng.normal(size=(vocab, rank))).astype(F),
        None,
        logits,
        np.zeros((depth, 1), F),
        (np.zeros((1, 1 + rank), F), np.zeros(1, F)),
    )
    block = case.baked(rng.integers(0, vocab, depth)) if baked else case.block
    options = {"budget": 31, "children": 4, "frontier": 16}
    whole = nodes_of(build_tree(block, case.heads, shortlist=vocab, **options))
    short = nodes_of(build_tree(block, case.heads, shortlist=512, **options))
    common = whole.keys() & short.keys()
    assert len(common) >= 25
    for path in common:
        assert short[path] == pytest.approx(whole[path], abs=0.6 * len(path))


# ---- the tree itself


@st.composite
def trees(draw, most: int = 14) -> DraftTree:
    n = draw(st.integers(0, most))
    parent, depth, token, score = [], [], [], []
    for i in range(n):
        p = draw(st.integers(-1, i - 1))
        parent.append(p)
        depth.append(1 if p == ROOT else depth[p] + 1)
        token.append(100 + i)
        drop = draw(st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]))  # ties with the parent too
        score.append((0.0 if p == ROOT else score[p]) - drop)
    return DraftTree(
        np.array(token, np.int32),
        np.array(parent, np.int32),
        np.array(depth, np.int32),
        np.array(score, F),
    )


@given(trees())
def test_leaves_paths_and_sequence_ids_agree(tree):
    tree.validate()
    assert sorted(tree.leaves) == [i for i in range(len(tree)) if i not in tree.parent.tolist()]
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[-1] == node and len(path) == tree.depth[node]
        assert tree.parent[path].tolist() == [ROOT, *path[:-1]]
        below = [i for i, leaf in enumerate(tree.leaves) if node in tree.path(leaf)]
        assert list(tree.sequence_ids[node]) == below and below


@given(trees(), st.integers(0, 15))
def test_the_best_are_a_tree_of_the_best(tree, n):
    best = tree.best(n)
    best.validate()
    assert len(best) == min(n, len(tree))
    assert sorted(best.score, reverse=True) == sorted(tree.score, reverse=True)[:n]
    assert nodes_of(best).items() <= nodes_of(tree).items()


@given(trees(), st.integers(1, 6))
def test_pruning_keeps_the_best_leaves_and_what_leads_to_them(tree, most):
    pruned = tree.prune_leaves(most)
    pruned.validate()
    assert len(pruned.leaves) == min(most, len(tree.leaves))
    ranked = sorted((float(tree.score[leaf]) for leaf in tree.leaves), reverse=True)
    assert sorted((float(pruned.score[i]) for i in pruned.leaves), reverse=True) == ranked[:most]
    names = nodes_of(tree)
    assert nodes_of(pruned).items() <= names.items()
    leaf_names = {tuple(tree.token[tree.path(leaf)].tolist()) for leaf in tree.leaves}
    for leaf in pruned.leaves:
        assert tuple(pruned.token[pruned.path(leaf)].tolist()) in leaf_names


@given(trees(), st.data())
def test_keep_is_the_subtree(tree, data):
    wanted = data.draw(st.sets(st.integers(0, len(tree) - 1))) if len(tree) else set()
    closed = sorted({ancestor for node in wanted for ancestor in tree.path(node)})
    kept = tree.keep(closed)
    kept.validate()
    names = list(nodes_of(tree).items())
    assert list(nodes_of(kept).items()) == [names[i] for i in closed]


def test_children_are_in_node_order():
    tree = DraftTree(*map(np.array, ([1, 2, 3, 4], [-1, -1, 0, 0], [1, 1, 2, 2], [0.0] * 4)))
    assert tree.children == {ROOT: [0, 1], 0: [2, 3]}
    assert tree.leaves == [2, 3, 1]


def test_chain_and_empty():
    chain = DraftTree.chain([5, 6, 5])
    chain.validate()
    assert chain.leaves == [2] and chain.path(2) == [0, 1, 2]
    assert [list(ids) for ids in chain.sequence_ids] == [[0]] * 3
    assert DraftTree.chain([5], [-0.5]).score.tolist() == [-0.5]
    empty = DraftTree.empty()
    empty.validate()
    assert len(empty) == 0 and empty.leaves == [] and empty.sequence_ids == []
    assert len(empty.best(3)) == len(empty.prune_leaves(3)) == len(DraftTree.chain([])) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent": [-1, 1, 0, 0]}, "node 1 comes before its parent 1"),
        ({"parent": [-1, -2, 0, 0]}, "node 1 comes before its parent -2"),
        ({"depth": [1, 1, 2, 3]}, "node 3 has the wrong depth"),
        ({"depth": [2, 1, 3, 3]}, "node 0 has the wrong depth"),
        ({"token": [1, 2, 3, 3]}, "node 3 repeats a sibling's token"),
        ({"score": [0.0]}, "arrays of one length"),
    ],
)
def test_validate_names_the_fault(change, message):
    fine = {
        "token": [1, 1 + 1, 3, 4],
        "parent": [-1, -1, 0, 0],
        "depth": [1, 1, 2, 2],
        "score": [0.0] * 4,
    }
    DraftTree(**{k: np.array(v) for k, v in fine.items()}).validate()
    with pytest.raises(LocalspecError, match=message):
        DraftTree(**{k: np.array(v) for k, v in (fine | change).items()}).validate()


def test_render_shows_depth_first_with_marks():
    tree = DraftTree(
        np.array([10, 11, 12], np.int32),
        np.array([-1, -1, 0], np.int32),
        np.array([1, 1, 2], np.int32),
        np.log(np.array([0.5, 0.25, 0.125], F)),
    )
    text = {10: "a", 11: "b", 12: "c\n"}.__getitem__
    assert tree.render(text, accepted=[0]).split("\n") == [
        "*  0.500  a",
        "   0.125    c\\n",
        "   0.250  b",
    ]
    assert DraftTree.empty().render(text) == ""
