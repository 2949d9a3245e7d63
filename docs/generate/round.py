"""Draws one round, schematically: `python docs/generate/round.py docs/round.svg`."""

from __future__ import annotations

import sys
from pathlib import Path

from svg import BLUE, GREEN, GREY, INK, LIGHT_BLUE, LIGHT_GREEN, PALE, Drawing

CELL = 34
TREE = {  # node: (parent, text, column, row, accepted)
    1: (0, "a", 1, 0, True),
    2: (0, "b", 1, 2, False),
    3: (1, "c", 2, 0, False),
    4: (1, "d", 2, 1, True),
    5: (4, "e", 3, 1, False),
}


def draw() -> str:
    """The picture, as SVG."""
    picture = Drawing(860, 452, "A round: draft, choose, verify, accept, commit")
    _step(picture, 24, 24, 250, "1  Draft", "one drafter pass over a block")
    _block(picture, 40, 86)
    _step(picture, 304, 24, 250, "2  Choose", "the best N nodes of the tree")
    _tree(picture, 330, 100, verified=False)
    _step(picture, 584, 24, 252, "3  Verify", "one target pass over all of them")
    _batch(picture, 600, 92)
    _step(picture, 584, 250, 252, "4  Accept", "follow the target's own choices")
    _tree(picture, 622, 316, verified=True)
    _step(picture, 24, 250, 530, "5  Commit", "what was accepted, and the target's next token")
    _text(picture, 44, 326)
    picture.line([(274, 120), (304, 120)], stroke=INK, arrow=True)
    picture.line([(554, 120), (584, 120)], stroke=INK, arrow=True)
    picture.line([(710, 222), (710, 250)], stroke=INK, arrow=True)
    picture.line([(584, 340), (554, 340)], stroke=INK, arrow=True)
    picture.line([(149, 250), (149, 222)], stroke=INK, arrow=True)
    picture.text(160, 241, "features of the committed tokens, and the new anchor", size=11.5,
                 fill=GREY, anchor="start")  # fmt: skip
    return str(picture)


def _step(picture: Drawing, x: float, y: float, w: float, title: str, what: str) -> None:
    picture.box(x, y, w, 198 if y < 200 else 178, stroke=PALE, width=1.5)
    picture.text(x + 14, y + 24, title, anchor="start", bold=True, size=14)
    picture.text(x + 14, y + 42, what, anchor="start", fill=GREY, size=11.5)


def _cell(
    picture: Drawing, x: float, y: float, text: str, stroke: str = GREY, fill: str = "#ffffff",
    *, dashed: bool = False,
) -> None:  # fmt: skip
    picture.box(x, y, CELL, 26, fill=fill, stroke=stroke, dashed=dashed)
    picture.text(x + CELL / 2, y + 17, text, mono=True, size=12.5)


def _block(picture: Drawing, x: float, y: float) -> None:
    for i in range(5):
        _cell(picture, x + i * 44, y, "x" if i == 0 else "·", INK if i == 0 else GREY)
        picture.line([(x + i * 44 + 17, y + 26), (x + i * 44 + 17, y + 46)])
        picture.line([(x + i * 44 + 17, y + 74), (x + i * 44 + 17, y + 94)], arrow=True)
        picture.text(x + i * 44 + 17, y + 110, f"L{i + 1}", mono=True, size=12)
    picture.box(x - 4, y + 46, 218, 28, fill=PALE, stroke=PALE)
    picture.text(x + 105, y + 64, "drafter", size=12)
    picture.text(x + 105, y + 126, "logits for every depth at once", size=11, fill=GREY)


def _tree(picture: Drawing, x: float, y: float, *, verified: bool) -> None:
    def place(column: int, row: int) -> tuple[float, float]:
        return x + column * 52, y + row * 36

    places = {0: place(0, 0)} | {n: place(c, r) for n, (_, _, c, r, _) in TREE.items()}
    for node, (parent, _, _, _, good) in TREE.items():
        (x0, y0), (x1, y1) = places[parent], places[node]
        on = verified and good
        picture.curve((x0 + CELL, y0 + 13), (x1, y1 + 13), stroke=GREEN if on else GREY,
                      width=2.4 if on else 1.2)  # fmt: skip
    if verified:
        (x0, y0), (x1, y1) = places[4], place(3, 2)
        picture.curve((x0 + CELL, y0 + 13), (x1, y1 + 13), stroke=BLUE, dashed=True, width=2)
        _cell(picture, x1, y1, "f", BLUE, LIGHT_BLUE, dashed=True)
    _cell(picture, *places[0], "x", INK, "#f4f5f7")
    for node, (_, text, _, _, good) in TREE.items():
        on = verified and good
        _cell(picture, *places[node], text, GREEN if on else GREY,
              LIGHT_GREEN if on else "#ffffff")  # fmt: skip


def _batch(picture: Drawing, x: float, y: float) -> None:
    """Tokens of the batch, and which of them each one sees."""
    names = ["x", *(text for _, text, *_ in TREE.values())]
    seen = {0: [0]}
    for node, (parent, *_) in TREE.items():
        seen[node] = [*seen[parent], node]
    side = 17
    for i, name in enumerate(names):
        picture.text(x + 14, y + 12 + i * side, name, mono=True, size=12)
        picture.text(x + 38 + i * side + side / 2, y - 6, name, mono=True, size=12)
        for j in range(len(names)):
            on = j in seen[i]
            picture.box(x + 38 + j * side, y + i * side, side - 3, side - 3,
                        fill=GREEN if on else PALE, stroke="#ffffff")  # fmt: skip
    for i, line in enumerate(["each token sees", "its ancestors", "and the text", "before x"]):
        picture.text(x + 144, y + 24 + 16 * i, line, anchor="start", size=10.5, fill=GREY)
    picture.text(x + 8, y + 119, "time T(N+1), measured here", anchor="start", size=11, fill=GREY)


def _text(picture: Drawing, x: float, y: float) -> None:
    words = [("…", GREY, "#ffffff"), ("x", INK, "#f4f5f7"), ("a", GREEN, LIGHT_GREEN),
             ("d", GREEN, LIGHT_GREEN), ("f", BLUE, LIGHT_BLUE)]  # fmt: skip
    for i, (word, stroke, fill) in enumerate(words):
        _cell(picture, x + i * 44, y, word, stroke, fill, dashed=word == "f")
    picture.text(x + 105, y + 48, "accepted", size=11.5, fill=GREEN)
    picture.text(x + 193, y + 48, "bonus", size=11.5, fill=BLUE)
    for i, line in enumerate(
        ["this round: 3 tokens", "for one pass of the target;", "b, c, e are forgotten"]
    ):
        picture.text(x + 260, y + 4 + 18 * i, line, anchor="start", size=12)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw(), "utf-8")
