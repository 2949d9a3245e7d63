"""Turns: one at a time, clients in a ring, a bounded wait, and nobody lost when tasks end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from localspec.errors import LocalspecError
from localspec.server.queue import FairQueue, QueueClosed, QueueFull


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Runner:
    """Requests that note when it is their turn and hold it until told."""

    def __init__(self, queue: FairQueue) -> None:
        self.queue = queue
        self.order: list[str] = []
        self.done: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str) -> None:
        """A request; the first letter of its name is the client."""
        self.done[name] = asyncio.Event()

        async def run() -> None:
            async with self.queue.turn(name[0]):
                self.order.append(name)
                await self.done[name].wait()

        self.tasks[name] = asyncio.create_task(run())
        await settle()

    async def finish(self) -> None:
        """Let every turn end when it comes."""
        for event in self.done.values():
            event.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


def asyncio_test(function: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(function(), 20))

    run.__name__ = function.__name__
    return run


@asyncio_test
async def test_one_at_a_time_and_clients_in_turn():
    runner = Runner(FairQueue())
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        await runner.ask(name)
    assert runner.order == ["a1"]
    assert runner.queue.waiting == 6
    await runner.finish()
    assert runner.order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]
    assert runner.queue.waiting == 0
    assert not runner.queue.busy


@asyncio_test
async def test_who_comes_while_another_has_its_turn_goes_before_its_next_request():
    runner = Runner(FairQueue())
    for name in ("a1", "a2", "a3"):
        await runner.ask(name)
    runner.done["a1"].set()
    await settle()
    await runner.ask("b1")
    await runner.finish()
    assert runner.order == ["a1", "a2", "b1", "a3"]


@asyncio_test
async def test_nobody_waits_for_more_than_one_turn_of_every_other():
    """Newcomers cannot keep pushing in front."""
    runner = Runner(FairQueue())
    for name in ("a1", "b1", "c1"):
        await runner.ask(name)
    runner.done["a1"].set()
    await settle()
    for i in range(5):
        await runner.ask(f"{'defgh'[i]}1")
    await runner.finish()
    assert runner.order[:3] == ["a1", "b1", "c1"]


@asyncio_test
async def test_a_full_list_refuses_and_says_when_to_come_back():
    runner = Runner(FairQueue(max_waiting=2))
    for name in ("a1", "b1", "c1"):
        await runner.ask(name)
    with pytest.raises(QueueFull) as e:
        async with runner.queue.turn("d"):
            pass
    assert e.value.retry_after >= 1
    assert "\n" not in str(e.value)
    await runner.finish()
    assert runner.order == ["a1", "b1", "c1"]
    async with runner.queue.turn("d"):
        pass


@asyncio_test
async def test_in_a_full_list_the_greediest_makes_room():
    runner = Runner(FairQueue(max_waiting=3))
    for name in ("a1", "a2", "a3", "a4"):
        await runner.ask(name)
    await runner.ask("b1")
    with pytest.raises(QueueFull):
        await runner.tasks["a4"]
    with pytest.raises(QueueFull):  # no fairer for b to have two
        async with runner.queue.turn("b"):
            pass
    await runner.finish()
    assert runner.order == ["a1", "b1", "a2", "a3"]


@asyncio_test
async def test_no_waiting_at_all():
    queue = FairQueue(max_waiting=0)
    async with queue.turn("a"):
        with pytest.raises(QueueFull):
            async with queue.turn("a"):
                pass
    async with queue.turn("b"):
        pass
    with pytest.raises(LocalspecError):
        FairQueue(max_waiting=-1)


@asyncio_test
async def test_cancelled_while_waiting():
    runner = Runner(FairQueue())
    for name in ("a1", "b1", "a2", "c1"):
        await runner.ask(name)
    for name in ("b1", "a2"):
        runner.tasks[name].cancel()
    await settle()
    assert runner.queue.waiting == 1
    await runner.finish()
    assert runner.order == ["a1", "c1"]


@asyncio_test
async def test_cancelled_between_being_given_the_turn_and_taking_it():
    runner = Runner(FairQueue())
    for name in ("a1", "b1", "c1"):
        await runner.ask(name)
    runner.tasks["a1"].cancel()  # gives the turn to b1, whose task has not run yet...
    await asyncio.sleep(0)
    runner.tasks["b1"].cancel()
    await runner.finish()
    assert runner.order == ["a1", "c1"]
    assert not runner.queue.busy


@asyncio_test
async def test_an_error_in_a_turn_ends_it():
    queue = FairQueue()
    with pytest.raises(ZeroDivisionError):
        async with queue.turn("a"):
            raise ZeroDivisionError
    async with queue.turn("a"):
        assert queue.busy


@asyncio_test
async def test_closing_sends_all_who_wait_away():
    runner = Runner(FairQueue())
    for name in ("a1", "a2", "b1"):
        await runner.ask(name)
    runner.queue.close()
    for name in ("a2", "b1"):
        with pytest.raises(QueueClosed):
            await runner.tasks[name]
    with pytest.raises(QueueClosed):
        async with runner.queue.turn("c"):
            pass
    assert runner.queue.busy
    await runner.finish()
    assert runner.order == ["a1"]


@pytest.mark.parametrize("seed", range(10))
def test_random_clients_and_cancellations(seed: int):
    """Never two at once; everyone who was not cancelled or refused gets exactly one turn."""
    rng = random.Random(seed)

    async def run() -> None:
        queue = FairQueue(max_waiting=12)
        inside, turns, refused, cancelled = 0, 0, 0, 0

        async def one(client: int) -> None:
            nonlocal inside, turns, refused, cancelled
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
            try:
                async with queue.turn(client):
                    assert inside == 0
                    inside += 1
                    try:
                        for _ in range(rng.randrange(3)):
                            await asyncio.sleep(0)
                    finally:
                        inside -= 1
                    turns += 1
            except QueueFull:
                refused += 1
            except asyncio.CancelledError:
                cancelled += 1

        tasks = []
        for _ in range(400):
            tasks.append(asyncio.create_task(one(rng.randrange(5))))
            if rng.random() < 0.3:
                rng.choice(tasks).cancel()
            if rng.random() < 0.5:
                await asyncio.sleep(0)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        never_begun = sum(isinstance(r, asyncio.CancelledError) for r in results)
        assert turns + refused + cancelled + never_begun == 400
        assert turns > 50
        assert not queue.busy
        assert queue.waiting == 0

    asyncio.run(asyncio.wait_for(run(), 20))
