"""`localspec tune`: measure this machine again and show what came out."""

from __future__ import annotations

from typing import Any

import click

from localspec.cli.options import loaded_engine, measure, model_argument, model_options


@click.command()
@model_argument
@model_options
def tune(**options: Any) -> None:
    """Measure what verification costs on this machine.

    The auto policy measures once by itself and keeps the result; this does it again, e.g. after a
    driver update, and shows the curve: the time of one target pass over n tokens.
    """
    from rich.console import Console
    from rich.table import Table

    with loaded_engine(options) as engine:
        result = measure(engine)
        table = Table(title=engine.model.description)
        table.add_column("tokens", justify="right")
        for depth in result.depths:
            table.add_column(f"ms at {depth}", justify="right")
        table.add_column("x one", justify="right")
        table.add_column("")
        first, longest = result.seconds[0][0], max(result.seconds[0])
        for i, n in enumerate(result.sizes):
            here = result.seconds[0][i]
            table.add_row(
                str(n),
                *(f"{1e3 * row[i]:.1f}" for row in result.seconds),
                f"{here / first:.2f}",
                "█" * max(1, round(30 * here / longest)),
            )
        console = Console()
        console.print(table)
        if result.block_seconds:
            console.print(f"one drafter pass: {1e3 * result.block_seconds:.1f} ms")
