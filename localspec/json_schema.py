"""JSON Schema to GBNF, sound: every text of the grammar is JSON that follows the schema.

It may allow less than the schema does (properties come in the declared order, objects get no
undeclared ones unless asked for, numbers have bounded digits), never more. What a grammar cannot
enforce is refused, not ignored. Annotations, unknown keywords and unknown formats have no effect,
as in JSON Schema itself.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from localspec.errors import LocalspecError
from localspec.json_rules import BASICS, FORMATS, USES, char_class, literal, written
from localspec.number_grammar import Bounds, integers, numbers
from localspec.schemas import KNOWN, MAX_DEPTH, OF_TYPE, REFUSED, Schema, Schemas, kind

MAX_RULES = 5000
MAX_REPEAT = 100_000
MAX_READINGS = 256

# What is left of an expression without texts and character classes are names and operators.
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
_NAMES = re.compile(r"[a-z][a-z0-9-]*")


def to_gbnf(schema: Mapping[str, Any] | bool | str) -> str:
    """The grammar of a schema.

    Args:
        schema: a JSON Schema (any draft's common keywords), or its JSON text.

    Raises:
        LocalspecError: it is no schema, or uses what a grammar cannot enforce.
    """
    try:
        if not isinstance(schema, str):
            schema = json.dumps(schema, allow_nan=False)
        root = json.loads(schema, parse_constant=_no_constant)
        json.dumps(root, allow_nan=False)  # 1e999 is read as infinity
    except (ValueError, TypeError, RecursionError) as e:
        raise LocalspecError(
            f"the JSON schema is not valid JSON: {e or 'nested too deeply'}"
        ) from e
    if not isinstance(root, dict | bool):
        raise LocalspecError("a JSON schema is an object, true or false")
    try:
        return _Converter(root).convert()
    except RecursionError:
        raise LocalspecError("the JSON schema is nested too deeply; make it flatter") from None
    except (TypeError, AttributeError, KeyError) as e:
        # A keyword whose value is of a wrong type, e.g. a number for `properties`.
        raise LocalspecError(f"the JSON schema has a keyword with a wrong value: {e}") from e


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class _Converter(Schemas):
    def __init__(self, root: Schema | bool) -> None:
        super().__init__(root)
        self.rules: dict[str, str] = {}
        self.names: dict[str, str] = {}  # expression -> rule, so that equal ones share one
        self.refs: dict[str, str] = {}
        # Rules whose alternatives begin alike -> how many of them may be alive at once.
        self.alike: dict[str, int] = {}

    def convert(self) -> str:
        top = self.schema(self.root, "#", 0)
        self.check_alike()
        lines = [f"root ::= {top}", *(f"{n} ::= {e}" for n, e in self.rules.items())]
        return "\n".join(lines) + "\n"

    # Rules

    def basic(self, name: str) -> str:
        """A rule from `BASICS`, with what it uses."""
        if name not in self.rules:
            self.rules[name] = char_class() if name == "plain" else BASICS[name]
            for used in USES.get(name, ()):
                self.basic(used)
        return name

    def named(self, expression: str) -> str:
        """A rule for an expression."""
        if expression in self.rules:
            return expression
        if expression not in self.names:
            if len(self.rules) >= MAX_RULES:
                raise LocalspecError(
                    f"the JSON schema needs more than {MAX_RULES} rules; make it smaller"
                )
            name = f"r{len(self.names) + len(self.refs)}"
            self.names[expression] = name
            self.rules[name] = expression
        return self.names[expression]

    def union(self, parts: Sequence[str]) -> str:
        parts = list(dict.fromkeys(parts))
        return parts[0] if len(parts) == 1 else self.named(" | ".join(parts))

    def repeated(self, rule: str, low: int, high: int | None) -> str:
        """rule{low,high}; long ones in blocks, because llama.cpp takes at most 2000."""
        parts = [self.exactly(rule, low)] if low else []
        if high is None:
            parts.append(f"{rule}*")
        elif 0 < high - low <= 200:
            parts.append(f"{rule}{{0,{high - low}}}")
        elif high > low:
            # Up to n = size * k + rest: fewer than k blocks and a part of one, or k and the rest.
            n = high - low
            size = math.isqrt(n)
            k, rest = divmod(n, size)
            block = self.named(f"{rule}{{{size}}}")
            some = f"{block}{{0,{k - 1}}} {rule}{{0,{size - 1}}}"
            all_of = f"{block}{{{k}}} {rule}{{0,{rest}}}" if rest else f"{block}{{{k}}}"
            both = self.named(f"{some} | {all_of}")
            self.alike[both] = 3  # in a block, in a part of one, in the last block
            parts.append(both)
        return " ".join(parts)

    def exactly(self, rule: str, n: int) -> str:
        if n <= 200:
            return f"{rule}{{{n}}}"
        size = math.isqrt(n)
        k, rest = divmod(n, size)
        block = self.named(f"{rule}{{{size}}}")
        return f"{block}{{{k}}} {rule}{{{rest}}}" if rest else f"{block}{{{k}}}"

    # Schemas

    def schema(self, schema: Any, where: str, depth: int) -> str:
        """The rule of a schema."""
        if depth > MAX_DEPTH:
            raise self.fail(where, f"nested more than {MAX_DEPTH} deep")
        if schema is True:
            return self.basic("value")
        if schema is False:
            raise self.fail(where, "nothing is allowed here (false)")
        if not isinstance(schema, dict):
            raise self.fail(where, "a schema is an object, true or false")
        self.spend(schema)
        refused = REFUSED.intersection(schema)
        if refused:
            raise self.fail(where, f"a grammar cannot enforce {sorted(refused)[0]!r}; leave it out")
        schema = {k: v for k, v in schema.items() if k in KNOWN}
        if "$ref" in schema:
            if len(schema) == 1:
                return self.reference(schema["$ref"], where, depth)
            target = self.plain(self.resolve(schema.pop("$ref"), where), where)
            return self.schema(self.merge(target, schema, where), where, depth + 1)
        if "allOf" in schema:
            parts = self.some(schema.pop("allOf"), f"{where}/allOf")
            for i, part in enumerate(parts):
                if len(parts) == 1 and not schema:
                    return self.schema(part, f"{where}/allOf/{i}", depth + 1)
                schema = self.merge(schema, self.plain(part, f"{where}/allOf/{i}"), where)
            return self.schema(schema, where, depth + 1)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return self.alternatives(schema, key, where, depth)
        if "const" in schema or "enum" in schema:
            return self.values(schema, where)
        return self.union([self.typed(t, schema, where, depth) for t in self.types(schema, where)])

    def reference(self, ref: Any, where: str, depth: int) -> str:
        target = self.resolve(ref, where)
        if ref not in self.refs:
            name = self.refs[ref] = f"ref{len(self.refs)}"
            self.rules[name] = ""  # keeps its place
            self.rules[name] = self.schema(target, ref, depth + 1)
        return self.refs[ref]

    def alternatives(self, schema: Schema, key: str, where: str, depth: int) -> str:
        """anyOf and oneOf, together with what stands beside them."""
        parts = self.some(schema[key], f"{where}/{key}")
        beside = {k: v for k, v in schema.items() if k != key}
        if key == "oneOf":
            for i, a in enumerate(parts):
                for j, b in enumerate(parts[:i]):
                    if not self.disjoint(a, b, f"{where}/{key}"):
                        raise self.fail(
                            f"{where}/{key}",
                            f"alternatives {j} and {i} may both match, and a grammar cannot tell; "
                            "use anyOf, or a property with different constants",
                        )
        rules = []
        for i, part in enumerate(parts):
            at = f"{where}/{key}/{i}"
            if part is False:
                continue
            if beside:
                part = self.merge(beside, self.plain(part, at), at)
            rules.append(self.schema(part, at, depth + 1))
        if not rules:
            raise self.fail(where, "nothing is allowed here")
        union = self.union(rules)
        if len(set(rules)) > 1:
            self.alike[union] = self.how_many_alike(parts, where)
        return union

    def check_alike(self) -> None:
        """Refuse schemas for which llama.cpp would have to follow too many readings at once.

        It follows all that fit the text so far, and their number multiplies with every level of
        nested alternatives that begin alike.
        """
        uses = {
            name: set(_NAMES.findall(_QUOTED.sub(" ", text))) & self.rules.keys()
            for name, text in self.rules.items()
        }
        readings = dict.fromkeys(uses, 1)
        changed = True
        while changed:
            changed = False
            for name, used in uses.items():
                n = self.alike.get(name, 1) * max((readings[u] for u in used), default=1)
                if n > MAX_READINGS:
                    raise LocalspecError(
                        "the JSON schema nests alternatives that begin alike; let them differ in "
                        "their first required property, e.g. a constant"
                    )
                changed |= n > readings[name]
                readings[name] = max(readings[name], n)

    def values(self, schema: Schema, where: str) -> str:
        """const and enum."""
        beside = set(schema) - {"const", "enum", "type", "format"}
        if beside:
            raise self.fail(where, f"{min(beside)!r} beside enum or const; leave it out")
        found = [schema["const"]] if "const" in schema else self.some(schema["enum"], where)
        if "const" in schema and "enum" in schema:
            found = self.common(found, schema["enum"])
        if "type" in schema:
            types = set(self.types(schema, where))
            types |= {"integer"} if "number" in types else set()
            found = [v for v in found if kind(v) in types]
        if not found:
            raise self.fail(where, "none of the values is allowed")
        return self.union([self.named(literal(written(v))) for v in found])

    def typed(self, kind: str, schema: Schema, where: str, depth: int) -> str:
        handler: dict[str, Callable[[], str]] = {
            "object": lambda: self.an_object(schema, where, depth),
            "array": lambda: self.an_array(schema, where, depth),
            "string": lambda: self.a_string(schema, where),
            "integer": lambda: self.an_integer(schema, where),
            "number": lambda: self.a_number(schema, where),
        }
        if kind not in handler:
            return self.basic(kind)
        if not any(k in schema for k in OF_TYPE[kind]):
            if kind in ("object", "array"):
                self.basic("value")
            return self.basic(kind)
        return handler[kind]()

    # Types

    def count(self, schema: Schema, key: str, where: str) -> int | None:
        value = schema.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.fail(where, f"{key!r} is a whole number of at least 0, not {value!r}")
        if value > MAX_REPEAT:
            if key.startswith("max"):
                raise self.fail(
                    where, f"{key!r} is at most {MAX_REPEAT}; leave it out for no limit"
                )
            raise self.fail(where, f"{key!r} is at most {MAX_REPEAT}")
        return value

    def limits(self, schema: Schema, low: str, high: str, where: str) -> tuple[int, int | None]:
        least, most = self.count(schema, low, where) or 0, self.count(schema, high, where)
        if most is not None and most < least:
            raise self.fail(where, f"{high!r} is less than {low!r}")
        return least, most

    def a_string(self, schema: Schema, where: str) -> str:
        least, most = self.limits(schema, "minLength", "maxLength", where)
        if "pattern" in schema:
            raise self.fail(where, "a grammar cannot enforce 'pattern' yet; leave it out")
        if least == 0 and most is None:
            known = FORMATS.get(str(schema.get("format")))
            if known is None:
                return self.basic("string")
            for name in known.split():
                if name in BASICS:
                    self.basic(name)
            return self.named(f'"\\"" {known} "\\""')
        self.basic("char")
        return self.named(f'"\\"" {self.repeated("char", least, most)} "\\""'.replace("  ", " "))

    def bounds(self, schema: Schema, where: str) -> Bounds:
        found: dict[str, Decimal] = {}
        for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            value = schema.get(key)
            if value is None or isinstance(value, bool):  # draft 4: true beside minimum
                continue
            if not isinstance(value, int | float) or not abs(value) <= 1e18:
                raise self.fail(where, f"{key!r} is a number between -1e18 and 1e18, not {value!r}")
            found[key] = Decimal(str(value))
        low, high = found.get("minimum"), found.get("maximum")
        above = schema.get("exclusiveMinimum") is True
        below = schema.get("exclusiveMaximum") is True
        if "exclusiveMinimum" in found and (low is None or found["exclusiveMinimum"] >= low):
            low, above = found["exclusiveMinimum"], True
        if "exclusiveMaximum" in found and (high is None or found["exclusiveMaximum"] <= high):
            high, below = found["exclusiveMaximum"], True
        return Bounds(low, high, above, below)

    def an_integer(self, schema: Schema, where: str) -> str:
        b = self.bounds(schema, where)
        low = None if b.low is None else math.floor(b.low) + 1 if b.above else math.ceil(b.low)
        high = None if b.high is None else math.ceil(b.high) - 1 if b.below else math.floor(b.high)
        step = schema.get("multipleOf", 1)
        text: str | None
        if step == 1 and not isinstance(step, bool):
            text = integers(low, high)
        else:
            if isinstance(step, bool) or not isinstance(step, int) or step < 1:
                raise self.fail(where, f"a grammar cannot enforce 'multipleOf' {step!r}")
            if low is None or high is None or (high - low) // step > 1000:
                raise self.fail(
                    where, "'multipleOf' needs a minimum and a maximum, at most 1000 steps apart"
                )
            first = -(-low // step) * step
            text = " | ".join(literal(str(v)) for v in range(first, high + 1, step)) or None
        if text is None:
            raise self.fail(where, "there is no whole number between the bounds")
        return self.named(text)

    def a_number(self, schema: Schema, where: str) -> str:
        if schema.get("multipleOf") is not None:
            return self.an_integer(schema, where)  # multiples of whole numbers are whole
        b = self.bounds(schema, where)
        text = numbers(b)
        if text is None:
            raise self.fail(where, "there is no number between the bounds")
        return self.basic("number") if b.low is b.high is None else self.named(text)

    def an_array(self, schema: Schema, where: str, depth: int) -> str:
        first, rest = schema.get("prefixItems", []), schema.get("items", None)
        if isinstance(rest, list):  # older drafts
            first, rest = rest, schema.get("additionalItems", None)
        if not isinstance(first, list):
            raise self.fail(where, "'prefixItems' is a list")
        least, most = self.limits(schema, "minItems", "maxItems", where)
        if rest is False or (rest is None and first and least <= len(first)):
            most = len(first) if most is None else min(most, len(first))
        if most is not None and most < least:
            raise self.fail(where, "there are fewer items than 'minItems' wants")
        if schema.get("uniqueItems") and (most is None or most > 1):
            raise self.fail(where, "a grammar cannot enforce 'uniqueItems'; leave it out")
        self.basic("space")
        if most == 0:
            return self.named('"[" space "]"')
        first = first[:most]
        tail = ""
        if most is None or most > len(first):
            item = self.schema(True if rest is None else rest, f"{where}/items", depth + 1)
            left, room = max(0, least - len(first)), None if most is None else most - len(first)
            if first:
                tail = self.repeated(self.named(f'"," space {item} space'), left, room)
            else:
                more = self.named(f'"," space {item} space')
                after = self.repeated(more, max(0, left - 1), None if room is None else room - 1)
                body = f"{item} space {after}".rstrip()
                return self.named(f'"[" space {body} "]"' if left else f'"[" space ({body})? "]"')
        for i in range(len(first) - 1, -1, -1):
            item = self.schema(first[i], f"{where}/prefixItems/{i}", depth + 1)
            comma = '"," space ' if i else ""
            tail = self.named(f"{comma}{item} space {tail}".rstrip())
            if i >= least:
                tail = f"({tail})?"
        return self.named(f'"[" space {tail} "]"')

    def an_object(self, schema: Schema, where: str, depth: int) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise self.fail(where, "'properties' is an object")
        if not isinstance(required, list) or not all(isinstance(k, str) for k in required):
            raise self.fail(where, "'required' is a list of names")
        extra = schema.get("additionalProperties")
        declared = dict(properties)
        for name in required:
            if name not in declared:
                declared[name] = True if extra is None else extra
        pairs: list[tuple[str, bool]] = []
        for name, prop in declared.items():
            at = f"{where}/properties/{name}"
            if prop is False:
                if name in required:
                    raise self.fail(where, f"the required {name!r} is not allowed")
                continue
            value = self.schema(prop, at, depth + 1)
            pair = self.named(f'{literal(written(name))} ":" space {value} space')
            pairs.append((pair, name in required))
        self.basic("space")
        more = ""
        if extra is not None and extra is not False:
            value = self.schema(extra, f"{where}/additionalProperties", depth + 1)
            more = self.named(f'{self.other_keys(list(declared))} ":" space {value} space')
        # What may follow, from the last property to the first; with and without a comma.
        follow = self.named(f'("," space {more})*') if more else ""
        begin = self.named(f'({more} ("," space {more})*)?') if more else ""
        for pair, needed in reversed(pairs):
            with_comma, first = f'"," space {pair} {follow}'.rstrip(), f"{pair} {follow}".rstrip()
            if needed:
                follow, begin = self.named(with_comma), self.named(first)
            else:
                begin = self.named(f"{first} | {begin}" if begin else f"({first})?")
                follow = self.named(f"{with_comma} | {follow}" if follow else f"({with_comma})?")
        return self.named(" ".join(f'"{{" space {begin} "}}"'.split("  ")))

    def other_keys(self, names: Sequence[str]) -> str:
        """Keys that are none of some names, in quotes.

        Without escapes: an escaped spelling would be another text for the same key.
        """
        if not names:
            return self.basic("string")
        self.basic("plain")
        tree: dict[str, Any] = {}
        for name in names:
            if json.dumps(name, ensure_ascii=False) != f'"{name}"':
                continue  # cannot be written without an escape
            at = tree
            for c in name:
                at = at.setdefault(c, {})
            at[""] = {}
        return self.named(f'"\\"" {self.not_in(tree)} "\\""')

    def not_in(self, tree: dict[str, Any]) -> str:
        parts = [] if "" in tree else ['""']
        chars = [c for c in tree if c]
        parts += [f"{literal(c)} {self.not_in(tree[c])}" for c in chars]
        parts.append(f"{char_class(chars)} plain*" if chars else "plain plain*")
        return self.named(" | ".join(parts))
