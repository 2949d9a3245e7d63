"""The draft of each round: drafter, repeats in the text and policy put together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from localspec.calibration import Floats
from localspec.constraint import prefix
from localspec.drafter import Drafter
from localspec.eagle import EagleDrafter, EagleRollout
from localspec.errors import LocalspecError
from localspec.heads import Heads
from localspec.odds import ContextOdds
from localspec.policy import AutoPolicy
from localspec.rollout import draw_tree, grow_tree
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
# Kernels change after passes of 8 rows on CUDA, Metal and Vulkan: deterministic trees end there.
DETERMINISTIC_NODES = 7


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
        deterministic: the same prompt, seed and settings give the same tokens in the same rounds
            on the same machine, every time (docs/exactness.md says what that takes).

    Raises:
        LocalspecError: a value is out of range.
    """

    policy: str = "fixed"
    tokens: int = 7
    width: int = 1
    frontier: int = 12
    context: bool = False
    deterministic: bool = False

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
    def auto(cls, *, deterministic: bool = False) -> DraftOptions:
        """The policy decides everything: how much, which shape, from where, or not at all."""
        return cls(
            policy="auto",
            tokens=MAX_NODES - 1,
            width=4,
            context=True,
            deterministic=deterministic,
        )


@dataclass(frozen=True)
class Draft:
    """The draft of one round.

    Attributes:
        tree: what goes to the target.
        drafted: nodes there were to choose from.
        seconds: the drafter's time in llama.cpp.
        paused: the drafter was left alone because it has not been paying.
        probing: it was asked only to see whether it pays again.
        chosen: nodes that the policy, or the user, wanted verified.
    """

    tree: DraftTree
    drafted: int
    seconds: float
    paused: bool = False
    probing: bool = False
    chosen: int = 0


class Drafting:
    """Makes the drafts of one generation and learns from what became of them.

    Args:
        target: for its limits and position.
        drafter: None without one.
        options: the user's.
        sampler: the generation's.
        prompt: its prompt.
        auto: the engine's policy when `options.policy` is "auto", else None.
        pad: give passes of a single row a second one, so that all use one kernel family.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | EagleDrafter | None,
        options: DraftOptions,
        sampler: Sampler,
        prompt: Sequence[int],
        auto: AutoPolicy | None,
        pad: bool = False,
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
        if options.deterministic and auto is not None:
            self._most = min(self._most, DETERMINISTIC_NODES)
        self._pad = pad and self._most > 0
        self._branch: list[int] = []
        self._match = 0
        self._drafter_tree = DraftTree.empty()

    @property
    def threads(self) -> int | None:
        """How many threads the next round should use; None for all of them."""
        return threads_of(self._auto, self._options)

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
        draft = self._draft(anchor, room=room, left=left)
        if self._pad and room > 0 and len(draft.tree) == 0:
            # Any token is a draft; the anchor itself is as good as another.
            return replace(draft, tree=DraftTree.chain([anchor]))
        return draft

    def _draft(self, anchor: int, *, room: int, left: int) -> Draft:
        nodes = min(self._most, room)
        depth = min(nodes, left - 1)
        self._branch, self._match, self._drafter_tree = [], 0, DraftTree.empty()
        if depth <= 0:
            return Draft(DraftTree.empty(), 0, 0.0)
        if self._index is not None:
            match = self._index.match(depth)
            if match.length >= MIN_MATCH:
                self._branch, self._match = match.tokens, match.length
                if self._sampler.state is not None:
                    self._branch = self._branch[: prefix(self._sampler.state, self._branch)]
        # Where only a chain can be verified, a repeat goes before the drafter.
        ask = self._drafter is not None and not (self._chains_only and self._branch)
        paused = probing = False
        if self._auto is not None and ask:
            losing = not self._auto.pacing.pays
            ask = self._auto.pacing.ask()
            paused, probing = not ask, losing and ask
        started = time.perf_counter()
        block, seconds = self._block(anchor, depth) if ask else (None, 0.0)
        if block is None:
            return self._from_context(paused)
        rejects = self._sampler.params.rejects
        odds = self._odds.odds(self._match, len(self._branch))
        if self._auto is None and rejects:
            tree = self._drawn(block, nodes, odds)
            return Draft(tree, len(tree), _seconds(block, seconds), chosen=len(tree))
        tree = self._likeliest(block, nodes, odds)
        drafted = chosen = len(tree)
        if self._auto is not None:
            if probing and not self._options.deterministic:
                self._auto.observe_probe(time.perf_counter() - started)
            tree = self._auto.choose(tree, self._target.n_past, odds)
            chosen = len(tree)
            if rejects:
                # How many nodes to draw is decided on the drafter's distribution alone, before
                # anything is drawn: no peeking.
                tree = self._drawn(block, len(tree), odds)
        return Draft(
            tree.prune_leaves(self._target.max_leaves),
            drafted,
            _seconds(block, seconds),
            paused,
            probing,
            chosen,
        )

    def _from_context(self, paused: bool) -> Draft:
        """The draft where the drafter is not asked: the branch, as far as it is worth it."""
        branch = self._branch
        none = Draft(DraftTree.empty(), len(branch), 0.0, paused)
        depth, n = self._target.n_past, len(branch)
        if not branch or (self._auto is not None and not self._auto.promising(self._match, depth)):
            return none
        odds = self._odds.odds(self._match, n)
        if self._auto is not None:
            n = self._auto.choose_branch(odds, depth)
        if n == 0:
            return none
        if self._sampler.params.rejects:
            tree = self._drawn(None, n, odds)
        else:
            tree = DraftTree.chain(branch[:n], np.cumsum(np.log(odds[:n])))
        return replace(none, tree=tree, chosen=n)

    def _likeliest(self, block: Block | EagleRollout, nodes: int, odds: Floats) -> DraftTree:
        """The best nodes of drafter and context together; does not depend on chance."""
        frontier = 1 if self._width == 1 else self._options.frontier
        calibrate = None if self._auto is None else self._auto.survival.log_odds
        if isinstance(block, EagleRollout):
            tree = grow_tree(
                block,
                budget=nodes,
                children=self._width,
                frontier=frontier,
                calibrate=calibrate,
                state=self._sampler.state,
            )
        else:
            tree = build_tree(
                block,
                self._heads,
                budget=nodes,
                children=self._width,
                frontier=frontier,
                calibrate=calibrate,
                ask_confidence=self._auto is not None and self._auto.survival.asks_confidence,
                state=self._sampler.state,
            )
        self._drafter_tree = tree
        if self._branch:
            tree = merge_branch(tree, self._branch, np.cumsum(np.log(odds)).tolist()).best(nodes)
        return tree

    def _drawn(self, block: Block | EagleRollout | None, nodes: int, odds: Floats) -> DraftTree:
        """Nodes drawn from the drafter, for rejection sampling."""
        if nodes == 0:
            return DraftTree.empty()
        if isinstance(block, EagleRollout):
            return draw_tree(
                block,
                rng=self._sampler.draft_rng,
                draft_distribution=self._sampler.draft_distribution,
                budget=nodes,
                width=self._width,
                most_leaves=self._target.max_leaves,
                branch=self._branch,
                branch_odds=odds,
                state=self._sampler.state,
            )
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
            state=self._sampler.state,
        )

    def _block(self, anchor: int, depth: int) -> tuple[Block | EagleRollout, float]:
        assert self._drafter is not None
        started = time.perf_counter()
        block = self._drafter.propose(anchor, depth)
        if self._auto is not None and not self._options.deterministic:
            self._auto.observe_block(self._drafter.pass_seconds)
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
        if not self._options.deterministic:
            self._auto.observe_pass(size, depth, verify_seconds)
        self._auto.learn_draft(self._drafter_tree, committed)
        self._auto.learn_branch(self._match, self._branch, committed)


def threads_of(auto: AutoPolicy | None, options: DraftOptions) -> int | None:
    """How many threads the policy wants; None for all of them."""
    if auto is None or auto.threads is None or options.deterministic:
        return None
    return auto.threads.count


def _seconds(block: Block | EagleRollout | None, proposal: float) -> float:
    """The drafter's time: that of the proposal, and of the levels that were asked for later."""
    return block.seconds if isinstance(block, EagleRollout) else proposal
