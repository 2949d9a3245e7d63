"""`/v1/completions`: text that goes on, without a chat template."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Mapping
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localspec.server import token_logprobs
from localspec.server.endpoint import respond
from localspec.server.errors import ApiError
from localspec.server.requests import Wanted, grammar_from, grammar_of
from localspec.server.schema import COMPLETION_REQUEST
from localspec.server.service import Job, Service
from localspec.server.streaming import Events
from localspec.server.usage import timings, usage
from localspec.steps import Result

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    """Continue a text."""
    return await respond(request, COMPLETION_REQUEST, DEFAULT_MAX_TOKENS, _prepare)


def _prepare(service: Service, body: Mapping[str, Any], ask: Wanted) -> _Answer:
    """Everything up to the tokens of the prompt."""
    prompt = body["prompt"]
    if isinstance(prompt, list) and not isinstance(prompt[0], int | float):
        prompt = prompt[0]
    if isinstance(prompt, str):
        ids = service.engine.tokenize(prompt)
    else:
        ids = [int(t) for t in prompt]
        bad = next((t for t in ids if t >= service.engine.model.n_vocab), None)
        if bad is not None:
            raise ApiError(
                f"token {bad} is outside the vocabulary of {service.engine.model.n_vocab}",
                param="prompt",
            )
    service.check_room(ids, "prompt")
    logprobs = int(body["logprobs"]) if "logprobs" in body else None
    job = Job(
        ids,
        None,
        ask.params,
        ask.max_tokens,
        ask.stop,
        grammar_of(body, service.engine.model),
        logprobs,
        grammar_from(body),
    )
    return _Answer(service, job)


class _Answer:
    """One answer, whole or in pieces."""

    def __init__(self, service: Service, job: Job) -> None:
        self._service, self._job = service, job
        self._id, self._created = f"cmpl-{os.urandom(12).hex()}", int(time.time())
        self._result = Result()
        self._offset = 0

    async def whole(self, client: Hashable) -> dict[str, Any]:
        """The complete answer."""
        result = self._result
        async with aclosing(self._service.steps(self._job, client)) as steps:
            async for step in steps:
                if step is not None:
                    result.add(step)
        choice = self._choice(result.text, result, result.finish_reason)
        return self._head() | {
            "choices": [choice],
            "usage": usage(result),
            "timings": timings(result),
        }

    async def events(self, client: Hashable, *, include_usage: bool) -> Events:
        """The chunks of a stream."""
        head = self._head()
        if include_usage:
            head["usage"] = None
        async with aclosing(self._service.steps(self._job, client)) as steps:
            async for step in steps:
                if step is None:
                    continue
                self._result.add(step)
                choice = self._choice(step.text, step, step.finish_reason)
                if step.text or step.finish_reason or choice["logprobs"]:
                    yield head | {"choices": [choice]}
        if include_usage:
            cost = {"usage": usage(self._result), "timings": timings(self._result)}
            yield head | {"choices": []} | cost

    def _choice(self, text: str, of: Any, reason: str | None) -> dict[str, Any]:
        logprobs = None
        if self._job.logprobs is not None:
            logprobs, self._offset = token_logprobs.for_completion(
                self._service.engine.model, of.logprobs, self._offset
            )
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._service.model_id,
            "system_fingerprint": self._service.fingerprint,
        }
