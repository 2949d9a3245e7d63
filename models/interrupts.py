"""Ctrl-C between steps, never inside one: half a step is a state that no run has."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def between_steps() -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed; pressed again, it interrupts at once.

    Outside the main thread, where Python takes no signals, it always says no.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
