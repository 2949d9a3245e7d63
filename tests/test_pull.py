"""From names to files, against a server on this machine that speaks the hub's protocol."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import tiny
from hub_server import COMMIT, Hub, point_to, running_hub
from localspec import default_pair, finding, hub, registry
from localspec.cli import cli
from localspec.errors import LocalspecError
from localspec.finding import Files, Finder
from localspec.ggufio import GgufFile
from localspec.pairs import check_pair, heads_path

NAME = "tiny-1b"
GGUFS, DRAFTER = "org/Tiny-GGUF", "org/tiny_dspark"
FILE = "Tiny-Q4_K_M.gguf"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "own"))
    yield from running_hub(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def checkpoint(tiny_target: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_drafter(tmp_path_factory.mktemp("pull"), tiny_target).path


@pytest.fixture
def published(
    server: Hub,
    tiny_target: tiny.TinyModel,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Hub:
    """A pair with a name, whose target and drafter are on the hub."""
    models = tmp_path / "published"
    models.mkdir()
    shutil.copy(tiny_target.gguf, models / FILE)
    shutil.copy(tiny_target.gguf, models / "Tiny-Q8_0.gguf")
    (models / "mmproj-Tiny-Q8_0.gguf").write_bytes(b"x")
    server.publish(GGUFS, models)
    server.publish(DRAFTER, checkpoint)
    name_it(tmp_path, tiny_target, monkeypatch)
    return server


def name_it(
    tmp_path: Path, target: tiny.TinyModel, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> None:
    """Give the tiny pair a name in a registry beside the real one's packaged pair."""
    data = target.gguf.read_bytes()
    entry = {
        "layers": target.config["num_hidden_layers"],
        "width": target.config["hidden_size"],
        "sha256": hashlib.sha256(data).hexdigest(),
        **changes,
    }
    file = tmp_path / "pairs.toml"
    file.write_text(
        f"""
        [smollm2-135m]
        title = "SmolLM2"
        layers = 30
        width = 576
        packaged = true
        [{NAME}]
        title = "Tiny"
        layers = {entry["layers"]}
        width = {entry["width"]}
        [{NAME}.target]
        repo = "{GGUFS}"
        file = "{FILE}"
        size = {len(data)}
        revision = "{COMMIT}"
        sha256 = "{entry["sha256"]}"
        from = "here"
        [{NAME}.drafters]
        dspark = {{ repo = "{DRAFTER}", from = "here" }}
        """
    )
    named = registry.read(file)
    for module in ("finding", "inventory"):
        monkeypatch.setattr(f"localspec.{module}.known_pairs", lambda: named)


def pull(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["pull", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str | None, finder: Finder | None = None) -> str:
    with pytest.raises(LocalspecError) as caught:
        (finder or Finder(update=True)).files(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://127.0.0.1:9", monkeypatch)


def test_a_name_is_pulled_once_and_used_without_a_network(published, tiny_target, monkeypatch):
    said = pull(NAME)
    assert f"localspec chat {NAME}" in said
    assert [file for file, _ in published.got] == [FILE, "config.json", "model.safetensors"]
    target, drafter = Finder().files(NAME)
    assert target.read_bytes() == tiny_target.gguf.read_bytes()
    assert str(target) in said and str(drafter) in said
    with GgufFile(target) as header, GgufFile(drafter) as other:
        assert check_pair(header, other).head_type == "vanilla"
    got = list(published.got)
    assert pull(NAME) == said
    assert published.got == got
    asked = published.requests
    assert Finder().files(NAME) == (target, drafter)
    assert published.requests == asked  # using asks nobody
    unreachable(monkeypatch)
    assert pull(NAME) == said
    run = ["generate", NAME, "--raw", "-p", "abc", "-n", "4", "--threads", "1", "--n-ctx", "64"]
    result = CliRunner().invoke(cli, [*run, "--policy", "fixed", "--json"], catch_exceptions=False)
    assert len(json.loads(result.stdout)["token_ids"]) == 4, result.output
    assert json.loads(result.stdout)["rounds"][0]["drafted"] > 0


def test_the_checkpoint_is_not_needed_any_more(published, monkeypatch):
    found = Finder().files(NAME)
    shutil.rmtree(hub.repo_folder(DRAFTER))
    got = list(published.got)
    assert Finder(update=True).files(NAME) == found
    assert published.got == got
    unreachable(monkeypatch)
    assert Finder().files(NAME) == found


def test_a_newer_checkpoint_replaces_the_drafter(published, monkeypatch):
    first = Finder().files(NAME).drafter
    published.commit = "a" * 40
    assert Finder().files(NAME).drafter == first
    newer = Finder(update=True).files(NAME).drafter
    assert newer.name.startswith("a" * 12) and newer != first
    unreachable(monkeypatch)
    said: list[str] = []
    assert Finder(said.append, update=True).files(NAME).drafter == newer
    assert len(said) == 1 and "cannot be reached" in said[0] and "what is here" in said[0]


def test_a_damaged_drafter_is_made_again(published):
    drafter = Finder().files(NAME).drafter
    good = drafter.read_bytes()
    drafter.write_bytes(good[: len(good) // 2])
    assert Finder().files(NAME).drafter == drafter
    assert drafter.read_bytes() == good


def test_another_tokenizer_gets_a_drafter_of_its_own(published, tiny_target, tmp_path):
    other = tmp_path / "other.gguf"
    with GgufFile(tiny_target.gguf) as file:
        start, _ = file.value_span("tokenizer.chat_template")
    data = bytearray(tiny_target.gguf.read_bytes())
    data[start + 20] ^= 1
    other.write_bytes(data)
    ours = Finder().files(NAME).drafter
    theirs = Finder().files(other, DRAFTER).drafter
    assert ours != theirs and ours.parent == theirs.parent


def interrupted(server: Hub, file: str, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break a download off, and the program too, as it waits to go on."""
    from huggingface_hub import constants, file_download

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    server.cut[file] = after
    with monkeypatch.context() as m:
        m.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
        m.setattr(file_download.time, "sleep", stop)
        with pytest.raises((KeyboardInterrupt, LocalspecError)):  # older clients do not wait
            Finder().files(NAME)


def test_it_goes_on_where_an_earlier_run_ended(published, tiny_target, monkeypatch):
    interrupted(published, FILE, 50_000, monkeypatch)
    assert hub.cached(GGUFS, FILE, COMMIT) is None
    kept = hub.unfinished(GGUFS, hashlib.sha256(tiny_target.gguf.read_bytes()).hexdigest())
    assert 40_000 < kept <= 50_000
    listed = CliRunner().invoke(cli, ["models", "--json"], catch_exceptions=False)
    entry = json.loads(listed.stdout)[1]["target"]
    assert entry["bytes_here"] == kept and not entry["downloaded"]
    target = Finder().files(NAME).target
    assert target.read_bytes() == tiny_target.gguf.read_bytes()
    assert [r for f, r in published.got if f == FILE] == [None, f"bytes={kept}-"]


def test_what_went_wrong_before_the_end_is_found_out(published, tiny_target, monkeypatch):
    """A part that is not the file's beginning: the whole is refused, and gone."""
    interrupted(published, FILE, 50_000, monkeypatch)
    (part,) = (hub.repo_folder(GGUFS) / "blobs").glob("*.incomplete")
    part.write_bytes(b"x" * part.stat().st_size)
    assert "arrived damaged" in refused(NAME)
    assert not part.exists() and hub.cached(GGUFS, FILE, COMMIT) is None
    assert Finder().files(NAME).target.read_bytes() == tiny_target.gguf.read_bytes()


def test_a_part_that_is_too_long_is_thrown_away(published, tiny_target, monkeypatch):
    interrupted(published, FILE, 50_000, monkeypatch)
    (part,) = (hub.repo_folder(GGUFS) / "blobs").glob("*.incomplete")
    part.write_bytes(b"x" * (len(tiny_target.gguf.read_bytes()) + 1))
    assert Finder().files(NAME).target.read_bytes() == tiny_target.gguf.read_bytes()


def test_a_wrong_checksum(published):
    """What the hub says about a file, and what it sends, differ."""
    published.etags["Tiny-Q8_0.gguf"] = "0" * 64
    assert "checksum" in refused(f"{GGUFS}:Q8_0")
    assert hub.cached(GGUFS, "Tiny-Q8_0.gguf") is None
    assert not list((hub.repo_folder(GGUFS) / "blobs").iterdir())
    published.etags["model.safetensors"] = "1" * 64
    assert "checksum" in refused(NAME)
    published.etags.clear()
    assert Finder().files(NAME).drafter is not None


def test_a_file_that_is_not_the_known_one(published, tiny_target, tmp_path, monkeypatch):
    name_it(tmp_path, tiny_target, monkeypatch, sha256="f" * 64)
    assert "not the file that localspec knows" in refused(NAME)
    assert FILE not in [file for file, _ in published.got]
    # A mirror that gives other checksums, or none that are any: the content decides.
    published.etags[FILE] = "some-etag"
    assert "checksum" in refused(NAME)
    assert hub.cached(GGUFS, FILE, COMMIT) is None
    name_it(tmp_path, tiny_target, monkeypatch)
    assert Finder().files(NAME, "none").target.exists()


def test_git_checksums_of_small_files(published, checkpoint):
    data = (checkpoint / "config.json").read_bytes()
    sha1 = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    assert hub.digest(checkpoint / "config.json", sha1) == sha1
    published.etags["config.json"] = "2" * 40
    assert "config.json" in refused(NAME)
    published.etags["config.json"] = sha1
    assert Finder().files(NAME).drafter is not None


def test_another_model_under_the_name(published, tiny_target, tmp_path, monkeypatch):
    name_it(tmp_path, tiny_target, monkeypatch, layers=99)
    message = refused(NAME)
    assert "has 4 layers of width 96" in message and "99" in message
    assert not [f for f, _ in published.got if f != FILE]  # before the drafter is downloaded


def test_a_full_disk(published, monkeypatch):
    from huggingface_hub import file_download

    usage = shutil.disk_usage(".")._replace(free=1000)
    with monkeypatch.context() as m:
        m.setattr(shutil, "disk_usage", lambda path: usage)
        message = refused(NAME)
        assert "no room for" in message and "HF_HOME" in message and "1 kB free" in message
    assert not published.got

    def full(url: str, out: object, **options: object) -> None:
        out.write(b"abc")  # type: ignore[attr-defined]
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(file_download, "http_get", full)
        assert "the disk is full" in refused(NAME)
    assert list((hub.repo_folder(GGUFS) / "blobs").glob("*.incomplete"))


def test_no_network_and_nothing_here(published, monkeypatch):
    from huggingface_hub import constants

    unreachable(monkeypatch)
    for name in (NAME, GGUFS, f"{GGUFS}:Q8_0", f"{GGUFS}/{FILE}"):
        assert "cannot be reached" in refused(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (NAME, GGUFS):
        assert "HF_HUB_OFFLINE is set" in refused(name)


def test_what_is_not_on_the_hub(published):
    assert "neither a path here nor a repository" in refused("org/nothing")
    assert "did you mean Tiny-Q4_K_M.gguf?" in refused(f"{GGUFS}/Tiny-Q4_K.gguf")
    message = refused(f"{GGUFS}:Q2_K")
    assert "Tiny-Q4_K_M.gguf, Tiny-Q8_0.gguf" in message and "mmproj" not in message
    assert "holds no GGUF model" in refused(DRAFTER)
    published.gated.add(GGUFS)
    assert "accept its terms" in refused(f"{GGUFS}:Q8_0")
    published.gated.clear()
    del published.repos[GGUFS][FILE]
    assert "does not hold" in refused(NAME)
    assert "neither a path here nor a repository" in refused(f"{NAME}:Q8_0", "org/nothing")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (GGUFS, FILE),  # the usual type
        (f"{GGUFS}:q8_0", "Tiny-Q8_0.gguf"),
        (f"hf.co/{GGUFS}:Q8_0", "Tiny-Q8_0.gguf"),
        (f"{GGUFS}/Tiny-Q8_0.gguf", "Tiny-Q8_0.gguf"),
        (f"https://huggingface.co/{GGUFS}/blob/main/Tiny-Q8_0.gguf", "Tiny-Q8_0.gguf"),
        (f"{NAME}:Q8_0", "Tiny-Q8_0.gguf"),
        (f"{NAME}:Q4_K_M", FILE),
        (NAME.upper(), FILE),
    ],
)
def test_models_on_the_hub(name, file, published, monkeypatch):
    target, drafter = Finder().files(name)
    assert target.name == file and [f for f, _ in published.got][:1] == [file]
    assert (drafter is not None) == name.lower().startswith(NAME)
    unreachable(monkeypatch)
    assert Finder().files(name) == (target, drafter)
    assert Finder(update=True).files(name) == (target, drafter)


def test_a_model_in_parts(published, tiny_target, tmp_path):
    folder = tmp_path / "split" / "Q4_K_M"
    folder.mkdir(parents=True)
    for i in (1, 2):
        (folder / f"Big-Q4_K_M-0000{i}-of-00002.gguf").write_bytes(tiny_target.gguf.read_bytes())
    published.publish("org/Big-GGUF", folder.parent)
    first = Finder().files("org/Big-GGUF").target
    assert first.name == "Big-Q4_K_M-00001-of-00002.gguf"
    assert first.with_name("Big-Q4_K_M-00002-of-00002.gguf").exists()
    (folder / "Big-Q4_K_M-00002-of-00002.gguf").unlink()
    published.publish("org/Half-GGUF", folder.parent)
    assert "00002-of-00002.gguf is missing" in refused("org/Half-GGUF")


# ---- downloads that broke off, and what they must not hide

NEWER = "a" * 40
BIG, PARTS = "org/Big-GGUF", [f"Big-Q4_K_M-0000{i}-of-00002.gguf" for i in (1, 2)]


@pytest.fixture
def big(published: Hub, tiny_target: tiny.TinyModel, tmp_path: Path) -> Path:
    """A model in two parts that was downloaded once; where its first part lies."""
    folder = tmp_path / "big"
    folder.mkdir()
    for part in PARTS:
        (folder / part).write_bytes(tiny_target.gguf.read_bytes() + part.encode())
    published.publish(BIG, folder)
    return Finder(update=True).files(BIG).target


def republish(server: Hub, name: str) -> None:
    """A newer commit, in which every file has changed."""
    server.repos[name] = {file: data + b"newer" for file, data in server.repos[name].items()}
    server.commit = NEWER


def broken_off(
    server: Hub, file: str, monkeypatch: pytest.MonkeyPatch, *names: str, update: bool = True
) -> str:
    """A download that ends within `file`, as the network does; what is said about it."""
    from huggingface_hub import file_download

    def stop(*_args: object, **_more: object) -> None:
        raise ConnectionError("it broke off")

    real = file_download.http_get

    def get(url: str, out: object, **more: object) -> None:
        (stop if url.endswith(f"/{file}") else real)(url, out, **more)

    with monkeypatch.context() as m:
        m.setattr(file_download, "http_get", get)
        return refused(*names, finder=Finder(update=update))


def snapshot(name: str, commit: str, **contents: bytes | str | None) -> Path:
    """A snapshot as any program may leave it: bytes, a link to a blob, or a link to nothing."""
    folder = hub.repo_folder(name)
    root = folder / "snapshots" / commit
    for file, content in contents.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.symlink_to(folder / "blobs" / (content or "missing"))
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return root


def test_parts_that_broke_off_hide_no_complete_model(big, published, monkeypatch):
    republish(published, BIG)
    assert "what is downloaded is kept" in broken_off(published, PARTS[1], monkeypatch, BIG)
    assert hub.cached(BIG, PARTS[0], NEWER) is not None
    assert hub.cached(BIG, PARTS[1], NEWER) is None
    asked = published.requests
    for name in (BIG, f"{BIG}:Q4_K_M", f"{BIG}/{PARTS[0]}"):
        assert Finder().files(name).target == big
    assert published.requests == asked
    with monkeypatch.context() as m:
        unreachable(m)
        said: list[str] = []
        assert Finder(said.append, update=True).files(BIG).target == big
        assert len(said) == 1 and "using what is here" in said[0]
    published.got.clear()
    newer = Finder(update=True).files(BIG).target
    assert [file for file, _ in published.got] == [PARTS[1]]  # only what was missing
    assert NEWER in str(newer) and newer.with_name(PARTS[1]).read_bytes().endswith(b"newer")
    unreachable(monkeypatch)
    assert Finder().files(BIG).target == newer


@pytest.mark.parametrize("second", ["nothing", "a dangling link", "an unfinished blob"])
def test_incomplete_snapshots_of_other_programs(big, second, tiny_target, monkeypatch):
    """They note the newest commit before they have its files."""
    content = {"a dangling link": {PARTS[1]: None}, "an unfinished blob": {PARTS[1]: "f" * 64}}
    snapshot(BIG, NEWER, **{PARTS[0]: b"GGUF"}, **content.get(second, {}))
    unfinished = hub.repo_folder(BIG) / "blobs" / f"{'f' * 64}.incomplete"
    unfinished.write_bytes(tiny_target.gguf.read_bytes()[:1000])
    unreachable(monkeypatch)
    for name in (BIG, f"{BIG}:Q4_K_M", f"{BIG}/{PARTS[0]}"):
        assert Finder().files(name).target == big
    os.unlink(big.with_name(PARTS[1]))  # no snapshot is complete any more
    assert "cannot be reached" in refused(BIG)


def test_the_newest_complete_snapshot_is_the_one(big, tiny_target, monkeypatch):
    data = tiny_target.gguf.read_bytes()
    for age, commit in ((300, "b" * 40), (100, "c" * 40), (200, "d" * 40)):
        root = snapshot(BIG, commit, **dict.fromkeys(PARTS, data))
        os.utime(root, (root.stat().st_mtime - age,) * 2)
    os.utime(big.parent, (1e9, 1e9))
    snapshot(BIG, NEWER, **{PARTS[0]: data})
    unreachable(monkeypatch)
    assert Finder().files(BIG).target.parent.name == "c" * 40
    snapshot(BIG, "b" * 40)  # what "main" is known to lead to comes before its age
    assert Finder().files(BIG).target.parent.name == "b" * 40


def test_another_file_of_a_newer_commit_hides_none(published, monkeypatch):
    first = Finder().files(f"{GGUFS}:Q4_K_M").target
    republish(published, GGUFS)
    second = Finder().files(f"{GGUFS}:Q8_0").target
    assert (first.parent.name, second.parent.name) == (COMMIT, NEWER)
    unreachable(monkeypatch)
    assert Finder().files(f"{GGUFS}:Q4_K_M").target == first
    assert Finder().files(f"{GGUFS}/{FILE}").target == first
    assert Finder().files(f"{GGUFS}:Q8_0").target == second


def test_a_single_file_that_broke_off_hides_none(published, monkeypatch):
    first = Finder().files(f"{GGUFS}:Q8_0").target
    republish(published, GGUFS)
    broken_off(published, "Tiny-Q8_0.gguf", monkeypatch, f"{GGUFS}:Q8_0")
    assert list((hub.repo_folder(GGUFS) / "blobs").glob("*.incomplete"))
    # The hub is asked which file is meant, and the one it names does not come.
    published.repos[GGUFS].pop(FILE)
    published.listed[GGUFS].remove(FILE)
    said: list[str] = []
    with monkeypatch.context() as m:
        m.setattr(hub, "fetch", lambda *_a, **_k: (_ for _ in ()).throw(hub.UnreachableError("x")))
        assert Finder(said.append).files(GGUFS).target == first
    assert said[-1] == "x; using what is here"
    unreachable(monkeypatch)
    assert Finder().files(f"{GGUFS}:Q8_0").target == first
    first.unlink()
    first.symlink_to(tmp := hub.repo_folder(GGUFS) / "blobs" / "gone")
    assert not tmp.exists()
    assert "cannot be reached" in refused(f"{GGUFS}:Q8_0")


def test_other_branches_and_tags_stay_apart(published, monkeypatch):
    at = "https://huggingface.co/" + GGUFS + "/blob/{}/Tiny-Q8_0.gguf"
    tagged = Finder().files(at.format("v1")).target
    unreachable(monkeypatch)
    assert Finder().files(f"{GGUFS}:Q8_0").target == tagged  # all there is
    snapshot(GGUFS, NEWER, **{"Tiny-Q8_0.gguf": None})
    assert "cannot be reached" in refused(f"{GGUFS}:Q8_0")  # "main" was never that
    assert Finder().files(at.format("v1")).target == tagged
    root = snapshot(GGUFS, NEWER, **{"Tiny-Q4_K_M.gguf": b"GGUF"})
    (hub.repo_folder(GGUFS) / "refs" / "v1").write_text(NEWER)
    assert "cannot be reached" in refused(at.format("v1"))  # nor "v1" what "main" was
    assert root.is_dir()


def test_a_drafter_that_broke_off_hides_none(published, tiny_target, tiny_drafter, tmp_path,
                                             monkeypatch):  # fmt: skip
    folder = tmp_path / "ready"
    folder.mkdir()
    shutil.copy(tiny_drafter("vanilla")[1], folder / "d-q8_0.gguf")
    published.publish("org/ready", folder)
    target = tiny_target.gguf
    names = ("org/ready", "org/ready:q8_0")
    first = Finder().files(target, names[0]).drafter
    republish(published, "org/ready")
    for name in names:
        broken_off(published, "d-q8_0.gguf", monkeypatch, str(target), name)
    snapshot("org/ready", NEWER, **{"d-q8_0.gguf": None})
    with monkeypatch.context() as m:
        unreachable(m)
        for name in names:
            assert Finder().files(target, name).drafter == first
    newer = Finder(update=True).files(target, names[0]).drafter  # the link is mended
    assert newer.parent.name == NEWER and newer.read_bytes().endswith(b"newer")


@pytest.mark.parametrize("name", ["org/two", "org/two/d.gguf"])
def test_a_drafter_in_two_files(published, tiny_target, tiny_drafter, tmp_path, name, monkeypatch):
    """Its heads come with it, and before it: where its file is, nothing is missing."""
    folder = tmp_path / "two"
    folder.mkdir()
    ready = tiny_drafter("gated")[1]
    shutil.copy(ready, folder / "d.gguf")
    shutil.copy(heads_path(ready), folder / "d.heads.gguf")
    published.publish("org/two", folder)
    target = tiny_target.gguf
    for file in ("d.heads.gguf", "d.gguf"):
        broken_off(published, file, monkeypatch, str(target), name, update=False)
        with monkeypatch.context() as m:
            unreachable(m)
            assert "cannot be reached" in refused(str(target), name)
    found = Finder().files(target, name)
    found.check()
    assert found.drafter.name == "d.gguf"
    unreachable(monkeypatch)
    assert Finder().files(target, name) == found


def test_a_checkpoint_that_broke_off_makes_no_drafter(published, monkeypatch):
    first = Finder().files(NAME).drafter
    weights = published.repos[DRAFTER]["model.safetensors"]
    published.repos[DRAFTER]["model.safetensors"] = weights[:-1] + bytes([weights[-1] ^ 1])
    published.commit = NEWER
    broken_off(published, "model.safetensors", monkeypatch, NAME)
    assert list(first.parent.glob("*.gguf")) == [first]  # no newer name for older weights
    with monkeypatch.context() as m:
        unreachable(m)
        assert Finder().files(NAME).drafter == first
        assert Finder(update=True).files(NAME).drafter == first
    newer = Finder(update=True).files(NAME).drafter
    assert newer.name.startswith(NEWER[:12])


def test_a_link_to_nothing_is_not_listed(published, monkeypatch):
    target = Finder().files(NAME).target
    os.unlink(os.path.realpath(target))
    listed = json.loads(CliRunner().invoke(cli, ["models", "--json"]).stdout)[1]
    assert not listed["ready"] and not listed["target"]["downloaded"]
    assert listed["target"]["path"] is None
    assert Finder().files(NAME).target.exists()


def test_drafters_of_any_target(published, tiny_target, tiny_drafter, tmp_path):
    path = tiny_target.gguf
    assert Finder().files(path) == (path, None)
    assert Finder().files(str(path), "mtp") == (path, "mtp")
    assert Finder().files(NAME, "none").drafter is None
    made = Finder().files(str(path), DRAFTER).drafter
    assert made.parent.name == DRAFTER.replace("/", "--")
    ready = tiny_drafter("gated")[1]
    assert Finder().files(path, str(ready)).drafter == ready
    folder = tmp_path / "ready"
    folder.mkdir()
    shutil.copy(tiny_drafter("vanilla")[1], folder / "d-q8_0.gguf")
    published.publish("org/ready", folder)
    for name in ("org/ready", "org/ready/d-q8_0.gguf", "org/ready:q8_0"):
        assert Finder().files(path, name).drafter.name == "d-q8_0.gguf"
    assert "families such as dspark go with the names" in refused(str(path), "dspark")
    assert "it has dspark, or mtp" in refused(NAME, "eagle4")


def test_a_drafter_for_another_target(published, checkpoint, tmp_path):
    config = json.loads((checkpoint / "config.json").read_text())
    folder = tmp_path / "wide"
    shutil.copytree(checkpoint, folder)
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    published.publish("org/wide", folder)
    refused(NAME, "org/wide")
    assert not list((tmp_path / "own").rglob("*.gguf"))


def test_paths_and_typing_errors(published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Finder().files("missing.gguf").target == Path("missing.gguf")
    assert Finder().files("models/missing.gguf").target == Path("models/missing.gguf")
    assert f"did you mean {NAME}?" in refused("tiny-2b")
    assert "`localspec models` lists the names" in refused("what")
    (tmp_path / "folder").mkdir()
    (tmp_path / "not.gguf").write_text("nothing")
    for argument in ("missing.gguf", "a/b/c/d", "folder", "not.gguf"):
        result = CliRunner().invoke(cli, ["pull", argument])
        assert isinstance(result.exception, LocalspecError) and argument in str(result.exception)
        assert result.stdout == ""
    (tmp_path / NAME).write_text("a file of that name comes first")
    assert Finder().files(NAME) == (Path(NAME), None)
    assert not published.got


def test_folders_do_not_hide_names(published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (NAME, "dspark", DRAFTER):
        (tmp_path / folder).mkdir(parents=True)
    target, drafter = Finder().files(NAME, "dspark")
    assert target.name == FILE and drafter is not None and Path(drafter).is_file()


def test_the_default_pair_is_hidden_by_nothing(published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = tmp_path / "target.gguf", tmp_path / "drafter.gguf"
    monkeypatch.setattr(default_pair, "default_target", lambda: files[0])
    monkeypatch.setattr(default_pair, "default_pair", lambda: files)
    monkeypatch.setattr(registry.KnownPair, "check", lambda pair, target: None)
    shutil.copy(next((tmp_path / "published").glob("*.gguf")), files[0])
    (tmp_path / "smollm2-135m").write_text("a file of that name")
    assert Finder().files() == files


def test_two_names_are_one_too_many(published):
    result = CliRunner().invoke(cli, ["generate", NAME, "-m", NAME, "-p", "x"])
    assert result.exit_code == 2 and "named twice" in result.output


def test_names_that_lead_out(published, tmp_path):
    published.repos["org/evil"] = {"../../../x.gguf": b"GGUF"}
    published.listed["org/evil"] = ["../../../x.gguf"]
    assert "leads out" in refused("org/evil")
    assert not list(tmp_path.rglob("x.gguf"))
    published.commit = "../../../../evil"
    refused(f"{GGUFS}:Q8_0")
    assert not (tmp_path.parent / "evil").exists() and not (tmp_path / "evil").exists()


def test_two_programs_want_the_same_file(published, tiny_target):
    """The second waits, says so, and then downloads nothing."""
    from filelock import FileLock

    sha256 = hashlib.sha256(tiny_target.gguf.read_bytes()).hexdigest()
    folder = hub.repo_folder(GGUFS)
    lock = folder.parent / ".locks" / folder.name / f"{sha256}.lock"
    lock.parent.mkdir(parents=True)
    held = FileLock(lock)
    held.acquire()
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("waiting"):  # the other program is done
            (folder / "blobs" / sha256).write_bytes(tiny_target.gguf.read_bytes())
            held.release()

    target = Finder(say).files(NAME, "none").target
    assert target.read_bytes() == tiny_target.gguf.read_bytes()
    assert [line.split()[0] for line in said] == ["downloading", "waiting"]
    assert not published.got


def test_a_place_that_cannot_be_written(published, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "file"))
    assert "set LOCALSPEC_CACHE" in refused(NAME)


def test_models_are_listed(published):
    def listed() -> list[dict]:
        result = CliRunner().invoke(cli, ["models", "--json"], catch_exceptions=False)
        return json.loads(result.stdout)

    before = listed()[1]
    assert before["name"] == NAME and not before["ready"] and before["target"]["path"] is None
    found = Finder().files(NAME)
    after = listed()[1]
    assert after["ready"]
    assert after["target"]["path"] == str(found.target)
    assert after["drafters"][0]["path"] == str(found.drafter)
    assert after["drafters"][0]["bytes"] == found.drafter.stat().st_size
    table = CliRunner().invoke(cli, ["models"], catch_exceptions=False).stdout
    assert f"{GGUFS}:Q4_K_M" in table and f"{NAME} target: {found.target}" in table


def test_convert_takes_names_too(published, checkpoint, tmp_path):
    out = tmp_path / "d.gguf"
    arguments = ["convert", str(checkpoint), "--target", NAME, "-o", str(out), "--no-verify"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0 and out.exists(), result.output


def test_from_python(published):
    import localspec

    found = localspec.fetch(NAME)
    assert isinstance(found, Files) and found == finding.fetch(NAME)


def test_in_a_process_of_its_own(published, tmp_path):
    """A mirror by HF_ENDPOINT, a cache by HF_HOME; then without any network."""
    env = os.environ | {
        "HF_ENDPOINT": published.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_DISABLE_XET": "1",
    }
    base = [sys.executable, "-m", "localspec"]
    names = [f"{GGUFS}:Q8_0", "-d", DRAFTER]
    # Elsewhere: from the repository its top-level folder would be imported, without convert/.
    here = {"env": env, "cwd": tmp_path, "capture_output": True, "text": True}
    done = subprocess.run([*base, "pull", *names], **here)
    assert done.returncode == 0, done.stderr
    assert f"localspec chat {GGUFS}:Q8_0 -d {DRAFTER}" in done.stdout
    assert "\r" not in done.stderr  # no progress bars in a log
    published.shutdown()
    published.server_close()
    more = ["--raw", "-p", "abc", "-n", "3", "--threads", "1", "--n-ctx", "64", "--policy", "fixed"]
    done = subprocess.run([*base, "generate", *names, *more], **here)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    done = subprocess.run([*base, "pull", "org/x"], **here)
    assert done.returncode == 1 and "cannot be reached" in done.stderr
    assert done.stderr.count("\n") == 1
