"""Errors as OpenAI's API words them: one line of JSON."""

from __future__ import annotations

import json

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# OpenAI's `type` for each status; other 4xx are "invalid_request_error", 5xx "server_error".
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def error_body(
    status: int, message: str, code: str | None = None, param: str | None = None
) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}` for an HTTP status, as one line."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    error = {"message": " ".join(message.split()), "type": kind, "param": param, "code": code}
    return json.dumps({"error": error}).encode() + b"\n"


def error_response(
    status: int,
    message: str,
    code: str | None = None,
    param: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """The response with that body."""
    body = error_body(status, message, code, param)
    return Response(body, status, headers, media_type="application/json")


async def refuse(
    scope: Scope,
    receive: Receive,
    send: Send,
    status: int,
    message: str,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> None:
    """Answer an ASGI request with an error."""
    await error_response(status, message, code, headers=headers)(scope, receive, send)
