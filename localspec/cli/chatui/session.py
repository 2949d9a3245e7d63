"""What a chat in the terminal consists of: a conversation, a way to load models, settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path

from localspec import finding
from localspec.chat import Chat
from localspec.cli.chatui.view import Show
from localspec.drafting import DraftOptions
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.reasoning import Marks, left_open, take_apart
from localspec.sampling import SamplingParams
from localspec.steps import Step

Files = tuple[str | Path, str | Path | None]
Steps = Generator[Step, None, None]


class Session:
    """The state that commands change.

    Args:
        load: target, drafter or None -> an engine ready for use.
        files: what to load first.
        system: the system message.
        params: sampling.
        draft: drafting.
        max_tokens: most tokens per answer.
    """

    def __init__(
        self,
        load: Callable[[str | Path, str | Path | None], Engine],
        files: Files,
        *,
        system: str | None = None,
        params: SamplingParams | None = None,
        draft: DraftOptions | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._load, self.files = load, files
        self.max_tokens, self.show = max_tokens, Show()
        engine = load(*files)
        try:
            self.chat = Chat(engine, system=system, params=params, draft=draft)
        except BaseException:
            engine.close()
            raise

    @property
    def engine(self) -> Engine:
        """What answers now."""
        return self.chat.engine

    @property
    def params(self) -> SamplingParams:
        """Sampling of the next answer."""
        return self.chat.params or SamplingParams()

    @property
    def draft(self) -> DraftOptions:
        """Drafting of the next answer."""
        return self.chat.draft or DraftOptions.auto()

    def send(self, text: str) -> Steps:
        """Say something."""
        return self.chat.send(text, max_tokens=self.max_tokens)

    def regenerate(self) -> Steps:
        """Answer the last message again."""
        return self.chat.regenerate(max_tokens=self.max_tokens)

    def use(self, chat: Chat) -> None:
        """Go on with another conversation on the same engine."""
        self.chat = chat

    def switch(self, target: str | Path, drafter: str | Path | None) -> None:
        """Go on with another model; two at once may not fit in memory, so the old one goes first.

        Raises:
            LocalspecError: it cannot be loaded. The old one is back then.
        """
        # While the old model is still there: what the headers already tell.
        finding.Files(Path(target), drafter).check()
        old = self.chat
        old.engine.close()
        try:
            engine = self._load(target, drafter)
            try:
                chat = Chat(engine, system=old.system, params=old.params, draft=old.draft)
            except BaseException:
                engine.close()
                raise
            self.files = (target, drafter)
        except BaseException:
            old.engine = self._load(*self.files)
            raise
        chat.messages[:] = old.messages
        self.chat = chat

    def opened(self) -> Marks | None:
        """The marks of the reasoning inside of which the template lets answers begin."""
        with contextlib.suppress(LocalspecError):
            return left_open(self.chat.template.render([{"role": "user", "content": "?"}]))
        return None

    def reasoning(self) -> str:
        """What was thought before the last answer; empty when nothing was."""
        answers = [m["content"] for m in self.chat.messages if m["role"] == "assistant"]
        return take_apart(answers[-1], opened=self.opened()).reasoning if answers else ""

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()
