"""What was measured, for the terminal; and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localspec.bench.run import Report, Run
from localspec.bench.settings import AUTO, PLAIN
from localspec.bench.stats import geometric_mean, median, paired_ratios

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Against:
    """auto against the best of a group of settings on one prompt file.

    Attributes:
        name: that setting.
        ratio: median over the prompts of auto's speed over its speed.
    """

    name: str
    ratio: float


_DRAFTED = tuple(f"llama.cpp:{digit}" for digit in "123456789")
# A group of settings -> which names belong to it.
GROUPS: dict[str, Callable[[str], bool]] = {
    "plain": lambda name: name == PLAIN.name,
    "best fixed": lambda name: name in ("chain", "tree") or name.startswith("fixed:"),
    "llama.cpp's best draft": lambda name: name.startswith(_DRAFTED),
    "llama.cpp's best n-gram": lambda name: name.startswith("llama.cpp:ngram-"),
    "llama.cpp plain": lambda name: name == "llama.cpp:0",
}


def auto_against(run: Run) -> dict[str, Against]:
    """auto against the best setting of every group that was run, by group."""
    auto = run.settings.get(AUTO.name)
    if auto is None:
        return {}
    out = {}
    for group, belongs in GROUPS.items():
        members = {n: f for n, f in run.settings.items() if belongs(n)}
        ratios = {n: paired_ratios(auto.speeds, f.speeds) for n, f in members.items()}
        known = {n: median(r) for n, r in ratios.items() if r}
        if known:
            # The best setting is the one against which auto looks worst.
            name = min(known, key=known.__getitem__)
            out[group] = Against(name, known[name])
    return out


def geometric_means(runs: Sequence[Run]) -> dict[str, float]:
    """Per setting, the geometric mean over the runs of its ratio to plain decoding."""
    names = dict.fromkeys(n for r in runs for n in r.settings)
    out = {}
    for name in names:
        ratios = [r.settings[name].ratio for r in runs if name in r.settings]
        known = [r for r in ratios if r is not None]
        if known and len(known) == len(ratios):
            out[name] = geometric_mean(known)
    return out


def run_table(run: Run) -> Table:
    """One run for the terminal."""
    from rich.table import Table

    title = f"{run.prompts}, temperature {run.temperature:g}, {run.answers} answers"
    if run.skipped:
        title += f" ({run.skipped} left out: too long for the context)"
    table = Table(title=title, title_justify="left")
    table.add_column("setting")
    for head in ("tokens/s", "x plain", "lowest..highest", "accepted length", "verified/round"):
        table.add_column(head, justify="right")
    table.add_column("ms/round: draft, verify, host", justify="right")
    table.add_column("accepted by depth")
    for name, f in run.settings.items():
        parts = f.milliseconds_per_round
        spread = f.ratio_range
        table.add_row(
            name,
            f"{f.tokens_per_second:.1f}",
            "" if f.ratio is None else f"{f.ratio:.3f}",
            "" if spread is None or name == PLAIN.name else f"{spread[0]:.2f}..{spread[1]:.2f}",
            f"{f.accepted_length:.2f}",
            f"{f.verified_per_round:.1f}",
            "" if parts is None else "  ".join(f"{parts[k]:.2f}" for k in parts),
            depths_in_words(f.acceptance_by_depth),
        )
    if run.peak_memory is not None:
        table.caption = f"peak memory {run.peak_memory / 1e6:,.0f} MB"
    return table


def summary_table(report: Report) -> Table | None:
    """auto against the best of every group, file by file; None when auto was not run."""
    from rich.table import Table

    rows = {id(r): auto_against(r) for r in report.runs}
    groups = [g for g in GROUPS if any(g in row for row in rows.values())]
    if not groups:
        return None
    table = Table(title="auto against", title_justify="left")
    table.add_column("prompts")
    table.add_column("temperature", justify="right")
    for group in groups:
        table.add_column(group, justify="right")
    for temperature in dict.fromkeys(r.temperature for r in report.runs):
        runs = [r for r in report.runs if r.temperature == temperature]
        for r in runs:
            cells = (_cell(rows[id(r)].get(g)) for g in groups)
            table.add_row(r.prompts, f"{temperature:g}", *cells)
        if len(runs) > 1:
            found = [[rows[id(r)][g].ratio for r in runs if g in rows[id(r)]] for g in groups]
            means = (f"{geometric_mean(ratios):.3f}" for ratios in found)
            table.add_row("geometric mean", f"{temperature:g}", *means, style="bold")
    return table


def depths_in_words(rates: Sequence[float | None]) -> str:
    """Acceptance by depth in percent."""
    return " ".join("-" if r is None else f"{100 * r:.0f}" for r in rates)


def _cell(against: Against | None) -> str:
    if against is None:
        return ""
    alone = against.name in (PLAIN.name, "llama.cpp:0")
    return f"{against.ratio:.3f}" if alone else f"{against.ratio:.3f} ({against.name})"
