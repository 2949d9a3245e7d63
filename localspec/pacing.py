"""When to ask the drafter: always while it pays; now and then, to see, while it does not."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from localspec.cost_curve import bounded

# Drafted rounds must be faster per token than plain ones by this factor, or drafting pauses.
PAYS = 1.05


@dataclass
class Pacing:
    """Whether the drafter is worth asking, and when to ask again if it is not.

    Attributes:
        tokens: running mean of tokens committed per drafted round.
        seconds: running mean of such a round's expected time.
        without: running mean of the time per token without the drafter.
        wait: plain rounds until the next probe.
        pause: how long the last pause was.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    without: float = 0.0
    wait: int = 0
    pause: int = 0
    MEMORY: float = field(default=0.9, repr=False)
    # Pauses grow up to this many times the one that makes probing cost 1%, where not even one
    # drafted node has been worth verifying.
    RARER: float = field(default=3.0, repr=False)

    @property
    def pays(self) -> bool:
        """Whether drafted rounds have been faster per token than those without the drafter."""
        return self.seconds == 0 or self.tokens * self.without >= PAYS * self.seconds

    def ask(self) -> bool:
        """Whether to draft this round; counts a plain round when not."""
        if self.pays or self.wait <= 0:
            return True
        self.wait -= 1
        return False

    def observe(
        self,
        tokens: float,
        seconds: float,
        plain: float,
        probe: float,
        without: float | None = None,
    ) -> None:
        """A drafted round was chosen.

        Args:
            tokens: tokens it is expected to commit (surer than what one round happens to).
            seconds: the round's expected time (from the curve, so that noise does not count).
            plain: a plain round's expected time.
            probe: what a drafted round costs more than a plain one when nothing is accepted.
            without: the time per token that this round would have without the drafter, where a
                repeat in the text makes it less than a plain round's.
        """
        without = plain if without is None else without
        keep = self.MEMORY if self.seconds else 0.0
        if not self.pays and tokens * without >= PAYS * seconds:
            keep = 0.0  # a probe that pays: the text has changed, what was before is no guide
        self.tokens = keep * self.tokens + (1 - keep) * tokens
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.without = keep * self.without + (1 - keep) * without
        if self.pays:
            self.pause = 0
            return
        # Probing must stay below 1% of the time, and gets rarer while it keeps failing; the closer
        # it is to paying the less so, for then a text need not change much to be worth it.
        shortest = int(np.ceil(100 * probe / max(plain, 1e-9)))
        worth = self.tokens * self.without / (PAYS * self.seconds)
        nothing = plain / (PAYS * (plain + probe))  # a round that verifies no node
        gap = bounded((1 - worth) / (1 - nothing), 0.0, 1.0)
        longest = int((1 + (self.RARER - 1) * gap**2) * shortest)
        self.pause = min(max(shortest, 2 * self.pause), longest)
        self.wait = self.pause
