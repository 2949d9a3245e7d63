"""How much and how long: bodies, headers, slow clients, open connections.

uvicorn bounds the length of headers and closes idle connections after an answer. It waits for ever
for the first request, for the rest of one, and for a client to read its answer, and its
`limit_concurrency` turns everybody away while somebody holds connections open. `guarded_protocol`
adds what is missing, from the callbacks of `asyncio.Protocol` alone; `BodyLimit` is an ASGI
middleware.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from localspec.errors import LocalspecError
from localspec.server.replies import error_body, refuse

# Bytes by which a client must get on in `write_seconds`; less than asyncio holds back before it
# pauses the application (64 KiB) until it lets it go on (16 KiB).
_STEP = 32 * 1024
_CROWDED = "too many open connections; try again later"


@dataclass(frozen=True)
class Limits:
    """What a client may take.

    Attributes:
        max_body: bytes of a request's body.
        max_connections: open connections. Beyond it the one that has waited longest for a complete
            request is closed; where none waits, new ones get status 503.
        header_seconds: for the whole head of a request, from connecting or from its first byte.
        body_seconds: for the whole body, from the end of the head.
        write_seconds: for a client to take up 32 KiB of what was sent to it, or what is left.
        idle_seconds: how long a connection is kept after an answer.

    Raises:
        LocalspecError: one of them is not positive.
    """

    max_body: int = 4 * 2**20
    max_connections: int = 128
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    idle_seconds: int = 30

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise LocalspecError(f"{name} must be positive, not {value}")


class BodyLimit:
    """ASGI middleware that reads a request's body before the application runs.

    A body that is too long gets status 413: at once when its length is announced, else as soon as
    it is. What still comes is thrown away by uvicorn, so that clients get to read the answer.
    """

    def __init__(self, app: ASGIApp, max_body: int) -> None:
        self._app, self._max = app, max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        body = None if int(announced) > self._max else await self._read(receive)
        if body is None:
            problem = f"the body is longer than {self._max} bytes; --max-body allows more"
            await refuse(scope, receive, send, 413, problem, "body_too_large")
            return
        message: Message | None = body

        async def replay() -> Message:
            nonlocal message
            if message is None:
                return await receive()  # only a disconnect can follow
            given, message = message, None
            return given

        await self._app(scope, replay, send)

    async def _read(self, receive: Receive) -> Message | None:
        """The whole body as one message (or the disconnect that came first); None: too long."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return message
            body += message.get("body", b"")
            if len(body) > self._max:
                return None
            if not message.get("more_body", False):
                return {"type": "http.request", "body": bytes(body), "more_body": False}


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP protocol with deadlines for what the client does, and room for new clients.

    Every state of a connection in which the client has to act has one timer: until the head is
    there, until the body is there, until what was written is taken up.
    """

    limits: Limits
    on_refused: Callable[[int], None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected."""
        self._since = self.loop.time()  # when it began to wait for a request
        self._awaits: Any = None  # the request's state for which `_reading` was set
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None
        self._quiet = True  # nothing of a request has come since the last one
        self._turned_away = False
        super().connection_made(transport)
        self._find_room()
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._turned_away:
            self._refuse(503, _CROWDED, "too_many_connections")
            return
        if self._quiet and self.conn.their_state is h11.IDLE:
            self._quiet, self._awaits = False, None  # the deadline counts from the first byte
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """The application has answered."""
        super().on_response_complete()
        self._since = self.loop.time()
        self._watch()
        self._await_reader()

    def pause_writing(self) -> None:
        """The client does not take up what was sent to it."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has taken up most of it."""
        super().resume_writing()
        self._await_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """What came was no HTTP request."""
        self._refuse(400, msg, "invalid_http")

    def _watch(self) -> None:
        """Set the deadline that belongs to the state of the request."""
        state = self.conn.their_state
        if state is self._awaits:
            return
        self._awaits = state
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        seconds = None
        if state is h11.SEND_BODY:
            seconds = self.limits.body_seconds
        elif state is h11.IDLE and (self.cycle is None or not self._quiet):
            seconds = self.limits.header_seconds  # quiet after an answer: uvicorn has a timer
        if state is not h11.IDLE:
            self._quiet = True
        if seconds is not None:
            self._reading = self.loop.call_later(
                seconds,
                lambda: self._refuse(408, "the request did not come in time", "request_timeout"),
            )

    def _await_reader(self) -> None:
        """Set the deadline for what the client has to take up before anything else can happen."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        left = self._unread()
        if left > 0:
            self._writing = self.loop.call_later(self.limits.write_seconds, self._read_yet, left)

    def _read_yet(self, before: int) -> None:
        left = self._unread()
        if left > 0 and before - left < _STEP:
            self.transport.abort()
        else:
            self._await_reader()

    def _unread(self) -> int:
        """Bytes for which everything waits; 0 while the application may still write."""
        answered = self.cycle is not None and self.cycle.response_complete
        if self.flow.write_paused or answered or self.transport.is_closing():
            return self.transport.get_write_buffer_size()
        return 0

    def _find_room(self) -> None:
        """Close the one that waits longest for a complete request, else turn this one away."""
        guarded = [c for c in self.connections if isinstance(c, GuardedProtocol)]
        held = [c for c in guarded if not c._turned_away]
        if len(held) <= self.limits.max_connections:
            return
        for state in (h11.IDLE, h11.SEND_BODY):
            incomplete = [c for c in held if c is not self and c.conn.their_state is state]
            if incomplete:
                oldest = min(incomplete, key=lambda c: c._since)
                oldest._refuse(503, _CROWDED, "too_many_connections")
                self.connections.discard(oldest)
                return
        # Answered when its request comes: closing with unread bytes would take the answer back.
        self._turned_away = True
        if len(guarded) - len(held) > self.limits.max_connections:
            self.transport.abort()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Close, with an answer in the application's place where one is still awaited."""
        if self.transport.is_closing():
            return
        cycle, state = self.cycle, self.conn.their_state
        begun = cycle is not None and cycle.response_started
        answered = cycle is None or cycle.response_complete
        silent = state is h11.IDLE and self._quiet and not self._turned_away
        if not silent and (not begun or (answered and state is not h11.SEND_BODY)):
            self.on_refused(status)
            body = error_body(status, message, code)
            # Past h11, which may be in the middle of a broken request.
            self.transport.write(
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json"
                f"\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
                + body
            )
        if cycle is not None and not answered:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()
        self._await_reader()


def guarded_protocol(
    limits: Limits, on_refused: Callable[[int], None] = lambda status: None
) -> type[GuardedProtocol]:
    """uvicorn's `http=` for these limits.

    Args:
        limits: the limits.
        on_refused: told the status of every answer that no application gave.
    """
    return type(
        "Guarded", (GuardedProtocol,), {"limits": limits, "on_refused": staticmethod(on_refused)}
    )
