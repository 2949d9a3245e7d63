"""`localspec chat`: a conversation in the terminal. Its parts lie in `localspec.cli.chatui`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.options import (
    cache_options,
    draft_options,
    drafting,
    load_engine,
    model_argument,
    model_options,
    prepare,
    sampling_options,
    sampling_params,
    target_and_drafter,
)

if TYPE_CHECKING:
    from localspec.engine import Engine


@click.command()
@model_argument
@model_options
@cache_options
@click.option("--system", help="System message.")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), metavar="N",
              help="Most tokens per answer.")  # fmt: skip
@sampling_options
@draft_options
def chat(system: str | None, max_tokens: int | None, **options: Any) -> None:
    """Chat with a model.

    Every turn evaluates only what is new. /help shows the commands. Piped input works too: one
    message or command a line, or several lines between triple quotes.
    """
    from localspec.cli.chatui.session import Session
    from localspec.cli.chatui.talk import converse, interactive, obey

    params, draft = sampling_params(options), drafting(options)
    files = target_and_drafter(options)

    def load(target: str | Path, drafter: str | Path | None) -> Engine:
        engine = load_engine(target, drafter, dict(options))
        try:
            prepare(engine, draft)
        except BaseException:
            engine.close()
            raise
        return engine

    session = Session(load, files, system=system, params=params, draft=draft, max_tokens=max_tokens)
    with contextlib.closing(session):
        if interactive():
            converse(session)
        elif not obey(session):
            raise SystemExit(1)
