"""Thinking models write <think>...</think> before the answer: which part is which."""

from __future__ import annotations

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


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


def take_apart(text: str, *, opened: bool = False) -> Parts:
    """Reasoning and answer of a text that may still grow.

    Only a block at the beginning counts: later on the tags are something the answer talks about.

    Args:
        text: the text so far.
        opened: the chat template wrote the opening tag already.
    """
    start = text.lstrip()
    if start.startswith(OPEN):
        inside = start[len(OPEN) :]
    elif opened:
        inside = start
    else:
        # The beginning of a tag is nothing to show yet.
        waiting = bool(start) and OPEN.startswith(start)
        return Parts("", "" if waiting else text, False)
    reasoning, close, answer = inside.partition(CLOSE)
    if close:
        return Parts(reasoning.strip(), answer.lstrip("\n"), False)
    return Parts(_without_part_of(CLOSE, reasoning).strip(), "", True)


def template_opens(prompt: str) -> bool:
    """Whether a rendered prompt ends inside a reasoning block."""
    return prompt.rstrip().endswith(OPEN)


def _without_part_of(tag: str, text: str) -> str:
    """`text` without the beginning of `tag` at its end."""
    for n in range(len(tag) - 1, 0, -1):
        if text.endswith(tag[:n]):
            return text[:-n]
    return text
