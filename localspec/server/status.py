"""`/health` and `/metrics`: how the server is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from localspec.server.metrics import CONTENT_TYPE, Metrics


def status_routes(metrics: Metrics) -> list[Route]:
    """Routes for supervisors (`/health`, also `/v1/health`) and Prometheus (`/metrics`)."""

    async def health(_request: Request) -> Response:
        state = {
            "status": "ok",
            "generating": metrics.generating(),
            "waiting": metrics.queue_depth(),
        }
        return JSONResponse(state)

    async def scrape(_request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return [
        Route("/health", health, name="health"),
        Route("/v1/health", health, name="health_v1", include_in_schema=False),
        Route("/metrics", scrape, name="metrics"),
    ]
