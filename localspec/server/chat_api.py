"""`/v1/chat/completions`."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localspec.grammar import Grammar
from localspec.reasoning import ReasoningReader, closed, left_open
from localspec.server import token_logprobs
from localspec.server.endpoint import respond
from localspec.server.errors import ApiError
from localspec.server.messages import for_template
from localspec.server.requests import Wanted, grammar_from, grammar_of, made
from localspec.server.schema import CHAT_REQUEST
from localspec.server.service import Job, Service
from localspec.server.streaming import Events
from localspec.server.tool_format import Tool
from localspec.server.tools import Call, CallReader
from localspec.server.usage import timings, usage
from localspec.steps import Result, Step
from localspec.text import TextStream

# A request may not set these of a template's variables.
_RESERVED = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}
)


@dataclass
class _Part:
    """What one step adds to the answer; the last one says why it ended."""

    step: Step | None
    content: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()
    finish_reason: str | None = None


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    return await respond(request, CHAT_REQUEST, None, _prepare)


def _prepare(service: Service, body: Mapping[str, Any], ask: Wanted) -> _Answer:
    """Everything up to the tokens of the prompt."""
    if "top_logprobs" in body and not body.get("logprobs"):
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    variables = body.get("chat_template_kwargs", {})
    bad = next((name for name in variables if name in _RESERVED or not name.isidentifier()), None)
    if bad is not None:
        raise ApiError(
            f"chat_template_kwargs cannot set {bad[:40]!r}", param="chat_template_kwargs"
        )
    tools, forced = _tools(body)
    model = service.engine.model
    grammar = grammar_of(body, model)
    if tools and grammar is not None:
        raise ApiError(
            "tools go with no response_format or grammar; give one of them", param="response_format"
        )
    called = any(m.get("tool_calls") for m in body["messages"])
    messages = for_template(body["messages"], service.tool_format if called else None)
    text = service.render(messages, tools, variables)
    if forced or grammar is not None:
        text = closed(text)
    begun = ""
    reader = None
    if tools:
        form = service.tool_format
        if form is None:
            raise ApiError(
                f"the chat template of {service.model_id} defines no tool calls, or writes them in "
                "a way that is not known here; use a model made for tools",
                param="tools",
                code="tools_not_supported",
            )
        if forced:
            try:
                begun, schema = form.forced(forced)
            except RecursionError as e:
                raise ApiError("the parameters are nested too deeply", param="tools") from e
            grammar = None
            if schema is not None:
                grammar = made("tools", Grammar.from_json_schema, schema, model)
        reader = CallReader(form, forced or tools, begun)
    ids = service.answers.tokens(text + begun)
    service.check_room(ids, "messages")
    job = Job(
        ids, text + begun, ask.params, ask.max_tokens, ask.stop, grammar,
        int(body.get("top_logprobs", 0)) if body.get("logprobs") else None,
        "tools" if tools else grammar_from(body),
    )  # fmt: skip
    thoughts = None
    if grammar is None and not begun and body.get("reasoning_format") != "none":
        thoughts = ReasoningReader(left_open(text))
    single = body.get("parallel_tool_calls") is False or isinstance(body.get("tool_choice"), dict)
    return _Answer(service, job, thoughts, reader, single)


def _tools(body: Mapping[str, Any]) -> tuple[list[Tool], list[Tool]]:
    """The tools the model is told of, and those of which it must call one."""
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        named = [t for t in tools if t["function"]["name"] == name]
        if not named:
            raise ApiError(f"tool_choice: there is no tool {name[:64]!r}", param="tool_choice")
        return tools, named
    if choice == "required" and not tools:
        raise ApiError("tool_choice 'required' needs tools", param="tool_choice")
    if choice == "none":
        return [], []
    return tools, tools if choice == "required" else []


class _Answer:
    """One answer, whole or in pieces.

    Args:
        service: what answers.
        job: the generation.
        thoughts: tells reasoning from the rest, where there may be some.
        reader: finds the calls in the rest.
        single: end after the first call.
    """

    def __init__(
        self,
        service: Service,
        job: Job,
        thoughts: ReasoningReader | None,
        reader: CallReader | None,
        single: bool,
    ) -> None:
        self._service, self._job, self._single = service, job, single
        self._thoughts, self._reader = thoughts, reader
        self._id, self._created = f"chatcmpl-{os.urandom(12).hex()}", int(time.time())
        self._result = Result()
        # Calls are marked with special tokens in some formats, which the text does not show.
        self._special: TextStream | None = None
        if reader is not None and reader.marked_by(service.engine.model):
            self._special = TextStream(self._piece, job.stop)

    async def whole(self, client: Hashable) -> dict[str, Any]:
        """The complete answer."""
        content, reasoning, calls, reason = "", "", list[Call](), "stop"
        async with aclosing(self._parts(client)) as parts:
            async for part in parts:
                content += part.content
                reasoning += part.reasoning
                calls += part.calls
                reason = part.finish_reason or reason
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": [c.as_dict() for c in calls]}
        if reasoning:
            message["reasoning_content"] = reasoning
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(self._result),
            "finish_reason": reason,
        }
        return self._head("chat.completion") | {
            "choices": [choice],
            "usage": usage(self._result),
            "timings": timings(self._result),
        }

    async def events(self, client: Hashable, *, include_usage: bool) -> Events:
        """The chunks of a stream."""
        head = self._head("chat.completion.chunk")
        if include_usage:
            head["usage"] = None
        called = 0
        async with aclosing(self._parts(client)) as parts:
            async for part in parts:
                delta: dict[str, Any] = {}
                if part.step is None:
                    delta = {"role": "assistant", "content": "", "refusal": None}
                if part.reasoning:
                    delta["reasoning_content"] = part.reasoning
                if part.content:
                    delta["content"] = part.content
                if part.calls:
                    delta["tool_calls"] = [
                        {"index": called + i} | c.as_dict() for i, c in enumerate(part.calls)
                    ]
                    called += len(part.calls)
                logprobs = part.step and self._logprobs(part.step)
                if delta or (logprobs and logprobs["content"]):
                    choice = {"index": 0, "delta": delta, "logprobs": logprobs}
                    yield head | {"choices": [choice | {"finish_reason": None}]}
                if part.finish_reason is not None:
                    choice = {"index": 0, "delta": {}, "logprobs": None}
                    yield head | {"choices": [choice | {"finish_reason": part.finish_reason}]}
        if include_usage:
            cost = {"usage": usage(self._result), "timings": timings(self._result)}
            yield head | {"choices": []} | cost

    async def _parts(self, client: Hashable) -> AsyncGenerator[_Part, None]:
        reader, reason = self._reader, "stop"
        async with aclosing(self._service.steps(self._job, client)) as steps:
            async for step in steps:
                if step is None:
                    yield _Part(None)
                    continue
                self._result.add(step)
                reason = step.finish_reason or reason
                part = self._read(step, self._text_of(step), final=step.finish_reason is not None)
                if self._single and part.calls:
                    # What more it would say nobody asked for.
                    yield replace(part, calls=part.calls[:1], finish_reason="tool_calls")
                    return
                yield part
        if reader is not None and reader.calls and reason == "stop":
            reason = "tool_calls"
        yield _Part(Step("", ()), finish_reason=reason)

    def _read(self, step: Step, text: str, *, final: bool) -> _Part:
        """What a step's text is: reasoning, plain text, calls."""
        reasoning, content, calls = "", text, list[Call]()
        if self._thoughts is not None:
            reasoning, content = self._thoughts.feed(text)
            if final:
                more, rest = self._thoughts.finish()
                reasoning, content = reasoning + more, content + rest
        if self._reader is not None:
            content, calls = self._reader.feed(content)
            if final:
                rest, more_calls = self._reader.finish()
                content, calls = content + rest, calls + more_calls
        return _Part(step, content, reasoning, calls)

    def _text_of(self, step: Step) -> str:
        if self._special is None:
            return step.text
        text = "".join(self._special.feed(t) for t in step.token_ids)
        return text if step.finish_reason is None else text + self._special.finish()

    def _piece(self, token: int) -> bytes:
        model = self._service.engine.model
        return b"" if model.is_end(token) else model.piece(token, special=True)

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._service.model_id,
            "system_fingerprint": self._service.fingerprint,
        }

    def _logprobs(self, of: Result | Step) -> dict[str, Any] | None:
        if self._job.logprobs is None:
            return None
        model = self._service.engine.model
        return {"content": token_logprobs.for_chat(model, of.logprobs), "refusal": None}
