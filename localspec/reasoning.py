"""Thinking models reason before they answer: which part of a text is which.

Only a block at the beginning of an answer counts: later on, the marks are something it talks about.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.text import overlap


@dataclass(frozen=True)
class Marks:
    """What stands around reasoning."""

    open: str
    close: str


# Qwen, DeepSeek, GLM, LFM and most others; Gemma 4; MiniMax; Mistral; Seed; Command; Apertus.
KNOWN = (
    Marks("<think>", "</think>"),
    Marks("<|channel>thought", "<channel|>"),
    Marks("<mm:think>", "</mm:think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),
)
# Those marks that may be single control tokens; the text of an answer shows them all the same.
TOKENS = tuple(
    token for marks in KNOWN for token in (marks.open.removesuffix("thought"), marks.close)
)


def left_open(prompt: str) -> Marks | None:
    """The marks of the reasoning that a rendered prompt ends in; None when it ends in none."""
    end = prompt.rstrip()
    return next((marks for marks in KNOWN if end.endswith(marks.open)), None)


def closed(prompt: str) -> str:
    """A rendered prompt, the reasoning that it leaves open closed: for answers that have a form
    to follow from their first token on."""
    marks = left_open(prompt)
    return prompt if marks is None else f"{prompt.rstrip()}\n\n{marks.close}\n\n"


class ReasoningReader:
    """Takes a text apart piece by piece. White space around reasoning belongs to neither part.

    Args:
        opened: the marks of reasoning that began before the text.
    """

    def __init__(self, opened: Marks | None = None) -> None:
        self._marks, self._answering, self._held = opened, False, ""
        self._fresh = opened is not None  # white space that comes now is dropped

    @property
    def thinking(self) -> bool:
        """Whether the reasoning goes on."""
        return self._marks is not None and not self._answering

    def feed(self, text: str) -> tuple[str, str]:
        """Add text; what is certain by now: reasoning, and answer."""
        if self._answering and not self._fresh:
            return "", text
        self._held += text
        return self._advance(final=False)

    def finish(self) -> tuple[str, str]:
        """What was held back, when no more text comes."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> tuple[str, str]:
        reasoning = ""
        if not self._answering and self._marks is None:
            self._begin(final)
        if self.thinking:
            reasoning = self._reasoning(final)
        return reasoning, self._answer() if self._answering else ""

    def _begin(self, final: bool) -> None:
        start = self._held.lstrip()
        self._marks = next((marks for marks in KNOWN if start.startswith(marks.open)), None)
        if self._marks is not None:
            self._held, self._fresh = start[len(self._marks.open) :], True
            return
        undecided = not start or any(marks.open.startswith(start) for marks in KNOWN)
        self._answering = final or not undecided

    def _reasoning(self, final: bool) -> str:
        assert self._marks is not None
        if self._fresh:
            self._held = self._held.lstrip()
            self._fresh = not self._held
        inside, found, after = self._held.partition(self._marks.close)
        if found:
            self._held, self._answering, self._fresh = after, True, True
            return inside.rstrip()
        keep = 0 if final else overlap(inside, self._marks.close)
        certain = inside[: len(inside) - keep].rstrip()
        self._held = "" if final else inside[len(certain) :]
        return certain

    def _answer(self) -> str:
        text, self._held = self._held, ""
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text


@dataclass(frozen=True)
class Parts:
    """An answer, perhaps unfinished, taken apart.

    Attributes:
        reasoning: what was thought; empty when nothing was.
        answer: what is said.
        thinking: whether the reasoning goes on.
    """

    reasoning: str
    answer: str
    thinking: bool


def take_apart(text: str, *, opened: Marks | None = None) -> Parts:
    """Reasoning and answer of a text that may still grow.

    Args:
        text: the text so far. The beginning of a mark at its end is nothing to show yet.
        opened: the marks of reasoning that the prompt left open (`left_open`).
    """
    reader = ReasoningReader(opened)
    reasoning, answer = reader.feed(text)
    return Parts(reasoning, answer, reader.thinking)
