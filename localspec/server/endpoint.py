"""What both kinds of completions do with a request: read, prepare, answer whole or as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from localspec.server.requests import Wanted, read, wanted
from localspec.server.schema import Schema
from localspec.server.security import client_of
from localspec.server.service import Service
from localspec.server.streaming import Events, EventStream, unless_gone
from localspec.server.wire import json_response


class Answer(Protocol):
    """An answer that has not begun."""

    async def whole(self, client: Hashable) -> dict[str, Any]:
        """The body of an answer in one piece."""

    def events(self, client: Hashable, *, include_usage: bool) -> Events:
        """The events of a streamed one."""


async def respond(
    request: Request,
    schema: Schema,
    max_tokens: int | None,
    prepare: Callable[[Service, Mapping[str, Any], Wanted], Answer],
) -> Response:
    """Answer a request.

    Args:
        request: the client's.
        schema: what its body must follow.
        max_tokens: the endpoint's default; None without one.
        prepare: everything up to the tokens of the prompt. Takes a while: called in a thread.
    """
    service: Service = request.app.state.service
    body = await read(request, schema)
    ask = wanted(body, service.params, max_tokens, service.engine.model.n_vocab)
    answer = await asyncio.to_thread(prepare, service, body, ask)
    client = client_of(request.scope, ask.user)
    if ask.stream:
        return EventStream(answer.events(client, include_usage=ask.include_usage))
    return json_response(await unless_gone(request.receive, answer.whole(client)))
