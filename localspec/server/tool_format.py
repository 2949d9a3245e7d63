"""How a model writes tool calls, and what makes it write one.

Nothing is known about model families here; `tool_sample` reads a format off a chat template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME = "sample_function"
# A string and a number, in the order of their names: some templates sort.
KEY, VALUE = "sample_key", "sample_value"
NUMBER_KEY, NUMBER = "sample_number", 31415
ARGUMENTS: dict[str, Any] = {KEY: VALUE, NUMBER_KEY: NUMBER}
ID = "call00001"  # nine letters and digits, as Mistral's templates want it

Tool = Mapping[str, Any]


@dataclass(frozen=True)
class Tags:
    """The marks around keys and values; `{key}KEY{value}VALUE{close}` for each argument.

    Attributes:
        key: before a key.
        value: between key and value, up to the value's type where that is written.
        text_type: the type that says that a value is text, not JSON; "" where none is written.
        typed: between that type and the value.
        close: after a value.
        cdata: text with signs that XML knows is between `<![CDATA[` and `]]>`.
    """

    key: str
    value: str
    text_type: str
    typed: str
    close: str
    cdata: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """How calls are written.

    Attributes:
        kind: "json": an object with name and arguments (or a list of such); "named": the name, then
            the arguments as JSON; "gemma": the same in Gemma's notation; "tags": the name, then
            each argument between marks; "python": a list of Python calls.
        start: what comes before a call; "" when a call is the whole answer.
        end: what comes after it.
        middle: between name and arguments ("named", "tags").
        again: between a call and another one that begins without `start`; None where all have it.
        tags: the marks around the arguments ("tags").
        name_path, arguments_path: where in the JSON object they are ("json").
        listed: the object is in a list ("json").
        sample: the object of the sample call ("json").
        written: the template writes the calls of earlier answers; else they have to be put into
            their content (`tool_arguments.as_content`).
    """

    kind: str
    start: str
    end: str
    middle: str = ""
    again: str | None = None
    tags: Tags | None = None
    name_path: tuple[str, ...] = ()
    arguments_path: tuple[str, ...] = ()
    listed: bool = False
    sample: Any = None
    written: bool = True

    @property
    def head(self) -> re.Pattern[str]:
        """From `start` (its id, where it has one) through a name (group 1) to the arguments.

        Of several marks behind the name the last one will do: models leave out ids, and add
        marks that templates do not write.
        """
        before = self.start.partition(ID)
        lead, middle = _any_number(before[1] + before[2]), self.middle.strip()
        last = re.search(r"(?:<[^<>]+>|\[[^][]+\])$", middle)
        others = ""
        if last is not None and last[0] != middle:
            others = rf"|(?=[<[]).*{re.escape(last[0])}"
        return re.compile(rf"\s*{lead}\s*([\w.-]+?)\s*(?:{_any_number(middle)}{others})\s*")

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
        start = self.start + {"python": "["}.get(self.kind, "")
        if len(tools) > 1:
            return start, None
        begun = start + tools[0]["function"]["name"]
        if self.kind == "named":
            return begun + self.middle, parameters_of(tools[0])
        return begun + {"gemma": "{", "python": "("}.get(self.kind, self.middle), None

    def _object(self, tool: Tool, parameters: str) -> dict[str, Any]:
        """The schema of a call of one tool: the sample, with its name and arguments.

        Args:
            tool: the tool.
            parameters: where the schema of its arguments is.
        """

        def like(value: Any) -> dict[str, Any]:
            if value == NAME:
                return {"const": tool["function"]["name"]}
            if as_object(value) == ARGUMENTS:
                return {"$ref": parameters}
            if not isinstance(value, dict):
                return {"const": value}
            # A call's id is not the model's to choose.
            properties = {k: like(v) for k, v in value.items() if v != ID}
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


def as_object(value: Any) -> Any:
    """Arguments are sometimes written as JSON text."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _any_number(text: str) -> str:
    """A pattern of `text`, whatever the call's id and its number are in it."""
    pattern = re.escape(text).replace(ID, "ID")
    return re.sub(r"\d+", r"\\d+", pattern).replace("ID", r"\w+")
