"""The simulator: replaying recorded rounds, on recordings made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import simulate  # noqa: E402
from localspec.tree import DraftTree  # noqa: E402
from recording import Trace, load, save  # noqa: E402

LENGTH = 241


def trace(right: int, sure: float = 0.9) -> Trace:
    """A text of rising tokens whose drafts of 4 go wrong after the first `right`."""
    answer = list(range(LENGTH))
    drafts = []
    for i in range(LENGTH - 1):
        tokens = [i + 1 + k if k < right else 10_000 + k for k in range(4)]
        drafts.append(DraftTree.chain(tokens, np.log([sure, 0.9 * sure, 0.8 * sure, 0.7 * sure])))
    return Trace("made", 10, answer, drafts, drafts)


def machine(*ms: float, block: float = 0.001) -> simulate.Machine:
    return simulate.Machine("made", np.array([*ms, *[1000.0] * (64 - len(ms))]) / 1000, block)


def test_fixed_rounds_are_counted_and_timed():
    run = simulate.fixed([trace(2)], machine(10, 11, 12, 13, 14), 3, chain=False)
    assert set(run.tokens) == {3}  # two accepted and the bonus
    assert len(run.tokens) == 80
    round_seconds = 0.013 + 0.001 + simulate.HOST_SECONDS
    assert run.speed == pytest.approx(3 / round_seconds)
    plain = simulate.fixed([trace(2)], machine(10), 0, chain=False)
    assert plain.speed == pytest.approx(100.0)


def test_the_policy_is_near_the_best_fixed_choice_where_text_is_regular():
    for right, costs in ((4, (10, 11, 12, 13, 14)), (2, (10, 14, 15, 25, 40)), (0, (10, 18, 25))):
        result = simulate.replay([trace(right)] * 4, machine(*costs))
        assert result["regret"] < 0.05, (right, result)


def test_a_change_of_text_is_noticed():
    m = machine(10, 11, 12, 13, 14)
    hard, easy = trace(0, sure=0.1), trace(4)
    assert simulate.after_switch([hard] * 2, [easy] * 4, m) > 0.95
    assert simulate.after_switch([easy] * 2, [hard] * 4, m) > 0.95


def test_curves_show_the_kernel_boundaries():
    found = {m.name: m.target for m in simulate.machines(0.19, 7)}
    cuda = next(t for name, t in found.items() if "3090" in name)
    assert cuda[15] == pytest.approx(cuda[8])  # one tile for 9..16
    assert cuda[16] > cuda[15]
    metal = next(t for name, t in found.items() if "Metal" in name)
    assert metal[8] > 2 * metal[7]
    assert all((t > 0).all() and len(t) == 64 for t in found.values())


def test_recordings_survive_the_disk(tmp_path: Path):
    path = tmp_path / "r.npz"
    save(path, [trace(1), trace(3)])
    back = load(path)
    assert [t.answer for t in back] == [trace(1).answer] * 2
    assert back[1].trees[5].token.tolist() == trace(3).trees[5].token.tolist()
    assert back[1].chains[7].score == pytest.approx(trace(3).chains[7].score)
