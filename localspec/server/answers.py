"""The answers given lately, as tokens: an extended conversation evaluates only what is new."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from localspec.continuation import continued, spelled
from localspec.engine import Engine
from localspec.steps import Result


@dataclass
class _Known:
    """A conversation up to an answer. `marks` are the ends of its answers: (characters, tokens)."""

    text: str
    ids: list[int]
    marks: list[tuple[int, int]]


class Answers:
    """What was said with which tokens, the most recent conversations only. Thread-safe.

    Clients send a conversation as text, and text tokenized again need not give the tokens that
    were generated (see `localspec.continuation`).

    Args:
        engine: what tokenizes.
        most: conversations that are remembered.
        most_characters: of all of them together.
    """

    def __init__(self, engine: Engine, most: int = 64, most_characters: int = 4_000_000) -> None:
        self._engine, self._most, self._most_characters = engine, most, most_characters
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def tokens(self, text: str) -> list[int]:
        """Token ids of a rendered conversation; those of its latest known answer are kept."""
        with self._lock:
            known, (n_text, n_ids) = self._longest(text)
        if known is not None:
            ids = continued(self._engine, known.text[:n_text], known.ids[:n_ids], text)
            if ids is not None:
                return ids
        return self._engine.tokenize(text)

    def add(self, text: str, ids: list[int], result: Result) -> None:
        """Remember an answer.

        Args:
            text: the conversation it answers.
            ids: its tokens, as `tokens` gave them.
            result: the answer.
        """
        if not result.token_ids or not spelled(self._engine, result):
            return
        whole, whole_ids = text + result.text, [*ids, *result.token_ids]
        with self._lock:
            before, mark = self._longest(text)
            marks = []
            if before is not None and ids[: mark[1]] == before.ids[: mark[1]]:
                marks = before.marks[: before.marks.index(mark) + 1]
                if whole.startswith(before.text):
                    del self._known[before.text]
            self._known.pop(whole, None)
            marks = [m for m in marks if m[0] < len(whole)]
            self._known[whole] = _Known(whole, whole_ids, [*marks, (len(whole), len(whole_ids))])
            while len(self._known) > self._most or (
                len(self._known) > 1 and sum(map(len, self._known)) > self._most_characters
            ):
                self._known.popitem(last=False)

    def _longest(self, text: str) -> tuple[_Known | None, tuple[int, int]]:
        best: tuple[_Known | None, tuple[int, int]] = None, (0, 0)
        for known in self._known.values():
            for mark in reversed(known.marks):
                if mark[0] <= best[1][0]:
                    break
                if text.startswith(known.text[: mark[0]]):
                    best = known, mark
                    break
        if best[0] is not None:
            self._known.move_to_end(best[0].text)
        return best
