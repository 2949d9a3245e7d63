"""Whole runs on the tiny target: what they leave, how they go on, what they refuse."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

from conftest import prompt_of, same_text  # noqa: E402

import tiny  # noqa: E402
from localspec import calibration_file  # noqa: E402
from localspec.cli import cli  # noqa: E402
from localspec.engine import DraftOptions, Engine  # noqa: E402
from localspec.errors import LocalspecError  # noqa: E402
from localspec.models import learning, load_drafter, progress, writing  # noqa: E402
from localspec.models.finish import Finished  # noqa: E402
from localspec.models.run import train  # noqa: E402
from localspec.models.store import Store  # noqa: E402

torch.set_num_threads(1)

SMALL: dict[str, Any] = {
    "tokens": 4000, "steps": 12, "threads": 1, "precision": "f32", "layers": 1, "block_size": 4,
    "rank": 8, "answer": 64, "longest": 120, "anchors": 24, "disk": 64 << 20, "seed": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    words = ["".join(chr(c) for c in rng.integers(97, 123, 5)) for _ in range(90)]
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("".join(f"{a} {b}\n" for a, b in zip(words[::2], words[1::2], strict=True)))
    return file


@pytest.fixture(scope="module")
def finished(tiny_target, prompts, tmp_path_factory) -> tuple[Path, Finished]:
    """(directory, result) of a run with a reduced vocabulary."""
    out = tmp_path_factory.mktemp("run") / "run"
    phases: list[str] = []
    result = train(
        tiny_target.gguf, out, prompts=str(prompts), vocab=200, **SMALL,
        report=lambda p: phases.append(p.phase),
    )  # fmt: skip
    assert list(dict.fromkeys(phases)) == ["text", "training", "save", "convert", "calibrate"]
    return out, result


def losses(out: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_what_a_run_leaves(finished, tiny_target):
    out, result = finished
    assert result.checkpoint == out / "checkpoint" and result.drafter == out / "drafter.gguf"
    drafter = load_drafter(result.checkpoint)
    assert drafter.config.draft_vocab_size == 200 and drafter.config.block_size == 4
    assert drafter.fc.weight.isfinite().all()
    assert result.calibration == out / "drafter.calibration.json"
    assert calibration_file.read(result.calibration, result.drafter, 4).depths == 4
    assert sorted(losses(out)) == list(range(1, 13))
    card = (result.checkpoint / "README.md").read_text()
    for part in ("12 steps of 2 x 24 blocks", "| depth | 1 | 2 | 3 | 4 |", "localspec train",
                 "drafts 200 of 320 tokens", "given by the user"):  # fmt: skip
        assert part in card, card
    assert str(out.parent) not in card  # paths of this machine
    assert sum(f.stat().st_size for f in (out / "features").iterdir()) <= SMALL["disk"]
    prompt = prompt_of(2)
    with Engine.load(tiny_target.gguf, result.drafter, n_ctx=256, n_threads=1) as engine:
        plain = engine.complete(prompt, max_tokens=30, draft=DraftOptions(tokens=0))
        tree = engine.complete(prompt, max_tokens=30, draft=DraftOptions(tokens=8, width=3))
        assert any(r.drafted for r in tree.rounds)
        same_text(engine, prompt, plain.token_ids, tree.token_ids)


def test_a_finished_run_finishes_again(finished):
    out, result = finished
    before = (out / "checkpoint/model.safetensors").read_bytes()
    again = train(None, out, resume=True, calibrate=False)
    assert again.drafter == result.drafter
    assert (out / "checkpoint/model.safetensors").read_bytes() == before


class _Stop(Exception):
    pass


def same_text_again(finished: Path, other: Path) -> Path:
    """The directory of another run, with the text that a finished one has trained on."""
    made_later = ("snapshot.pt", "log.jsonl", "checkpoint", "drafter.*")
    shutil.copytree(finished, other, ignore=shutil.ignore_patterns(*made_later))
    return other


def test_resumed_is_uninterrupted(finished, tmp_path):
    """The same seed and data, another start in between: the same losses to the last digit."""
    out, _ = finished
    other = same_text_again(out, tmp_path / "other")

    def stop(progress) -> None:
        if progress.step == 7:
            raise _Stop

    with pytest.raises(_Stop):
        train(None, other, resume=True, checkpoint_minutes=1e-9, report=stop)
    train(None, other, resume=True, calibrate=False)
    assert losses(other) == losses(out)
    ours, theirs = (load_drafter(d / "checkpoint").state_dict() for d in (other, out))
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


def test_text_goes_on_where_it_was(finished, tiny_target, prompts, tmp_path):
    """Stopped while writing; what is there stays, and no prompt is answered twice."""
    out = tmp_path / "run"

    def stop(progress) -> None:
        if progress.phase == "text" and progress.done > 0.4:
            raise _Stop

    with pytest.raises(_Stop):
        train(tiny_target.gguf, out, prompts=str(prompts), vocab=200, report=stop, **SMALL)
    before = Store(out, 0).entries
    assert before

    def stop_in_training(progress) -> None:
        if progress.phase == "training":
            raise _Stop

    with pytest.raises(_Stop):
        train(None, out, resume=True, report=stop_in_training)
    after = Store(out, 0)
    assert after.entries[: len(before)] == before
    assert after.n_tokens >= SMALL["tokens"] > sum(e.n_tokens for e in before)
    assert len({e.index for e in after.entries}) == len(after.entries)


def test_features_that_are_not_on_disk_change_nothing(finished, tmp_path):
    """They are evaluated again at every step; the curve stays what it is."""
    out, _ = finished
    other = same_text_again(out, tmp_path / "other")
    shards = sorted((other / "features").iterdir())
    assert len(shards) > 1
    shards[0].unlink()
    train(None, other, resume=True, calibrate=False)
    # Evaluated in one pass instead of token by token, so rounded otherwise.
    for step, loss in losses(out).items():
        assert losses(other)[step] == pytest.approx(loss, rel=0.02)


def test_hours_bound_every_phase(tiny_target, prompts, tmp_path, monkeypatch):
    """With a clock that ticks when it is looked at: text and training stop by the clock."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            self.now += 0.01
            return self.now

        perf_counter = staticmethod(time.perf_counter)

    clock = Clock()
    for module in (progress, writing, learning):
        monkeypatch.setattr(module, "time", clock)
    out = tmp_path / "run"
    asked = {k: v for k, v in SMALL.items() if k not in ("tokens", "steps")}
    rates: list[float] = []
    train(
        tiny_target.gguf, out, prompts=str(prompts), hours=0.002, calibrate=False, **asked,
        report=lambda p: rates.append(p.done) if p.phase == "training" else None,
    )  # fmt: skip
    state = json.loads((out / "state.json").read_text())
    assert state["spent"]["text"] >= 0.3 * 7.2
    # Answers under way when the time for text is over are finished.
    assert 0.1 * 7.2 < state["facts"]["training_seconds"] < 0.65 * 7.2
    assert rates == sorted(rates) and rates[-1] == 1.0 and len(rates) > 20
    assert sum(state["spent"].values()) < 2 * 7.2


def test_the_target_writes_its_own_prompts(tiny_target, tmp_path):
    out = tmp_path / "run"
    train(tiny_target.gguf, out, calibrate=False, **SMALL)
    lines = (out / "prompts.jsonl").read_text().splitlines()
    messages = [json.loads(line)["messages"] for line in lines]
    assert len(messages) >= 2 and all(m[-1]["role"] == "user" for m in messages)
    assert len({m[-1]["content"] for m in messages}) == len(messages)
    assert "written by the target itself" in (out / "checkpoint/README.md").read_text()


@pytest.mark.parametrize("name", ["vanilla-b16", "rnn", "dflash"])
def test_starting_from_an_existing_drafter(name, tiny_target, tiny_drafter, prompts, tmp_path):
    """Its shape and weights; with its heads, or as DFlash without any."""
    model, _ = tiny_drafter(name)
    asked = {k: v for k, v in SMALL.items() if k not in ("layers", "block_size", "rank")}
    more = {"steps": 2, "lr": 1e-6, "adam_lr": 1e-6, "calibrate": False, "outtype": "f32"}
    out = tmp_path / "run"
    result = train(
        tiny_target.gguf, out, prompts=str(prompts), init=str(model.path), **(asked | more)
    )
    drafter = load_drafter(result.checkpoint)
    assert drafter.config.block_size == model.config["block_size"]
    before = model.tensors
    for key, value in drafter.state_dict().items():
        np.testing.assert_allclose(value, before[key].reshape(value.shape), atol=1e-3, rtol=1e-3)
    assert drafter.lm_head is None  # the target's own are used


def options(**more: Any) -> dict[str, Any]:
    return {**SMALL, **more}


def test_refused_in_one_line(tiny_target, tiny_drafter, prompts, finished, tmp_path):
    new = tmp_path / "new"
    elsewhere = tiny.build_target(tmp_path / "wide", width=128, heads=4)
    wrong = tiny.build_drafter(tmp_path / "wrong", elsewhere)
    qwen2 = tiny.build_target(tmp_path / "qwen2", arch="qwen2")
    (tmp_path / "file").write_text("x")
    (tmp_path / "text.gguf").write_text("no model" * 9)
    good = tiny_target.gguf
    cases: list[tuple[Any, Path, dict[str, Any], str]] = [
        (qwen2.gguf, new, options(), "gives no layer features"),
        (tmp_path / "text.gguf", new, options(), "is not a GGUF file"),
        (tmp_path / "none.gguf", new, options(), "does not exist"),
        (tiny_drafter("vanilla")[1], new, options(), "not a target"),
        (good, new, options(disk=1000), "give --disk at least"),
        (good, tmp_path / "file" / "run", options(), "cannot be written"),
        (good, tmp_path / "file", options(), "cannot be written"),
        (good, new, {"init": str(wrong.path)}, "does not fit"),
        (good, new, {"init": str(tmp_path / "none")}, "does not exist"),
        (good, new, options(init=str(tiny_drafter("vanilla")[0].path)), "leave --layers out"),
        (good, new, options(prompts=str(tmp_path / "none.txt")), "cannot read"),
        (good, new, options(target_layers=(1, 9)), "target_layers"),
        (good, new, options(hours=1.0), "give one of them"),
        (good, new, options(vocab=-1), "cannot be less than 0"),
        (good, new, options(head="other"), "known ones are"),
        (good, finished[0], options(), "already"),
        (None, new, {"resume": True}, "no training run to resume"),
        (None, new, {}, "needs a target"),
        (None, finished[0], {"resume": True, "seed": 4}, "begun with seed = 3, not 4"),
        (None, finished[0], {"resume": True, "vocab": 100}, "begun with vocab = 200, not 100"),
    ]
    for target, out, asked, message in cases:
        with pytest.raises(LocalspecError, match=message) as caught:
            train(target, out, **asked)
        assert "\n" not in str(caught.value)
    assert not (new / "run.json").exists()


def test_without_a_chat_template_prompts_are_needed(prompts, tmp_path):
    from gguf import GGUFReader

    target = tiny.build_target(tmp_path / "t")
    source = target.gguf.read_bytes()
    at = source.index(b"tokenizer.chat_template")
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(source[:at] + b"tokenizer.chat_templatX" + source[at + 23 :])
    assert "tokenizer.chat_template" not in GGUFReader(bare).fields
    with pytest.raises(LocalspecError, match=r"no chat template.*--prompts"):
        train(bare, tmp_path / "a", **SMALL)
    result = train(bare, tmp_path / "b", prompts=str(prompts), calibrate=False, **SMALL)
    assert result.drafter.is_file()


def test_damaged_files_of_a_run_are_named(tiny_target, prompts, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_text("{")
    with pytest.raises(LocalspecError, match=r"run.json is damaged"):
        train(None, out, resume=True)
    (out / "run.json").write_text('{"format": "x"}')
    with pytest.raises(LocalspecError, match="not of a training run"):
        train(None, out, resume=True)


# --- the command ---------------------------------------------------------------------------------


def test_without_torch_one_line_says_what_to_install(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )
    result = CliRunner().invoke(cli, ["train", "-o", str(tmp_path / "run")])
    assert isinstance(result.exception, LocalspecError)
    assert "pip install 'localspec[train]'" in str(result.exception)


def test_options_that_are_wrong_usage(tmp_path):
    for options in (
        ["--target-layers", "1,x"],
        ["--disk", "much"],
        ["--hours", "0"],
        ["--head", "x"],
    ):
        result = CliRunner().invoke(cli, ["train", "-o", str(tmp_path / "run"), *options])
        assert result.exit_code == 2, options


def command(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "localspec", "train", *map(str, arguments)],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tempfile.gettempdir(),  # the repository's own folder has no convert/ and models/ in it
    )  # fmt: skip


@pytest.fixture
def arguments(tiny_target, prompts, tmp_path) -> Iterator[list[object]]:
    yield [
        "--target", tiny_target.gguf, "-o", tmp_path / "run", "--prompts", prompts, "--tokens",
        4000, "--steps", 120, "--threads", 1, "--precision", "f32", "--layers", 1, "--block-size",
        4, "--rank", 8, "--answer", 64, "--longest", 120, "--checkpoint-minutes", 0.005,
    ]  # fmt: skip


def wait_for(process: subprocess.Popen[str], there: Any) -> None:
    """Until `there()` or the end of the process."""
    while process.poll() is None and not there():
        time.sleep(0.02)


@pytest.mark.slow
def test_killed_three_times(arguments, tmp_path):
    """SIGKILL while text is written and twice while training; then a usable drafter."""
    out = tmp_path / "run"
    process = command(*arguments)
    wait_for(process, lambda: any((out / "text").glob("*.safetensors")))
    process.kill()
    process.wait()
    text = {f.name: f.read_bytes() for f in (out / "text").glob("*.safetensors")}
    assert text
    snapshot = out / "snapshot.pt"
    for _ in range(2):
        seen = snapshot.stat().st_mtime_ns if snapshot.exists() else 0
        process = command("-o", out, "--resume")
        wait_for(process, lambda s=seen: snapshot.exists() and snapshot.stat().st_mtime_ns > s)
        process.kill()
        process.wait()
        assert snapshot.exists(), process.stderr.read()
    process = command("-o", out, "--resume")
    said, told = process.communicate()
    assert process.returncode == 0, told
    assert "use it: localspec chat" in said and "tokens a round" in said
    for name, data in text.items():  # nothing is written twice
        assert (out / "text" / name).read_bytes() == data
    assert sorted(losses(out)) == list(range(1, 121))
    assert load_drafter(out / "checkpoint").fc.weight.isfinite().all()
    assert (out / "drafter.gguf").is_file() and (out / "drafter.calibration.json").is_file()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process")
def test_ctrl_c_says_how_to_go_on(arguments, tmp_path):
    out = tmp_path / "run"
    process = command(*arguments)
    wait_for(process, lambda: (out / "snapshot.pt").exists())
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    assert process.returncode == 130
    assert f"localspec train -o {out} --resume" in told and "Traceback" not in told
