"""Answers while they are made: server-sent events, and clients that go away.

The engine never waits for a client: what a slow one has not read yet is kept (no more than one
answer), and its turn ends when the answer does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localspec.server.errors import ApiError
from localspec.server.wire import dumps

T = TypeVar("T")
Events = AsyncGenerator[dict[str, Any], None]

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client has closed the connection; nobody waits for the answer."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work as long as the client is there; cancel it when the client goes.

    Args:
        receive: of the ASGI request, whose body has been read.
        work: the work.

    Raises:
        ClientGone: the client went. The work has ended then.
    """
    job = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({job, gone}, return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        raise ClientGone
    finally:
        await _end(job, gone)


class EventStream(Response):
    """An ASGI response that sends events as they come.

    The status is decided by the first event: an `ApiError` before it is an ordinary error, one
    after it the last event of the stream.

    Args:
        events: JSON objects, one event each. Closed at the end, whatever happens.
    """

    def __init__(self, events: Events) -> None:
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything; return as soon as the client has gone."""
        with contextlib.suppress(ClientGone):
            await unless_gone(receive, self._run(scope, receive, send))

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._events):
            try:
                first = await anext(self._events, None)
            except ApiError as e:
                await e.response()(scope, receive, send)
                return
            waiting: asyncio.Queue[bytes | None] = asyncio.Queue()
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            sender = asyncio.ensure_future(_send_all(waiting, send))
            try:
                if first is not None:
                    waiting.put_nowait(_event(first))
                    await self._collect(waiting)
                waiting.put_nowait(_DONE)
                waiting.put_nowait(None)
                # The turn at the engine has ended with the events; only the client is waited for.
                await self._events.aclose()
                await sender
            finally:
                await _end(sender)

    async def _collect(self, waiting: asyncio.Queue[bytes | None]) -> None:
        try:
            async for event in self._events:
                waiting.put_nowait(_event(event))
        except ApiError as e:
            waiting.put_nowait(_event(e.as_dict()))


async def _send_all(waiting: asyncio.Queue[bytes | None], send: Send) -> None:
    while (data := await waiting.get()) is not None:
        # What has piled up behind a slow client goes in one piece.
        last = False
        while not waiting.empty() and not last:
            more = waiting.get_nowait()
            last, data = more is None, data + (more or b"")
        await send({"type": "http.response.body", "body": data, "more_body": not last})
        if last:
            return
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*jobs: asyncio.Future[Any]) -> None:
    """Cancel what still runs and wait for its end."""
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
