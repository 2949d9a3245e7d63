"""A few shapes of SVG, in the colours of the docs' pictures."""

from __future__ import annotations

from html import escape

INK, GREY, PALE, WHITE = "#1f2933", "#8a94a0", "#eef1f4", "#ffffff"
GREEN, LIGHT_GREEN, BLUE, LIGHT_BLUE = "#1b7f4b", "#dff3e7", "#2456a6", "#e2ebf9"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Drawing:
    """Shapes on a light card, which reads in light and dark themes alike.

    Args:
        width, height: pixels.
        title: what a reader who cannot see it is told.
    """

    def __init__(self, width: float, height: float, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" rx="10" fill="{WHITE}"/>',
            f'<rect x="0.5" y="0.5" width="{width - 1:g}" height="{height - 1:g}" rx="10" '
            f'fill="none" stroke="{PALE}"/>',
        ]

    def box(
        self, x: float, y: float, w: float, h: float, *, fill: str = WHITE, stroke: str = GREY,
        dashed: bool = False, width: float = 1,
    ) -> None:  # fmt: skip
        """A rectangle with round corners."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="5" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="{width:g}"{dash}/>'
        )

    def text(
        self, x: float, y: float, text: str, *, size: float = 13, fill: str = INK,
        anchor: str = "middle", mono: bool = False, bold: bool = False,
    ) -> None:  # fmt: skip
        """A line of text; y is its baseline."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-family="{MONO if mono else FONT}" '
            f'font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"{weight} '
            f'xml:space="preserve">{escape(text)}</text>'
        )

    def line(
        self, points: list[tuple[float, float]], *, stroke: str = GREY, width: float = 1.2,
        arrow: bool = False, dashed: bool = False,
    ) -> None:  # fmt: skip
        """Straight pieces; `arrow` puts a head on the last, which must be level or upright."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" '
            f'stroke-width="{width:g}"{dash}/>'
        )
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
            wings = [(x - 7 * dx + 4 * s * dy, y - 7 * dy + 4 * s * dx) for s in (1, -1)]
            corners = " ".join(f"{a:g},{b:g}" for a, b in [(x, y), *wings])
            self._parts.append(f'<polygon points="{corners}" fill="{stroke}"/>')

    def curve(
        self, start: tuple[float, float], end: tuple[float, float], *, stroke: str = GREY,
        width: float = 1.2, dashed: bool = False,
    ) -> None:  # fmt: skip
        """A curve that leaves and arrives level."""
        (x0, y0), (x1, y1) = start, end
        middle, dash = (x0 + x1) / 2, ' stroke-dasharray="4 3"' if dashed else ""
        self._parts.append(
            f'<path d="M{x0:g} {y0:g}C{middle:g} {y0:g} {middle:g} {y1:g} {x1:g} {y1:g}" '
            f'fill="none" stroke="{stroke}" stroke-width="{width:g}"{dash}/>'
        )

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>"]) + "\n"
