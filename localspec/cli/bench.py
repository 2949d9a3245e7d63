"""`localspec bench`: how fast, against what, on which text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli import one_line
from localspec.cli.options import loaded_engine, model_options, prepare

if TYPE_CHECKING:
    from rich.console import Console

    from localspec.bench.peer import Peer
    from localspec.bench.run import Report, Run
    from localspec.bench.suite import Published
    from localspec.engine import Engine


@click.command()
@click.argument("more", nargs=-1, metavar="[FILE]...", type=click.Path(path_type=Path))
@model_options
@click.option(
    "--prompts",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help='Prompt file, JSON lines {"turns": [...]} (repeatable).',
)
@click.option(
    "--suite",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="All prompt files of a folder, in the layout of the published tables.",
)
@click.option(
    "--temp",
    multiple=True,
    type=click.FloatRange(min=0),
    metavar="T",
    help="Temperature (repeatable; 0, and 1 too for --suite).",
)
@click.option(
    "--against",
    multiple=True,
    metavar="NAMES",
    help="Settings to compare with, separated by commas: plain, auto, chain, tree, "
    "fixed:NxK, llama.cpp, llama.cpp:N@P, llama.cpp:ngram-mod.",
)
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=2),
    metavar="N",
    help="Most tokens per answer (128; 2048 for --suite).",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Prompts per file (8; all of them for --suite).",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Times every prompt is answered under every setting.",
)
@click.option(
    "--llama-bin",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Folder of llama.cpp's own programs (left out: PATH).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option(
    "--html",
    metavar="OUT",
    type=click.Path(path_type=Path),
    help="Also write a report with plots, one HTML file.",
)
def bench(
    more: tuple[Path, ...],
    prompts: tuple[Path, ...],
    suite: Path | None,
    temp: tuple[float, ...],
    against: tuple[str, ...],
    max_tokens: int | None,
    limit: int | None,
    repeats: int,
    llama_bin: Path | None,
    as_json: bool,
    html: Path | None,
    **options: Any,
) -> None:
    """Measure speed and accepted length on prompt files.

    Runs plain decoding, the auto policy and whatever --against names on every prompt, turn by
    turn, and prints medians and ratios. Beside what `generate` can do: fixed:7x4 verifies 7 nodes
    of width 4 every round, llama.cpp:3@0.5 is llama.cpp's own program with n-max 3 and p-min 0.5,
    llama.cpp:0 its plain decoding, llama.cpp:ngram-mod its drafts from repeats in the text.

    \b
    localspec bench --prompts gsm8k.jsonl --against chain,tree --html report.html
    localspec bench --prompts gsm8k.jsonl --against llama.cpp --llama-bin llama-build/bin
    localspec bench --suite prompts/ -m qwen3-4b.gguf -d qwen3-4b-dspark.gguf
    """
    prompts += more  # so that --prompts folder/*.jsonl works
    if (suite is None) == (not prompts):
        raise click.UsageError("name prompt files with --prompts, or a folder with --suite")
    from localspec.bench import suite as tables
    from localspec.bench.html import check_html, write_html
    from localspec.bench.peer import find_programs
    from localspec.bench.prompts import prompt_files, read_prompts
    from localspec.bench.run import run
    from localspec.bench.settings import AUTO, PLAIN, Setting, parse_settings
    from localspec.drafting import DraftOptions

    # Everything that can be wrong is looked at before a model is loaded.
    if html is not None:
        check_html(html)
    paths = list(prompts) if suite is None else prompt_files(suite)
    files = [read_prompts(p, limit or (8 if suite is None else None)) for p in paths]
    names = ",".join(against) or (tables.SUITE_SETTINGS if suite is not None else "")

    def settings(depths: int) -> list[Setting]:
        found = parse_settings(names, depths=depths)
        return found if suite is not None else list(dict.fromkeys([PLAIN, AUTO, *found]))

    programs = find_programs(settings(1), llama_bin)
    kept = {name: options[name] for name in _PEER_OPTIONS}
    with loaded_engine(options) as engine:
        chosen = settings(_depths(engine))
        if AUTO in chosen:
            prepare(engine, DraftOptions.auto())
        with _shown(tables=suite is None and not as_json) as (advance, show):
            report = run(
                engine,
                files,
                chosen,
                temperatures=temp or (tables.SUITE_TEMPERATURES if suite is not None else (0.0,)),
                max_tokens=max_tokens or (128 if suite is None else tables.SUITE_TOKENS),
                repeats=repeats,
                peer=_peer(engine, programs, kept) if programs else None,
                template_variables=None if suite is None else tables.TEMPLATE_VARIABLES,
                progress=advance,
                on_run=show,
            )
        published = None if suite is None else tables.published_of(engine)
    if html is not None:
        write_html(report, html)
    if as_json:
        click.echo(json.dumps(report.as_json()))
    elif suite is None:
        _print_summary(report)
    else:
        _print_suite(report, published)


# What llama.cpp's programs are told too.
_PEER_OPTIONS = ("n_ctx", "threads", "gpu_layers", "flash_attn", "kv_type")


def _depths(engine: Engine) -> int:
    return 1 if engine._drafter is None else engine._drafter.info.max_depth


def _peer(engine: Engine, programs: dict[str, str], options: dict[str, Any]) -> Peer:
    from localspec.bench.peer import Peer

    drafter = engine._drafter
    return Peer(
        programs,
        engine.model.path,
        None if drafter is None else drafter.context.model.path,
        n_ctx=engine.n_ctx,
        n_threads=options["threads"],
        n_gpu_layers=options["gpu_layers"],
        flash_attn={"auto": None, "on": True, "off": False}[options["flash_attn"]],
        kv_type=options["kv_type"],
    )


@contextmanager
def _shown(
    *, tables: bool
) -> Iterator[tuple[Callable[[int, int, str], None], Callable[[Run], None]]]:
    """A progress bar on stderr and every finished run: a table on stdout, or a line on stderr."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    from localspec.bench.report import run_table

    err = _console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def advance(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=one_line(name))

        def show(run: Run) -> None:
            bar.stop()  # both may be the same terminal
            if tables:
                _console().print(run_table(run))
            else:  # what is known should survive an interrupt
                lengths = (f"{n} {f.accepted_length:.2f}" for n, f in run.settings.items())
                place = f"{one_line(run.prompts)}, temperature {run.temperature:g}"
                err.print(f"{place}: accepted length {', '.join(lengths)}")
            bar.start()

        yield advance, show


def _print_summary(report: Report) -> None:
    from localspec.bench.report import summary_table

    table = summary_table(report)
    if table is not None:
        _console().print(table)


def _print_suite(report: Report, published: Published | None) -> None:
    from localspec.bench.suite import suite_table

    console = _console()
    console.print(suite_table(report, published))
    temperatures = sorted({r.temperature for r in report.runs})
    for source in published.sources(temperatures) if published is not None else ():
        console.print(f"published: {source}", markup=False, highlight=False)
    if published is None:
        console.print("no published figures are known for this pair")
    skipped = sum(r.skipped for r in report.runs)
    if skipped:
        console.print(f"{skipped} turns did not fit the context and were left out")


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False)
    if not console.is_terminal:  # tables in files are as wide as they need to be
        console.width = 200
    return console
