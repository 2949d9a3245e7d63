"""From token ids to text as it streams: whole characters only, stop strings honoured."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """Turns tokens into text piece by piece.

    Text leaves only at UTF-8 boundaries, and never a part of what may become a stop string.

    Args:
        piece: token id -> bytes.
        stop: strings that end the text; they are not part of it.
    """

    def __init__(self, piece: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        self._piece = piece
        self._stop = [s for s in stop if s]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Add one token; the text that is now certain. After a stop string `stopped` is set."""
        return self._release(self._decoder.decode(self._piece(token)), final=False)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return self._release(self._decoder.decode(b"", final=True), final=True)

    def _release(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        # The one that is complete first, so that token boundaries make no difference.
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = 0 if final else max((overlap(text, s) for s in self._stop), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
