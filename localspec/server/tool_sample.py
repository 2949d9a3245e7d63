"""The format of a model's tool calls, read off its chat template.

The template is asked: it renders a sample call, and what it puts around the name and the arguments
is the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from localspec.errors import LocalspecError
from localspec.reasoning import take_apart
from localspec.server.tool_format import (
    ARGUMENTS,
    ID,
    KEY,
    NAME,
    NUMBER,
    NUMBER_KEY,
    VALUE,
    Tags,
    ToolFormat,
    as_object,
)

_SECOND_ID = "call00002"
_TEXT = "\u2603 sample text"
_SAMPLE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A sample.",
        "parameters": {
            "type": "object",
            "properties": {
                KEY: {"type": "string", "description": "A string."},
                NUMBER_KEY: {"type": "integer", "description": "A number."},
            },
            "required": [KEY, NUMBER_KEY],
        },
    },
}
_DECODER = json.JSONDecoder()
_GEMMA = f'{NAME}{{{KEY}:<|"|>{VALUE}<|"|>,{NUMBER_KEY}:{NUMBER}}}'
_PYTHON = re.compile(rf"\[{NAME}\({KEY}=(['\"]){VALUE}\1, ?{NUMBER_KEY}={NUMBER}\)\]")
# What models are told whose templates write no calls (LFM2, LFM2.5; Granite 3).
_PYTHON_CALLS = ToolFormat("python", "<|tool_call_start|>", "<|tool_call_end|>", written=False)
_UNWRITTEN = {
    "<|tool_list_start|>[": _PYTHON_CALLS,
    "List of tools: [": _PYTHON_CALLS,
    "<|tool_call|> followed by a JSON list of tools": ToolFormat(
        "json", "<|tool_call|>", "", name_path=("name",), arguments_path=("arguments",),
        listed=True, sample={"name": NAME, "arguments": ARGUMENTS}, written=False,
    ),
}  # fmt: skip

Render = Callable[..., str]


def uses_tools(render: Render) -> bool:
    """Whether a template tells the model about tools.

    Args:
        render: `ChatTemplate.render`, or like it.
    """
    try:
        return NAME in render([{"role": "user", "content": _TEXT}], tools=[_SAMPLE])
    except LocalspecError:
        return False


def format_of(render: Render) -> ToolFormat | None:
    """How a template writes calls; None when it does not, or not in a way known here.

    Args:
        render: `ChatTemplate.render`, or like it.
    """
    try:
        with_call, without = _answer(render, [ID]), _answer(render, [])
    except LocalspecError:
        return None
    written = take_apart(_difference(with_call, without)).answer
    if NAME not in written:
        return next((form for told, form in _UNWRITTEN.items() if told in without), None)
    form = _recognized(written)
    if form is None or not form.start.strip() or form.kind == "python":
        return form
    if form.tags is not None:
        form = replace(form, tags=replace(form.tags, cdata=_cdata(render)))
    return replace(form, again=_again(render, form, written))


def _answer(render: Render, ids: list[str], arguments: Mapping[str, Any] = ARGUMENTS) -> str:
    """A conversation whose answer is a call for each id, or text."""
    calls: list[Mapping[str, Any]] = [
        {"id": i, "type": "function", "function": {"name": NAME, "arguments": dict(arguments)}}
        for i in ids
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": "" if calls else _TEXT}
    if calls:
        answer["tool_calls"] = calls
    user = {"role": "user", "content": _TEXT}
    return render([user, answer], tools=[_SAMPLE], add_generation_prompt=False)


def _difference(with_call: str, without: str) -> str:
    # What differs is the call, but for tokens like <|start of this|> and <|start of that|>.
    begin = _common(with_call, without)
    end = len(with_call) - _common(with_call[begin:][::-1], without[begin:][::-1])
    opened = with_call.rfind("<", 0, begin)
    if opened > with_call.rfind(">", 0, begin):
        begin = opened
    opened, closed = with_call.rfind("<", begin, end), with_call.find(">", end)
    if opened > with_call.rfind(">", begin, end) and closed >= 0:
        end = closed + 1
    return with_call[begin:end]


def _cdata(render: Render) -> bool:
    """Whether text in tags is marked as text, as in XML."""
    try:
        return "<![CDATA[<&>\n]]>" in _answer(render, [ID], ARGUMENTS | {KEY: "<&>\n"})
    except LocalspecError:
        return False


def _again(render: Render, form: ToolFormat, written: str) -> str | None:
    """What is between two calls of one answer, where the second one lacks the start."""
    try:
        two = _answer(render, [ID, _SECOND_ID]).replace(_SECOND_ID, ID)
    except LocalspecError:
        return None
    start = written.index(form.start)
    body = re.escape(written[start + len(form.start) : len(written) - len(form.end)])
    calls = list(re.finditer(re.sub(r"\d+", r"\\d+", body), two))
    if len(calls) != 2:
        return None
    between = two[calls[0].end() : calls[1].start()]
    return None if between.strip().endswith(form.start.strip()) else between


def _recognized(written: str) -> ToolFormat | None:
    """The format of a sample call."""
    return _json(written) or _notation(written) or _tagged(written)


def _json(written: str) -> ToolFormat | None:
    name_at = written.index(NAME)
    for at, sign in enumerate(written):
        if sign not in "[{":
            continue
        try:
            value, end = _DECODER.raw_decode(written, at)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, list) and len(value) != 1:
            continue
        item = value[0] if isinstance(value, list) else value
        arguments = _path_of(item, lambda v: as_object(v) == ARGUMENTS)
        name = _path_of(item, lambda v: v == NAME)
        if name and arguments:
            return ToolFormat(
                "json", written[:at].lstrip(), written[end:], name_path=name,
                arguments_path=arguments, listed=isinstance(value, list), sample=item,
            )  # fmt: skip
        start, middle = written[:name_at].lstrip(), written[name_at + len(NAME) : at]
        if item == ARGUMENTS and name_at < at and start.partition(ID)[0] and "{" not in middle:
            return ToolFormat("named", start, written[end:], middle)
    return None


def _notation(written: str) -> ToolFormat | None:
    """Calls in Gemma's and in Python's notation."""
    start, gemma, end = written.partition(_GEMMA)
    if gemma and start.strip():
        return ToolFormat("gemma", start.lstrip(), end)
    call = _PYTHON.search(written)
    if call is None:
        return None
    return ToolFormat("python", written[: call.start()].lstrip(), written[call.end() :])


def _tagged(written: str) -> ToolFormat | None:
    """Calls with marks around keys and values."""
    parts, rest = [], written
    for word in (NAME, KEY, VALUE, NUMBER_KEY, str(NUMBER)):
        part, found, rest = rest.partition(word)
        if not found:
            return None
        parts.append(part)
    start, first, value, following, other = parts
    start = start.lstrip()
    if not start or any(w in p for p in (*parts, rest) for w in (NAME, KEY, NUMBER_KEY, ID)):
        return None
    # What closes a value is the same before the next key and at the end.
    close = following[: following.rfind(">", 0, _common(following, rest)) + 1]
    key, end = following[len(close) :].lstrip(), rest[len(close) :]
    if not close or not key or not first.endswith(key) or not end.strip():
        return None
    middle = first.removesuffix(key)
    text_type = typed = ""
    if value != other:  # it says which values are text
        common = value[: _common(value, other)]
        before = re.sub(r"\w+$", "", common)
        type_ = re.match(r"\w+", value[len(before) :])
        if type_ is None:
            return None
        text_type, typed = type_[0], value[len(before) + len(type_[0]) :]
        if not typed.strip() or not re.fullmatch(
            rf"{re.escape(before)}\w+{re.escape(typed)}", other
        ):
            return None
        value = before
    if not value.strip():
        return None
    return ToolFormat(
        "tags", start, end, middle, tags=Tags(key, value, text_type, typed, close)
    )  # fmt: skip


def _path_of(value: Any, wanted: Callable[[Any], bool]) -> tuple[str, ...]:
    """Keys to the value that is wanted; () for none."""
    if isinstance(value, dict):
        for key, item in value.items():
            if wanted(item):
                return (key,)
            below = _path_of(item, wanted)
            if below:
                return (key, *below)
    return ()


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
