"""Messages of a request as chat templates want them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.server.errors import ApiError
from localspec.server.tool_arguments import as_content
from localspec.server.tool_format import ToolFormat


def for_template(
    messages: Sequence[Mapping[str, Any]], form: ToolFormat | None = None
) -> list[dict[str, Any]]:
    """Messages with plain text as content, and with tool arguments as objects.

    Args:
        messages: checked against `schema.MESSAGE`.
        form: how calls are written; they become content where the template does not write them.

    Raises:
        ApiError: a message lacks what its role needs.
    """
    out = [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    if form is not None and not form.written:
        for message in out:
            if "tool_calls" in message:
                message["content"] += as_content(message.pop("tool_calls"), form)
    return out


def _message(message: Mapping[str, Any], at: str) -> dict[str, Any]:
    role = message["role"]
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and role != "assistant":
        raise ApiError(f"{at}.tool_calls: only the assistant calls tools", param=f"{at}.tool_calls")
    if content is None and not calls:
        raise ApiError(f"{at}.content is missing", param=f"{at}.content")
    out: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": _text(content),
    }
    if calls:
        out["tool_calls"] = [_call(c) for c in calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            out[name] = message[name]
    return out


def _text(content: str | Sequence[Mapping[str, Any]] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Templates write arguments down themselves, from an object."""
    function = call["function"]
    arguments: Any = function["arguments"]
    try:
        read = json.loads(arguments)
    except (ValueError, RecursionError):
        read = None
    if isinstance(read, dict):
        arguments = read
    return {
        "id": call.get("id", ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
