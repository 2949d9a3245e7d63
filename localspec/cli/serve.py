"""`localspec serve`: the OpenAI API for one model. The server is `localspec.server`."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

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
from localspec.errors import LocalspecError


@click.command()
@model_argument
@model_options
@cache_options
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; any that others can reach needs --api-key.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    metavar="N",
    help="Port to listen on; 0 takes any free one.",
)
@click.option(
    "--api-key",
    envvar="LOCALSPEC_API_KEY",
    show_envvar=True,
    metavar="KEY",
    help="Key that requests must carry; the variable keeps it out of process lists.",
)
@click.option(
    "--allow-origin",
    multiple=True,
    metavar="URL",
    help="Let web pages of this origin ask (repeatable).",
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Another name the server is addressed by (repeatable).",
)
@click.option("--alias", metavar="NAME", help="Name of the model in the API (default: its file's).")
@click.option(
    "--max-queue",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    metavar="N",
    help="Requests that may wait for their turn.",
)
@click.option(
    "--max-body", default="4M", show_default=True, metavar="SIZE", help="Longest body of a request."
)
@click.option(
    "--max-connections",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    metavar="N",
    help="Open connections.",
)
@sampling_options
@draft_options
def serve(
    host: str,
    port: int,
    api_key: str | None,
    allow_origin: tuple[str, ...],
    allow_host: tuple[str, ...],
    alias: str | None,
    max_queue: int,
    max_body: str,
    max_connections: int,
    **options: Any,
) -> None:
    """Serve a model to programs that speak OpenAI's API.

    Requests take turns. The sampling options hold for requests that leave theirs out. Ctrl-C ends
    the server and the answers under way.

    \b
    localspec serve
    localspec serve target.gguf -d drafter.gguf --port 9000
    LOCALSPEC_API_KEY=secret localspec serve --host 0.0.0.0
    """  # fmt: skip
    _check_extra()
    from localspec.cli import one_line
    from localspec.server.limits import Limits
    from localspec.server.queue import FairQueue
    from localspec.server.run import base_url, bind, server_for
    from localspec.server.security import Access
    from localspec.server.service import Service

    # Everything that can be wrong is found before the model is loaded.
    access = Access(host, api_key, allow_origin, allow_host)
    limits = Limits(max_body=_bytes(max_body), max_connections=max_connections)
    verbose = options["verbose"]
    params, draft = sampling_params(options), drafting(options)
    with bind(host, port) as listening:
        files = target_and_drafter(options)
        with load_engine(*files, options) as engine:
            prepare(engine, draft)
            service = Service(engine, alias or "", params, draft, queue=FairQueue(max_queue))

            def ready() -> None:
                click.echo(f"serving {one_line(service.model_id)}; Ctrl-C ends it", err=True)
                click.echo(base_url(listening, host))

            if verbose:
                logging.getLogger("uvicorn").addHandler(logging.StreamHandler())
            server_for(service, access, limits, ready=ready, verbose=verbose).run([listening])


def _bytes(size: str) -> int:
    from localspec.prefixes import parse_size

    try:
        return parse_size(size)
    except LocalspecError as e:
        raise LocalspecError(f"--max-body {size} is no size; give one such as 4M") from e


def _check_extra() -> None:
    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise LocalspecError(
            "serving needs more packages; install them with: pip install 'localspec[serve]'"
        )
