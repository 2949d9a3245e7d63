"""The API's own description (OpenAPI 3.1): the schemas that requests are checked against."""

from __future__ import annotations

from typing import Any

from localspec._version import __version__
from localspec.server.schema import CHAT_REQUEST, COMPLETION_REQUEST

Json = dict[str, Any]

_INTEGER: Json = {"type": "integer", "minimum": 0}
_STRING: Json = {"type": "string"}
_NULL: Json = {"type": "null"}
_REASON: Json = {"type": "string", "enum": ["stop", "length", "tool_calls"]}


def _object(properties: Json, optional: tuple[str, ...] = (), **more: Any) -> Json:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **more}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


_ERROR = _object(
    {
        "error": _object(
            {
                "message": {"type": "string", "description": "One line."},
                "type": _STRING,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            }
        )
    }
)
_USAGE = _object(
    {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "prompt_tokens_details": _object(
            {"cached_tokens": {**_INTEGER, "description": "Found in the KV cache."}}
        ),
        "completion_tokens_details": _object(
            {
                "accepted_prediction_tokens": {
                    **_INTEGER, "description": "Drafted tokens that became part of the answer.",
                },
                "rejected_prediction_tokens": {
                    **_INTEGER,
                    "description": "Drafted tokens that the target verified and did not agree "
                    "with. Not part of completion_tokens.",
                },
                "drafted_tokens": {
                    **_INTEGER,
                    "description": "All that were drafted; some are never verified.",
                },
                "rounds": {**_INTEGER, "description": "Passes of the target."},
            }
        ),
    }
)  # fmt: skip
_TIMINGS = {
    "type": "object",
    "description": "llama.cpp's names: counts, milliseconds, tokens per second.",
    "additionalProperties": {"type": "number"},
}
_TOKEN = _object({"token": _STRING, "logprob": {"type": "number"}, "bytes": _list(_INTEGER)})
_CHAT_LOGPROBS: Json = {
    "anyOf": [
        _object(
            {
                "content": _list(_object({**_TOKEN["properties"], "top_logprobs": _list(_TOKEN)})),
                "refusal": _NULL,
            }
        ),
        _NULL,
    ]
}
_CALL = _object(
    {
        "id": _STRING,
        "type": {"type": "string", "enum": ["function"]},
        "function": _object({"name": _STRING, "arguments": _STRING}),
    }
)
_CHAT_CHOICE = _object(
    {
        "index": _INTEGER,
        "message": _object(
            {
                "role": {"type": "string", "enum": ["assistant"]},
                "content": {"type": ["string", "null"]},
                "refusal": _NULL,
                "reasoning_content": _STRING,
                "tool_calls": _list(_CALL),
            },
            optional=("reasoning_content", "tool_calls"),
        ),
        "logprobs": _CHAT_LOGPROBS,
        "finish_reason": _REASON,
    }
)
_TEXT_CHOICE = _object(
    {
        "index": _INTEGER,
        "text": _STRING,
        "logprobs": {"type": ["object", "null"]},
        "finish_reason": _REASON,
    }
)


_DELTA = _object(
    {
        "role": {"type": "string", "enum": ["assistant"]},
        "content": _STRING,
        "reasoning_content": _STRING,
        "refusal": _NULL,
        "tool_calls": _list(_object({"index": _INTEGER, **_CALL["properties"]})),
    },
    optional=("role", "content", "reasoning_content", "refusal", "tool_calls"),
)
_OPEN_REASON: Json = {"anyOf": [_REASON, _NULL]}


def _completion(kind: str, choice: Json) -> Json:
    return _object(
        {
            "id": _STRING,
            "object": {"type": "string", "enum": [kind]},
            "created": _INTEGER,
            "model": _STRING,
            "system_fingerprint": _STRING,
            "choices": _list(choice),
            "usage": _ref("Usage"),
            "timings": _TIMINGS,
        }
    )


def _chunk(kind: str, choice: Json) -> Json:
    """A piece of a completion; the one with the usage has no choices."""
    whole = _completion(kind, _object(choice["properties"] | {"finish_reason": _OPEN_REASON}))
    whole["properties"]["usage"] = {"anyOf": [_ref("Usage"), _NULL]}
    return _object(whole["properties"], optional=("usage", "timings"))


_CHUNK_CHOICE = _object(
    {
        "index": _INTEGER,
        "delta": _DELTA,
        "logprobs": _CHAT_LOGPROBS,
    }
)


def _events(chunk: str) -> Json:
    """Of one server-sent event."""
    json = {
        "type": "string",
        "description": "A chunk; an error, where something went wrong.",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_ref(chunk), _ref("Error")]},
    }
    return _object({"data": {"anyOf": [json, {"type": "string", "enum": ["[DONE]"]}]}})


_MODEL = _object(
    {
        "id": _STRING,
        "object": {"type": "string", "enum": ["model"]},
        "created": _INTEGER,
        "owned_by": _STRING,
        "meta": {"type": "object"},
    }
)
_HEALTH = _object({"status": {"type": "string", "enum": ["ok"]}})


def _json(schema: Json, about: str) -> Json:
    return {"description": about, "content": {"application/json": {"schema": schema}}}


def _post(name: str, about: str, request: str, answer: str) -> Json:
    done = _json(_ref(answer), "The answer; with `stream`, its pieces as server-sent events.")
    done["content"]["text/event-stream"] = {"schema": _events(f"{answer}Chunk")}
    return {
        "operationId": name,
        "summary": about,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref(request)}},
        },
        "responses": {"200": done} | _errors("400", "401", "403", "408", "413", "500", "503"),
    }


def _get(name: str, about: str, answer: Json, *errors: str) -> Json:
    return {
        "operationId": name,
        "summary": about,
        "responses": {"200": answer} | _errors("401", "403", *errors),
    }


def _errors(*statuses: str) -> Json:
    about = {
        "400": "The request is wrong; the message says what.",
        "401": "The API key is missing or wrong.",
        "403": "The Host or Origin is not allowed.",
        "404": "There is nothing of that name.",
        "408": "The request did not arrive in time.",
        "413": "The body is too long.",
        "500": "Something went wrong in the server.",
        "503": "Too many requests are waiting (Retry-After says when to try again) or too many "
        "connections open, or the server is stopping.",
    }
    return {status: _json(_ref("Error"), about[status]) for status in statuses}


def description() -> Json:
    """The OpenAPI document."""
    model_id = {"name": "model", "in": "path", "required": True, "schema": _STRING}
    metrics = {"description": "Counters.", "content": {"text/plain": {"schema": _STRING}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "localspec",
            "version": __version__,
            "description": "OpenAI's API for one model on this machine. Unknown fields of requests "
            "are ignored.",
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/chat/completions": {
                "post": _post(
                    "createChatCompletion", "Answer a conversation.", "ChatRequest",
                    "ChatCompletion",
                )
            },
            "/v1/completions": {
                "post": _post(
                    "createCompletion", "Continue a text.", "CompletionRequest", "Completion"
                )
            },
            "/v1/models": {
                "get": _get(
                    "listModels", "The models: one.",
                    _json(
                        _object(
                            {
                                "object": {"type": "string", "enum": ["list"]},
                                "data": _list(_ref("Model")),
                            }
                        ),
                        "A list.",
                    ),
                )
            },
            "/v1/models/{model}": {
                "parameters": [model_id],
                "get": _get(
                    "retrieveModel", "One model.", _json(_ref("Model"), "The model."), "404"
                ),
            },
            "/health": {
                "get": _get("health", "Whether the server lives.", _json(_ref("Health"), "Yes."))
            },
            "/metrics": {"get": _get("metrics", "Counters for Prometheus.", metrics)},
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "ChatRequest": CHAT_REQUEST,
                "CompletionRequest": COMPLETION_REQUEST,
                "ChatCompletion": _completion("chat.completion", _CHAT_CHOICE),
                "Completion": _completion("text_completion", _TEXT_CHOICE),
                "ChatCompletionChunk": _chunk("chat.completion.chunk", _CHUNK_CHOICE),
                "CompletionChunk": _chunk("text_completion", _TEXT_CHOICE),
                "Usage": _USAGE,
                "Model": _MODEL,
                "Health": _HEALTH,
                "Error": _ERROR,
            },
        },
    }  # fmt: skip
