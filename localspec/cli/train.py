"""`localspec train`: a drafter of its own for a GGUF."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.models.finish import Finished
    from localspec.models.progress import Progress

_NAMES = {
    "prompts": "writing prompts",
    "text": "writing answers",
    "training": "training",
    "save": "saving",
    "convert": "converting",
    "calibrate": "calibrating",
}


def _layers(context: click.Context, option: click.Parameter, value: str | None) -> Any:
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("give layer numbers with commas, e.g. 1,10,19,28") from None


def _size(context: click.Context, option: click.Parameter, value: str | None) -> int | None:
    from localspec.prefixes import parse_size

    if value is None:
        return None
    try:
        return parse_size(value)
    except LocalspecError:
        raise click.BadParameter("give a size such as 8G or 500M") from None


_count = click.IntRange(min=1)


@click.command()
@click.option(
    "--target",
    metavar="MODEL",
    help="The model the drafter is for: GGUF, name or hub id (left out: the default "
    "pair's target).",
)
@click.option(
    "-o",
    "--output",
    "out",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the run.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in DIR.")
@click.option(
    "--prompts",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Prompts, or chat logs: a file or a folder (left out: the target writes its own).",
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0, min_open=True),
    metavar="H",
    help="Time for everything (left out: 2, without --tokens).",
)
@click.option("--tokens", type=_count, metavar="N", help="Text to train on, instead of --hours.")
@click.option(
    "--steps",
    type=_count,
    metavar="N",
    help="Training steps (left out: what the hours leave, or six passes over the text).",
)
@click.option(
    "--init",
    metavar="CHECKPOINT",
    help="Start from this drafter: a checkpoint directory, the directory of another run, "
    "or owner/name on the hub.",
)
@click.option(
    "--disk",
    metavar="SIZE",
    callback=_size,
    help="Most disk space for features and a faster copy of the target (8G).",
)
@click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Same seed and text, same drafter (0)."
)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda", "mps"]), help="Where to train (auto)."
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "bf16", "f32"]),
    help="Of matrix products (auto: what is faster here).",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    metavar="N",
    help="CPU threads (left out: one per physical core it may use).",
)
@click.option(
    "--checkpoint-minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="M",
    help="Minutes between two checkpoints (5).",
)
@click.option("--layers", type=_count, metavar="N", help="Layers of the drafter.")
@click.option(
    "--block-size", type=click.IntRange(2, 16), metavar="N", help="Tokens drafted in one pass."
)
@click.option("--rank", type=_count, metavar="N", help="Rank of the Markov head (64).")
@click.option(
    "--head", type=click.Choice(["vanilla", "gated", "rnn"]), help="Markov head (vanilla)."
)
@click.option(
    "--vocab",
    type=click.IntRange(min=0),
    metavar="N",
    help="Tokens it can draft; 0: all (left out: what 98% of the text needs).",
)
@click.option("--ffn", type=_count, metavar="N", help="Width of its MLPs.")
@click.option(
    "--target-layers", metavar="N,N,...", callback=_layers, help="Layers whose outputs it sees."
)
@click.option("--answer", type=_count, metavar="N", help="Most tokens of an answer (192).")
@click.option(
    "--longest", type=_count, metavar="N", help="Most tokens of a prompt with its answer (384)."
)
@click.option("--sequences", type=_count, metavar="N", help="Conversations per step (2).")
@click.option("--anchors", type=_count, metavar="N", help="Blocks per conversation (96).")
@click.option("--lr", type=float, metavar="X", help="Peak learning rate of matrices (0.02).")
@click.option("--adam-lr", type=float, metavar="X", help="Peak learning rate of the rest (0.003).")
@click.option(
    "--outtype",
    type=click.Choice(["f32", "f16", "bf16", "q8_0", "q4_0"]),
    help="Type of the GGUF's matrices (q8_0).",
)
@click.option("--calibrate/--no-calibrate", default=None, help="Calibrate the drafter at the end.")
def train(target: str | None, out: Path, resume: bool, **options: Any) -> None:
    """Train a drafter for exactly this GGUF, from text that it writes itself.

    \b
    localspec train --target model.gguf -o run --hours 2
    localspec train --target model.gguf -o run --prompts logs.jsonl --init owner/drafter
    localspec train -o run --resume

    DIR gets a checkpoint in the published format with a training card, the drafter as GGUF and its
    calibration. Ctrl-C stops; --resume goes on, also after a crash.
    """  # fmt: skip
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        raise LocalspecError(
            "training needs torch; install it with: pip install 'localspec[train]'"
        )
    from localspec import pairs
    from localspec.cli.options import finder
    from localspec.models.run import train as run

    for name in ("prompts", "init"):
        value = options[name]
        if value is not None and Path(value).exists():
            options[name] = str(Path(value).resolve())
        elif value is not None:
            options[name] = str(value)
    path = None
    if target is not None:
        path = finder().target(target)
    elif not resume:
        path = pairs.default_target()
    try:
        with _bar() as report:
            done = run(path, out, resume=resume, report=report, **options)
    except KeyboardInterrupt:
        click.echo(f"stopped; go on with: localspec train -o {shlex.quote(str(out))} --resume",
                   err=True)  # fmt: skip
        raise SystemExit(130) from None
    _say(done, path, out)


def _say(done: Finished, target: Path | None, out: Path) -> None:
    from localspec.models.settings import FILE, load

    model = target or Path(load(out / FILE).target)
    click.echo(f"checkpoint and training card: {done.checkpoint}")
    size = done.drafter.stat().st_size / 1e6
    calibrated = ", calibrated" if done.calibration else ""
    click.echo(f"drafter: {done.drafter} ({size:,.1f} MB{calibrated})")
    if done.length is not None:
        click.echo(f"{done.length:.2f} tokens a round on prompts it has not seen (greedy chain)")
    pair = f"-m {shlex.quote(str(model))} -d {shlex.quote(str(done.drafter))}"
    click.echo(f"use it: localspec chat {pair}")


@contextmanager
def _bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on stderr; lines now and then when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Bar(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def report(progress: Progress) -> None:
            if progress.phase not in tasks:
                for task in tasks.values():
                    bar.stop_task(task)
                tasks[progress.phase] = bar.add_task(_NAMES[progress.phase], total=1.0, note="")
            bar.update(tasks[progress.phase], completed=progress.done, note=describe(progress))

        yield report


class _Lines:
    """A line per phase, and one a minute."""

    def __init__(self) -> None:
        self._phase, self._next = "", 0.0

    def __call__(self, progress: Progress) -> None:
        import time

        now = time.monotonic()
        if progress.phase != self._phase or now >= self._next:
            self._phase, self._next = progress.phase, now + 60
            note = describe(progress)
            click.echo(f"{_NAMES[progress.phase]}: {progress.done:.0%} {note}".rstrip(), err=True)


def describe(progress: Progress) -> str:
    """What a progress bar says beside the bar."""
    parts = [progress.note]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.agreed:
        parts.append("right by depth " + " ".join(f"{v:.2f}" for v in progress.agreed))
    if progress.length is not None:
        parts.append(f"{progress.length:.2f} tokens a round")
    return ", ".join(part for part in parts if part)
