"""`async for` over a generation: rounds run in a worker thread, the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from localspec.steps import Step
from localspec.turns import ThreadedTurn, Turns


class AsyncSteps(AsyncIterator[Step]):
    """The steps of a generation, one for every one asked for.

    Leaving an `async for` over it, cancelling the task that waits for a step, or `aclose` cancels
    the generation. An `async with` makes sure that it has ended afterwards.

    Args:
        start: makes the generator; called in the worker.
        turn: the generation's turn.
        turns: the engine's.
    """

    def __init__(
        self, start: Callable[[], Generator[Step, None, None]], turn: ThreadedTurn, turns: Turns
    ) -> None:
        self._start, self._turn, self._turns = start, turn, turns
        self._steps: list[Generator[Step, None, None]] = []
        self._worker: ThreadPoolExecutor | None = None
        self._ended = False

    def __aiter__(self) -> AsyncSteps:
        return self

    async def __anext__(self) -> Step:
        """The next step.

        Raises:
            StopAsyncIteration: there is none.
            LocalspecError: as for `Engine.generate`.
        """
        if self._ended:
            raise StopAsyncIteration
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="localspec")
            self._turn.begun_here()
        loop = asyncio.get_running_loop()
        try:
            step = await loop.run_in_executor(self._worker, self._advance)
        except BaseException:
            await self.aclose()
            raise
        if step is None:
            await self.aclose()
            raise StopAsyncIteration
        return step

    def _advance(self) -> Step | None:
        if not self._steps:
            self._steps.append(self._start())
        return next(self._steps[0], None)

    async def aclose(self) -> None:
        """End the generation and wait for that (at most one round). A second call does nothing."""
        worker = self._worker
        if self._abandon() and worker is not None:
            await asyncio.shield(asyncio.wrap_future(self._closing))

    def _abandon(self) -> bool:
        """Cancel, and close the generator behind the round that may still run."""
        if self._ended:
            return False
        self._ended = True
        self._turn.abandoned = True
        self._turns.cancel(self._turn)
        if self._worker is not None:
            self._closing = self._worker.submit(_close_all, self._steps)
            self._worker.shutdown(wait=False)
        return True

    async def __aenter__(self) -> AsyncSteps:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._abandon()


def _close_all(steps: list[Generator[Step, None, None]]) -> None:
    for each in steps:
        each.close()
