"""How likely drafted tokens are right in this text: estimates that learn from what came true."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from localspec.calibration import Calibration, Floats
from localspec.tree import ROOT, DraftTree


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
