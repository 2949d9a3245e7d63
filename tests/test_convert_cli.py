"""The commands `convert` and its defaults, through click."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import tiny
from localspec import pairs
from localspec.cli.convert import OUTTYPES
from localspec.cli.convert import convert as command
from localspec.convert import OUTTYPES as KNOWN_OUTTYPES
from localspec.errors import LocalspecError


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    where = tmp_path_factory.mktemp("built")
    target = tiny.build_target(where / "target", tied=True)
    return target, {
        head: tiny.build_drafter(where / f"tiny-{head}", target, head=head)
        for head in ("vanilla", "gated", "none")
    }


@pytest.fixture(autouse=True)
def inside_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def invoke(*arguments):
    result = CliRunner().invoke(command, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_it_says_what_it_wrote_and_how_to_use_it(built, tmp_path):
    target, drafters = built
    result = invoke(drafters["gated"].path, "--target", target.gguf, "-o", "my drafter.gguf")
    assert result.exit_code == 0
    assert "wrote my drafter.gguf: gated drafter, f32, 31 tensors" in result.stdout
    assert "wrote my drafter.heads.gguf" in result.stdout
    assert f"localspec chat -m {target.gguf} -d 'my drafter.gguf'" in result.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"my drafter.gguf", "my drafter.heads.gguf"}


def test_notes_go_to_stderr(built):
    target, drafters = built
    result = invoke(drafters["none"].path, "--target", target.gguf)
    assert "note: the confidence head is left out" in result.stderr


def test_default_names(built, tmp_path, monkeypatch):
    target, drafters = built
    monkeypatch.setattr(pairs, "default_target", lambda: target.gguf)
    invoke(drafters["vanilla"].path)
    invoke(drafters["vanilla"].path, "--outtype", "q8_0", "--standalone")
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"tiny-vanilla-f32.gguf", "tiny-vanilla-q8_0.gguf"}


@pytest.mark.parametrize("name", ["d.gguf", "d.heads.gguf"])
def test_it_replaces_only_when_forced(name, built, tmp_path):
    target, drafters = built
    arguments = [drafters["gated"].path, "--target", target.gguf, "-o", "d.gguf"]
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(LocalspecError, match="--force"):
        invoke(*arguments)
    assert (tmp_path / name).read_bytes() == b"precious"
    assert invoke(*arguments, "--force").exit_code == 0
    assert (tmp_path / name).read_bytes()[:4] == b"GGUF"


def test_errors_are_left_to_the_caller(built):
    with pytest.raises(LocalspecError, match="does not exist"):
        invoke("nowhere", "--target", built[0].gguf)


def test_bad_usage(built):
    result = CliRunner().invoke(command, [str(built[1]["vanilla"].path), "--outtype", "q4"])
    assert result.exit_code == 2 and "q4" in result.stderr
    assert CliRunner().invoke(command, []).exit_code == 2


def test_outtypes_are_those_of_the_function():
    assert OUTTYPES == KNOWN_OUTTYPES


def test_a_progress_bar_on_a_terminal(built, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
    target, drafters = built
    result = invoke(drafters["vanilla"].path, "--target", target.gguf)
    assert result.exit_code == 0
    assert "tensor" in result.stderr and "wrote" in result.stdout
