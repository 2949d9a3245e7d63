"""C objects that are freed after everything that was made from them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any


class Owned:
    """A C object that is freed when its owner and all that was made from it are closed.

    At the end of the interpreter, and in reference cycles, Python closes things in any order.
    """

    # Reentrant: the garbage collector may close something while something else is closed.
    _lock = threading.RLock()

    def __init__(self, handle: Any, free: Callable[[Any], None], *needs: Owned) -> None:
        self._handle, self._free, self._needs, self._users = handle, free, needs, 1
        self._pid = os.getpid()
        with self._lock:
            for needed in needs:
                needed._users += 1

    def release(self) -> None:
        if self._pid != os.getpid():
            return  # a forked child: the threads that freeing would wait for are not here
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._free(self._handle)
            for needed in self._needs:
                needed.release()
