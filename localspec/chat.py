"""A conversation: messages in, steps out; only what is new is ever evaluated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localspec.engine import DraftOptions, Engine, Result, Step
from localspec.errors import LocalspecError
from localspec.sampling import SamplingParams
from localspec.template import ChatTemplate


class Chat:
    """A conversation with an engine.

    Args:
        engine: it should be used by one conversation at a time: another prompt in between makes
            the next turn evaluate everything again (correct, but slower).
        system: the system message; the template's default when left out.
        params: sampling for every turn.
        draft: drafting for every turn.

    Attributes:
        messages: the conversation so far, mappings with "role" and "content".
        last: the result of the last turn, complete or stopped.

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
        self.messages: list[dict[str, str]] = []
        self.reset()

    def reset(self) -> None:
        """Start over; the system message stays."""
        self.messages.clear()
        if self._system is not None:
            self.messages.append({"role": "system", "content": self._system})
        self.last = None
        # The rendered conversation up to here and the tokens that stand for it.
        self._text, self._ids = "", list[int]()

    def send(
        self, content: str, *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Iterator[Step]:
        """Say something and stream the answer.

        Closing the generator, or an exception while it runs, ends the answer; what was said so far
        stays in the conversation.

        Args:
            content: the user's message.
            max_tokens: most tokens of the answer.
            stop: strings that end it.

        Raises:
            LocalspecError: the conversation does not fit the context any more (the message is
                taken back), or the template refuses it.
        """
        self.messages.append({"role": "user", "content": content})
        try:
            text = self.template.render(self.messages)
            ids = self._tokenize(text)
            steps = self.engine.generate(
                ids, self.params, max_tokens=max_tokens, draft=self.draft, stop=stop
            )
        except BaseException:
            self.messages.pop()
            raise
        result = Result()
        self.last = result
        try:
            for step in steps:
                result.add(step)
                yield step
        finally:
            self.messages.append({"role": "assistant", "content": result.text})
            self._remember(text, ids, result)

    def _remember(self, text: str, ids: list[int], result: Result) -> None:
        model, answer = self.engine.model, list(result.token_ids)
        if model.text([t for t in answer if not model.is_end(t)]) != result.text:
            # A stop string or half a character was cut off: the tokens say more than the text.
            answer, ids, text = [], [], ""
        self._text, self._ids = text + (result.text if text else ""), [*ids, *answer]

    def _tokenize(self, text: str) -> list[int]:
        """Tokens of the rendered conversation, extending the ones that are cached already.

        Generated text, tokenized again, need not give the tokens that were generated. Keeping
        those and tokenizing only what follows is faithful and leaves the KV cache valid.
        """
        model = self.engine.model
        if not self._text or not text.startswith(self._text):
            return self.engine.tokenize(text)
        ids, rest = list(self._ids), text[len(self._text) :]
        if ids and model.is_end(ids[-1]):
            end = model.text(ids[-1:], special=True)
            if rest.startswith(end):
                rest = rest[len(end) :]
            else:
                ids.pop()
        new = model.tokenize(rest)
        if model.text(new, special=True) != rest:  # e.g. a tokenizer that adds a space in front
            return self.engine.tokenize(text)
        return ids + new


def chat_template(engine: Engine) -> ChatTemplate:
    """The chat template of an engine's target.

    Raises:
        LocalspecError: it has none, or an invalid one.
    """
    model = engine.model
    source = model.chat_template
    if source is None:
        raise LocalspecError(
            f"{model.path.name} has no chat template; it may be a base model: continue text with "
            "`localspec generate --raw`"
        )

    def text(token: int) -> str:
        return model.text([token], special=True) if token >= 0 else ""

    return ChatTemplate(source, bos=text(model.bos), eos=text(model.eos))
