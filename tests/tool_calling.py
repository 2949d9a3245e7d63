"""What the tests of tool calls share: two tools, messages that call them, a reader's result."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from localspec.server.tools import CallReader

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add_up",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["a"],
        },
    },
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}


def answer_with(calls: Iterable[tuple[str, Any]], content: str = "") -> dict[str, Any]:
    """An assistant's message."""
    made = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def read_all(reader: CallReader, pieces: Iterable[str]) -> tuple[str, list[tuple[str, Any]]]:
    """What a reader makes of a text that comes in pieces."""
    content, calls = "", []
    for more, found in [*map(reader.feed, pieces), reader.finish()]:
        content += more
        calls += [(c.name, json.loads(c.arguments)) for c in found]
    assert len(reader.calls) == len(calls)
    return content, calls
