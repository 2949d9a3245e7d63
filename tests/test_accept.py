"""Which drafted tokens are kept."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.accept import accept_match
from localspec.tree import ROOT, DraftTree


def tree_of(*nodes: tuple[int, int]) -> DraftTree:
    """(token, parent) pairs."""
    depth: list[int] = []
    for _, parent in nodes:
        depth.append(1 if parent == ROOT else depth[parent] + 1)
    return DraftTree(
        np.array([t for t, _ in nodes], np.int32),
        np.array([p for _, p in nodes], np.int32),
        np.array(depth, np.int32),
        np.zeros(len(nodes), np.float32),
    )


#      7 - 8 - 9
#        \ 5
#      8 - 8
TREE = tree_of((7, -1), (8, -1), (8, 0), (5, 0), (8, 1), (9, 2))


@pytest.mark.parametrize(
    ("rows", "path", "bonus"),
    [
        ({0: 3}, (), 3),
        ({0: 7, 1: 3}, (0,), 3),
        ({0: 7, 1: 5, 4: 9}, (0, 3), 9),
        ({0: 7, 1: 8, 3: 9, 6: 7}, (0, 2, 5), 7),
        ({0: 7, 1: 7}, (0,), 7),  # a token of another level does not count
        ({0: 8, 2: 8, 5: 9}, (1, 4), 9),  # 9 hangs below another node
        ({0: 9}, (), 9),
    ],
)
def test_walk_by_hand(rows, path, bonus):
    seen = []

    def choose(row, tokens):
        seen.append((row, list(tokens)))
        return rows[row]

    outcome = accept_match(TREE, choose)
    assert (outcome.path, outcome.bonus) == (path, bonus)
    # Each place is asked once, with the tokens that lead to it.
    tokens = TREE.token[list(path)].tolist()
    assert seen == [(n + 1, tokens[:i]) for i, n in enumerate([ROOT, *path])]


def test_without_a_draft_the_bonus_is_the_answer():
    outcome = accept_match(DraftTree.empty(), lambda row, tokens: 4 + row + len(tokens))
    assert outcome.path == () and outcome.bonus == 4


def test_of_equal_siblings_the_first_is_followed():
    twins = tree_of((7, -1), (7, -1), (1, 0), (2, 1))
    outcome = accept_match(twins, lambda row, tokens: {0: 7, 1: 2}[row])
    assert outcome.path == (0,) and outcome.bonus == 2


@st.composite
def small_trees(draw) -> DraftTree:
    n = draw(st.integers(0, 12))
    return tree_of(*[(draw(st.integers(0, 2)), draw(st.integers(-1, i - 1))) for i in range(n)])


@given(small_trees(), st.lists(st.integers(0, 2), min_size=14, max_size=14))
def test_committed_tokens_are_those_of_plain_decoding(tree, chosen):
    outcome = accept_match(tree, lambda row, tokens: chosen[len(tokens)])
    committed = [*tree.token[list(outcome.path)].tolist(), outcome.bonus]
    assert committed == chosen[: len(committed)]
    parents = [ROOT, *outcome.path]
    assert tree.parent[list(outcome.path)].tolist() == parents[:-1]
    # And no longer path would have been right.
    below = tree.token[tree.children.get(parents[-1], [])].tolist()
    assert outcome.bonus not in below


@given(small_trees(), st.integers(0, 2**32 - 1))
def test_rows_belong_to_the_nodes_they_are_asked_for(tree, seed):
    # The target's choice depends on the whole path: a row taken from another node is noticed.
    def target(tokens):
        return hash((seed, *tokens)) % 3

    by_row = {0: ()} | {i + 1: tuple(tree.token[tree.path(i)].tolist()) for i in range(len(tree))}
    outcome = accept_match(tree, lambda row, tokens: target(by_row[row]))
    committed = [*tree.token[list(outcome.path)].tolist(), outcome.bonus]
    plain: list[int] = []
    for _ in committed:
        plain.append(target(tuple(plain)))
    assert committed == plain
