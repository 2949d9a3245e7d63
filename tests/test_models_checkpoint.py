"""models.checkpoint: round trips, and refusals of damaged or mismatched directories."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.errors import LocalspecError
from localspec.models import Drafter, load_drafter, save_drafter
from tiny import TinyModel, build_drafter, build_target

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def built(target: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_drafter(tmp_path_factory.mktemp("drafter"), target, head="rnn").path


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "copy")


def assert_same(a: Drafter, b: Drafter) -> None:
    assert a.config == b.config
    left, right = a.state_dict(), b.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors (`__` stands for the dot) or, with None, remove them."""
    tensors = load_file(path / "model.safetensors")
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, path / "model.safetensors")


def test_whole_round_trip(built: Path, tmp_path: Path):
    drafter = load_drafter(built)
    assert not drafter.training
    save_drafter(drafter, tmp_path / "out")
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert_same(load_drafter(tmp_path / "out"), drafter)


def test_sharded_round_trip_and_back(built: Path, tmp_path: Path):
    drafter, out = load_drafter(built), tmp_path / "out"
    (out).mkdir()
    (out / "notes.txt").write_text("mine")
    save_drafter(drafter, out, max_shard_bytes=100_000)
    shards = sorted(out.glob("*.safetensors"))
    assert len(shards) > 2 and not (out / "model.safetensors").exists()
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f.name for f in shards}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in drafter.state_dict().values())
    for file in shards:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 100_000
    assert_same(load_drafter(out), drafter)
    save_drafter(drafter, out)
    assert {f.name for f in out.iterdir()} == {"config.json", "model.safetensors", "notes.txt"}
    assert_same(load_drafter(out), drafter)


def test_builder_shards_load_like_the_whole(target: TinyModel, built: Path, tmp_path: Path):
    sharded = build_drafter(tmp_path, target, head="rnn", shard=True).path
    assert_same(load_drafter(sharded), load_drafter(built))


def test_types(built: Path, tmp_path: Path):
    half = load_drafter(built, dtype=torch.bfloat16)
    assert half.fc.weight.dtype == torch.bfloat16
    save_drafter(half, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_file(tmp_path / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    proposal = half.propose(20, 0, half.new_cache())
    assert len(proposal.tokens) == 7


def test_target_matrices_are_not_saved(target: TinyModel, tmp_path: Path):
    drafter = load_drafter(build_drafter(tmp_path / "a", target, own_embeddings=False).path)
    embed = torch.from_numpy(target.tensors["model.embed_tokens.weight"])
    drafter.tie_target(embed, torch.from_numpy(target.tensors["lm_head.weight"]))
    tokens = drafter.propose(20, 0, drafter.new_cache()).tokens
    save_drafter(drafter, tmp_path / "b")
    again = load_drafter(tmp_path / "b")
    assert_same(again, drafter)
    with pytest.raises(LocalspecError, match="tie_target"):
        again.propose(20, 0, again.new_cache())
    with_own = load_drafter(build_drafter(tmp_path / "c", target).path)
    assert torch.equal(with_own.propose(20, 0, with_own.new_cache()).tokens, tokens)


def refusal(path: Path) -> str:
    with pytest.raises(LocalspecError) as caught:
        load_drafter(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    return message


def test_refuses_missing_extra_and_misshapen(copy: Path):
    edit(copy, norm__weight=None)
    assert "norm.weight is missing" in refusal(copy)
    edit(copy, norm__weight=torch.ones(95))
    assert "norm.weight is [95] but config.json asks for [96]" in refusal(copy)
    edit(copy, norm__weight=torch.ones(96, dtype=torch.int32))
    assert "type I32" in refusal(copy)
    edit(copy, norm__weight=torch.ones(96), spare=torch.ones(1))
    assert "spare is unknown" in refusal(copy)
    edit(copy, spare=None)
    load_drafter(copy)


def test_refuses_a_head_of_another_kind(copy: Path):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "markov_head_type": "gated"}))
    assert "gate_proj" in refusal(copy)


def test_refuses_impossible_sizes(copy: Path):
    config = json.loads((copy / "config.json").read_text())
    huge = {"hidden_size": 2**31 - 1, "vocab_size": 2**31 - 1, "intermediate_size": 2**31 - 1}
    (copy / "config.json").write_text(json.dumps({**config, **huge}))
    refusal(copy)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_refuses_truncated_weights(copy: Path, keep: int):
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "download it again" in refusal(copy)


def test_refuses_a_pickle(copy: Path):
    torch.save({"fc.weight": torch.ones(1)}, copy / "model.safetensors")
    assert "not a readable safetensors" in refusal(copy)


def test_refuses_no_weights(copy: Path):
    (copy / "model.safetensors").unlink()
    assert "neither" in refusal(copy)


def test_refuses_broken_indexes(built: Path, tmp_path: Path):
    shutil.copy(built / "model.safetensors", tmp_path)  # readable, but outside the checkpoint
    tmp_path = tmp_path / "checkpoint"
    save_drafter(load_drafter(built), tmp_path, max_shard_bytes=100_000)
    index = tmp_path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    for bad in ("", "[]", "{}", '{"weight_map": 3}', '{"weight_map": [1]}'):
        index.write_text(bad)
        assert "not a weight index" in refusal(tmp_path)
    for file in ("gone.safetensors", "../model.safetensors", ""):
        index.write_text(json.dumps({"weight_map": {**good["weight_map"], "fc.weight": file}}))
        assert "not a file of this directory" in refusal(tmp_path)
    other = next(f for f in good["weight_map"].values() if f != good["weight_map"]["fc.weight"])
    index.write_text(json.dumps({"weight_map": {**good["weight_map"], "fc.weight": other}}))
    assert "disagrees" in refusal(tmp_path)


def test_a_failed_save_leaves_the_old_one(built: Path, tmp_path: Path, monkeypatch):
    drafter = load_drafter(built)
    save_drafter(drafter, tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}

    def half_written(tensors, to, metadata=None):
        Path(to).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("localspec.models.checkpoint.save_file", half_written)
    with pytest.raises(OSError, match="disk full"):
        save_drafter(drafter, tmp_path)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before
