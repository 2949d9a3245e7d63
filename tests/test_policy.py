"""The policy on numbers made up for the purpose: costs, odds, choices, pauses."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from conftest import PLAIN, prompt_of
from hypothesis import given
from hypothesis import strategies as st

from localspec import tuning
from localspec.cost_curve import SIZES, CostCurve
from localspec.engine import DraftOptions, Engine
from localspec.odds import ContextOdds, RankOdds, Survival
from localspec.pacing import Pacing
from localspec.policy import AutoPolicy, best_size
from localspec.tree import DraftTree, merge_branch


def curve(ms: dict[int, float]) -> CostCurve:
    return CostCurve(list(ms), [0], np.array([list(ms.values())]) / 1e3)


def test_measured_sizes_are_returned_as_measured_and_kernel_steps_stay_steps():
    c = curve({1: 10.0, 8: 40.0, 9: 22.0, 16: 22.0, 17: 30.0})
    at = c.at(0)
    assert at[[0, 7, 8, 15, 16]] * 1e3 == pytest.approx([10, 40, 22, 22, 30])
    assert at[11] * 1e3 == pytest.approx(22)  # 9..16 cost the same


def test_depth_is_interpolated_and_extrapolated():
    c = CostCurve([1, 2], [0, 128], np.array([[1.0, 2.0], [2.0, 4.0]]))
    assert c.at(64)[0] == pytest.approx(1.5)
    assert c.at(256)[1] == pytest.approx(6.0)


def test_a_busy_machine_changes_no_ratio_and_one_outlier_next_to_nothing():
    c = curve({1: 10.0, 2: 15.0, 4: 20.0, 8: 30.0})
    before = c.at(0).copy()
    for _ in range(200):
        for n in (1, 2, 4, 8):
            c.observe(n, 0, 3 * before[n - 1])
    after = c.at(0)
    assert after / after[0] == pytest.approx(before / before[0], rel=0.02)
    c = curve({1: 10.0, 2: 15.0, 4: 20.0, 8: 30.0})
    c.observe(4, 0, 5.0)  # 250 times too slow
    assert c.at(0) == pytest.approx(before, rel=0.03)


def test_a_size_that_costs_something_else_is_learned():
    c = curve({1: 10.0, 2: 15.0, 4: 20.0, 8: 30.0})
    for _ in range(300):
        c.observe(1, 0, 0.010)
        c.observe(4, 0, 0.040)
    assert c.at(0)[3] / c.at(0)[0] == pytest.approx(4.0, rel=0.1)


@given(
    st.lists(st.floats(0.0, 1.0), max_size=12),
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=13),
    st.floats(0.0, 5.0),
)
def test_best_size_is_the_best_of_all(survival: list[float], cost: list[float], fixed: float):
    a = np.sort(np.array(survival))[::-1]
    t = np.array(cost)
    n, rate = best_size(a, t, fixed)
    every = [(1 + a[:k].sum()) / (fixed + t[k]) for k in range(min(len(a), len(t) - 1) + 1)]
    assert rate == pytest.approx(max(every))
    assert every[n] == pytest.approx(max(every))


def test_flat_costs_are_used_up_and_steep_ones_left_alone():
    """On tensor cores 9..16 tokens cost the same; on this kind of CPU the second costs 0.7."""
    a = np.full(40, 0.2)
    flat = np.concatenate([np.linspace(1, 2, 8), np.full(8, 1.5), np.full(16, 1.7)])
    assert best_size(a, flat, 0.1)[0] in (15, 31)
    assert best_size(a, 1 + 0.7 * np.arange(40), 0.0)[0] == 0


def test_survival_learns_that_a_drafter_is_wrong_within_tens_of_tokens():
    s = Survival(3, slope=1.0, offsets=[0.0] * 3)
    log_p = np.log(np.array([[0.9]], np.float32))
    assert np.exp(s.log_odds(0, log_p)) == pytest.approx(0.9, abs=1e-3)
    for _ in range(40):
        s.observe(0, float(np.exp(s.log_odds(0, log_p)[0, 0])), False)
    assert np.exp(s.log_odds(0, log_p)) < 0.5
    assert np.exp(s.log_odds(1, log_p)) == pytest.approx(0.9, abs=1e-3)


@given(st.lists(st.floats(-20, -1e-4), min_size=2, max_size=8), st.floats(-4, 4))
def test_survival_keeps_the_order_and_never_exceeds_one(log_p: list[float], offset: float):
    ordered = np.sort(np.array([log_p], np.float32))[:, ::-1]
    odds = Survival(1, offsets=[offset]).log_odds(0, ordered)
    assert (odds <= 0).all()
    assert (np.diff(odds) <= 1e-6).all()


def test_context_odds_rise_with_the_match_and_follow_the_text():
    c = ContextOdds()
    odds = c.odds(2, 20)
    assert len(odds) == 20
    assert (np.diff(odds) > 0).all()
    for _ in range(50):
        c.observe(5, False)
    assert c.odds(4, 3) == pytest.approx([0.081, 0.086, 0.8], abs=0.001)
    assert c.odds(5, 1)[0] < 0.2 < c.odds(20, 1)[0]
    assert odds[3] > 0.7  # what was given stays what it was


def test_context_odds_of_the_longest_matches_are_those_of_a_long_one():
    c = ContextOdds()
    for _ in range(50):
        c.observe(10_000, False)
    assert len(c.odds(100, 40)) == len(c.odds(5_000, 40)) == 40
    assert c.odds(100, 40) == pytest.approx(0.11, abs=0.001)
    assert c.odds(5_000, 1)[0] == c.odds(5_100, 3)[2] == c.odds(c.LONGEST - 1, 1)[0]


@given(st.lists(st.tuples(st.integers(2, 80), st.booleans()), max_size=60))
def test_context_odds_are_smoothed_counts_of_their_class(seen: list[tuple[int, bool]]):
    c = ContextOdds()
    for length, right in seen:
        c.observe(length, right)
    edges = (0, *c.EDGES, 10**6)
    for length in (2, 3, 5, 9, 16, 33, 60):
        low, high = next((a, b) for a, b in pairwise(edges) if a <= length < b)
        right_sum = seen_sum = 0.0
        for n, right in seen:
            if low <= n < high:
                right_sum = c.MEMORY * right_sum + right
                seen_sum = c.MEMORY * seen_sum + 1
        expected = (right_sum + c.PRIOR * length / (length + 1.5)) / (seen_sum + c.PRIOR)
        assert c.odds(length, 1)[0] == pytest.approx(np.clip(expected, 0.01, 0.999))


def test_probing_a_useless_drafter_stays_below_one_percent():
    pacing, spent, total = Pacing(), 0.0, 0.0
    plain, probe = 1.0, 1.6
    for i in range(20_000):
        if pacing.ask():
            pacing.observe(1.02, plain + probe, plain, probe)
            spent, total = spent + (probe if i else 0.0), total + plain + probe
        else:
            total += plain
    assert spent / total < 0.01


@pytest.mark.parametrize(("tokens", "times"), [(1.0, 3), (2.55, 1)])
def test_probes_get_rarer_only_where_the_drafter_is_far_from_paying(tokens: float, times: int):
    pacing, asked = Pacing(), []
    for i in range(3_000):
        if pacing.ask():
            asked.append(i)
            pacing.observe(tokens, 2.5 if tokens > 1 else 1.6, 1.0, 0.6)
    assert not pacing.pays
    assert asked[-1] - asked[-2] - 1 == pytest.approx(times * 60, rel=0.05)


def test_a_drafter_that_pays_is_asked_every_round_and_comes_back_after_a_pause():
    pacing = Pacing()
    for _ in range(100):
        assert pacing.ask()
        pacing.observe(3.0, 2.0, 1.0, 0.1)
    for _ in range(60):
        if pacing.ask():
            pacing.observe(1.0, 2.0, 1.0, 0.1)
    assert not pacing.pays
    asked = 0
    for _ in range(400):
        if pacing.ask():
            asked += 1
            pacing.observe(4.0, 2.0, 1.0, 0.1)
    assert asked > 200


def test_auto_takes_a_sure_branch_and_leaves_an_unlikely_one():
    auto = AutoPolicy(
        curve({1: 10.0, 2: 15.0, 4: 20.0, 8: 30.0}), block_seconds=0.0, host_seconds=0.0, depths=0
    )
    assert auto.choose_branch(np.array([0.99, 0.99, 0.99]), 10) == 3
    assert auto.choose_branch(np.array([0.99, 0.99, 0.05]), 10) == 2
    assert auto.choose_branch(np.array([0.1, 0.5, 0.2]), 10) == 0


def test_a_confident_drafter_that_is_wrong_is_left_alone_within_twenty_rounds():
    auto = AutoPolicy(
        curve({1: 10.0, 2: 12.0, 4: 16.0, 8: 24.0}), block_seconds=0.001, host_seconds=0.0, depths=3
    )
    tree = DraftTree.chain([1, 2, 3], np.log([0.9, 0.85, 0.8]))
    sizes = []
    for _ in range(20):
        sizes.append(len(auto.choose(tree, 10)))
        auto.learn_draft(tree, [9])
    assert sizes[0] == 3
    assert sizes[-5:] == [0] * 5


@given(
    st.lists(st.tuples(st.integers(2, 80), st.booleans()), max_size=60),
    st.integers(2, 100),
    st.lists(st.floats(1.0, 30.0), min_size=8, max_size=8),
)
def test_no_branch_that_would_be_chosen_is_called_hopeless(
    seen: list[tuple[int, bool]], length: int, ms: list[float]
):
    auto = AutoPolicy(
        curve(dict(enumerate(ms, start=1))), block_seconds=0.0, host_seconds=0.0, depths=0
    )
    for n, right in seen:
        auto.context.observe(n, right)
    chosen = auto.choose_branch(auto.context.odds(length, 7), 10)
    assert auto.promising(length, 10) or not chosen


def test_what_a_repeat_promises_follows_the_text_within_some_rounds():
    auto = AutoPolicy(
        curve({1: 10.0, 2: 15.0, 4: 20.0, 8: 30.0}), block_seconds=0.0, host_seconds=0.0, depths=0
    )
    assert auto.promising(20, 10)
    for _ in range(30):
        auto.context.observe(20, False)
    answers = [auto.promising(20, 10) for _ in range(ContextOdds.FRESH + 1)]
    assert answers[0]
    assert not answers[-1]


def test_auto_learns_from_siblings_along_the_committed_path():
    auto = AutoPolicy(curve({1: 1.0, 2: 2.0}), block_seconds=0.1, host_seconds=0.0, depths=2)
    tree = merge_branch(DraftTree.empty(), [1, 2], np.log([0.5, 0.25]).tolist())
    start = auto.survival.start
    auto.learn_draft(tree, [1, 9])
    assert auto.survival.offsets[0] > start[0]  # right at depth 1
    assert auto.survival.offsets[1] < start[1]  # wrong at depth 2
    second = auto.survival.offsets[1]
    auto.learn_draft(tree, [7, 2])
    assert auto.survival.offsets[1] == second  # never reached: nothing learned


def test_a_draft_that_was_broken_off_teaches_nothing_later():
    auto = AutoPolicy(curve({1: 1.0, 2: 1.1, 4: 1.2}), block_seconds=0.0001, depths=3)
    tree = DraftTree.chain([1, 2, 3], np.log([0.9, 0.8, 0.7]))
    survival = np.exp(tree.score.astype(np.float64))
    auto.choose(tree, 10)  # cancelled before anything came of it
    auto.learn_draft(DraftTree.empty(), [7])
    auto.learn_draft(tree, [1, 2, 3])
    assert auto.ranks.correct(survival) == pytest.approx(survival)
    auto.choose(tree, 10)
    auto.learn_draft(tree, [9])
    assert (auto.ranks.correct(survival) < survival).all()


def test_ranks_that_come_true_less_often_than_predicted_are_marked_down():
    ranks = RankOdds()
    tree = DraftTree.chain([1, 2, 3, 4], np.log([0.9, 0.8, 0.7, 0.6]))
    survival = np.exp(tree.score.astype(np.float64))
    assert ranks.correct(survival) == pytest.approx(survival)
    for _ in range(60):
        ranks.observe(tree, [1, 2, 9])  # two right, the third wrong, the fourth wrong with it
    corrected = ranks.correct(survival)
    assert corrected[0] == pytest.approx(1.0, abs=0.03)
    assert corrected[1] == pytest.approx(1.0, abs=0.03)
    assert corrected[2] < 0.05
    assert corrected[3] < 0.05


def test_nodes_beyond_what_was_committed_teach_nothing():
    ranks = RankOdds()
    tree = DraftTree.chain([1, 2, 3], np.log([0.9, 0.8, 0.7]))
    for _ in range(60):
        ranks.observe(tree, [1])
    corrected = ranks.correct(np.exp(tree.score.astype(np.float64)))
    assert corrected[1:] == pytest.approx([0.8, 0.7], abs=1e-6)


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12),
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=13),
    st.floats(0.0, 5.0),
    st.floats(0.0, 10.0),
)
def test_a_higher_usual_speed_never_makes_a_round_longer(
    survival: list[float], cost: list[float], fixed: float, usual: float
):
    a, t = np.sort(np.array(survival))[::-1], np.sort(np.array(cost))
    slow, _ = best_size(a, t, fixed, usual)
    fast, _ = best_size(a, t, fixed, usual + 1.0)
    assert t[fast] <= t[slow] + 1e-12


def test_a_paused_drafter_resumes_after_one_probe_that_pays():
    pacing = Pacing()
    for _ in range(500):
        if pacing.ask():
            pacing.observe(1.0, 1.3, 1.0, 0.3)
    assert pacing.pause == 90
    waited = 0
    while not pacing.ask():
        waited += 1
    assert waited <= 90
    pacing.observe(4.0, 2.0, 1.0, 0.3)
    assert pacing.pays
    assert pacing.ask()


def test_a_drafter_gets_no_credit_for_a_repeat_in_the_text():
    """A text that loops is drafted without it; asking it all the same would only cost."""

    def rounds(*, shared: bool) -> AutoPolicy:
        auto = AutoPolicy(
            curve({n: 8.0 + 2 * n for n in (1, 2, 4, 8, 16)}), block_seconds=0.004, depths=3
        )
        odds = np.full(15, 0.98)
        for _ in range(30):
            tree = DraftTree.chain([1, 2, 3], np.log([0.98, 0.9, 0.8]))
            merged = merge_branch(tree, [9] * 15, np.cumsum(np.log(odds)).tolist())
            auto.choose(merged if shared else tree, 100, odds if shared else None)
        return auto

    assert rounds(shared=False).pacing.pays
    assert not rounds(shared=True).pacing.pays
    # What it adds to a repeat that is not worth verifying by itself is all its own.
    auto = AutoPolicy(curve({1: 10.0, 2: 11.0, 4: 12.0}), block_seconds=0.002, depths=3)
    tree = DraftTree.chain([1, 2, 3], np.log([0.9, 0.8, 0.7]))
    for _ in range(30):
        auto.choose(merge_branch(tree, [9], [np.log(0.05)]), 100, np.array([0.05]))
    assert auto.pacing.pays


def test_tuning_is_measured_once_and_cached(load: Callable[..., Engine], tmp_path: Path):
    engine = load("vanilla")
    path = tmp_path / "t.json"
    found = tuning.measure(engine)
    assert found.sizes == [n for n in SIZES if n <= 65]
    assert all(s > 0 for row in found.seconds for s in row)
    assert found.block_seconds > 0
    assert engine.cached_tokens == ()
    tuning.save(path, found)
    assert tuning.load(path) == found
    path.write_text(json.dumps({"sizes": [1]}))
    assert tuning.load(path) is None
    path.write_text("no json")
    assert tuning.load(path) is None


def test_the_price_of_another_size_is_found_on_a_machine_that_slows_down(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
):
    """Twice as slow after the first passes: only neighbours in time may be compared."""
    passes, before = 0, 0

    def seconds(_engine: Engine, tokens: list[int], *_: object, repeats: int) -> float:
        nonlocal passes, before
        best = np.inf
        for _ in range(repeats):
            pace = 1.0 if passes < 20 else 2.0 + 0.001 * passes
            best = min(best, pace * (0.010 + 0.002 * len(tokens)))
            best += 0.0005 * (before != len(tokens))
            passes, before = passes + 1, len(tokens)
        return best

    monkeypatch.setattr(tuning, "_pass_seconds", seconds)
    assert tuning.measure(load("vanilla")).switch_seconds == pytest.approx(0.0005, abs=0.0001)


def test_a_tuning_that_runs_out_of_time_is_extrapolated(load: Callable[..., Engine]):
    ticks = iter(np.arange(0, 1e6, 0.2))
    found = tuning.measure(load("vanilla"), budget=3.0, clock=lambda: float(next(ticks)))
    assert found.sizes[-1] == 64
    assert len(found.seconds[0]) == len(found.sizes)


@pytest.mark.parametrize("drafter", [None, "vanilla", "rnn"])
def test_auto_gives_the_plain_text_whatever_it_chooses(
    load: Callable[..., Engine], drafter: str | None
):
    plain, engine = load(None), load(drafter)
    engine.tune()
    assert engine._auto is not None
    sizes = set()
    for seed, ms in enumerate(
        [{1: 1.0, 64: 1.1}, {1: 1.0, 2: 50.0, 64: 60.0}, {1: 1.0, 4: 2.0, 5: 9.0, 64: 9.5}]
    ):
        engine._auto.curve = curve(ms)
        for k in range(3):
            ids = prompt_of(10 * seed + k)
            result = engine.complete(ids, max_tokens=40, draft=DraftOptions.auto())
            expected = plain.complete(ids, max_tokens=40, draft=PLAIN)
            assert result.token_ids == expected.token_ids
            sizes |= {r.verified for r in result.rounds}
    assert len(sizes) > 2 if drafter else sizes


def test_the_default_is_auto_and_short_contexts_decode_plainly(load: Callable[..., Engine]):
    engine = load("vanilla", n_ctx=96)
    result = engine.complete(prompt_of(1), max_tokens=20)
    assert all(r.verified == 0 for r in result.rounds)
    roomy = load("vanilla")
    assert not roomy._auto
    roomy.complete(prompt_of(1), max_tokens=5)
    assert roomy._auto is not None


def test_the_drafter_window_bounds_what_the_drafter_keeps(load: Callable[..., Engine]):
    plain = load(None, n_ctx=1500)
    engine = load("vanilla", n_ctx=1500, drafter_window=64)
    ids = prompt_of(3, 900)
    options = DraftOptions(tokens=7)
    expected = plain.complete(ids, max_tokens=200, draft=PLAIN).token_ids
    assert engine.complete(ids, max_tokens=200, draft=options).token_ids == expected
    drafter = engine._drafter
    assert drafter is not None
    kept = drafter.n_absorbed - drafter._first
    assert kept <= 64 + 256
    # Going back further than the window starts the drafter, and so everything, anew.
    short = engine.complete(ids[:100], max_tokens=20, draft=options)
    assert short.processed_tokens == 100
    assert short.token_ids == plain.complete(ids[:100], max_tokens=20, draft=PLAIN).token_ids


def test_switching_the_size_of_passes_has_its_price():
    auto = AutoPolicy(
        curve({1: 10.0, 2: 14.0, 3: 15.0}), block_seconds=0.0, switch_seconds=0.004, depths=0
    )
    odds = np.array([0.8, 0.5 / 0.8])
    assert auto.choose_branch(odds, 0) == 0  # 2.3 tokens for 15 + 2 * 4 ms
    auto.last_size = 3
    assert auto.choose_branch(odds, 0) == 2  # for 15 ms: the graph is there


def test_pauses_are_as_long_as_probes_really_take():
    tree = DraftTree.chain([1, 2, 3], np.log([0.2, 0.1, 0.05]))
    pauses = []
    for taken in (0.001, 0.010):
        auto = AutoPolicy(curve({1: 10.0, 2: 18.0, 4: 30.0}), block_seconds=0.005, depths=3)
        auto.observe_probe(taken)
        auto.choose(tree, 10)
        assert not auto.pacing.pays
        pauses.append(auto.pacing.pause)
    assert pauses == [50, 100]  # rounds of 10 ms


def test_probes_get_rarer_where_the_drafter_suffers_more_than_the_target() -> None:
    """A busy core stretches a pass of many small steps more than the target's."""
    curve = CostCurve(np.array([1, 8]), np.array([0]), np.array([[0.01, 0.03]]))
    policy = AutoPolicy(curve, block_seconds=0.002, depths=4)
    for _ in range(4):
        policy.observe_block(0.012)
    assert policy.block_seconds > 0.008
    for _ in range(8):
        policy.observe_block(0.002)
    assert policy.block_seconds < 0.003


def test_a_load_that_everything_feels_is_not_counted_against_the_drafter() -> None:
    curve = CostCurve(np.array([1, 8]), np.array([0]), np.array([[0.01, 0.03]]))
    policy = AutoPolicy(curve, block_seconds=0.002, depths=4)
    for _ in range(50):
        curve.observe(1, 0, 0.03)
    for _ in range(8):
        policy.observe_block(0.006)
    assert policy.block_seconds < 0.0025
