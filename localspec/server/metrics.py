"""What the server counts, as Prometheus text.

Written by hand: nine counters, three gauges and a histogram need no library. The format is
https://prometheus.io/docs/instrumenting/exposition_formats/ (text, version 0.0.4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localspec.steps import Step

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Upper bounds, seconds: from a cached prompt on a GPU to a long one on a CPU behind others.
FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

# Status of a request whose client went away before its answer (nginx's number for it).
GONE = 499


class Metrics:
    """Counters of one server. To be used from its event loop's thread.

    Args:
        queue_depth: requests that wait for their turn.
        generating: whether a generation is under way.
        connections: open connections.
    """

    def __init__(
        self,
        queue_depth: Callable[[], int] = lambda: 0,
        generating: Callable[[], bool] = lambda: False,
        connections: Callable[[], int] = lambda: 0,
    ) -> None:
        self.queue_depth, self.generating, self.connections = queue_depth, generating, connections
        self.requests: Counter[tuple[str, int]] = Counter()
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = self.processed_tokens = self.generated_tokens = 0
        self.drafted_tokens = self.accepted_tokens = self.rounds = 0
        self.generating_seconds = 0.0
        self._first_token_counts = [0] * (len(FIRST_TOKEN_BUCKETS) + 1)
        self._first_token_sum = 0.0

    def request(self, route: str, status: int) -> None:
        """A request was answered or refused."""
        self.requests[route, status] += 1

    def step(self, step: Step) -> None:
        """A generation's next step."""
        self.generated_tokens += len(step.token_ids)
        if step.prefill is not None:
            self.prompt_tokens += step.prefill.tokens
            self.processed_tokens += step.prefill.processed
            self.generating_seconds += step.prefill.seconds
        if step.round is not None:
            self.rounds += 1
            self.drafted_tokens += step.round.drafted
            self.accepted_tokens += step.round.accepted
            self.generating_seconds += step.round.seconds.total
        if step.finish_reason is not None:
            self.finished[step.finish_reason] += 1

    def first_token(self, seconds: float) -> None:
        """The first token came so long after the request, the wait for its turn included."""
        self._first_token_counts[bisect_left(FIRST_TOKEN_BUCKETS, seconds)] += 1
        self._first_token_sum += seconds

    def text(self) -> str:
        """All of it, as a scrape wants it."""
        routes = (
            (f'{{route="{_escaped(route)}",status="{status}"}}', n)
            for (route, status), n in sorted(self.requests.items())
        )
        reasons = ((f'{{reason="{_escaped(r)}"}}', n) for r, n in sorted(self.finished.items()))
        lines = [
            *_family("requests_total", "counter", "Requests by route and status.", routes),
            *_family("generations_total", "counter", "Generations by how they ended.", reasons),
            *_one("prompt_tokens_total", "counter", "Prompt tokens received.", self.prompt_tokens),
            *_one("prompt_tokens_processed_total", "counter",
                  "Prompt tokens evaluated; the others were in the KV cache.",
                  self.processed_tokens),
            *_one("generated_tokens_total", "counter", "Tokens generated.", self.generated_tokens),
            *_one("drafted_tokens_total", "counter", "Tokens drafted.", self.drafted_tokens),
            *_one("accepted_tokens_total", "counter", "Drafted tokens that the target agreed with.",
                  self.accepted_tokens),
            *_one("rounds_total", "counter", "Rounds of draft and verification.", self.rounds),
            *_one("generating_seconds_total", "counter",
                  "Seconds spent evaluating prompts and generating.", self.generating_seconds),
            *_one("queue_depth", "gauge", "Requests waiting for their turn.", self.queue_depth()),
            *_one("generating", "gauge", "1 while a generation is under way.",
                  int(self.generating())),
            *_one("open_connections", "gauge", "Open connections.", self.connections()),
            *self._first_token_lines(),
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def _first_token_lines(self) -> Iterable[str]:
        name = "time_to_first_token_seconds"
        below, buckets = 0, []
        for bound, n in zip((*FIRST_TOKEN_BUCKETS, "+Inf"), self._first_token_counts, strict=True):
            below += n
            buckets.append((f'_bucket{{le="{bound}"}}', below))
        return _family(
            name,
            "histogram",
            "Seconds from a request to its first token, the wait for its turn included.",
            [*buckets, ("_sum", self._first_token_sum), ("_count", below)],
        )


class CountRequests:
    """ASGI middleware that counts answers by route and status.

    Args:
        app: the application.
        metrics: where to count.
        routes: the known ones; every other path counts as "other".
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[BaseRoute]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            self._metrics.request(self._route(scope), status)

    def _route(self, scope: Scope) -> str:
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return str(getattr(route, "path", "other"))
        return "other"


def _family(
    name: str, kind: str, about: str, samples: Iterable[tuple[str, float]]
) -> Iterable[str]:
    name = f"localspec_{name}"
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for rest, value in samples:
        yield f"{name}{rest} {value}"


def _one(name: str, kind: str, about: str, value: float) -> Iterable[str]:
    return _family(name, kind, about, [("", value)])


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
