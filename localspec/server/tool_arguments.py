"""Arguments of tool calls in the notations that models write: rewritten to JSON, then decoded.

Nothing here recurses, and nothing is evaluated: the text comes from a model.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.server.tool_format import ToolFormat
from localspec.server.wire import loads

GEMMA_QUOTE = '<|"|>'
_WORDS = {"None": "null", "True": "true", "False": "false"} | {
    word: word for word in ("null", "true", "false")
}
_GEMMA_KEY = re.compile(r'([{,]\s*)([^\s{}\[\],:"]+)\s*:')
_GEMMA_WORD = re.compile(r"([:,\[]\s*)(None|True|False)(?=\s*[,\]}])")
_NAME = r"[^\W\d][\w.-]*"
_PYTHON = re.compile(
    rf"""\s*(?:
      (?P<string> '[^'\\]*(?:\\.[^'\\]*)*' | "[^"\\]*(?:\\.[^"\\]*)*" )
    | (?P<number> [-+]? (?: \d[\d_]*(?:\.\d*)? | \.\d+ ) (?:[eE][-+]?\d+)? )
    | (?P<call> {_NAME} ) \s* \(
    | (?P<key> {_NAME} ) \s* =
    | (?P<word> {_NAME} )
    | (?P<sign> [\[\]{{}}),:] )
    )\s*""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)|[\"\x00-\x1f]", re.DOTALL
)


def decode(text: str) -> Any:
    """JSON as the standard has it.

    Raises:
        ValueError: it is none, or nested too deeply.
    """
    return loads(text.encode())


def typed(text: str, schema: Any) -> Any:
    """A parameter between tags: text if that is what the schema wants, else JSON if it is some.

    What must not be text may be written in Python, as many templates have it (`True`).
    """
    wanted = schema.get("type") if isinstance(schema, Mapping) else None
    if wanted == "string":
        return text
    try:
        return decode(text)
    except ValueError:
        pass
    if wanted is not None and "string" not in wanted:
        with contextlib.suppress(ValueError):
            calls = from_python(f"[f(value={text})]")
            if len(calls) == 1 and calls[0]["arguments"].keys() == {"value"}:
                return calls[0]["arguments"]["value"]
    return text


def from_gemma(text: str) -> Any:
    """`{key:<|"|>text<|"|>,n:3}`: bare keys, and a quote that is a token of its own.

    Raises:
        ValueError: it is not written so.
    """
    parts = text.split(GEMMA_QUOTE)
    for i, part in enumerate(parts):
        if i % 2:
            parts[i] = json.dumps(part)
        else:
            part = _GEMMA_KEY.sub(lambda m: f"{m[1]}{json.dumps(m[2])}:", part)
            parts[i] = _GEMMA_WORD.sub(lambda m: m[1] + _WORDS[m[2]], part)
    return decode("".join(parts))


def from_python(text: str) -> Any:
    """`[f(a='v', n=3), g()]` as a list of objects with name and arguments.

    Raises:
        ValueError: it is not a list of calls with keyword arguments that are literals.
    """
    out, open_, at = list[str](), list[str](), 0
    while at < len(text):
        match = _PYTHON.match(text, at)
        if match is None or match.lastgroup is None:
            raise ValueError("no Python literal")
        at, token = match.end(), match[match.lastgroup]
        if match.lastgroup == "string":
            out.append(_json_string(token[1:-1]))
        elif match.lastgroup == "number":
            number = int(token) if re.fullmatch(r"[-+]?[\d_]+", token) else float(token)
            out.append(json.dumps(number, allow_nan=False))
        elif match.lastgroup == "call" and open_ == ["]"]:
            out.append(f'{{"name":{json.dumps(token)},"arguments":{{')
            open_.append(")")
        elif match.lastgroup == "key" and open_[-1:] == [")"]:
            out.append(f"{json.dumps(token)}:")
        elif match.lastgroup == "word" and token in _WORDS:
            out.append(_WORDS[token])
        elif match.lastgroup == "sign" and token in "[{":
            out.append(token)
            open_.append({"[": "]", "{": "}"}[token])
        elif match.lastgroup == "sign" and token in ",:":
            out.append(token)
        elif match.lastgroup == "sign" and open_[-1:] == [token]:
            if out[-1] == ",":  # Python allows one at the end
                out.pop()
            out.append("}}" if token == ")" else token)
            open_.pop()
        else:
            raise ValueError(f"{token[:40]!r} does not belong there")
    return decode(" ".join(out))


def as_content(calls: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """Calls as the model writes them itself, for templates that do not write any.

    Args:
        calls: as OpenAI writes them, but with objects as arguments.
        form: how the model writes them: in Python or in JSON.
    """
    if form.kind == "python":
        return form.start + as_python(calls) + form.end
    functions = [{k: c["function"][k] for k in ("name", "arguments")} for c in calls]
    return form.start + json.dumps(functions, ensure_ascii=False) + form.end


def as_python(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as `from_python` reads them; see `as_content`."""

    def value(v: Any) -> str:
        return json.dumps(v, ensure_ascii=False) if isinstance(v, str | dict | list) else repr(v)

    def written(function: Mapping[str, Any]) -> str:
        arguments = function["arguments"]
        if isinstance(arguments, Mapping):
            arguments = ", ".join(f"{k}={value(v)}" for k, v in arguments.items())
        return f"{function['name']}({arguments})"

    return f"[{', '.join(written(c['function']) for c in calls)}]"


def _json_string(body: str) -> str:
    """A JSON string of what is between Python's quotes."""

    def escape(match: re.Match[str]) -> str:
        code = match[1]
        if code is None:  # a quote of the other kind, or a control character
            return json.dumps(match[0])[1:-1]
        if code == "\n":  # the line goes on
            return ""
        if code in 'nrtbf"\\' or (code[0] == "u" and len(code) == 5):
            return match[0]
        if code[0] in "xU" and len(code) > 1:
            return json.dumps(chr(int(code[1:], 16)))[1:-1]
        if code.isdecimal():
            return json.dumps(chr(int(code, 8)))[1:-1]
        return "'" if code == "'" else "\\\\" + json.dumps(code)[1:-1]

    return f'"{_ESCAPE.sub(escape, body)}"'
