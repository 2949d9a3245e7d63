"""JSON in GBNF: the rules that the grammars of schemas are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from localspec.number_grammar import integers

# Characters that may stand in a JSON text as they are: no controls, quotes, backslashes, surrogates
# or DEL. Positive ranges, so that llama.cpp can judge the first bytes of a character.
PLAIN = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7E), (0x80, 0xD7FF), (0xE000, 0x10FFFF))
BASICS = {
    "space": r'(" " | "\n" [ \t]{0,20})?',
    "hex": "[0-9a-fA-F]",
    # An escaped surrogate would count as a character here but not in the text: left out.
    "escape": r'"\\" (["\\/bfnrt] | "u" ([0-9a-cefA-CEF] hex hex hex | [dD] [0-7] hex hex))',
    "char": "plain | escape",
    "string": r'"\"" char* "\""',
    "integer": integers(None, None) or "",
    "number": '"-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "pair": 'string ":" space value',
    "object": '"{" space (pair space ("," space pair space)*)? "}"',
    "array": '"[" space (value space ("," space value space)*)? "]"',
    "value": "object | array | string | number | boolean | null",
    "digit": "[0-9]",
    "date": '[1-9] digit digit digit "-" ('
    '("01" | "03" | "05" | "07" | "08" | "10" | "12") "-" ("0" [1-9] | [1-2] digit | "3" [0-1])'
    ' | ("04" | "06" | "09" | "11") "-" ("0" [1-9] | [1-2] digit | "30")'
    ' | "02-" ("0" [1-9] | "1" digit | "2" [0-8]))',
    "hour": '[0-1] digit | "2" [0-3]',
    "minute": "[0-5] digit",
    "time": 'hour ":" minute ":" minute ("." digit{1,6})? ("Z" | [-+] hour ":" minute)',
    "uuid": 'hex{8} "-" hex{4} "-" hex{4} "-" hex{4} "-" hex{12}',
}
FORMATS = {"date": "date", "time": "time", "date-time": 'date "T" time', "uuid": "uuid"}
USES = {
    "char": ("plain", "escape"), "escape": ("hex",), "string": ("char",), "uuid": ("hex",),
    "pair": ("string", "space", "value"), "object": ("space", "pair"), "array": ("space", "value"),
    "value": ("object", "array", "string", "number", "boolean", "null"), "date": ("digit",),
    "hour": ("digit",), "minute": ("digit",), "time": ("hour", "minute", "digit"),
}  # fmt: skip


def literal(text: str) -> str:
    """A GBNF literal."""
    out = []
    for c in text:
        if c in '"\\':
            out.append("\\" + c)
        elif " " <= c <= "~":
            out.append(c)
        else:
            out.append(f"\\U{ord(c):08x}")
    return '"' + "".join(out) + '"'


def written(value: Any) -> str:
    """A value as the model should write it."""
    text = json.dumps(value, ensure_ascii=False, separators=(", ", ": "))
    if any("\ud800" <= c <= "\udfff" for c in text):
        text = json.dumps(value, separators=(", ", ": "))
    return text


def char_class(without: Sequence[str] = ()) -> str:
    """The plain characters but for some."""
    ranges = list(PLAIN)
    for c in without:
        at = ord(c)
        ranges = [
            part
            for a, b in ranges
            for part in ([(a, at - 1), (at + 1, b)] if a <= at <= b else [(a, b)])
            if part[0] <= part[1]
        ]
    return "[" + "".join(f"\\U{a:08x}-\\U{b:08x}" for a, b in ranges) + "]"
