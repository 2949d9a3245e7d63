"""Branches from the context: drafts that cost nothing, with or without a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import PLAIN, prompt_of, same_text

import tiny
from localspec.convert import convert
from localspec.engine import DraftOptions, Engine, Result
from localspec.sampling import SamplingParams
from localspec.tree import DraftTree

Load = Callable[..., Engine]
OPTIONS = {"max_tokens": 60, "stop_token_ids": ()}


def with_context(**options: int) -> DraftOptions:
    return DraftOptions(context=True, **options)  # type: ignore[arg-type]


def copying_prompt(engine: Engine, seed: int) -> tuple[list[int], list[int]]:
    """A prompt whose plain continuation is in it already, nearly; and that continuation."""
    start = prompt_of(seed)
    text = engine.complete(start, max_tokens=50, draft=PLAIN, stop_token_ids=()).token_ids
    prompt = [*start, *text, *start]
    return prompt, engine.complete(prompt, draft=PLAIN, **OPTIONS).token_ids


@pytest.mark.parametrize("tokens", [1, 7, 24])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("drafter", [None, "vanilla", "rnn", "dflash"])
def test_greedy_output_is_the_plain_one(load: Load, drafter: str | None, width: int, tokens: int):
    engine = load(drafter)
    equal = 0
    for seed in range(2):
        prompt, plain = copying_prompt(engine, seed)
        result = engine.complete(prompt, draft=with_context(tokens=tokens, width=width), **OPTIONS)
        equal += same_text(engine, prompt, plain, result.token_ids)
        for r in result.rounds:
            assert r.accepted <= r.verified <= tokens
    assert equal


def accepted_lengths(engine: Engine) -> tuple[float, float]:
    """Without and with context, on copying prompts."""
    out = []
    for context in (False, True):
        draft = DraftOptions(tokens=15, width=2, context=context)
        results = [
            engine.complete(copying_prompt(engine, seed)[0], draft=draft, **OPTIONS)
            for seed in range(3)
        ]
        out.append(float(np.mean([result.tau for result in results])))
    print(f"accepted length {out[0]:.2f} without, {out[1]:.2f} with context")
    return out[0], out[1]


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that copies faithfully, and a drafter that is often wrong."""
    folder = tmp_path_factory.mktemp("copier")
    target = tiny.build_target(folder / "target", noise=0.0)
    drafter = tiny.build_drafter(folder / "drafter", target, base_noise=2.5)
    assert target.gguf is not None
    convert(drafter.path, target.gguf, folder / "drafter.gguf", outtype="f32")
    return target.gguf, folder / "drafter.gguf"


@pytest.mark.parametrize("with_drafter", [False, True])
def test_a_copying_prompt_is_accepted_far_more(copier: tuple[Path, Path], with_drafter: bool):
    target, drafter = copier
    with Engine.load(target, drafter if with_drafter else None, n_ctx=256, n_threads=1) as engine:
        without, with_ = accepted_lengths(engine)
    if not with_drafter:
        assert without == 1
    assert with_ > 3 * without


@pytest.mark.parametrize(("drafter", "gain"), [(None, 2.0), ("plain", 1.5), ("vanilla", 1.2)])
def test_a_copy_with_changes_is_accepted_more(load: Load, drafter: str | None, gain: float):
    # The tiny target does not copy faithfully, and its drafters leave less to gain.
    without, with_ = accepted_lengths(load(drafter))
    assert with_ > gain * without


def test_what_the_text_repeats_of_itself_is_drafted_too(load: Load):
    # Nothing repeats in the prompt; greedy text of this model falls into its cycle soon.
    engine = load(None)
    prompt = prompt_of(3)
    options = {"max_tokens": 200, "stop_token_ids": ()}
    plain = engine.complete(prompt, draft=PLAIN, **options)
    result = engine.complete(prompt, draft=with_context(tokens=7), **options)
    same_text(engine, prompt, plain.token_ids, result.token_ids)
    drafted = [r.drafted for r in result.rounds]
    assert drafted[0] == 0 and max(drafted) == 7
    assert max(r.accepted for r in result.rounds) == 7


def test_branch_and_tree_share_nodes(load: Load):
    # What drafter and context agree on is verified once, and a budget holds for both together.
    engine = load("vanilla")
    prompt, _ = copying_prompt(engine, 0)
    trees: list[DraftTree] = []
    engine.on_verified = lambda tree, path: trees.append(tree)
    engine.complete(prompt, draft=with_context(tokens=10, width=2), **OPTIONS)
    for tree in trees:
        tree.validate()
        assert len(tree) <= 10 and len(tree.leaves) <= engine._target.max_leaves
    assert any(len(tree.leaves) > 1 for tree in trees)
    # Behind the block (7 depths) only the context drafts.
    assert any(tree.depth.max() > 7 for tree in trees)


@pytest.fixture(scope="module")
def featureless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A target that llama.cpp takes no layer features from; it copies well."""
    target = tiny.build_target(tmp_path_factory.mktemp("qwen2"), arch="qwen2", noise=0.05)
    with Engine.load(target.gguf, n_ctx=256, n_threads=1) as engine:  # type: ignore[arg-type]
        yield engine


def test_a_target_without_layer_features(featureless: Engine):
    for seed in range(3):
        prompt, plain = copying_prompt(featureless, seed)
        result = featureless.complete(prompt, draft=with_context(tokens=7), **OPTIONS)
        same_text(featureless, prompt, plain, result.token_ids)
        print(f"accepted length {result.tau:.2f}")
        assert result.tau > 2


def sampled(engine: Engine, prompt: list[int], draft: DraftOptions, rule: str, seed: int) -> Result:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=seed, acceptance=rule)
    return engine.complete(prompt, params, draft=draft, **OPTIONS)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("drafter", [None, "vanilla"])
def test_matched_samples_are_the_plain_ones(load: Load, drafter: str | None, width: int):
    # The token at each place is the one that its uniform number picks, drafted or not; only
    # rounding can move the edge between two tokens across a number.
    engine = load(drafter)
    draft = with_context(tokens=9, width=width)
    equal, accepted = 0, 0
    for seed in range(6):
        prompt, _ = copying_prompt(engine, seed)
        plain = sampled(engine, prompt, PLAIN, "match", seed)
        result = sampled(engine, prompt, draft, "match", seed)
        equal += result.token_ids == plain.token_ids
        accepted += sum(r.accepted for r in result.rounds)
    assert equal >= 5
    assert accepted > 0


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("drafter", [None, "vanilla", "gated"])
def test_rejection_with_branches(load: Load, drafter: str | None, width: int):
    engine = load(drafter)
    trees: list[DraftTree] = []
    engine.on_verified = lambda tree, path: trees.append(tree)
    draft = with_context(tokens=12, width=width)
    accepted = 0
    for seed in range(3):
        prompt, _ = copying_prompt(engine, seed)
        result = sampled(engine, prompt, draft, "rejection", seed)
        assert len(result.token_ids) == 60
        again = sampled(engine, prompt, draft, "rejection", seed)
        assert again.token_ids == result.token_ids
        accepted += sum(r.accepted for r in result.rounds)
    assert accepted > 0
    fixed = 0
    for tree in trees:
        tree.validate()
        assert len(tree) <= 12
        fixed += sum(p.fixed for p in (tree.proposals or {}).values())
    assert fixed > 0


def test_no_context_draft_without_a_budget_or_at_the_last_token(load: Load):
    engine = load(None)
    prompt, plain = copying_prompt(engine, 0)
    result = engine.complete(prompt, draft=with_context(tokens=0), **OPTIONS)
    assert result.token_ids == plain and all(r.drafted == 0 for r in result.rounds)
    for most in (1, 2, 3):
        options = {"max_tokens": most, "stop_token_ids": ()}
        result = engine.complete(prompt, draft=with_context(tokens=7), **options)
        assert len(result.token_ids) == most
        assert all(r.drafted < most for r in result.rounds)


def test_the_context_may_run_full(load: Load):
    engine = load("vanilla", n_ctx=160)
    prompt, _ = copying_prompt(engine, 0)
    options = {"max_tokens": None, "stop_token_ids": ()}
    plain = engine.complete(prompt, draft=PLAIN, **options)
    result = engine.complete(prompt, draft=with_context(tokens=24, width=2), **options)
    same_text(engine, prompt, plain.token_ids, result.token_ids)
    assert len(prompt) + len(result.token_ids) == 160
