"""Which words were drafted and accepted, and which the target put in itself."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from localspec.steps import Step

ACCEPTED, CORRECTED, OWN = "accepted", "corrected", "own"


def shades(step: Step) -> list[str]:
    """One of ACCEPTED, CORRECTED, OWN for every token of a step.

    ACCEPTED tokens come from the draft. The last token of a round is the target's: CORRECTED when
    it stands where a drafted token was refused, OWN when nothing was drafted there.
    """
    n = len(step.token_ids)
    if step.round is None:
        return [OWN] * n
    accepted = min(step.round.accepted, n)
    last = CORRECTED if step.round.verified > step.round.accepted else OWN
    return [ACCEPTED] * accepted + [last] * (n - accepted)


class Shader:
    """Text of a stream in pieces, each with its shade; whole characters only.

    Args:
        piece: token id -> bytes (empty for special tokens).
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, step: Step) -> list[tuple[str, str]]:
        """(text, shade) of the next step; a character takes the shade of its last token."""
        pieces = [
            (self._decoder.decode(self._piece(token)), shade)
            for token, shade in zip(step.token_ids, shades(step), strict=True)
        ]
        return [(text, shade) for text, shade in pieces if text]
