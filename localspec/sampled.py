"""Sampled draft trees, for exact rejection sampling.

Children are drawn from the drafter without replacement. Exactness forbids peeking: whether a node
is in the tree must not depend on its own token. The structure sees to it: `allocate` decides how
many children each parent gets, knowing only the parents; then they are drawn, and every drawn
node stays (`DraftTree.keep` refuses to cut a sampled tree).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from localspec.constraint import State
from localspec.heads import Heads
from localspec.topk import shortlist as largest
from localspec.tree import ROOT, SHORTLIST, Block, DraftTree, Proposal

Floats = npt.NDArray[np.float32]
Probs = npt.NDArray[np.float64]

# Where no confidence head says better: how often a first drawn child is accepted, and how much
# less often each further sibling is.
ACCEPTED = 0.6
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
    branch_odds: Sequence[float] | npt.NDArray[np.float64] = (),
    shortlist: int = SHORTLIST,
    state: State | None = None,
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
        state: where in a grammar the anchor is. What it forbids leaves q before anything is drawn
            (`branch` must be allowed), so every drawn node is one that can be accepted.

    Returns:
        A tree with `proposals`, parents before children, siblings in draw order.
    """
    drawn = Drawn(most_leaves)
    levels = 0 if block is None else min(block.depth, budget)
    baked = None if block is None or block.baked is None else heads.embed(block.baked)
    # The frontier: nodes of the last level, which of them lies on the branch, states of the head.
    nodes, on_branch = [ROOT], 0
    grammar = None if state is None else [state]
    memory = heads.root_state()
    for d in range(max(levels, min(len(branch), budget))):
        left = budget - len(drawn.token)
        if left <= 0 or not nodes:
            break
        has_branch = on_branch >= 0 and d < len(branch)
        alive = drawn.alive(nodes)
        grown: list[tuple[int, int]] = []  # (child, frontier index of its parent)
        next_branch = -1
        counts = np.zeros(len(nodes), np.int64)
        q = np.zeros((len(nodes), 0))
        ids = np.zeros(0, np.int64)
        if d < levels:
            assert block is not None
            tokens = np.array([block.anchor if u == ROOT else drawn.token[u] for u in nodes])
            hidden = None if block.hidden is None else block.hidden[d]
            latent, memory = heads.latent(tokens, hidden, memory)
            odds = np.full(len(nodes), ACCEPTED)
            if heads.has_confidence and hidden is not None:
                odds = heads.confidence(tokens, hidden).astype(np.float64)
            kept = 0
            if has_branch:
                kept = min(left, worthwhile(alive[on_branch], branch_odds[d:]))
            share = share_of(left - kept, levels - d)
            counts = allocate(
                alive * odds, share, width, drawn.leaves_left, on_branch if has_branch else -1
            )
            ids = largest(block.logits[d], shortlist)
            shift = latent if baked is None else latent - baked[d]
            z = block.logits[d, ids] + heads.bias(shift, ids)
            q = np.stack([
                constrained(z[i], ids, grammar[i] if grammar else None, draft_distribution)
                if n else np.zeros(len(ids))
                for i, n in enumerate(counts)
            ])  # fmt: skip
        else:
            odds = np.zeros(len(nodes))
        for i, u in enumerate(nodes):
            given = None
            if has_branch and i == on_branch:
                given, next_branch = (int(branch[d]), branch_odds[d]), len(grown)
            children = drawn.grow(u, ids, q[i], int(counts[i]), odds[i], rng, given)
            grown += [(child, i) for child in children]
        nodes, on_branch = [child for child, _ in grown], next_branch
        if d < levels:
            memory = memory[[i for _, i in grown]]
        if grammar is not None:
            grammar = [grammar[i].after(drawn.token[child]) for child, i in grown]
    return drawn.tree()


class Drawn:
    """The nodes of a sampled tree so far, in the order they came.

    Args:
        most_leaves: most leaves of the tree.
    """

    def __init__(self, most_leaves: int) -> None:
        self.token: list[int] = []
        self.parent: list[int] = []
        self.leaves_left = most_leaves - 1  # that may still be added
        self._depth: list[int] = []
        self._survival: list[float] = []
        self._proposals: dict[int, Proposal] = {}

    def alive(self, nodes: Sequence[int]) -> Probs:
        """[P] estimated probability that each of some nodes (or `ROOT`) is accepted."""
        return np.array([1.0 if u == ROOT else self._survival[u] for u in nodes])

    def grow(
        self,
        node: int,
        ids: npt.NDArray[np.integer],
        probs: Probs,
        count: int,
        odds: float,
        rng: np.random.Generator,
        given: tuple[int, float] | None = None,
    ) -> list[int]:
        """Add the children of a node: a given one first, then drawn ones.

        Args:
            node: the parent, or `ROOT`.
            ids: [C] tokens to draw from.
            probs: [C] their probabilities q.
            count: children to draw.
            odds: estimated odds that the first drawn child is right.
            rng: source of the draws.
            given: token and odds of a child that the context gives.

        Returns:
            The new nodes.
        """
        alive = 1.0 if node == ROOT else self._survival[node]
        chance = alive * odds
        children = []
        if given is not None:
            token, likely = given
            children.append(self._add(token, node, alive * likely))
            chance *= 1 - likely
            probs = np.where(ids == token, 0.0, probs)
            if probs.sum() > 0:
                probs = probs / probs.sum()
        for j, at in enumerate(_draw(probs, count, rng)):
            children.append(self._add(int(ids[at]), node, chance * _SIBLING**j))
        if children:
            self._proposals[node] = Proposal(int(given is not None), ids, probs)
            self.leaves_left -= len(children) - 1
        return children

    def _add(self, token: int, parent: int, survival: float) -> int:
        self.token.append(token)
        self.parent.append(parent)
        self._depth.append(1 if parent == ROOT else self._depth[parent] + 1)
        self._survival.append(survival)
        return len(self.token) - 1

    def tree(self) -> DraftTree:
        """All of them."""
        return DraftTree(
            np.array(self.token, np.int32),
            np.array(self.parent, np.int32),
            np.array(self._depth, np.int32),
            np.log(np.maximum(np.array(self._survival), 1e-30)).astype(np.float32),
            self._proposals,
        )


def constrained(
    logits: Floats,
    ids: npt.NDArray[np.integer],
    state: State | None,
    draft_distribution: Callable[[Floats], Probs],
) -> Probs:
    """[C] probabilities q of candidates; those that a grammar forbids have none."""
    if state is None:
        return draft_distribution(logits)
    allowed = state.allows(ids)
    if not allowed.any():
        return np.zeros(len(ids))
    return draft_distribution(np.where(allowed, logits, np.float32(-np.inf)))


def worthwhile(alive: float, odds: Sequence[float] | npt.NDArray[np.float64]) -> int:
    """Nodes to reserve for a branch: known from the context alone, so nothing is peeked at."""
    chances = alive * np.cumprod(odds)
    return max(1, int((chances >= _BRANCH_FLOOR).sum()))


def share_of(left: int, levels: int) -> int:
    """Nodes for the next of `levels` levels: geometrically fewer the deeper they are."""
    decay = 0.75
    return max(1, round(left * (1 - decay) / (1 - decay**levels))) if left > 0 else 0


def allocate(
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
