"""How many threads: all of them, but fewer while other programs keep cores busy.

llama.cpp's threads wait for each other many times in a pass, so a pass is as slow as the slowest of
them, and a thread that has to share its core costs more than one thread less would. Whether that is
so is not asked of the system (containers hide it): passes are timed, and now and then, while they
are slow, a few of them run on another number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

# How much slower than on a quiet machine passes must be before fewer threads are tried, and how
# much faster another number must be to stay.
BUSY, BETTER = 1.4, 0.93
# Passes of a trial. It ends early when it goes badly.
TRIAL, BAD = 6, 1.5
# Passes between trials: twice as many after each one in vain.
SHORTEST, LONGEST = 64, 1024
# One pass that was held up must not look like a busy machine.
_MOST = 3.0


class ThreadChoice:
    """Chooses the number of threads from the times of passes.

    Args:
        most: threads on a quiet machine.

    Attributes:
        most: as given.
        count: threads of the next pass.
    """

    def __init__(self, most: int) -> None:
        self.most = self.count = most
        steps = {most, most - 1, most - 2, 3 * most // 4, most // 2, most // 4, 1}
        self._steps = sorted(n for n in steps if 1 <= n <= most)
        self._base = most  # what trials are compared with
        # The latest ratios on that many; it begins as if the machine were quiet.
        self._latest = deque([1.0] * 2 * TRIAL, 2 * TRIAL)
        self._usual = 1.0  # what a trial must beat
        self._tried: list[float] = []
        self._left: list[int] = []  # numbers that this round of trials has not come to yet
        self._wait, self._pause = 2 * TRIAL, SHORTEST
        self._checked = False

    def observe(self, ratio: float) -> None:
        """Learn from a pass on `count` threads.

        Args:
            ratio: its time over what it took on a quiet machine with all threads.
        """
        ratio = min(ratio, _MOST)
        if self.count != self._base:
            self._tried.append(ratio)
            self._judge()
            return
        self._latest.append(ratio)
        self._wait -= 1
        if self._wait > 0:
            return
        slow = self._base < self.most or _typical(self._latest) >= BUSY
        if self._checked and not slow:
            # Looking takes time, too. What was in vain while it was slow is past.
            self._wait, self._pause = TRIAL // 2, SHORTEST
            return
        # The second half of what is remembered: it may have become busy only now.
        self._usual = _typical([*self._latest][-TRIAL:])
        # One look at the beginning, slow or not: it may have been busy when it was measured.
        self._left = self._others() if slow else self._others()[:1]
        self._checked = True
        self._try_next()

    def _others(self) -> list[int]:
        """What to try: first one step up, for where the machine has become quiet again fewer
        threads are a mistake; then down to half. Fewer are worth a try only where half is better.
        """
        more = [n for n in self._steps if n > self._base][:1]
        fewer = [n for n in self._steps if self._base <= 2 * n < 2 * self._base]
        return [*more, *reversed(fewer)]

    def _try_next(self) -> None:
        self._tried = []
        self.count = self._left.pop(0) if self._left else self._base

    def _judge(self) -> None:
        found = _typical(self._tried)
        if len(self._tried) < TRIAL and not (len(self._tried) > 1 and found > BAD * self._usual):
            return
        if found <= BETTER * self._usual:
            # Perhaps more of the same is better still.
            up = self.count > self._base
            self._base, self._usual = self.count, found
            self._latest.extend(2 * self._tried)
            self._left = [n for n in self._others() if (n > self._base) == up]
            self._pause = SHORTEST
        if not self._left:
            self._wait = self._pause
            self._pause = min(2 * self._pause, LONGEST)
        self._try_next()


def _typical(ratios: Collection[float]) -> float:
    """Their mean without the highest third: passes that were held up say little about threads."""
    lowest = sorted(ratios)[: max(1, 2 * len(ratios) // 3)]
    return sum(lowest) / len(lowest)
