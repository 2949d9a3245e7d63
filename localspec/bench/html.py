"""A report as one HTML file: tables and plots, nothing fetched from anywhere."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec.bench.report import GROUPS, auto_against, depths_in_words, geometric_means
from localspec.bench.run import Report, Run
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>localspec bench: {{ report.target_file }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
table { border-collapse: collapse; margin: 0 0 1.5rem }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd;
  white-space: nowrap; vertical-align: bottom }
th { line-height: 1.25 }
.wide { overflow-x: auto }
th:first-child, td:first-child { text-align: left }
h2 { margin-top: 2.5rem }
.about { color: #555 }
svg { max-width: 100%; height: auto }
</style>
</head>
<body>
<h1>localspec bench</h1>
<p class="about">{{ report.target }} ({{ report.target_file }}),
{% if report.drafter %}drafter {{ report.drafter }}{% else %}no drafter{% endif %}.
At most {{ report.max_tokens }} tokens an answer, every prompt {{ report.repeats }}
time{{ "" if report.repeats == 1 else "s" }} under every setting, interleaved.<br>
localspec {{ report.version }}, llama-cpp-python {{ report.system }}</p>
{% for section in sections %}
<h2>Temperature {{ section.temperature }}</h2>
{{ section.speed }}
{% if section.means %}
<h3>Against plain decoding, geometric mean over the files</h3>
<table><tr><th>setting</th><th>x plain</th></tr>
{% for name, value in section.means.items() %}
<tr><td>{{ name }}</td><td>{{ "%.3f"|format(value) }}</td></tr>
{% endfor %}</table>
{% endif %}
{% if section.groups %}
<h3>auto against</h3>
<table><tr><th>prompts</th>{% for group in section.groups %}<th>{{ group }}</th>{% endfor %}</tr>
{% for run, against in section.against %}
<tr><td>{{ run.prompts }}</td>{% for group in section.groups %}
<td>{% if group in against %}{{ "%.3f"|format(against[group].ratio) }}
{%- if against[group].name != group %} ({{ against[group].name }}){% endif %}{% endif %}</td>
{% endfor %}</tr>
{% endfor %}</table>
{% endif %}
{% for run, plots in section.runs %}
<h3>{{ run.prompts }}</h3>
<p class="about">{{ run.answers }} answers{% if run.skipped %}, {{ run.skipped }} left out (too long
for the context){% endif %}{% if run.peak_memory %}; peak memory
{{ "{:,.0f}".format(run.peak_memory / 1e6) }} MB{% endif %}</p>
<div class="wide"><table><tr><th>setting</th><th>tokens/s</th><th>x plain</th>
<th>lowest..<br>highest</th><th>accepted<br>length</th><th>verified<br>per round</th>
<th>draft, verify, host<br>(ms per round)</th><th>accepted by depth (%)</th></tr>
{% for name, f in run.settings.items() %}
<tr><td>{{ name }}</td><td>{{ "%.1f"|format(f.tokens_per_second) }}</td>
<td>{% if f.ratio is not none %}{{ "%.3f"|format(f.ratio) }}{% endif %}</td>
<td>{% if f.ratio_range and name != "plain" %}
{{ "%.2f..%.2f"|format(*f.ratio_range) }}{% endif %}</td>
<td>{{ "%.2f"|format(f.accepted_length) }}</td>
<td>{{ "%.1f"|format(f.verified_per_round) }}</td>
<td>{% if f.milliseconds_per_round %}
{{ "%.2f, %.2f, %.2f"|format(*f.milliseconds_per_round.values()) }}{% endif %}</td>
<td>{{ depths(f.acceptance_by_depth) }}</td></tr>
{% endfor %}</table></div>
{{ plots }}
{% endfor %}
{% endfor %}
</body>
</html>
"""


def check_html(path: str | Path) -> None:
    """Whether a report can be drawn and its place be written, before anything is measured.

    Raises:
        LocalspecError: matplotlib is missing, or the file cannot be written.
    """
    _matplotlib()
    path = Path(path)
    existed = path.exists()
    try:
        with open(path, "ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as e:
        raise LocalspecError(f"cannot write the report to {path}: {e.strerror}") from e


def write_html(report: Report, path: str | Path) -> None:
    """Write a report to a file.

    Raises:
        LocalspecError: matplotlib is missing, or the file cannot be written.
    """
    page = to_html(report)
    try:
        Path(path).write_text(page, "utf-8")
    except OSError as e:
        raise LocalspecError(f"cannot write the report to {path}: {e.strerror}") from e


def to_html(report: Report) -> str:
    """A report as one self-contained page.

    Raises:
        LocalspecError: matplotlib is missing.
    """
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True)
    template = environment.from_string(_PAGE)
    temperatures = dict.fromkeys(r.temperature for r in report.runs)
    return template.render(
        report=report,
        sections=[_section(report, t) for t in temperatures],
        depths=depths_in_words,
    )


def _section(report: Report, temperature: float) -> dict[str, Any]:
    from markupsafe import Markup

    runs = [r for r in report.runs if r.temperature == temperature]
    against = [(r, auto_against(r)) for r in runs]
    return {
        "temperature": f"{temperature:g}",
        "speed": Markup(_plot(lambda ax: _speeds(ax, runs), f"speed {temperature}")),
        "means": geometric_means(runs),
        "groups": [g for g in GROUPS if any(g in found for _, found in against)],
        "against": against,
        "runs": [
            (r, Markup(_plots_of(r)))
            for r in runs
        ],
    }  # fmt: skip


def _plots_of(run: Run) -> str:
    plots = []
    if any(f.acceptance_by_depth for f in run.settings.values()):
        plots.append(_plot(lambda ax: _depths(ax, run), f"depth {run.prompts} {run.temperature}"))
    if any(f.milliseconds_per_round for f in run.settings.values()):
        plots.append(_plot(lambda ax: _parts(ax, run), f"parts {run.prompts} {run.temperature}"))
    return "\n".join(plots)


def _speeds(ax: Axes, runs: Sequence[Run]) -> None:
    names = list(dict.fromkeys(n for r in runs for n in r.settings))
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        at = [j - 0.4 + (i + 0.5) * width for j in range(len(runs))]
        speeds = [r.settings[name].tokens_per_second if name in r.settings else 0 for r in runs]
        ax.bar(at, speeds, width, color=f"C{i % 10}", label=name)
    ax.set_xticks(range(len(runs)), [r.prompts for r in runs])
    ax.set_ylabel("tokens/s (median)")
    ax.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def _depths(ax: Axes, run: Run) -> None:
    deepest = 1
    for i, (name, f) in enumerate(run.settings.items()):
        if f.acceptance_by_depth:
            rates = [float("nan") if r is None else 100 * r for r in f.acceptance_by_depth]
            ax.plot(range(1, len(rates) + 1), rates, f"C{i % 10}o-", markersize=3, label=name,
                    clip_on=False)  # fmt: skip
            deepest = max(deepest, len(rates))
    ax.set_ylim(0, 100)
    ax.set_xlim(0.5, deepest + 0.5)
    ax.set_xlabel("draft depth")
    ax.set_ylabel("accepted when right so far (%)")
    ax.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))


def _parts(ax: Axes, run: Run) -> None:
    # Per token, so that settings with long and short rounds can be compared.
    parts = {
        name: {k: v / f.accepted_length for k, v in f.milliseconds_per_round.items()}
        for name, f in run.settings.items()
        if f.milliseconds_per_round and f.accepted_length
    }
    left = [0.0] * len(parts)
    # Other colours than those of the settings above.
    for what, colour in (("draft", "#7f8fa6"), ("verify", "#40739e"), ("host", "#c8d0da")):
        values = [p[what] for p in parts.values()]
        ax.barh(range(len(parts)), values, left=left, label=what, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
    ax.set_yticks(range(len(parts)), list(parts))
    ax.invert_yaxis()
    ax.set_xlabel("ms per token")
    ax.legend(frameon=False, ncols=3, loc="lower left", bbox_to_anchor=(0, 1))


def _plot(draw: Callable[[Axes], None], name: str) -> str:
    """A plot as an SVG element that needs nothing from outside, its ids made from `name`."""
    matplotlib = _matplotlib()
    from matplotlib.figure import Figure  # pyplot would change the state of a whole application

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}):
        figure = Figure(figsize=(8, 3.2))
        ax = figure.subplots()
        draw(ax)
        ax.spines[["top", "right"]].set_visible(False)
        out = io.StringIO()
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    # Names of formats look like addresses; HTML needs none of them.
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    return svg.replace("xlink:href=", "href=")


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as e:
        raise LocalspecError(
            "an HTML report needs matplotlib; install it with: pip install 'localspec[bench]'"
        ) from e
    return matplotlib
