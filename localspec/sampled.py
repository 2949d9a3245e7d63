"""Sampled draft trees, for exact rejection sampling.

Children are drawn from the drafter without replacement. Exactness forbids peeking: whether a node
is in the tree must not depend on its own token. The structure sees to it: `_allocate` decides how
many children each parent gets, knowing only the parents; then they are drawn, and every drawn
node stays (`DraftTree.keep` refuses to cut a sampled tree).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from localspec.heads import Heads
from localspec.topk import shortlist as largest
from localspec.tree import ROOT, SHORTLIST, Block, DraftTree, Proposal

Floats = npt.NDArray[np.float32]
Probs = npt.NDArray[np.float64]

# Where no confidence head says better: how often a first drawn child is accepted, and how much
# less often each further sibling is.
_ACCEPTED = 0.6
_SIBLING = 0.4
# Branch nodes less likely than this do not deserve a reserved place.
_BRANCH_FLOOR = 0.2


def sample_tree(
    block: Block | None,
    heads: Heads,
    *,
    rng: np.random.Generator,
    draft_distribution: Callable[[Floats], Probs],
    budget: int,
    width: int,
    most_leaves: int,
    branch: Sequence[int] = (),
    branch_odds: Sequence[float] = (),
    shortlist: int = SHORTLIST,
) -> DraftTree:
    """Draw a tree from one block.

    Args:
        block: a drafter pass; None without a drafter (then only the branch is drafted).
        heads: the drafter's heads.
        rng: source of the draws.
        draft_distribution: [C] logits of candidate tokens -> [C] probabilities q. Any q is exact;
            the user's own temperature and truncation are accepted most.
        budget: N, nodes in the tree.
        width: most drawn children per parent.
        most_leaves: most leaves.
        branch: a chain from the context, tried first along its path.
        branch_odds: per token of `branch` the estimated odds that it is right, given the ones
            before.
        shortlist: candidate tokens per depth.

    Returns:
        A tree with `proposals`, parents before children, siblings in draw order.
    """
    token: list[int] = []
    parent: list[int] = []
    depth: list[int] = []
    survival: list[float] = []
    proposals: dict[int, Proposal] = {}

    def add(t: int, p: int, d: int, s: float) -> int:
        token.append(t)
        parent.append(p)
        depth.append(d)
        survival.append(s)
        return len(token) - 1

    levels = 0 if block is None else min(block.depth, budget)
    baked = None if block is None or block.baked is None else heads.embed(block.baked)
    # The frontier: nodes of the last level, which of them lies on the branch, states of the head.
    nodes, on_branch = [ROOT], 0
    state = heads.root_state()
    leaves_left = most_leaves - 1
    for d in range(max(levels, min(len(branch), budget))):
        left = budget - len(token)
        if left <= 0 or not nodes:
            break
        has_branch = on_branch >= 0 and d < len(branch)
        alive = np.array([1.0 if u == ROOT else survival[u] for u in nodes])
        grown: list[tuple[int, int]] = []  # (child, frontier index of its parent)
        next_branch = -1
        counts = np.zeros(len(nodes), np.int64)
        q = np.zeros((len(nodes), 0))
        ids = np.zeros(0, np.int64)
        if d < levels:
            assert block is not None
            tokens = np.array([block.anchor if u == ROOT else token[u] for u in nodes])
            hidden = None if block.hidden is None else block.hidden[d]
            latent, state = heads.latent(tokens, hidden, state)
            odds = np.full(len(nodes), _ACCEPTED)
            if heads.has_confidence and hidden is not None:
                odds = heads.confidence(tokens, hidden).astype(np.float64)
            kept = 0
            if has_branch:
                kept = min(left, _worthwhile(alive[on_branch], branch_odds[d:]))
            share = _share(left - kept, levels - d)
            counts = _allocate(
                alive * odds, share, width, leaves_left, on_branch if has_branch else -1
            )
            ids = largest(block.logits[d], shortlist)
            shift = latent if baked is None else latent - baked[d]
            z = block.logits[d, ids] + heads.bias(shift, ids)
            q = np.stack([draft_distribution(row) if n else np.zeros(len(ids))
                          for row, n in zip(z, counts, strict=True)])  # fmt: skip
        else:
            odds = np.zeros(len(nodes))
        for i, u in enumerate(nodes):
            fixed = int(has_branch and i == on_branch)
            probs = q[i]
            chance = alive[i] * odds[i]
            if fixed:
                given = int(branch[d])
                next_branch = len(grown)
                grown.append((add(given, u, d + 1, alive[i] * branch_odds[d]), i))
                chance *= 1 - branch_odds[d]
                probs = np.where(ids == given, 0.0, probs)
                if probs.sum() > 0:
                    probs = probs / probs.sum()
            drawn = _draw(probs, int(counts[i]), rng)
            for j, at in enumerate(drawn):
                grown.append((add(int(ids[at]), u, d + 1, chance * _SIBLING**j), i))
            if fixed or len(drawn):
                proposals[u] = Proposal(fixed, ids, probs)
                leaves_left -= fixed + len(drawn) - 1
        nodes, on_branch = [child for child, _ in grown], next_branch
        if d < levels:
            state = state[[i for _, i in grown]]
    return DraftTree(
        np.array(token, np.int32),
        np.array(parent, np.int32),
        np.array(depth, np.int32),
        np.log(np.maximum(np.array(survival), 1e-30)).astype(np.float32),
        proposals,
    )


def _worthwhile(alive: float, odds: Sequence[float]) -> int:
    """Nodes to reserve for a branch: known from the context alone, so nothing is peeked at."""
    chances = alive * np.cumprod(odds)
    return max(1, int((chances >= _BRANCH_FLOOR).sum()))


def _share(left: int, levels: int) -> int:
    """Nodes for the next of `levels` levels: geometrically fewer the deeper they are."""
    decay = 0.75
    return max(1, round(left * (1 - decay) / (1 - decay**levels))) if left > 0 else 0


def _allocate(
    worth: Probs, share: int, width: int, leaves_left: int, branch_parent: int
) -> npt.NDArray[np.int64]:
    """How many children to draw for each parent, knowing nothing of the children.

    Args:
        worth: [P] estimated probability that a parent's first child is accepted.
        share: children to give away.
        width: most per parent.
        leaves_left: leaves that may still be added; a parent's first child adds none.
        branch_parent: the parent that has a given child already (all its drawn ones add leaves).

    Returns:
        [P] counts.
    """
    counts = np.zeros(len(worth), np.int64)
    value = worth[:, None] * _SIBLING ** np.arange(width)
    for flat in np.argsort(-value, axis=None, kind="stable"):
        if share <= 0:
            break
        i, j = divmod(int(flat), width)
        new_leaf = j > 0 or i == branch_parent
        if counts[i] != j or (new_leaf and leaves_left <= 0):
            continue
        counts[i] += 1
        share -= 1
        leaves_left -= new_leaf
    return counts


def _draw(probs: Probs, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Indices drawn one after another without replacement (Gumbel top-k, in draw order)."""
    possible = np.flatnonzero(probs)
    count = min(count, len(possible))
    if count == 0:
        return np.zeros(0, np.intp)
    keys = np.log(probs[possible]) + rng.gumbel(size=len(possible))
    return possible[np.argsort(-keys, kind="stable")[:count]]
