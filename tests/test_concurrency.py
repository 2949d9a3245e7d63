"""Threads, tasks, processes: who waits for whom, and what is refused instead of hanging."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import CHAIN, PLAIN, TREE, prompt_of, same_text

from localspec.chat import Chat
from localspec.engine import Engine
from localspec.errors import LocalspecError

Load = Callable[..., Engine]


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time; their results, or the first exception."""
    results: list[Any] = [None] * len(work)

    def run(i: int) -> None:
        try:
            results[i] = work[i]()
        except BaseException as e:
            results[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# ---- threads


def test_threads_on_one_engine_take_turns(load):
    engine, fresh = load("vanilla"), load(None)
    prompts = [prompt_of(i) for i in range(5)]
    right = [fresh.complete(p, max_tokens=12, draft=PLAIN).token_ids for p in prompts]

    def ask(offset: int) -> list[tuple[int, list[int]]]:
        answers = []
        for i in range(10):
            which = (i + offset) % len(prompts)
            got = engine.complete(prompts[which], max_tokens=12, draft=(CHAIN, TREE, PLAIN)[i % 3])
            answers.append((which, got.token_ids))
        return answers

    for answers in in_threads(lambda: ask(0), lambda: ask(2), lambda: ask(3)):
        for which, tokens in answers:
            same_text(fresh, prompts[which], right[which], tokens)


def test_four_engines_in_four_threads(load):
    engines = [load("vanilla") for _ in range(4)]
    alone = [engines[0].complete(prompt_of(i), max_tokens=20, draft=CHAIN) for i in range(4)]
    again = in_threads(
        *(
            lambda e=e, i=i: [
                e.complete(prompt_of(i), max_tokens=20, draft=CHAIN).token_ids for _ in range(3)
            ]
            for i, e in enumerate(engines)
        )
    )
    for i, answers in enumerate(again):
        for tokens in answers:
            same_text(engines[0], prompt_of(i), alone[i].token_ids, tokens)


def test_the_first_to_ask_is_the_first_to_be_served(load):
    engine = load("vanilla")
    order: list[int] = []
    held = engine.generate(prompt_of(0), max_tokens=20, draft=CHAIN)
    next(held)

    def ask(i: int) -> None:
        order.extend(i for _ in engine.generate(prompt_of(i), max_tokens=3, draft=PLAIN))

    threads = []
    for i in range(4):
        threads.append(threading.Thread(target=ask, args=(i,)))
        threads[-1].start()
        while len(engine._turns._waiting) <= i:
            threads[-1].join(0.001)
    assert order == []  # all of them wait for the generation under way
    held.close()
    for thread in threads:
        thread.join(60)
    assert order == [i for i in range(4) for _ in range(3)]


def test_the_thread_that_is_generating_is_told_so_instead_of_hanging(load):
    engine = load("vanilla")
    steps = engine.generate(prompt_of(0), max_tokens=20, draft=CHAIN)
    early = engine.generate(prompt_of(1), max_tokens=4, draft=CHAIN)  # not begun: no harm
    next(steps)
    for call in (
        lambda: engine.generate(prompt_of(1)),
        lambda: engine.complete(prompt_of(1), max_tokens=1),
        lambda: next(early),
        engine.tune,
        lambda: list(Chat(engine).send("hi")),
    ):
        with pytest.raises(LocalspecError, match="generating already"):
            call()
    assert sum(len(s.token_ids) for s in steps) == 19
    assert engine.complete(prompt_of(1), max_tokens=4).finish_reason == "length"


def test_an_abandoned_generation_gives_its_turn_back(load):
    engine = load("vanilla")
    steps = engine.generate(prompt_of(0), max_tokens=20, draft=CHAIN)
    next(steps)
    waiting = threading.Thread(target=engine.complete, args=(prompt_of(1),), kwargs={
        "max_tokens": 2})  # fmt: skip
    waiting.start()
    del steps
    gc.collect()
    waiting.join(60)
    assert not waiting.is_alive()


def test_cancel_stops_the_one_under_way_and_not_the_ones_that_wait(load):
    engine = load("vanilla")
    held = engine.generate(prompt_of(0), max_tokens=90, draft=PLAIN)
    next(held)
    results: list[Any] = []
    waiting = threading.Thread(
        target=lambda: results.append(engine.complete(prompt_of(1), max_tokens=5, draft=PLAIN))
    )
    waiting.start()
    while not engine._turns._waiting:
        waiting.join(0.001)
    engine.cancel()
    assert [s.finish_reason for s in held] == ["cancelled"]
    waiting.join(60)
    assert results[0].finish_reason == "length" and len(results[0].token_ids) == 5


def test_a_chat_answers_one_message_at_a_time(load):
    chat = Chat(load("vanilla"), draft=CHAIN)
    steps = chat.send("hello", max_tokens=20)
    next(steps)
    for call in (
        chat.reset, chat.branch, lambda: chat.edit(0, "x"), lambda: list(chat.send("more")),
        lambda: list(chat.regenerate()),
    ):  # fmt: skip
        with pytest.raises(LocalspecError, match="being answered"):
            call()
    steps.close()
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]


def test_a_chat_that_waits_for_the_engine_can_be_cancelled(load):
    engine = load("vanilla")
    held = engine.generate(prompt_of(0), max_tokens=90, draft=PLAIN)
    next(held)
    chat = Chat(engine, draft=CHAIN)
    waiting = threading.Thread(target=lambda: list(chat.send("hello", max_tokens=5)))
    waiting.start()
    while not engine._turns._waiting:
        waiting.join(0.001)
    chat.cancel()
    waiting.join(60)
    assert not waiting.is_alive()
    assert chat.last is not None and chat.last.finish_reason == "cancelled"
    assert next(held).finish_reason is None  # the other one goes on


def test_closing_waits_for_the_round_and_ends_the_generation(load):
    engine = load("vanilla", n_ctx=2048)
    begun, error = threading.Event(), []

    def generate() -> None:
        try:
            for _ in engine.generate(prompt_of(0), max_tokens=2000, draft=CHAIN, stop_token_ids=()):
                begun.set()
        except LocalspecError as e:
            error.append(str(e))

    thread = threading.Thread(target=generate)
    thread.start()
    assert begun.wait(60)
    engine.close()
    thread.join(60)
    assert not thread.is_alive()
    assert not error or "closed" in error[0]  # or it saw the cancellation first
    with pytest.raises(LocalspecError, match="closed"):
        engine.complete(prompt_of(0))


def test_a_callback_cannot_close_the_engine_under_itself(load):
    engine = load("vanilla")
    engine.on_verified = lambda tree, path: engine.close()
    with pytest.raises(LocalspecError, match="own callback"):
        engine.complete(prompt_of(0), max_tokens=20, draft=CHAIN)
    engine.on_verified = None
    assert len(engine.complete(prompt_of(0), max_tokens=5, draft=CHAIN).token_ids) == 5


# ---- asyncio


def test_async_steps_are_the_same_and_leave_the_loop_free(load):
    engine = load("vanilla")
    expected = engine.complete(prompt_of(0), max_tokens=30, draft=CHAIN).token_ids

    async def main() -> tuple[list[int], int]:
        ticks, tokens = 0, []

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        async for step in engine.agenerate(prompt_of(0), max_tokens=30, draft=CHAIN):
            tokens += step.token_ids
        ticking.cancel()
        return tokens, ticks

    tokens, ticks = asyncio.run(main())
    assert tokens == expected and ticks > 10


def test_tasks_take_turns(load):
    engine = load("vanilla")
    right = [engine.complete(prompt_of(i), max_tokens=15, draft=CHAIN) for i in range(4)]

    async def ask(i: int) -> list[int]:
        tokens: list[int] = []
        async for step in engine.agenerate(prompt_of(i), max_tokens=15, draft=CHAIN):
            tokens += step.token_ids
        return tokens

    async def main() -> list[list[int]]:
        return await asyncio.gather(*(ask(i) for i in range(4)))

    for i, tokens in enumerate(asyncio.run(main())):
        same_text(engine, prompt_of(i), right[i].token_ids, tokens)


def test_a_task_that_is_generating_is_told_so_instead_of_hanging(load):
    engine = load("vanilla")

    async def main() -> None:
        async for _ in engine.agenerate(prompt_of(0), max_tokens=5, draft=CHAIN):
            with pytest.raises(LocalspecError, match="generating already"):
                async for _ in engine.agenerate(prompt_of(1), max_tokens=5):
                    pass
            with pytest.raises(LocalspecError, match="generating already"):
                engine.complete(prompt_of(1), max_tokens=5)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_cancelled_task_and_a_left_loop_give_the_engine_back(load):
    engine = load("vanilla")

    async def endless(chat: Chat) -> None:
        async for _ in chat.astream("hello", max_tokens=200):
            pass

    async def main() -> None:
        chat = Chat(engine, draft=CHAIN)
        task = asyncio.create_task(endless(chat))
        while chat.last is None or len(chat.last.token_ids) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert chat.messages[-1]["content"] == chat.last.text
        assert engine._turns.holder is None
        async for _ in chat.aregenerate(max_tokens=100):
            break
        gc.collect()
        reasons = [s.finish_reason async for s in chat.aregenerate(max_tokens=5)]
        assert reasons[-1] in ("length", "stop") and len(chat.messages) == 2

    asyncio.run(asyncio.wait_for(main(), 60))
    assert len(engine.complete(prompt_of(0), max_tokens=5, draft=CHAIN).token_ids) == 5


def test_errors_come_out_of_async_generations(load):
    async def main() -> None:
        async for _ in load(None).agenerate(prompt_of(0, 300)):
            pass

    with pytest.raises(LocalspecError, match="context holds 256"):
        asyncio.run(main())


# ---- processes


def _load_and_answer(target: Path, queue: Any) -> None:
    with Engine.load(target, n_ctx=256, n_threads=1) as engine:
        queue.put(engine.complete(prompt_of(0), max_tokens=5, draft=PLAIN).token_ids)


def _use(engine: Engine, target: Path, queue: Any) -> None:
    said = []
    for call in (
        lambda: engine.complete(prompt_of(0), max_tokens=1),
        lambda: Engine.load(target, n_ctx=256, n_threads=1),
        lambda: engine.close(),
        lambda: engine.cancel(),
    ):
        try:
            said.append(str(call()))
        except LocalspecError as e:  # noqa: PERF203
            said.append(str(e))
    queue.put(said)


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs fork")
def test_a_forked_child_is_told_instead_of_hanging(load, tiny_target):
    engine = load("vanilla")
    expected = engine.complete(prompt_of(0), max_tokens=5, draft=PLAIN).token_ids
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_use, args=(engine, tiny_target.gguf, queue))
    child.start()
    said = queue.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0
    assert "forked" in said[0] and "spawn" in said[0]
    assert "forked" in said[1] and "spawn" in said[1]
    assert said[2:] == ["None", "None"]
    assert engine.complete(prompt_of(0), max_tokens=5, draft=PLAIN).token_ids == expected


def test_spawned_workers_load_their_own(load, tiny_target):
    expected = load(None).complete(prompt_of(0), max_tokens=5, draft=PLAIN).token_ids
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_load_and_answer, args=(tiny_target.gguf, queue))
    child.start()
    assert queue.get(timeout=120) == expected
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork") or sys.platform == "darwin", reason="needs fork")
def test_forked_workers_of_a_parent_without_llama_cpp_load_their_own(tiny_target):
    """In a fresh interpreter: this one has used llama.cpp."""
    import subprocess

    script = (
        "import multiprocessing, sys\n"
        "from test_concurrency import _load_and_answer\n"
        "context = multiprocessing.get_context('fork')\n"
        "queue = context.Queue()\n"
        "child = context.Process(target=_load_and_answer, args=(sys.argv[1], queue))\n"
        "child.start(); print(queue.get(timeout=60)); child.join(); sys.exit(child.exitcode)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_target.gguf)],
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split(",")) == 5
