"""`localspec pull`: download a model and a drafter for it."""

from __future__ import annotations

import shlex
from pathlib import Path

import click


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="MODEL...")
@click.option("-d", "--drafter", metavar="DRAFTER",
              help="Another drafter than the usual one: a family of `localspec models`, owner/name "
              "on the hub, or none.")  # fmt: skip
@click.option(
    "--verify", is_flag=True, help="Compare converted drafters with the reference (needs torch)."
)
def pull(names: tuple[str, ...], drafter: str | None, verify: bool) -> None:
    """Download models and their drafters, and convert the drafters to GGUF.

    \b
    localspec pull qwen3-4b
    localspec pull qwen3-8b:Q8_0 -d eagle3
    localspec pull owner/name:Q4_K_M -d owner/drafter

    MODEL is a name of `localspec models`, with a quantisation if you like, or a model on the hub.
    A download that broke off goes on where it was; what is here already is not loaded again.
    """
    from localspec.cli.options import finder
    from localspec.hub import size_in_words

    for name in names:
        found = finder(update=True, verify=verify).files(name, drafter)
        found.check()
        click.echo(f"target   {found.target} ({size_in_words(found.target.stat().st_size)})")
        command = ["localspec", "chat", name]
        if isinstance(found.drafter, Path):
            size = size_in_words(found.drafter.stat().st_size)
            click.echo(f"drafter  {found.drafter} ({size})")
        else:
            click.echo(f"drafter  {found.drafter or 'none'}")
        if drafter is not None:
            command += ["-d", drafter]
        click.echo(f"use it: {shlex.join(command)}")
