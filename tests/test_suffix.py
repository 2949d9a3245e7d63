"""The suffix index against brute force, and branches joined with trees."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.suffix import Match, SuffixIndex
from localspec.tree import ROOT, DraftTree, merge_branch

F = np.float32


# ---- the index


def repeated_suffix(tokens: Sequence[int]) -> tuple[int, list[int]]:
    """(length of the longest suffix that occurred before, ends of its earlier occurrences)."""
    n = len(tokens)
    for length in range(n - 1, 0, -1):
        suffix = list(tokens[n - length :])
        ends = [e for e in range(length, n) if list(tokens[e - length : e]) == suffix]
        if ends:
            return length, ends
    return 0, []


texts = st.one_of(
    *(st.lists(st.integers(0, most), max_size=40) for most in (0, 1, 2, 5)),
    # A block, and pieces of it again.
    st.builds(
        lambda block, cuts: [*block, *(t for a, b in cuts for t in block[a:b])],
        st.lists(st.integers(0, 3), min_size=1, max_size=12),
        st.lists(st.tuples(st.integers(0, 11), st.integers(0, 12)), max_size=4),
    ),
)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(texts, st.integers(0, 8))
def test_the_match_is_the_longest_repeated_suffix(tokens, most):
    match = SuffixIndex(tokens).match(most)
    length, ends = repeated_suffix(tokens)
    assert match.length == length
    # What is returned did follow an earlier occurrence, and starts over where the text ends.
    assert match.tokens in ([list(islice(cycle(tokens[e:]), most)) for e in ends] or [[]])
    assert len(match.tokens) == (most if length else 0)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(texts, st.data())
def test_a_grown_index_is_a_rebuilt_one(tokens, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=5)))
    index, at = SuffixIndex(), 0
    for cut in [*cuts, len(tokens)]:
        index.extend(tokens[at:cut])
        at = cut
        assert len(index) == cut and index.tokens == tokens[:cut]
        assert index.match(9) == SuffixIndex(tokens[:cut]).match(9)


def fibonacci(n: int) -> list[int]:
    a, b = [0], [0, 1]
    while len(b) < n:
        a, b = b, b + a
    return b[:n]


@pytest.mark.parametrize(
    "tokens",
    [
        [7] * 3000,
        list(range(3000)),
        [*[0] * 1500, *[1] * 1500],
        [*[0, 1] * 750, *[1, 2] * 750],
        fibonacci(3000),
        np.random.default_rng(0).integers(0, 3, 3000).tolist(),
        np.random.default_rng(1).integers(0, 400, 3000).tolist(),
        [0, *(t for i in range(1500) for t in (0, i))][:3000],
    ],
    ids=["one", "new", "two runs", "periods", "fibonacci", "few", "many", "fan"],
)
def test_the_work_per_token_is_bounded(tokens):
    # Nothing is ever deleted, so all work done is bounded by what is there: states and
    # transitions, copied ones included.
    index = SuffixIndex(tokens)
    n = len(tokens)
    assert len(index._next) == len(index._link) == len(index._length) == len(index._end) <= 2 * n
    assert sum(map(len, index._next)) <= 3 * n


def test_the_continuation_runs_into_the_suffix_and_around():
    assert SuffixIndex([5, 5, 5, 5]).match(10) == Match(3, [5] * 10)
    assert SuffixIndex([1, 2, 3, 1, 2]).match(10) == Match(2, [3, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert SuffixIndex([1, 2, 3, 1, 2]).match(3) == Match(2, [3, 1, 2])
    assert SuffixIndex([1, 2, 3, 1, 2]).match(1) == Match(2, [3])


def test_nothing_repeats():
    assert SuffixIndex().match(4) == SuffixIndex([1]).match(4) == Match(0, [])
    assert SuffixIndex([1, 2, 3]).match(4) == Match(0, [])
    assert len(SuffixIndex()) == 0


def test_a_match_grows_while_the_text_repeats():
    text = np.random.default_rng(2).integers(0, 1000, 50).tolist()
    index = SuffixIndex(text)
    for i, token in enumerate(text[10:30], 1):
        index.extend([token])
        match = index.match(5)
        assert match.length >= i and match.tokens == text[10 + i : 15 + i]


# ---- branches


@st.composite
def trees(draw) -> DraftTree:
    n = draw(st.integers(0, 14))
    parent: list[int] = []
    depth: list[int] = []
    token: list[int] = []
    score: list[float] = []
    for _ in range(n):
        p = draw(st.integers(-1, len(parent) - 1))
        t = draw(st.integers(0, 3))
        if any(q == p and u == t for q, u in zip(parent, token, strict=True)):
            continue
        parent.append(p)
        token.append(t)
        depth.append(1 if p == ROOT else depth[p] + 1)
        drop = draw(st.sampled_from([0.0, 0.25, 1.0]))
        score.append((0.0 if p == ROOT else score[p]) - drop)
    return DraftTree(*(np.array(x, np.int32) for x in (token, parent, depth)), np.array(score, F))


def nodes_of(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {
        tuple(tree.token[tree.path(i)].tolist()): float(tree.score[i]) for i in range(len(tree))
    }


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    trees(),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 2.0])), max_size=8),
    st.integers(0, 20),
)
def test_a_branch_shares_the_nodes_that_exist(tree, branch, n):
    tokens = [t for t, _ in branch]
    scores = (-np.cumsum([drop for _, drop in branch])).tolist()
    merged = merge_branch(tree, tokens, scores)
    merged.validate()
    before, after = nodes_of(tree), nodes_of(merged)
    on_branch = {tuple(tokens[: i + 1]): s for i, s in enumerate(scores)}
    assert after.keys() == before.keys() | on_branch.keys()
    assert len(merged) == len(after)  # no path twice
    for path, score in after.items():
        assert score == max(before.get(path, -np.inf), on_branch.get(path, -np.inf))
        assert score <= after.get(path[:-1], 0.0)
    # The tree's nodes keep their places, and the best are still a tree.
    assert merged.token[: len(tree)].tolist() == tree.token.tolist()
    assert merged.parent[: len(tree)].tolist() == tree.parent.tolist()
    best = merged.best(n)
    best.validate()
    assert len(best) == min(n, len(merged))


def test_no_branch_and_no_tree():
    tree = DraftTree.chain([1, 2], [-1.0, -2.0])
    assert nodes_of(merge_branch(tree, [], [])) == nodes_of(tree)
    assert nodes_of(merge_branch(DraftTree.empty(), [1, 2], [-1.0, -2.0])) == nodes_of(tree)
    assert len(merge_branch(DraftTree.empty(), [], [])) == 0
