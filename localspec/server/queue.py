"""Who generates next: one at a time, clients in turn, a bounded number waiting."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from localspec.errors import LocalspecError

# How much the newest turn counts in the running mean of their lengths.
_NEWEST = 0.2


class QueueFull(LocalspecError):
    """Too many requests are waiting.

    Attributes:
        retry_after: whole seconds after which it is worth asking again.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueClosed(LocalspecError):
    """The server is stopping: nobody gets a turn any more."""


class FairQueue:
    """Turns at something only one can use at a time, for the tasks of one event loop.

    Clients with waiting requests stand in a ring: each gets one turn per round of the ring, its own
    requests first come, first served. A client that has just had its turn goes to the ring's end,
    so nobody waits for more than one turn of every other client. Where the list is full and
    clients share it unevenly, the newest request of the one that holds most makes room.

    Args:
        max_waiting: requests that may wait, the one under way not counted.
    """

    def __init__(self, max_waiting: int = 64) -> None:
        if max_waiting < 0:
            raise LocalspecError(f"max_waiting must be at least 0, not {max_waiting}")
        self.max_waiting = max_waiting
        self._ring: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        # Requests of the client whose turn it is: it joins the ring when the turn ends.
        self._own: deque[asyncio.Future[None]] = deque()
        self._client: Hashable = None
        self._busy = False
        self._closed = False
        self._mean_seconds = 1.0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._own) + sum(map(len, self._ring.values()))

    @property
    def busy(self) -> bool:
        """Whether it is somebody's turn."""
        return self._busy

    @property
    def retry_after(self) -> int:
        """Whole seconds until those who wait now have probably had their turns, 1 to 600."""
        seconds = math.ceil(self._mean_seconds * (self.waiting + self._busy))
        return min(max(seconds, 1), 600)

    @asynccontextmanager
    async def turn(self, client: Hashable) -> AsyncIterator[None]:
        """Wait for a turn and hold it for the block. Cancelling the wait leaves the queue.

        Args:
            client: whose request this is; requests of one client take turns among themselves.

        Raises:
            QueueFull: too many wait already, or this one had to make room for another client.
            QueueClosed: the queue was closed.
        """
        await self._begin(client)
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._mean_seconds += _NEWEST * (seconds - self._mean_seconds)
            self._end()

    def close(self) -> None:
        """Send everyone who waits away; the turn under way goes on."""
        self._closed = True
        for waiting in (self._own, *self._ring.values()):
            for future in waiting:
                if not future.done():
                    future.set_exception(QueueClosed(_STOPPING))
        self._own.clear()
        self._ring.clear()

    async def _begin(self, client: Hashable) -> None:
        if self._closed:
            raise QueueClosed(_STOPPING)
        if not self._busy:
            self._busy, self._client = True, client
            return
        if self.waiting >= self.max_waiting:
            self._make_room(client)
        future = asyncio.get_running_loop().create_future()
        self._line_of(client).append(future)
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._end()  # it got its turn and was cancelled before it could begin
            else:
                self._leave(client, future)
            raise

    def _line_of(self, client: Hashable) -> deque[asyncio.Future[None]]:
        if client == self._client:
            return self._own
        return self._ring.setdefault(client, deque())

    def _leave(self, client: Hashable, future: asyncio.Future[None]) -> None:
        # The client's line may have moved between the ring and `_own` meanwhile.
        for line in (self._own, self._ring.get(client)):
            if line is not None and future in line:
                line.remove(future)
        if client in self._ring and not self._ring[client]:
            del self._ring[client]

    def _make_room(self, client: Hashable) -> None:
        """Send the newest request of the longest line away, if that is fairer than refusing."""
        full = QueueFull(
            f"{self.waiting} requests are waiting already; try again later", self.retry_after
        )
        lines = {self._client: self._own, **self._ring}
        longest = max(lines, key=lambda c: len(lines[c]))
        mine = len(lines.get(client, ()))
        if len(lines[longest]) < mine + 2:
            raise full
        future = lines[longest].pop()
        if not future.done():
            future.set_exception(full)

    def _end(self) -> None:
        """Give the turn to the next in the ring."""
        if self._own:
            self._ring[self._client] = self._own
        self._own = deque()
        while self._ring:
            client, line = self._ring.popitem(last=False)
            self._client, self._own = client, line
            while line:
                future = line.popleft()
                if not future.done():
                    future.set_result(None)
                    return
        self._busy, self._client = False, None


_STOPPING = "the server is stopping"
