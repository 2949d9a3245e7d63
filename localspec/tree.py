"""The draft tree and how it is grown (PCTree).

The chain is the tree of width 1; there is no other draft structure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import numpy.typing as npt

from localspec import constraint
from localspec.calibration import log_odds_of
from localspec.constraint import State
from localspec.errors import LocalspecError
from localspec.heads import Heads
from localspec.topk import shortlist as largest
from localspec.topk import top_k

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

ROOT = -1  # parent of the nodes at depth 1: the anchor
SHORTLIST = 128


@dataclass(frozen=True)
class Block:
    """What one drafter pass gives; index d - 1 belongs to draft depth d.

    Attributes:
        anchor: the last committed token.
        logits: [D, V]; a view that holds until the drafter's next pass.
        hidden: [D, n_embd] final-norm hidden states; None when no head needs them.
        baked: [D] parent tokens whose Markov bias `logits` already holds (llama.cpp adds the
            greedy chain's); None when `logits` are base logits.
    """

    anchor: int
    logits: Floats
    hidden: Floats | None = None
    baked: Ints | None = None

    @property
    def depth(self) -> int:
        """D, the deepest draft position."""
        return len(self.logits)


@dataclass(frozen=True)
class Proposal:
    """How the children of one node were proposed, which rejection sampling has to know.

    Attributes:
        fixed: the first so many children were given, not drawn (point masses).
        ids: [C] tokens that could be drawn for the others.
        probs: [C] float64 their probabilities q, summing to 1; the children were drawn from them
            one after another without replacement. Of no meaning when nothing was drawn.
    """

    fixed: int
    ids: npt.NDArray[np.integer]
    probs: npt.NDArray[np.float64]


@dataclass(frozen=True)
class DraftTree:
    """Drafted nodes; parents come before their children.

    Attributes:
        token: [N] int32.
        parent: [N] int32 node indices; `ROOT` at depth 1.
        depth: [N] int32, 1 for children of the anchor.
        score: [N] float32 log of the estimated probability that the path to the node is right.
        proposals: for trees whose children were drawn: node (or `ROOT`) -> `Proposal`; siblings
            are in draw order. None for trees that do not depend on chance.
    """

    token: Ints
    parent: Ints
    depth: Ints
    score: Floats
    proposals: Mapping[int, Proposal] | None = None

    def __len__(self) -> int:
        return len(self.token)

    @staticmethod
    @cache
    def empty() -> DraftTree:
        """No draft: plain decoding."""
        none = np.zeros(0, np.int32)
        return DraftTree(none, none, none, np.zeros(0, np.float32))

    @staticmethod
    def chain(
        tokens: Sequence[int] | npt.NDArray[np.integer],
        scores: Sequence[float] | npt.NDArray[np.floating] | None = None,
    ) -> DraftTree:
        """A tree of width 1."""
        n = len(tokens)
        return DraftTree(
            np.asarray(tokens, np.int32),
            np.arange(-1, n - 1, dtype=np.int32),
            np.arange(1, n + 1, dtype=np.int32),
            np.zeros(n, np.float32) if scores is None else np.asarray(scores, np.float32),
        )

    def validate(self) -> None:
        """Check the structure.

        Raises:
            LocalspecError: lengths differ, a parent does not come first, a depth is not its
                parent's plus one, or siblings share a token.
        """
        n = len(self.token)
        if not len(self.parent) == len(self.depth) == len(self.score) == n:
            raise LocalspecError("a draft tree needs arrays of one length")
        seen = set()
        for i in range(n):
            p = int(self.parent[i])
            if not ROOT <= p < i:
                raise LocalspecError(f"draft node {i} comes before its parent {p}")
            if self.depth[i] != (1 if p == ROOT else self.depth[p] + 1):
                raise LocalspecError(f"draft node {i} has the wrong depth")
            if (p, int(self.token[i])) in seen:
                raise LocalspecError(f"draft node {i} repeats a sibling's token")
            seen.add((p, int(self.token[i])))

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """Node (or `ROOT`) -> its children in node order."""
        out: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parent.tolist()):
            out.setdefault(parent, []).append(node)
        return out

    @cached_property
    def leaves(self) -> list[int]:
        """Nodes without children, in depth-first order (first children first)."""
        return [n for n in self._depth_first() if n not in self.children]

    def _depth_first(self) -> list[int]:
        out, stack = [], self.children.get(ROOT, [])[::-1]
        while stack:
            node = stack.pop()
            out.append(node)
            stack.extend(self.children.get(node, [])[::-1])
        return out

    def path(self, node: int) -> list[int]:
        """The nodes from depth 1 to `node`."""
        out = []
        while node != ROOT:
            out.append(node)
            node = int(self.parent[node])
        return out[::-1]

    @cached_property
    def sequence_ids(self) -> list[range]:
        """Per node the leaves below it, as a range: leaf i of `leaves` is sequence id i.

        A token attends to the cells that carry its first id, and every node carries the ids of
        all leaves below it, so it sees exactly its ancestors.
        """
        first, last = [0] * len(self), [0] * len(self)
        at = 0
        for node in self._depth_first():
            first[node] = at
            at += node not in self.children
        for i, leaf in enumerate(self.leaves):
            last[leaf] = i + 1
        for node in range(len(self) - 1, -1, -1):
            p = int(self.parent[node])
            if p != ROOT:
                last[p] = max(last[p], last[node])
        return [range(a, b) for a, b in zip(first, last, strict=True)]

    def keep(self, nodes: Sequence[int]) -> DraftTree:
        """The subtree of some nodes (rising order), which must contain their ancestors.

        Raises:
            LocalspecError: the nodes were drawn. Dropping a drawn node for its own sake would be
                peeking: rejection sampling would no longer be exact.
        """
        if self.proposals is not None:
            raise LocalspecError("a sampled draft tree cannot be cut: its nodes are all or none")
        picked = np.asarray(nodes, np.int64)
        new_index = np.full(len(self) + 1, ROOT, np.int32)
        new_index[picked] = np.arange(len(picked), dtype=np.int32)
        return DraftTree(
            self.token[picked],
            new_index[self.parent[picked]],  # index -1 is the extra last entry, ROOT
            self.depth[picked],
            self.score[picked],
        )

    def best(self, n: int) -> DraftTree:
        """The n best nodes.

        Ancestors score at least as high as their descendants and come before them, so a stable
        choice by score is closed under ancestors.
        """
        if n >= len(self):
            return self
        order = np.argsort(-self.score, kind="stable")[:n]
        return self.keep(np.sort(order).tolist())

    def prune_leaves(self, most: int) -> DraftTree:
        """At most `most` leaves: the worst leaves go, and what only led to them."""
        if len(self.leaves) <= most:
            return self
        ranked = sorted(self.leaves, key=lambda leaf: (-float(self.score[leaf]), leaf))
        kept = {node for leaf in ranked[:most] for node in self.path(leaf)}
        return self.keep(sorted(kept))

    def render(self, piece: Callable[[int], str], accepted: Sequence[int] = ()) -> str:
        """The tree as text, a node a line; accepted nodes are marked with a star."""
        lines = []
        for node in self._depth_first():
            mark = "*" if node in accepted else " "
            text = repr(piece(int(self.token[node])))[1:-1]
            indent = "  " * int(self.depth[node] - 1)
            lines.append(f"{mark} {np.exp(self.score[node]):6.3f}  {indent}{text}")
        return "\n".join(lines)


def merge_branch(tree: DraftTree, tokens: Sequence[int], scores: Sequence[float]) -> DraftTree:
    """A tree with a chain from the root added; nodes that exist already are shared.

    Args:
        tree: a tree that was not sampled.
        tokens: the chain.
        scores: its path scores, never rising; a shared node keeps the better of its two.
    """
    children = {
        (int(p), int(t)): i for i, (p, t) in enumerate(zip(tree.parent, tree.token, strict=True))
    }
    score = tree.score.tolist()
    new: list[tuple[int, int, int]] = []
    at = ROOT
    for d, (token, s) in enumerate(zip(tokens, scores, strict=True), 1):
        known = children.get((at, token))
        if known is None:
            new.append((token, at, d))
            score.append(s)
            at = len(score) - 1
        else:
            score[known] = max(score[known], s)
            at = known
    added = np.asarray(new, np.int32).reshape(-1, 3)
    return DraftTree(
        np.concatenate([tree.token, added[:, 0]]),
        np.concatenate([tree.parent, added[:, 1]]),
        np.concatenate([tree.depth, added[:, 2]]),
        np.asarray(score, np.float32),
    )


def build_tree(
    block: Block,
    heads: Heads,
    *,
    budget: int,
    children: int,
    frontier: int,
    confidence: float = 0.0,
    calibrate: Callable[..., Floats] | None = None,
    ask_confidence: bool = False,
    shortlist: int = SHORTLIST,
    state: State | None = None,
) -> DraftTree:
    """Grow a tree from one block: the head is asked once per parent (PCTree).

    Per depth d, for every frontier node u: pi(. | u) = softmax(z_d(u)); its `children` most
    likely tokens are scored by the path sum of log pi, the best `frontier` of the level stay, and
    in the end the best `budget` nodes of all levels.

    Only the `shortlist` most likely tokens of a depth are looked at; the probability of the
    others enters the softmax as a whole, at the bias that `block.logits` hold. With
    shortlist >= V the result is the definition's.

    Args:
        block: logits and hidden states of one drafter pass.
        heads: the drafter's heads.
        budget: N, nodes in the tree.
        children: children per parent.
        frontier: nodes kept per level, those that become parents.
        confidence: weight of the confidence head: `confidence * log c_d(u)` is added to the score
            of every child of u. 0 is PCTree as published.
        calibrate: (depth from 0, log pi [P, k]) -> log odds that a child is right given its
            parent; the scores then sum those. Must be at most 0 and keep the order.
        ask_confidence: give `calibrate` a third argument where there is a confidence head: its
            log odds at the parents, [P, 1].
        shortlist: candidate tokens per depth.
        state: where in a grammar the anchor is; what that forbids is not drafted.

    Returns:
        A tree of at most `budget` nodes in level order, siblings in falling order of score.
    """
    if budget <= 0:
        return DraftTree.empty()
    frontier = min(frontier, budget)
    depths = min(block.depth, budget)  # a tree of N nodes is at most N deep
    in_logits = heads.kind == "none" or (heads.kind == "vanilla" and block.baked is not None)
    plain = calibrate is None and state is None
    if children == frontier == 1 and in_logits and not confidence and plain:
        return _greedy_chain(block.logits[:depths])
    baked = None if block.baked is None else heads.embed(block.baked)

    scratch = np.empty(block.logits.shape[1], np.float32)
    tokens = np.array([block.anchor], np.int32)
    memory = heads.root_state()
    scores = np.zeros(1, np.float32)
    nodes = np.array([ROOT], np.int32)
    grammar = None if state is None else [state]  # the frontier's states
    levels: list[tuple[Ints, Ints, Floats]] = []
    count = 0
    for d in range(depths):
        hidden = None if block.hidden is None else block.hidden[d]
        latent, memory = heads.latent(tokens, hidden, memory)
        shift = latent if baked is None else latent - baked[d]
        candidates = largest(block.logits[d], shortlist)
        own = block.logits[d, candidates]
        z = own + heads.bias(shift, candidates)
        log_pi = z - _log_norm(z, _rest(block.logits[d], own, scratch))
        if confidence and hidden is not None and heads.has_confidence:
            log_pi += confidence * np.log(heads.confidence(tokens, hidden))[:, None]
        if grammar is not None:
            log_pi = constraint.forbid(log_pi, candidates, grammar, children)
        at, best = top_k(log_pi, children)
        if calibrate is not None:
            known = np.isfinite(best)
            best = np.where(known, best, np.float32(-80.0))
            if ask_confidence and hidden is not None and heads.has_confidence:
                asked = log_odds_of(heads.confidence(tokens, hidden))[:, None]
                best = calibrate(d, best, asked)
            else:
                best = calibrate(d, best)
            best = np.where(known, best, np.float32(-np.inf))
        flat = (scores[:, None] + best).ravel()
        order = np.argsort(-flat, kind="stable")[:frontier]
        if grammar is not None:
            order = order[np.isfinite(flat[order])]
        parents = order // at.shape[1]
        tokens = candidates[at.ravel()[order]].astype(np.int32)
        if grammar is not None:
            grammar = [grammar[p].after(int(t)) for p, t in zip(parents, tokens, strict=True)]
        levels.append((tokens, nodes[parents], flat[order]))
        scores, memory = flat[order], memory[parents]
        nodes = np.arange(count, count + len(tokens), dtype=np.int32)
        count += len(tokens)
        if not len(tokens):
            break
        if count >= budget:
            # Scores only fall along a path: nothing deeper can enter the best `budget` any more.
            every = np.concatenate([level[2] for level in levels])
            threshold = float(np.partition(every, count - budget)[count - budget])
            if float(scores.max()) < threshold:
                break
    tree = DraftTree(
        np.concatenate([level[0] for level in levels]),
        np.concatenate([level[1] for level in levels]),
        np.concatenate([np.full(len(t), d + 1, np.int32) for d, (t, _, _) in enumerate(levels)]),
        np.concatenate([level[2] for level in levels]).astype(np.float32),
    )
    return tree.best(budget)


def _greedy_chain(logits: Floats) -> DraftTree:
    """The chain of the most likely tokens, where `logits` [D, V] hold its bias already."""
    tokens = logits.argmax(axis=1)
    top = np.take_along_axis(logits, tokens[:, None], 1)
    weights = np.subtract(logits, top)
    np.exp(weights, out=weights)
    return DraftTree.chain(tokens, np.cumsum(-np.log(weights.sum(axis=1))))


def _rest(row: Floats, own: Floats, scratch: Floats) -> float:
    """Log of the summed exp of the logits outside the shortlist (-inf when there are none).

    Args:
        row: [V] logits of a depth.
        own: [C] those of the shortlist, which holds the largest.
        scratch: [V] work space; fresh arrays of this size cost more than the arithmetic.
    """
    if len(own) == len(row):
        return -np.inf
    peak = own.max()
    np.subtract(row, peak, out=scratch)
    np.exp(scratch, out=scratch)
    rest = float(scratch.sum()) - float(np.exp(own - peak).sum())
    return float(peak) + math.log(rest) if rest > 0 else -np.inf


def _log_norm(z: Floats, rest: float) -> Floats:
    """[P, 1] log of the softmax's denominator: candidates at their z, the rest as it is."""
    # Each parent against its own maximum: the bias of one may lie far above another's.
    top = z.max(axis=1, keepdims=True)
    inside = top + np.log(np.exp(z - top).sum(axis=1, keepdims=True))
    out: Floats = np.logaddexp(inside, np.float32(rest))
    return out
