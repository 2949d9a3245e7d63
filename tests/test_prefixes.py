"""The prefix cache: an earlier conversation goes on without being evaluated again, exactly."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
import numpy as np
import pytest
import tiny_archs
import tiny_deepseek4
import tiny_eagle
from conftest import CHAIN, PLAIN, TREE, prompt_of, same_text
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from localspec import estimate, memory
from localspec.chat import Chat
from localspec.cli import cli
from localspec.cli.options import load_engine
from localspec.convert import convert
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.llama import Context
from localspec.memory import Free
from localspec.prefixes import (
    Kept,
    PrefixPool,
    common_prefix,
    parse_size,
    worth_keeping,
    worth_restoring,
)
from localspec.sampling import SamplingParams

Load = Callable[..., Engine]
MB = 1 << 20
GOLDEN = Path(
    os.environ.get("LOCALSPEC_GOLDEN", Path(__file__).resolve().parents[1] / "../shared/golden")
)
CONTEXT = DraftOptions(tokens=8, context=True)


def words(seed: int, n: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(36, 300, n).tolist()


# ---- decisions


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 0), (4096, 4096), ("0", 0), ("12", 12), ("3K", 3072), ("256M", 256 * MB),
     ("256MiB", 256 * MB), ("64 mb", 64 * MB), ("1.5G", 3 << 29), ("1T", 1 << 40)],
)  # fmt: skip
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_size(size) == expected


@pytest.mark.parametrize("size", ["", "x", "-1", -1, "1X", "M", "1e9", True, "10 %", "auto"])
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(LocalspecError, match=r"^a prefix cache of .* is no size[^\n]*256M[^\n]*$"):
        parse_size(size)


texts = st.lists(st.integers(0, 2), max_size=8)


@given(texts, texts)
def test_common_prefixes(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_a_lost_prompt_is_worth_a_copy_and_a_short_answer_is_not() -> None:
    assert worth_keeping(12, n_prompt=10, shared=0)  # another conversation
    assert worth_keeping(12, n_prompt=10, shared=8)
    assert not worth_keeping(30, n_prompt=20, shared=19)  # another attempt
    assert worth_keeping(60, n_prompt=20, shared=19)
    assert not worth_keeping(2000, n_prompt=1900, shared=1899)
    assert not worth_keeping(30, n_prompt=20, shared=30)  # an extension
    assert not worth_keeping(0, n_prompt=20, shared=0)
    assert worth_keeping(9, n_prompt=20, shared=0)  # a prompt that was cancelled


def test_a_long_text_is_not_copied_for_a_few_tokens() -> None:
    assert worth_restoring(5000, usable=5000, n_wanted=9000, live=4999)  # it goes on
    assert worth_restoring(5000, usable=40, n_wanted=40, live=39)  # once more
    assert not worth_restoring(5000, usable=40, n_wanted=900, live=30)
    assert worth_restoring(5000, usable=60, n_wanted=900, live=30)
    assert not worth_restoring(50, usable=30, n_wanted=900, live=30)
    assert not worth_restoring(50, usable=0, n_wanted=0, live=0)
    pool: PrefixPool[str] = PrefixPool(10**6)
    pool.put(list(range(900)), 0, 1, lambda: "long")
    pool.put([*range(10), 1, 2], 0, 1, lambda: "short")
    found = pool.find([*range(10), 77, 78])
    assert found is not None and found.state == "short"  # as good, and less to copy


@settings(deadline=None)
@given(
    st.integers(0, 60),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=1, max_size=6), st.booleans(), st.booleans()
        ),
        max_size=25,
    ),
)
def test_a_pool_finds_the_longest_and_stays_in_its_budget(
    budget: int, story: list[tuple[list[int], bool, bool]]
) -> None:
    pool: PrefixPool[str] = PrefixPool(budget)
    for text, exact, search in story:
        found = pool.find(text)
        best = max((k.usable(text) for k in pool._kept), default=0)
        assert (found.usable(text) if found else 0) == best
        assert pool.find(text, live=best) is None
        if search and found is not None:
            pool.touch(found)
            assert pool._kept[-1] is found
            continue
        n_bytes, before = 3 * len(text), list(pool._kept)
        hold = found if exact else None
        kept = pool.put(text, len(text) if exact else 0, n_bytes, lambda: "state", hold=hold)
        assert pool.used <= budget
        assert hold is None or any(k is hold for k in pool._kept)
        again = pool.find(text)
        if kept:
            assert again is not None and again.usable(text) == len(text)
        else:
            assert pool._kept == before
            assert n_bytes + 4 * len(text) + (hold.n_bytes if hold else 0) > budget


def test_the_least_recently_used_makes_room() -> None:
    pool: PrefixPool[None] = PrefixPool(3 * (100 + 4))
    for text in (1, 2, 3):
        assert pool.put([text], 0, 100, lambda: None)
    first = pool.find([1])
    assert first is not None
    pool.touch(first)
    assert pool.put([4], 0, 100, lambda: None)
    assert [int(k.tokens[0]) for k in pool._kept] == [3, 1, 4] and pool.evicted == 1
    third = pool.find([3])
    assert pool.put([5], 0, 100, lambda: None, hold=third)
    assert [int(k.tokens[0]) for k in pool._kept] == [3, 4, 5]
    # No room beside what must stay: nothing is lost, nothing is copied.
    assert not pool.put([6], 0, 250, pytest.fail, hold=third)
    assert len(pool) == 3


def test_a_beginning_of_a_longer_text_is_not_kept_twice() -> None:
    pool: PrefixPool[str] = PrefixPool(1000)
    pool.put([1, 2], 0, 9, lambda: "short")
    pool.put([1, 2, 3], 0, 9, lambda: "long")
    assert [k.state for k in pool._kept] == ["long"]
    assert pool.put([1, 2], 0, 9, pytest.fail)
    assert [k.state for k in pool._kept] == ["long"]
    # Exact states stand for one length only.
    pool.put([7, 8], 2, 9, lambda: "exact short")
    pool.put([7, 8, 9], 3, 9, lambda: "exact long")
    assert [k.state for k in pool._kept] == ["long", "exact short", "exact long"]
    found = pool.find([7, 8, 1])
    assert found is not None and found.state == "exact short"
    assert pool.find([7, 1]) is None


# ---- engines


def checked(
    engine: Engine, fresh: Engine, prompt: Sequence[int], draft: DraftOptions, n: int = 24
) -> tuple[int, int]:
    """Generate; the text is that of an engine that saw nothing else. Tokens evaluated, restored."""
    how = {"max_tokens": n, "stop_token_ids": ()}
    result = engine.complete(prompt, draft=draft, **how)
    assert result.reused_tokens + result.processed_tokens == result.prompt_tokens == len(prompt)
    fresh._live.clear()
    plain = fresh.complete(prompt, draft=PLAIN, **how)
    same_text(fresh, prompt, plain.token_ids, result.token_ids)
    stats = engine.prefix_cache
    assert stats.used == sum(size(k) for k in engine._live.prefixes.pool._kept) <= stats.budget
    return result.processed_tokens, result.restored_tokens


def size(kept: Kept) -> int:
    cells, drafter = kept.state
    n = cells.nbytes + kept.tokens.nbytes
    if drafter is not None:
        n += drafter.cells.nbytes + (0 if drafter.states is None else drafter.states.nbytes)
    return n


@pytest.mark.parametrize(
    ("drafter", "draft"),
    [(None, PLAIN), ("vanilla", CHAIN), ("vanilla", TREE), ("gated", TREE), ("rnn", TREE)],
)
def test_conversations_take_turns(load: Load, drafter: str | None, draft: DraftOptions) -> None:
    engine, fresh = load(drafter, prefix_cache="16M"), load(None)
    a, b = prompt_of(0), prompt_of(1)
    assert checked(engine, fresh, a, draft) == (len(a), 0)
    first = engine.cached_tokens
    assert checked(engine, fresh, a, draft) == (1, 0)
    assert checked(engine, fresh, b, draft)[0] == len(b) - common_prefix(a, b)
    assert checked(engine, fresh, a, draft) == (1, len(a) - 1)
    assert checked(engine, fresh, b, draft) == (1, len(b) - 1)
    longer = [*first, *prompt_of(2)]
    assert checked(engine, fresh, longer, draft) == (len(longer) - len(first), len(first))
    assert engine.prefix_cache.restored == 3 and engine.prefix_cache.evicted == 0


@pytest.mark.golden
@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden data (set LOCALSPEC_GOLDEN)")
@pytest.mark.parametrize("draft", [PLAIN, CHAIN, TREE])
def test_the_golden_pair_says_exactly_what_a_fresh_one_says(
    draft: DraftOptions, tmp_path: Path
) -> None:
    target, drafter = GOLDEN / "tiny-qwen3" / "tiny-qwen3-f32.gguf", tmp_path / "drafter.gguf"
    convert(GOLDEN / "dspark-vanilla", target, drafter, outtype="f32")
    options = {"n_ctx": 256, "n_threads": 1}
    prompts = [np.random.default_rng(s).integers(5, 200, 12 + 9 * s).tolist() for s in range(3)]
    with (
        Engine.load(target, drafter, prefix_cache="64M", **options) as engine,
        Engine.load(target, drafter, **options) as fresh,
    ):
        for turn in range(9):
            prompt = prompts[turn % 3]
            fresh._live.clear()
            expected = fresh.complete(prompt, max_tokens=40, draft=draft)
            result = engine.complete(prompt, max_tokens=40, draft=draft)
            assert result.token_ids == expected.token_ids
            # The drafter knows what it knew, too.
            assert [r.accepted for r in result.rounds] == [r.accepted for r in expected.rounds]
            if turn >= 3:
                assert (result.processed_tokens, result.restored_tokens) == (1, len(prompt) - 1)
            prompts[turn % 3] = [*prompt, *expected.token_ids[:10]] if turn == 5 else prompt


def test_a_sampled_text_is_the_same_after_its_prompt_was_restored(load: Load) -> None:
    engine, fresh = load("vanilla", prefix_cache="16M"), load("vanilla")
    params = SamplingParams(temperature=1.0, seed=3)
    expected = fresh.complete(prompt_of(0), params, max_tokens=40, draft=CHAIN)
    for prompt in (prompt_of(0), prompt_of(1), prompt_of(0)):
        result = engine.complete(prompt, params, max_tokens=40, draft=CHAIN)
    assert result.restored_tokens and result.token_ids == expected.token_ids


def test_without_a_budget_nothing_is_kept(load: Load) -> None:
    engine, fresh = load("vanilla"), load(None)
    for seed in (0, 1, 0):
        prompt = prompt_of(seed)
        shared = common_prefix(engine.cached_tokens, prompt[:-1])
        assert checked(engine, fresh, prompt, CHAIN) == (len(prompt) - shared, 0)
        assert shared < len(prompt) - 2
    assert engine.prefix_cache == type(engine.prefix_cache)(0, 0, 0, 0, 0)


def test_many_conversations_stay_within_the_budget(load: Load) -> None:
    engine, fresh = load("vanilla", prefix_cache=200_000), load(None)
    for seed in range(12):
        assert checked(engine, fresh, words(seed, 40), CHAIN, 8)[0] == 40
    stats = engine.prefix_cache
    assert 2 <= stats.kept < 11 and stats.evicted == 11 - stats.kept
    recent, gone = 12 - stats.kept, 12 - stats.kept - 3
    assert checked(engine, fresh, words(recent, 40), CHAIN, 8) == (1, 39)
    assert checked(engine, fresh, words(gone, 40), CHAIN, 8) == (40, 0)


def test_a_conversation_larger_than_the_budget_is_not_kept(load: Load) -> None:
    engine, fresh = load("vanilla", prefix_cache="8K"), load(None)
    for seed in (0, 1, 0):
        assert checked(engine, fresh, words(seed), CHAIN) == (60, 0)
    assert engine.prefix_cache.kept == engine.prefix_cache.used == 0


def test_conversations_of_a_chat_take_turns(load: Load) -> None:
    engine = load("vanilla", prefix_cache="16M", n_ctx=512)
    one, two = Chat(engine, draft=CHAIN), Chat(engine, draft=CHAIN)
    for chat in (one, two, one, two, one, two):
        before = 0 if chat.last is None else chat.last.prompt_tokens + len(chat.last.token_ids)
        for _ in chat.send("hello there" if chat is one else "good morning", max_tokens=12):
            pass
        assert chat.last is not None
        if before:
            assert chat.last.processed_tokens <= chat.last.prompt_tokens - before + 2
            assert chat.last.restored_tokens >= before - 2
    other = one.branch()
    for chat in (one, two, other):
        for _ in chat.send("and now?", max_tokens=4):
            pass
        assert chat.last is not None and chat.last.processed_tokens < 40


def test_a_cancelled_conversation_in_between(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fresh = load("vanilla", prefix_cache="16M", n_batch=65), load(None)
    a, b = words(0, 80), words(1, 200)
    checked(engine, fresh, a, CHAIN)
    real = engine._target.context.decode

    def cancelling(*args: object, **options: object) -> None:
        engine.cancel()
        real(*args, **options)

    monkeypatch.setattr(engine._target.context, "decode", cancelling)
    (step,) = engine.generate(b, max_tokens=10, draft=CHAIN)
    assert step.prefill is not None and step.prefill.processed == 65
    assert step.finish_reason == "cancelled"
    monkeypatch.undo()
    assert checked(engine, fresh, a, CHAIN) == (1, 79)
    assert checked(engine, fresh, b, CHAIN) == (200 - 65, 65)
    steps = engine.generate(a, max_tokens=50, draft=TREE)  # left in its second round
    for _ in range(2):
        next(steps, None)
    steps.close()
    assert checked(engine, fresh, b, CHAIN) == (1, 199)
    assert checked(engine, fresh, a, TREE) == (1, 79)


@pytest.mark.parametrize("place", ["target", "drafter"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_return_leaves_a_usable_engine(
    load: Load, monkeypatch: pytest.MonkeyPatch, place: str, when: str
) -> None:
    engine, fresh = load("vanilla", prefix_cache="16M"), load(None)
    for seed in (0, 1):
        checked(engine, fresh, words(seed), CHAIN)
    context = (engine._target if place == "target" else engine._drafter).context
    real = context.load_state

    def interrupted(state: np.ndarray) -> None:
        if when == "after":
            real(state)
        raise KeyboardInterrupt

    monkeypatch.setattr(context, "load_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.complete(words(0), max_tokens=5, draft=CHAIN)
    monkeypatch.undo()
    assert engine.cached_tokens == ()
    assert checked(engine, fresh, words(2), TREE) == (60, 0)
    assert checked(engine, fresh, words(0), TREE) == (1, 59)
    assert checked(engine, fresh, words(1), TREE) == (1, 59)


@pytest.mark.parametrize("part", [0, 1])
def test_what_llama_cpp_refuses_is_evaluated_again(load: Load, part: int) -> None:
    engine, fresh = load("vanilla", prefix_cache="16M"), load(None)
    for seed in (0, 1):
        checked(engine, fresh, words(seed), CHAIN)
    cells, drafter = engine._live.prefixes.pool._kept[0].state
    (cells if part == 0 else drafter.cells)[:200] = 255
    assert checked(engine, fresh, words(0), CHAIN) == (60, 0)
    assert checked(engine, fresh, words(1), CHAIN) == (1, 59)


def test_a_copy_that_memory_is_short_for_is_not_made(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, fresh = load("vanilla", prefix_cache="16M"), load(None)

    def short(self: Context) -> np.ndarray:
        raise MemoryError

    monkeypatch.setattr(Context, "save_state", short)
    for seed in (0, 1, 0):
        assert checked(engine, fresh, words(seed), CHAIN) == (60, 0)
    assert engine.prefix_cache.kept == 0


def test_deterministic_texts_do_not_depend_on_what_was_kept(load: Load) -> None:
    engine, other = load("vanilla", prefix_cache="16M"), load("vanilla")
    sure = DraftOptions(tokens=7, deterministic=True)
    expected = other.complete(words(0), max_tokens=30, draft=sure)
    engine.complete(words(0), max_tokens=30, draft=CHAIN)
    for _ in range(2):
        result = engine.complete(words(0), max_tokens=30, draft=sure)
        assert result.token_ids == expected.token_ids
        assert (result.processed_tokens, result.restored_tokens) == (60, 0)
        np.testing.assert_array_equal(engine.last_logits, other.last_logits)
    assert engine.prefix_cache.kept == 1  # what was there before the first of them
    engine.complete(words(1), max_tokens=5, draft=CHAIN)
    assert engine.complete(words(0), max_tokens=5, draft=CHAIN).processed_tokens == 1


def test_a_drafter_that_lost_its_beginning_is_restored_as_it_was(load: Load) -> None:
    engine = load("vanilla", prefix_cache="16M", drafter_window=32, n_ctx=600)
    fresh, long = load(None, n_ctx=600), words(0, 500)
    checked(engine, fresh, long, CHAIN, 8)
    checked(engine, fresh, words(1), CHAIN)
    assert checked(engine, fresh, long, CHAIN, 8) == (1, 499)
    # An answer so long that the drafter forgets how the prompt ended, or how it began.
    for prompt in (words(4, 40), long):
        checked(engine, fresh, prompt, CHAIN, 80)
        kept = engine.prefix_cache.kept
        assert checked(engine, fresh, prompt, CHAIN, 80) == (1, len(prompt) - 1)
        assert engine.prefix_cache.kept <= kept + 1
        checked(engine, fresh, words(1), CHAIN)
        assert checked(engine, fresh, prompt, CHAIN, 80) == (1, len(prompt) - 1)
    drafter = engine._drafter
    assert drafter is not None and drafter._first > 400
    checked(engine, fresh, words(2), CHAIN)
    # Where its window does not reach, the drafter would draft from nothing.
    assert checked(engine, fresh, long[:300], CHAIN) == (300, 0)


# ---- other memories and drafters


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, object]]:
    folder = tmp_path_factory.mktemp("others")
    made: dict[str, tuple[Path, object]] = {}

    def eagle(packaging: dict[str, object]) -> tuple[Path, Path]:
        target = tiny.build_target(folder / f"target{len(made)}", layers=6)
        checkpoint, out = folder / f"eagle{len(made)}", folder / f"eagle{len(made)}.gguf"
        tiny_eagle.build(checkpoint, target, **packaging)
        convert(checkpoint, target.gguf, out, outtype="f32")
        assert target.gguf is not None
        return target.gguf, out

    def build(name: str) -> tuple[Path, object]:
        if name == "eagle3":
            return eagle({})
        if name == "eagle3-wide":
            return eagle({"packaging": "deepspec", "layers": (0, 1, 2, 3, 4)})
        arch, _, drafter = name.partition("+")
        path = folder / f"{arch}.gguf"
        if arch == "deepseek4":
            path = tiny_deepseek4.build(folder / "deepseek4").gguf
        else:
            getattr(tiny_archs, f"build_{arch}")(path)
        return path, drafter or None

    def get(name: str) -> tuple[Path, object]:
        if name not in made:
            made[name] = build(name)
        return made[name]

    return get


OTHERS = ("gemma3", "gemma4", "lfm2", "mamba", "qwen35", "qwen35+mtp", "deepseek4", "eagle3",
          "eagle3-wide")  # fmt: skip


@pytest.fixture(params=OTHERS)
def pair(
    request: pytest.FixtureRequest, others: Callable[[str], tuple[Path, object]]
) -> Iterator[tuple[Engine, Engine]]:
    """An engine with a prefix cache and one without, of every kind of memory and drafter."""
    target, drafter = others(request.param)
    options = {"n_ctx": 512, "n_threads": 1, "kv_type": "f32", "flash_attn": False}
    with (
        Engine.load(target, drafter, prefix_cache="64M", **options) as engine,
        Engine.load(target, **options) as fresh,
    ):
        yield engine, fresh


def test_every_kind_of_memory_comes_back(pair: tuple[Engine, Engine]) -> None:
    engine, fresh = pair
    draft = CHAIN if engine.has_drafter else CONTEXT
    a, b = words(0, 90), words(1, 70)
    assert checked(engine, fresh, a, draft) == (90, 0)
    assert checked(engine, fresh, b, draft) == (70, 0)
    assert checked(engine, fresh, a, draft) == (1, 89)
    first = engine.cached_tokens
    assert checked(engine, fresh, b, draft) == (1, 69)
    assert checked(engine, fresh, b, draft)[0] == 1
    longer = [*first, *words(2, 20)]
    assert checked(engine, fresh, longer, draft) == (20, len(first))
    # From the middle: whatever can be cut is.
    expected = (41, 60) if not engine._target.exact else (101, 0)
    assert checked(engine, fresh, b, draft)[0] == 1
    assert checked(engine, fresh, [*a[:60], *words(3, 41)], draft) == expected


def test_a_restored_drafter_drafts_as_before(
    load: Load, others: Callable[[str], tuple[Path, object]]
) -> None:
    options = {"n_ctx": 256, "n_threads": 1, "prefix_cache": "64M"}
    for name in ("vanilla", "eagle3", "eagle3-wide", "qwen35+mtp"):
        found = None if name == "vanilla" else others(name)
        engine = load(name, **options) if found is None else Engine.load(*found, **options)
        drafts = []
        for seed in (0, 1, 0):
            prompt, drafter = words(seed, 50), engine._drafter
            engine.complete(prompt, max_tokens=1, draft=CHAIN)
            assert drafter is not None and drafter.n_past == 50
            block = drafter.propose(7)
            drafts.append(np.array(block.logits if name == "vanilla" else block.root()))
        assert engine.prefix_cache.restored == 1
        np.testing.assert_allclose(drafts[0], drafts[2], atol=2e-3)
        assert not np.allclose(drafts[0], drafts[1], atol=0.1)
        engine.close()


def test_recurrent_states_are_not_taken_back_to_where_none_was_left(
    others: Callable[[str], tuple[Path, object]],
) -> None:
    """Single-row passes leave one state, a restored one none: not the last `rollback` ones."""
    options = {"n_ctx": 512, "n_threads": 1, "kv_type": "f32", "flash_attn": False}
    for name in ("lfm2", "qwen35"):
        target, _ = others(name)
        for budget in (0, "16M"):
            with (
                Engine.load(target, prefix_cache=budget, **options) as engine,
                Engine.load(target, **options) as fresh,
            ):
                for prompt in (words(0), words(0), words(0)[:-2], words(1), words(0)[:-1]):
                    checked(engine, fresh, prompt, PLAIN, 5)
                steps = engine.generate(words(0), max_tokens=9, draft=PLAIN)
                engine._target.restore(engine._target.save(), engine._target.n_past)
                steps.close()
                checked(engine, fresh, list(engine.cached_tokens[:-3]), PLAIN, 9)


def test_four_conversations_in_any_order(pair: tuple[Engine, Engine]) -> None:
    """Sent again, extended, edited, cancelled at random, with little memory now and then."""
    engine, fresh = pair
    rng = np.random.default_rng(5)
    talks = [words(10, 30) + words(11 + i, 8 + 7 * i) for i in range(4)]
    starts = [list(t) for t in talks]
    drafts = (CHAIN, TREE) if engine.has_drafter else (CONTEXT, PLAIN)
    restored = 0
    for step in range(26):
        engine._live.prefixes.pool.budget = (64 * MB, 64 * MB, 400_000)[step // 9]
        if engine.prefix_cache.used > engine.prefix_cache.budget:
            engine._live.prefixes.pool.clear()
        i, what = int(rng.integers(4)), rng.random()
        draft = drafts[int(rng.integers(2))]
        if len(talks[i]) > 250 or what < 0.15:
            talks[i] = list(starts[i])
        elif what < 0.3:
            talks[i] = [*talks[i][: int(rng.integers(20, len(talks[i])))], *words(step, 5)]
        elif what < 0.4:
            steps = engine.generate(talks[i], max_tokens=30, draft=draft)
            next(steps, None)
            next(steps, None)
            steps.close()
            continue
        elif what < 0.5 and engine.cached_tokens:
            engine._target.context.clear()  # as bad as an interruption can be
            engine._live.cut(0)
        restored += checked(engine, fresh, talks[i], draft, 10)[1] > 0
        if what > 0.6:
            talks[i] = [*talks[i], *fresh.cached_tokens[len(talks[i]) :], *words(step, 6)]
    assert restored >= 5


# ---- memory


def test_the_budget_is_counted(
    tiny_target: tiny.TinyModel, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    lots = Free(1 << 40)
    without = estimate(tiny_target.gguf, n_ctx=256, free=lots)
    with_it = estimate(tiny_target.gguf, n_ctx=256, prefix_cache="256M", free=lots)
    assert with_it.total - without.total == with_it.on_host - without.on_host == 256 * MB
    assert "prefix cache 268 MB" in str(with_it) and "prefix" not in str(without)
    assert estimate(tiny_target.gguf, prefix_cache="auto", free=lots).prefix_cache == 1 << 30
    roomy = Free(without.total + 100 * MB)
    auto = estimate(tiny_target.gguf, n_ctx=256, prefix_cache="auto", free=roomy)
    assert auto.prefix_cache == 25 * MB and auto.fits
    tight = Free(without.total - 1)
    auto = estimate(tiny_target.gguf, n_ctx=256, prefix_cache="auto", free=tight)
    assert auto.prefix_cache == 0 and auto.total == without.total
    monkeypatch.setattr(memory, "free_memory", lambda: roomy)
    with pytest.raises(LocalspecError, match=r"needs .* of memory.*prefix cache 268 MB"):
        load(None, prefix_cache="256M")
    assert load(None, prefix_cache="auto").prefix_cache.budget == 25 * MB
    engine = load(None, prefix_cache="256M", fit=True)
    assert engine.n_ctx == 256 and 99 * MB < engine.prefix_cache.budget <= 100 * MB
    assert engine.notes[0].startswith("the prefix cache is 10")
    assert load(None, prefix_cache="1G", check_memory=False).prefix_cache.budget == 1 << 30
    assert load(None, prefix_cache=12345).prefix_cache.budget == 12345
    monkeypatch.setattr(memory, "free_memory", lambda: tight)
    off = load(None, prefix_cache="256M", fit=True, check_memory=False)
    assert off.prefix_cache.budget == 0 and "prefix cache is off" in off.notes[0]


def test_loading_refuses_what_is_no_size(load: Load) -> None:
    with pytest.raises(LocalspecError, match="prefix cache of '1Q' is no size"):
        load(None, prefix_cache="1Q")


def test_the_option_of_the_command_line(tiny_target: tiny.TinyModel) -> None:
    """A size that is none is told in one line; chat and serve keep conversations by themselves."""
    for command in ("chat", "serve"):
        options = cli.get_command(click.Context(cli), command)
        assert options is not None
        (option,) = [p for p in options.params if p.name == "prefix_cache"]
        assert option.default == "auto"
    chosen = {
        "verbose": False, "flash_attn": "auto", "n_ctx": 256, "threads": 1, "gpu_layers": -1,
        "kv_type": "f16", "no_mmap": False, "rpc": "",
    }  # fmt: skip
    with load_engine(tiny_target.gguf, None, dict(chosen)) as engine:
        assert engine.prefix_cache.budget == 0
    with load_engine(tiny_target.gguf, None, {**chosen, "prefix_cache": "3M"}) as engine:
        assert engine.prefix_cache.budget == 3 * MB
    with pytest.raises(LocalspecError, match="prefix cache of 'lots' is no size"):
        load_engine(tiny_target.gguf, None, {**chosen, "prefix_cache": "lots"})
