"""What the handlers work with: the loaded engine, its template, and turns at them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from localspec._version import __version__
from localspec.chat import chat_template
from localspec.drafting import DraftOptions
from localspec.engine import Engine
from localspec.errors import DeadEndError, LocalspecError
from localspec.grammar import Grammar
from localspec.sampling import SamplingParams
from localspec.server.answers import Answers
from localspec.server.errors import ApiError, refused, server_error
from localspec.server.metrics import Metrics
from localspec.server.queue import FairQueue, QueueClosed, QueueFull
from localspec.server.tool_format import ToolFormat
from localspec.server.tool_sample import format_of, uses_tools
from localspec.steps import Result, Step
from localspec.template import ChatTemplate


@dataclass(frozen=True)
class Job:
    """One generation.

    Attributes:
        ids: the prompt's tokens.
        text: the prompt, where what follows it may be asked to go on later; None otherwise.
        params: sampling.
        max_tokens: most tokens; None for as many as the context holds.
        stop: strings that end it.
        grammar: what it must look like.
        logprobs: log probabilities of the tokens and so many alternatives.
        grammar_from: the field of the request that the grammar comes from.
    """

    ids: list[int]
    text: str | None
    params: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    grammar: Grammar | None = None
    logprobs: int | None = None
    grammar_from: str | None = None


@dataclass
class Service:
    """One engine for many clients.

    Attributes:
        engine: the loaded engine.
        model_id: the name it is served under.
        params: sampling of requests that leave it out.
        draft: how much to draft; the policy decides when None.
        queue: who generates next.
        metrics: what is counted.
    """

    engine: Engine
    model_id: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    draft: DraftOptions | None = None
    queue: FairQueue = field(default_factory=FairQueue)
    metrics: Metrics = field(default_factory=Metrics)

    def __post_init__(self) -> None:
        if not self.model_id:
            self.model_id = self.engine.model.path.stem
        self.created = int(time.time())
        self.fingerprint = f"localspec-{__version__}"
        self.answers = Answers(self.engine)
        self._no_template = ""
        self.template: ChatTemplate | None = None
        try:
            self.template = chat_template(self.engine)
        except LocalspecError as e:
            self._no_template = str(e)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation. Up to seconds of work: call it in a thread.

        Raises:
            ApiError: there is no template, or it refuses the messages.
        """
        if self.template is None:
            raise ApiError(self._no_template, code="no_chat_template")
        more = dict(variables or {})
        if tools:
            more["tools"] = list(tools)
        try:
            return self.template.render(
                messages, add_generation_prompt=add_generation_prompt, **more
            )
        except LocalspecError as e:
            raise refused(e, "messages") from e

    def check_room(self, ids: Sequence[int], param: str) -> None:
        """Refuse a prompt that does not fit the context.

        Raises:
            ApiError: it is empty, or too long.
        """
        if not ids:
            raise ApiError("the prompt is empty; give at least one token of text", param=param)
        if len(ids) >= self.engine.n_ctx:
            raise ApiError(
                f"the prompt has {len(ids)} tokens, but the context holds {self.engine.n_ctx} and "
                "needs room for an answer; shorten the conversation or serve with a larger --n-ctx",
                param=param,
                code="context_length_exceeded",
            )

    async def steps(self, job: Job, client: Hashable) -> AsyncGenerator[Step | None, None]:
        """The steps of a generation, when it is its turn: first None, for the turn itself.

        Closing the generator, or cancelling the task that waits for a step, ends the generation
        within a round.

        Args:
            job: what to generate.
            client: whose request it is.

        Raises:
            ApiError: too many are waiting, the server is stopping, or the grammar leads nowhere.
        """
        asked = time.monotonic()
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(self.queue.turn(client))
            except QueueFull as e:
                wait = {"Retry-After": str(e.retry_after)}
                raise ApiError(str(e), status=503, code="queue_full", headers=wait) from e
            except QueueClosed as e:
                raise ApiError(str(e), status=503, code="stopping") from e
            yield None
            result = Result()
            try:
                steps = self.engine.agenerate(
                    job.ids,
                    job.params,
                    max_tokens=job.max_tokens,
                    draft=self.draft,
                    stop=job.stop,
                    grammar=job.grammar,
                    logprobs=job.logprobs,
                )
                await stack.enter_async_context(steps)
                async for step in steps:
                    if not result.token_ids and step.token_ids:
                        self.metrics.first_token(time.monotonic() - asked)
                    result.add(step)
                    self.metrics.step(step)
                    if step.finish_reason == "cancelled":
                        raise ApiError("the server is stopping", status=503, code="stopping")
                    yield step
            except DeadEndError as e:
                # Known only when the answer gets there.
                raise ApiError(str(e), param=job.grammar_from, code="invalid_grammar") from e
            except LocalspecError as e:
                # Everything else that a request can get wrong was checked before.
                raise server_error(str(e)) from e
            finally:
                if job.text is not None:
                    self.answers.add(job.text, job.ids, result)

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None when its template defines no tools."""
        if self.template is None or not uses_tools(self.template.render):
            return None
        return format_of(self.template.render)
