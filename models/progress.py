"""What a training run reports while it goes on, and what it remembers between two starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError
from localspec.models.settings import Settings, write_json

PHASES = ("prompts", "text", "training", "save", "convert", "calibrate")
# Parts of `hours` at whose end a phase stops; the rest is for converting and calibrating.
_ENDS = {"prompts": 0.06, "text": 0.45, "training": 0.95, "calibrate": 1.0}
_STATE = "state.json"


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        phase: one of `PHASES`.
        done: 0..1 of the phase.
        note: what is being done, in a few words.
        step: training steps so far.
        loss: of the last step.
        agreed: how often the draft is right by depth, on the conversations of the last step.
        length: expected accepted length of a chain on held-out text, the bonus token included;
            None before the first evaluation.
    """

    phase: str
    done: float
    note: str = ""
    step: int = 0
    loss: float | None = None
    agreed: tuple[float, ...] = ()
    length: float | None = None


Report = Callable[[Progress], None]


class Run:
    """A run's directory, settings and memory.

    `facts` are what was measured or decided once (`state.json`); `spent` are seconds by phase.
    """

    def __init__(self, out: Path, settings: Settings, report: Report) -> None:
        self.out, self.settings, self.report = out, settings, report
        self._phase, self._since = "", time.monotonic()
        try:
            state = json.loads((out / _STATE).read_text("utf-8"))
        except FileNotFoundError:
            state = {}
        except (OSError, ValueError) as e:
            raise LocalspecError(f"{out / _STATE} is damaged; delete it and use --resume") from e
        self.facts: dict[str, Any] = state.get("facts", {})
        self._spent: dict[str, float] = state.get("spent", {})

    def enter(self, phase: str) -> None:
        """Begin a phase, or go on with it."""
        self._settle()
        self._phase = phase

    def _settle(self) -> None:
        now = time.monotonic()
        if self._phase:
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        self._since = now

    def save(self) -> None:
        """Write down what is known and the time spent.

        Raises:
            LocalspecError: the disk is full.
        """
        self._settle()
        write_json(self.out / _STATE, {"facts": self.facts, "spent": self._spent})

    def spent(self, phase: str | None = None) -> float:
        """Seconds of all starts together, of one phase or of all."""
        self._settle()
        if phase is not None:
            return self._spent.get(phase, 0.0)
        return sum(self._spent.values())

    def share(self) -> float:
        """0..1 of the time that the present phase has, when hours bound the run; else 0."""
        hours = self.settings.hours
        if hours is None:
            return 0.0
        # What the phases before it used up is gone, for better or worse.
        before = self.spent() - self.spent(self._phase)
        end = _ENDS[self._phase] * 3600 * hours
        return min(1.0, self.spent(self._phase) / max(1.0, end - before))
