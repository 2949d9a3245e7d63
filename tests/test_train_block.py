"""The masked training pass is the runtime's block pass, and what is trained drafts there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conftest import prompt_of, same_text  # noqa: E402
from test_models_golden import GOLDEN  # noqa: E402

from localspec.convert import convert  # noqa: E402
from localspec.convert.source import Checkpoint  # noqa: E402
from localspec.convert.verify import open_runtime  # noqa: E402
from localspec.engine import DraftOptions, Engine  # noqa: E402
from localspec.ggufio import GgufFile  # noqa: E402
from localspec.llama import Model  # noqa: E402
from localspec.models import load_drafter, save_drafter  # noqa: E402
from localspec.models.initial import draft_vocabulary, new_drafter  # noqa: E402
from localspec.models.shape import drafter_config  # noqa: E402
from localspec.models.synthesis import Prompt, Writer  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(
    scope="module",
    params=[
        "tiny",
        pytest.param(
            "golden",
            marks=[
                pytest.mark.golden,
                pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden data"),
            ],
        ),
    ],
)
def target(request, tiny_target) -> Iterator[Path]:
    yield {"tiny": tiny_target.gguf, "golden": GOLDEN / "tiny-qwen3/tiny-qwen3-f32.gguf"}[
        request.param
    ]


def made(target: Path, out: Path, reduced: int | None = None, **asked):
    """(config, checkpoint) of a random drafter, heads included."""
    with GgufFile(target) as file:
        config = drafter_config(file, {"layers": 2, "block_size": 5, "rank": 16} | asked)
        config = replace(config, draft_vocab_size=reduced)
        rng = np.random.default_rng(5)
        ids = None
        if reduced:
            ids = draft_vocabulary(rng.integers(0, 1000, config.vocab_size), reduced)
        drafter = new_drafter(config, file, draft_ids=ids, seed=2)
        torch.nn.init.normal_(drafter.markov_head.markov_w2.weight, std=0.3)
        save_drafter(drafter, out)
    return config, out


@pytest.mark.parametrize("head", ["vanilla", "gated"])
@pytest.mark.parametrize("reduced", [None, 200])
def test_the_masked_pass_is_the_block_pass(head, reduced, target, tmp_path):
    """Same anchors, same features, same parents: hidden states within 1e-3, logits too."""
    config, checkpoint = made(target, tmp_path / "checkpoint", reduced, head=head)
    gguf = tmp_path / "drafter.gguf"
    convert(checkpoint, target, gguf, outtype="f32")
    model = Model(target)
    writer = Writer(model, config.target_layer_ids, streams=1, longest=64, n_threads=1)
    tokens = np.array(prompt_of(3, 40), np.int32)
    features = writer.evaluate(tokens)[0].astype(np.float32)
    writer.close()
    model.close()
    drafter = load_drafter(checkpoint)
    with GgufFile(target) as file:
        from localspec.models.initial import target_matrices

        drafter.tie_target(*target_matrices(file))
    anchors = [1, 6, 17, 33]
    with torch.no_grad():
        hidden = drafter.forward_blocks(
            torch.from_numpy(features), torch.tensor(anchors), torch.from_numpy(tokens).long()
        )
        parents = torch.tensor([tokens[a : a + config.num_depths].tolist() for a in anchors])
        logits = drafter.path_logits(hidden, parents)
        confidence = torch.sigmoid(drafter.confidence_logits(hidden, parents))
    with open_runtime(target, gguf) as runtime:
        for i, anchor in enumerate(anchors):
            found = runtime.propose(features[:anchor], int(tokens[anchor]), parents[i].numpy())
            np.testing.assert_allclose(hidden[i], found.hidden, atol=1e-3)
            ids = drafter.draft_ids.numpy()
            np.testing.assert_allclose(logits[i], found.logits[:, ids], atol=5e-3)
            np.testing.assert_allclose(confidence[i], found.confidence, atol=1e-3)
            if reduced:  # nothing else is ever drafted
                assert np.isin(found.chain, ids).all()


@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_a_reduced_vocabulary_in_the_published_layout(head, tiny_target, tmp_path):
    """Saved, read back by the converter, compared with the reference, drafted with."""
    _, checkpoint = made(tiny_target.gguf, tmp_path / "c", 150, head=head)
    source = Checkpoint(checkpoint)
    assert source.packaging == "published" and source.config.draft_vocab_size == 150
    kept = load_drafter(checkpoint)
    np.testing.assert_array_equal(source.draft_tokens, kept.draft_ids)
    gguf = tmp_path / "drafter.gguf"
    result = convert(checkpoint, tiny_target.gguf, gguf, outtype="f32", verify=True)
    assert result.report is not None and result.report.fine
    assert all(d.relative < 1e-3 for d in result.report.differences)
    prompt = prompt_of(4)
    with Engine.load(tiny_target.gguf, gguf, n_ctx=256, n_threads=1) as engine:
        plain = engine.complete(prompt, max_tokens=30, draft=DraftOptions(tokens=0))
        tree = engine.complete(prompt, max_tokens=30, draft=DraftOptions(tokens=12, width=3))
        assert any(r.drafted for r in tree.rounds)
        same_text(engine, prompt, plain.token_ids, tree.token_ids)


def test_what_is_written_side_by_side_is_what_evaluating_gives(target):
    """Features, hidden states and norms of parallel streams against one text by itself."""
    model = Model(target)
    layers = (0, 2)
    writer = Writer(model, layers, streams=3, longest=80, n_threads=1, seed=7)
    prompts = [Prompt(i, prompt_of(i, 6 + 3 * i), (0.0, 1.0)[i % 2]) for i in range(5)]
    found = list(writer.write(prompts, 20))
    assert sorted(c.index for c in found) == [0, 1, 2, 3, 4]
    for c in found:
        features, hidden, log_norm = writer.evaluate(c.tokens)
        np.testing.assert_allclose(c.features, features, atol=0.02, rtol=0.02)
        np.testing.assert_allclose(c.hidden, hidden, atol=0.02, rtol=0.02)
        np.testing.assert_allclose(c.log_norm, log_norm, atol=0.01)
    writer.close()
    other = Writer(model, layers, streams=2, longest=80, n_threads=1, seed=7)
    again = {c.index: c.tokens.tolist() for c in other.write(prompts[::-1], 20)}
    other.close()
    model.close()
    # What is drawn follows from seed and index, not from what else is written.
    assert sum(again[c.index] == c.tokens.tolist() for c in found) >= 4


def test_texts_go_on_after_their_end(tiny_target):
    """So that a block over the end has a future to be compared with."""
    model = Model(tiny_target.gguf)
    writer = Writer(model, (0,), streams=4, longest=250, n_threads=1, seed=1)
    prompts = [Prompt(i, prompt_of(i), 0.7) for i in range(8)]
    short = {c.index: c.tokens.tolist() for c in writer.write(prompts, 200)}
    longer = {c.index: c.tokens.tolist() for c in writer.write(prompts, 200, 5)}
    writer.close()
    ended = [i for i in short if len(short[i]) < len(prompts[i].tokens) + 199]
    assert ended
    for i in ended:
        assert longer[i][: len(short[i])] == short[i]
        assert model.is_end(longer[i][len(short[i])])
        assert len(longer[i]) == len(short[i]) + 5
    model.close()
