"""Text from a model is not trusted: nothing in it may steer the terminal."""

from __future__ import annotations

# C0 without tab and newline, DEL, C1. Escape sequences begin with one of these.
_CONTROLS = {c: None for c in (*range(32), *range(127, 160)) if c not in (9, 10)}
# Half of a surrogate pair cannot be written at all.
_CONTROLS |= dict.fromkeys(range(0xD800, 0xE000))


def printable(text: str) -> str:
    """The text without control characters, except tabs and newlines."""
    return text.translate(_CONTROLS)
