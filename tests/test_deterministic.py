"""Deterministic generations: the same tokens in the same rounds, whatever the clock says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import PLAIN, prompt_of, same_text

from localspec import determinism, drafting, tuning
from localspec import engine as engine_module
from localspec.engine import DraftOptions, Engine, Result
from localspec.sampling import SamplingParams
from localspec.tuning import Tuning

# Speculation pays here by little, so that small changes of the curve change what is chosen.
CURVE = Tuning([1, 2, 4, 8, 64], [0], [[0.001, 0.0011, 0.0013, 0.0019, 0.009]], 1e-4, 1e-5, 0.0)
OPTIONS = DraftOptions.auto(deterministic=True)
RANDOM = DraftOptions.auto()
SAMPLING = {
    "greedy": SamplingParams(),
    "match": SamplingParams(temperature=1.0, seed=7, acceptance="match"),
    "rejection": SamplingParams(temperature=1.0, seed=7, acceptance="rejection"),
}
Outcome = tuple[list[int], list[tuple[int, ...]]]


@pytest.fixture
def jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that tells anything between a microsecond and a second for every interval."""
    rng, now = np.random.default_rng(5), [0.0]

    def perf_counter() -> float:
        now[0] += float(10 ** rng.uniform(-6, 0))
        return now[0]

    clock = types.SimpleNamespace(perf_counter=perf_counter)
    for module in (engine_module, drafting):
        monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def tuned(load: Callable[..., Engine]) -> Iterator[Callable[..., Engine]]:
    """Fresh engines whose tuning is stored."""

    def get(name: str | None = "vanilla", **options: Any) -> Engine:
        engine = load(name, **options)
        tuning.save(engine._tuning_file(), CURVE)
        return engine

    yield get


def outcome(result: Result) -> Outcome:
    """Tokens, and everything that was chosen."""
    rounds = [
        (r.drafted, r.chosen, r.verified, r.accepted, r.paused, r.probing) for r in result.rounds
    ]
    return result.token_ids, rounds


def run(engine: Engine, params: SamplingParams, options: DraftOptions = OPTIONS) -> Outcome:
    return outcome(engine.complete(prompt_of(3), params, max_tokens=90, draft=options))


def disturb(engine: Engine, seed: int) -> None:
    """Leave other odds, times and cells behind."""
    sampling = SamplingParams(temperature=1.0, seed=seed)
    engine.complete(prompt_of(seed), sampling, max_tokens=40, draft=RANDOM)
    engine.complete(prompt_of(3), max_tokens=10 + seed, draft=RANDOM)


@pytest.mark.usefixtures("jitter")
@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_same_again_in_one_engine_and_in_another(tuned: Callable[..., Engine], sampling: str):
    params, engine = SAMPLING[sampling], tuned()
    first = run(engine, params)
    assert len(first[0]) == 90 or engine.model.is_end(first[0][-1])
    assert any(chosen for _, chosen, *_ in first[1])
    for seed in (1, 2):
        disturb(engine, seed)
        assert run(engine, params) == first
    assert run(tuned(), params) == first


@pytest.mark.usefixtures("jitter")
def test_without_it_the_clock_and_the_past_decide(tuned: Callable[..., Engine]):
    """What makes the test above one that can fail."""
    engine, found = tuned(), []
    for seed in (1, 2, 3):
        found.append(run(engine, SAMPLING["greedy"], RANDOM))
        disturb(engine, seed)
    assert any(other[1] != found[0][1] for other in found[1:])


def test_the_curve_and_the_odds_are_left_alone(tuned: Callable[..., Engine]):
    engine = tuned()
    engine.complete(prompt_of(1), max_tokens=30, draft=RANDOM)
    assert engine._auto is not None
    before = engine._auto.curve.at(0).copy(), engine._auto.survival.offsets.copy()
    run(engine, SAMPLING["greedy"])
    assert np.array_equal(engine._auto.curve.at(0), before[0])
    assert np.array_equal(engine._auto.survival.offsets, before[1])


@pytest.mark.parametrize("sampling", ["greedy", "rejection"])
def test_another_process_says_the_same(tuned: Callable[..., Engine], sampling: str, tmp_path: Path):
    engine, params = tuned(), SAMPLING[sampling]
    here = run(engine, params)
    script = (
        "import json, sys\n"
        "from test_deterministic import SAMPLING, run\n"
        "from localspec.engine import Engine\n"
        "target, drafter, sampling = sys.argv[1:]\n"
        "with Engine.load(target, drafter, n_ctx=256, n_threads=1) as engine:\n"
        "    assert engine.tuned\n"
        "    print(json.dumps(run(engine, SAMPLING[sampling])))\n"
    )
    # conftest gives every process a cache of its own.
    script = script.replace(
        "from localspec", "os.environ['LOCALSPEC_CACHE'] = cache\nfrom localspec", 1
    )
    script = f"import os\ncache = {os.environ['LOCALSPEC_CACHE']!r}\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, engine._files), sampling],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    assert there[0] == here[0]
    assert [tuple(r) for r in there[1]] == here[1]


def test_where_single_rows_round_differently_every_pass_has_two_to_eight(
    tuned: Callable[..., Engine],
):
    engine = tuned()
    engine._single_rows_differ = True
    ids, rounds = run(engine, SAMPLING["greedy"])
    assert {verified for _, _, verified, *_ in rounds} <= set(range(1, 8))
    assert run(engine, SAMPLING["greedy"]) == (ids, rounds)
    plain = engine.complete(prompt_of(3), max_tokens=90, draft=PLAIN)
    same_text(engine, prompt_of(3), plain.token_ids, ids)
    # A padded row is no speculation: nothing was chosen where drafting does not pay.
    dear = Tuning([1, 2, 64], [0], [[0.001, 0.05, 3.2]], 1.0, 1e-3, 0.0)
    tuning.save(engine._tuning_file(), dear)
    engine.tune()
    ids, rounds = run(engine, SAMPLING["greedy"])
    assert all(verified >= 1 for _, _, verified, *_ in rounds)
    assert any(chosen == 0 for _, chosen, *_ in rounds)
    assert any(paused for *_, paused, _ in rounds)
    same_text(engine, prompt_of(3), plain.token_ids, ids)


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        DraftOptions(tokens=0, deterministic=True),
        DraftOptions(tokens=5, width=2, deterministic=True),
        DraftOptions(tokens=5, context=True, deterministic=True),
    ],
    ids=["plain", "tree", "context"],
)
def test_fixed_drafts_can_be_deterministic_too(
    load: Callable[..., Engine], options: DraftOptions, differ: bool
):
    engine = load("vanilla")
    engine._single_rows_differ = differ
    first = run(engine, SAMPLING["match"], options)
    disturb(engine, 4)
    assert run(engine, SAMPLING["match"], options) == first
    sizes = {verified for _, _, verified, *_ in first[1]}
    assert sizes == {0} if options.tokens == 0 else (0 not in sizes or not differ)


def test_the_whole_prompt_is_evaluated_again(tuned: Callable[..., Engine]):
    engine, prompt = tuned(), prompt_of(3)
    engine.complete(prompt, max_tokens=5)
    assert engine.complete(prompt, max_tokens=5).processed_tokens == 1
    again = engine.complete(prompt, max_tokens=5, draft=OPTIONS)
    assert again.processed_tokens == len(prompt)


def test_looking_for_kernels_leaves_the_engine_usable(load: Callable[..., Engine]):
    engine, prompt = load("vanilla"), prompt_of(2)
    expected = engine.complete(prompt, max_tokens=20, draft=PLAIN).token_ids
    assert determinism.single_rows_differ(engine) in (False, True)
    assert engine.cached_tokens == ()
    assert engine.complete(prompt, max_tokens=20, draft=PLAIN).token_ids == expected
    assert determinism.single_rows_differ(load(None, n_ctx=32))  # no room to look


def test_stats_tell_pauses_and_probes(tuned: Callable[..., Engine]):
    """The drafter that costs more than it saves is left alone, and the rounds say so."""
    engine = tuned()
    dear = Tuning([1, 2, 64], [0], [[0.001, 0.02, 1.0]], 1e-4, 0.0, 0.0)
    tuning.save(engine._tuning_file(), dear)
    engine._single_rows_differ = False
    options = DraftOptions(policy="auto", tokens=63, width=4, deterministic=True)
    result = engine.complete(prompt_of(5, 20), max_tokens=200, draft=options, stop_token_ids=())
    assert all(r.drafted == r.verified == 0 for r in result.rounds if r.paused)
    assert all(r.drafted > 0 and r.chosen == 0 for r in result.rounds if r.probing)
    assert result.paused > 10 * result.probes > 0
