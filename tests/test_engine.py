"""The round: the target's own text whatever is drafted, and caches that survive everything."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import CHAIN, HEADS, PLAIN, TREE, prompt_of, same_text

import tiny
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.llama import Context
from localspec.sampling import SamplingParams

N_PROMPTS = 7
DRAFTS = {
    "chain-1": DraftOptions(tokens=1),
    "chain": CHAIN,
    "tree": TREE,
    "bush": DraftOptions(tokens=40, width=12),
    "full": DraftOptions(tokens=64, width=32),
    "context": DraftOptions(tokens=15, width=3, context=True),
}


@pytest.fixture(scope="module")
def plain_answers(tiny_target) -> list[list[int]]:
    """Plain greedy answers to `prompt_of(0..)`, of a fresh engine each."""
    answers = []
    for seed in range(N_PROMPTS):
        with Engine.load(tiny_target.gguf, n_ctx=256, n_threads=1) as engine:
            answers.append(engine.complete(prompt_of(seed), max_tokens=48, draft=PLAIN).token_ids)
    assert len({tuple(a) for a in answers}) >= N_PROMPTS - 2
    return answers


# ---- greedy


@pytest.mark.parametrize(
    ("name", "draft"),
    [
        *[(name, draft) for name in HEADS for draft in DRAFTS],
        *[
            (name, draft)
            for name in ("vanilla-b16", "plain", "dflash")
            for draft in ("tree", "full")
        ],
        (None, "context"),
    ],
)
def test_greedy_text_is_the_plain_text(name, draft, plain_answers, load):
    engine = load(name)
    equal = 0
    accepted = []
    for seed, expected in enumerate(plain_answers):
        result = engine.complete(prompt_of(seed), max_tokens=48, draft=DRAFTS[draft])
        equal += same_text(engine, prompt_of(seed), expected, result.token_ids)
        accepted += [r.accepted for r in result.rounds]
        # The prefill gives one token, every round its accepted ones and (uncut) a bonus.
        most = 1 + sum(r.accepted + 1 for r in result.rounds)
        assert most - len(result.token_ids) in (0, 1)
    assert equal >= N_PROMPTS - 1
    if name in HEADS:
        assert 0 in accepted and max(accepted) >= min(3, DRAFTS[draft].tokens)


@pytest.mark.parametrize("name", [None, "vanilla"])
def test_branches_from_the_context_are_accepted_where_text_repeats(name, load):
    prompt = [tiny.START_ID, *prompt_of(0, 60)]
    engine = load(name)
    plain = engine.complete(prompt, max_tokens=40, draft=PLAIN, stop_token_ids=[])
    # The answer stands in the prompt already, so the same beginning promises the same end.
    again = [*prompt, *plain.token_ids, *prompt]
    options: dict[str, Any] = {"max_tokens": 40, "stop_token_ids": []}
    without, with_branches = (
        engine.complete(again, **options, draft=DraftOptions(tokens=7, context=context))
        for context in (False, True)
    )
    same_text(engine, again, without.token_ids, with_branches.token_ids)
    assert sum(r.drafted for r in with_branches.rounds) > 0
    if name is None:
        assert without.tau == 1


def test_threads_batches_and_caches_do_not_change_the_text(plain_answers, load):
    for options in (
        {"n_threads": 2},
        {"n_batch": 1},
        {"flash_attn": True},
        {"flash_attn": False, "kv_type": "f32"},
        {"use_mmap": False},
        {"drafter_window": 8},
        {"n_ctx": 2048},
    ):
        engine = load("gated", **options)
        for seed in range(2):
            found = engine.complete(prompt_of(seed), max_tokens=12, draft=TREE)
            same_text(engine, prompt_of(seed), plain_answers[seed][:12], found.token_ids)


def test_another_target_architecture(tmp_path):
    from localspec.convert import convert

    target = tiny.build_target(tmp_path / "t", arch="llama")
    drafter = tiny.build_drafter(tmp_path / "d", target, head="rnn")
    convert(drafter.path, target.gguf, tmp_path / "d.gguf", outtype="f32")
    with Engine.load(target.gguf, tmp_path / "d.gguf", n_ctx=256, n_threads=1) as engine:
        for seed in range(3):
            plain = engine.complete(prompt_of(seed), max_tokens=40, draft=PLAIN)
            found = engine.complete(prompt_of(seed), max_tokens=40, draft=TREE)
            same_text(engine, prompt_of(seed), plain.token_ids, found.token_ids)
            assert found.tau > 1.5 > plain.tau


# ---- sampling


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 1.2, "min_p": 0.05, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
    ],
)
def test_sampled_text_is_the_plain_sampled_text(options, load):
    # The match rule: every place uses its own number, drafted or not.
    engine = load("vanilla", flash_attn=False, kv_type="f32")
    different = 0
    for seed in range(4):
        params = SamplingParams(**options, acceptance="match", seed=seed)
        texts = [
            engine.complete(prompt_of(seed), params, max_tokens=40, draft=draft).token_ids
            for draft in (PLAIN, PLAIN, CHAIN, TREE)
        ]
        assert all(text == texts[0] for text in texts)
        other = SamplingParams(**options, acceptance="match", seed=seed + 100)
        found = engine.complete(prompt_of(seed), other, max_tokens=40, draft=TREE)
        different += found.token_ids != texts[0]
    assert different == (4 if options.get("temperature") else 0)


@pytest.mark.parametrize("acceptance", ["auto", "match", "rejection"])
def test_same_seed_same_text_for_every_rule(acceptance, load):
    engine = load("rnn")
    params = SamplingParams(temperature=1.0, acceptance=acceptance, seed=3)
    first, again = (
        engine.complete(prompt_of(1), params, max_tokens=40, draft=TREE) for _ in range(2)
    )
    assert first.token_ids == again.token_ids
    assert [r.accepted for r in first.rounds] == [r.accepted for r in again.rounds]
    unseeded = SamplingParams(temperature=1.0, acceptance=acceptance)
    a, b = (engine.complete(prompt_of(1), unseeded, max_tokens=40, draft=TREE) for _ in range(2))
    assert a.token_ids != b.token_ids


# ---- where an answer ends


def text_of(engine: Engine, tokens: list[int]) -> str:
    return engine.model.text(tokens)


@pytest.mark.parametrize("draft", [PLAIN, CHAIN, TREE])
def test_every_token_can_stop_the_answer(draft, plain_answers, load):
    engine = load("vanilla")
    answer = plain_answers[0]
    for at, token in enumerate(answer[:24]):
        if token in answer[:at]:
            continue
        found = engine.complete(prompt_of(0), max_tokens=48, draft=draft, stop_token_ids=[token])
        assert found.token_ids == answer[: at + 1]
        assert found.finish_reason == "stop"
        assert found.text == text_of(engine, answer[:at])  # the end token has no text
        assert found.rounds == [] or 0 <= found.rounds[-1].accepted <= draft.tokens


@pytest.mark.parametrize("draft", [PLAIN, CHAIN, TREE])
def test_every_length_limit(draft, plain_answers, load):
    engine = load("gated")
    for n in range(1, 20):
        found = engine.complete(prompt_of(1), max_tokens=n, draft=draft)
        assert found.token_ids == plain_answers[1][:n]
        assert found.finish_reason == "length"
        assert sum(r.accepted for r in found.rounds) + len(found.rounds) + 1 >= n
        assert all(r.accepted <= r.verified <= r.drafted <= draft.tokens for r in found.rounds)
        # Accepted is what was kept: never more than the answer holds.
        assert sum(r.accepted for r in found.rounds) <= n - 1


@pytest.mark.parametrize("draft", [PLAIN, CHAIN, TREE])
def test_stop_strings_across_tokens(draft, plain_answers, load):
    engine = load("vanilla")
    whole = text_of(engine, plain_answers[0])
    for start in range(0, 20, 3):
        stop = whole[start : start + 4]
        found = engine.complete(prompt_of(0), max_tokens=48, draft=draft, stop=[stop, "nowhere"])
        assert found.text == whole[: whole.index(stop)]
        assert found.finish_reason == "stop"
        n = len(found.token_ids)
        assert found.token_ids == plain_answers[0][:n]
        # It stopped with the token that completed the string, not later.
        assert stop in text_of(engine, found.token_ids)
        assert stop not in text_of(engine, found.token_ids[:-1])
    assert (
        engine.complete(prompt_of(0), max_tokens=5, draft=draft, stop="").finish_reason == "length"
    )
    assert engine.complete(prompt_of(0), draft=draft, stop=whole[3:5]).text == whole[:3]


def test_the_end_token_of_the_target_stops_by_default(plain_answers, load):
    engine = load("vanilla")
    # With penalties on what comes in the way, some answer reaches the end token.
    for seed in range(30):
        params = SamplingParams(temperature=1.5, seed=seed)
        found = engine.complete(prompt_of(0), params, max_tokens=200, draft=CHAIN)
        if found.finish_reason == "stop":
            assert found.token_ids[-1] == tiny.EOS_ID
            assert tiny.EOS_ID not in found.token_ids[:-1]
            assert "<|im_end|>" not in found.text
            return
    pytest.fail("no answer ended")


def test_steps_add_up_to_the_result(load):
    engine = load("vanilla")
    steps = list(engine.generate(prompt_of(2), max_tokens=30, draft=TREE))
    result = engine.complete(prompt_of(2), max_tokens=30, draft=TREE)
    assert "".join(s.text for s in steps) == result.text == text_of(engine, result.token_ids)
    assert [t for s in steps for t in s.token_ids] == result.token_ids
    assert [s.finish_reason for s in steps] == [None] * (len(steps) - 1) + ["length"]
    assert steps[0].round is None and steps[0].prefill is not None
    assert all(s.round is not None and s.prefill is None for s in steps[1:])
    for r in result.rounds:
        assert r.seconds.total == pytest.approx(r.seconds.draft + r.seconds.verify + r.seconds.host)
        assert min(r.seconds.draft, r.seconds.verify) > 0
    assert result.tau == (len(result.token_ids) - 1) / len(result.rounds)


# ---- the context


@pytest.mark.parametrize("draft", [PLAIN, CHAIN, TREE])
@pytest.mark.parametrize("length", [200, 240, 250, 254, 255])
def test_a_context_that_fills_up_ends_the_answer(draft, length, load):
    prompt = prompt_of(0, length)
    expected = load(None, n_ctx=512).complete(
        prompt, max_tokens=256 - length, draft=PLAIN, stop_token_ids=[]
    )
    engine = load("vanilla", n_ctx=256)
    found = engine.complete(prompt, draft=draft, stop_token_ids=[])
    assert len(found.token_ids) == 256 - length
    assert found.finish_reason == "length"
    same_text(engine, prompt, expected.token_ids, found.token_ids)
    # And it goes on working.
    engine.complete(prompt_of(0), max_tokens=5, draft=draft)


def test_n_ctx_that_is_no_multiple_of_anything(load):
    engine = load("vanilla", n_ctx=37)
    found = engine.complete(prompt_of(0, 20), draft=TREE, stop_token_ids=[])
    assert len(found.token_ids) == 17 and found.finish_reason == "length"
    assert load(None, n_ctx=0).n_ctx == 2048  # what it was trained with


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([70] * 256, {}, "the prompt has 256 tokens, but the context holds 256"),
        ("word " * 400, {}, "but the context holds 256"),
        ([70, 320], {}, "token 320 is outside the vocabulary of 320"),
        ([-1], {}, "token -1 is outside the vocabulary of 320"),
        ([70], {"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ([70], {"max_tokens": -5}, "max_tokens must be at least 1, not -5"),
    ],
)
def test_bad_requests_are_one_line_and_change_nothing(prompt, options, message, load):
    engine = load("vanilla")
    engine.complete(prompt_of(0), max_tokens=5, draft=CHAIN)
    cached = engine.cached_tokens
    with pytest.raises(LocalspecError, match=message) as caught:
        engine.generate(prompt, **options)
    assert "\n" not in str(caught.value)
    assert engine.cached_tokens == cached
    assert engine.complete([70], max_tokens=2, draft=CHAIN).token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": -1}, "draft tokens must be 0..64, not -1"),
        ({"tokens": 65}, "draft tokens must be 0..64, not 65"),
        ({"width": 0}, "draft width must be 1..32, not 0"),
        ({"width": 33}, "draft width must be 1..32, not 33"),
        ({"policy": "magic"}, "draft policy 'magic' is unknown"),
    ],
)
def test_draft_options_out_of_range(options, message):
    with pytest.raises(LocalspecError, match=message):
        DraftOptions(**options)


# ---- what is kept between answers


@pytest.mark.parametrize("name", [None, "vanilla", "rnn"])
def test_a_known_beginning_is_not_evaluated_again(name, load):
    engine = load(name)
    prompt = prompt_of(3)
    first = engine.complete(prompt, max_tokens=30, draft=TREE)
    assert (first.prompt_tokens, first.processed_tokens) == (len(prompt), len(prompt))
    again = engine.complete(prompt, max_tokens=30, draft=TREE)
    assert again.processed_tokens == 1 and again.token_ids == first.token_ids
    # The next turn: everything up to the last token but one is there.
    cached = engine.cached_tokens
    assert list(cached) == [*prompt, *first.token_ids][: len(cached)]
    assert len(cached) >= len(prompt) + len(first.token_ids) - 1
    turn = [*prompt, *first.token_ids, *prompt_of(4)]
    second = engine.complete(turn, max_tokens=30, draft=TREE)
    assert second.processed_tokens == len(turn) - len(cached) <= 1 + len(prompt_of(4))
    fresh = load(name).complete(turn, max_tokens=30, draft=TREE)
    assert fresh.processed_tokens == len(turn)
    assert second.token_ids == fresh.token_ids
    assert [r.accepted for r in second.rounds] == [r.accepted for r in fresh.rounds]
    # Another ending of the same beginning.
    other = [*turn[:10], 99, 98]
    assert engine.complete(other, max_tokens=5, draft=TREE).processed_tokens == 2


@pytest.mark.parametrize("draft", [PLAIN, CHAIN, TREE])
def test_rounds_with_and_without_drafts_may_be_mixed(draft, plain_answers, load):
    engine = load("vanilla")
    text: list[int] = []
    options = [CHAIN, draft, TREE, PLAIN]
    while len(text) < 40:
        found = engine.complete(
            prompt_of(2) + text, max_tokens=4, draft=options[len(text) // 4 % len(options)]
        )
        text += found.token_ids
        if found.finish_reason == "stop":
            break
    same_text(engine, prompt_of(2), plain_answers[2][: len(text)], text)


def test_a_generator_closed_early_leaves_the_engine_ready(load, plain_answers):
    engine = load("vanilla")
    for steps in range(5):
        running = engine.generate(prompt_of(4), max_tokens=40, draft=TREE)
        for _ in range(steps):
            next(running)
        running.close()
        found = engine.complete(prompt_of(steps), max_tokens=48, draft=CHAIN)
        same_text(engine, prompt_of(steps), plain_answers[steps], found.token_ids)


def test_only_one_generation_at_a_time(load):
    engine = load("vanilla")
    running = engine.generate(prompt_of(0), max_tokens=20, draft=CHAIN)
    next(running)
    with pytest.raises(LocalspecError, match="generating already"):
        engine.complete(prompt_of(1), max_tokens=3, draft=CHAIN)
    rest = [t for step in running for t in step.token_ids]
    assert len(rest) == 19
    assert engine.complete(prompt_of(1), max_tokens=3, draft=CHAIN).token_ids
    # A generator that was never started blocks nothing.
    engine.generate(prompt_of(0))
    assert engine.complete(prompt_of(1), max_tokens=3, draft=CHAIN).token_ids


PHASES = (
    "decode",
    "decode_features",
    "logits",
    "layer_input",
    "seq_copy",
    "seq_remove",
    "seq_keep",
)


class Interrupter:
    """Raises at the n-th of all calls of a context's methods, before or after the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, phases: tuple[str, ...]) -> None:
        self.left, self.after, self.where = -1, False, ""
        for name in phases:
            monkeypatch.setattr(Context, name, self.wrap(name, getattr(Context, name)))

    def wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            hit = self.left == 0
            if hit:
                self.where = name
            if hit and not self.after:
                raise KeyboardInterrupt
            result = real(*args, **options)
            if hit:
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", [None, "vanilla", "rnn"])
def test_an_interrupt_anywhere_leaves_an_engine_like_new(name, after, load, monkeypatch):
    long, short = prompt_of(5, 140) + prompt_of(6), prompt_of(5, 140) + prompt_of(7)
    options: dict[str, Any] = {"max_tokens": 16, "draft": TREE}
    fresh = load(name)
    expected = [fresh.complete(p, **options) for p in (long, short)]
    engine = load(name, n_batch=1)  # raised to the largest tree: the prompt takes three passes
    interrupter = Interrupter(monkeypatch, PHASES)
    interrupter.after = after
    seen = set()
    for call in [*range(1, 40), *range(40, 110, 7)]:
        engine.complete([70, 71], max_tokens=1, draft=TREE)
        interrupter.left, interrupter.where = call, ""
        try:
            engine.complete(long, **options)
            interrupter.left = -1
            break
        except KeyboardInterrupt:
            seen.add(interrupter.where)
        interrupter.left = -1
        # Alternately the same prompt again and one that shares its beginning.
        found = engine.complete((long, short)[call % 2], **options)
        truth = expected[call % 2]
        assert found.token_ids == truth.token_ids, (call, interrupter.where)
        accepted = [[r.accepted for r in run.rounds] for run in (found, truth)]
        assert accepted[0] == accepted[1], (call, interrupter.where)
    wanted = set(PHASES) if name else {"decode", "logits", "seq_remove", "seq_keep"}
    assert seen >= wanted


def test_any_exception_in_the_callers_loop_is_harmless(load, plain_answers):
    engine = load("gated")
    with pytest.raises(RuntimeError, match="mine"):
        for i, _ in enumerate(engine.generate(prompt_of(0), draft=TREE)):
            if i == 3:
                raise RuntimeError("mine")
    gc.collect()
    found = engine.complete(prompt_of(1), max_tokens=48, draft=TREE)
    same_text(engine, prompt_of(1), plain_answers[1], found.token_ids)


# ---- lifetimes


def test_close_twice_and_use_after_close(load):
    engine = load("vanilla")
    running = engine.generate(prompt_of(0), draft=TREE)
    next(running)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.complete(prompt_of(0)),
        lambda: engine.generate("x"),
        lambda: engine.tokenize("x"),
        lambda: next(running),
    ):
        with pytest.raises(LocalspecError, match="closed; load"):
            call()
    with load("vanilla") as other:
        assert other.has_drafter
    with pytest.raises(LocalspecError, match="closed; load"):
        other.complete("x")


def test_several_engines_in_one_process(load, plain_answers):
    engines = [load("vanilla"), load("rnn"), load("vanilla"), load(None)]
    running = [e.generate(prompt_of(i), max_tokens=24, draft=TREE) for i, e in enumerate(engines)]
    texts: list[list[int]] = [[] for _ in engines]
    live = set(range(len(engines)))
    while live:
        for i in sorted(live):
            step = next(running[i], None)
            if step is None:
                live.discard(i)
            else:
                texts[i] += step.token_ids
    for i, text in enumerate(texts):
        same_text(engines[i], prompt_of(i), plain_answers[i][:24], text)
    engines[0].close()
    found = engines[2].complete(prompt_of(3), max_tokens=48, draft=CHAIN)
    same_text(engines[2], prompt_of(3), plain_answers[3], found.token_ids)


def test_engines_that_are_never_closed_are_collected(tiny_target, tiny_drafter):
    for _ in range(3):
        engine = Engine.load(tiny_target.gguf, tiny_drafter("vanilla")[1], n_ctx=256, n_threads=1)
        running = engine.generate(prompt_of(0), draft=TREE)
        next(running)
        next(running)
        del engine, running
        gc.collect()


# ---- loading


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> dict[str, Any]:
    """Targets that the tiny drafters were not made for (tied: quick to build, text is noise)."""
    folder = tmp_path_factory.mktemp("others")
    return {
        name: tiny.build_target(folder / name, tied=True, **options).gguf
        for name, options in {
            "width": {"width": 64},
            "vocab": {"vocab": 384},
            "layers": {"layers": 6},
            "few layers": {"layers": 2},
            "qwen2": {"arch": "qwen2"},
        }.items()
    }


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("width", "its width is 96, the target's is 64"),
        ("vocab", "its vocabulary size is 320, the target's is 384"),
        ("layers", "its number of target layers is 4, the target's is 6"),
        ("few layers", "its number of target layers is 4, the target's is 2"),
        ("qwen2", "is a qwen2 model, and llama.cpp gives no layer features"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(head, target, message, others, tiny_drafter):
    with pytest.raises(LocalspecError, match=message) as caught:
        Engine.load(others[target], tiny_drafter(head)[1], n_ctx=256)
    assert "\n" not in str(caught.value)


def test_targets_without_features_decode_plainly(others):
    with Engine.load(others["qwen2"], n_ctx=256, n_threads=1) as engine:
        assert not engine.has_drafter
        found = engine.complete(prompt_of(0), max_tokens=8, draft=PLAIN)
        assert len(found.token_ids) == 8
        assert all(r.drafted == r.verified == r.accepted == 0 for r in found.rounds)


def test_files_in_each_others_place_are_refused(tiny_target, tiny_drafter, tmp_path):
    target, drafter = tiny_target.gguf, tiny_drafter("gated")[1]
    heads = drafter.with_name("drafter.heads.gguf")
    alone = tmp_path / "alone.gguf"
    shutil.copy(drafter, alone)
    mixed = tmp_path / "mixed.gguf"
    shutil.copy(drafter, mixed)
    other = tiny_drafter("rnn")[1].with_name("drafter.heads.gguf")
    shutil.copy(other, tmp_path / "mixed.heads.gguf")
    for paths, message in [
        ((drafter, None), "is a DSpark or DFlash drafter, not a target"),
        ((drafter, drafter), "is a DSpark or DFlash drafter, not a target"),
        ((heads, None), "is the heads of a drafter, not a target"),
        ((target, target), "is a qwen3 model, not a DSpark, DFlash or Eagle3 drafter"),
        ((target, heads), "is the heads of a drafter, not a DSpark, DFlash or Eagle3 drafter"),
        ((target, alone), "keeps its gated head in alone.heads.gguf, which is missing"),
        ((target, mixed), "belongs to another drafter than mixed.gguf"),
    ]:
        with pytest.raises(LocalspecError, match=message) as caught:
            Engine.load(*paths, n_ctx=256)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("which", ["target", "drafter", "heads"])
@pytest.mark.parametrize("damage", ["missing", "directory", "no gguf", "empty", "cut", "half"])
def test_damaged_files_are_refused(which, damage, tiny_target, tiny_drafter, tmp_path):
    drafter = tiny_drafter("gated")[1]
    files = {
        "target": tmp_path / "target.gguf",
        "drafter": tmp_path / "d.gguf",
        "heads": tmp_path / "d.heads.gguf",
    }
    sources = [tiny_target.gguf, drafter, drafter.with_name("drafter.heads.gguf")]
    for source, to in zip(sources, files.values(), strict=True):
        shutil.copy(source, to)
    victim = files[which]
    data = victim.read_bytes()
    victim.unlink()
    if damage == "directory":
        victim.mkdir()
    elif damage != "missing":
        victim.write_bytes(
            {
                "no gguf": b"safetensors, perhaps" * 10,
                "empty": b"",
                "cut": data[:-100],
                "half": data[: len(data) // 2],
            }[damage]
        )
    with pytest.raises(LocalspecError, match=victim.name) as caught:
        Engine.load(files["target"], files["drafter"], n_ctx=256)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": -1}, "n_ctx must be between"),
        ({"n_threads": -2}, "n_threads at least 0"),
        ({"kv_type": "int3"}, "KV type 'int3' is unknown"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, message, tiny_target):
    with pytest.raises(LocalspecError, match=message):
        Engine.load(tiny_target.gguf, **({"n_ctx": 256} | options))


def test_progress_runs_once_from_start_to_end_over_both_files(tiny_target, tiny_drafter):
    seen: list[float] = []
    Engine.load(
        tiny_target.gguf, tiny_drafter("vanilla")[1], n_ctx=256, progress=seen.append
    ).close()
    assert seen == sorted(seen) and seen[-1] == pytest.approx(1)
    assert any(0 < f <= 0.9 for f in seen) and np.diff(seen).max() < 0.95
    with pytest.raises(LocalspecError, match="cancelled"):
        Engine.load(tiny_target.gguf, n_ctx=256, progress=lambda f: False)


# ---- text


def test_the_text_prompt_is_its_tokens(load):
    engine = load(None)
    text = "<|im_start|>user\nhi<|im_end|>\n"
    tokens = engine.tokenize(text)
    assert tokens[0] == tiny.START_ID and tiny.EOS_ID in tokens
    a, b = (engine.complete(p, max_tokens=9, draft=PLAIN) for p in (text, tokens))
    assert a.token_ids == b.token_ids and a.prompt_tokens == len(tokens)
