"""Slow, silent, greedy and broken clients, over real sockets: refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from localspec.errors import LocalspecError
from localspec.server.limits import BodyLimit, Limits
from localspec.server.metrics import Metrics
from serving import Running, read_all, read_one, refusal, running, serving, until

HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"


class App:
    """What the tests ask for."""

    def __init__(self, max_body: int = 10_000) -> None:
        self.ended: list[str] = []
        self.sent = 0
        self.hold = asyncio.Event()
        routes = [
            Route("/", self.hello),
            Route("/echo", self.echo, methods=["POST"]),
            Route("/flood", self.flood),
            Route("/hold", self.held),
            Route("/big", self.big),
        ]
        self.asgi = BodyLimit(Starlette(routes=routes), max_body)

    async def hello(self, _request: Request) -> PlainTextResponse:
        return PlainTextResponse("hello")

    async def echo(self, request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(len(await request.body())))

    async def held(self, _request: Request) -> PlainTextResponse:
        await self.hold.wait()
        return PlainTextResponse("held")

    async def big(self, _request: Request) -> PlainTextResponse:
        return PlainTextResponse("x" * 30_000_000)

    async def flood(self, _request: Request) -> StreamingResponse:
        async def pieces() -> Any:
            try:
                for _ in range(10_000):
                    self.sent += 1
                    yield b"x" * 100_000
                    await asyncio.sleep(0)
            finally:
                self.ended.append("flood")

        return StreamingResponse(pieces())


@contextlib.contextmanager
def serve(app: App, metrics: Metrics | None = None, **limits: Any) -> Iterator[Running]:
    with running(serving(app.asgi, Limits(**limits), metrics)) as server:
        yield server


def test_it_answers():
    with serve(App()) as server, httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.get("/").text == "hello"
            assert client.post("/echo", content=b"x" * 10_000).text == "10000"
        assert server.connections == 1  # kept alive


def test_a_thousand_half_open_connections():
    """They make room for each other, and never take it from a request."""
    with serve(App(), max_connections=20, header_seconds=60) as server:
        rude = []
        for i in range(1000):
            rude.append(server.connect(HEAD if i % 2 else b""))
            if i % 100 == 99:
                assert server.get("/") == "hello"
                assert server.connections <= 21
            if len(rude) > 200:  # this process has file descriptors to keep, too
                rude.pop(0).close()
        assert server.get("/") == "hello"
        until(lambda: server.connections <= 20)
        for raw in rude[:100]:  # silence is just closed, and so may be what was not read yet
            assert (answer := read_all(raw)) == b"" or refusal(answer)[0] == 503
        for raw in rude:
            raw.close()
        until(lambda: server.connections == 0)


def test_the_oldest_half_open_connection_makes_room():
    metrics = Metrics()
    with serve(App(), metrics, max_connections=3) as server:
        first = server.connect(HEAD)
        until(lambda: [c for c in server.server.server_state.connections if not c._quiet])
        others = [server.connect(HEAD) for _ in range(2)]
        until(lambda: server.connections == 3)
        late = server.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_one(late) == (200, b"hello")
        assert refusal(read_all(first)) == (503, "too_many_connections")
        others[0].sendall(b"Content-Length: 2\r\n\r\nab")
        assert read_one(others[0]) == (200, b"2")
        for raw in (late, *others):
            raw.close()
        assert metrics.requests == {("none", 503): 1}


def test_connections_left_alone_are_closed():
    with serve(App(), header_seconds=0.3) as server:
        silent, begun = server.connect(), server.connect(HEAD)
        assert read_all(silent) == b""
        assert refusal(read_all(begun)) == (408, "request_timeout")
        until(lambda: server.connections == 0)


def test_one_byte_at_a_time_does_not_extend_the_time():
    metrics = Metrics()
    with serve(App(), metrics, header_seconds=0.5, body_seconds=0.5) as server:
        for start in (b"", HEAD + b"Content-Length: 5000\r\n\r\n"):
            raw = server.connect(start)
            answer = b""
            raw.setblocking(False)
            end = time.monotonic() + 20
            for byte in HEAD * 100:
                assert time.monotonic() < end
                with contextlib.suppress(BlockingIOError):
                    answer = raw.recv(65536)
                    break
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    raw.send(bytes([byte]))
                time.sleep(0.05)
            raw.close()
            assert refusal(answer) == (408, "request_timeout")
            assert server.get("/") == "hello"
        assert metrics.requests["none", 408] == 2
        until(lambda: server.connections <= 1)


def test_the_second_request_of_a_connection_has_a_deadline_too():
    with serve(App(), header_seconds=0.3, idle_seconds=60) as server:
        raw = server.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_one(raw) == (200, b"hello")
        time.sleep(0.5)  # longer than a head may take: nothing has begun yet
        raw.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_one(raw) == (200, b"hello")
        raw.sendall(b"GET / HTT")
        assert refusal(read_all(raw)) == (408, "request_timeout")


def test_idle_connections_are_closed():
    with serve(App(), idle_seconds=1) as server:
        raw = server.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_all(raw).endswith(b"hello")


def test_long_answers_have_no_deadline():
    """Only the client is hurried, never the application."""
    app = App()
    with serve(app, header_seconds=0.2, body_seconds=0.2, write_seconds=0.2) as server:
        raw = server.connect(b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.8)
        assert server.connections == 1
        app.hold.set()
        assert read_one(raw) == (200, b"held")
        raw.close()


@pytest.mark.parametrize("announced", [True, False])
def test_ten_megabytes(announced: bool):
    """Refused at once, readable for a client that sends all of it first, and the next one works."""
    with serve(App(max_body=100_000)) as server, httpx.Client(base_url=server.url) as client:
        body = b"x" * 10_000_000
        pieces = (body[i : i + 100_000] for i in range(0, len(body), 100_000))
        for content in (body if announced else pieces, b"x" * 100_001):
            response = client.post("/echo", content=content, timeout=20)
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
            assert response.text.count("\n") == 1
        assert client.post("/echo", content=b"x" * 100_000).text == "100000"
        assert server.connections == 1


def test_a_refused_body_that_never_ends():
    with serve(App(max_body=100), body_seconds=0.5) as server:
        raw = server.connect(HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 500)
        answer = read_all(raw)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert answer.count(b"HTTP/1.1") == 1
        assert server.get("/") == "hello"


def test_clients_that_ask_before_they_send_are_told_no():
    """curl does that with long bodies."""
    with serve(App(max_body=100)) as server:
        head = HEAD + b"Expect: 100-continue\r\nContent-Length: "
        raw = server.connect(head + b"100000\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
        raw.close()
        raw = server.connect(head + b"5\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 100 ")
        raw.sendall(b"12345")
        assert read_one(raw) == (200, b"5")
        raw.close()


def test_a_client_that_does_not_read_is_let_go():
    app = App()
    with serve(app, write_seconds=0.5) as server:
        raw = server.connect(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n", receive_buffer=4096)
        until(lambda: app.ended)
        assert app.sent < 1000  # what the kernel takes, and no more
        until(lambda: server.connections == 0)
        raw.close()
        assert server.get("/") == "hello"


def test_a_client_that_reads_a_byte_now_and_then_is_let_go():
    """Also when the application is done and only the last of its answer waits."""
    app = App()
    with serve(app, write_seconds=0.5, idle_seconds=1) as server:
        for path in ("flood", "big"):
            request = f"GET /{path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            raw = server.connect(request, receive_buffer=4096)
            until(lambda: server.connections == 1)
            end = time.monotonic() + 20
            with contextlib.suppress(ConnectionResetError):
                while server.connections:
                    assert time.monotonic() < end
                    raw.recv(1)
                    time.sleep(0.05)
            raw.close()
            assert server.get("/") == "hello"
            until(lambda: server.connections == 0)


def test_a_slow_but_steady_reader_gets_everything():
    with serve(App(), write_seconds=1) as server:
        raw = server.connect(b"GET /big HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        total = 0
        while part := raw.recv(200_000):
            total += len(part)
            time.sleep(0.01)
        raw.close()
        assert total > 30_000_000


def test_where_everybody_is_being_answered_new_clients_are_turned_away():
    app = App()
    with serve(app, max_connections=2) as server:
        request = b"GET /hold HTTP/1.1\r\nHost: localhost\r\n\r\n"
        held = [server.connect(request) for _ in range(2)]
        until(lambda: server.connections == 2)
        time.sleep(0.1)
        for _ in range(5):  # no number of them changes that
            raw = server.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert refusal(read_all(raw)) == (503, "too_many_connections")
        silent = [server.connect() for _ in range(10)]
        until(lambda: server.connections <= 5)
        app.hold.set()
        for raw in held:
            assert read_one(raw) == (200, b"held")
        for raw in (*held, *silent):
            raw.close()
        until(lambda: server.connections == 0)
        assert server.get("/") == "hello"


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"hello\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 50_000,
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
    ids=lambda b: repr(b[:40]),
)
def test_what_is_no_http(garbage: bytes):
    metrics = Metrics()
    with serve(App(), metrics) as server:
        assert refusal(read_all(server.connect(garbage))) == (400, "invalid_http")
        assert server.get("/") == "hello"
        until(lambda: server.connections <= 1)
        assert metrics.requests["none", 400] == 1


def test_pipelined_requests():
    with serve(App(), header_seconds=1) as server:
        raw = server.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        answer = b""
        while answer.count(b"hello") < 3:
            answer += raw.recv(65536)
        assert answer.count(b"200 OK") == 3
        raw.close()


def test_disconnecting_in_the_middle():
    with serve(App()) as server:
        for data in (b"", HEAD, HEAD + b"Content-Length: 50\r\n\r\nabc"):
            server.connect(data).close()
        until(lambda: server.connections == 0)
        assert server.get("/") == "hello"


def test_limits_are_positive():
    with pytest.raises(LocalspecError, match="max_body"):
        Limits(max_body=0)
