"""How much to verify: costs measured on this machine against odds learned from this text.

Pure arithmetic on numbers that others measure; no model and no clock in here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localspec.calibration import Calibration, Floats
from localspec.cost_curve import CostCurve, bounded
from localspec.odds import ContextOdds, RankOdds, Survival
from localspec.pacing import Pacing
from localspec.thread_choice import ThreadChoice
from localspec.tree import ROOT, DraftTree

# A repeat in the text must be worth this factor before it is verified: odds and costs are
# estimates, and being slower than plain decoding is worse than missing some gain.
MARGIN = 1.1
# What the outlook of a branch may have missed since it was worked out.
_STALE = 0.05
# What an accepted token is worth: this share of it by the round's own speed, the rest by the
# running mean. The mean alone would be right if rounds were alike; hard stretches of text are not.
# Chosen with benchmarks/simulate.py.
OWN_SHARE = 0.4


def best_size(
    survival: Floats, cost: Floats, fixed: float, usual: float | None = None
) -> tuple[int, float]:
    """How many of the best nodes to verify.

    Args:
        survival: [N] falling probabilities that each node is accepted.
        cost: [M] seconds of target passes of 1, 2, ... tokens.
        fixed: seconds of the round that do not depend on the choice (draft, host).
        usual: tokens per second of rounds so far; None where this round stands alone.

    Returns:
        (n, tokens per second of a round of n nodes). Alone, n has the largest
        (1 + sum of the n best) / (fixed + T(n + 1)) over every n from 0; curves are jagged, so
        all of them are looked at. Otherwise n has the largest expected tokens minus what its time
        is worth at a speed between that largest ratio and `usual`.
    """
    n = min(len(survival), len(cost) - 1)
    expected = 1 + np.concatenate([[0.0], np.cumsum(survival[:n])])
    rate = expected / (fixed + cost[: n + 1])
    best = int(rate.argmax())
    if usual is not None:
        speed = OWN_SHARE * float(rate[best]) + (1 - OWN_SHARE) * usual
        best = int((expected - speed * cost[: n + 1]).argmax())
    return best, float(rate[best])


class AutoPolicy:
    """What the policy knows about one engine: costs, odds, and whether the drafter pays.

    Args:
        curve: the target's costs.
        block_seconds: one drafter pass; 0 without a drafter.
        host_seconds: what growing a tree in Python adds to a drafted round.
        switch_seconds: what a pass costs more when the one before had another size.
        depths: draft depths of the drafter.
        calibration: the drafter's, if it has one.
        threads: how many threads the costs were measured with, where that may change; None where
            it may not.
    """

    def __init__(
        self,
        curve: CostCurve,
        *,
        block_seconds: float,
        depths: int,
        host_seconds: float = 0.0,
        switch_seconds: float = 0.0,
        calibration: Calibration | None = None,
        threads: int | None = None,
    ) -> None:
        self.threads = None if threads is None else ThreadChoice(threads)
        self.curve, self.block_seconds, self.host_seconds = curve, block_seconds, host_seconds
        self._block_measured, self._block_factor = block_seconds, 1.0
        self.switch_seconds, self.last_size = switch_seconds, 1
        self._probe_seconds = 0.0
        self.survival = Survival(max(1, depths), calibration=calibration)
        self.context = ContextOdds()
        self.ranks = RankOdds()
        self._offered = DraftTree.empty()  # what the last drafted round chose from
        self.pacing = Pacing()

    def observe_pass(self, size: int, context_depth: int, seconds: float) -> None:
        """Learn from a real pass of the target; may change `threads.count`.

        Args:
            size: its tokens.
            context_depth: committed tokens before it.
            seconds: its time.
        """
        ratio = self.curve.observe(size, context_depth, seconds)
        if self.threads is not None:
            before = self.threads.count
            self.threads.observe(ratio)
            if self.threads.count != before:
                self.curve.on_threads(self.threads.count / self.threads.most)

    def observe_block(self, seconds: float) -> None:
        """Learn from a real drafter pass, beside the load that the target's passes show.

        On a busy core a pass of many small steps suffers more than the target's; probes must then
        get rarer. They are rare anyway, so each one counts; it moves the estimate by up to 1.4.
        """
        if self._block_measured > 0 and seconds > 0:
            ratio = seconds / (self._block_measured * self.curve.load)
            self._block_factor *= bounded(ratio / self._block_factor, 0.5, 2.0) ** 0.5
            self.block_seconds = self._block_measured * bounded(self._block_factor, 0.5, 16.0)

    def observe_probe(self, seconds: float) -> None:
        """Learn what a draft takes after a pause: the features of all that was said meanwhile go
        in, and nothing of it is in a CPU's caches."""
        keep = 0.5 if self._probe_seconds else 0.0
        self._probe_seconds = keep * self._probe_seconds + (1 - keep) * seconds

    def choose(
        self, tree: DraftTree, context_depth: int, branch: Floats | None = None
    ) -> DraftTree:
        """The best part of a tree whose scores are log survival; possibly nothing.

        Args:
            tree: everything that could be verified, of a round that asked the drafter.
            context_depth: committed tokens.
            branch: [N] odds of the repeat in the tree, as for `choose_branch`. The drafter is
                worth only what it adds to that.
        """
        cost, plain = self._costs(context_depth)
        fixed = self.host_seconds + self.block_seconds
        survival = np.exp(np.sort(tree.score.astype(np.float64))[::-1])
        pacing = self.pacing
        usual = max(pacing.tokens / pacing.seconds if pacing.seconds else 0.0, 1 / plain)
        n, rate = best_size(self.ranks.correct(survival), cost, fixed, usual)
        seconds = fixed + float(cost[n])
        probe = max(fixed, self._probe_seconds) + 2 * self.switch_seconds
        repeats = 0.0 if branch is None else self._branch(branch, cost, plain)[1]
        without = plain if repeats == 0 else 1 / repeats
        pacing.observe(rate * seconds, seconds, plain, probe, without)
        self._offered = tree
        return tree.best(n)

    def choose_branch(self, odds: Floats, context_depth: int) -> int:
        """How many tokens of a branch from the context to verify, where that is all there is.

        Args:
            odds: [N] of its tokens, each given the one before.
            context_depth: committed tokens.
        """
        return self._branch(odds, *self._costs(context_depth))[0]

    @staticmethod
    def _branch(odds: Floats, cost: Floats, plain: float) -> tuple[int, float]:
        """How much of a branch to verify alone, and its tokens per second; 0 where not worth it."""
        n, rate = best_size(np.asarray(np.cumprod(odds), np.float64), cost, 0.0)
        return (n, rate) if rate * plain >= MARGIN else (0, 0.0)

    def _costs(self, context_depth: int) -> tuple[Floats, float]:
        """Seconds of the next pass over 1, 2, ... tokens, and of a pass of a plain stretch."""
        cost = self.curve.at(context_depth)
        plain = float(cost[0])
        # Passes of the last size reuse its graph. Leaving plain decoding for one round means to
        # switch twice, there and back.
        switches = np.full(len(cost), 2.0 if self.last_size == 1 else 1.0)
        switches[0] = float(self.last_size != 1)
        if self.last_size <= len(cost):
            switches[self.last_size - 1] = 0.0
        return cost + self.switch_seconds * switches, plain

    def promising(self, length: int, context_depth: int) -> bool:
        """Whether a branch after a match of some length deserves a look by `choose_branch`.

        Args:
            length: of the match.
            context_depth: committed tokens.
        """
        outlook = self.context.outlook(length, lambda: self.curve.at(context_depth))
        return outlook >= MARGIN - _STALE

    def learn_draft(self, tree: DraftTree, committed: Sequence[int]) -> None:
        """Compare a drafter's whole tree with what the target chose, as far as both go."""
        offered, self._offered = self._offered, DraftTree.empty()
        if not len(tree):
            return  # what was offered belongs to an earlier round, which was broken off
        if len(offered):
            self.ranks.observe(offered, committed)
        at = ROOT
        for d, token in enumerate(committed):
            above = 0.0 if at == ROOT else float(tree.score[at])
            following = ROOT
            for child in tree.children.get(at, ()):
                right = int(tree.token[child]) == token
                self.survival.observe(d, float(np.exp(tree.score[child] - above)), right)
                if right:
                    following = child
            if following == ROOT:
                return
            at = following

    def learn_branch(self, length: int, branch: Sequence[int], committed: Sequence[int]) -> None:
        """Compare a branch from the context, after a match of some length, with the text."""
        for i, (guess, token) in enumerate(zip(branch, committed, strict=False)):
            self.context.observe(length + i, guess == token)
            if guess != token:
                return
