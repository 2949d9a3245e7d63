"""Broken input and interrupted conversions: one line, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import tiny
from localspec.convert import convert
from localspec.convert import write as writing
from localspec.errors import LocalspecError

SIZES = {"vocab": 320, "layers": 4, "width": 64, "tied": True}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    where = tmp_path_factory.mktemp("built")
    target = tiny.build_target(where / "target", **SIZES)
    return target, tiny.build_drafter(where / "drafter", target, head="rnn")


@pytest.fixture
def target(built, tmp_path):
    """A target that a test may damage."""
    return Path(shutil.copy(built[0].gguf, tmp_path / "target.gguf"))


class Checkpoint:
    """A copy of the tiny drafter that a test may damage."""

    def __init__(self, drafter, path: Path) -> None:
        self.path, self.config, self.tensors = path, dict(drafter.config), dict(drafter.tensors)
        shutil.copytree(drafter.path, path)
        self.weights = path / "model.safetensors"

    def save(self) -> None:
        (self.path / "config.json").write_text(json.dumps(self.config))
        tensors = {k: np.ascontiguousarray(v) for k, v in self.tensors.items()}
        save_file(tensors, self.weights)


@pytest.fixture
def checkpoint(built, tmp_path):
    return Checkpoint(built[1], tmp_path / "checkpoint")


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "d.gguf"


def refused(checkpoint: Path, target: Path, out: Path, **options) -> str:
    """The message of a refused conversion, which must leave no trace."""
    before = set(out.parent.iterdir()) if out.parent.is_dir() else None
    with pytest.raises(LocalspecError) as e:
        convert(checkpoint, target, out, **options)
    message = str(e.value)
    assert "\n" not in message and message
    assert "Traceback" not in message
    if before is not None:
        assert set(out.parent.iterdir()) == before
    return message


# ---- the checkpoint


def test_no_such_directory(tmp_path, target, out):
    assert "does not exist" in refused(tmp_path / "nowhere", target, out)


def test_a_file_instead_of_a_directory(target, out):
    assert "is a file" in refused(target, target, out)


def test_no_weights(checkpoint, target, out):
    checkpoint.weights.unlink()
    assert "model.safetensors" in refused(checkpoint.path, target, out)


def test_no_config(checkpoint, target, out):
    (checkpoint.path / "config.json").unlink()
    assert "config.json" in refused(checkpoint.path, target, out)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_config_is_not_json(text, checkpoint, target, out):
    (checkpoint.path / "config.json").write_text(text)
    assert "config.json" in refused(checkpoint.path, target, out)


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "hidden_size", "num_hidden_layers", "block_size", "mask_token_id",
     "target_layer_ids", "intermediate_size", "markov_head_type"],
)  # fmt: skip
def test_config_lacks_a_field(field, checkpoint, target, out):
    del checkpoint.config[field]
    checkpoint.save()
    assert field in refused(checkpoint.path, target, out)


def test_unknown_head_type(checkpoint, target, out):
    checkpoint.config["markov_head_type"] = "transformer"
    checkpoint.save()
    assert "transformer" in refused(checkpoint.path, target, out)


def test_attention_biases(checkpoint, target, out):
    checkpoint.config["attention_bias"] = True
    checkpoint.save()
    assert "attention_bias" in refused(checkpoint.path, target, out)


@pytest.mark.parametrize(
    ("field", "value"), [("max_position_embeddings", 1 << 40), ("rope_theta", 1e300)]
)
def test_config_has_an_absurd_number(field, value, checkpoint, target, out):
    checkpoint.config[field] = value
    checkpoint.save()
    message = refused(checkpoint.path, target, out)
    assert field in message or "more than GGUF can hold" in message


@pytest.mark.parametrize("keep", [0, 4, 8, 200, 5000, -1])
def test_truncated_weights(keep, checkpoint, target, out):
    data = checkpoint.weights.read_bytes()
    checkpoint.weights.write_bytes(data[:keep])
    assert "model.safetensors is damaged" in refused(checkpoint.path, target, out)


def test_weights_shrink_after_the_check(checkpoint, target, out):
    size = checkpoint.weights.stat().st_size

    def shrink(*_):
        os.truncate(checkpoint.weights, size // 2)

    assert "cut short" in refused(checkpoint.path, target, out, progress=shrink)


@pytest.mark.parametrize(
    "header", [b"{}" + b" " * 6, b'{"fc.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}}',
               b"not json"],
)  # fmt: skip
def test_garbled_weights(header, checkpoint, target, out):
    checkpoint.weights.write_bytes(struct.pack("<Q", len(header)) + header)
    refused(checkpoint.path, target, out)


def test_absurd_header_length(checkpoint, target, out):
    checkpoint.weights.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    assert "damaged" in refused(checkpoint.path, target, out)


@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.1.mlp.up_proj.weight", "markov_head.joint_proj.bias",
             "confidence_head.proj.weight"],
)  # fmt: skip
def test_missing_tensor(name, checkpoint, target, out):
    del checkpoint.tensors[name]
    checkpoint.save()
    assert f"{name} is missing" in refused(checkpoint.path, target, out)


def test_extra_tensor(checkpoint, target, out):
    checkpoint.tensors["layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
    checkpoint.save()
    assert "layers.2.mlp.up_proj.weight is unknown" in refused(checkpoint.path, target, out)


@pytest.mark.parametrize(
    "name", ["fc.weight", "norm.weight", "embed_tokens.weight", "markov_head.markov_w2.weight"]
)
def test_wrong_shape(name, checkpoint, target, out):
    checkpoint.tensors[name] = checkpoint.tensors[name][..., :-1]
    checkpoint.save()
    message = refused(checkpoint.path, target, out)
    assert name in message and "shape" in message


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_unsupported_type(dtype, checkpoint, target, out):
    checkpoint.tensors["fc.weight"] = checkpoint.tensors["fc.weight"].astype(dtype)
    checkpoint.save()
    assert "F32, F16 or BF16" in refused(checkpoint.path, target, out)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "name", ["fc.weight", "layers.1.self_attn.q_norm.weight", "markov_head.markov_w1.weight",
             "confidence_head.proj.bias", "lm_head.weight"],
)  # fmt: skip
def test_values_that_are_not_finite(name, value, checkpoint, target, out):
    array = checkpoint.tensors[name].copy()
    array.flat[-1] = value
    checkpoint.tensors[name] = array
    checkpoint.save()
    message = refused(checkpoint.path, target, out)
    assert name in message and ("NaN" in message or "infinite" in message)


def test_values_beyond_half_precision(checkpoint, target, out):
    checkpoint.tensors["fc.weight"] = checkpoint.tensors["fc.weight"] * np.float32(1e8)
    checkpoint.save()
    assert "range of F16" in refused(checkpoint.path, target, out, outtype="f16")
    convert(checkpoint.path, target, out, outtype="bf16")


def test_index_names_a_missing_shard(built, tmp_path, target, out):
    sharded = tiny.build_drafter(tmp_path / "s", built[0], shard=True)
    (sharded.path / "model-00002-of-00002.safetensors").unlink()
    assert "00002-of-00002" in refused(sharded.path, target, out)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": "../target.gguf"}}']
)
def test_damaged_index(index, built, tmp_path, target, out):
    sharded = tiny.build_drafter(tmp_path / "s", built[0], shard=True)
    (sharded.path / "model.safetensors.index.json").write_text(index)
    assert "index.json" in refused(sharded.path, target, out)


def test_index_and_shards_disagree(built, tmp_path, target, out):
    sharded = tiny.build_drafter(tmp_path / "s", built[0], shard=True)
    path = sharded.path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].pop("fc.weight")
    path.write_text(json.dumps(index))
    assert "disagree" in refused(sharded.path, target, out)


# ---- the target


def test_target_is_missing(checkpoint, tmp_path, out):
    assert "does not exist" in refused(checkpoint.path, tmp_path / "no.gguf", out)


def test_target_is_not_gguf(checkpoint, target, out):
    target.write_bytes(b"<html>" * 100)
    assert "not a GGUF" in refused(checkpoint.path, target, out)


def test_target_is_truncated(checkpoint, target, out):
    os.truncate(target, target.stat().st_size - 100)
    assert "damaged or incomplete" in refused(checkpoint.path, target, out)


def test_target_is_a_drafter(checkpoint, target, out, tmp_path):
    drafter = tmp_path / "x.gguf"
    convert(checkpoint.path, target, drafter)
    assert "drafter, not a target" in refused(checkpoint.path, drafter, out)
    heads = tmp_path / "x.heads.gguf"
    assert "not a target" in refused(checkpoint.path, heads, out)


def test_target_gives_no_layer_features(checkpoint, target, out):
    target.write_bytes(target.read_bytes().replace(b"qwen3", b"qwen2"))
    message = refused(checkpoint.path, target, out)
    assert "qwen2" in message and "layer features" in message


def test_target_without_a_tokenizer(checkpoint, target, out):
    target.write_bytes(
        target.read_bytes().replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.t0kens")
    )
    assert "tokenizer" in refused(checkpoint.path, target, out)


@pytest.mark.parametrize(
    ("build", "config", "words"),
    [
        ({"width": 128}, {}, "width"),
        ({"vocab": 330}, {}, "vocabulary"),
        ({"layers": 5}, {}, "layer count"),
        ({"layers": 2}, {"num_target_layers": None}, "target_layer_ids has 1"),
        ({}, {"target_layer_ids": [0, 3], "num_target_layers": None}, "target_layer_ids has 3"),
        ({}, {"mask_token_id": 320}, "mask_token_id"),
        ({}, {"target_layer_ids": [-2, 1, 2]}, "target_layer_ids"),
    ],
)
def test_drafter_for_another_target(build, config, words, checkpoint, tmp_path, out):
    other = tiny.build_target(tmp_path / "other", **{**SIZES, **build})
    checkpoint.config.update(config)
    checkpoint.save()
    assert words in refused(checkpoint.path, other.gguf, out)


# ---- the output


def test_output_directory_is_missing(checkpoint, target, out):
    assert "not a directory" in refused(checkpoint.path, target, out.parent / "no" / "d.gguf")


def test_output_is_a_directory(checkpoint, target, out):
    assert "is a directory" in refused(checkpoint.path, target, out.parent)


def test_output_directory_is_read_only(checkpoint, target, out, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "not writable" in refused(checkpoint.path, target, out)


def test_output_is_an_input(checkpoint, target, tmp_path):
    before = target.read_bytes(), checkpoint.weights.read_bytes()
    assert "input" in refused(checkpoint.path, target, target)
    assert "input" in refused(checkpoint.path, target, checkpoint.weights)
    link = tmp_path / "link.gguf"
    link.symlink_to(target)
    assert "input" in refused(checkpoint.path, target, link)
    heads = target.replace(tmp_path / "d.heads.gguf")  # where the companion would go
    assert "input" in refused(checkpoint.path, heads, tmp_path / "d.gguf")
    assert (heads.read_bytes(), checkpoint.weights.read_bytes()) == before


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_failing_writes(code, checkpoint, target, out, monkeypatch):
    def fail(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(writing.os, "fsync", fail)
    message = refused(checkpoint.path, target, out)
    assert ("no space left" in message) == (code == errno.ENOSPC)


def test_disk_full(checkpoint, target, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    options = ["-t", "tmpfs", "-o", "size=256k", "tmpfs"]
    if (
        not sys.platform.startswith("linux")
        or subprocess.run(
            ["mount", *options, str(full)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("no file system can be mounted here")
    try:
        assert "no space left" in refused(checkpoint.path, target, full / "d.gguf")
        assert not list(full.iterdir())
    finally:
        subprocess.run(["umount", str(full)], check=True)


@pytest.mark.parametrize("share", [0, 0.3, 0.6, 1])
def test_interrupt_leaves_nothing(share, checkpoint, target, out):
    def interrupt(name, index, count, done, total):
        if done >= share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint.path, target, out, progress=interrupt)
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")])
def test_no_half_pair(which, error, checkpoint, target, out, monkeypatch):
    calls, replace = [], os.replace

    def fail(*args):
        calls.append(args)
        if len(calls) == which:
            raise error
        replace(*args)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises((KeyboardInterrupt, LocalspecError)):
        convert(checkpoint.path, target, out)
    assert not list(out.parent.iterdir())


def test_failure_keeps_the_old_output(checkpoint, target, out):
    convert(checkpoint.path, target, out)
    before = {path: path.read_bytes() for path in out.parent.iterdir()}
    assert len(before) == 2
    checkpoint.tensors["norm.weight"] = np.full_like(checkpoint.tensors["norm.weight"], np.nan)
    checkpoint.save()
    refused(checkpoint.path, target, out)
    assert {path: path.read_bytes() for path in out.parent.iterdir()} == before


def test_what_reads_back_differently_is_refused(checkpoint, target, out, monkeypatch):
    real = writing.fill_in

    def damage(path, key, text):
        real(path, key, text)
        os.truncate(path, path.stat().st_size - 64)

    monkeypatch.setattr(writing, "fill_in", damage)
    refused(checkpoint.path, target, out)
