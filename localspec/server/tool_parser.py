"""One tool call, read character by character (see `tool_scan`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.server.tool_arguments import decode, from_gemma, from_python, typed
from localspec.server.tool_format import ID, Tags, Tool, ToolFormat, as_object, parameters_of
from localspec.server.tool_scan import (
    NoCall,
    Steps,
    bracketed,
    following,
    literal,
    marks,
    until,
)

_LONGEST_NAME = 300  # with the marks around it


@dataclass(frozen=True)
class Parsed:
    """What a parser has read.

    Attributes:
        calls: names and arguments.
        rest: what was read behind the calls and does not belong to them.
        again: whether another call begins, with `rest`.
    """

    calls: Sequence[tuple[str, dict[str, Any]]]
    rest: str
    again: bool


class CallParser:
    """Parsers for the calls of one format.

    Args:
        form: how the model writes calls.
        tools: what it may call, by name.

    Attributes:
        marker: what a call begins with; "" where a call is the whole answer.
    """

    def __init__(self, form: ToolFormat, tools: Mapping[str, Tool]) -> None:
        self._form, self._tools = form, tools
        self.marker, *self._start = marks(form.start.partition(ID)[0]) or [""]
        # Where an answer ends between these is up to the model.
        self._follow = {"end": marks(form.end)}
        if form.again is not None:
            again = form.again.partition(ID)[0] + ("{" if form.kind == "json" else "")
            self._follow["again"] = marks(again)

    def parse(self, *, again: bool) -> Steps[Parsed]:
        """A parser of what follows the marker, or of a call that begins without it (`again`)."""
        if not again:
            for mark in self._start:
                yield from literal(mark)
        if self._form.tags is not None:
            return (yield from self._tags(self._form.tags))
        if self._form.kind in ("json", "python"):
            begun = "{" if again else ""
            text = yield from bracketed(self._form.kind, begun)
            calls = self._listed(text)
        else:
            head, _ = yield from until(["{"], _LONGEST_NAME)
            name = self._name(head)
            gemma = self._form.kind == "gemma"
            text = yield from bracketed("gemma" if gemma else "json", "{")
            calls = [(name, self._arguments(from_gemma if gemma else decode, text))]
        option, _, rest = yield from following(self._follow)
        return Parsed(calls, rest, option == "again")

    def _name(self, head: str) -> str:
        match = self._form.head.fullmatch(head)
        if match is None or match[1] not in self._tools:
            raise NoCall
        return match[1]

    def _arguments(self, read: Callable[[str], Any], text: str) -> Any:
        try:
            return read(text)
        except ValueError as e:
            raise NoCall from e

    def _listed(self, text: str) -> list[tuple[str, dict[str, Any]]]:
        """Calls that are objects with names and arguments."""
        python = self._form.kind == "python"
        value = self._arguments(from_python if python else decode, text)
        names = ("name",) if python else self._form.name_path
        places = ("arguments",) if python else self._form.arguments_path
        calls = []
        for item in value if isinstance(value, list) else [value]:
            name, arguments = _at(item, names), _at(item, places)
            arguments = {} if arguments is None else as_object(arguments)
            if not isinstance(name, str) or name not in self._tools:
                raise NoCall
            if not isinstance(arguments, dict):
                raise NoCall
            calls.append((name, arguments))
        if not calls:
            raise NoCall
        return calls

    def _tags(self, tags: Tags) -> Steps[Parsed]:
        middle, key = self._form.middle.strip(), marks(tags.key)
        value, after_type = marks(tags.value), marks(tags.typed)
        follow = self._follow | {"key": key}
        if middle:
            mark = re.split(r"\d+", middle)[-1]
            head, _ = yield from until([mark], _LONGEST_NAME)
            name, begun = self._name(head + mark), ""
        else:
            head, begun = yield from until({key[0][0], follow["end"][0][0]}, _LONGEST_NAME)
            name = self._name(head)
        properties = parameters_of(self._tools[name]).get("properties", {})
        arguments: dict[str, Any] = {}
        while True:
            option, complete, rest = yield from following(follow, begun)
            if option != "key":
                if not complete:
                    raise NoCall
                return Parsed([(name, arguments)], rest, option == "again")
            begun = ""
            key_text, _ = yield from until(value[:1], _LONGEST_NAME)
            for mark in value[1:]:
                yield from literal(mark)
            is_text = False
            if tags.text_type:
                type_, _ = yield from until(after_type[:1], _LONGEST_NAME)
                is_text = type_.strip() == tags.text_type
                for mark in after_type[1:]:
                    yield from literal(mark)
            close = tags.close.strip()
            text, _ = yield from until([close])
            if tags.cdata and text.startswith("<![CDATA["):
                if not text.endswith("]]>"):  # the end mark was a part of it
                    more, _ = yield from until([f"]]>{close}"])
                    text += f"{close}{more}]]>"
                text, is_text = text[len("<![CDATA[") : -len("]]>")], True
            if (tags.typed or tags.value).endswith("\n"):
                text = text.removeprefix("\n")
            if tags.close.startswith("\n"):
                text = text.removesuffix("\n")
            name_ = key_text.strip()
            arguments[name_] = text if is_text else typed(text, properties.get(name_, {}))


def _at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
