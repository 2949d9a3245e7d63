"""A whole run on the golden target, measured in the runtime on prompts it never saw."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from test_models_golden import GOLDEN, pytestmark  # noqa: E402, F401

from localspec.calibrating import rendered  # noqa: E402
from localspec.engine import Engine  # noqa: E402
from localspec.models.finish import accepted_length  # noqa: E402
from localspec.models.run import train  # noqa: E402

TARGET = GOLDEN / "tiny-qwen3/tiny-qwen3-f32.gguf"


@pytest.mark.slow
def test_four_tokens_a_round(tmp_path):
    """The golden drafters, trained elsewhere and longer, reach 4.9 to 5.5."""
    result = train(
        TARGET, tmp_path / "run", tokens=24_000, steps=350, threads=1, precision="f32", layers=2,
        rank=16, answer=100, longest=160, calibrate=False, seed=1,
    )  # fmt: skip
    seen = (tmp_path / "run/prompts.jsonl").read_text().splitlines()
    known = {json.loads(line)["messages"][-1]["content"] for line in seen}
    questions = json.loads((GOLDEN / "tiny-qwen3/prompts.json").read_text())
    new = [q for q in questions if q not in known][:24]
    assert len(new) == 24
    with Engine.load(TARGET, result.drafter, n_ctx=512, n_threads=1) as engine:
        length = accepted_length(engine, [rendered(engine, q) for q in new])
    assert length is not None and length >= 4.0
