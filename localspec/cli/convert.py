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
    from localspec.convert.verify import Report

OUTTYPES = (
    "auto", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0",
    "q3_k", "q2_k",
)  # fmt: skip


@click.command()
@click.argument("source")
@click.option(
    "--target",
    "target_name",
    metavar="MODEL",
    help="The model the drafter was trained for: GGUF, name or hub id. Default: the default pair's "
    "target.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="GGUF to write. Default: <source>-<outtype>.gguf in the current directory.",
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
@click.option(
    "--verify/--no-verify",
    default=None,
    help="Compare the result with the torch reference. Default: when torch is installed.",
)
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--force", is_flag=True, help="Replace an existing output.")
def convert(
    source: str,
    target_name: str | None,
    output: Path | None,
    outtype: str,
    standalone: bool,
    verify: bool | None,
    revision: str | None,
    force: bool,
) -> None:
    """Convert a drafter checkpoint to GGUF.

    SOURCE is a directory with config.json and weights, the output of a training, a weights file,
    or a hub id such as deepseek-ai/dspark_qwen3_8b_block7. Tokenizer and vocabulary come from the
    target's GGUF. Everything is checked against the target first, and the output appears only
    when it is complete. Gated and rnn heads go into a second file beside it.

    A drafter that is a GGUF already is checked against the target, and copied with -o.
    """
    from localspec import pairs
    from localspec.cli.options import finder
    from localspec.convert import convert as run
    from localspec.convert import hub, ready, resolve_outtype
    from localspec.convert.verify import available

    target = pairs.default_target() if target_name is None else finder().target(target_name)
    name = (hub.hub_id(source) or source).rstrip("/")
    checkpoint = hub.resolve(source, revision, lambda line: click.echo(line, err=True))
    if ready.is_gguf(checkpoint):
        copied = ready.use(checkpoint, target, output, force=force)
        click.echo(f"{checkpoint} is a GGUF already and fits {target}")
        if copied is not None:
            click.echo(f"copied to {copied}")
        _say_use(target, copied or checkpoint)
        return
    if output is None:
        outtype = resolve_outtype(checkpoint, outtype)
        stem = Path(name).resolve().name if hub.hub_id(source) is None else name.split("/")[-1]
        output = Path(f"{stem}-{outtype}.gguf")
    if output.is_dir():
        raise LocalspecError(f"{output} is a directory; name the GGUF file to write")
    # Gated and rnn heads take a second name, whose file would be replaced as well.
    for path in (output, pairs.heads_path(output)):
        if path.is_file() and not force:
            raise LocalspecError(f"{path} exists; use --force to replace it, or another output")
    with progress_bar() as progress:
        result = run(
            checkpoint,
            target,
            output,
            outtype=outtype,
            standalone=standalone,
            verify=available() if verify is None else verify,
            progress=progress,
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
    if result.report is not None:
        _print_report(result.report)
    elif verify is None and not available():
        click.echo("note: not compared with the reference, which needs torch", err=True)
    _say_use(target, result.path)


def _say_use(target: Path, drafter: Path) -> None:
    click.echo(f"use it: localspec chat -m {_quoted(target)} -d {_quoted(drafter)}")


def _print_report(report: Report) -> None:
    """The differences between the file and the reference, one line each."""
    from rich.console import Console
    from rich.table import Table

    table = Table("against the reference", box=None, pad_edge=False)
    for column in ("largest difference", "of the spread", "allowed"):
        table.add_column(column, justify="right")
    for d in report.differences:
        largest = f"{d.largest:.0f} tokens" if d.what == "chain" else f"{d.largest:.2g}"
        table.add_row(d.what, largest, f"{d.relative:.2g}", f"{d.allowed:g}")
    Console(highlight=False).print(table)


@contextmanager
def progress_bar() -> Iterator[Progress | None]:
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
