"""What JSON schemas mean: references, combinations, types, and which of them exclude each other."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from localspec.errors import LocalspecError

MAX_DEPTH = 64
# Entries of schemas looked at. References and combinations can stand for far more than is written
# down: without a bound a few lines could take for ever.
MAX_WORK = 500_000

Schema = dict[str, Any]

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
OF_TYPE = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
OF_TYPE["integer"] = OF_TYPE["number"]
_COMBINED = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const", "type")
KNOWN = frozenset([*_COMBINED, *(k for keys in OF_TYPE.values() for k in keys)])
REFUSED = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies patternProperties "
    "propertyNames minProperties maxProperties contains minContains maxContains unevaluatedItems "
    "unevaluatedProperties $dynamicRef $recursiveRef".split()
)


def kind(value: Any) -> str:
    """The JSON type of a value; whole numbers are integers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _normal(value: Any) -> Any:
    if isinstance(value, list):
        return [_normal(v) for v in value]
    if isinstance(value, dict):
        return {k: _normal(v) for k, v in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


class Schemas:
    """A schema and the ones inside it.

    Args:
        root: the whole schema, into which references lead.
    """

    def __init__(self, root: Schema | bool) -> None:
        self.root = root
        self._left = MAX_WORK
        self._texts: dict[int, tuple[Any, str]] = {}  # by id, which the value's life keeps valid

    def spend(self, *entries: Any) -> None:
        """Count work: one, and the sizes of what will be looked through."""
        self._left -= 1 + sum(len(e) for e in entries if isinstance(e, list | dict))
        if self._left < 0:
            raise LocalspecError(
                "the JSON schema combines or refers to too much; make it smaller or flatter"
            )

    def text(self, value: Any) -> str:
        """The same text for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
        if id(value) not in self._texts:
            self._texts[id(value)] = value, json.dumps(_normal(value), sort_keys=True)
        return self._texts[id(value)][1]

    def common(self, a: list[Any], b: list[Any]) -> list[Any]:
        """The values of one list that another one has too."""
        self.spend(a, b)
        wanted = {self.text(v) for v in b}
        return [v for v in a if self.text(v) in wanted]

    def fail(self, where: str, why: str) -> LocalspecError:
        # Names of properties may hold anything, and a message is one line.
        if len(where) > 200:
            where = f"{where[:100]}…{where[-90:]}"
        shown = "".join(c if c.isprintable() else "?" for c in where)
        return LocalspecError(f"JSON schema, {shown}: {why}")

    def some(self, value: Any, where: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise self.fail(where, "expected a list with at least one entry")
        return value

    def plain(self, schema: Any, where: str, tries: int = MAX_DEPTH) -> Schema:
        """A schema as an object, its reference followed."""
        if schema is True:
            return {}
        if not isinstance(schema, dict):
            raise self.fail(where, "a schema that can be combined is an object")
        self.spend(schema)
        refused = REFUSED.intersection(schema)
        if refused:
            raise self.fail(where, f"a grammar cannot enforce {sorted(refused)[0]!r}; leave it out")
        known: Schema = {k: v for k, v in schema.items() if k in KNOWN}
        if "$ref" not in known:
            return known
        if not tries:
            raise self.fail(where, "the references go in a circle")
        target = self.plain(self.resolve(known.pop("$ref"), where), where, tries - 1)
        return self.merge(target, known, where)

    def resolve(self, ref: Any, where: str) -> Any:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise self.fail(where, f"only references into the schema itself work, not {ref!r}")
        at: Any = self.root
        for part in ref.split("/")[1:]:
            self.spend()
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and re.fullmatch("[0-9]{1,9}", key) and int(key) < len(at):
                at = at[int(key)]
            elif isinstance(at, dict) and key in at:
                at = at[key]
            else:
                raise self.fail(where, f"the reference {ref!r} leads nowhere")
        return at

    def merge(self, a: Schema, b: Schema, where: str) -> Schema:
        """A schema that allows no more than both do."""
        self.spend(a, b, *a.values(), *b.values())
        out = {k: v for k, v in a.items() if k in KNOWN}
        for key, value in b.items():
            if key not in KNOWN:
                continue
            if key not in out or out[key] == value:
                out[key] = value
            elif key == "required":
                out[key] = list(dict.fromkeys([*out[key], *value]))
            elif key == "allOf":
                out[key] = [*out[key], *value]
            elif key == "type":
                out[key] = self.both_types(out, b, where)
            elif key == "properties":
                ours = dict(out[key])
                for name, prop in value.items():
                    ours[name] = {"allOf": [ours[name], prop]} if name in ours else prop
                out[key] = ours
            elif key in ("minLength", "minItems", "minimum"):
                out[key] = max(out[key], value)
            elif key in ("maxLength", "maxItems", "maximum"):
                out[key] = min(out[key], value)
            elif key == "enum":
                out[key] = self.common(out[key], value)
            else:
                raise self.fail(where, f"two different {key!r} cannot be combined; merge them")
        for one, other in ((a, b), (b, a)):
            # What one closes against undeclared properties must not be opened by the other.
            if one.get("additionalProperties", True) is not True:
                foreign = set(other.get("properties", {})) - set(one.get("properties", {}))
                if foreign:
                    raise self.fail(
                        where,
                        f"{min(foreign)!r} is declared beside an 'additionalProperties' that does "
                        "not know it; merge the two objects",
                    )
        return out

    def both_types(self, a: Schema, b: Schema, where: str) -> list[str]:
        ours, theirs = self.types(a, where), self.types(b, where)
        both = [t for t in ours if t in theirs]
        if "integer" not in both and {"integer", "number"} <= {*ours, *theirs}:
            both.append("integer")
        if not both:
            raise self.fail(where, "the combined types exclude each other")
        return both

    def types(self, schema: Schema, where: str) -> list[str]:
        """The types a schema allows; those its keywords speak of when it does not say."""
        given = schema.get("type")
        if given is None:
            spoken = [t for t in TYPES if any(k in schema for k in OF_TYPE.get(t, ()))]
            if "number" in spoken:
                spoken.remove("integer")
            return spoken or [t for t in TYPES if t != "integer"]
        types = given if isinstance(given, list) else [given]
        self.spend(types)
        bad = next((t for t in types if t not in TYPES), None)
        if bad is not None or not types:
            raise self.fail(where, f"{bad!r} is no type; one of {', '.join(TYPES)}")
        return [t for t in types if t != "integer" or "number" not in types]

    def disjoint(self, a: Any, b: Any, where: str, tries: int = 8) -> bool:
        """Whether no value follows both; False where that is not plain to see."""
        if a is False or b is False:
            return True
        if not tries:
            return False
        a, b = self.plain(a, where), self.plain(b, where)
        ours, theirs = self.possible(a), self.possible(b)
        if ours is not None and theirs is not None:
            return not self.common(ours, theirs)
        if not self.strictly(a, where) & self.strictly(b, where):
            return True
        if self.strictly(a, where) == self.strictly(b, where) == {"object"}:
            self.spend(a.get("required"), b.get("required"))
            both = set(a.get("required", [])) & set(b.get("required", []))
            ours, theirs = a.get("properties", {}), b.get("properties", {})
            return any(
                self.disjoint(ours[k], theirs[k], where, tries - 1)
                for k in both
                if k in ours and k in theirs
            )
        return False

    @staticmethod
    def possible(schema: Schema) -> list[Any] | None:
        """The values of an enumeration."""
        if "const" in schema:
            return [schema["const"]]
        return schema["enum"] if isinstance(schema.get("enum"), list) else None

    def strictly(self, schema: Schema, where: str) -> set[str]:
        """The types that a schema's own words allow (what it merely speaks of is no limit)."""
        values = self.possible(schema)
        if values is not None:
            self.spend(values)
            types = {kind(v) for v in values}
        elif "type" in schema:
            types = set(self.types(schema, where))
        else:
            types = set(TYPES)
        return types | ({"integer"} if "number" in types else set())

    def how_many_alike(self, parts: Sequence[Any], where: str) -> int:
        """Alternatives that may nest and are told apart only after their first property."""
        seen = []
        for part in parts:
            if part is not False:
                schema = self.plain(part, where)
                seen.append((schema, self.strictly(schema, where)))
        alike = set()
        for i, (a, ours) in enumerate(seen):
            for j, (b, theirs) in enumerate(seen[:i]):
                self.spend()
                both = ours & theirs & {"array", "object"}
                if both and not (both == {"object"} and self.first_differs(a, b, where)):
                    alike |= {i, j}
        return max(1, len(alike))

    def first_differs(self, a: Schema, b: Schema, where: str) -> bool:
        """Whether two objects begin with different keys or different constants."""
        firsts: list[tuple[str, Any]] = []
        for schema in (a, b):
            self.spend(schema.get("properties"), schema.get("required"))
            properties: Schema = schema.get("properties", {})
            for name, prop in list(properties.items())[:1]:
                if name in schema.get("required", []):
                    firsts.append((name, prop))
        if len(firsts) < 2:
            return False
        (one, x), (other, y) = firsts
        return one != other or self.disjoint(x, y, where)
