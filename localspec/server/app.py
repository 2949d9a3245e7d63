"""The application: which path is answered by whom, and what errors look like."""

from __future__ import annotations

import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from localspec.errors import LocalspecError
from localspec.server.chat_api import chat_completions
from localspec.server.completions_api import completions
from localspec.server.errors import ApiError, server_error
from localspec.server.openapi import description
from localspec.server.service import Service
from localspec.server.status import status_routes
from localspec.server.streaming import ClientGone
from localspec.server.wire import json_response

logger = logging.getLogger("localspec.server")


def build_app(service: Service) -> Starlette:
    """The ASGI application of a service, open to all: `run.protect` stands in front of it."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", chat_completions, methods=["POST"], name="chat"),
            Route("/v1/completions", completions, methods=["POST"], name="completions"),
            Route("/v1/models", _models, name="models"),
            Route("/v1/models/{model:path}", _model, name="model"),
            Route("/openapi.json", _openapi, name="openapi"),
            *status_routes(service.metrics),
        ],
        exception_handlers={
            ApiError: _api_error,
            LocalspecError: _localspec_error,
            HTTPException: _http_error,
            ClientGone: _gone,
            ClientDisconnect: _gone,
            Exception: _failure,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


async def _models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_described(request.app.state.service)]})


async def _model(request: Request) -> Response:
    service: Service = request.app.state.service
    if request.path_params["model"] != service.model_id:
        raise ApiError(
            f"there is no model of that name; this server has {service.model_id}",
            status=404,
            param="model",
            code="model_not_found",
        )
    return json_response(_described(service))


def _described(service: Service) -> dict[str, Any]:
    """OpenAI's model object; what it does not have is in `meta`, as llama.cpp has it."""
    engine = service.engine
    return {
        "id": service.model_id,
        "object": "model",
        "created": service.created,
        "owned_by": "localspec",
        "meta": {
            "n_ctx": engine.n_ctx,
            "n_ctx_train": engine.model.n_ctx_train,
            "n_vocab": engine.model.n_vocab,
            "chat_template": service.template is not None,
            "drafter": engine.has_drafter,
        },
    }


async def _openapi(request: Request) -> Response:
    return json_response(description())


async def _api_error(_request: Request, e: Exception) -> Response:
    assert isinstance(e, ApiError)
    return e.response()


async def _localspec_error(_request: Request, e: Exception) -> Response:
    return server_error(str(e)).response()


async def _http_error(request: Request, e: Exception) -> Response:
    assert isinstance(e, HTTPException)
    path = request.url.path
    message, code = e.detail, None
    if e.status_code == 404:
        message, code = f"there is nothing at {path[:100]}; see /openapi.json", "unknown_url"
    elif e.status_code == 405:
        message, code = f"{path[:100]} does not take {request.method[:20]}", "method_not_allowed"
    headers = dict(e.headers) if e.headers else None
    return ApiError(message, status=e.status_code, code=code, headers=headers).response()


async def _gone(_request: Request, _e: Exception) -> Response:
    return Response(status_code=499)  # nginx's number; nobody reads it but the counters


async def _failure(request: Request, e: Exception) -> Response:
    logger.error("%s failed", request.url.path, exc_info=e)
    return server_error("something went wrong in the server; its log says what").response()
