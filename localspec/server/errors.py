"""What a handler raises when a request cannot be answered."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

from localspec.errors import LocalspecError
from localspec.server.replies import error_body, error_response

_MAX_MESSAGE = 500


class ApiError(Exception):
    """A request that cannot be answered.

    Attributes:
        message: one line: what is wrong and what to do about it.
        status: HTTP status.
        param: the field of the request that is wrong, e.g. "messages[0].content".
        code: OpenAI's name for the problem, e.g. "context_length_exceeded".
        headers: more headers of the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        line = " ".join(message.split())
        if len(line) > _MAX_MESSAGE:
            line = line[: _MAX_MESSAGE - 1] + "…"
        super().__init__(line)
        self.message, self.status, self.param, self.code = line, status, param, code
        self.headers = headers

    def as_dict(self) -> dict[str, Any]:
        """The body of the answer."""
        body: dict[str, Any] = json.loads(
            error_body(self.status, self.message, self.code, self.param)
        )
        return body

    def response(self) -> Response:
        """The answer."""
        return error_response(self.status, self.message, self.code, self.param, self.headers)


def refused(e: LocalspecError, param: str | None = None) -> ApiError:
    """What the request asks for cannot be done."""
    return ApiError(str(e), param=param)


def server_error(message: str) -> ApiError:
    """Something broke here, not in the request."""
    return ApiError(message, status=500, code="internal_error")
