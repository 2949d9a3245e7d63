"""Does an engine survive being used: cancelled anywhere, shared by threads, loaded and closed?

    python benchmarks/soak.py -m target.gguf -d drafter.gguf [cancel threads chats loads]

Every part checks itself and raises when something is wrong; memory and descriptors are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil

from localspec import Chat, DraftOptions, Engine, SamplingParams, Step
from localspec import pairs as known
from localspec.errors import LocalspecError

DRAFTS = (DraftOptions(tokens=7), DraftOptions(tokens=15, width=3), DraftOptions(tokens=0))
SAID = "Tell me about the sea and what lives in it. "


class Pair:
    """What is loaded again and again."""

    def __init__(self, args: argparse.Namespace) -> None:
        target, drafter = (args.model, args.drafter) if args.model else known.default_pair()
        self.target, self.drafter = target, drafter
        self.n_ctx, self.seed = args.n_ctx, args.seed

    def load(self, n_batch: int = 64) -> Engine:
        return Engine.load(
            self.target, self.drafter, n_ctx=self.n_ctx, n_threads=1, n_batch=n_batch
        )


def same_where_sure(engine: Engine, prompt: list[int], a: list[int], b: list[int]) -> bool:
    """Whether two greedy answers are equal, or part where the target is undecided."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            with Engine.load(engine.model.path, n_ctx=engine.n_ctx, n_threads=1) as fresh:
                fresh.complete([*prompt, *a[:i]], max_tokens=1, draft=DraftOptions(tokens=0))
                second, best = np.sort(fresh.last_logits)[-2:]
            if best - second > 0.75:
                raise SystemExit(f"answers part at token {i}, where the gap is {best - second:.2f}")
            return False
    return len(a) == len(b)


def by_thread(
    engine: Engine, prompt: list[int], params: SamplingParams, draft: DraftOptions, after: float
) -> list[Step]:
    """Steps until another thread cancels."""
    timer = threading.Timer(after, engine.cancel)
    timer.start()
    steps = list(engine.generate(prompt, params, max_tokens=200, draft=draft))
    timer.join()
    return steps


async def by_task(
    engine: Engine, prompt: list[int], params: SamplingParams, draft: DraftOptions, after: float
) -> list[Step]:
    """Steps until asyncio cancels."""
    steps: list[Step] = []

    async def run() -> None:
        generation = engine.agenerate(prompt, params, max_tokens=200, draft=draft)
        async for step in generation:
            steps.append(step)  # noqa: PERF401 (what came before the cancellation is kept)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(run(), after)
    return steps


def between_rounds(
    engine: Engine,
    prompt: list[int],
    params: SamplingParams,
    draft: DraftOptions,
    close: bool,
    rng: random.Random,
) -> list[Step]:
    """Steps until the generator is closed or the engine told to cancel."""
    steps = []
    generation = engine.generate(prompt, params, max_tokens=200, draft=draft)
    for step in generation:
        steps.append(step)
        if rng.random() < 0.3:
            if close:
                generation.close()
                break
            engine.cancel()
    return steps


def cancel(pair: Pair, count: int) -> None:
    """Random cancellations, by thread, by task and by closing; then the answer must be right."""
    rng = random.Random(pair.seed)
    where: dict[str, int] = {}
    with pair.load() as engine, pair.load() as fresh:
        prompts = [engine.tokenize(f"{i} " + SAID * rng.randint(1, 12)) for i in range(12)]
        right = [fresh.complete(p, max_tokens=16, draft=DRAFTS[2]).token_ids for p in prompts]
        long = fresh.complete(prompts[0], max_tokens=24, draft=DRAFTS[1])
        whole = long.prefill_seconds + sum(r.seconds.total for r in long.rounds)
        equal = 0
        for i in range(count):
            prompt, draft = rng.choice(prompts), rng.choice(DRAFTS)
            if rng.random() < 0.3:  # so that prefills are often long
                engine.complete([1], max_tokens=1, draft=DRAFTS[2])
            kind = rng.choice(("thread", "task", "close", "step"))
            how = (prompt, SamplingParams(temperature=i % 2, seed=i), draft)
            if kind == "thread":
                steps = by_thread(engine, *how, after=rng.random() * whole)
            elif kind == "task":
                steps = asyncio.run(by_task(engine, *how, after=rng.random() * whole))
            else:
                steps = between_rounds(engine, *how, close=kind == "close", rng=rng)
            place = "prefill" if not any(s.token_ids for s in steps) else "rounds"
            where[f"{kind}/{place}"] = where.get(f"{kind}/{place}", 0) + 1
            which = rng.randrange(len(prompts))
            answer = engine.complete(prompts[which], max_tokens=16, draft=rng.choice(DRAFTS))
            equal += same_where_sure(engine, prompts[which], right[which], answer.token_ids)
    print(f"cancel: {count} cancellations {where}; {equal} next answers equal, the others part "
          "where the target is undecided")  # fmt: skip


def threads(pair: Pair, count: int) -> None:
    """Two threads on one engine; four engines in four threads."""
    with pair.load() as engine:
        prompts = [engine.tokenize(f"Question {i}: " + SAID) for i in range(8)]
        right = [engine.complete(p, max_tokens=12, draft=DRAFTS[2]).token_ids for p in prompts]

        def ask(mine: Engine, offset: int, errors: list[BaseException], parted: list[int]) -> None:
            try:
                for i in range(count):
                    which = (i + offset) % len(prompts)
                    got = mine.complete(prompts[which], max_tokens=12, draft=DRAFTS[i % 3])
                    if not same_where_sure(mine, prompts[which], right[which], got.token_ids):
                        parted.append(which)
            except BaseException as e:
                errors.append(e)

        def together(engines: list[Engine], name: str) -> None:
            errors: list[BaseException] = []
            parted: list[int] = []
            workers = [
                threading.Thread(target=ask, args=(e, 3 * i, errors, parted))
                for i, e in enumerate(engines)
            ]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            if errors:
                raise errors[0]
            print(f"threads: {name}: {len(engines) * count} answers, {len(parted)} part where the "
                  "target is undecided")  # fmt: skip

        together([engine, engine], "two threads, one engine")
        engines = [pair.load() for _ in range(4)]
        together(engines, "four threads, four engines")
        for each in engines:
            each.close()


def chats(pair: Pair, count: int) -> None:
    """Short conversations, one after the other, in one process."""
    with pair.load() as engine:

        def one(i: int) -> None:
            chat = Chat(engine, params=SamplingParams(temperature=i % 2, seed=i))
            for text in (f"Hello, I am number {i}.", "And now?"):
                for _ in chat.send(text, max_tokens=6):
                    pass
            assert len(chat.messages) >= 4

        steady("chats", one, count)


def loads(pair: Pair, count: int) -> None:
    """Load and close, every other time without close and with a cancelled loading before."""

    def one(i: int) -> None:
        if i % 4 == 3:
            with contextlib.suppress(LocalspecError):
                Engine.load(pair.target, pair.drafter, n_ctx=pair.n_ctx, progress=lambda f: False)
        engine = pair.load()
        engine.complete("Hello", max_tokens=2, draft=DRAFTS[0])
        if i % 2:
            engine.close()
            engine.close()
        del engine

    steady("loads", one, count)


def steady(name: str, one: Callable[[int], None], count: int) -> None:
    """Run `one` count times; print memory after the first tenth and at the end."""
    process = psutil.Process()
    warm = max(1, count // 10)

    def now() -> tuple[float, int, int]:
        gc.collect()
        fds = process.num_fds() if os.name == "posix" else process.num_handles()
        return process.memory_info().rss / 2**20, fds, process.num_threads()

    at = time.perf_counter()
    before = now()
    for i in range(count):
        one(i)
        if i + 1 == warm:
            before = now()
        elif (i + 1) % max(1, count // 5) == 0:
            print(f"{name}: {i + 1}: %.1f MiB, %d descriptors, %d threads" % now(), flush=True)
    after = now()
    print(
        f"{name}: {count} in {time.perf_counter() - at:.0f} s; memory {before[0]:.1f} -> "
        f"{after[0]:.1f} MiB ({100 * (after[0] / before[0] - 1):+.2f}%), descriptors {before[1]} "
        f"-> {after[1]}, threads {before[2]} -> {after[2]}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["cancel", "threads", "chats", "loads"])
    parser.add_argument("-m", "--model", type=Path, help="target (the default pair otherwise)")
    parser.add_argument("-d", "--drafter", type=Path)
    parser.add_argument("--n-ctx", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cancellations", type=int, default=200)
    parser.add_argument("--answers", type=int, default=50, help="per thread")
    parser.add_argument("--conversations", type=int, default=2000)
    parser.add_argument("--loads", type=int, default=200)
    args = parser.parse_args()
    pair = Pair(args)
    counts = {"cancel": args.cancellations, "threads": args.answers,
              "chats": args.conversations, "loads": args.loads}  # fmt: skip
    for part in args.parts:
        {"cancel": cancel, "threads": threads, "chats": chats, "loads": loads}[part](
            pair, counts[part]
        )


if __name__ == "__main__":
    main()
