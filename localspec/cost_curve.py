"""What passes cost on this machine, and how that changes while it generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from localspec.calibration import Floats

# Sizes of the target's passes that are measured: every size where kernels are known to change
# (8 | 9 on CUDA, Metal and Vulkan, 16 | 17 and 32 | 33 for tensor-core tiles) has both its sides.
SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64)
# Costs change slowly with the context: one curve serves this many tokens of depth.
_DEPTH_STEP = 32
# How much more than a single row larger passes miss threads that they do not get, as an exponent.
_LARGE_PASSES = 0.4


@dataclass
class _Seen:
    """What passes on one number of threads showed, beside the measured times.

    Attributes:
        load: the factor that all of them have in common.
        factor: [largest] what a size does differently. Every round reads and changes one entry:
            a list takes a tenth of an array's time for that.
    """

    load: float
    factor: list[float]


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

    Attributes:
        largest: the largest pass the curve knows.
    """

    def __init__(self, sizes: Sequence[int], depths: Sequence[int], seconds: Floats) -> None:
        self.sizes = np.asarray(sizes, np.int64)
        self.depths = np.asarray(depths, np.int64)
        self.seconds = np.asarray(seconds, np.float64)
        self.largest = int(self.sizes[-1])
        self._every = np.arange(1, self.largest + 1)
        self._seen = _Seen(1.0, [1.0] * len(self._every))
        self._by_part = {1.0: self._seen}
        self._known: dict[int, list[float]] = {}

    @property
    def load(self) -> float:
        """How much longer passes take now than when they were measured, whatever their size."""
        return self._seen.load

    def on_threads(self, part: float) -> None:
        """Go on with what is known of passes on another number of threads.

        Args:
            part: how many that is of those that the curve was measured with.
        """
        if part not in self._by_part:
            # Larger passes compute more per byte that they read, and so miss a thread more: T(8) /
            # T(1) of the default target is 3.9 on two threads and 5.0 on one.
            larger = part**-_LARGE_PASSES
            self._by_part[part] = _Seen(self.load, [1.0, *[larger] * (len(self._every) - 1)])
        self._seen = self._by_part[part]

    def at(self, depth: int) -> Floats:
        """[largest] seconds of passes of 1, 2, 3, ... tokens at a context depth."""
        out: Floats = np.multiply(self._at_step(depth), self._seen.factor)
        return out

    def _at_step(self, depth: int) -> list[float]:
        """As it was measured, before anything was observed."""
        step = depth // _DEPTH_STEP
        if step not in self._known:
            self._known[step] = self._measured(step * _DEPTH_STEP).tolist()
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

    def observe(self, size: int, depth: int, seconds: float) -> float:
        """Learn from a real pass. One outlier moves an entry by half a percent at most.

        Returns:
            Its time over the measured one; 1 for sizes that were not measured.
        """
        if not 1 <= size <= self.largest or seconds <= 0:
            return 1.0
        seen, measured = self._seen, self._at_step(depth)[size - 1]
        factor = seen.factor[size - 1]
        ratio = seconds / (measured * factor)
        seen.load *= bounded(ratio / seen.load, 0.8, 1.25) ** 0.3
        own = bounded(ratio / seen.load, 0.8, 1.25) ** 0.02
        seen.factor[size - 1] = bounded(factor * own, 0.25, 4.0)
        return seconds / measured


def bounded(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)  # numpy's clip costs more than everything around it
