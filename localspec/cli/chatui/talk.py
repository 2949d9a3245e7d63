"""The loop of a chat: read, answer or obey, show."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol

import click

from localspec.cli import one_line
from localspec.cli.chatui import commands
from localspec.cli.chatui.clean import printable
from localspec.cli.chatui.lines import messages
from localspec.cli.chatui.prompt import Prompt, keys_unseen
from localspec.cli.chatui.region import Region
from localspec.cli.chatui.session import Session, Steps
from localspec.cli.chatui.stats import status
from localspec.cli.chatui.view import PlainView, TerminalView, View
from localspec.errors import LocalspecError
from localspec.interrupts import wish_to_stop

if TYPE_CHECKING:
    from rich.console import Console


class Screen(Protocol):
    """Where a chat is shown."""

    def say(self, text: str, *, dim: bool = False) -> None:
        """Lines of our own."""

    def complain(self, error: str) -> None:
        """What is wrong."""

    def view(self, session: Session) -> View:
        """Shows the next answer."""

    def answered(self, session: Session) -> None:
        """An answer has ended."""


class Pipe:
    """Standard output that is no terminal: answers and nothing else, errors to stderr."""

    def say(self, text: str, *, dim: bool = False) -> None:
        """Print it."""
        click.echo(printable(text))

    def complain(self, error: str) -> None:
        """Print it to stderr."""
        click.echo(f"error: {one_line(error)}", err=True)

    def view(self, session: Session) -> View:
        """Text as it comes."""
        return PlainView(lambda text: click.echo(text, nl=False))

    def answered(self, session: Session) -> None:
        """Nothing to add."""


class Terminal:
    """A terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str, *, dim: bool = False) -> None:
        """Print it; remarks are dimmed."""
        self._print(printable(text), "dim" if dim else "")

    def complain(self, error: str) -> None:
        """Print it in red."""
        self._print(one_line(error), "red")

    def view(self, session: Session) -> View:
        """Markdown or coloured tokens."""
        model = session.engine.model
        return TerminalView(self._console, session.show, model.piece, opened=session.opened())

    def answered(self, session: Session) -> None:
        """The answer's numbers below it."""
        self._print(status(session.chat.last) + "\n", "dim")

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """A line that changes while something takes time, and is gone afterwards."""
        from rich.text import Text

        region = Region(self._console)
        try:
            yield lambda text: region.draw([], [Text(text, style="dim")])
        finally:
            region.draw([], [])

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, highlight=False)


def interactive() -> bool:
    """Whether a person sits at both ends."""
    return all(s is not None and s.isatty() for s in (sys.stdin, sys.stdout))


def converse(session: Session) -> None:
    """A whole chat with a person."""
    from rich.console import Console

    console = Console(highlight=False)
    screen = Terminal(console)
    prompt = Prompt(commands.COMMANDS)
    name = session.engine.model.meta("general.name") or session.engine.model.path.stem
    screen.say(f"{one_line(name)}   /help shows the commands, Ctrl-D leaves", dim=True)
    while True:
        try:
            line = prompt.ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            screen.say("Ctrl-D or /quit leaves", dim=True)
            continue
        if not line:
            continue
        if not commands.is_command(line):
            answer(session, screen, partial(session.send, line))
            continue
        with wish_to_stop(session.engine.cancel), keys_unseen(), screen.progress() as progress:
            outcome = _interruptible(session, line, progress)
        if outcome.leave:
            return
        if outcome.editing is not None:
            outcome = _edited(session, prompt, outcome.editing)
        show(session, screen, outcome)


def obey(session: Session) -> bool:
    """A whole chat with standard input; False when anything failed."""
    screen, fine = Pipe(), True
    for line in messages(sys.stdin or ()):
        if not commands.is_command(line):
            fine = answer(session, screen, partial(session.send, line)) and fine
            continue
        outcome = commands.run(session, line)
        if outcome.leave:
            break
        if outcome.editing is not None:
            outcome = commands.Outcome("/edit needs the new text", error=True)
        fine = show(session, screen, outcome) and fine
    return fine


def show(session: Session, screen: Screen, outcome: commands.Outcome) -> bool:
    """Show what a command came to; False when it failed."""
    if outcome.error:
        screen.complain(outcome.text)
        return False
    if outcome.text:
        screen.say(outcome.text, dim=outcome.dim)
    steps = outcome.answer
    return steps is None or answer(session, screen, lambda: steps)


def answer(session: Session, screen: Screen, start: Callable[[], Steps]) -> bool:
    """Stream an answer; False when there is none."""
    view = screen.view(session)
    try:
        with (
            wish_to_stop(session.engine.cancel) as stopped,
            keys_unseen(),
            contextlib.closing(start()) as steps,
        ):
            for step in steps:
                view.add(step)
                if stopped():
                    break
    except KeyboardInterrupt:  # a second Ctrl-C
        pass
    except LocalspecError as e:
        screen.complain(str(e))
        return False
    view.finish()
    screen.answered(session)
    return True


def _interruptible(
    session: Session, line: str, progress: Callable[[str], None]
) -> commands.Outcome:
    try:
        return commands.run(session, line, progress)
    except KeyboardInterrupt:
        return commands.Outcome("stopped", dim=True)


def _edited(session: Session, prompt: Prompt, message: int) -> commands.Outcome:
    try:
        text = prompt.ask(session.chat.messages[message]["content"])
    except (EOFError, KeyboardInterrupt):
        text = ""
    if not text:
        return commands.Outcome("not edited", dim=True)
    session.chat.edit(message, text)
    return commands.Outcome(answer=session.regenerate())
