"""`localspec chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from localspec.cli import one_line
from localspec.cli.options import (
    draft_options,
    drafting,
    loaded_engine,
    model_options,
    prepare,
    sampling_options,
    sampling_params,
)
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from rich.console import Console

    from localspec.chat import Chat

_HELP = """\
/help   this list
/reset  start a new conversation
/stats  numbers of the last answer
/quit   leave (or Ctrl-D)
Ctrl-C stops an answer; the conversation goes on."""


@click.command()
@model_options
@click.option("--system", help="System message.")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), metavar="N",
              help="Most tokens per answer.")  # fmt: skip
@sampling_options
@draft_options
def chat(system: str | None, max_tokens: int | None, **options: Any) -> None:
    """Chat with a model.

    Every turn evaluates only what is new. Piped input works too: one message a line.
    """
    from rich.console import Console

    from localspec.chat import Chat

    params, draft = sampling_params(options), drafting(options)
    console = Console(highlight=False)
    with loaded_engine(options) as engine:
        prepare(engine, draft)
        talk = Chat(engine, system=system, params=params, draft=draft)
        if _interactive():
            name = engine.model.meta("general.name") or engine.model.path.stem
            console.print(one_line(name), style="bold", markup=False, end="  ")
            console.print("[dim]/help shows the commands[/dim]")
        failed = False
        for line in _lines(console):
            if line.startswith("/"):
                if not _command(line, talk, console):
                    break
            elif not _answer(talk, line, max_tokens, console):
                failed = failed or not _interactive()
    if failed:
        raise SystemExit(1)


def _interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _lines(console: Console) -> Iterator[str]:
    if not _interactive():
        yield from (stripped for line in sys.stdin or () if (stripped := line.strip()))
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            line = input(">>> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim]/quit leaves[/dim]")
            continue
        if line:
            yield line


def _answer(talk: Chat, line: str, max_tokens: int | None, console: Console) -> bool:
    """Print the answer to a line; False when there is none."""
    steps = talk.send(line, max_tokens=max_tokens)
    stopped = ""
    try:
        for step in steps:
            console.print(step.text, end="", markup=False, soft_wrap=True)
            if step.finish_reason == "length":
                stopped = " · cut at the limit"
    except KeyboardInterrupt:
        stopped = " · stopped"
    except LocalspecError as e:
        if _interactive():
            console.print(one_line(e), style="red", markup=False, soft_wrap=True)
        else:
            click.echo(f"error: {one_line(e)}", err=True)
        return False
    finally:
        # Python closes a generator late; the conversation must be whole before the next line.
        steps.close()  # type: ignore[attr-defined]
    console.print()
    if _interactive():
        console.print(f"[dim]{_status(talk)}{stopped}[/dim]", highlight=False)
    return True


def _status(talk: Chat) -> str:
    result = talk.last
    if result is None or not result.token_ids:
        return "no answer yet"
    return (
        f"{len(result.token_ids)} tokens · {result.tokens_per_second:.1f} tokens/s · "
        f"accepted length {result.tau:.2f}"
    )


def _stats(talk: Chat) -> str:
    result = talk.last
    if result is None or not result.rounds:
        return "no answer yet"
    rounds, n = result.rounds, len(result.rounds)
    parts = [
        f"{what} {1e3 * sum(getattr(r.seconds, what) for r in rounds) / n:.1f} ms"
        for what in ("draft", "verify", "host")
    ]
    verified = sum(r.verified for r in rounds)
    accepted = sum(r.accepted for r in rounds)
    share = f"{accepted / verified:.0%}" if verified else "none"
    return "\n".join(
        [
            _status(talk),
            f"prompt {result.prompt_tokens} tokens, {result.processed_tokens} of them new, "
            f"{result.prefill_seconds:.2f} s to the first token",
            f"{n} rounds, {accepted} of {verified} drafted tokens accepted ({share})",
            "per round: " + ", ".join(parts),
        ]
    )


def _command(line: str, talk: Chat, console: Console) -> bool:
    """Run a slash command; False to leave."""
    word = line.split()[0]
    if word in ("/quit", "/exit", "/bye"):
        return False
    if word == "/help":
        console.print(_HELP, markup=False)
    elif word == "/reset":
        talk.reset()
        console.print("[dim]new conversation[/dim]")
    elif word == "/stats":
        console.print(_stats(talk), markup=False)
    else:
        console.print(f"{word} is no command; /help lists them", style="red", markup=False)
    return True
