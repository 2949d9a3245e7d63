"""From samples to figures: medians, paired ratios, acceptance. Pure functions of numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """One answer under one setting.

    Attributes:
        tokens: tokens the rounds committed (the first token, which the prefill gives, left out).
        rounds: how many there were.
        seconds: time of all rounds.
        draft, verify, host: the parts of it; zero where a program does not tell.
        verified: drafted tokens given to the target.
        reached: per depth (from 1), rounds whose draft was that deep and right up to there.
        accepted: per depth, how many of those were right at that depth too.
    """

    tokens: int
    rounds: int
    seconds: float
    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0
    verified: int = 0
    reached: Sequence[int] = ()
    accepted: Sequence[int] = ()

    @property
    def speed(self) -> float:
        """Tokens per second; 0 of nothing."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Figures:
    """One setting on one prompt file.

    Attributes:
        tokens_per_second: median over the prompts.
        overall_speed: all tokens over all time.
        ratio: median over the prompts of the speed against plain decoding of the same prompt;
            None without plain decoding.
        ratio_range: the lowest and the highest of these.
        accepted_length: tokens per round, the bonus token included.
        acceptance_by_depth: per depth, how often a draft that was right so far is right there
            too; None where no draft got so far.
        verified_per_round: drafted tokens given to the target.
        milliseconds_per_round: "draft", "verify" and "host"; None where a program does not tell.
        tokens: how many were generated.
        speeds: per prompt (and turn), tokens per second, the median of its repeats.
    """

    tokens_per_second: float
    overall_speed: float
    ratio: float | None
    ratio_range: tuple[float, float] | None
    accepted_length: float
    acceptance_by_depth: list[float | None]
    verified_per_round: float
    milliseconds_per_round: dict[str, float] | None
    tokens: int
    speeds: list[float] = field(repr=False)


def median(values: Iterable[float]) -> float:
    """The median; 0 of nothing."""
    ordered = list(values)
    return statistics.median(ordered) if ordered else 0.0


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers; 0 of nothing or when one is not positive."""
    found = list(values)
    if not found or min(found) <= 0:
        return 0.0
    return math.exp(sum(math.log(v) for v in found) / len(found))


def paired_ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Prompt by prompt; prompts without a speed on either side are left out."""
    return [a / b for a, b in zip(above, below, strict=True) if a > 0 and b > 0]


def accepted_length(samples: Iterable[Sample]) -> float:
    """Tokens per round over several answers; 0 without rounds."""
    found = list(samples)
    rounds = sum(s.rounds for s in found)
    return sum(s.tokens for s in found) / rounds if rounds else 0.0


def acceptance_by_depth(samples: Iterable[Sample]) -> list[float | None]:
    """Per depth, accepted over reached, summed over the samples; None where none was reached."""
    found = list(samples)
    depths = max((len(s.reached) for s in found), default=0)

    def total(counts: Iterable[Sequence[int]], d: int) -> int:
        return sum(c[d] for c in counts if len(c) > d)

    out: list[float | None] = []
    for d in range(depths):
        reached = total((s.reached for s in found), d)
        out.append(total((s.accepted for s in found), d) / reached if reached else None)
    while out and out[-1] is None:
        out.pop()
    return out


def figures(samples: Sequence[Sequence[Sample]], plain: Sequence[float] | None) -> Figures:
    """The figures of a setting.

    Args:
        samples: per prompt its repeats.
        plain: per prompt, the speed of plain decoding; None when it was not run.
    """
    speeds = [median(s.speed for s in repeats if s.speed > 0) for repeats in samples]
    every = [s for repeats in samples for s in repeats]
    ratios = [] if plain is None else paired_ratios(speeds, plain)
    rounds, seconds = sum(s.rounds for s in every), sum(s.seconds for s in every)
    parts = {
        what: 1e3 * sum(getattr(s, what) for s in every) / max(1, rounds)
        for what in ("draft", "verify", "host")
    }
    return Figures(
        tokens_per_second=median(v for v in speeds if v > 0),
        overall_speed=sum(s.tokens for s in every) / seconds if seconds else 0.0,
        ratio=median(ratios) if ratios else None,
        ratio_range=(min(ratios), max(ratios)) if ratios else None,
        accepted_length=accepted_length(every),
        acceptance_by_depth=acceptance_by_depth(every),
        verified_per_round=sum(s.verified for s in every) / max(1, rounds),
        milliseconds_per_round=parts if any(parts.values()) else None,
        tokens=sum(s.tokens for s in every),
        speeds=speeds,
    )
