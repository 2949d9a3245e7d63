"""A conversation: messages in, steps out; only what is new is ever evaluated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from os import PathLike
from typing import TypeVar

from localspec import aio, transcript
from localspec.continuation import continued, spelled
from localspec.engine import DraftOptions, Engine, Result, Step
from localspec.errors import LocalspecError
from localspec.grammar import Grammar
from localspec.llama import Model
from localspec.reasoning import closed
from localspec.sampling import SamplingParams
from localspec.template import ChatTemplate
from localspec.turns import ThreadedTurn, Turn

C = TypeVar("C", bound="Chat")
Message = dict[str, str]
_BUSY = "this conversation is being answered; finish, close or cancel that first"


class Chat:
    """A conversation with an engine.

    One answer at a time; several conversations may share an engine. Its KV cache holds the tokens
    of one of them: when another one has spoken in between, they come out of the prefix cache, or,
    without one (`Engine.load(prefix_cache=)`), what the two do not share is evaluated again.

    Args:
        engine: what answers.
        system: the system message; the template's default when left out.
        params: sampling.
        draft: drafting.

    Attributes:
        messages: the conversation so far, mappings with "role" and "content". May be changed
            between turns; what is new is evaluated with the next answer.
        params: sampling of the next answers; greedy when None.
        draft: drafting of the next answers; the policy decides when None.
        last: the result of the last answer, complete or stopped.

    Raises:
        LocalspecError: the target has no chat template.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        draft: DraftOptions | None = None,
    ) -> None:
        self.engine, self.params, self.draft = engine, params, draft
        self.template = chat_template(engine)
        self._system = system
        self.last: Result | None = None
        self.messages: list[Message] = []
        self._answering = threading.Lock()
        self._turn: Turn | None = None
        self.reset()

    def reset(self) -> None:
        """Start over; the system message stays."""
        self._check_idle()
        self.messages.clear()
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self.last = None
        # A rendered conversation, the tokens that stand for it, and the places (characters,
        # tokens) up to which both are known to belong together.
        self._text, self._ids, self._marks = "", list[int](), list[tuple[int, int]]()

    @property
    def system(self) -> str | None:
        """The system message; setting it changes the conversation from its beginning."""
        return self._system

    @system.setter
    def system(self, content: str | None) -> None:
        self._check_idle()
        if self.messages and self.messages[0]["role"] == "system":
            del self.messages[0]
        if content is not None:
            self.messages.insert(0, {"role": "system", "content": content})
        self._system = content

    def send(
        self,
        content: str,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> Generator[Step, None, None]:
        """Say something and stream the answer.

        Closing the generator, cancelling, or an exception while it runs ends the answer; what was
        said so far stays in the conversation.

        Args:
            content: the user's message.
            max_tokens: most tokens of the answer.
            stop: strings that end it.
            grammar: what the answer has to look like (`Engine.generate`).
            logprobs: give its tokens their log probabilities (`Engine.generate`).

        Raises:
            LocalspecError: the conversation does not fit the context any more or the template
                refuses it (the message is taken back), or another answer is under way.
        """

        def said() -> list[Message]:
            return [*self.messages, {"role": "user", "content": content}]

        return self._answer(said, max_tokens, stop, grammar, logprobs)

    def regenerate(
        self,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> Generator[Step, None, None]:
        """Answer the last user message (again). What was evaluated up to it is reused.

        With greedy sampling, or with a fixed seed, the answer is the same again.

        Raises:
            LocalspecError: there is no user message, or as `send`; the old answer stays then.
        """
        return self._answer(self._to_answer_again, max_tokens, stop, grammar, logprobs)

    def astream(
        self,
        content: str,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> aio.AsyncSteps:
        """`send` for `async for`: rounds run in a worker thread. Cancelling the task, or leaving
        the loop, cancels the answer."""

        def said() -> list[Message]:
            return [*self.messages, {"role": "user", "content": content}]

        return self._aanswer(said, max_tokens, stop, grammar, logprobs)

    def aregenerate(
        self,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> aio.AsyncSteps:
        """`regenerate` for `async for`."""
        return self._aanswer(self._to_answer_again, max_tokens, stop, grammar, logprobs)

    def cancel(self) -> None:
        """End the answer under way, from any thread.

        It ends within one round with the finish reason "cancelled", also while it waits for the
        engine. Without effect when no answer is under way.
        """
        turn = self._turn
        if turn is not None:
            self.engine._turns.cancel(turn)

    def edit(self, turn: int, content: str) -> None:
        """Say something else instead; everything after it is dropped. `regenerate` answers it.

        Args:
            turn: index of a user message in `messages` (negative ones count from the end).
            content: what it says from now on.

        Raises:
            LocalspecError: there is no such user message, or an answer is under way.
        """
        self._check_idle()
        if not -len(self.messages) <= turn < len(self.messages):
            raise LocalspecError(
                f"there is no message {turn}; the conversation has {len(self.messages)}"
            )
        turn %= len(self.messages)
        role = self.messages[turn]["role"]
        if role != "user":
            raise LocalspecError(f"message {turn} is the {role}'s; edit one of the user's")
        self.messages[turn:] = [{"role": "user", "content": content}]

    def branch(self: C) -> C:
        """A conversation of its own that goes on from here, on the same engine.

        Raises:
            LocalspecError: an answer is under way.
        """
        self._check_idle()
        other = type(self)(self.engine, system=self._system, params=self.params, draft=self.draft)
        other.messages[:] = [dict(m) for m in self.messages]
        other.last = self.last
        other._text, other._ids, other._marks = self._text, list(self._ids), list(self._marks)
        return other

    def save(self, path: str | PathLike[str]) -> None:
        """Write the conversation and its sampling to a JSON file, whole or not at all.

        Raises:
            LocalspecError: the file cannot be written.
        """
        name = self.engine.model.meta("general.name") or self.engine.model.path.stem
        transcript.save(path, self.messages, self.params, model=name)

    @classmethod
    def load(
        cls: type[C],
        engine: Engine,
        path: str | PathLike[str],
        *,
        params: SamplingParams | None = None,
        draft: DraftOptions | None = None,
    ) -> C:
        """A conversation from a file written by `save`, on any engine.

        Args:
            engine: what answers from now on.
            path: the file.
            params: sampling; what was saved when left out.
            draft: drafting.

        Raises:
            LocalspecError: the file cannot be read or is no saved conversation.
        """
        saved = transcript.load(path)
        system = None
        if saved.messages and saved.messages[0]["role"] == "system":
            system = saved.messages[0]["content"]
        chat = cls(engine, system=system, params=params or saved.params, draft=draft)
        chat.messages[:] = saved.messages
        return chat

    def _to_answer_again(self) -> list[Message]:
        users = [i for i, m in enumerate(self.messages) if m["role"] == "user"]
        if not users:
            raise LocalspecError("there is no user message to answer; send one first")
        return self.messages[: users[-1] + 1]

    def _aanswer(
        self,
        said: Callable[[], list[Message]],
        max_tokens: int | None,
        stop: Sequence[str],
        grammar: Grammar | None,
        logprobs: int | None,
    ) -> aio.AsyncSteps:
        turn = ThreadedTurn()

        def start() -> Generator[Step, None, None]:
            return self._answer(said, max_tokens, stop, grammar, logprobs, turn)

        return aio.AsyncSteps(start, turn, self.engine._turns)

    def _answer(
        self,
        said: Callable[[], list[Message]],
        max_tokens: int | None,
        stop: Sequence[str],
        grammar: Grammar | None,
        logprobs: int | None,
        turn: Turn | None = None,
    ) -> Generator[Step, None, None]:
        """Answer the messages that `said` gives; they take effect when they can be answered."""
        turn = turn or Turn()
        self._begin_answering()
        self._turn = turn
        try:
            messages = said()
            text = self.template.render(messages)
            if grammar is not None:
                text = closed(text)
            ids = self._tokenize(text)
            steps = self.engine._start(
                turn,
                ids,
                self.params,
                max_tokens,
                self.draft,
                stop,
                None,
                grammar=grammar,
                logprobs=logprobs,
            )
            self.messages[:] = messages
            result = self.last = Result()
            try:
                for step in steps:
                    result.add(step)
                    yield step
            finally:
                steps.close()
                self.messages.append({"role": "assistant", "content": result.text})
                self._remember(text, ids, result)
        finally:
            self._turn = None
            self._answering.release()

    def _begin_answering(self) -> None:
        # An answer that was left (`async for` ... `break`) is about to end in its worker.
        turn = self._turn
        patience = -1 if turn is not None and turn.abandoned else 0.02
        if not self._answering.acquire(timeout=patience):
            raise LocalspecError(_BUSY)

    def _check_idle(self) -> None:
        self._begin_answering()
        self._answering.release()

    def _remember(self, text: str, ids: list[int], result: Result) -> None:
        self._text, self._ids = text, ids
        self._marks.append((len(text), len(ids)))
        if spelled(self.engine, result):
            self._text, self._ids = text + result.text, [*ids, *result.token_ids]
            self._marks.append((len(self._text), len(self._ids)))

    def _tokenize(self, text: str) -> list[int]:
        """Tokens of the rendered conversation, extending the ones that are known already.

        After an edit, or when the template drops an earlier part, what is kept ends where they
        part.
        """
        while self._marks and not text.startswith(self._text[: self._marks[-1][0]]):
            self._marks.pop()
        if self._marks:
            n_text, n_ids = self._marks[-1]
            ids = continued(self.engine, self._text[:n_text], self._ids[:n_ids], text)
            if ids is not None:
                return ids
            self._marks.clear()
        return self.engine.tokenize(text)


def chat_template(engine: Engine) -> ChatTemplate:
    """The chat template of an engine's target.

    Raises:
        LocalspecError: it has none, or an invalid one.
    """
    return template_of(engine.model)


def template_of(model: Model) -> ChatTemplate:
    """The chat template of a loaded model; see `chat_template`."""
    source = model.chat_template
    if source is None:
        raise LocalspecError(
            f"{model.path.name} has no chat template; it may be a base model: continue text with "
            "`localspec generate --raw`"
        )

    def text(token: int) -> str:
        return model.text([token], special=True) if token >= 0 else ""

    return ChatTemplate(source, bos=text(model.bos), eos=text(model.eos))
