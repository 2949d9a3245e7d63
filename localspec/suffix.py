"""Branches from the context: what followed an earlier time the text went like this.

A suffix automaton over the tokens so far, built online. Its states are sets of substrings with
the same end positions; the suffix link of the state of the whole text is the longest suffix that
occurred before. Each token costs O(1) amortised (Blumer et al., 1985).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Match:
    """The longest repeated suffix of the text.

    Attributes:
        length: tokens that match.
        tokens: what followed the match an earlier time.
    """

    length: int
    tokens: list[int]


class SuffixIndex:
    """An index of a growing token sequence that finds its longest repeated suffix.

    Args:
        tokens: the sequence so far.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # per state a position just behind one of its occurrences
        self._last = 0
        self._match_length = self._match_end = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        n = len(self.tokens)
        state = self._new_state(self._length[self._last] + 1, {}, n)
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = state
            at = self._link[at]
        if at < 0:
            self._link[state] = 0
        else:
            known = self._next[at][token]
            if self._length[at] + 1 == self._length[known]:
                self._link[state] = known
            else:
                clone = self._new_state(
                    self._length[at] + 1, dict(self._next[known]), self._end[known]
                )
                self._link[clone] = self._link[known]
                while at >= 0 and self._next[at].get(token) == known:
                    self._next[at][token] = clone
                    at = self._link[at]
                self._link[known] = self._link[state] = clone
        self._last = state
        suffix = self._link[state]
        # The earlier occurrence is the newest one this state has seen as the longest repeat (not
        # always the newest of all); from now on that is the one that ends here.
        self._match_length, self._match_end = self._length[suffix], self._end[suffix]
        self._end[suffix] = n

    def _new_state(self, length: int, following: dict[int, int], end: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1

    def match(self, most: int) -> Match:
        """The longest suffix of the text that occurred before, and what followed it.

        Args:
            most: tokens to return, at least 1; where the text ends they start over from behind the
                earlier time.

        Returns:
            A `Match`; of length 0 and without tokens when the last token is new.
        """
        if self._match_length == 0:
            return Match(0, [])
        found = self.tokens[self._match_end : self._match_end + most]
        if len(found) < most:  # all that was said since: a text that loops goes on looping
            found = (found * (most // len(found) + 1))[:most]
        return Match(self._match_length, found)
