"""`--verify`: it passes what is right, fails what is wrong, and keeps what failed aside."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import tiny
from localspec import pairs
from localspec.cli.convert import convert as command
from localspec.convert import convert, verify
from localspec.convert.source import Checkpoint
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

HEADS = ("vanilla", "gated", "rnn", "no-conf", "rnn-no-markov-conf", "plain", "dflash")


@pytest.mark.parametrize("name", HEADS)
def test_what_is_right_passes(name, tiny_drafter, tiny_target):
    model, path = tiny_drafter(name)
    report = verify.verify(Checkpoint(model.path), tiny_target.gguf, path, "f32")
    assert report.fine and report.worst() == ""
    assert all(d.relative < 1e-3 for d in report.differences)
    compared = [d.what for d in report.differences]
    assert compared[:4] == ["hidden states", "base logits", "logits", "chain"]
    assert ("confidence" in compared) == (
        "conf" not in name[:7] and name not in ("plain", "dflash")
    )


@pytest.mark.parametrize(
    ("tensor", "what"),
    [
        ("layers.0.self_attn.k_proj.weight", "hidden states"),
        ("layers.1.mlp.down_proj.weight", "hidden states"),
        ("markov_head.markov_w2.weight", "logits"),
        ("confidence_head.proj.weight", "confidence"),
    ],
)
@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
def test_one_wrong_tensor_is_found(tensor, what, outtype, tiny_drafter, tiny_target, tmp_path):
    model, _ = tiny_drafter("vanilla")
    changed = dict(model.tensors)
    changed[tensor] = np.ascontiguousarray(changed[tensor][..., ::-1])
    source = shutil.copytree(model.path, tmp_path / "s")
    save_file(changed, source / "model.safetensors")
    out = tmp_path / "d.gguf"
    convert(source, tiny_target.gguf, out, outtype=outtype)
    report = verify.verify(Checkpoint(model.path), tiny_target.gguf, out, outtype)
    assert not report.fine
    assert what in report.worst() and "\n" not in report.worst()


@pytest.mark.parametrize("setting", ["rope_theta", "target", "norm"])
def test_a_wrong_setting_is_found(setting, tiny_drafter, tiny_target, tmp_path):
    """The weights are right, and the file's metadata is not."""
    model, _ = tiny_drafter("vanilla")
    change = {
        "rope_theta": {"rope_parameters": {"rope_theta": 300.0, "rope_type": "default"}},
        "target": {"block_size": 5},
        "norm": {"rms_norm_eps": 0.5},
    }[setting]
    source = shutil.copytree(model.path, tmp_path / "s")
    (source / "config.json").write_text(json.dumps(model.config | change))
    out = tmp_path / "d.gguf"
    convert(source, tiny_target.gguf, out, outtype="f32")
    assert not verify.verify(Checkpoint(model.path), tiny_target.gguf, out, "f32").fine


@pytest.mark.parametrize("name", ["vanilla", "rnn"])
def test_what_fails_is_kept_aside(name, tiny_drafter, tiny_target, tmp_path, monkeypatch):
    model, _ = tiny_drafter(name)
    out = tmp_path / "d.gguf"
    out.write_bytes(b"an older drafter")
    monkeypatch.setitem(verify.TOLERANCE, "q4_0", 1e-6)
    with pytest.raises(LocalspecError, match="is not what its checkpoint is") as caught:
        convert(model.path, tiny_target.gguf, out, outtype="q4_0", verify=True)
    assert "d.failed.gguf" in str(caught.value) and "\n" not in str(caught.value)
    assert out.read_bytes() == b"an older drafter"
    failed = tmp_path / "d.failed.gguf"
    expected = {out, failed} | ({pairs.heads_path(failed)} if name == "rnn" else set())
    assert set(tmp_path.iterdir()) == expected
    with GgufFile(failed) as drafter, GgufFile(tiny_target.gguf) as target:
        pairs.check_pair(target, drafter)


def test_nan_never_passes():
    assert not verify.Difference("logits", 0.0, float("nan"), 1.0).fine


def test_one_side_without_confidence_fails():
    rows = np.zeros((2, 3), np.float32)
    tokens = np.zeros(2, np.int64)
    with_it = verify.Proposed(rows, rows, rows, tokens, tokens, np.ones(2, np.float32))
    without = verify.Proposed(rows, rows, rows, tokens, tokens, None)
    found = verify.compare([(with_it, without, without)], 0.1)
    assert [d.what for d in found if not d.fine] == ["confidence"]


def test_tokens_that_are_never_drafted_must_agree():
    rows = np.zeros((1, 3), np.float32)
    other = np.array([[0, -np.inf, 0]], np.float32)
    tokens = np.zeros(1, np.int64)
    a = verify.Proposed(None, rows, rows, tokens, tokens, None)
    b = verify.Proposed(None, other, other, tokens, tokens, None)
    assert not any(d.fine for d in verify.compare([(a, b, b)], 0.1) if "logits" in d.what)


class TestCommand:
    def run(self, *args: object, code: int = 0) -> str:
        result = CliRunner().invoke(command, [str(a) for a in args])
        assert result.exit_code == code, result.output
        return result.output

    def test_prints_one_table(self, tiny_drafter, tiny_target, tmp_path):
        model, _ = tiny_drafter("vanilla")
        output = self.run(model.path, "--target", tiny_target.gguf, "-o", tmp_path / "d.gguf")
        assert "against the reference" in output
        for what in ("hidden states", "base logits", "logits", "chain", "confidence"):
            assert what in output

    def test_no_verify(self, tiny_drafter, tiny_target, tmp_path):
        model, _ = tiny_drafter("vanilla")
        output = self.run(
            model.path, "--target", tiny_target.gguf, "-o", tmp_path / "d.gguf", "--no-verify"
        )
        assert "against the reference" not in output

    def test_without_torch(self, tiny_drafter, tiny_target, tmp_path, monkeypatch):
        monkeypatch.setattr(verify, "available", lambda: False)
        model, _ = tiny_drafter("vanilla")
        args = (model.path, "--target", tiny_target.gguf, "-o", tmp_path / "d.gguf", "--force")
        assert "which needs torch" in self.run(*args)
        result = CliRunner().invoke(command, [str(a) for a in (*args, "--verify")])
        assert isinstance(result.exception, LocalspecError)
        assert "--no-verify" in str(result.exception)

    def test_a_drafter_that_is_a_gguf(self, tiny_drafter, tiny_target, tmp_path):
        _, path = tiny_drafter("rnn")
        output = self.run(path, "--target", tiny_target.gguf)
        assert "is a GGUF already and fits" in output and f"-d {path}" in output
        copy = tmp_path / "copy.gguf"
        self.run(path, "--target", tiny_target.gguf, "-o", copy)
        assert copy.read_bytes() == path.read_bytes()
        heads = pairs.heads_path(copy)
        assert heads.read_bytes() == pairs.heads_path(path).read_bytes()
        again = CliRunner().invoke(
            command, [str(path), "--target", str(tiny_target.gguf), "-o", str(copy)]
        )
        assert "--force" in str(again.exception)
        assert not list(tmp_path.glob("*.part"))

    def test_a_gguf_for_another_target(self, tiny_drafter, tmp_path):
        _, path = tiny_drafter("vanilla")
        other = tiny.build_target(tmp_path / "other", width=64)
        result = CliRunner().invoke(command, [str(path), "--target", str(other.gguf)])
        assert result.exit_code == 1 and "width" in str(result.exception)

    def test_a_gguf_over_itself(self, tiny_drafter, tiny_target):
        _, path = tiny_drafter("vanilla")
        before = Path(path).read_bytes()
        args = [str(path), "--target", str(tiny_target.gguf), "-o", str(path), "--force"]
        assert "is an input" in str(CliRunner().invoke(command, args).exception)
        assert Path(path).read_bytes() == before
