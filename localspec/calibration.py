"""Calibration: from recorded drafts to odds that mean what they say. Pure arithmetic.

A drafted token's odds of being right, given that its parent is, are modelled per depth d as

    logit a = b_d + w_d logit p + g_d [first] + v_d (logit c - m_d)

with p the drafter's probability of the token, [first] 1 for the likeliest child of a parent (greedy
text takes the likeliest token more often than its probability says), c the confidence head's answer
for the parent and m_d its mean log odds. The weights come from a logistic regression per depth.
Then Sequential Temperature Scaling (as in DSpark): from left to right one temperature per depth on
those log odds, chosen on a grid so that the expected calibration error of the product along the
path is least, earlier depths fixed; here for the greedy chain and for all nodes of the tree
together, since the chain alone would ruin the others. Temperatures are folded into the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

BINS = 10
TEMPERATURES = np.exp(np.linspace(np.log(0.5), np.log(2.0), 57))
FOLDS = 5
# Pulls a depth with few observations to what all depths have in common.
_RIDGE = 20.0
# A temperature must lower the error by this much: log loss pays for what it gains.
_GAIN = 0.002
# What a weight of the confidence head must gain in held-out log loss (nats per token) to stay.
_WORTH = 1e-4


def log_odds_of(p: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """log(p / (1 - p)), finite."""
    q = np.clip(np.asarray(p, np.float64), 1e-6, 1 - 1e-6)
    out: npt.NDArray[np.float32] = np.log(q / (1 - q)).astype(np.float32)
    return out


@dataclass(frozen=True)
class Calibration:
    """The weights of every depth.

    Attributes:
        offsets: [D] b_d.
        slopes: [D] w_d, above 0, and
        first: [D] g_d, at least 0: siblings keep their order.
        confidence: [D] v_d; zeros when the confidence head is not used.
        confidence_mean: [D] m_d.
    """

    offsets: tuple[float, ...]
    slopes: tuple[float, ...]
    first: tuple[float, ...]
    confidence: tuple[float, ...]
    confidence_mean: tuple[float, ...]

    @staticmethod
    def identity(depths: int) -> Calibration:
        """The drafter's probabilities as they are."""
        zeros = (0.0,) * depths
        return Calibration(zeros, (1.0,) * depths, zeros, zeros, zeros)

    @property
    def depths(self) -> int:
        """D."""
        return len(self.offsets)

    @property
    def sound(self) -> bool:
        """Whether the numbers can be used."""
        every = (self.offsets, self.slopes, self.first, self.confidence, self.confidence_mean)
        return (
            self.depths > 0
            and all(len(values) == self.depths for values in every)
            and all(math.isfinite(x) and abs(x) <= 50 for values in every for x in values)
            and all(w > 0 for w in self.slopes)
            and all(g >= 0 for g in self.first)
        )

    def tempered(self, temperatures: Sequence[float]) -> Calibration:
        """The same log odds divided by a temperature per depth."""
        b, w, g, v = (
            tuple(x / t for x, t in zip(values, temperatures, strict=True))
            for values in (self.offsets, self.slopes, self.first, self.confidence)
        )
        return Calibration(b, w, g, v, self.confidence_mean)

    def log_odds(self, nodes: Nodes) -> Floats:
        """[M] logit a of recorded nodes."""
        d = np.minimum(nodes.depth, self.depths - 1)
        b, w, g, v, m = (
            np.array(x)[d]
            for x in (self.offsets, self.slopes, self.first, self.confidence, self.confidence_mean)
        )
        out: Floats = b + w * nodes.logit_p + g * nodes.first + v * (nodes.confidence - m)
        return out


@dataclass(frozen=True)
class Nodes:
    """Drafted nodes and what became of them; parents come before their children.

    Attributes:
        parent: [M] index of the parent; -1 for children of the anchor.
        depth: [M] from 0.
        first: [M] whether it is its parent's likeliest child.
        log_p: [M] the drafter's log probability of the node, given its parent.
        confidence: [M] log odds that the confidence head gives at the node's parent.
        right: [M] whether the node and all its ancestors are what the target said.
    """

    parent: npt.NDArray[np.integer]
    depth: npt.NDArray[np.integer]
    first: Bools
    log_p: npt.NDArray[np.floating]
    confidence: npt.NDArray[np.floating]
    right: Bools

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def logit_p(self) -> Floats:
        """[M] log odds of the drafter's own probability."""
        return log_odds_of(np.exp(self.log_p.astype(np.float64))).astype(np.float64)

    @property
    def eligible(self) -> Bools:
        """[M] whether the parent is right: only there a node has odds of its own."""
        out: Bools = (self.parent < 0) | self.right[self.parent]
        return out

    @staticmethod
    def joined(parts: Sequence[Nodes]) -> Nodes:
        """Several recordings as one."""
        if not parts:
            none = np.zeros(0, np.int64)
            return Nodes(none, none, none > 0, np.zeros(0), np.zeros(0), none > 0)
        starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        return Nodes(
            np.concatenate(
                [
                    np.where(p.parent < 0, -1, p.parent + s)
                    for p, s in zip(parts, starts, strict=True)
                ]
            ),
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("depth", "first", "log_p", "confidence", "right")
            ),
        )


@dataclass(frozen=True)
class Records:
    """What was drafted along one answer: the greedy chains, and the trees."""

    chain: Nodes
    tree: Nodes
    has_confidence: bool = True

    @staticmethod
    def joined(parts: Sequence[Records]) -> Records:
        """Several answers as one."""
        return Records(
            Nodes.joined([p.chain for p in parts]),
            Nodes.joined([p.tree for p in parts]),
            all(p.has_confidence for p in parts),
        )


def survival(nodes: Nodes, log_odds: Floats) -> Floats:
    """[M] product of the odds along the path to each node.

    Args:
        nodes: recorded nodes.
        log_odds: [M] logit of each node's odds, given that its parent is right.
    """
    log_a = -np.logaddexp(0.0, -log_odds)
    for d in range(1, int(nodes.depth.max(initial=0)) + 1):
        at = np.flatnonzero(nodes.depth == d)
        log_a[at] += log_a[nodes.parent[at]]  # parents are complete: they are one level higher
    out: Floats = np.exp(log_a)
    return out


def expected_calibration_error(predicted: Floats, right: Bools, bins: int = BINS) -> float:
    """Mean distance between predicted and observed frequency over bins of equal width."""
    if not len(predicted):
        return 0.0
    at = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gaps = np.bincount(at, predicted - right, minlength=bins)
    return float(np.abs(gaps).sum() / len(predicted))


def errors_by_depth(nodes: Nodes, predicted: Floats, depths: int) -> list[float]:
    """Expected calibration error of the survival of nodes, per depth."""
    return [
        expected_calibration_error(predicted[at], nodes.right[at])
        for at in (nodes.depth == d for d in range(depths))
    ]


def fit(records: Records, depths: int) -> Calibration:
    """Fit all weights.

    Args:
        records: drafts of many answers.
        depths: D, draft depths of the drafter.
    """
    return _tempered(_regressed(records, depths), records)


def cross_validated(
    answers: Sequence[Records],
    depths: int,
    fitted: Callable[[Records, int], Calibration] = fit,
    folds: int = FOLDS,
) -> tuple[Records, Floats, Floats]:
    """Odds of every recorded node by a calibration that has not seen its prompt.

    Args:
        answers: drafts, one entry per prompt.
        depths: D.
        fitted: how to fit.
        folds: the prompts are dealt to so many groups; each is predicted from the others.

    Returns:
        (the answers as one, [M] log odds of the chains' nodes, [M] of the trees' nodes).
    """
    order, chains, trees = [], [], []
    for fold in range(min(folds, len(answers))):
        held = Records.joined(answers[fold::folds])
        others = [a for i, a in enumerate(answers) if i % folds != fold]
        table = fitted(Records.joined(others), depths)
        order.append(held)
        chains.append(table.log_odds(held.chain))
        trees.append(table.log_odds(held.tree))
    return Records.joined(order), np.concatenate(chains), np.concatenate(trees)


def log_loss(log_odds: Floats, right: Bools) -> float:
    """Mean negative log likelihood in nats."""
    signed = np.where(right, -log_odds, log_odds)
    return float(np.logaddexp(0.0, signed).mean()) if len(right) else 0.0


def _regressed(records: Records, depths: int) -> Calibration:
    tree = records.tree
    use, logit_p = tree.eligible, tree.logit_p
    means = np.zeros(depths)
    for d in range(depths):
        at = use & (tree.depth == d)
        # Deep depths are reached seldom: there the whole level says what is usual.
        every = at if at.sum() >= 100 else tree.depth == d
        if records.has_confidence and every.any():
            means[d] = tree.confidence[every].mean()
    centred = tree.confidence - means[np.minimum(tree.depth, depths - 1)]
    columns = [np.ones(len(tree)), logit_p, tree.first] + [centred] * records.has_confidence
    x, y = np.stack(columns, axis=1), tree.right.astype(np.float64)
    usual = _logistic(x[use], y[use], np.array([0.0, 1.0, 0.0, 0.0][: x.shape[1]]))
    weights = np.array(
        [_logistic(x[at], y[at], usual) for at in (use & (tree.depth == d) for d in range(depths))]
    )
    confidence = weights[:, 3] if records.has_confidence else np.zeros(depths)
    return Calibration(
        tuple(weights[:, 0].tolist()),
        tuple(np.maximum(weights[:, 1], 0.05).tolist()),
        tuple(np.maximum(weights[:, 2], 0.0).tolist()),
        tuple(confidence.tolist()),
        tuple(means.tolist()),
    )


def _logistic(x: Floats, y: Floats, prior: Floats) -> Floats:
    """Weights of a logistic regression, pulled to `prior` (Newton's method)."""
    w = prior.copy()
    for _ in range(25):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        gradient = x.T @ (y - p) - _RIDGE * (w - prior)
        curvature = (x * (p * (1 - p))[:, None]).T @ x + _RIDGE * np.eye(len(w))
        step = np.linalg.solve(curvature, gradient)
        w += np.clip(step, -1.0, 1.0)
        if float(np.abs(step).max()) < 1e-6:
            break
    return w


_Levels = list[tuple[Bools, Floats, Floats]]


def _tempered(table: Calibration, records: Records) -> Calibration:
    """Sequential temperature scaling of a table's log odds."""
    kinds = [(k, table.log_odds(k), np.ones(len(k))) for k in (records.chain, records.tree)]
    temperatures = []
    for d in range(table.depths):
        levels = [
            (k.right[at], z[at], alive[k.parent[at]] if d else np.ones(len(at)))
            for k, z, alive in kinds
            for at in (np.flatnonzero(k.depth == d),)
        ]

        def error(t: float, levels: _Levels = levels) -> float:
            return sum(
                expected_calibration_error(above / (1 + np.exp(-z / t)), right)
                for right, z, above in levels
            )

        # Of equal errors the temperature nearest to 1.
        best = float(min(TEMPERATURES, key=lambda t: (round(error(t), 5), abs(math.log(t)))))
        temperatures.append(best if error(best) < error(1.0) - _GAIN else 1.0)
        for (k, _, alive), (_, z, above) in zip(kinds, levels, strict=True):
            alive[k.depth == d] = above / (1 + np.exp(-z / temperatures[-1]))
    return table.tempered(temperatures)


@dataclass(frozen=True)
class Report:
    """How good the odds are: expected calibration errors of path survival per depth, held out.

    Attributes:
        prompts: answers that were recorded.
        positions: drafted positions in them.
        confidence_alone: the product of the confidence head's own answers, on greedy chains.
        before: the product of the drafter's own probabilities, on greedy chains.
        after: calibrated, on greedy chains; every prompt predicted from the others.
        tree_before: as `before`, on all nodes of the trees.
        tree_after: as `after`, on all nodes of the trees.
        loss_before: log loss of a node's odds, given its parent, in nats.
        loss_probability: calibrated from the drafter's probability alone, held out.
        loss_both: calibrated from probability and confidence head, held out.
    """

    prompts: int
    positions: int
    confidence_alone: list[float]
    before: list[float]
    after: list[float]
    tree_before: list[float]
    tree_after: list[float]
    loss_before: float
    loss_probability: float
    loss_both: float

    @property
    def uses_confidence(self) -> bool:
        """Whether the confidence head tells something that the probability does not."""
        return self.loss_both < self.loss_probability - _WORTH


def calibrate(answers: Sequence[Records], depths: int) -> tuple[Calibration, Report]:
    """Fit a drafter's calibration and say what it is worth.

    Args:
        answers: drafts, one entry per prompt; at least two.
        depths: D.

    Returns:
        (the calibration fitted to all of them, its report from cross-validation).
    """
    whole = Records.joined(answers)
    without = [Records(a.chain, a.tree, has_confidence=False) for a in answers]
    loss_probability = _held_out_loss(without, depths)
    loss_both = _held_out_loss(answers, depths) if whole.has_confidence else loss_probability
    used = answers if loss_both < loss_probability - _WORTH else without
    held, chain, tree = cross_validated(used, depths)
    use = whole.tree.eligible
    report = Report(
        len(answers),
        int((whole.chain.depth == 0).sum()),
        _rounded(whole.chain, whole.chain.confidence.astype(np.float64), depths)
        if whole.has_confidence
        else [],
        _rounded(whole.chain, whole.chain.logit_p, depths),
        _rounded(held.chain, chain, depths),
        _rounded(whole.tree, whole.tree.logit_p, depths),
        _rounded(held.tree, tree, depths),
        log_loss(whole.tree.logit_p[use], whole.tree.right[use]),
        loss_probability,
        loss_both,
    )
    return fit(Records.joined(used), depths), report


def _held_out_loss(answers: Sequence[Records], depths: int) -> float:
    held, _, tree = cross_validated(answers, depths)
    use = held.tree.eligible
    return log_loss(tree[use], held.tree.right[use])


def _rounded(nodes: Nodes, log_odds: Floats, depths: int) -> list[float]:
    return [round(e, 5) for e in errors_by_depth(nodes, survival(nodes, log_odds), depths)]
