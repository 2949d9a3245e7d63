"""`localspec doctor`: what is installed here, what is wrong, and how to mend it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from localspec.diagnosis import Report, Value


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def doctor(as_json: bool) -> None:
    """Say what is installed here, what is wrong with it, and how to mend it.

    Versions, the build of llama.cpp and its devices, processors and memory, caches, the default
    pair, environment variables. Exit status 1 when something is broken.
    """
    from localspec.doctor import examine

    report = examine()
    click.echo(json.dumps(report.as_dict(), indent=2) if as_json else in_words(report))
    if not report.fine:
        raise SystemExit(1)


def in_words(report: Report) -> str:
    """A report for people, several lines; the problems last, where they are seen."""
    from localspec.cli import one_line

    lines = []
    for section in report.sections:
        lines.append(section.title)
        width = max((len(label) for label in section.facts), default=0)
        for label, value in section.facts.items():
            lines.append(f"  {label:<{width}}  {one_line(_in_words(label, value))}")
        lines.append("")
    if not report.problems:
        return "\n".join([*lines, "no problems found"])
    for problem in report.problems:
        kind = "broken" if problem.broken else "warning"
        lines.append(f"{kind}: {one_line(problem.what)}")
        lines.append(f"  mend: {one_line(problem.mend)}")
    return "\n".join(lines)


def _in_words(label: str, value: Value) -> str:
    from localspec.hub import size_in_words

    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if label == "symbols" and isinstance(value, dict):
        return f"{sum(map(bool, value.values()))} of {len(value)} are there"
    if label.startswith("memory") and isinstance(value, int):
        return size_in_words(value)
    if isinstance(value, dict):  # a cache, or a device
        if "path" in value:
            if value["free"] is None:
                return f"{value['path']} (not there yet)"
            size, free = size_in_words(value["bytes"]), size_in_words(value["free"])
            return f"{value['path']} ({size}; {free} free on its disk)"
        free, total = size_in_words(value["free"]), size_in_words(value["total"])
        return f"{value['name']} ({value['kind']}, {free} of {total} free)"
    if isinstance(value, list):
        return ", ".join(_in_words("", x) for x in value) or "none"
    return str(value)
