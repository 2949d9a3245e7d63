"""Prometheus text: parsed by a strict reader of the format, and counted right."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from localspec.server.metrics import GONE, CountRequests, Metrics
from localspec.steps import Prefill, Round, Seconds, Step

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\})? (\S+)')


def read(text: str) -> dict[str, float]:
    """Samples by name and labels; fails on what the text format does not allow."""
    assert text.endswith("\n")
    samples: dict[str, float] = {}
    family = kind = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            family = line.split()[2]
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name == family
            assert kind in ("counter", "gauge", "histogram")
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            allowed = {family}
            if kind == "histogram":
                allowed = {f"{family}_{end}" for end in ("bucket", "sum", "count")}
            assert match[1] in allowed
            name = match[1] + (f"{{{match[2]}}}" if match[2] else "")
            assert name not in samples
            samples[name] = float(match[3])
    return samples


def test_a_new_server():
    samples = read(Metrics().text())
    assert samples["localspec_generated_tokens_total"] == 0
    assert samples["localspec_time_to_first_token_seconds_count"] == 0


def test_steps_are_added_up():
    metrics = Metrics(queue_depth=lambda: 3, generating=lambda: True, connections=lambda: 5)
    metrics.step(Step("a", (1,), prefill=Prefill(tokens=9, processed=4, seconds=0.5)))
    metrics.step(Step("bc", (2, 3, 4), round=Round(7, 7, 2, Seconds(0.25, 0.5, 0.25))))
    metrics.step(Step("", (0,), round=Round(5, 5, 0, Seconds(0.0, 1.0, 0.0)), finish_reason="stop"))
    samples = read(metrics.text())
    expected = {
        "prompt_tokens_total": 9,
        "prompt_tokens_processed_total": 4,
        "generated_tokens_total": 5,
        "drafted_tokens_total": 12,
        "accepted_tokens_total": 2,
        "rounds_total": 2,
        "generating_seconds_total": 2.5,
        'generations_total{reason="stop"}': 1,
        "queue_depth": 3,
        "generating": 1,
        "open_connections": 5,
    }
    assert {name: samples[f"localspec_{name}"] for name in expected} == expected


def test_the_histogram_counts_what_is_below_each_bound():
    metrics = Metrics()
    for seconds in (0.01, 0.05, 0.06, 3.0, 500.0):
        metrics.first_token(seconds)
    samples = read(metrics.text())
    name = "localspec_time_to_first_token_seconds"
    bounds = {b: samples[f'{name}_bucket{{le="{b}"}}'] for b in ("0.05", "0.1", "5.0", "+Inf")}
    assert bounds == {"0.05": 2, "0.1": 3, "5.0": 4, "+Inf": 5}
    assert samples[f"{name}_count"] == 5
    assert abs(samples[f"{name}_sum"] - 503.12) < 1e-9


def test_labels_are_escaped():
    metrics = Metrics()
    metrics.request('a"b\\c\nd', 200)
    (name,) = [n for n in read(metrics.text()) if n.startswith("localspec_requests_total")]
    assert name == r'localspec_requests_total{route="a\"b\\c\nd",status="200"}'


def test_requests_are_counted_by_route_not_by_path():
    async def page(_request: Request) -> PlainTextResponse:
        return PlainTextResponse("ok")

    app = Starlette(routes=[Route("/v1/models/{model}", page), Route("/health", page)])
    metrics = Metrics()
    counted = CountRequests(app, metrics, app.routes)

    async def ask(path: str, method: str = "GET") -> None:
        scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": [],
                                 "query_string": b"", "root_path": ""}  # fmt: skip

        async def nothing(*_args: object) -> dict[str, Any]:
            return {"type": "http.disconnect"}

        await counted(scope, nothing, nothing)

    for path in ("/v1/models/a", "/v1/models/b", "/health", "/x", "/y"):
        asyncio.run(ask(path))
    asyncio.run(ask("/health", "POST"))
    assert metrics.requests == {
        ("/v1/models/{model}", 200): 2,
        ("/health", 200): 1,
        ("/health", 405): 1,
        ("other", 404): 2,
    }


def test_a_client_that_went_away_is_counted_too():
    async def silent(_scope: Any, _receive: Any, _send: Any) -> None:
        return

    metrics = Metrics()
    asyncio.run(CountRequests(silent, metrics, [])({"type": "http"}, None, None))  # type: ignore[arg-type]
    assert metrics.requests == {("other", GONE): 1}
