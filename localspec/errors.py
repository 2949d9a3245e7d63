"""The exceptions for everything a user can cause."""

from __future__ import annotations


class LocalspecError(Exception):
    """A problem the user can fix.

    The message is one line: what is wrong and what to do about it. Commands print that line and
    exit with status 1; embedding applications catch this class.
    """


class DeadEndError(LocalspecError):
    """A grammar allows none of the model's tokens, at the place that a text has come to."""
