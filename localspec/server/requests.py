"""From the body of a request to what the engine is asked for."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from localspec.errors import LocalspecError
from localspec.grammar import Grammar
from localspec.llama import Model
from localspec.sampling import SamplingParams
from localspec.server.errors import ApiError, refused
from localspec.server.schema import INSTEAD, Schema
from localspec.server.validate import Invalid, check
from localspec.server.wire import loads

Body = dict[str, Any]
# Bytes of a body that are checked beside the event loop from here on.
_LONG = 1 << 16


@dataclass(frozen=True)
class Wanted:
    """What both kinds of completion have in common.

    Attributes:
        params: sampling.
        max_tokens: most tokens of the answer; None: until it or the context ends.
        stop: strings that end it.
        stream: send it as it comes.
        include_usage: end a stream with the usage.
        user: the request's `user` field.
    """

    params: SamplingParams
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    user: str | None


async def read(request: Request, schema: Schema) -> Body:
    """The body of a request, checked; fields that are null are as good as absent.

    Raises:
        ApiError: it is no JSON object, or does not follow the schema.
        ClientDisconnect: the client went before it was complete.
    """
    data = await request.body()
    if len(data) < _LONG:
        return _checked(data, schema)
    # Seconds of work that the clients of other streams would wait for.
    return await asyncio.to_thread(_checked, data, schema)


def _checked(data: bytes, schema: Schema) -> Body:
    try:
        body = loads(data)
    except ValueError as e:
        raise ApiError(f"the body is not valid JSON: {e}", code="invalid_json") from e
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    try:
        check(body, schema)
    except Invalid as e:
        field = schema["properties"].get(re.split(r"[.\[]", e.param)[0], {})
        instead = f"; {field[INSTEAD]}" if INSTEAD in field else ""
        raise ApiError(f"{e}{instead}", param=e.param or None, code="invalid_value") from e
    return {name: value for name, value in body.items() if value is not None}


def wanted(
    body: Mapping[str, Any], defaults: SamplingParams, max_tokens: int | None, n_vocab: int
) -> Wanted:
    """The common part.

    Args:
        body: the request.
        defaults: sampling where the request leaves it out.
        max_tokens: the same for the length.
        n_vocab: tokens that the model has.

    Raises:
        ApiError: values that do not go together.
    """
    if "max_completion_tokens" in body:
        max_tokens = int(body["max_completion_tokens"])
    elif "max_tokens" in body:
        max_tokens = int(body["max_tokens"])
    if max_tokens == 0:
        raise ApiError("max_tokens must be at least 1 (or -1 for no limit)", param="max_tokens")
    stop = body.get("stop", ())
    options = body.get("stream_options", {})
    if options and not body.get("stream"):
        raise ApiError("stream_options needs stream: true", param="stream_options")
    return Wanted(
        params=_params(body, defaults, n_vocab),
        max_tokens=None if max_tokens == -1 else max_tokens,
        stop=tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s),
        stream=bool(body.get("stream")),
        include_usage=bool(options.get("include_usage")),
        user=body.get("user"),
    )


def _params(body: Mapping[str, Any], defaults: SamplingParams, n_vocab: int) -> SamplingParams:
    changes: dict[str, Any] = {}
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"):
        if name in body:
            changes[name] = float(body[name])
    penalty = body.get("repetition_penalty", body.get("repeat_penalty"))
    if penalty is not None:
        changes["repetition_penalty"] = float(penalty)
    if "top_k" in body:
        changes["top_k"] = max(0, int(body["top_k"]))
    if "seed" in body:
        seed = int(body["seed"])
        changes["seed"] = None if seed == -1 else seed % 2**64
    if "logit_bias" in body:
        changes["logit_bias"] = _bias(body["logit_bias"], n_vocab)
    try:
        return replace(defaults, **changes)
    except LocalspecError as e:
        raise refused(e, next((n for n in changes if str(e).startswith(n)), None)) from e


def _bias(given: Mapping[str, float], n_vocab: int) -> dict[int, float]:
    """OpenAI's `logit_bias`: names are token ids in JSON."""
    for name in given:
        if not re.fullmatch("0|[1-9][0-9]{0,9}", name) or int(name) >= n_vocab:
            raise ApiError(
                f"logit_bias: {name[:40]!r} is no token of this model; name tokens by their ids, "
                f"0 to {n_vocab - 1}",
                param="logit_bias",
            )
    return {int(name): float(value) for name, value in given.items()}


def grammar_of(body: Mapping[str, Any], model: Model) -> Grammar | None:
    """The grammar that `response_format` or `grammar` asks for. Some work: call it in a thread.

    Raises:
        ApiError: it is not valid, both are given, or the schema cannot be enforced.
    """
    asked = body.get("response_format", {})
    kind = asked.get("type", "text")
    if kind != "text" and "grammar" in body:
        raise ApiError("give response_format or grammar, not both", param="grammar")
    if "grammar" in body:
        return made("grammar", Grammar.from_gbnf, body["grammar"], model)
    if kind == "json_object":
        schema = asked.get("schema")
        if schema is None:
            schema = {"type": "object", "additionalProperties": True}
        return made("response_format.schema", Grammar.from_json_schema, schema, model)
    if kind == "json_schema":
        if "json_schema" not in asked:
            raise ApiError(
                "response_format.json_schema is missing", param="response_format.json_schema"
            )
        param = "response_format.json_schema.schema"
        return made(param, Grammar.from_json_schema, asked["json_schema"]["schema"], model)
    return None


def grammar_from(body: Mapping[str, Any]) -> str:
    """The field that `grammar_of` reads."""
    return "grammar" if "grammar" in body else "response_format"


def made(param: str, make: Callable[[Any], Grammar], source: Any, model: Model) -> Grammar:
    """A grammar that this model can follow.

    Args:
        param: the field of the request that it comes from.
        make: makes it.
        source: of this.
        model: the target.

    Raises:
        ApiError: it is not valid, or the model has no token to begin its texts with.
    """
    try:
        grammar = make(source)
        grammar.start(model)
    except LocalspecError as e:
        raise ApiError(str(e), param=param, code="invalid_grammar") from e
    return grammar
