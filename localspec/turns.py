"""Taking turns: one generation at a time on an engine, first come, first served."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from localspec.errors import LocalspecError

# Waits wake up this often (seconds) to look again: a generation that the garbage collector ends
# may give back its turn in the middle of another thread's wait.
_LOOK_AGAIN = 0.5


class Turn:
    """One generation's claim on an engine; also how it is cancelled."""

    def __init__(self) -> None:
        self._cancelled = False
        # Set when its worker ends it, whatever anybody else does.
        self.abandoned = False
        self.begun_here()

    def begun_in_worker(self) -> None:
        """Called by the thread that will run it."""
        self.begun_here()

    def begun_here(self) -> None:
        """Whoever calls this is the one that asks for its steps."""
        self._thread = threading.get_ident()
        self._task = _current_task()

    def is_cancelled(self) -> bool:
        """Whether it should end."""
        return self._cancelled

    def cancel(self) -> None:
        """End the generation after its round, or its wait for a turn."""
        self._cancelled = True

    def would_wait_for(self, holder: Turn) -> bool:
        """Whether waiting for `holder` would never end: only whoever waits could finish it."""
        if holder.abandoned:
            return False
        if holder._task is not None and holder._task is self._task:
            return True
        # Blocking the thread of an event loop stops all of its tasks. A wait in a worker thread
        # (`ThreadedTurn`) leaves the loop alone.
        return holder._thread == self._thread and not isinstance(self, ThreadedTurn)


class ThreadedTurn(Turn):
    """The turn of an asyncio task whose rounds run in a worker thread."""

    def begun_in_worker(self) -> None:
        """The task stays the one that asks."""


class Turns:
    """Who may use an engine."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # reentrant: the collector may call `end` anywhere
        self._waiting: deque[Turn] = deque()
        self._holder: Turn | None = None

    @property
    def holder(self) -> Turn | None:
        """The turn in progress."""
        return self._holder

    def check(self, turn: Turn) -> None:
        """Refuse a turn that would wait for itself.

        Raises:
            LocalspecError: the same thread, or the same asyncio task, is generating already.
        """
        holder = self._holder
        if holder is not None and turn.would_wait_for(holder):
            raise LocalspecError(
                "this engine is generating already; finish or close that first (other threads "
                "wait for their turn)"
            )

    def begin(self, turn: Turn) -> bool:
        """Wait until it is this one's turn.

        Returns:
            False when it was cancelled before that; there is nothing to `end` then.
        """
        turn.begun_in_worker()
        with self._changed:
            self._waiting.append(turn)
            try:
                while self._holder is not None or self._waiting[0] is not turn:
                    self.check(turn)
                    if turn.is_cancelled():
                        return False
                    self._changed.wait(_LOOK_AGAIN)
                self._holder = turn
                return True
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def end(self, turn: Turn) -> None:
        """Give the turn back. Without effect on somebody else's."""
        with self._changed:
            if self._holder is turn:
                self._holder = None
                self._changed.notify_all()

    def cancel(self, turn: Turn | None = None) -> None:
        """Cancel a turn, in progress or waiting; the one in progress when left out."""
        turn = turn or self._holder
        if turn is not None:
            turn.cancel()
            with self._changed:
                self._changed.notify_all()


def _current_task() -> object | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None
