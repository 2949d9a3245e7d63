"""JSON between the server and its clients: strict when it comes in, one line when it goes out."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.responses import Response


def dumps(value: Any) -> bytes:
    """Compact UTF-8 JSON without line breaks."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # Lone surrogates, which JSON strings can hold, have no UTF-8 form.
    return text.encode("utf-8", "replace")


def json_response(value: Any) -> Response:
    """A JSON answer of one line."""
    return Response(dumps(value) + b"\n", media_type="application/json")


def loads(body: bytes) -> Any:
    """JSON as the standard has it: no NaN, no Infinity.

    Raises:
        ValueError: it is not JSON, or nested beyond what can be read; the message says where.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"it is not UTF-8 (byte {e.start})") from e
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e
    except json.JSONDecodeError as e:
        raise ValueError(f"{e.msg} (line {e.lineno}, column {e.colno})") from e


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
