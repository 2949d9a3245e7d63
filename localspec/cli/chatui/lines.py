"""Messages from lines: one a line, or several lines between triple quotes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

QUOTES = '"""'


def is_open(text: str) -> bool:
    """Whether a triple quote at the beginning waits for its end."""
    start = text.lstrip()
    return start.startswith(QUOTES) and QUOTES not in start[len(QUOTES) :]


def unquoted(text: str) -> str:
    """The message, without the triple quotes around it."""
    text = text.strip()
    if text.startswith(QUOTES):
        text = text[len(QUOTES) :].partition(QUOTES)[0]
    return text.strip()


def messages(lines: Iterable[str]) -> Iterator[str]:
    """The messages in some lines; empty ones are left out."""
    held = ""
    for line in lines:
        held += line if line.endswith("\n") else line + "\n"
        if is_open(held):
            continue
        if text := unquoted(held):
            yield text
        held = ""
    if text := unquoted(held):
        yield text
