"""From logits to tokens: the distribution against an obvious implementation, draws, seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.errors import LocalspecError
from localspec.sampling import Sampler, SamplingParams, adjust, draw, penalize, target_distribution

F = np.float32


def slow(logits, params: SamplingParams, history) -> dict[int, float]:
    """llama.cpp's order: bias, penalties, top-k, top-p, min-p, temperature; token by token."""
    z = [float(x) for x in logits]
    for token, value in params.logit_bias.items():
        z[token] += value
    n = params.penalty_window
    recent = list(history) if n < 0 else list(history)[len(history) - min(n, len(history)) :]
    for token in set(recent):
        penalty = params.repetition_penalty
        z[token] = z[token] * penalty if z[token] <= 0 else z[token] / penalty
        z[token] -= recent.count(token) * params.frequency_penalty + params.presence_penalty
    ranked = sorted(range(len(z)), key=lambda t: -z[t])
    if params.temperature == 0:
        return {ranked[0]: 1.0}
    if params.top_k > 0:
        ranked = ranked[: params.top_k]

    def probabilities() -> list[float]:
        weights = [math.exp(z[t] - z[ranked[0]]) for t in ranked]
        return [w / sum(weights) for w in weights]

    kept, total = [], 0.0
    for token, p in zip(ranked, probabilities(), strict=True):
        kept.append(token)
        total += p
        if params.top_p < 1 and total >= params.top_p:
            break
    ranked = kept
    p = probabilities()
    ranked = [t for t, x in zip(ranked, p, strict=True) if x >= params.min_p * p[0]]
    weights = [math.exp((z[t] - z[ranked[0]]) / params.temperature) for t in ranked]
    return {t: w / sum(weights) for t, w in zip(ranked, weights, strict=True)}


settings_of_users = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.9]),
    top_k=st.sampled_from([0, 1, 2, 5, 20, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.6, 0.1, 0.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.2, 2.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.8, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    penalty_window=st.sampled_from([-1, 0, 1, 3, 64]),
    logit_bias=st.sampled_from([{}, {}, {0: 1.5}, {0: -100, 1: 0.25}]),
)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(
    settings_of_users,
    st.integers(2, 30),
    st.lists(st.integers(0, 29), max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_the_distribution_is_the_one_defined(params, vocab, history, seed):
    logits = (2 * np.random.default_rng(seed).normal(size=vocab)).astype(F)
    history = [t for t in history if t < vocab]
    before = logits.copy()
    found = target_distribution(logits, params, history)
    expected = slow(logits, params, history)
    assert np.flatnonzero(found).tolist() == sorted(expected)
    for token, p in expected.items():
        assert found[token] == pytest.approx(p, rel=1e-4, abs=1e-9)
    assert found.dtype == np.float64 and found.sum() == pytest.approx(1, abs=1e-12)
    assert (logits == before).all()


def test_the_order_of_truncations_shows():
    # The two best have 0.5 of everything, and 0.71 of what top-k 3 leaves.
    logits = np.log(np.array([0.3, 0.15, 0.15, 0.2, 0.2], F))
    p = target_distribution(logits, SamplingParams(temperature=1, top_p=0.69))
    assert np.flatnonzero(p).tolist() == [0, 3, 4]
    p = target_distribution(logits, SamplingParams(temperature=1, top_k=3, top_p=0.69))
    assert np.flatnonzero(p).tolist() == [0, 3]
    # Truncation sees temperature 1: heat does not bring the dropped ones back.
    logits = np.log(np.array([0.9, 0.06, 0.04], F))
    p = target_distribution(logits, SamplingParams(temperature=5, min_p=0.05))
    assert np.flatnonzero(p).tolist() == [0, 1]


def test_ties_of_top_k_keep_exactly_k():
    p = target_distribution(np.zeros(200, F), SamplingParams(temperature=1, top_k=7))
    assert np.count_nonzero(p) == 7 and p.max() == pytest.approx(1 / 7)


def test_penalties_count_only_the_window():
    logits = np.array([2.0, -2.0, 1.0], F)
    params = SamplingParams(repetition_penalty=2, frequency_penalty=0.5, penalty_window=2)
    assert penalize(logits, params, [2, 2, 0, 1]).tolist() == [0.5, -4.5, 1]
    params = SamplingParams(presence_penalty=1, frequency_penalty=0.25, penalty_window=-1)
    assert penalize(logits, params, [2, 2, 0]).tolist() == [0.75, -2, -0.5]
    assert penalize(logits, SamplingParams(), [0]) is logits


def test_a_bias_comes_first_and_decides():
    logits = np.array([2.0, -2.0, 1.0, 0.0], F)
    params = SamplingParams(logit_bias={0: -4, 2: 0.5}, repetition_penalty=2)
    assert adjust(logits, params, [0, 2]).tolist() == [-4, -2, 0.75, 0]
    assert logits.tolist() == [2, -2, 1, 0]
    for temperature in (0.0, 1.0):
        ban = SamplingParams(temperature=temperature, logit_bias={0: -100, 3: np.float32(-100)})
        p = target_distribution(logits, ban)
        assert p[[0, 3]].max() < 1e-40 and p.argmax() == 2
        only = SamplingParams(temperature=temperature, logit_bias={np.int64(1): 100})
        assert target_distribution(logits, only)[1] == pytest.approx(1)
        assert Sampler(only, [0]).choose(logits) == 1
    # Truncation sees what the bias made of them.
    top = SamplingParams(temperature=1, top_k=1, logit_bias={1: 5})
    assert target_distribution(logits, top).tolist() == [0, 1, 0, 0]
    # Candidates of a draft are numbered in another way.
    drafts = Sampler(only, [0]).draft_distribution(logits)
    assert drafts.argmax() == 0


def test_what_is_no_bias():
    for bias, why in (
        ([1, 2], "must map token ids"),
        (None, "must map token ids"),
        ({-1: 1}, "no token id"),
        ({"7": 1}, "no token id"),
        ({True: 1}, "no token id"),
        ({1.0: 1}, "no token id"),
        ({7: "x"}, "token 7 needs a number"),
        ({7: True}, "token 7 needs a number"),
        ({7: None}, "token 7 needs a number"),
        ({7: math.nan}, "between -100 and 100, but token 7"),
        ({7: -math.inf}, "between -100 and 100"),
        ({7: 100.5}, "between -100 and 100"),
        (dict.fromkeys(range(1025), 1), "at most 1024"),
    ):
        with pytest.raises(LocalspecError, match=why) as caught:
            SamplingParams(logit_bias=bias)
        assert "\n" not in str(caught.value)
    given = {3: 1}
    params = SamplingParams(logit_bias=given)
    given[3] = 99
    assert params.logit_bias == {3: 1.0}
    assert params != SamplingParams() and isinstance(hash(params), int)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_tiny_temperatures_are_nearly_greedy(temperature):
    p = target_distribution(np.array([1, 40, 3], F), SamplingParams(temperature=temperature))
    assert p.tolist() == [0, 1, 0]


# ---- drawing


def test_draw_inverts_the_distribution():
    p = np.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    for u, token in [(0, 1), (0.2499, 1), (0.25, 3), (0.7499, 3), (0.75, 4), (1 - 1e-16, 4)]:
        assert draw(p, u) == token


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-9, 0.1, 0.5, 1.0]), min_size=1, max_size=20),
    st.sampled_from([0.0, 5e-324, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True),
)
def test_a_token_without_probability_is_never_drawn(weights, u):
    p = np.array(weights)
    if p.sum() == 0:
        return
    assert (p / p.sum())[draw(p / p.sum(), u)] > 0


def critical_chi_square(df: int, z: float = 3.0902) -> float:
    """Value that chi-square exceeds with probability 0.001 (Wilson and Hilferty)."""
    return df * (1 - 2 / (9 * df) + z * math.sqrt(2 / (9 * df))) ** 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.0, top_k=6, seed=2),
        SamplingParams(temperature=1.5, top_p=0.9, seed=3),
        SamplingParams(temperature=1.0, min_p=0.05, seed=4),
        SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=5),
    ],
)
def test_draws_follow_the_distribution(params):
    logits = (2 * np.random.default_rng(0).normal(size=12)).astype(F)
    sampler, counts, n = Sampler(params, [3, 4]), np.zeros(12), 20_000
    p = target_distribution(logits, params, [3, 4])
    for _ in range(n):
        counts[sampler.choose(logits)] += 1
        sampler.commit([0])  # uses one number up
        sampler.history = [3, 4]
    expected = n * p
    assert (counts[p == 0] == 0).all()
    often = expected > 5
    chi = (((counts - expected)[often]) ** 2 / expected[often]).sum()
    assert chi < critical_chi_square(max(1, often.sum() - 1))


def chain_of(sampler: Sampler, table: np.ndarray, groups: list[int]) -> list[int]:
    """Tokens of a first-order chain, chosen in rounds of some sizes, as the engine does."""
    out: list[int] = []
    for size in groups:
        path: list[int] = []
        for _ in range(size):
            last = (path or out or [0])[-1]
            path.append(sampler.choose(table[last], path))
        # What was drafted further on and refused must not use numbers up.
        sampler.choose(table[0], path)
        sampler.commit(path)
        out += path
    return out


@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 0.8, "repetition_penalty": 1.5, "top_k": 9}]
)
def test_same_seed_same_tokens_however_they_are_grouped(options):
    table = (2 * np.random.default_rng(0).normal(size=(12, 12))).astype(F)

    def run(seed, groups):
        return chain_of(Sampler(SamplingParams(**options, seed=seed), [1, 2]), table, groups)

    one_by_one = run(7, [1] * 24)
    assert run(7, [1] * 24) == one_by_one
    assert run(7, [3, 1, 8, 2, 10]) == one_by_one
    assert run(8, [1] * 24) != one_by_one
    assert run(None, [24]) != run(None, [24])


def test_penalties_see_prompt_commits_and_path():
    logits = np.array([1.0, 0.9, 0.8, 0.7], F)
    sampler = Sampler(SamplingParams(presence_penalty=5), [0])
    assert sampler.choose(logits) == 1
    assert sampler.choose(logits, [1]) == 2
    assert sampler.choose(logits) == 1
    sampler.commit([1, 2])
    assert sampler.choose(logits) == 3


def test_greedy_takes_the_first_of_equals():
    assert Sampler(SamplingParams(), []).choose(np.array([0, 3, 3], F)) == 1


# ---- settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, not -0.1"),
        ({"temperature": math.nan}, "temperature must be at least 0, not nan"),
        ({"temperature": math.inf}, "temperature must be at least 0, not inf"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"temperature": None}, "temperature must be a number, not None"),
        ({"top_k": -1}, "top_k must be at least 0, not -1"),
        ({"top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"top_p": 1.01}, "top_p must be between 0 and 1, not 1.01"),
        ({"top_p": -0.5}, "top_p must be between 0 and 1, not -0.5"),
        ({"min_p": 2}, "min_p must be between 0 and 1, not 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be at least 1e-06, not 0"),
        ({"presence_penalty": math.inf}, "presence_penalty must be"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be"),
        ({"penalty_window": -2}, "penalty_window must be at least -1, not -2"),
        ({"penalty_window": 1.5}, "penalty_window must be a whole number, not 1.5"),
        ({"seed": -1}, "seed must be a whole number of at least 0, not -1"),
        ({"seed": 1.5}, "seed must be a whole number of at least 0, not 1.5"),
    ],
)
def test_settings_out_of_range_name_the_range(options, message):
    with pytest.raises(LocalspecError) as caught:
        SamplingParams(**options)
    assert str(caught.value).startswith(message)


def test_settings_are_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
