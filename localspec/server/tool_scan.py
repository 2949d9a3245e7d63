"""Parts of tool calls, read character by character.

These are generators that are sent characters (`Steps`): how an answer is cut into pieces makes no
difference to them, and none looks at a character twice. They return what they read, or raise
`NoCall`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator, Mapping, Sequence
from typing import TypeVar

from localspec.server.tool_arguments import GEMMA_QUOTE

T = TypeVar("T")
Steps = Generator[None, str, T]

_CLOSING = {"{": "}", "[": "]", "(": ")"}
_QUOTES = {"json": '"', "python": "'\"", "gemma": ""}


class NoCall(Exception):
    """What looked like a call is none."""


class EndOfText(NoCall):
    """Thrown into a parser when no more text comes."""


def marks(text: str) -> list[str]:
    """The marks of a text, between which white space may be or not."""
    return [mark for mark in re.split(r"(?<=>)\s*(?=<)", text.strip()) if mark]


def until(ends: Collection[str], most: int | None = None) -> Steps[tuple[str, str]]:
    """The text up to the first of some marks, and that mark.

    Raises:
        NoCall: there is none in the first `most` characters.
    """
    text, last = list[str](), {end[-1] for end in ends}
    while True:
        text.append((yield))
        if text[-1] in last:
            for end in ends:
                if "".join(text[-len(end) :]) == end:
                    return "".join(text[: -len(end)]), end
        if most is not None and len(text) > most:
            raise NoCall


def literal(mark: str) -> Steps[None]:
    """A mark, whatever the white space in it.

    Raises:
        NoCall: something else is there.
    """
    for sign in mark:
        if not sign.isspace():
            while (read := (yield)).isspace():
                pass
            if read != sign:
                raise NoCall


def following(options: Mapping[str, Sequence[str]], begun: str = "") -> Steps[tuple[str, int, str]]:
    """Which of some sequences of marks comes, as far as it comes.

    Args:
        options: the sequences; that of "end" need not be complete.
        begun: the first character, when it has been read.

    Returns:
        The option; how many marks of it were read; what was read that is not a part of "end".
    """
    alive, complete, rest = dict(options), 0, begun
    got = begun
    try:
        while True:
            done = next((o for o in alive if len(alive[o]) == complete and o != "end"), None)
            expected = {"".join(m[complete].split()) for m in alive.values() if len(m) > complete}
            if done is not None or not expected:
                return done or "end", complete, rest
            while got not in expected:
                sign = yield
                rest += sign
                if not sign.isspace():
                    got += sign
                    if not any(e.startswith(got) for e in expected):
                        return "end", complete, rest
            alive = {
                o: m
                for o, m in alive.items()
                if len(m) > complete and "".join(m[complete].split()) == got
            }
            complete, got = complete + 1, ""
            if "end" in alive:
                rest = ""
    except EndOfText:
        return "end", complete, rest


def bracketed(kind: str, begun: str = "") -> Steps[str]:
    """A value up to the bracket that closes it; what is in it is not checked yet.

    Args:
        kind: whose quotes: "json", "python" or "gemma".
        begun: its bracket, when that has been read.

    Raises:
        NoCall: it is no list or object, or brackets do not match.
    """
    text, open_ = [begun], [_CLOSING[c] for c in begun]
    while True:
        sign = yield
        text.append(sign)
        if sign in ("[" if kind == "python" and not open_ else "{[("):
            open_.append(_CLOSING[sign])
        elif not open_:
            if not sign.isspace():
                raise NoCall
        elif sign in "}])":
            if open_.pop() != sign:
                raise NoCall
            if not open_:
                return "".join(text)
        elif sign in _QUOTES[kind]:
            text.append((yield from quoted(sign, lines=kind == "python")))
        elif sign == "<":
            if kind != "gemma":
                raise NoCall
            yield from literal(GEMMA_QUOTE[1:])
            string, _ = yield from until([GEMMA_QUOTE])
            text += [GEMMA_QUOTE[1:], string, GEMMA_QUOTE]


def quoted(quote: str, *, lines: bool) -> Steps[str]:
    """The rest of a string with backslashes as escapes, its quote included.

    Args:
        quote: what it began with.
        lines: it may have several lines.

    Raises:
        NoCall: it has a control character.
    """
    text = list[str]()
    while not text or text[-1] != quote:
        text.append((yield))
        if text[-1] == "\\":
            text[-1] += yield
        elif text[-1] < " " and not lines:
            raise NoCall
    return "".join(text)
