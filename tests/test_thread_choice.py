"""The number of threads follows what passes take, on machines that are made up here."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import numpy as np
import pytest

from localspec.cost_curve import CostCurve
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.policy import AutoPolicy
from localspec.thread_choice import LONGEST, SHORTEST, TRIAL, ThreadChoice


def run(choice: ThreadChoice, machine: Callable[[int], float], passes: int) -> float:
    """Let it choose for so many passes; the time they take, a quiet one on all threads being 1."""
    total = 0.0
    for _ in range(passes):
        seconds = machine(choice.count)
        total += seconds
        choice.observe(seconds)
    return total


def quiet(most: int) -> Callable[[int], float]:
    return lambda n: (most / n) ** 0.6


def busy(most: int, cores: int, stall: float, seed: int = 0) -> Callable[[int], float]:
    """So many cores are taken: threads beyond the free ones share, and are held up at times."""
    rng = np.random.default_rng(seed)

    def seconds(n: int) -> float:
        shared = n > most - cores
        return (most / n) ** 0.6 * (2.0 if shared else 1.0) + (
            shared and rng.random() < 0.2
        ) * stall

    return seconds


@pytest.mark.parametrize("most", [1, 2, 4, 6, 8, 16, 64])
def test_a_quiet_machine_is_left_alone(most: int):
    rng = np.random.default_rng(most)
    choice, other = ThreadChoice(most), 0
    for _ in range(5000):
        other += choice.count != most
        # Noise, and now and then a pass that is held up.
        ratio = quiet(most)(choice.count) * float(rng.normal(1.0, 0.05))
        choice.observe(ratio + (rng.random() < 0.005) * 10)
    assert other <= 100


@pytest.mark.parametrize("taken", [1, 2])
@pytest.mark.parametrize("most", [2, 4, 6, 8, 16])
def test_a_busy_machine_gets_fewer(most: int, taken: int):
    if most <= taken:
        pytest.skip("no core is left")
    choice, machine = ThreadChoice(most), busy(most, taken, stall=8.0)
    run(choice, machine, 200)
    total = run(choice, machine, 1000)
    best = min(quiet(most)(n) for n in range(1, most - taken + 1))
    assert total < 1000 * best * 1.35
    assert total < 0.75 * sum(machine(most) for _ in range(1000))


def test_a_machine_that_was_busy_when_it_was_measured():
    """Passes take what they were measured to take, and would be faster on fewer threads."""
    choice = ThreadChoice(2)
    run(choice, lambda n: 1.0 if n == 2 else 0.75, 100)
    assert choice.count == 1
    run(choice, lambda n: 0.5 if n == 2 else 0.75, LONGEST + 3 * TRIAL)
    assert choice.count == 2


def test_the_first_look_is_short():
    for most in (2, 8, 64):
        choice, used = ThreadChoice(most), []
        for _ in range(500):
            used.append(choice.count)
            choice.observe(quiet(most)(choice.count))
        assert set(used) == {most, most - 1}
        assert used.count(most - 1) <= TRIAL


def test_a_machine_that_gets_quiet_again_gets_all_back():
    choice = ThreadChoice(8)
    run(choice, busy(8, 1, stall=8.0), 3000)
    assert choice.count < 8
    run(choice, quiet(8), LONGEST + 4 * TRIAL + 2)
    assert choice.count == 8


def test_a_hot_machine_that_gets_busy_is_not_late():
    """Trials in vain make the next one rare, but only as long as passes stay slow."""
    choice = ThreadChoice(4)
    run(choice, lambda n: 1.6 * quiet(4)(n), 6000)
    run(choice, quiet(4), LONGEST + 100)
    assert choice.count == 4
    run(choice, busy(4, 1, stall=8.0), SHORTEST + 6 * TRIAL)
    assert choice.count < 4


def test_trials_in_vain_get_rare():
    """Slow for another reason, such as heat: fewer threads only make it worse."""
    choice, trials = ThreadChoice(4), 0
    for _ in range(4000):
        trials += choice.count != 4
        choice.observe(1.6 * (4 / choice.count) ** 0.9)
    assert 0 < trials < 2 * TRIAL * (5 + 4000 / LONGEST)  # 3 and 2 threads


def test_bad_trials_end_early_and_get_rare():
    choice, used = ThreadChoice(2), []
    for _ in range(5000):
        used.append(choice.count)
        choice.observe(1.5 if choice.count == 2 else 2.9)
    runs = [(n, len(list(group))) for n, group in groupby(used)]
    assert [length for n, length in runs if n == 1] == [2] * (len(runs) // 2)
    pauses = [length for n, length in runs if n == 2][:-1]
    assert pauses[:6] == [2 * TRIAL, *(SHORTEST * 2**i for i in range(5))]
    assert pauses[6] == LONGEST


def test_costs_are_learned_for_each_number_of_threads():
    curve = CostCurve([1, 8], [0], np.array([[1.0, 4.0]]))
    for _ in range(400):
        curve.observe(1, 0, 1.0)
        curve.observe(8, 0, 3.0)
    assert curve.at(0)[7] / curve.at(0)[0] == pytest.approx(3.0, rel=0.05)
    on_all = curve.at(0).copy()
    curve.on_threads(0.5)
    assert curve.at(0)[7] / curve.at(0)[0] == pytest.approx(4.0 * 2**0.4)
    for _ in range(400):
        curve.observe(1, 0, 1.5)
        curve.observe(8, 0, 7.5)
    assert curve.at(0)[7] / curve.at(0)[0] == pytest.approx(5.0, rel=0.05)
    curve.on_threads(1.0)
    assert np.array_equal(curve.at(0), on_all)
    curve.on_threads(0.5)
    assert curve.at(0)[7] / curve.at(0)[0] == pytest.approx(5.0, rel=0.05)


def slow_passes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Passes on all threads look as if they took three times as long; what was used."""
    used: list[int] = []
    auto = engine._auto
    assert auto is not None
    real = AutoPolicy.observe_pass

    def observe(policy: AutoPolicy, size: int, depth: int, seconds: float) -> None:
        used.append(engine._threads_now)
        expected = float(policy.curve._at_step(depth)[size - 1])
        held_up = policy.threads is not None and engine._threads_now == policy.threads.most
        real(policy, size, depth, expected * (3.0 if held_up else 1.4))

    monkeypatch.setattr(AutoPolicy, "observe_pass", observe)
    return used


def test_an_engine_follows(load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("localspec.loading.default_threads", lambda: 2)
    engine = load("vanilla", n_threads=0, n_ctx=512)
    plain = engine.complete("hello", max_tokens=40, draft=DraftOptions(tokens=0))
    engine.tune()
    used = slow_passes(engine, monkeypatch)
    given: list[int] = []
    for context in engine._contexts:
        real = context.set_threads
        monkeypatch.setattr(context, "set_threads", lambda n, r=real: (given.append(n), r(n)))
    result = engine.complete("hello", max_tokens=40)
    assert result.token_ids == plain.token_ids
    assert used[0] == 2 and used[-1] == 1
    assert [r.threads for r in result.rounds] == used
    assert given == [1] * len(engine._contexts) and len(engine._contexts) == 2
    # The next answer goes on with one thread; what is fixed or deterministic has all of them.
    again = engine.complete("hello", max_tokens=20)
    assert again.rounds[0].threads == 1
    fixed = engine.complete("hello", max_tokens=20, draft=DraftOptions(tokens=0))
    assert {r.threads for r in fixed.rounds} == {2}
    auto = DraftOptions.auto(deterministic=True)
    first, second = (engine.complete("hello", max_tokens=60, draft=auto) for _ in range(2))
    assert {r.threads for r in (*first.rounds, *second.rounds)} == {2}
    assert first.token_ids == second.token_ids
    assert engine.complete("hello", max_tokens=20).rounds[0].threads == 1


def test_a_number_that_was_asked_for_stays(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    engine = load(None, n_threads=2)
    engine.tune()
    used = slow_passes(engine, monkeypatch)
    result = engine.complete("hello", max_tokens=60)
    assert set(used) == {r.threads for r in result.rounds} == {2}


def test_contexts_take_only_what_llama_cpp_does(load: Callable[..., Engine]):
    (context,) = load(None)._contexts
    for n in (0, -1, 513):
        with pytest.raises(LocalspecError, match="threads must be"):
            context.set_threads(n)
    context.set_threads(512)
