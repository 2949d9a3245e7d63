"""Trees grown level by level: against the definition, with a drafter made of a table."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from localspec.accept import accept_rejection
from localspec.rollout import draw_tree, grow_tree
from localspec.tree import ROOT, DraftTree

V = 5


class Table:
    """A drafter whose logits depend on the whole path; it checks how it is asked."""

    most_nodes = 8

    def __init__(self, seed: int, depth: int = 4, hole: int | None = None) -> None:
        self.seed, self.depth, self.hole = seed, depth, hole
        self.passes = 0
        self.rows: dict[tuple[int, ...], np.ndarray] = {}
        self.paths: list[tuple[int, ...]] = []

    def row(self, path: tuple[int, ...]) -> np.ndarray:
        if path not in self.rows:
            self.rows[path] = self.make(path)
        return self.rows[path]

    def make(self, path: tuple[int, ...]) -> np.ndarray:
        out = np.random.default_rng([self.seed, *path, len(path)]).normal(0, 2, V)
        if self.hole is not None:
            out[self.hole] = -np.inf
        return out.astype(np.float32)

    def root(self) -> np.ndarray:
        self.paths = [()]
        return self.row(())[None]

    def expand(self, origin: list[int], tokens: list[int]) -> np.ndarray:
        assert 0 < len(tokens) <= self.most_nodes
        self.passes += 1
        self.paths = [(*self.paths[o], t) for o, t in zip(origin, tokens, strict=True)]
        assert len(self.paths[0]) < self.depth
        return np.stack([self.row(path) for path in self.paths])


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


def path_tokens(tree: DraftTree, node: int) -> tuple[int, ...]:
    return tuple(int(tree.token[i]) for i in tree.path(node))


@pytest.mark.parametrize(("budget", "depth"), [(1, 4), (6, 3), (20, 4), (60, 3)])
def test_best_nodes_of_all_paths(budget: int, depth: int) -> None:
    table = Table(3, depth)
    table.most_nodes = 200
    tree = grow_tree(table, budget=budget, children=V, frontier=200)
    tree.validate()
    scores = {}
    for n in range(1, depth + 1):
        for path in itertools.product(range(V), repeat=n):
            scores[path] = sum(log_softmax(table.row(path[:i]))[t] for i, t in enumerate(path))
    best = sorted(scores, key=lambda p: -scores[p])[:budget]
    assert {path_tokens(tree, i) for i in range(len(tree))} == set(best)
    for i in range(len(tree)):
        assert abs(tree.score[i] - scores[path_tokens(tree, i)]) < 1e-4


def test_chain_is_greedy_and_costs_one_pass_a_level() -> None:
    table = Table(5)
    tree = grow_tree(table, budget=4, children=1, frontier=1)
    path: tuple[int, ...] = ()
    for _ in range(4):
        path = (*path, int(table.row(path).argmax()))
    assert path_tokens(tree, 3) == path
    assert table.passes == 3


def test_hopeless_nodes_are_not_expanded() -> None:
    table = Table(1, depth=4)
    grow_tree(table, budget=2, children=2, frontier=8)
    assert table.passes <= 1


def test_tokens_the_drafter_does_not_know_are_never_drafted() -> None:
    tree = grow_tree(Table(2, hole=1), budget=30, children=V, frontier=8)
    assert 1 not in tree.token.tolist() and len(tree) == 28  # 4 + 3 * 8
    drawn = draw(Table(2, hole=1), np.random.default_rng(0), budget=12)
    assert 1 not in drawn.token.tolist() and len(drawn)


def test_calibration_sees_log_probabilities_of_its_depth() -> None:
    seen = []

    def calibrate(depth: int, log_pi: np.ndarray) -> np.ndarray:
        seen.append(depth)
        return np.float32(2.0) * log_pi

    table = Table(7)
    plain = grow_tree(table, budget=4, children=1, frontier=1)
    double = grow_tree(table, budget=4, children=1, frontier=1, calibrate=calibrate)
    assert np.allclose(double.score, 2 * plain.score, atol=1e-4) and seen == [0, 1, 2, 3]


def draw(table: Table, rng: np.random.Generator, budget: int = 6, branch: tuple[int, ...] = ()):
    return draw_tree(
        table,
        rng=rng,
        draft_distribution=lambda row: np.exp(log_softmax(row)),
        budget=budget,
        width=2,
        most_leaves=6,
        branch=branch,
        branch_odds=[0.5] * len(branch),
    )


@pytest.mark.parametrize("branch", [(), (2, 3, 0, 1, 4)])
def test_rejection_sampling_over_drawn_trees_is_exact(branch: tuple[int, ...]) -> None:
    table = Table(11, depth=3)
    target = Table(12, depth=9)
    rng = np.random.default_rng(0)
    first: Counter[tuple[int, ...]] = Counter()
    n = 6000
    for _ in range(n):
        tree = draw(table, rng, branch=branch)
        tree.validate()
        assert len(tree) <= 6 and len(tree.leaves) <= 6
        if branch:
            assert path_tokens(tree, tree.children[ROOT][0]) == branch[:1]

        def distribution(row: int, path: object, tree: DraftTree = tree) -> np.ndarray:
            node = row - 1
            tokens = () if node < 0 else path_tokens(tree, node)
            return np.exp(log_softmax(target.row(tokens)))

        outcome = accept_rejection(tree, distribution, rng)
        text = [int(tree.token[i]) for i in outcome.path] + [outcome.bonus]
        while len(text) < 2:  # go on plainly
            text.append(int(rng.choice(V, p=np.exp(log_softmax(target.row(tuple(text)))))))
        first[tuple(text[:2])] += 1
    for path in itertools.product(range(V), repeat=2):
        p = np.exp(
            log_softmax(target.row(()))[path[0]] + log_softmax(target.row(path[:1]))[path[1]]
        )
        assert abs(first[path] / n - p) < 4.5 * np.sqrt(p * (1 - p) / n) + 1e-3
