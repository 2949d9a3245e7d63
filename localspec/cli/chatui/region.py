"""The end of the screen, drawn again as an answer grows; what is finished scrolls away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localspec.cli.chatui.clean import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.segment import Segment


def rows_on_screen(widths: list[int], columns: int) -> int:
    """Rows that lines take; terminals wrap those that no longer fit after a resize.

    Args:
        widths: cells of each line.
        columns: width of the terminal now.
    """
    return sum(max(1, -(-width // max(columns, 1))) for width in widths)


class Region:
    """Lines at the end of the screen.

    Unlike rich's Live it knows what a resize does to lines that are drawn already, and never holds
    more than fits the screen. The cursor rests on the empty row below.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []

    def draw(self, finished: list[RenderableType], growing: list[RenderableType]) -> None:
        """Replace what is shown.

        Args:
            finished: goes above for good.
            growing: takes the place of the last `growing`; of one that is too tall the end.
        """
        from rich.segment import Segment, Segments

        size = self._console.size
        above = self._lines(finished, size.width)
        below = self._lines(growing, size.width)[-max(size.height - 1, 1) :]
        segments = [self._back(size.width)]
        for line in (*above, *below):
            segments += [*line, Segment.line()]
        self._widths = [Segment.get_line_length(line) for line in below]
        self._console.print(Segments(segments), end="", crop=False)

    def _lines(self, renderables: list[RenderableType], width: int) -> list[list[Segment]]:
        from rich.segment import Segment

        options = self._console.options.update(width=max(width - 1, 1), height=None)
        lines: list[list[Segment]] = []
        for renderable in renderables:
            new = [
                # Cleaned again: markdown may spell characters as entities.
                [Segment(printable(s.text), s.style) for s in line if not s.control]
                for line in self._console.render_lines(renderable, options, pad=False)
            ]
            while len(new) > 1 and not "".join(s.text for s in new[-1]).strip():
                new.pop()  # code blocks bring an empty line of their own
            lines += new
        return lines

    def _back(self, columns: int) -> Segment:
        """What moves the cursor to the region's first row, everything from there erased."""
        from rich.control import Control
        from rich.segment import ControlType

        rows = rows_on_screen(self._widths, columns)
        erase = (ControlType.ERASE_IN_LINE, 2)
        up: list[object] = []
        for _ in range(min(rows, self._console.size.height - 1)):
            up += [(ControlType.CURSOR_UP, 1), erase]
        return Control(ControlType.CARRIAGE_RETURN, erase, *up).segment  # type: ignore[arg-type]
