"""Trees whose children are drawn."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from localspec.errors import LocalspecError
from localspec.heads import Heads, Linear
from localspec.sampled import sample_tree
from localspec.tree import ROOT, Block, DraftTree

F = np.float32
WIDTH = 3  # of the hidden states


@dataclass
class Case:
    """Random heads and one block; `logits` are base logits."""

    kind: str
    anchor: int
    w1: np.ndarray
    w2: np.ndarray
    mixer: tuple[np.ndarray, np.ndarray] | None
    confidence: tuple[np.ndarray, np.ndarray] | None
    logits: np.ndarray
    hidden: np.ndarray
    baked: bool

    @property
    def vocab(self) -> int:
        return self.logits.shape[1]

    @property
    def heads(self) -> Heads:
        confidence = self.confidence and Linear(*self.confidence)
        if self.kind == "none":
            return Heads("none")
        return Heads(
            self.kind,
            self.w1.shape[1],
            self.w1.__getitem__,
            self.w2.__getitem__,
            self.mixer and Linear(*self.mixer),
            confidence,
        )

    @property
    def block(self) -> Block:
        if not self.baked:
            return Block(self.anchor, self.logits, self.hidden)
        parents = np.arange(len(self.logits), dtype=np.int32) % self.vocab
        logits = (self.logits + self.w1[parents] @ self.w2.T).astype(F)
        return Block(self.anchor, logits, self.hidden, parents)

    def q(self, path: list[int]) -> np.ndarray:
        """[V] the definition: distribution of the token behind a path, from the anchor on."""
        w1, w2, state = self.w1.astype(float), self.w2.astype(float), np.zeros(self.w1.shape[1])
        latent = state
        for d, token in enumerate([self.anchor, *path]):
            u, h = w1[token], self.hidden[d].astype(float)
            if self.kind == "vanilla":
                latent = u
            elif self.kind == "gated":
                assert self.mixer is not None
                g, b = self.mixer
                latent = sig(g @ np.concatenate([h, u]) + b) * u
            elif self.kind == "rnn":
                assert self.mixer is not None
                j, b = self.mixer
                gate, c, o = np.split(j @ np.concatenate([state, u, h]) + b, 3)
                state = sig(gate) * state + (1 - sig(gate)) * np.tanh(c)
                latent = np.tanh(o)
        return softmax(self.logits[len(path)] + w2 @ latent)


def sig(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z.astype(float) - z.max())
    return p / p.sum()


def make_case(
    kind: str, vocab: int, depth: int, rank: int, confidence: bool, baked: bool, seed: int
) -> Case:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(F)

    inputs = {"gated": WIDTH + rank, "rnn": WIDTH + 2 * rank}.get(kind, 0)
    outputs = {"gated": rank, "rnn": 3 * rank}.get(kind, 0)
    return Case(
        kind,
        int(rng.integers(vocab)),
        normal(vocab, rank),
        normal(vocab, rank),
        (normal(outputs, inputs), normal(outputs)) if outputs else None,
        (normal(1, WIDTH + rank), normal(1)) if confidence else None,
        2 * normal(depth, vocab),
        normal(depth, WIDTH),
        baked and kind == "vanilla",
    )


cases = st.builds(
    make_case,
    kind=st.sampled_from(["none", "vanilla", "gated", "rnn"]),
    vocab=st.integers(2, 9),
    depth=st.integers(1, 5),
    rank=st.integers(1, 4),
    confidence=st.booleans(),
    baked=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
sizes = st.fixed_dictionaries(
    {
        "budget": st.integers(1, 24),
        "width": st.integers(1, 5),
        "most_leaves": st.integers(1, 9),
    }
)


def grow(
    case: Case | None,
    seed: int,
    size: dict[str, int],
    branch: list[int] | tuple[int, ...] = (),
    **options: Any,
) -> DraftTree:
    return sample_tree(
        None if case is None else case.block,
        Heads("none") if case is None else case.heads,
        **{
            "rng": np.random.default_rng(seed),
            "draft_distribution": softmax,
            "branch": branch,
            "branch_odds": [0.7] * len(branch),
            "shortlist": 100,
            **size,
            **options,
        },
    )


def branches(case: Case, data: st.DataObject, most: int = 8) -> list[int]:
    tokens: list[int] = data.draw(st.lists(st.integers(0, case.vocab - 1), max_size=most))
    return tokens


def drawn(tree: DraftTree, node: int) -> list[int]:
    """Tokens of a node's drawn children, in draw order."""
    if node not in tree.children:
        return []
    assert tree.proposals is not None
    return tree.token[tree.children[node][tree.proposals[node].fixed :]].tolist()


@settings(max_examples=200, derandomize=True, deadline=None)
@given(cases, sizes, st.data(), st.integers(0, 99))
def test_structure(case, size, data, seed):
    branch = branches(case, data)
    tree = grow(case, seed, size, branch)
    tree.validate()  # siblings are distinct, parents come first
    assert 1 <= len(tree) <= size["budget"]
    assert len(tree.leaves) <= size["most_leaves"]
    assert tree.depth.max() <= max(len(case.logits), len(branch))
    assert tree.proposals is not None and tree.proposals.keys() == tree.children.keys()
    for node in tree.children:
        assert len(drawn(tree, node)) <= size["width"]
    for node, parent in enumerate(tree.parent.tolist()):
        assert tree.score[node] <= (0 if parent == ROOT else tree.score[parent])
    # Levels come one after another.
    assert (np.diff(tree.depth) >= 0).all()


@settings(max_examples=150, derandomize=True, deadline=None)
@given(cases, sizes, st.data(), st.integers(0, 99))
def test_children_are_proposed_as_the_heads_define(case, size, data, seed):
    tree = grow(case, seed, size, branches(case, data))
    assert tree.proposals is not None
    for node, proposal in tree.proposals.items():
        path = tree.token[tree.path(node)].tolist()
        tokens = drawn(tree, node)
        assert proposal.fixed in (0, 1)
        if len(path) >= len(case.logits):  # behind the block there is only the branch
            assert proposal.fixed == 1 and not tokens and len(proposal.ids) == 0
            continue
        assert proposal.ids.tolist() == list(range(case.vocab))
        if not tokens:  # then nobody asks for q
            continue
        expected = case.q(path)
        if proposal.fixed:
            expected[tree.token[tree.children[node][0]]] = 0
            expected /= expected.sum()
        np.testing.assert_allclose(proposal.probs, expected, atol=1e-5)
        assert proposal.probs.sum() == pytest.approx(1)
        assert (proposal.probs[tokens] > 0).all()


@settings(max_examples=100, derandomize=True, deadline=None)
@given(cases, sizes, st.data(), st.integers(0, 99))
def test_the_branch_is_tried_first(case, size, data, seed):
    branch = branches(case, data)
    tree = grow(case, seed, size, branch)
    assert tree.proposals is not None
    at, followed = ROOT, 0
    while at in tree.children and tree.proposals[at].fixed:
        at = tree.children[at][0]
        assert tree.token[at] == branch[followed]
        followed += 1
    # It ends where the tokens, the budget or the branch end.
    assert followed == len(branch) or len(tree) == size["budget"]
    fixed = sum(proposal.fixed for proposal in tree.proposals.values())
    assert fixed == followed
    if branch:
        assert followed >= 1


def test_a_branch_reaches_behind_the_block():
    case = make_case("rnn", 6, 2, 2, True, False, 0)
    branch = [1, 2, 3, 4, 5]
    tree = grow(case, 0, {"budget": 16, "width": 1, "most_leaves": 2}, branch)
    deepest = int(tree.depth.argmax())
    assert tree.token[tree.path(deepest)].tolist() == branch
    assert len(tree.leaves) == 2


def test_without_a_drafter_the_branch_is_the_tree():
    size = {"budget": 4, "width": 3, "most_leaves": 8}
    tree = grow(None, 0, size, [5, 6, 5])
    tree.validate()
    assert tree.token.tolist() == [5, 6, 5] and tree.parent.tolist() == [ROOT, 0, 1]
    np.testing.assert_allclose(np.exp(tree.score), [0.7, 0.7**2, 0.7**3], rtol=1e-5)
    assert tree.proposals is not None
    assert [p.fixed for p in tree.proposals.values()] == [1, 1, 1]
    assert len(grow(None, 0, size, range(9))) == 4
    nothing = grow(None, 0, size)
    assert len(nothing) == 0 and nothing.proposals == {}


def test_width_one_is_a_chain_as_deep_as_block_and_budget():
    case = make_case("gated", 8, 5, 2, False, False, 1)
    for budget in range(1, 9):
        tree = grow(case, budget, {"budget": budget, "width": 1, "most_leaves": 8})
        n = min(budget, 5)
        assert tree.parent.tolist() == list(range(-1, n - 1))
        assert tree.depth.tolist() == list(range(1, n + 1))


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cases, sizes, st.data())
def test_no_level_depends_on_its_own_draws(case, size, data):
    # How many children each node gets is a function of the levels above them.
    branch = branches(case, data, 3)
    seen: dict[Any, Any] = {}
    for seed in range(30):
        tree = grow(case, seed, size, branch)
        for level in range(int(tree.depth.max()) + 1):
            above = np.flatnonzero(tree.depth <= level)
            known = (*tree.token[above].tolist(), *tree.parent[above].tolist())
            nodes = [ROOT] if level == 0 else np.flatnonzero(tree.depth == level).tolist()
            counts = [len(tree.children.get(node, ())) for node in nodes]
            scores = tree.score[above].tolist()
            assert seen.setdefault(known, (counts, scores)) == (counts, scores)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(cases, sizes, st.integers(0, 99))
def test_a_sampled_tree_is_never_cut(case, size, seed):
    tree = grow(case, seed, size)
    n, leaves = len(tree), len(tree.leaves)
    assert tree.best(n) is tree and tree.best(n + 5) is tree
    assert tree.prune_leaves(leaves) is tree
    with pytest.raises(LocalspecError, match="cannot be cut"):
        tree.best(n - 1)
    with pytest.raises(LocalspecError, match="cannot be cut"):
        tree.keep(range(n))
    if leaves > 1:
        with pytest.raises(LocalspecError, match="cannot be cut"):
            tree.prune_leaves(leaves - 1)


def test_impossible_tokens_are_not_drawn():
    case = make_case("vanilla", 9, 3, 2, True, False, 2)

    def top_two(z: np.ndarray) -> np.ndarray:
        return softmax(np.where(z >= np.sort(z)[-2], z, -np.inf))

    for seed in range(20):
        size = {"budget": 20, "width": 4, "most_leaves": 20}
        tree = grow(case, seed, size, draft_distribution=top_two)
        for node in tree.children:
            best = np.argsort(case.q(tree.token[tree.path(node)].tolist()))[-2:]
            assert set(drawn(tree, node)) <= set(best.tolist())
            assert len(drawn(tree, node)) <= 2


def test_only_the_shortlist_is_drawn_from():
    case = make_case("none", 300, 3, 2, False, False, 3)
    tree = grow(case, 0, {"budget": 30, "width": 5, "most_leaves": 30}, shortlist=6)
    assert tree.proposals is not None
    for node, proposal in tree.proposals.items():
        row = case.logits[len(tree.path(node))]
        assert proposal.ids.tolist() == np.sort(np.argsort(-row)[:6]).tolist()
        expected = softmax(row[proposal.ids])
        np.testing.assert_allclose(proposal.probs, expected, atol=1e-6)


def test_same_seed_same_tree():
    case = make_case("rnn", 9, 4, 3, True, False, 4)
    size = {"budget": 12, "width": 3, "most_leaves": 8}
    a, b, c = (grow(case, seed, size, [1, 2]) for seed in (7, 7, 8))
    assert a.token.tolist() == b.token.tolist() and a.parent.tolist() == b.parent.tolist()
    assert a.token.tolist() != c.token.tolist()


@pytest.mark.parametrize("branch", [(), (2,)], ids=["drawn", "given and drawn"])
def test_siblings_are_drawn_one_after_another_without_replacement(branch):
    """First ~ q, second ~ q without the first, third ~ q without both: 10,000 trees, chi-square."""
    case = make_case("vanilla", 5, 1, 2, False, False, 5)
    case.logits *= F(0.5)
    size = {"budget": 3 + len(branch), "width": 3, "most_leaves": 8}
    block, heads, rng = case.block, case.heads, np.random.default_rng(0)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(10_000):
        tree = sample_tree(
            block,
            heads,
            rng=rng,
            draft_distribution=softmax,
            branch=branch,
            branch_odds=[0.7] * len(branch),
            **size,
        )
        seen[tuple(tree.token[len(branch) :].tolist())] += 1
    q = case.q([])
    q[list(branch)] = 0
    q /= q.sum()
    due: dict[tuple[int, ...], float] = {}
    possible = np.flatnonzero(q).tolist()
    for a in possible:
        for b in set(possible) - {a}:
            for c in set(possible) - {a, b}:
                due[a, b, c] = 10_000 * q[a] * q[b] / (1 - q[a]) * q[c] / (1 - q[a] - q[b])
    assert seen.keys() <= due.keys() and min(due.values()) > 5
    distance = sum((seen[key] - n) ** 2 / n for key, n in due.items())
    assert chi2.sf(distance, len(due) - 1) > 0.001
