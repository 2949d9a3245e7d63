"""An answer on the screen while it comes in."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from localspec.cli.chatui.blocks import finished
from localspec.cli.chatui.clean import printable
from localspec.cli.chatui.region import Region
from localspec.cli.chatui.shades import ACCEPTED, CORRECTED, Shader
from localspec.reasoning import Marks, Parts, take_apart
from localspec.steps import Step

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REDRAW_SECONDS = 0.07
STYLES = {ACCEPTED: "green", CORRECTED: "yellow"}


@dataclass
class Show:
    """What the user wants to see.

    Attributes:
        drafts: colour accepted and corrected tokens (instead of markdown).
        reasoning: unfold what thinking models think.
    """

    drafts: bool = False
    reasoning: bool = False


class View(Protocol):
    """Takes the steps of an answer."""

    def add(self, step: Step) -> None:
        """Show the next step."""

    def finish(self) -> None:
        """Show what is left; nothing comes after it."""


class PlainView:
    """Text as it comes, for pipes: no colours, no escapes, nothing redrawn."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write

    def add(self, step: Step) -> None:
        """Write the step's text."""
        self._write(printable(step.text))

    def finish(self) -> None:
        """End the line."""
        self._write("\n")


class TerminalView:
    """Markdown, redrawn as it grows.

    Args:
        console: the terminal.
        show: what to show.
        piece: token id -> bytes, for `show.drafts`.
        opened: the marks of the reasoning that the chat template opened already.
    """

    def __init__(
        self,
        console: Console,
        show: Show,
        piece: Callable[[int], bytes],
        *,
        opened: Marks | None = None,
    ) -> None:
        self._console, self._show, self._opened = console, show, opened
        self._region = Region(console)
        self._text = ""
        self._written = 0  # characters of the answer that are on the screen for good
        self._thought = False  # the reasoning is on the screen for good
        self._started, self._drawn = time.monotonic(), 0.0
        self._thinking_seconds = 0.0
        self._shader = Shader(piece)
        self._shaded: list[tuple[str, str]] = []

    def add(self, step: Step) -> None:
        """Take in a step; draw when it is time."""
        self._text += step.text
        if self._show.drafts:
            self._shaded += self._shader.feed(step)
        now = time.monotonic()
        if now - self._drawn >= REDRAW_SECONDS:
            self._draw(last=False)
            self._drawn = time.monotonic()

    def finish(self) -> None:
        """Draw everything."""
        self._draw(last=True)

    def _draw(self, *, last: bool) -> None:
        if self._show.drafts:
            shaded: list[RenderableType] = [self._coloured()]
            self._region.draw([*shaded, ""] if last else [], [] if last else shaded)
            return
        parts = take_apart(printable(self._text), opened=self._opened)
        for_good: list[RenderableType] = []
        growing: list[RenderableType] = []
        if parts.reasoning and not self._thought:
            if parts.thinking or not self._thinking_seconds:
                self._thinking_seconds = time.monotonic() - self._started
            self._thought = last or not parts.thinking
            (for_good if self._thought else growing).append(self._reasoning(parts))
        new = parts.answer[self._written :]
        done = len(new) if last else finished(new)
        if new[:done].strip():
            for_good += [self._markdown(new[:done]), ""]
        self._written += done
        if new[done:].strip():
            growing.append(self._markdown(new[done:]))
        self._region.draw(for_good, growing)

    def _reasoning(self, parts: Parts) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        if self._show.reasoning:
            return Group(Text(parts.reasoning, style="dim italic"), "")
        seconds = f"{self._thinking_seconds:.0f} s, {len(parts.reasoning.split())} words"
        if parts.thinking:
            return Text(f"▸ thinking… {seconds}", style="dim")
        return Text(f"▸ thought for {seconds} (/show reasoning unfolds)", style="dim")

    def _coloured(self) -> RenderableType:
        from rich.text import Text

        text = Text()
        for piece, shade in self._shaded:
            text.append(printable(piece), STYLES.get(shade))
        return text

    @staticmethod
    def _markdown(text: str) -> RenderableType:
        from rich.markdown import Markdown

        # hyperlinks=False: addresses are printed, not hidden behind what the model calls them.
        return Markdown(text, code_theme="ansi_dark", hyperlinks=False)
