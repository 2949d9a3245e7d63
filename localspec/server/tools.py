"""Tool calls in the answers of a model, read piece by piece."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from localspec.llama import Model
from localspec.server.tool_arguments import GEMMA_QUOTE
from localspec.server.tool_format import Tool, ToolFormat
from localspec.server.tool_parser import CallParser, Parsed
from localspec.server.tool_scan import EndOfText, NoCall, Steps
from localspec.text import overlap

# Llama 3 writes it in front of calls when it has tools of its own.
_PYTHON_TAG = "<|python_tag|>"
_MOST_SPACE = 1000  # in front of an answer that is a call
_MOST_IN_VAIN = 1_000_000  # characters of an answer that were taken for calls and are none


@dataclass(frozen=True)
class Call:
    """A call of a function; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{os.urandom(12).hex()}")

    def as_dict(self) -> dict[str, Any]:
        """As OpenAI writes it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class CallReader:
    """Takes the text of an answer piece by piece, and gives out plain text and calls.

    Text that looks like a call but is none (not JSON, no such function) comes out as text; an
    answer that is full of such is not looked through to its end. White space around calls goes
    with them.

    Args:
        form: how the model writes calls.
        tools: what it may call.
        begun: what the answer began with before the first piece.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], begun: str = "") -> None:
        self._form = form
        self._parser = CallParser(form, {t["function"]["name"]: t for t in tools})
        self._waiting = begun  # text that may be the beginning of a call
        self._space = list[str]()  # behind the text given out so far
        self._behind = self._plain = False  # behind a call; no more calls are looked for
        self._parse: Steps[Parsed] | None = None
        self._lead, self._read = "", list[str]()  # the call's beginning, and what was parsed
        self._in_vain = 0
        self.calls: list[Call] = []

    def marked_by(self, model: Model) -> bool:
        """Whether calls are marked with special tokens, which text does not show."""
        form = self._form
        around = [form.start, form.middle, form.end, form.again or ""]
        around += [GEMMA_QUOTE] if form.kind == "gemma" else []
        if form.tags is not None:
            around += [mark for mark in astuple(form.tags) if isinstance(mark, str)]
        return any(
            not model.piece(t) and model.piece(t, special=True) and not model.is_end(t)
            for t in model.tokenize(" ".join(around))
        )

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Add text; what is certain by now: plain text, and calls after it."""
        return self._advance(text, final=False)

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back, when no more text comes."""
        return self._advance("", final=True)

    def _advance(self, text: str, *, final: bool) -> tuple[str, list[Call]]:
        text, self._waiting = self._waiting + text, ""
        out, found, at = list[str](), list[Call](), 0
        while True:
            if self._parse is None:
                at = self._plain_text(text, at, out, final)
            if self._parse is None:
                break
            begin = at
            try:
                while at < len(text):
                    at += 1
                    self._parse.send(text[at - 1])
                if not final:
                    self._read.append(text[begin:])
                    break
                self._parse.throw(EndOfText())
            except StopIteration as e:
                parsed: Parsed = e.value
                calls = _calls(parsed)
                if calls is not None:
                    found += calls
                    self._space, self._behind = [], not parsed.again
                    if parsed.again:
                        self._begin(parsed.rest, again=True)
                    else:
                        self._end()
                        text, at = _back(text, at, parsed.rest)
                    continue
            except NoCall:
                pass
            # No call after all. What follows its beginning is looked through again.
            self._in_vain += sum(map(len, self._read)) + at - begin
            self._plain = not self._parser.marker or self._in_vain > _MOST_IN_VAIN
            out += [*self._space, self._lead]
            self._space = []
            text, at = ("".join(self._read) + text, 0) if self._read else (text, begin)
            self._end()
        self.calls += found
        return "".join(out), found

    def _begin(self, lead: str, *, again: bool) -> None:
        self._lead, self._read = lead, []
        self._parse = self._parser.parse(again=again)
        next(self._parse)

    def _end(self) -> None:
        self._parse, self._read = None, []

    def _plain_text(self, text: str, at: int, out: list[str], final: bool) -> int:
        """Gives out text from `at` to the next call, which it begins; returns where that is."""
        marker = self._parser.marker
        while self._behind and at < len(text):
            self._behind = text[at].isspace() or (text[at] == ";" and not marker)
            at += self._behind
        if not marker and not self._plain:  # an answer is a call, or it is not
            rest = text[at:]
            begin = rest.lstrip().removeprefix(_PYTHON_TAG).lstrip()
            lead = rest.removesuffix(begin)
            if len(lead) <= _MOST_SPACE and begin[:1] in ("{", "["):
                self._begin(lead, again=False)
                return len(text) - len(begin)
            if len(lead) <= _MOST_SPACE and not final and _PYTHON_TAG.startswith(begin):
                self._waiting = rest
                return len(text)
            self._plain = True
        found = -1 if self._plain or not marker else text.find(marker, at)
        keep = (
            0 if final or self._plain else overlap(text[max(at, len(text) - len(marker)) :], marker)
        )
        end = found if found >= 0 else len(text) - keep
        stripped = text[at:end].rstrip()
        if stripped:
            out += [*self._space, stripped]
            self._space = []
        self._space.append(text[at + len(stripped) : end])
        if found >= 0:
            self._begin(marker, again=False)
            return found + len(marker)
        if final:
            out += self._space
            self._space = []
        self._waiting = text[end:]
        return len(text)


def _back(text: str, at: int, rest: str) -> tuple[str, int]:
    """Text and a place in it in front of what was read last, which may be of earlier pieces."""
    return (text, at - len(rest)) if len(rest) <= at else (rest + text[at:], 0)


def _calls(parsed: Parsed) -> list[Call] | None:
    try:
        return [Call(name, json.dumps(a, ensure_ascii=False)) for name, a in parsed.calls]
    except RecursionError:  # nested too deeply
        return None
