"""A server in a thread of the tests, and raw sockets to be rude to it with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any

from localspec.server.limits import Limits
from localspec.server.metrics import Metrics
from localspec.server.run import Server, bind

# A grammar for answers that last: those of a tiny model may end at any token.
ENDLESS = "root ::= line{1000}\nline ::= [a-z ]{100}"


@dataclass
class Running:
    """A server that runs."""

    server: Server
    port: int
    service: Any = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self.server.servers[0].get_loop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)

    def connect(self, data: bytes = b"", *, receive_buffer: int = 0) -> socket.socket:
        """A connection that has sent `data`; its reads wait 20 seconds at most."""
        raw = socket.socket()
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(20)
        raw.connect(("127.0.0.1", self.port))
        raw.sendall(data)
        return raw

    def get(self, path: str) -> str:
        """The text of a page, over a connection of its own."""
        with contextlib.closing(HTTPConnection("127.0.0.1", self.port, timeout=20)) as client:
            client.request("GET", path)
            response = client.getresponse()
            assert response.status == 200
            return response.read().decode()


@contextlib.contextmanager
def running(make: Callable[[], Server], service: Any = None) -> Iterator[Running]:
    """Run a server in a thread; stop it as Ctrl-C would."""
    server = make()
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        try:
            until(lambda: server.started)
            yield Running(server, port, service)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server does not end"


def serving(app: object, limits: Limits, metrics: Metrics | None = None) -> Callable[[], Server]:
    """For `running`: an application without the rest of localspec's server."""
    return lambda: Server(app, limits, metrics or Metrics())  # type: ignore[arg-type]


def until(condition: Callable[[], object]) -> None:
    """Wait for it, 20 seconds at most."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def read_all(raw: socket.socket) -> bytes:
    """Everything until the other side closes (a reset counts as that)."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(65536):
            parts.append(part)
    raw.close()
    return b"".join(parts)


def read_one(raw: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer; the connection stays open."""
    response = HTTPResponse(raw)
    response.begin()
    return response.status, response.read()


def refusal(answer: bytes) -> tuple[int, str]:
    """Status and code of a refusal; fails unless it is one line of OpenAI's JSON, then the end."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(b": ") for line in lines[1:])}
    assert headers[b"content-type"] == b"application/json"
    assert headers[b"content-length"] == str(len(body)).encode()
    assert body.count(b"\n") == 1
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(lines[0].split()[1]), str(error["code"])
