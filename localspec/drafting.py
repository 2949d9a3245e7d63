"""The draft of each round: drafter, repeats in the text and policy put together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localspec.drafter import Drafter
from localspec.errors import LocalspecError
from localspec.heads import Heads
from localspec.policy import AutoPolicy, ContextOdds
from localspec.sampled import sample_tree
from localspec.sampling import Sampler
from localspec.suffix import SuffixIndex
from localspec.target import Target
from localspec.tree import Block, DraftTree, build_tree, merge_branch

MAX_NODES = 64
MAX_LEAVES = 32
# Recurrent states can forget this many tokens; every one costs a copy of the state.
MAX_ROLLBACK = 16
# Shorter repeats than this are chance.
MIN_MATCH = 2


@dataclass(frozen=True)
class DraftOptions:
    """How much to draft.

    Attributes:
        policy: "fixed": every round verifies `tokens` nodes. "auto": the policy decides every
            round, from the costs of this machine and the odds in this text; `tokens` is the most
            it may choose.
        tokens: N, nodes given to the target; 0 is plain decoding.
        width: children per node; 1 is a chain.
        frontier: nodes per level that get children (trees only).
        context: also draft what followed the last time the text went like this; works without
            a drafter too.

    Raises:
        LocalspecError: a value is out of range.
    """

    policy: str = "fixed"
    tokens: int = 7
    width: int = 1
    frontier: int = 12
    context: bool = False

    def __post_init__(self) -> None:
        if self.policy not in ("fixed", "auto"):
            raise LocalspecError(f"draft policy {self.policy!r} is unknown; use 'auto' or 'fixed'")
        if not 0 <= self.tokens <= MAX_NODES:
            raise LocalspecError(f"draft tokens must be 0..{MAX_NODES}, not {self.tokens}")
        if not 1 <= self.width <= MAX_LEAVES:
            raise LocalspecError(f"draft width must be 1..{MAX_LEAVES}, not {self.width}")
        if self.frontier < 1:
            raise LocalspecError(f"draft frontier must be at least 1, not {self.frontier}")

    @classmethod
    def auto(cls) -> DraftOptions:
        """The policy decides everything: how much, which shape, from where, or not at all."""
        return cls(policy="auto", tokens=MAX_NODES - 1, width=4, context=True)


@dataclass(frozen=True)
class Draft:
    """The draft of one round.

    Attributes:
        tree: what goes to the target.
        drafted: nodes there were to choose from.
        seconds: the drafter's time in llama.cpp.
    """

    tree: DraftTree
    drafted: int
    seconds: float


class Drafting:
    """Makes the drafts of one generation and learns from what became of them.

    Args:
        target: for its limits and position.
        drafter: None without one.
        options: the user's.
        sampler: the generation's.
        prompt: its prompt.
        auto: the engine's policy when `options.policy` is "auto", else None.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        options: DraftOptions,
        sampler: Sampler,
        prompt: Sequence[int],
        auto: AutoPolicy | None,
    ) -> None:
        self._target, self._drafter, self._sampler = target, drafter, sampler
        self._options = options
        self._heads = drafter.heads if drafter is not None else Heads("none")
        self._auto = auto
        self._odds = auto.context if auto is not None else ContextOdds()
        self._index = SuffixIndex(prompt) if options.context and options.tokens else None
        self._chains_only = target.context.model.recurrent
        self._width = 1 if self._chains_only else options.width
        self._most = options.tokens
        if self._chains_only:
            self._most = min(self._most, target.context.rollback)
        self._branch: list[int] = []
        self._match = 0
        self._drafter_tree = DraftTree.empty()

    def commit(self, tokens: Sequence[int]) -> None:
        """Tell what the text goes on with."""
        if self._index is not None:
            self._index.extend(tokens)

    def draft(self, anchor: int, *, room: int, left: int) -> Draft:
        """The draft of the next round.

        Args:
            anchor: the last chosen token.
            room: cells left in the KV cache beside the anchor's.
            left: tokens left to generate; deeper nodes would be wasted.
        """
        nodes = min(self._most, room)
        depth = min(nodes, left - 1)
        self._branch, self._match, self._drafter_tree = [], 0, DraftTree.empty()
        if depth <= 0:
            return Draft(DraftTree.empty(), 0, 0.0)
        odds: list[float] = []
        if self._index is not None:
            match = self._index.match(depth)
            if match.length >= MIN_MATCH:
                self._branch, self._match = match.tokens, match.length
                odds = self._odds.odds(match.length, len(match.tokens))
        # Where only a chain can be verified, a repeat goes before the drafter.
        ask = self._drafter is not None and not (self._chains_only and self._branch)
        if self._auto is not None:
            ask = ask and self._auto.pacing.ask()
        block, seconds = self._block(anchor, depth) if ask else (None, 0.0)
        if block is None and not self._branch:
            return Draft(DraftTree.empty(), 0, seconds)
        rejects = self._sampler.params.rejects
        if self._auto is None and rejects:
            tree = self._drawn(block, nodes, odds)
            return Draft(tree, len(tree), seconds)
        tree = self._likeliest(block, nodes, odds)
        drafted = len(tree)
        if self._auto is not None:
            tree = self._auto.choose(tree, self._target.n_past, drafted=block is not None)
            if rejects:
                # How many nodes to draw is decided on the drafter's distribution alone, before
                # anything is drawn: no peeking.
                tree = self._drawn(block, len(tree), odds)
        return Draft(tree.prune_leaves(self._target.max_leaves), drafted, seconds)

    def _likeliest(self, block: Block | None, nodes: int, odds: Sequence[float]) -> DraftTree:
        """The best nodes of drafter and context together; does not depend on chance."""
        tree = DraftTree.empty()
        if block is not None:
            tree = build_tree(
                block,
                self._heads,
                budget=nodes,
                children=self._width,
                frontier=1 if self._width == 1 else self._options.frontier,
                calibrate=None if self._auto is None else self._auto.survival.log_odds,
            )
            self._drafter_tree = tree
        if self._branch:
            tree = merge_branch(tree, self._branch, np.cumsum(np.log(odds)).tolist()).best(nodes)
        return tree

    def _drawn(self, block: Block | None, nodes: int, odds: Sequence[float]) -> DraftTree:
        """Nodes drawn from the drafter, for rejection sampling."""
        if nodes == 0:
            return DraftTree.empty()
        return sample_tree(
            block,
            self._heads,
            rng=self._sampler.draft_rng,
            draft_distribution=self._sampler.draft_distribution,
            budget=nodes,
            width=self._width,
            most_leaves=self._target.max_leaves,
            branch=self._branch,
            branch_odds=odds,
        )

    def _block(self, anchor: int, depth: int) -> tuple[Block, float]:
        assert self._drafter is not None
        started = time.perf_counter()
        block = self._drafter.propose(anchor, depth)
        return block, time.perf_counter() - started

    def learn(self, draft: Draft, committed: Sequence[int], verify_seconds: float) -> None:
        """Take in what a round came to.

        Args:
            draft: its draft.
            committed: accepted tokens and the bonus.
            verify_seconds: the target's pass.
        """
        if self._auto is None:
            return
        size = len(draft.tree) + 1
        self._auto.last_size = size
        # The pass began before what it committed (the anchor takes the bonus token's place).
        depth = self._target.n_past - len(committed)
        self._auto.curve.observe(size, depth, verify_seconds)
        self._auto.learn_draft(self._drafter_tree, committed)
        self._auto.learn_branch(self._match, self._branch, committed)
