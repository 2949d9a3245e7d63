"""How a model's chat template writes tool calls.

Nothing is known about model families here. The template itself is asked: it renders a sample call,
and what it puts around the name and the arguments is the format (Hermes and Qwen, Llama 3, Mistral,
DeepSeek, ... write JSON; Qwen3-Coder and Qwen3.5 write tags).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localspec.errors import LocalspecError

_NAME, _KEY, _VALUE = "sample_function", "sample_key", "sample_value"
_ID = "call00001"  # nine letters and digits, as Mistral's templates want it
_TEXT = "\u2603 sample text"
_SAMPLE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "A sample.",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string"}},
            "required": [_KEY],
        },
    },
}
_DECODER = json.JSONDecoder()

Render = Callable[..., str]
Tool = Mapping[str, Any]


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written.

    Attributes:
        kind: "json": an object with name and arguments (or a list of such); "named": the name, then
            the arguments as JSON; "tags": `<function=name><parameter=key>value</parameter>...`.
        start: what comes before a call; "" when a call is the whole answer.
        end: what comes after it.
        middle: between name and arguments ("named").
        name_path, arguments_path: where in the JSON object they are ("json").
        listed: the object is in a list ("json").
        sample: the object of the sample call ("json").
    """

    kind: str
    start: str
    end: str
    middle: str = ""
    name_path: tuple[str, ...] = ()
    arguments_path: tuple[str, ...] = ()
    listed: bool = False
    sample: Any = None

    @property
    def middle_pattern(self) -> re.Pattern[str]:
        """`middle`, whatever the call's id or number is in it."""
        middle = re.escape(self.middle.strip()).replace(_ID, "ID")
        return re.compile(re.sub(r"\d+", r"\\d+", middle).replace("ID", r"\w+") or r"\s*(?={)")

    def forced(self, tools: Sequence[Tool]) -> tuple[str, dict[str, Any] | None]:
        """How to make the model call one of `tools`: how its answer begins, and what it follows.

        Returns:
            The beginning, to be put behind the prompt, and the JSON schema of the rest; None where
            a schema cannot say it.
        """
        if self.kind == "json":
            # References in a tool's parameters lead into those: there they have to stay.
            places = [f"#/$defs/{i}" for i in range(len(tools))]
            schemas = [self._object(t, at) for t, at in zip(tools, places, strict=True)]
            schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
            if self.listed:
                schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": 1}
            parameters = (moved(parameters_of(t), at) for t, at in zip(tools, places, strict=True))
            return self.start, schema | {"$defs": {str(i): p for i, p in enumerate(parameters)}}
        if self.kind == "named" and len(tools) == 1:
            function = tools[0]["function"]
            return self.start + function["name"] + self.middle, parameters_of(tools[0])
        if self.kind == "tags" and len(tools) == 1:
            return f"{self.start}<function={tools[0]['function']['name']}>\n", None
        return (self.start + "<function=" if self.kind == "tags" else self.start), None

    def _object(self, tool: Tool, parameters: str) -> dict[str, Any]:
        """The schema of a call of one tool: the sample, with its name and arguments.

        Args:
            tool: the tool.
            parameters: where the schema of its arguments is.
        """

        def like(value: Any) -> dict[str, Any]:
            if value == _NAME:
                return {"const": tool["function"]["name"]}
            if as_object(value) == {_KEY: _VALUE}:
                return {"$ref": parameters}
            if not isinstance(value, dict):
                return {"const": value}
            # A call's id is not the model's to choose.
            properties = {k: like(v) for k, v in value.items() if v != _ID}
            return {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }

        return like(self.sample)


def parameters_of(tool: Tool) -> dict[str, Any]:
    """The JSON Schema of a tool's arguments."""
    parameters = tool["function"].get("parameters")
    return {"type": "object"} if not parameters else {"type": "object"} | dict(parameters)


def moved(schema: Any, place: str) -> Any:
    """A schema as a part of another one: references to its root lead to `place` (`#/...`)."""
    if isinstance(schema, list):
        return [moved(s, place) for s in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: moved(value, place) for key, value in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        out["$ref"] = place + ref[1:]
    return out


def uses_tools(render: Render) -> bool:
    """Whether a template tells the model about tools.

    Args:
        render: `ChatTemplate.render`, or like it.
    """
    try:
        return _NAME in render([{"role": "user", "content": _TEXT}], tools=[_SAMPLE])
    except LocalspecError:
        return False


def format_of(render: Render) -> ToolFormat | None:
    """How a template writes calls; None when it does not, or not in a way known here.

    Args:
        render: `ChatTemplate.render`, or like it.
    """
    user = {"role": "user", "content": _TEXT}
    call = {
        "id": _ID,
        "type": "function",
        "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
    }
    plain = {"role": "assistant", "content": _TEXT}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}

    def text(answer: Tool) -> str:
        return render([user, answer], tools=[_SAMPLE], add_generation_prompt=False)

    try:
        with_call, without = text(calling), text(plain)
    except LocalspecError:
        return None
    # What differs is the call, but for tokens like <|start of this|> and <|start of that|>.
    begin = _common(with_call, without)
    end = len(with_call) - _common(with_call[begin:][::-1], without[begin:][::-1])
    opened = with_call.rfind("<", 0, begin)
    if opened > with_call.rfind(">", 0, begin):
        begin = opened
    opened, closed = with_call.rfind("<", begin, end), with_call.find(">", end)
    if opened > with_call.rfind(">", begin, end) and closed >= 0:
        end = closed + 1
    return _recognized(with_call[begin:end])


def _recognized(written: str) -> ToolFormat | None:
    name_at = written.find(_NAME)
    if name_at < 0:
        return None
    tag = written.find(f"<function={_NAME}>")
    if tag >= 0 and f"<parameter={_KEY}>" in written:
        end = written.rfind("</function>")
        if end < 0:
            return None
        return ToolFormat("tags", written[:tag].lstrip(), written[end + len("</function>") :])
    for at, sign in enumerate(written):
        if sign not in "[{":
            continue
        try:
            value, end = _DECODER.raw_decode(written, at)
        except ValueError:
            continue
        if isinstance(value, list) and len(value) != 1:
            continue
        item = value[0] if isinstance(value, list) else value
        arguments = _path_of(item, lambda v: as_object(v) == {_KEY: _VALUE})
        name = _path_of(item, lambda v: v == _NAME)
        if name and arguments:
            return ToolFormat(
                "json", written[:at].lstrip(), written[end:], name_path=name,
                arguments_path=arguments, listed=isinstance(value, list), sample=item,
            )  # fmt: skip
        start, middle = written[:name_at].lstrip(), written[name_at + len(_NAME) : at]
        if item == {_KEY: _VALUE} and name_at < at and start and _ID not in start:
            return ToolFormat("named", start, written[end:], middle)
    return None


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


def as_object(value: Any) -> Any:
    """Arguments are sometimes written as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _common(a: str, b: str) -> int:
    """How many characters two texts begin with in common."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
