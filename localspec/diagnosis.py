"""What `localspec doctor` finds: facts by section, and problems with how to mend each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Value = str | int | float | bool | None | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        broken: something does not work; otherwise it is slower, or takes more room, than need be.
        what: one line.
        mend: how to mend it, one line.
    """

    broken: bool
    what: str
    mend: str


@dataclass
class Section:
    """Facts that belong together, JSON-compatible.

    Attributes:
        title: of the section.
        facts: label -> value.
        problems: what is wrong with them.
    """

    title: str
    facts: dict[str, Value] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def broken(self, what: str, mend: str) -> None:
        """Note that something does not work."""
        self.problems.append(Problem(True, what, mend))

    def warn(self, what: str, mend: str) -> None:
        """Note that something could be better."""
        self.problems.append(Problem(False, what, mend))


@dataclass(frozen=True)
class Report:
    """All sections."""

    sections: list[Section]

    @property
    def problems(self) -> list[Problem]:
        """Of all sections, broken ones first."""
        found = [p for section in self.sections for p in section.problems]
        return sorted(found, key=lambda p: not p.broken)

    @property
    def fine(self) -> bool:
        """Whether nothing is broken."""
        return not any(p.broken for p in self.problems)

    def as_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "fine": self.fine,
            "problems": [
                {"broken": p.broken, "what": p.what, "mend": p.mend} for p in self.problems
            ],
            **{section.title: section.facts for section in self.sections},
        }
