"""The whole server with a tiny pair: what it refuses, that it goes on, that nobody mixes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from conftest import PLAIN, TREE

from localspec.chat import chat_template
from localspec.engine import DraftOptions, Engine
from localspec.server.limits import Limits
from localspec.server.queue import FairQueue
from localspec.server.run import server_for
from localspec.server.security import Access
from localspec.server.service import Service
from serving import ENDLESS, Running, read_all, refusal, running, until

KEY = "right-key"
GOOD = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}


@contextlib.contextmanager
def serve(
    engine: Engine,
    *,
    key: str | None = None,
    draft: DraftOptions = TREE,
    queue: FairQueue | None = None,
    **limits: Any,
) -> Iterator[Running]:
    service = Service(engine, "tiny", draft=draft, queue=queue or FairQueue())
    access = Access("127.0.0.1", key)
    with running(lambda: server_for(service, access, Limits(**limits)), service) as server:
        yield server


def client_of(server: Running, key: str | None = None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.Client(base_url=server.url, headers=headers, timeout=30, trust_env=False)


def answer_of(client: httpx.Client, body: Any = GOOD) -> dict[str, Any]:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def streamed(client: httpx.Client, body: dict[str, Any]) -> tuple[str, str | None]:
    """Text and finish reason of a streamed answer."""
    text, reason, done = "", None, False
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line:
                continue
            assert not done
            assert line.startswith("data: ")
            if line == "data: [DONE]":
                done = True
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    assert done
    return text, reason


# Requests that must be refused: what is asked with, the status, OpenAI's code for it.
BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "wrong key": ({"headers": {"Authorization": "Bearer wrong"}}, 401, "invalid_api_key"),
    "foreign origin": ({"headers": {"Origin": "http://evil.example"}}, 403, "origin_not_allowed"),
    "foreign host": ({"headers": {"Host": "evil.example"}}, 403, "host_not_allowed"),
    "10 MB": ({"content": b"[" + b"1," * 5_000_000 + b"1]"}, 413, "body_too_large"),
    "not JSON": ({"content": b'{"messages": ['}, 400, "invalid_json"),
    "not UTF-8": ({"content": b"\xff\xfe{}"}, 400, "invalid_json"),
    "nothing": ({"content": b""}, 400, "invalid_json"),
    "deeply nested": ({"content": b"[" * 1_000_000}, 400, "invalid_json"),
    "no object": ({"json": [1, 2]}, 400, "invalid_json"),
    "no messages": ({"json": {}}, 400, "invalid_value"),
    "wrong type": ({"json": GOOD | {"temperature": "hot"}}, 400, "invalid_value"),
    "wrong messages": ({"json": {"messages": "hello"}}, 400, "invalid_value"),
    "context overflow": (
        {"json": GOOD | {"messages": [{"role": "user", "content": "x" * 5000}]}},
        400,
        "context_length_exceeded",
    ),
}  # fmt: skip


def test_what_is_refused_and_the_next_request_after_it(load: Callable[..., Engine]):
    with serve(load("vanilla"), key=KEY) as server, client_of(server, KEY) as client:
        right = answer_of(client)["choices"]
        for name, (ask, status, code) in BAD.items():
            response = client.post("/v1/chat/completions", **ask)
            assert response.status_code == status, (name, response.text)
            assert response.headers["content-type"].startswith("application/json"), name
            assert response.text.count("\n") <= 1, name
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, name
            assert error["code"] == code, name
            assert "\n" not in error["message"]
            assert answer_of(client)["choices"] == right, f"after {name}"
        assert client.get("/nowhere").status_code == 404
        assert client.put("/v1/chat/completions").status_code == 405
        assert httpx.get(server.url + "/health").json()["status"] == "ok"
        counted = server.service.metrics.requests
        assert counted["/v1/chat/completions", 200] == len(BAD) + 1
        for status in (401, 403, 413, 400):
            expected = sum(s == status for _, s, _ in BAD.values())
            assert counted["/v1/chat/completions", status] == expected


def test_a_thousand_half_open_connections_at_once(load: Callable[..., Engine]):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2000:
        pytest.skip("not that many file descriptors are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2000), hard))
    try:
        with serve(load("vanilla"), key=KEY) as server, client_of(server, KEY) as client:
            right = answer_of(client)["choices"]
            with contextlib.ExitStack() as stack:
                for i in range(1000):
                    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                    raw = server.connect(head if i % 2 else b"")
                    stack.callback(raw.close)
                assert answer_of(client)["choices"] == right
                until(lambda: server.connections <= 128)
                with client_of(server, KEY) as another:
                    assert answer_of(another)["choices"] == right
            until(lambda: server.connections <= 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_client_that_reads_slowly_keeps_nobody_waiting(load: Callable[..., Engine]):
    with serve(load("vanilla"), write_seconds=1) as server, client_of(server) as client:
        body = json.dumps(GOOD | {"stream": True, "max_tokens": 200}).encode()
        raw = server.connect(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body),
            receive_buffer=4096,
        )
        assert raw.recv(1) == b"H"
        assert answer_of(client)["usage"]["completion_tokens"] == 8
        raw.recv(1)
        assert answer_of(client)["usage"]["completion_tokens"] == 8
        raw.close()


def test_one_byte_a_second_of_a_request(load: Callable[..., Engine]):
    with serve(load("vanilla"), header_seconds=1, body_seconds=1) as server:
        raw = server.connect(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        raw.sendall(b"Content-Length: 500\r\n\r\n{")
        with client_of(server) as client:
            right = answer_of(client)["choices"]
            for byte in b'"me':
                with contextlib.suppress(OSError):
                    raw.sendall(bytes([byte]))
                time.sleep(0.5)
                assert answer_of(client)["choices"] == right
        assert refusal(read_all(raw)) == (408, "request_timeout")


@contextlib.contextmanager
def turn_held(server: Running) -> Iterator[None]:
    """Somebody else's turn for the block."""
    loop, begun, over = server.loop, threading.Event(), asyncio.Event()

    async def hold() -> None:
        async with server.service.queue.turn("somebody"):
            begun.set()
            await over.wait()

    held = asyncio.run_coroutine_threadsafe(hold(), loop)
    assert begun.wait(20)
    yield
    loop.call_soon_threadsafe(over.set)
    held.result(20)


def test_too_many_requests_are_told_when_to_come_back(load: Callable[..., Engine]):
    with serve(load(None), draft=PLAIN, queue=FairQueue(1)) as server, client_of(server) as client:
        queue = server.service.queue
        with ThreadPoolExecutor(1) as pool, turn_held(server):
            waits = pool.submit(answer_of, client)
            until(lambda: queue.waiting == 1)
            assert httpx.get(server.url + "/health").json()["waiting"] == 1
            for stream in (False, True):
                body = GOOD | {"user": "late", "stream": stream}
                response = client.post("/v1/chat/completions", json=body)
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "queue_full"
                assert int(response.headers["Retry-After"]) >= 1
        assert waits.result()["usage"]["completion_tokens"] == 8
        assert answer_of(client)["usage"]["completion_tokens"] == 8


def test_a_client_that_goes_while_it_waits_leaves_the_queue(load: Callable[..., Engine]):
    with serve(load(None), draft=PLAIN) as server, client_of(server) as client:
        queue = server.service.queue
        with turn_held(server):
            body = json.dumps(GOOD).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            raw = server.connect(f"{head}{len(body)}\r\n\r\n".encode() + body)
            until(lambda: queue.waiting == 1)
            raw.close()
            until(lambda: queue.waiting == 0)
        assert answer_of(client)["usage"]["completion_tokens"] == 8
        generated = server.service.metrics.generated_tokens
        assert generated == 8


class NotingQueue(FairQueue):
    """Remembers whose turns there were."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[Hashable] = []

    @contextlib.asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        async with super().turn(client):
            self.order.append(client)
            yield


def test_one_busy_client_does_not_keep_the_others_out(load: Callable[..., Engine]):
    """Clients take turns: the second request of one comes after the first of another."""
    queue = NotingQueue()
    with serve(load(None), draft=PLAIN, queue=queue) as server, ThreadPoolExecutor(6) as pool:

        def ask(user: str) -> None:
            with client_of(server) as client:
                answer_of(client, GOOD | {"user": user})

        asked = []
        with turn_held(server):
            for n, user in enumerate(("a", "a", "a", "b", "b", "c")):
                asked.append(pool.submit(ask, user))
                until(lambda n=n: queue.waiting == n + 1)
        for each in asked:
            each.result(30)
        assert queue.order == ["somebody", *(("user", user) for user in "abcaba")]


def test_eight_clients(load: Callable[..., Engine]):
    """No error, no answer of somebody else, no token lost or counted twice."""
    engine = load("vanilla", n_ctx=512, prefix_cache=2**20)
    with load(None, n_ctx=512) as alone:
        right = {}
        for i in range(6):
            body = GOOD | {"messages": [{"role": "user", "content": f"{i} is a number"}]}
            body |= {"max_tokens": 5 + 3 * i}
            text = chat_template(alone).render(body["messages"])
            right[json.dumps(body)] = alone.complete(
                text, max_tokens=body["max_tokens"], draft=PLAIN
            )
    assert len({r.text for r in right.values()}) == len(right)
    with serve(engine) as server, ThreadPoolExecutor(8) as pool:

        def ask(who: int) -> int:
            tokens = 0
            with client_of(server) as client:
                for i in range(8):
                    body = json.loads(list(right)[(who + i) % len(right)])
                    expected = right[json.dumps(body)]
                    if (who + i) % 2:
                        assert streamed(client, body) == (expected.text, expected.finish_reason)
                    else:
                        answer = answer_of(client, body)
                        choice = answer["choices"][0]
                        assert choice["message"]["content"] == expected.text
                        assert choice["finish_reason"] == expected.finish_reason
                        assert answer["usage"]["completion_tokens"] == len(expected.token_ids)
                    tokens += len(expected.token_ids)
            return tokens

        total = sum(pool.map(ask, range(8)))
        metrics = server.service.metrics
        assert metrics.generated_tokens == total
        assert metrics.requests == {("/v1/chat/completions", 200): 64}
        assert metrics.processed_tokens < metrics.prompt_tokens
        assert metrics.queue_depth() == 0


@pytest.mark.parametrize("stream", [True, False])
def test_stopping_ends_the_answer_under_way(load: Callable[..., Engine], stream: bool):
    with ThreadPoolExecutor(2) as pool:
        with serve(load(None, n_ctx=100_000), draft=PLAIN) as server:
            body = GOOD | {"max_tokens": 90_000, "stream": stream, "grammar": ENDLESS}

            def ask(user: str) -> httpx.Response:
                with client_of(server) as client:
                    return client.post("/v1/chat/completions", json=body | {"user": user})

            asked = [pool.submit(ask, "a")]
            until(lambda: server.service.metrics.generated_tokens > 3)
            asked.append(pool.submit(ask, "b"))
            until(lambda: server.service.queue.waiting == 1)
        # Leaving the block stops the server; `running` fails where that takes long.
        began, waited = (each.result(30) for each in asked)
        assert waited.status_code == 503
        assert waited.json()["error"]["code"] == "stopping"
        if stream:
            *_, error, done, rest = began.text.split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            assert json.loads(error[6:])["error"]["code"] == "stopping"
        else:
            assert began.status_code == 503
            assert began.json()["error"]["code"] == "stopping"
        assert server.service.metrics.generated_tokens < 90_000
