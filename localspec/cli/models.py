"""`localspec models`: the models that have names, and which of them are here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from localspec.inventory import Entry, Piece


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def models(as_json: bool) -> None:
    """List the models that have names: target, drafters, size, and whether they are here.

    Any other model works too: give a GGUF file, or owner/name[:Q4_K_M] on the hub, with -m.
    """
    from localspec.inventory import inventory

    entries = inventory()
    if as_json:
        click.echo(json.dumps([as_dict(entry) for entry in entries], indent=2))
        return
    _print(entries)


def as_dict(entry: Entry) -> dict[str, Any]:
    """An entry as `--json` prints it."""
    return {
        "name": entry.pair.name,
        "title": entry.pair.title,
        "layers": entry.pair.layers,
        "width": entry.pair.width,
        "ready": entry.ready,
        "target": _piece(entry.target),
        "drafters": [{"family": d.family, **_piece(d)} for d in entry.drafters],
    }


def _piece(piece: Piece) -> dict[str, Any]:
    return {
        "source": piece.source,
        "bytes": piece.size,
        "bytes_here": piece.here,
        "downloaded": piece.path is not None,
        "path": None if piece.path is None else str(piece.path),
    }


def _print(entries: list[Entry]) -> None:
    from rich.console import Console
    from rich.table import Table

    from localspec.hub import size_in_words

    table = Table(box=None, pad_edge=False)
    for column in ("name", "what", "from"):
        table.add_column(column, overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("here", overflow="fold")
    for entry in entries:
        for piece in (entry.target, *entry.drafters):
            first = piece is entry.target
            table.add_row(
                entry.pair.name if first else "",
                "target" if first else piece.family,
                _short(piece.source),
                "" if piece.size is None else size_in_words(piece.size),
                _here(piece),
            )
    console = Console(highlight=False, markup=False)
    console.print(table)
    for entry in entries:
        for piece in (entry.target, *entry.drafters):
            if piece.path is not None:  # on a line of its own, unwrapped: to be copied
                click.echo(f"{entry.pair.name} {piece.family or 'target'}: {piece.path}")


def _short(source: str) -> str:
    """owner/name/x-Q4_K_M.gguf -> owner/name:Q4_K_M, which -m takes as well."""
    if not source.endswith(".gguf"):
        return source
    repo, file = source.rsplit("/", 1)
    return f"{repo}:{Path(file).stem.rsplit('-', 1)[-1]}"


def _here(piece: Piece) -> str:
    if piece.path is not None:
        return "yes"
    if piece.here and piece.size:
        return f"{piece.here / piece.size:.0%}"
    return "no"
