"""The torch reference reproduces the recorded runs: every token, round and number."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from localspec.models import TinyTarget, load_drafter, speculative_decode

GOLDEN = Path(
    os.environ.get("LOCALSPEC_GOLDEN", Path(__file__).resolve().parents[1] / "../shared/golden")
)
pytestmark = [
    pytest.mark.golden,
    pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden data (set LOCALSPEC_GOLDEN)"),
]

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return TinyTarget.load(GOLDEN / "tiny-qwen3")


@pytest.mark.parametrize(
    "name", ["dspark-vanilla", "dspark-gated", "dspark-rnn", "dspark-vanilla-b16"]
)
def test_every_round(name: str, target: TinyTarget):
    drafter = load_drafter(GOLDEN / name)
    runs = json.loads((GOLDEN / name / "golden.json").read_text())
    recorded = np.load(GOLDEN / name / "golden.npz")
    compared = 0
    assert len(runs) == 12
    for number, run in enumerate(runs):
        ids, rounds = speculative_decode(target, drafter, run["prompt_ids"], 80, {2})
        assert ids == run["output_ids"]
        assert len(rounds) == len(run["rounds"])
        for index, (ours, theirs) in enumerate(zip(rounds, run["rounds"], strict=True)):
            for field in ("start", "anchor", "draft", "accepted"):
                assert getattr(ours, field) == theirs[field], (number, index, field)
            np.testing.assert_allclose(ours.conf, theirs["conf"], atol=1e-4)
            key = f"p{number}_r{index}"
            if f"{key}_hidden" in recorded:
                np.testing.assert_allclose(ours.hidden, recorded[f"{key}_hidden"], atol=1e-3)
                np.testing.assert_allclose(ours.base, recorded[f"{key}_base"], atol=1e-3)
                compared += 1
    assert compared == sum(key.endswith("_hidden") for key in recorded.files) > 0


def test_plain_greedy_is_the_same_text(target: TinyTarget):
    for run in json.loads((GOLDEN / "dspark-rnn" / "golden.json").read_text()):
        assert target.greedy(run["prompt_ids"], 80, {2}) == run["output_ids"]
