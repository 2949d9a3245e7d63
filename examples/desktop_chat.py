"""A small desktop chat on localspec: one file, Tk only.

    python examples/desktop_chat.py [TARGET.gguf [DRAFTER.gguf]]

What to copy from it: the engine lives in one worker thread, events travel to the window through a
queue, and `engine.cancel()` is the one call that may come from outside while an answer runs.
"""

from __future__ import annotations

import queue
import sys
import threading
import tkinter as tk
from pathlib import Path
from tkinter import filedialog, ttk
from typing import Any

from localspec import Chat, DraftOptions, Engine, LocalspecError, Result
from localspec.pairs import default_pair

POLL_MS = 30
BLUE, GREY, GREEN, PAPER = "#2563eb", "#6b7280", "#16a34a", "#fafaf9"
Pair = tuple[Path, Path | None]


class Worker(threading.Thread):
    """Owns the engine. Jobs come in through `jobs`, events leave through `events`.

    Events: ("loading", 0..1), ("ready", model name), ("text", str), ("stats", Result),
    ("done", Result, speculated), ("error", one line).
    """

    def __init__(self, threads: int = 0) -> None:
        super().__init__(daemon=True)
        self.jobs: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.events: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.engine: Engine | None = None
        self.chat: Chat | None = None
        self._threads = threads
        self._closing = False

    def run(self) -> None:
        while (job := self.jobs.get())[0] != "quit":
            self._do(*job)
        if self.engine is not None:
            self.engine.close()

    def _do(self, what: str, *args: Any) -> None:
        try:
            (self._load if what == "load" else self._ask)(*args)
        except LocalspecError as e:
            self.events.put(("error", str(e)))

    def stop(self) -> None:
        """End the answer that is running, from any thread."""
        if self.engine is not None:
            self.engine.cancel()

    def close(self) -> None:
        """End everything; the thread may be joined afterwards."""
        self._closing = True
        self.stop()
        self.jobs.put(("quit",))

    def _load(self, target: Path, drafter: Path | None) -> None:
        def progress(share: float) -> bool:
            self.events.put(("loading", share))
            return not self._closing

        if self.engine is not None:
            self.engine.close()
            self.engine = self.chat = None
        engine = Engine.load(target, drafter, n_threads=self._threads, progress=progress)
        engine.tune()  # up to 3 seconds, once per machine and model
        self.engine, self.chat = engine, Chat(engine)
        self.events.put(("ready", engine.model.meta("general.name") or target.stem))

    def _ask(self, question: str, speculate: bool) -> None:
        if self.chat is None:
            raise LocalspecError("no model is loaded; choose one first")
        self.chat.draft = None if speculate else DraftOptions(tokens=0)
        result = Result()
        for step in self.chat.send(question):
            result.add(step)
            self.events.put(("text", step.text))
            self.events.put(("stats", result))
        self.events.put(("done", result, speculate))


class App:
    """The window."""

    def __init__(self, root: tk.Tk, pairs: list[Pair], threads: int = 0) -> None:
        self.root, self.pairs = root, pairs
        self.busy = True
        self.speeds: dict[bool, float] = {}
        self.worker = Worker(threads)
        self.worker.start()
        self._build()
        root.protocol("WM_DELETE_WINDOW", self.close)
        root.after(POLL_MS, self._poll)
        self._load(0)

    def _build(self) -> None:
        self.root.title("localspec")
        if self.root.tk.call("tk", "windowingsystem") == "x11":
            ttk.Style().theme_use("clam")
        self.root.geometry("760x560")
        top, stats, ask = (ttk.Frame(self.root, padding=(10, 8)) for _ in range(3))
        top.pack(fill="x")
        ttk.Label(top, text="Model").pack(side="left", padx=(0, 6))
        self.speculate = tk.BooleanVar(value=True)
        self.switch = ttk.Checkbutton(top, text="speculation", variable=self.speculate)
        self.switch.pack(side="right", padx=(10, 0))
        self.picker = ttk.Combobox(top)
        self.picker.pack(fill="x")
        self.picker.bind("<<ComboboxSelected>>", self._picked)
        # Packed from the edges inwards, so that a small window takes space from the text alone.
        ask.pack(side="bottom", fill="x")
        self.button = ttk.Button(ask, text="Send", command=self.press)
        self.button.pack(side="right", padx=(8, 0))
        self.entry = ttk.Entry(ask, font=("TkDefaultFont", 11))
        self.entry.pack(fill="x", ipady=3)
        self.entry.bind("<Return>", lambda _: self.send())
        self.entry.focus_set()
        self.compared = ttk.Label(self.root, padding=(10, 0), foreground=GREY)
        self.compared.pack(side="bottom", fill="x")
        stats.pack(side="bottom", fill="x")
        self.speed = ttk.Label(stats, width=17)
        self.speed.pack(side="left")
        self.meter = tk.Canvas(stats, width=160, height=12, bg="#d1d5db", highlightthickness=0)
        self.meter.pack(side="left", padx=8)
        self.drafted = ttk.Label(stats)
        self.drafted.pack(side="left")
        self.text = tk.Text(self.root, wrap="word", state="disabled", padx=10, pady=8, bg=PAPER,
                            relief="flat", font=("TkDefaultFont", 11), spacing3=3)  # fmt: skip
        self.text.pack(fill="both", expand=True)
        self.text.tag_configure("you", foreground=BLUE, spacing1=8)
        self.text.tag_configure("note", foreground=GREY)

    def press(self) -> None:
        """The button: send, or stop while an answer runs."""
        (self.worker.stop if self.busy else self.send)()

    def send(self) -> None:
        question = self.entry.get().strip()
        if self.busy or not question:
            return
        self.entry.delete(0, "end")
        self._say(question + "\n", "you")
        self._set_busy(True)
        self.worker.jobs.put(("ask", question, self.speculate.get()))

    def _picked(self, _: object) -> None:
        at = self.picker.current()
        if at == len(self.pairs):
            kinds = [("GGUF models", "*.gguf"), ("All files", "*")]
            target = filedialog.askopenfilename(title="Target", filetypes=kinds)
            if not target:
                self.picker.current(self.loaded)
                return
            drafter = filedialog.askopenfilename(title="Drafter, if any", filetypes=kinds)
            self.pairs.append((Path(target), Path(drafter) if drafter else None))
        self._load(at)

    def _load(self, at: int) -> None:
        self.loaded = at
        self.picker["values"] = [target.stem for target, _ in self.pairs] + ["Open a file…"]
        self.picker.current(at)
        self.speeds.clear()
        self.compared["text"] = ""
        self._set_busy(True)
        self.worker.jobs.put(("load", *self.pairs[at]))

    def _set_busy(self, busy: bool) -> None:
        self.busy, self.button["text"] = busy, "Stop" if busy else "Send"
        self.picker["state"] = "disabled" if busy else "readonly"
        self.switch["state"] = "disabled" if busy else "normal"

    def _say(self, text: str, tag: str = "") -> None:
        at_end = self.text.yview()[1] > 0.99
        self.text["state"] = "normal"
        self.text.insert("end", text, tag)
        self.text["state"] = "disabled"
        if at_end:  # somebody who scrolled up wants to read there
            self.text.see("end")

    def _poll(self) -> None:
        while not self.worker.events.empty():
            kind, *values = self.worker.events.get()
            if kind == "text":
                self._say(values[0])
            elif kind == "loading":
                self.speed["text"] = f"loading {values[0]:.0%}"
            elif kind == "stats":
                self._show(values[0])
            else:
                self._finish(kind, values)
        self.root.after(POLL_MS, self._poll)

    def _show(self, result: Result) -> None:
        self.speed["text"] = f"{result.tokens_per_second:.1f} tokens/s"
        drafted = sum(r.verified for r in result.rounds)
        accepted = sum(r.accepted for r in result.rounds)
        self.meter.delete("all")
        if drafted:
            self.meter.create_rectangle(0, 0, 160 * accepted / drafted, 12, fill=GREEN, width=0)
        self.drafted["text"] = f"{accepted} of {drafted} drafted tokens accepted"

    def _finish(self, kind: str, values: list[Any]) -> None:
        self._set_busy(False)
        if kind == "ready":
            self.speed["text"] = "ready"
            self._say(f"{values[0]} is ready.\n", "note")
        elif kind == "error":
            self._say(f"\n{values[0]}\n", "note")
        else:
            result, speculated = values
            self._say("\n" if result.finish_reason != "cancelled" else " [stopped]\n", "note")
            if len(result.rounds) > 4:  # too short an answer says nothing about speed
                self.speeds[speculated] = result.tokens_per_second
            said = [f"{'with' if k else 'without'} speculation {v:.1f} tokens/s"
                    for k, v in self.speeds.items()]  # fmt: skip
            if len(said) == 2:
                said.append(f"{self.speeds[True] / self.speeds[False]:.2f} times as fast with it")
            self.compared["text"] = "  ·  ".join(said)

    def close(self) -> None:
        """Let the worker finish its round, then leave."""
        self.worker.close()
        self.worker.join(timeout=10)
        self.root.destroy()


def main() -> None:
    """Open the window."""
    files = [Path(a) for a in sys.argv[1:3]]
    try:
        pair: Pair = (files[0], files[1] if len(files) > 1 else None) if files else default_pair()
    except LocalspecError as e:
        sys.exit(f"error: {e}")
    root = tk.Tk()
    App(root, [pair])
    root.mainloop()


if __name__ == "__main__":
    main()
