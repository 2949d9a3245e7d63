"""How much to verify: costs measured on this machine against odds learned from this text.

Pure arithmetic on numbers that others measure; no model and no clock in here.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from localspec.calibration import Calibration
from localspec.tree import ROOT, DraftTree

Floats = npt.NDArray[np.float64]

# Sizes of the target's passes that are measured: every size where kernels are known to change
# (8 | 9 on CUDA, Metal and Vulkan, 16 | 17 and 32 | 33 for tensor-core tiles) has both its sides.
SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64)


# A repeat in the text must be worth this factor before it is verified: odds and costs are
# estimates, and being slower than plain decoding is worse than missing some gain.
MARGIN = 1.1
# What the outlook of a branch may have missed since it was worked out.
_STALE = 0.05
# Drafted rounds must be faster per token than plain ones by this factor, or drafting pauses.
PAYS = 1.05
# What an accepted token is worth: this share of it by the round's own speed, the rest by the
# running mean. The mean alone would be right if rounds were alike; hard stretches of text are not.
# Chosen with benchmarks/simulate.py.
OWN_SHARE = 0.4
# Costs change slowly with the context: one curve serves this many tokens of depth.
_DEPTH_STEP = 32


class CostCurve:
    """T(n): the time of one target pass over n tokens, at any context depth.

    Between measured sizes and depths it interpolates linearly; it is never assumed to be smooth
    or rising. While generating, `observe` follows the machine: a busy machine slows everything
    alike, which changes no decision, so that common factor is tracked apart and only what a size
    does differently moves its own entry.

    Args:
        sizes: [M] rising pass sizes n, the first 1.
        depths: [K] rising context depths in tokens.
        seconds: [K, M] seconds per pass.
    """

    def __init__(self, sizes: Sequence[int], depths: Sequence[int], seconds: Floats) -> None:
        self.sizes = np.asarray(sizes, np.int64)
        self.depths = np.asarray(depths, np.int64)
        self.seconds = np.asarray(seconds, np.float64)
        self._every = np.arange(1, int(self.sizes[-1]) + 1)
        self._factor = np.ones(len(self._every))
        self._load = 1.0
        self._known: dict[int, Floats] = {}

    @property
    def load(self) -> float:
        """How much longer passes take now than when they were measured, whatever their size."""
        return self._load

    @property
    def largest(self) -> int:
        """The largest pass the curve knows."""
        return int(self.sizes[-1])

    def at(self, depth: int) -> Floats:
        """[largest] seconds of passes of 1, 2, 3, ... tokens at a context depth."""
        out: Floats = self._at_step(depth) * self._factor
        return out

    def _at_step(self, depth: int) -> Floats:
        """As it was measured, before anything was observed."""
        step = depth // _DEPTH_STEP
        if step not in self._known:
            self._known[step] = self._measured(step * _DEPTH_STEP)
        return self._known[step]

    def _measured(self, depth: int) -> Floats:
        rows = np.array([np.interp(self._every, self.sizes, row) for row in self.seconds])
        if len(rows) == 1:
            only: Floats = rows[0]
            return only
        weight = float(np.interp(depth, self.depths, np.arange(len(rows))))
        # Beyond the last measured depth the slope goes on: attention only gets longer.
        if depth > self.depths[-1]:
            span = self.depths[-1] - self.depths[-2]
            weight += float((depth - self.depths[-1]) / span)
        low = min(int(weight), len(rows) - 2)
        out: Floats = np.maximum(rows[low] + (weight - low) * (rows[low + 1] - rows[low]), 1e-9)
        return out

    def observe(self, size: int, depth: int, seconds: float) -> None:
        """Learn from a real pass. One outlier moves an entry by half a percent at most."""
        if not 1 <= size <= self.largest or seconds <= 0:
            return
        expected = float(self._at_step(depth)[size - 1]) * float(self._factor[size - 1])
        ratio = seconds / expected
        self._load *= _bounded(ratio / self._load, 0.8, 1.25) ** 0.3
        own = _bounded(ratio / self._load, 0.8, 1.25) ** 0.02
        self._factor[size - 1] = _bounded(float(self._factor[size - 1]) * own, 0.25, 4.0)


def _bounded(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)  # numpy's clip costs more than everything around it


class Survival:
    """Odds that a drafted token is right, given that its parent is.

    The drafter's own probability p of the token and what its confidence head says of the parent,
    corrected per depth: logit a = b_d + w_d logit p + g_d [likeliest child] + v_d (logit c - m_d),
    with the weights of a calibration or, without one, what is usual. The offsets are learned while
    generating (online logistic regression) and drift back slowly, so that a bad drafter or an
    unusual text is noticed within tens of tokens.

    Args:
        depths: draft depths.
        slope: w.
        offsets: [depths] b_d to start from and to drift back to.
        calibration: the weights of every depth, instead of the two.
    """

    RATE, MEMORY = 0.1, 0.998
    # Drafters are overconfident; fits on three pairs gave slopes of 0.77 to 0.9 and offsets of
    # -0.1 to -0.4 at most depths.
    SLOPE, OFFSET = 0.85, -0.2

    def __init__(
        self,
        depths: int,
        slope: float = SLOPE,
        offsets: Sequence[float] | None = None,
        *,
        calibration: Calibration | None = None,
    ) -> None:
        self.start = np.full(depths, self.OFFSET)
        self.slopes = np.full(depths, slope)
        self.first, self.weights, self.means = np.zeros((3, depths))
        if calibration is not None:
            offsets, self.slopes = calibration.offsets, np.array(calibration.slopes)
            self.first = np.array(calibration.first)
            self.weights = np.array(calibration.confidence)
            self.means = np.array(calibration.confidence_mean)
        if offsets is not None:
            self.start = np.asarray(offsets, np.float64).copy()
        self.offsets = self.start.copy()

    @property
    def asks_confidence(self) -> bool:
        """Whether the confidence head's answers change anything."""
        return bool(self.weights.any())

    def log_odds(
        self,
        depth: int,
        log_p: npt.NDArray[np.float32],
        confidence: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """log a of tokens at one depth (0-based).

        Args:
            depth: from 0.
            log_p: their log p under the drafter; [P, k] are the k likeliest children of P parents
                in falling order.
            confidence: logit c at their parents, of a shape that fits; its mean when left out.
        """
        d = min(depth, len(self.offsets) - 1)
        p = np.clip(np.exp(log_p), 1e-6, 1 - 1e-6)
        z = self.offsets[d] + self.slopes[d] * np.log(p / (1 - p))
        if z.ndim == 2:
            z[:, 0] += self.first[d]
        if confidence is not None:
            z = z + self.weights[d] * (confidence - self.means[d])
        out: npt.NDArray[np.float32] = -np.logaddexp(0.0, -z).astype(np.float32)
        return out

    def observe(self, depth: int, odds: float, right: bool) -> None:
        """A token with estimated odds at one depth (0-based) came out right or wrong."""
        d = min(depth, len(self.offsets) - 1)
        self.offsets[d] += self.RATE * (float(right) - odds)
        self.offsets[d] = self.start[d] + self.MEMORY * (self.offsets[d] - self.start[d])


class ContextOdds:
    """Odds that the token after a repeat of some length is the one that followed the last time.

    Counts per class of match length with a prior of length / (length + 1.5), forgetting slowly.
    """

    EDGES = (2, 3, 4, 6, 9, 17, 33)
    PRIOR, MEMORY = 4.0, 0.98
    LONGEST = 128  # longer matches are as sure as this one
    # Rounds that an outlook may be old.
    FRESH = 16

    def __init__(self) -> None:
        self._right = [0.0] * (len(self.EDGES) + 1)
        self._seen = [0.0] * (len(self.EDGES) + 1)
        lengths = np.arange(self.LONGEST)
        self._expected = lengths / (lengths + 1.5)
        self._class = np.searchsorted(self.EDGES, lengths, side="right")
        self._outlook: list[float] = []
        self._age = 0

    def table(self) -> Floats:
        """[LONGEST] odds of the token after a match of 0, 1, 2, ... tokens."""
        right, seen = np.array(self._right)[self._class], np.array(self._seen)[self._class]
        odds = (right + self.PRIOR * self._expected) / (seen + self.PRIOR)
        out: Floats = np.clip(odds, 0.01, 0.999)
        return out

    def odds(self, length: int, count: int) -> Floats:
        """[count] odds of tokens in a row after a match; each that comes true lengthens it."""
        return self._runs(self.table(), length, count)

    def _runs(self, table: Floats, lengths: int | npt.NDArray[np.integer], count: int) -> Floats:
        at = np.add.outer(lengths, np.arange(count))
        out: Floats = table[np.minimum(at, self.LONGEST - 1)]
        return out

    def outlook(self, length: int, cost: Callable[[], Floats]) -> float:
        """How much faster than plain decoding a branch after a match of some length can be.

        Most repeats are not worth verifying, and every round asks; so the answers for all lengths
        are worked out at once and serve for `FRESH` rounds.

        Args:
            length: of the match.
            cost: gives [M] seconds of target passes of 1, 2, ... tokens.
        """
        self._age -= 1
        if self._age < 0:
            self._age = self.FRESH
            seconds = cost()
            lengths = np.arange(self.LONGEST)
            survival = self._runs(self.table(), lengths, len(seconds) - 1).cumprod(axis=1)
            rate = (1 + survival.cumsum(axis=1)) * seconds[0] / seconds[1:]
            self._outlook = rate.max(axis=1, initial=0.0).tolist()
        return self._outlook[min(length, self.LONGEST - 1)]

    def observe(self, length: int, right: bool) -> None:
        """The token after a match of some length came out right or wrong."""
        at = bisect.bisect_right(self.EDGES, length)
        self._right[at] = self.MEMORY * self._right[at] + right
        self._seen[at] = self.MEMORY * self._seen[at] + 1


class RankOdds:
    """Corrects survival by rank: the sum over the best n nodes is what a size is chosen by.

    Odds that are right node by node can still be wrong where it matters: the deep nodes of a
    confident tree come true less often than they say, the first nodes of a doubtful one more
    often. Per class of ranks, what was predicted is compared with what came true.
    """

    EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    PRIOR, MEMORY = 2.0, 0.99

    def __init__(self) -> None:
        self._predicted = np.zeros(len(self.EDGES) + 1)
        self._right = np.zeros(len(self.EDGES) + 1)

    def correct(self, survival: Floats) -> Floats:
        """[N] falling survival of the nodes of a tree, corrected."""
        ratio = (self._right + self.PRIOR) / (self._predicted + self.PRIOR)
        at = np.searchsorted(self.EDGES, np.arange(len(survival)), side="right")
        out: Floats = np.minimum(survival * ratio[at], 1.0)
        return out

    def observe(self, tree: DraftTree, committed: Sequence[int]) -> None:
        """Compare a tree, scored with uncorrected log survival, with the text that followed.

        Nodes beyond what was committed are left out, unless the path to them is already wrong.
        """
        token, parent, depth = tree.token.tolist(), tree.parent.tolist(), tree.depth.tolist()
        known, right = [False] * len(tree), [False] * len(tree)
        for i, above in enumerate(parent):
            if above == ROOT or right[above]:
                known[i] = depth[i] <= len(committed)
                right[i] = known[i] and token[i] == committed[depth[i] - 1]
            else:
                known[i] = known[above]
        order = np.argsort(-tree.score, kind="stable")
        at = np.searchsorted(self.EDGES, np.arange(len(tree)), side="right")
        predicted = np.exp(tree.score[order].astype(np.float64)) * np.array(known, bool)[order]
        n = len(self.EDGES) + 1
        self._predicted = self.MEMORY * self._predicted + np.bincount(at, predicted, n)
        self._right = self.MEMORY * self._right + np.bincount(
            at, np.array(right, np.float64)[order], n
        )


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


@dataclass
class Pacing:
    """Whether the drafter is worth asking, and when to ask again if it is not.

    Attributes:
        tokens: running mean of tokens committed per drafted round.
        seconds: running mean of such a round's expected time.
        plain: running mean of a plain round's expected time.
        wait: plain rounds until the next probe.
        pause: how long the last pause was.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    plain: float = 0.0
    wait: int = 0
    pause: int = 0
    MEMORY: float = field(default=0.9, repr=False)
    # Pauses grow up to this many times the one that makes probing cost 1%, where not even one
    # drafted node has been worth verifying.
    RARER: float = field(default=3.0, repr=False)

    @property
    def pays(self) -> bool:
        """Whether drafted rounds have been faster per token than plain ones."""
        return self.seconds == 0 or self.tokens * self.plain >= PAYS * self.seconds

    def ask(self) -> bool:
        """Whether to draft this round; counts a plain round when not."""
        if self.pays or self.wait <= 0:
            return True
        self.wait -= 1
        return False

    def observe(self, tokens: float, seconds: float, plain: float, probe: float) -> None:
        """A drafted round was chosen.

        Args:
            tokens: tokens it is expected to commit (surer than what one round happens to).
            seconds: the round's expected time (from the curve, so that noise does not count).
            plain: a plain round's expected time.
            probe: what a drafted round costs more than a plain one when nothing is accepted.
        """
        keep = self.MEMORY if self.seconds else 0.0
        if not self.pays and tokens * plain >= PAYS * seconds:
            keep = 0.0  # a probe that pays: the text has changed, what was before is no guide
        self.tokens = keep * self.tokens + (1 - keep) * tokens
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.plain = keep * self.plain + (1 - keep) * plain
        if self.pays:
            self.pause = 0
            return
        # Probing must stay below 1% of the time, and gets rarer while it keeps failing; the closer
        # it is to paying the less so, for then a text need not change much to be worth it.
        shortest = int(np.ceil(100 * probe / max(plain, 1e-9)))
        worth = self.tokens * self.plain / (PAYS * self.seconds)
        nothing = plain / (PAYS * (plain + probe))  # a round that verifies no node
        gap = _bounded((1 - worth) / (1 - nothing), 0.0, 1.0)
        longest = int((1 + (self.RARER - 1) * gap**2) * shortest)
        self.pause = min(max(shortest, 2 * self.pause), longest)
        self.wait = self.pause


class AutoPolicy:
    """What the policy knows about one engine: costs, odds, and whether the drafter pays.

    Args:
        curve: the target's costs.
        block_seconds: one drafter pass; 0 without a drafter.
        host_seconds: what growing a tree in Python adds to a drafted round.
        switch_seconds: what a pass costs more when the one before had another size.
        depths: draft depths of the drafter.
        calibration: the drafter's, if it has one.
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
    ) -> None:
        self.curve, self.block_seconds, self.host_seconds = curve, block_seconds, host_seconds
        self._block_measured, self._block_factor = block_seconds, 1.0
        self.switch_seconds, self.last_size = switch_seconds, 1
        self._probe_seconds = 0.0
        self.survival = Survival(max(1, depths), calibration=calibration)
        self.context = ContextOdds()
        self.ranks = RankOdds()
        self._offered = DraftTree.empty()  # what the last drafted round chose from
        self.pacing = Pacing()

    def observe_block(self, seconds: float) -> None:
        """Learn from a real drafter pass, beside the load that the target's passes show.

        On a busy core a pass of many small steps suffers more than the target's; probes must then
        get rarer. They are rare anyway, so each one counts; it moves the estimate by up to 1.4.
        """
        if self._block_measured > 0 and seconds > 0:
            ratio = seconds / (self._block_measured * self.curve.load)
            self._block_factor *= _bounded(ratio / self._block_factor, 0.5, 2.0) ** 0.5
            self.block_seconds = self._block_measured * _bounded(self._block_factor, 0.5, 16.0)

    def observe_probe(self, seconds: float) -> None:
        """Learn what a draft takes after a pause: the features of all that was said meanwhile go
        in, and nothing of it is in a CPU's caches."""
        keep = 0.5 if self._probe_seconds else 0.0
        self._probe_seconds = keep * self._probe_seconds + (1 - keep) * seconds

    def choose(self, tree: DraftTree, context_depth: int) -> DraftTree:
        """The best part of a tree whose scores are log survival; possibly nothing.

        Args:
            tree: everything that could be verified, of a round that asked the drafter.
            context_depth: committed tokens.
        """
        cost, plain = self._costs(context_depth)
        fixed = self.host_seconds + self.block_seconds
        survival = np.exp(np.sort(tree.score.astype(np.float64))[::-1])
        pacing = self.pacing
        usual = max(pacing.tokens / pacing.seconds if pacing.seconds else 0.0, 1 / plain)
        n, rate = best_size(self.ranks.correct(survival), cost, fixed, usual)
        seconds = fixed + float(cost[n])
        probe = max(fixed, self._probe_seconds) + 2 * self.switch_seconds
        pacing.observe(rate * seconds, seconds, plain, probe)
        self._offered = tree
        return tree.best(n)

    def choose_branch(self, odds: Floats, context_depth: int) -> int:
        """How many tokens of a branch from the context to verify, where that is all there is.

        Args:
            odds: [N] of its tokens, each given the one before.
            context_depth: committed tokens.
        """
        cost, plain = self._costs(context_depth)
        survival = np.asarray(np.cumprod(odds), np.float64)
        n, rate = best_size(survival, cost, 0.0)
        return n if rate * plain >= MARGIN else 0

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
