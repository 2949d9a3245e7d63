"""Tool calls in the answers of a model, read piece by piece."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from localspec.llama import Model
from localspec.server.tool_format import Tool, ToolFormat, as_object, parameters_of
from localspec.text import overlap

_DECODER = json.JSONDecoder()


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

    Text that looks like a call but is none (not JSON, no such function) comes out as text.

    Args:
        form: how the model writes calls.
        tools: what it may call.
        begun: what the answer began with before the first piece.
    """

    def __init__(self, form: ToolFormat, tools: Sequence[Tool], begun: str = "") -> None:
        self._form = form
        self._tools = {t["function"]["name"]: t for t in tools}
        self._marker, self._end = form.start.strip(), form.end.strip()
        if form.kind == "tags" and not self._marker:
            self._marker = "<function="
        self._held = ""
        self._calling = self._plain = False
        self.calls: list[Call] = []
        if begun:
            self._held = begun

    def marked_by(self, model: Model) -> bool:
        """Whether calls are marked with special tokens, which text does not show."""
        form = self._form
        marks = model.tokenize(f"{form.start} {form.middle} {form.end}")
        return any(
            not model.piece(t) and model.piece(t, special=True) and not model.is_end(t)
            for t in marks
        )

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Add text; what is certain by now: plain text, and calls after it."""
        self._held += text
        return self._advance(final=False)

    def finish(self) -> tuple[str, list[Call]]:
        """What was held back, when no more text comes."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> tuple[str, list[Call]]:
        out, calls = "", list[Call]()
        while self._held:
            if not self._calling:
                out += self._plain_text(final)
                if not self._calling:
                    break
            found = self._read_call(final)
            if found is None:  # not complete
                if not final:
                    break
                out, self._held, self._calling = out + self._held, "", False
                break
            read, rest = found
            if not read:
                # No call after all. What follows its beginning is looked through again.
                skip = max(1, len(self._marker))
                out, self._held = out + self._held[:skip], self._held[skip:]
                self._plain = self._plain or not self._marker
            else:
                calls += read
                self._held = rest.lstrip()
            self._calling = False
        self.calls += calls
        return out, calls

    def _plain_text(self, final: bool) -> str:
        """Text in front of the next call; sets `_calling` when one begins."""
        held, marker = self._held, self._marker
        if not marker:  # an answer is a call, or it is not
            begin = held.lstrip()
            if begin.startswith("<|python_tag|>"):
                begin = begin.removeprefix("<|python_tag|>").lstrip()
            if not self._plain and begin[:1] in ("{", "["):
                self._held, self._calling = begin, True
                return ""
            undecided = not self._plain and "<|python_tag|>".startswith(begin)  # or it is empty
            if undecided and not final:
                return ""
            self._plain, self._held = True, ""
            return held
        at = held.find(marker)
        if at >= 0:
            self._held, self._calling = held[at:], True
            return held[:at].rstrip()
        # White space in front of a call goes with it.
        keep = 0 if final else overlap(held, marker)
        cut = len(held[: len(held) - keep].rstrip()) if not final else len(held)
        self._held = held[cut:]
        return held[:cut]

    def _read_call(self, final: bool) -> tuple[list[Call], str] | None:
        """Calls at the beginning of what is held, and the rest; None while it is incomplete."""
        rest = self._held[len(self._marker) :].lstrip() if self._marker else self._held
        if self._form.kind == "tags":
            return self._read_tags(self._held if self._marker == "<function=" else rest)
        name = ""
        if self._form.kind == "named":
            match = self._form.middle_pattern.search(rest)
            if match is None:
                return None
            name, rest = rest[: match.start()].strip(), rest[match.end() :].lstrip()
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            broken = final or (self._end and self._end in rest)
            return ([], "") if broken else None
        items = value if isinstance(value, list) else [value]
        read = [self._call(name, item) for item in items]
        calls = [c for c in read if c is not None]
        if len(calls) != len(items):
            return [], ""
        after = rest[end:].lstrip()
        if self._end:
            if not final and len(after) < len(self._end) and self._end.startswith(after):
                return None
            after = after.removeprefix(self._end)
        elif not self._marker:
            after = after.lstrip("; \n")
        return calls, after

    def _call(self, name: str, value: Any) -> Call | None:
        arguments = value
        if self._form.kind == "json":
            found = _at(value, self._form.name_path)
            name = found if isinstance(found, str) else ""
            arguments = _at(value, self._form.arguments_path)
            arguments = {} if arguments is None else as_object(arguments)
        if name not in self._tools or not isinstance(arguments, dict):
            return None
        return Call(name, json.dumps(arguments, ensure_ascii=False))

    def _read_tags(self, rest: str) -> tuple[list[Call], str] | None:
        end = rest.find("</function>")
        if end < 0:
            return None
        match = re.match(r"<function=([^>\n]+)>", rest)
        if match is None or match[1].strip() not in self._tools:
            return [], ""
        name = match[1].strip()
        properties = parameters_of(self._tools[name]).get("properties", {})
        arguments = {
            key.strip(): _typed(value, properties.get(key.strip(), {}))
            for key, value in re.findall(
                r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", rest[match.end() : end], re.DOTALL
            )
        }
        after = rest[end + len("</function>") :].lstrip()
        if self._end and len(after) < len(self._end) and self._end.startswith(after):
            return None
        after = after.removeprefix(self._end)
        return [Call(name, json.dumps(arguments, ensure_ascii=False))], after


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _typed(text: str, schema: Any) -> Any:
    """A parameter between tags: text if that is what the schema wants, else JSON if it is some."""
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
