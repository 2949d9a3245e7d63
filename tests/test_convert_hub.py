"""Hub ids: against a server on this machine that speaks the hub's protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

import tiny
from hub_server import COMMIT, OLDER, running_hub
from localspec.convert import convert, hub
from localspec.convert.source import Checkpoint
from localspec.errors import LocalspecError


@pytest.fixture
def server(monkeypatch, tmp_path):
    yield from running_hub(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def drafter(tiny_target, tmp_path_factory):
    return tiny.build_drafter(tmp_path_factory.mktemp("hub"), tiny_target, shard=True)


def refused(source: str, revision: str | None = None) -> str:
    with pytest.raises(LocalspecError) as caught:
        hub.resolve(source, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_downloads_what_is_needed_and_converts(server, drafter, tiny_target, tmp_path):
    (drafter.path / "training.log").write_text("x")
    server.publish("org/drafter", drafter.path)
    said: list[str] = []
    path = hub.resolve("org/drafter", say=said.append)
    assert said and COMMIT[:12] in said[0]
    assert sorted(name for name, _ in server.got) == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip
    convert(path, tiny_target.gguf, tmp_path / "a.gguf", outtype="f32")
    convert(drafter.path, tiny_target.gguf, tmp_path / "b.gguf", outtype="f32")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    got = len(server.got)
    convert("hf:org/drafter", tiny_target.gguf, tmp_path / "a.gguf", outtype="f32")
    assert len(server.got) == got  # everything from the cache


def test_revision_pins_the_commit(server, drafter):
    server.publish("org/drafter", drafter.path)
    assert OLDER in str(hub.resolve("org/drafter", "v1"))
    assert COMMIT in str(hub.resolve("org/drafter"))
    assert "no revision nope" in refused("org/drafter", "nope")


def test_goes_on_where_a_download_broke_off(server, drafter, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 256)
    server.publish("org/drafter", drafter.path)
    name = "model-00001-of-00002.safetensors"
    server.cut[name] = 100_000
    try:
        path = hub.resolve("org/drafter")
    except LocalspecError as e:  # the client may also leave the second attempt to the user
        assert "try again" in str(e) or "cannot be downloaded" in str(e)
        path = hub.resolve("org/drafter")
    ranges = [wanted for file, wanted in server.got if file == name]
    assert len(ranges) == 2 and ranges[1] is not None and not ranges[1].startswith("bytes=0-")
    assert (path / name).read_bytes() == server.repos["org/drafter"][name]


def test_not_found_and_gated(server, drafter):
    assert "neither a path here nor a repository" in refused("org/nothing")
    server.publish("org/closed", drafter.path)
    server.gated.add("org/closed")
    assert "accept its terms" in refused("org/closed")


def test_a_repository_without_weights(server, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "README.md").write_text("hello")
    server.publish("org/text", tmp_path / "r")
    assert "no checkpoint" in refused("org/text")


def test_offline(server, drafter, monkeypatch):
    from huggingface_hub import constants

    server.publish("org/drafter", drafter.path)
    online = hub.resolve("org/drafter")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.resolve("org/drafter", COMMIT) == online
    assert "HF_HUB_OFFLINE" in refused("org/other")


def test_no_network(server, drafter, monkeypatch):
    """What is in the cache serves; what is not is one clear line."""
    from huggingface_hub import constants

    server.publish("org/drafter", drafter.path)
    online = hub.resolve("org/drafter")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.resolve("org/drafter", COMMIT) == online
    assert "cannot be reached" in refused("org/other")


def test_only_the_shards_with_the_drafter(server, tmp_path):
    folder = tmp_path / "big"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"dspark_block_size": 8}))
    where = {"layers.0.x": "model-1.safetensors", "mtp.0.x": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for i in (1, 2):
        (folder / f"model-{i}.safetensors").write_bytes(b"x" * 9)
    server.publish("org/big", folder)
    path = hub.resolve("org/big")
    assert (path / "model-2.safetensors").exists()
    assert not (path / "model-1.safetensors").exists()


def test_a_repository_with_a_gguf(server, tiny_drafter, tiny_target, tmp_path):
    from localspec.cli.convert import convert as command

    model = tiny_drafter("vanilla")[1]
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "d-q8_0.gguf").write_bytes(model.read_bytes())
    server.publish("org/ready", tmp_path / "r")
    out = tmp_path / "copy.gguf"
    args = ["org/ready", "--target", str(tiny_target.gguf), "-o", str(out)]
    result = CliRunner().invoke(command, args)
    assert result.exit_code == 0, result.output
    assert "is a GGUF already and fits" in result.output
    assert out.read_bytes() == model.read_bytes()
    (tmp_path / "r" / "d-q4_0.gguf").write_bytes(model.read_bytes())
    server.publish("org/two", tmp_path / "r")
    assert "2 GGUF files" in refused("org/two")


@pytest.mark.parametrize(
    "name",
    ["../config.json", "/etc/x.safetensors", "a/../../model.safetensors", "a\\b.safetensors",
     "C:x.bin", "./config.json", "a//b", "\0.bin", ""],
)  # fmt: skip
def test_names_that_lead_out(name, server, drafter, tmp_path):
    server.publish("org/evil", drafter.path, name)
    if name:  # the client drops an empty one itself
        assert "leads out" in refused("org/evil")
    with pytest.raises(LocalspecError, match="leads out"):
        hub.wanted(["config.json", name])
    assert not list(tmp_path.rglob("x.safetensors"))


def test_names_in_an_index_that_lead_out(drafter, tmp_path):
    good = drafter.path / "model-00001-of-00002.safetensors"
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(good.read_bytes())
    inside = tmp_path / "c"
    inside.mkdir()
    (inside / "config.json").write_bytes((drafter.path / "config.json").read_bytes())
    for name in ("../outside.safetensors", str(outside), "x/../../outside.safetensors", ".."):
        index = {"weight_map": {"fc.weight": name}}
        (inside / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(LocalspecError, match="shard"):
            Checkpoint(inside)


def test_a_planted_link_is_not_written_through(drafter, tiny_target, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "d.gguf"
    out.symlink_to(victim)
    (tmp_path / "out" / f".d.gguf.{os.getpid()}.part").symlink_to(victim)
    convert(drafter.path, tiny_target.gguf, out, outtype="f32")
    assert victim.read_text() == "precious"
    assert not out.is_symlink() and out.read_bytes()[:4] == b"GGUF"


def test_what_is_an_id_and_what_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.hub_id("deepseek-ai/dspark_qwen3_8b_block7") == "deepseek-ai/dspark_qwen3_8b_block7"
    assert hub.hub_id("https://huggingface.co/org/name/") == "org/name"
    assert hub.hub_id("hf.co/org/name") == "org/name"
    for path in (
        "name",
        "./org/name",
        "/org/name",
        "~/x",
        "a/b/c",
        "../x",
        "org/..",
        "org/name.x/",
    ):
        assert hub.hub_id(path) is None or path == "org/name.x/"
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert hub.hub_id("org/name") is None
    assert hub.hub_id("hf:org/name") == "org/name"
    with pytest.raises(LocalspecError, match="--revision"):
        hub.resolve("org/name", "v1")


def test_environment_variables_of_the_hub(server, drafter, tiny_target, tmp_path):
    """A mirror by HF_ENDPOINT and a cache by HF_HOME, in a process of its own."""
    server.publish("org/drafter", drafter.path)
    home = tmp_path / "home"
    env = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "localspec", "convert", "org/drafter", "--no-verify",
               "--target", str(tiny_target.gguf)]  # fmt: skip
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "drafter-f32.gguf").exists() and any(home.rglob("*.safetensors"))
    server.shutdown()
    server.server_close()
    command[4] = "org/other"
    env |= {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "HF_HUB_OFFLINE is set" in done.stderr
    assert done.stderr.strip().count("\n") == 0


def test_shards_that_broke_off_hide_no_complete_checkpoint(server, drafter, monkeypatch):
    from localspec import hub as cache

    server.publish("org/drafter", drafter.path)
    first = hub.resolve("org/drafter")
    server.commit = newer = "a" * 40
    shard = "model-00002-of-00002.safetensors"
    server.repos["org/drafter"][shard] += b"newer"
    fetch = hub.fetch

    def get(name: str, file: str, *args: object, **more: object) -> object:
        if file == shard:
            raise cache.UnreachableError("it broke off")
        return fetch(name, file, *args, **more)

    with monkeypatch.context() as m:
        m.setattr(hub, "fetch", get)
        # Older weights in place of those asked for would go unnoticed.
        assert "it broke off" in refused("org/drafter")
    assert (first.parent / newer / "config.json").exists()
    # Other programs note a commit before they have its files.
    for index in (True, False):
        (cache.repo_folder("org/drafter") / "refs" / "main").write_text(newer)
        with monkeypatch.context() as m:
            m.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
            assert hub.resolve("org/drafter") == first
            assert "HF_HUB_OFFLINE" in refused("org/drafter", newer)
        for commit in (newer, COMMIT) if index else ():
            (first.parent / commit / "model.safetensors.index.json").unlink()
    assert hub.resolve("org/drafter").name == newer
