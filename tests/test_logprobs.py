"""Log probabilities of generated tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import CHAIN, PLAIN, TREE, prompt_of

from localspec import Chat, Grammar, SamplingParams
from localspec.engine import Engine, Step
from localspec.errors import LocalspecError
from localspec.logprobs import path_logprobs, token_logprobs

F = np.float32


def log_softmax(logits: np.ndarray) -> np.ndarray:
    z = logits.astype(np.float64)
    z -= z.max()
    return z - np.log(np.exp(z).sum())


@pytest.mark.parametrize("vocab", [1, 7, 300, 20_000])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_log_softmax_and_its_best(vocab: int, top: int):
    rng = np.random.default_rng(vocab + top)
    logits = (rng.normal(size=vocab) * 5).round(1).astype(F)  # with ties
    expected, top = log_softmax(logits), min(top, vocab)
    token = int(rng.integers(vocab))
    found = token_logprobs(logits, token, top)
    assert found.token_id == token and found.logprob == pytest.approx(expected[token], abs=1e-4)
    order = np.argsort(-logits, kind="stable")[:top].tolist()
    assert [t for t, _ in found.top] == order
    assert [p for _, p in found.top] == pytest.approx(expected[order].tolist(), abs=1e-4)
    rows = np.stack([logits, logits[::-1]])
    first, second = path_logprobs(rows, [1, 0], [0, token], top)
    assert first.logprob == pytest.approx(expected[-1], abs=1e-4) and second == found


def test_large_vocabularies_keep_their_tail():
    logits = np.zeros(1_000_000, F)
    assert token_logprobs(logits, 5, 1).logprob == pytest.approx(-np.log(1e6), abs=1e-5)


def plain_rows(engine: Engine, prompt: list[int], text: list[int]) -> list[np.ndarray]:
    """The target's log probabilities at every token of a text, evaluated one by one."""
    target, rows = engine._target, []
    engine._live.cut(0)
    for piece in (prompt, *([t] for t in text[:-1])):
        for _ in target.prefill(piece):
            pass
        rows.append(log_softmax(np.array(target.logits()[-1])))
    engine._live.cut(0)
    return rows


def check(engine: Engine, prompt: list[int], steps: list[Step], top: int) -> None:
    text = [t for s in steps for t in s.token_ids]
    found = [p for s in steps for p in s.logprobs]
    assert [p.token_id for p in found] == text
    assert all(len(s.logprobs) == len(s.token_ids) for s in steps)
    for expected, each in zip(plain_rows(engine, prompt, text), found, strict=True):
        assert each.logprob == pytest.approx(expected[each.token_id], abs=0.05)
        assert len(each.top) == top
        values = [p for _, p in each.top]
        assert values == sorted(values, reverse=True)
        best = np.sort(expected)[::-1][:top]
        assert values == pytest.approx(best.tolist(), abs=0.05)


@pytest.mark.parametrize("draft", [PLAIN, CHAIN, TREE], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_they_are_the_targets_own(load: Callable[..., Engine], draft: Any, temperature: float):
    """Before temperature, truncation and penalties, whichever way the tokens came about."""
    engine = load("vanilla")
    params = SamplingParams(temperature=temperature, top_k=8, repetition_penalty=1.2, seed=1)
    steps = list(engine.generate(prompt_of(1), params, max_tokens=24, draft=draft, logprobs=4))
    check(engine, prompt_of(1), steps, 4)
    if temperature == 0.0 and draft is not PLAIN:
        assert any(len(s.token_ids) > 1 for s in steps)


def test_nothing_changes_and_nothing_is_computed_unasked(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = load("vanilla")
    asked = engine.complete(prompt_of(2), max_tokens=20, draft=CHAIN, logprobs=3)
    assert len(asked.logprobs) == len(asked.token_ids) == 20

    def never(*_: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr("localspec.engine.path_logprobs", never)
    result = engine.complete(prompt_of(2), max_tokens=20, draft=CHAIN)
    assert result.logprobs == [] and result.token_ids == asked.token_ids


def test_only_the_tokens_own(load: Callable[..., Engine]):
    result = load().complete(prompt_of(3), max_tokens=5, draft=PLAIN, logprobs=0)
    assert len(result.logprobs) == 5 and all(p.top == () for p in result.logprobs)


def test_a_cut_round_has_those_of_its_tokens(load: Callable[..., Engine]):
    engine = load("vanilla")
    for most in range(1, 9):
        result = engine.complete(prompt_of(4), max_tokens=most, draft=TREE, logprobs=1)
        assert [p.token_id for p in result.logprobs] == result.token_ids
    stopped = engine.complete(prompt_of(4), max_tokens=20, draft=TREE, logprobs=1, stop=["a", "e"])
    assert [p.token_id for p in stopped.logprobs] == stopped.token_ids


def test_a_grammar_leaves_them_alone(load: Callable[..., Engine]):
    """A forced token has the probability that the target itself gave it."""
    engine = load("vanilla")
    grammar = Grammar.from_gbnf('root ::= "zq" [0-9]{3}')
    steps = list(engine.generate(prompt_of(5), draft=CHAIN, grammar=grammar, logprobs=2))
    check(engine, prompt_of(5), steps, 2)
    first = steps[0].logprobs[0]
    assert first.logprob < first.top[0][1] and first.token_id != first.top[0][0]


def test_bad_counts_are_refused(load: Callable[..., Engine]):
    engine = load()
    for count in (-1, engine.model.n_vocab + 1):
        with pytest.raises(LocalspecError, match=r"logprobs must be 0\.\."):
            engine.generate(prompt_of(0), logprobs=count)
    result = engine.complete(prompt_of(0), max_tokens=2, draft=PLAIN, logprobs=engine.model.n_vocab)
    assert len(result.logprobs[0].top) == engine.model.n_vocab


def test_chat_and_asyncio_give_them(load: Callable[..., Engine]):
    engine = load("vanilla")
    chat = Chat(engine, draft=CHAIN)
    list(chat.send("hello", max_tokens=6, logprobs=2))
    assert chat.last is not None
    assert [p.token_id for p in chat.last.logprobs] == chat.last.token_ids
    list(chat.regenerate(max_tokens=6, logprobs=0))
    assert len(chat.last.logprobs) == len(chat.last.token_ids)

    async def collect() -> list[Step]:
        steps = engine.agenerate(prompt_of(0), max_tokens=6, draft=CHAIN, logprobs=1)
        return [s async for s in steps] + [
            s async for s in chat.astream("again", max_tokens=6, logprobs=1)
        ]

    assert all(len(s.logprobs) == len(s.token_ids) for s in asyncio.run(collect()))
