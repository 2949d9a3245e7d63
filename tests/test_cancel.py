"""Cancelling: from any thread, at any moment, and what the engine is worth afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable

import pytest
from conftest import CHAIN, PLAIN, TREE, prompt_of, same_text

from localspec.chat import Chat
from localspec.engine import DraftOptions, Engine, Step
from localspec.errors import LocalspecError
from localspec.sampling import SamplingParams

Load = Callable[..., Engine]
AUTO = DraftOptions.auto()


def cancel_inside(engine: Engine, monkeypatch: pytest.MonkeyPatch, place: str, at: int) -> None:
    """Call `cancel` while the engine is in a method of the target or the drafter."""
    owner = engine._drafter if place == "propose" else engine._target
    real = getattr(owner, place)
    calls = 0

    def counted(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == at:
            other = threading.Thread(target=engine.cancel)
            other.start()
            other.join()
        return real(*args, **options)

    monkeypatch.setattr(owner, place, counted)


@pytest.mark.parametrize("place", ["propose", "verify", "commit"])
def test_a_generation_ends_with_the_round_in_which_it_is_cancelled(load, place, monkeypatch):
    engine = load("vanilla")
    cancel_inside(engine, monkeypatch, place, at=3)
    steps = list(engine.generate(prompt_of(0), max_tokens=100, draft=CHAIN))
    assert steps[-1].finish_reason == "cancelled"
    # The prefill's token, three rounds, and the word that it is over.
    assert len([s for s in steps if s.round]) == 3
    assert steps[-1].token_ids == ()
    monkeypatch.undo()
    after = engine.complete(prompt_of(1), max_tokens=30, draft=CHAIN).token_ids
    fresh = load("vanilla").complete(prompt_of(1), max_tokens=30, draft=CHAIN).token_ids
    same_text(engine, prompt_of(1), fresh, after)


def test_a_prefill_ends_between_two_batches(load, monkeypatch):
    engine = load("vanilla", n_batch=65)
    prompt = prompt_of(0, 200)
    decodes = []
    real = engine._target.context.decode

    def counted(tokens: list[int], *args: object, **options: object) -> None:
        decodes.append(len(tokens))
        if len(decodes) == 2:
            engine.cancel()
        real(tokens, *args, **options)

    monkeypatch.setattr(engine._target.context, "decode", counted)
    (step,) = engine.generate(prompt, max_tokens=10, draft=CHAIN)
    assert step.finish_reason == "cancelled" and step.token_ids == ()
    assert decodes == [65, 65]
    assert step.prefill is not None and (step.prefill.tokens, step.prefill.processed) == (200, 130)
    # What was evaluated is not lost.
    result = engine.complete(prompt, max_tokens=10, draft=CHAIN)
    assert result.processed_tokens == 70
    fresh = load(None).complete(prompt, max_tokens=10, draft=PLAIN)
    same_text(engine, prompt, fresh.token_ids, result.token_ids)


def test_measuring_the_machine_is_cancelled_too(load, monkeypatch):
    engine = load("vanilla", n_ctx=200, kv_type="bf16")  # nobody else's measurement
    assert not engine.tuned
    cancel_inside(engine, monkeypatch, "verify", at=2)
    (step,) = engine.generate(prompt_of(0), max_tokens=10, draft=AUTO)
    assert step.finish_reason == "cancelled" and not engine.tuned
    monkeypatch.undo()
    after = engine.complete(prompt_of(1), max_tokens=20, draft=CHAIN).token_ids
    fresh = load(None, kv_type="bf16").complete(prompt_of(1), max_tokens=20, draft=PLAIN)
    same_text(engine, prompt_of(1), fresh.token_ids, after)


def test_cancelling_nothing_has_no_effect_on_what_comes(load):
    engine = load("vanilla")
    engine.cancel()
    made = engine.generate(prompt_of(0), max_tokens=8, draft=CHAIN)
    engine.cancel()  # made, not begun
    assert sum(len(s.token_ids) for s in made) == 8
    engine.cancel()
    assert engine.complete(prompt_of(0), max_tokens=8, draft=CHAIN).finish_reason == "length"
    chat = Chat(engine)
    chat.cancel()
    assert "".join(s.text for s in chat.send("hello", max_tokens=8))


def test_text_held_back_for_a_stop_string_is_handed_out(load):
    engine = load(None)
    whole = engine.complete(prompt_of(0), max_tokens=12, draft=PLAIN)
    text = ""
    for step in engine.generate(
        prompt_of(0), max_tokens=40, draft=PLAIN, stop=[whole.text[:4] + "\0"]
    ):
        text += step.text
        engine.cancel()
    assert text and whole.text.startswith(text)


def test_cancellations_anywhere_leave_a_usable_engine(load):
    """40 random ones; benchmarks/soak.py does any number."""
    engine, rng = load("vanilla", n_batch=65), random.Random(7)
    prompts = [prompt_of(i) for i in range(4)] + [prompt_of(i, 180) for i in range(2)]
    fresh = load(None)
    right = [fresh.complete(p, max_tokens=10, draft=PLAIN).token_ids for p in prompts]
    long = fresh.complete(prompts[0], max_tokens=40, draft=PLAIN)
    whole = long.prefill_seconds + sum(r.seconds.total for r in long.rounds)
    cancelled = 0
    for i in range(40):
        params = SamplingParams(temperature=float(i % 2), seed=i)
        how = {"max_tokens": 70, "draft": rng.choice((CHAIN, TREE, PLAIN))}
        if rng.random() < 0.5:
            timer = threading.Timer(rng.random() * whole, engine.cancel)
            timer.start()
            steps = list(engine.generate(rng.choice(prompts), params, **how))
            timer.join()
        else:
            steps = asyncio.run(_timed_out(engine, rng.choice(prompts), params, how, whole, rng))
        cancelled += not steps or steps[-1].finish_reason in (None, "cancelled")
        which = rng.randrange(len(prompts))
        answer = engine.complete(prompts[which], max_tokens=10, draft=CHAIN)
        same_text(fresh, prompts[which], right[which], answer.token_ids)
    assert cancelled > 5


async def _timed_out(engine, prompt, params, how, whole, rng) -> list[Step]:
    steps: list[Step] = []

    async def run() -> None:
        async for step in engine.agenerate(prompt, params, **how):
            steps.append(step)  # noqa: PERF401

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(run(), rng.random() * whole)
    return steps


def test_a_cancelled_answer_stays_in_the_conversation(load):
    chat = Chat(load("vanilla"), draft=CHAIN)
    said = ""
    for i, step in enumerate(chat.send("hello", max_tokens=100)):
        said += step.text
        if i == 1:
            threading.Thread(target=chat.cancel).start()
    assert chat.last is not None and chat.last.finish_reason == "cancelled"
    assert [m["content"] for m in chat.messages] == ["hello", said]
    assert "".join(s.text for s in chat.send("go on", max_tokens=5)) is not None
    assert len(chat.messages) == 4


@pytest.mark.parametrize("at", [1, 2, 5])
def test_loading_can_be_stopped(at, tiny_target, tiny_drafter):
    calls = []

    def stop(fraction: float) -> bool:
        calls.append(fraction)
        return len(calls) < at

    with pytest.raises(LocalspecError, match=r"^loading .* was cancelled$"):
        Engine.load(
            tiny_target.gguf, tiny_drafter("vanilla")[1], n_ctx=256, n_threads=1, progress=stop
        )
    assert len(calls) == at and all(0 <= f <= 1 for f in calls)


def test_what_a_progress_callback_raises_comes_out(tiny_target):
    def fail(fraction: float) -> bool:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Engine.load(tiny_target.gguf, n_ctx=256, n_threads=1, progress=fail)
