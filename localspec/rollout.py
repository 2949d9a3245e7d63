"""Draft trees of autoregressive drafters (Eagle3): every level needs a pass of its own.

A DSpark block gives the logits of all depths at once, so its tree is grown afterwards
(`tree.build_tree`). An autoregressive drafter has to be asked level by level, for exactly the
nodes that get children; the rules by which nodes are chosen are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from localspec.constraint import State, forbid
from localspec.sampled import ACCEPTED, Drawn, allocate, constrained, share_of, worthwhile
from localspec.topk import shortlist as largest
from localspec.topk import top_k
from localspec.tree import ROOT, SHORTLIST, DraftTree

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Probs = npt.NDArray[np.float64]


class Rollout(Protocol):
    """An autoregressive drafter after the committed tokens and the anchor."""

    @property
    def depth(self) -> int:
        """Most levels that may be asked for."""
        ...

    @property
    def most_nodes(self) -> int:
        """Most nodes one call of `expand` takes."""
        ...

    def root(self) -> Floats:
        """[1, V] logits of depth 1, right after the anchor; a view until the next call."""
        ...

    def expand(self, origin: Sequence[int], tokens: Sequence[int]) -> Floats:
        """Append drafted tokens, one level deeper than the last call went.

        Args:
            origin: [P] the row of the last call (`root` or `expand`) each token follows.
            tokens: [P].

        Returns:
            [P, V] logits of what follows each token; -inf for tokens that the drafter does not
            know. A view that holds until the next call.
        """
        ...


def grow_tree(
    rollout: Rollout,
    *,
    budget: int,
    children: int,
    frontier: int,
    calibrate: Callable[[int, Floats], Floats] | None = None,
    state: State | None = None,
) -> DraftTree:
    """The best `budget` nodes, found level by level.

    A node gets children only while they could still be among the best: scores fall along a path.

    Args:
        rollout: the drafter.
        budget: N, nodes in the tree.
        children: children per parent.
        frontier: nodes kept per level, those that may become parents.
        calibrate, state: as in `tree.build_tree`.

    Returns:
        A tree of at most `budget` nodes in level order, siblings in falling order of score.
    """
    depths = min(rollout.depth, budget)
    if depths <= 0:
        return DraftTree.empty()
    frontier = min(frontier, budget, rollout.most_nodes)
    logits = rollout.root()
    scores = np.zeros(1, np.float32)
    nodes = np.array([ROOT], np.int32)
    grammar = None if state is None else [state]  # the frontier's states
    levels: list[tuple[Ints, Ints, Floats]] = []
    count = 0
    for d in range(depths):
        ids, log_pi = _likeliest(logits, children, grammar)
        if calibrate is not None:
            known = np.isfinite(log_pi)
            log_pi = np.where(known, calibrate(d, np.where(known, log_pi, -80.0)), -np.inf)
        flat = (scores[:, None] + log_pi).ravel()
        order = np.argsort(-flat, kind="stable")[:frontier]
        order = order[np.isfinite(flat[order])]
        origin = order // ids.shape[1]
        tokens = ids.ravel()[order].astype(np.int32)
        scores = flat[order].astype(np.float32)
        levels.append((tokens, nodes[origin], scores))
        nodes = np.arange(count, count + len(tokens), dtype=np.int32)
        count += len(tokens)
        alive = np.arange(len(tokens))
        if count >= budget:
            every = np.concatenate([level[2] for level in levels])
            alive = np.flatnonzero(scores > np.partition(every, count - budget)[count - budget])
        if d + 1 == depths or not len(alive):
            break
        nodes, scores = nodes[alive], scores[alive]
        if grammar is not None:
            grammar = [grammar[origin[i]].after(int(tokens[i])) for i in alive]
        logits = rollout.expand(origin[alive].tolist(), tokens[alive].tolist())
    tree = DraftTree(
        np.concatenate([level[0] for level in levels]),
        np.concatenate([level[1] for level in levels]),
        np.concatenate([np.full(len(t), d + 1, np.int32) for d, (t, _, _) in enumerate(levels)]),
        np.concatenate([level[2] for level in levels]),
    )
    return tree.best(budget)


def draw_tree(
    rollout: Rollout,
    *,
    rng: np.random.Generator,
    draft_distribution: Callable[[Floats], Probs],
    budget: int,
    width: int,
    most_leaves: int,
    branch: Sequence[int] = (),
    branch_odds: Sequence[float] | npt.NDArray[np.float64] = (),
    shortlist: int = SHORTLIST,
    state: State | None = None,
) -> DraftTree:
    """A tree whose nodes are drawn from the drafter, for exact rejection sampling.

    As `sampled.sample_tree`: how many children a node gets is decided before any is drawn, and
    every drawn node stays. Arguments are the same but for the drafter's.
    """
    drawn = Drawn(min(most_leaves, rollout.most_nodes))
    levels = min(rollout.depth, budget)
    nodes, origin, on_branch = [ROOT], [0], 0
    grammar = None if state is None else {ROOT: state}
    for d in range(max(levels, min(len(branch), budget))):
        left = budget - len(drawn.token)
        if left <= 0 or not nodes:
            break
        has_branch = on_branch >= 0 and d < len(branch)
        alive = drawn.alive(nodes)
        counts = np.zeros(len(nodes), np.int64)
        rows: dict[int, int] = {}  # frontier index -> row of the logits
        logits = np.zeros((0, 0), np.float32)
        if d < levels:
            kept = min(left, worthwhile(alive[on_branch], branch_odds[d:])) if has_branch else 0
            counts = allocate(
                alive * ACCEPTED,
                share_of(left - kept, levels - d),
                width,
                drawn.leaves_left,
                on_branch if has_branch else -1,
            )
            # The branch is followed even where nothing is drawn: deeper nodes may follow it.
            asked = [i for i, n in enumerate(counts) if n or (has_branch and i == on_branch)]
            if d == 0:
                logits = rollout.root()
            elif asked:
                logits = rollout.expand(
                    [origin[i] for i in asked], [drawn.token[nodes[i]] for i in asked]
                )
            rows = {i: row for row, i in enumerate(asked)}
        grown: list[tuple[int, int]] = []  # (child, row of its parent)
        next_branch = -1
        for i, u in enumerate(nodes):
            ids, probs = np.zeros(0, np.int64), np.zeros(0)
            if counts[i]:
                row = logits[rows[i]]
                ids = largest(row, shortlist)
                ids = ids[np.isfinite(row[ids])]
                probs = constrained(
                    row[ids], ids, None if grammar is None else grammar[u], draft_distribution
                )
            given = None
            if has_branch and i == on_branch:
                given, next_branch = (int(branch[d]), branch_odds[d]), len(grown)
            odds = ACCEPTED if d < levels else 0.0
            children = drawn.grow(u, ids, probs, int(counts[i]), odds, rng, given)
            grown += [(child, rows.get(i, -1)) for child in children]
        nodes, origin = [child for child, _ in grown], [row for _, row in grown]
        if grammar is not None:
            grammar = {v: grammar[drawn.parent[v]].after(drawn.token[v]) for v in nodes}
        on_branch = next_branch
    return drawn.tree()


def _likeliest(
    logits: Floats, k: int, states: Sequence[State] | None = None
) -> tuple[npt.NDArray[np.intp], Floats]:
    """([P, k] tokens, [P, k] log probabilities) of the k most likely per row, best first.

    Where the drafter knows fewer than k tokens, or a grammar allows fewer, the rest has the log
    probability -inf.
    """
    k = min(k, logits.shape[1])
    ids = np.zeros((len(logits), k), np.intp)
    log_pi = np.full((len(logits), k), -np.inf, np.float32)
    for i, row in enumerate(logits):
        candidates = largest(row, k)
        candidates = candidates[np.isfinite(row[candidates])]
        at, best = top_k(row[candidates][None], k)
        peak = float(row[candidates].max())
        weights = np.exp(np.subtract(row, np.float32(peak)))
        best = best - np.float32(peak) - np.log(weights.sum())
        if states is not None and not states[i].allows(candidates[at[0]]).all():
            candidates = largest(row, SHORTLIST)
            candidates = candidates[np.isfinite(row[candidates])]
            log_all = (row[candidates] - np.float32(peak) - np.log(weights.sum()))[None]
            at, best = top_k(forbid(log_all, candidates, [states[i]], k), k)
        ids[i, : at.shape[1]] = candidates[at[0]]
        log_pi[i, : at.shape[1]] = best[0]
    return ids, log_pi
