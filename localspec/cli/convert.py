"""`localspec convert`: a drafter checkpoint becomes a GGUF file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.convert import Progress

OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0")


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--target",
    type=click.Path(path_type=Path),
    help="GGUF of the model the drafter was trained for. Default: the default pair's target.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="GGUF to write. Default: <checkpoint>-<outtype>.gguf in the current directory.",
)
@click.option(
    "--outtype",
    type=click.Choice(OUTTYPES),
    default="auto",
    show_default=True,
    help="Type of the matrices. auto: f32 for a float32 checkpoint, q8_0 otherwise.",
)
@click.option(
    "--standalone",
    is_flag=True,
    help="Put token embeddings and output matrix in, instead of sharing the target's.",
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
def convert(
    checkpoint: Path,
    target: Path | None,
    output: Path | None,
    outtype: str,
    standalone: bool,
    force: bool,
) -> None:
    """Convert a DSpark drafter CHECKPOINT to GGUF.

    CHECKPOINT is a directory with config.json and model.safetensors. Tokenizer and vocabulary
    come from the target's GGUF. Everything is checked against the target first, and the output
    appears only when it is complete. Gated and rnn heads go into a second file beside it.
    """
    from localspec import pairs
    from localspec.convert import convert as run
    from localspec.convert import resolve_outtype

    if target is None:
        target = pairs.default_target()
    if output is None:
        outtype = resolve_outtype(checkpoint, outtype)
        output = Path(f"{checkpoint.resolve().name}-{outtype}.gguf")
    if output.is_dir():
        raise LocalspecError(f"{output} is a directory; name the GGUF file to write")
    # Gated and rnn heads take a second name, whose file would be replaced as well.
    for path in (output, pairs.heads_path(output)):
        if path.is_file() and not force:
            raise LocalspecError(f"{path} exists; use --force to replace it, or another output")
    with _progress_bar() as progress:
        result = run(
            checkpoint, target, output, outtype=outtype, standalone=standalone, progress=progress
        )
    size = result.nbytes / 1e6
    click.echo(
        f"wrote {result.path}: {result.head_type} drafter, {result.outtype}, "
        f"{result.n_tensors} tensors, {size:,.1f} MB"
    )
    if result.heads_path is not None:
        click.echo(f"wrote {result.heads_path}: its heads; keep the two files side by side")
    for note in result.notes:
        click.echo(f"note: {note}", err=True)
    click.echo(f"use it: localspec chat -m {_quoted(target)} -d {_quoted(result.path)}")


@contextmanager
def _progress_bar() -> Iterator[Progress | None]:
    """A bar on stderr with tensors and bytes; None when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("tensor {task.fields[number]}/{task.fields[count]}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[name]}", markup=False),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, number=0, count="?", name="")

        def progress(name: str, index: int, count: int, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, number=index + 1, count=count, name=name)

        yield progress


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
