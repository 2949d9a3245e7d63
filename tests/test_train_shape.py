"""Defaults taken from the target: its shape, and the file that is evaluated fastest here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import tiny
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.llama import Model, quantize
from localspec.models import shape, speed
from localspec.models.progress import Run
from localspec.models.settings import Settings


def test_the_shape_follows_from_the_target(tiny_target):
    with GgufFile(tiny_target.gguf) as target:
        c = shape.drafter_config(target, {})
        assert (c.hidden_size, c.vocab_size, c.num_target_layers) == (96, 320, 4)
        # Twice its width in heads, as the target has; queries and keys in equal number.
        assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (4, 4, 16)
        assert c.target_layer_ids == (1, 2) and c.mask_token_id == tiny.MASK_ID
        assert (c.markov_rank, c.markov_head_type, c.confidence_head_with_markov) == (
            64, "vanilla", True,
        )  # fmt: skip
        asked = {"layers": 3, "rank": 8, "head": "rnn", "target_layers": (-1, 2), "ffn": 64}
        c = shape.drafter_config(target, asked)
        assert (c.num_hidden_layers, c.markov_rank, c.intermediate_size) == (3, 8, 64)
        assert c.markov_head_type == "rnn" and c.target_layer_ids == (-1, 2)
        for ids in ((0, 3), (2, 1), (1, 1), (-2,)):
            with pytest.raises(LocalspecError, match="from -1 to 2"):
                shape.drafter_config(target, {"target_layers": ids})


def test_blocks_are_short_where_verifying_is_dear(tiny_target):
    with GgufFile(tiny_target.gguf) as target:
        sizes = [shape.drafter_config(target, {}, pass_ratio=r).block_size for r in (1.1, 3.5, 7.0)]
    assert sizes == [7, 6, 5]


@pytest.mark.parametrize(
    ("layers", "ids"),
    [(1, (-1,)), (2, (0,)), (3, (1,)), (6, (1, 2, 4)), (30, (1, 10, 19, 28)),
     (36, (1, 12, 23, 34))],
)  # fmt: skip
def test_features_come_from_the_whole_depth(layers: int, ids: tuple[int, ...]):
    assert shape.target_layer_ids(layers) == ids


def test_masks_need_an_embedding_to_be_told_from(tiny_target, tmp_path: Path):
    """A token that says mask, unless its embedding is zero: then all masks would be alike."""
    with GgufFile(tiny_target.gguf) as target:
        at = target.tensors["token_embd.weight"].offset + tiny.MASK_ID * 96 * 4
    changed = tmp_path / "target.gguf"
    data = bytearray(tiny_target.gguf.read_bytes())
    data[at : at + 96 * 4] = bytes(96 * 4)
    changed.write_bytes(data)
    with GgufFile(changed) as target:
        assert shape.mask_token(target) not in (tiny.MASK_ID, tiny.EOS_ID)


@pytest.mark.parametrize("wins", [True, False])
def test_a_copy_is_kept_where_it_is_faster(wins, tiny_target, tmp_path: Path, monkeypatch):
    quantised = tmp_path / "target.gguf"
    quantize(tiny_target.gguf, quantised, "q4_0", n_threads=1)
    out = tmp_path / "run"
    out.mkdir()
    run = Run(out, Settings(str(quantised), hours=1.0, threads=1), lambda p: None)
    rates = {quantised.name: 100.0, speed.COPY: 130.0 if wins else 110.0}
    monkeypatch.setattr(speed, "prefill_rate", lambda model, n, s=1.0: rates[model.path.name])
    monkeypatch.setattr(speed, "pass_ratio", lambda model, n, s=0.5: 2.5)
    monkeypatch.setattr(speed, "has_gpu", lambda: False)
    found = speed.fastest(run, quantised)
    again = speed.fastest(Run(out, run.settings, lambda p: None), quantised)  # remembered
    assert found == again == (out / speed.COPY if wins else quantised)
    assert (out / speed.COPY).exists() == wins
    size = (out / speed.COPY).stat().st_size if wins else 0
    assert speed.features_budget(run) == run.settings.disk - size
    if wins:
        with GgufFile(quantised) as ours, GgufFile(found) as copy:
            assert set(ours.tensors) == set(copy.tensors)
            for name in ours.tensors:
                np.testing.assert_allclose(
                    copy.tensor(name), ours.tensor(name), rtol=0.004, atol=1e-6
                )
        model = Model(found)
        assert model.chat_template and model.n_vocab == 320
        model.close()


def test_no_copy_of_what_is_not_quantised_or_does_not_fit(tiny_target, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(speed, "prefill_rate", lambda model, n, s=1.0: 1.0)
    monkeypatch.setattr(speed, "pass_ratio", lambda model, n, s=0.5: 2.5)
    monkeypatch.setattr(speed, "write_copy", lambda source, out: pytest.fail("a copy was written"))
    quantised = tmp_path / "target.gguf"
    quantize(tiny_target.gguf, quantised, "q4_0", n_threads=1)
    for name, target, disk in (("a", tiny_target.gguf, 1 << 30), ("b", quantised, 1000)):
        out = tmp_path / name
        out.mkdir()
        run = Run(out, Settings(str(target), hours=1.0, threads=1, disk=disk), lambda p: None)
        assert speed.fastest(run, target) == target
