"""A request's body against a JSON Schema: the same schemas that the OpenAPI description shows.

The part of JSON Schema that those need, with errors that name the field and fit on one line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_NAMES = {
    "string": "a string",
    "number": "a number",
    "integer": "a whole number",
    "boolean": "true or false",
    "object": "an object",
    "array": "an array",
    "null": "null",
}


class Invalid(ValueError):
    """A value does not follow its schema.

    Attributes:
        param: where, e.g. "messages[0].role"; "" for the whole body.
        what: the rest of the sentence, e.g. "must be a string".
    """

    def __init__(self, param: str, what: str) -> None:
        super().__init__(f"{param or 'the request'} {what}")
        self.param, self.what = param, what


def check(value: Any, schema: Schema, at: str = "") -> None:
    """Check a decoded JSON value.

    Args:
        value: what came.
        schema: type, enum, const, minimum, maximum, minLength, maxLength, pattern,
            minItems, maxItems, items, properties, required, maxProperties, additionalProperties
            (false or a schema) and anyOf are checked; everything else is for readers.
        at: path of the value, for the message.

    Raises:
        Invalid: the first thing that is wrong.
    """
    if "anyOf" in schema:
        _check_any(value, schema["anyOf"], at)
        return
    kinds = _kinds(schema)
    if kinds and not any(_is(value, kind) for kind in kinds):
        raise Invalid(at, f"must be {_or(kinds)}, not {_shown(value)}")
    if value is None and "null" in kinds:
        return
    if "const" in schema and value != schema["const"]:
        raise Invalid(at, f"must be {_shown(schema['const'])}, not {_shown(value)}")
    if "enum" in schema and value not in schema["enum"]:
        allowed = [_shown(v) for v in schema["enum"] if v is not None]
        one = "" if len(allowed) == 1 else "one of "
        raise Invalid(at, f"must be {one}{', '.join(allowed)}, not {_shown(value)}")
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        _check_number(value, schema, at)
    elif isinstance(value, str):
        _check_length(len(value), "Length", "characters", schema, at)
        if "pattern" in schema and not re.search(schema["pattern"], value):
            raise Invalid(at, f"must match {schema['pattern']}, not {_shown(value)}")
    elif isinstance(value, list):
        _check_length(len(value), "Items", "items", schema, at)
        if "items" in schema:
            for i, item in enumerate(value):
                check(item, schema["items"], f"{at}[{i}]")
    elif isinstance(value, dict):
        _check_object(value, schema, at)


def _check_number(value: int | float, schema: Schema, at: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise Invalid(at, "must be a finite number")
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and low == high and value != low:
        raise Invalid(at, f"must be {low}, not {_shown(value)}")
    if low is not None and value < low:
        raise Invalid(at, f"must be at least {low}, not {_shown(value)}")
    if high is not None and value > high:
        raise Invalid(at, f"must be at most {high}, not {_shown(value)}")


def _check_length(n: int, name: str, unit: str, schema: Schema, at: str) -> None:
    low, high = schema.get(f"min{name}", 0), schema.get(f"max{name}", math.inf)
    if n < low:
        raise Invalid(at, "must not be empty" if low == 1 else f"needs at least {low} {unit}")
    if n > high:
        raise Invalid(at, f"has {n} {unit}; at most {high} are allowed")


def _check_object(value: dict[str, Any], schema: Schema, at: str) -> None:
    _check_length(len(value), "Properties", "fields", schema, at)
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, item in value.items():
        if name in properties:
            check(item, properties[name], _join(at, name))
        elif more is False:
            raise Invalid(_join(at, _short(name)), "is not known")
        elif more is not True:
            check(item, more, _join(at, _short(name)))
    # Last: a wrong "type" says more than what is missing for it.
    for name in schema.get("required", ()):
        if name not in value:
            raise Invalid(_join(at, name), "is missing")


def _check_any(value: Any, schemas: list[Schema], at: str) -> None:
    # A schema of the right type is the one that was meant.
    meant = [s for s in schemas if any(_is(value, kind) for kind in _kinds(s))]
    if isinstance(value, list) and value:
        items = [s for s in meant if any(_is(value[0], k) for k in _kinds(s.get("items", {})))]
        meant = items or meant
    problems = [problem for s in meant if (problem := _problem(value, s, at)) is not None]
    if meant and len(problems) < len(meant):
        return
    if problems:
        raise max(problems, key=lambda e: len(e.param))
    kinds = list(dict.fromkeys(k for s in schemas for k in _kinds(s)))
    raise Invalid(at, f"must be {_or(kinds)}, not {_shown(value)}")


def _problem(value: Any, schema: Schema, at: str) -> Invalid | None:
    try:
        check(value, schema, at)
    except Invalid as e:
        return e
    return None


def _kinds(schema: Schema) -> list[str]:
    if "anyOf" in schema:
        return [kind for s in schema["anyOf"] for kind in _kinds(s)]
    kinds = schema.get("type", [])
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _is(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind == "number":
        return isinstance(value, int | float)
    if kind == "integer":  # 1.0 is one, says JSON Schema
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    kinds: dict[str, type] = {"string": str, "object": dict, "array": list}
    return isinstance(value, kinds[kind])


def _or(kinds: list[str]) -> str:
    names = [_NAMES[k] for k in kinds if k != "null"] or ["null"]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


def _join(at: str, name: str) -> str:
    return f"{at}.{name}" if at else name


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:39] + "…"


def _shown(value: Any) -> str:
    """A value in an error message; long ones by what they are."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return repr(_short(value))
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a very large number"
    if isinstance(value, int | float):
        return repr(value)
    return "an object" if isinstance(value, dict) else "an array"
