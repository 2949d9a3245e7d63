"""Where messages come from: a line editor in a terminal, lines of standard input otherwise."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from localspec.cli.chatui.lines import is_open, unquoted

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import Completer
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings


class Prompt:
    """The line editor: several lines, history, Tab for commands.

    Args:
        commands: names to complete after a slash.
    """

    def __init__(self, commands: Iterable[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.shortcuts import CompleteStyle

        self._session: PromptSession[str] = PromptSession(
            history=_history(),
            multiline=True,
            prompt_continuation=lambda _width, _line, wraps: "    " if wraps else "... ",
            key_bindings=_keys(),
            completer=_completer(sorted(commands)),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
        )

    def ask(self, start: str = "") -> str:
        """What the user types, without what surrounds it; may be empty.

        Args:
            start: text to begin with, to be edited.

        Raises:
            EOFError: Ctrl-D on an empty line.
            KeyboardInterrupt: Ctrl-C.
        """
        return unquoted(self._session.prompt(">>> ", default=start))


def history_file() -> Path:
    """Where past messages are kept: in $LOCALSPEC_CACHE or the user's state directory."""
    folder = os.environ.get("LOCALSPEC_CACHE") or platformdirs.user_state_dir(
        "localspec", appauthor=False
    )
    return Path(folder) / "chat_history"


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # What people say to their model is nobody else's business.
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if is_open(buffer.text):
            buffer.newline(copy_margin=False)
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.newline(copy_margin=False)

    return keys


def _completer(commands: list[str]) -> Completer:
    from prompt_toolkit.completion import CompleteEvent, Completer, Completion
    from prompt_toolkit.document import Document

    class Commands(Completer):
        def get_completions(
            self, document: Document, complete_event: CompleteEvent
        ) -> Iterator[Completion]:
            text = document.text_before_cursor
            if text.startswith("/") and " " not in text:
                for name in commands:
                    if name.startswith(text[1:]):
                        yield Completion(name, start_position=1 - len(text))

    return Commands()


@contextlib.contextmanager
def keys_unseen() -> Iterator[None]:
    """Do not echo what is typed while an answer is drawn; it is read at the next prompt."""
    try:
        import termios

        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
    except (ImportError, OSError, ValueError):  # Windows, or no terminal
        yield
        return
    except termios.error:
        yield
        return
    silent = [*before]
    silent[3] &= ~termios.ECHO
    try:
        termios.tcsetattr(fd, termios.TCSANOW, silent)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)
