"""The published tables: accepted length per prompt file, the published figures beside it.

The papers measure chains at temperature 1 (Table 1 of DSpark) and trees at temperature 0 (PCTree),
in non-thinking mode, a prompt's turns in order as one conversation. `localspec bench --suite` does
the same for chain and tree at both temperatures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from localspec.bench.run import Report

if TYPE_CHECKING:
    from rich.table import Table

    from localspec.engine import Engine

SUITE_TEMPERATURES = (0.0, 1.0)
SUITE_SETTINGS = "chain,tree"
SUITE_TOKENS = 2048
# Templates without a thinking mode ignore it.
TEMPLATE_VARIABLES = {"enable_thinking": False}


@dataclass(frozen=True)
class Published:
    """The published figures that belong to a pair.

    Attributes:
        model: the published name, e.g. "Qwen3-4B".
        family: "dspark", "dflash" or "eagle3".
        data: the whole of `localspec/data/published.json`.
    """

    model: str
    family: str
    data: dict[str, Any]

    def accepted_length(self, dataset: str, setting: str, temperature: float) -> float | None:
        """What was published for this, if anything was."""
        table = self.data["accepted_length"]
        if setting == table["setting"] and temperature == table["temperature"]:
            row = dict(zip(map(_plain, table["datasets"]), self._row(), strict=True))
            found = row.get(_plain(dataset))
            return None if found is None else float(found)
        tree = self.data["pctree"]
        if (
            temperature == tree["temperature"]
            and self.model.startswith(tree["family"])
            and self.family == "dspark"
        ):
            figures = tree.get(_plain(dataset), {})
            found = figures.get({"chain": "dspark", "tree": "pctree"}.get(setting, ""))
            return None if found is None else float(found)
        return None

    def sources(self, temperatures: Sequence[float]) -> list[str]:
        """Where the figures at these temperatures come from."""
        tables = [self.data["accepted_length"]]
        if self.model.startswith(self.data["pctree"]["family"]):
            tables.append(self.data["pctree"])
        return [str(t["source"]) for t in tables if t["temperature"] in temperatures]

    def _row(self) -> list[float]:
        row: list[float] = self.data["accepted_length"]["tau"][self.model][self.family]
        return row


def published_data() -> dict[str, Any]:
    """The figures that come with localspec, with their sources."""
    text = (files("localspec.data") / "published.json").read_text("utf-8")
    data: dict[str, Any] = json.loads(text)
    return data


def published_for(name: str, family: str) -> Published | None:
    """The figures of a model, if there are any.

    Args:
        name: what the model calls itself ("Qwen3 4B", "Qwen3-4B-Instruct"); variants with a
            date or another suffix are other models and match nothing.
        family: the drafter's, "dspark", "dflash" or "eagle3".
    """
    data = published_data()
    for model, rows in data["accepted_length"]["tau"].items():
        wanted = {_plain(model) + suffix for suffix in ("", "it", "instruct")}
        if family in rows and _plain(name) in wanted:
            return Published(model, family, data)
    return None


def published_of(engine: Engine) -> Published | None:
    """The figures of an engine's pair, if there are any."""
    if engine._drafter is None:
        return None
    model = engine.model
    name = model.meta("general.name")
    if not name:  # it tells variants apart, these two do not
        name = f"{model.meta('general.basename')} {model.meta('general.size_label')}"
    drafter = engine._drafter
    family = "dspark" if drafter.info.sample_from_anchor else "dflash"
    if drafter.context.model.meta("general.architecture") == "eagle3":
        family = "eagle3"
    return published_for(name, family)


def suite_rows(report: Report, published: Published | None) -> tuple[list[str], list[list[str]]]:
    """The table in the papers' layout: a column per prompt file, their mean last.

    Returns:
        The head and the rows; a published row, where there is one, follows the measured one.
    """
    names = list(dict.fromkeys(r.prompts for r in report.runs))
    head = ["temperature", "setting", *names, "mean"]
    rows: list[list[str]] = []
    for temperature in dict.fromkeys(r.temperature for r in report.runs):
        runs = {r.prompts: r for r in report.runs if r.temperature == temperature}
        for setting in next(iter(runs.values())).settings:
            measured = [runs[n].settings[setting].accepted_length for n in names]
            rows.append([f"{temperature:g}", setting, *_cells(measured)])
            if published is None:
                continue
            known = [published.accepted_length(n, setting, temperature) for n in names]
            if any(value is not None for value in known):
                rows.append([f"{temperature:g}", f"{setting}, published", *_cells(known)])
    return head, rows


def suite_table(report: Report, published: Published | None) -> Table:
    """The table for the terminal."""
    from rich.table import Table

    head, rows = suite_rows(report, published)
    table = Table(title="accepted length")
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 1 else "right")
    for row in rows:
        table.add_row(*row, style="dim" if row[1].endswith(", published") else None)
    return table


def _cells(values: Sequence[float | None]) -> list[str]:
    known = [v for v in values if v is not None]
    whole = len(known) == len(values) and known
    mean = f"{sum(known) / len(known):.2f}" if whole else ""
    return [*("" if v is None else f"{v:.2f}" for v in values), mean]


def _plain(name: str) -> str:
    return "".join(c for c in name.casefold() if c.isalnum())
