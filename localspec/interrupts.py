"""Ctrl-C as a wish to stop, which work looks at where it can stop; pressed again, it interrupts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def wish_to_stop(act: Callable[[], object] | None = None) -> Iterator[Callable[[], bool]]:
    """A function that says whether Ctrl-C was pressed; a second one raises KeyboardInterrupt.

    Outside the main thread, where Python takes no signals, it always says no.

    Args:
        act: called at the first one, in the signal handler.
    """
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        if act is not None:
            act()

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
