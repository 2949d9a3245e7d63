"""`localspec inspect` on targets, drafters, heads, pairs and broken files."""

from __future__ import annotations

import json
import os
import shutil

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

import tiny
from localspec.cli.inspect import inspect as command
from localspec.convert import convert
from localspec.errors import LocalspecError

SIZES = {"vocab": 320, "layers": 4, "width": 64, "tied": True}
RANK = 24


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    where = tmp_path_factory.mktemp("files")
    target = tiny.build_target(where / "t", **SIZES)
    found = {"target": target.gguf}
    for head in ("vanilla", "gated", "rnn", "none"):
        drafter = tiny.build_drafter(where / head, target, head=head, rank=RANK)
        found[head] = convert(drafter.path, target.gguf, where / f"{head}.gguf").path
    found["heads"] = where / "rnn.heads.gguf"
    found["standalone"] = convert(
        where / "vanilla", target.gguf, where / "standalone.gguf", standalone=True
    ).path
    return found


def invoke(*arguments):
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def as_json(*arguments):
    return json.loads(invoke(*arguments, "--json").stdout)


def error(*arguments) -> str:
    with pytest.raises(LocalspecError) as e:
        invoke(*arguments)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_a_target(files):
    said = as_json(files["target"])
    assert said["kind"] == "target" and said["architecture"] == "qwen3"
    assert said["layers"] == 4 and said["vocabulary"] == 320 and said["context"] == 2048
    assert said["stored_as"] == {"F32": 1.0}
    assert said["chat_template"] is True and said["layer_features"] is True
    words = invoke(files["target"]).stdout
    assert "a target" in words and "yes: drafters can be used" in words


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_a_drafter(head, files):
    said = as_json(files[head])
    assert said["kind"] == "drafter" and said["family"] == "DSpark" and said["head"] == head
    assert said["block_size"] == said["depths"] == 7 and said["mask_token"] == tiny.MASK_ID
    assert said["confidence_head"] == (head != "none")
    assert said["rank"] == (0 if head == "none" else RANK)
    assert (said["heads_file"] is not None) == (head in ("gated", "rnn"))
    assert said["made_for"] == "tiny-qwen3" and said["of_target_layers"] == 4
    assert said["standalone"] is False
    words = invoke(files[head]).stdout
    assert "a drafter" in words and f"  {head}\n" in words
    assert "embeddings and output matrix are the target's" in words


def test_a_standalone_drafter(files):
    assert as_json(files["standalone"])["standalone"] is True


def test_heads(files):
    said = as_json(files["heads"])
    assert said["kind"] == "heads" and said["head"] == "rnn" and said["rank"] == RANK
    assert said["confidence_head"] is True and len(said["pair_id"]) == 32
    assert "the heads of a drafter" in invoke(files["heads"]).stdout


@pytest.mark.parametrize("drafter", ["vanilla", "rnn", "none", "standalone"])
def test_a_pair_that_fits(drafter, files):
    for pair in ((files["target"], files[drafter]), (files[drafter], files["target"])):
        result = invoke(*pair)
        assert result.exit_code == 0 and "These two fit together." in result.stdout
        said = as_json(*pair)
        assert said["fits"] is True and said["reason"] is None and len(said["files"]) == 2


@pytest.mark.parametrize(
    ("build", "words"),
    [({"width": 128}, "width"), ({"vocab": 330}, "vocabulary"), ({"layers": 5}, "target layers"),
     ({"arch": "qwen2"}, "no layer features")],
)  # fmt: skip
def test_a_pair_that_does_not(build, words, files, tmp_path):
    other = tiny.build_target(tmp_path, **{**SIZES, **build}).gguf
    for pair in ((other, files["vanilla"]), (files["vanilla"], other)):
        assert words in error(*pair)
        result = invoke(*pair, "--json")
        assert result.exit_code == 1
        said = json.loads(result.stdout)
        assert said["fits"] is False and words in said["reason"]


def test_two_of_a_kind(files):
    assert "not a target" in error(files["vanilla"], files["rnn"])
    assert "not a DSpark, DFlash or Eagle3 drafter" in error(files["target"], files["target"])
    assert "not a target" in error(files["vanilla"], files["heads"])


def test_a_drafter_without_its_heads(files, tmp_path):
    lonely = shutil.copy(files["rnn"], tmp_path / "lonely.gguf")
    assert "lonely.heads.gguf, which is missing" in error(lonely)
    shutil.copy(files["gated"].with_name("gated.heads.gguf"), tmp_path / "lonely.heads.gguf")
    assert "belongs to another drafter" in error(lonely)
    shutil.copy(files["target"], tmp_path / "lonely.heads.gguf")
    assert "does not hold drafter heads" in error(lonely)


def test_broken_files(files, tmp_path):
    assert "does not exist" in error(tmp_path / "no.gguf")
    assert "is a directory" in error(tmp_path)
    (tmp_path / "text.gguf").write_text("hello " * 100)
    assert "not a GGUF" in error(tmp_path / "text.gguf")
    cut = shutil.copy(files["vanilla"], tmp_path / "cut.gguf")
    os.truncate(cut, os.path.getsize(cut) // 2)
    assert "damaged or incomplete" in error(cut)
    assert "damaged or incomplete" in error(files["target"], cut)


def test_nothing_from_a_file_reaches_the_terminal_raw(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_name("evil\x1b[31m\nname")
    writer.add_block_count(1)
    writer.add_embedding_length(4)
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    words = invoke(tmp_path / "t.gguf").stdout
    assert "evil?[31m?name" in words and "\x1b" not in words
    assert "not said" in words  # no context length
    assert as_json(tmp_path / "t.gguf")["chat_template"] is False


def test_bad_usage():
    assert CliRunner().invoke(command, []).exit_code == 2
