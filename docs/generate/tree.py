"""Draws a draft tree as it was verified: `python docs/generate/tree.py docs/tree.svg`.

The default pair (or --target and --drafter) answers a prompt with a fixed tree; of all rounds, one
is drawn in which the walk left the likeliest path and went deep.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from localspec import DraftOptions, Engine
from localspec.chat import chat_template
from localspec.pairs import default_pair
from localspec.tree import ROOT, DraftTree
from svg import BLUE, GREEN, GREY, INK, LIGHT_BLUE, LIGHT_GREEN, Drawing

BOX, GAP, ROW, MARGIN, TOP = 92, 40, 34, 24, 62
BONUS = -2


@dataclass(frozen=True)
class Recorded:
    """One round: the texts of its tokens, and what the target kept.

    Attributes:
        tree: what was verified.
        path: accepted nodes, from the root on.
        anchor: text of the last token before.
        words: text of every node's token.
        bonus: text of the target's own token at the end of the walk.
    """

    tree: DraftTree
    path: tuple[int, ...]
    anchor: str
    words: list[str]
    bonus: str


def record(engine: Engine, prompt: str, draft: DraftOptions, max_tokens: int) -> list[Recorded]:
    """Every round of a greedy answer that drafted something."""
    rounds: list[Recorded] = []
    verified: list[tuple[DraftTree, tuple[int, ...]]] = []
    engine.on_verified = lambda tree, path: verified.append((tree, tuple(path)))
    text = chat_template(engine).render([{"role": "user", "content": prompt}])

    def word(token: int) -> str:
        return engine.model.text([token], special=True)

    anchor = 0
    for step in engine.generate(text, max_tokens=max_tokens, draft=draft):
        if step.round is not None and step.finish_reason is None and verified:
            tree, path = verified[-1]
            words = [word(t) for t in tree.token.tolist()]
            if len(tree):
                rounds.append(Recorded(tree, path, word(anchor), words, word(step.token_ids[-1])))
        verified.clear()
        anchor = step.token_ids[-1] if step.token_ids else anchor
    engine.on_verified = None
    return rounds


def interest(found: Recorded) -> tuple[int, int]:
    """How much there is to see: accepted words, and turns away from the likeliest child."""
    turns = 0
    for node in found.path:
        siblings = found.tree.children[int(found.tree.parent[node])]
        turns += node != max(siblings, key=lambda i: found.tree.score[i])
    words = sum(any(c.isalnum() for c in found.words[node]) for node in found.path)
    return (min(turns, 1) + words, turns)


def draw(found: Recorded) -> str:
    """The picture, as SVG."""
    tree = found.tree
    end = found.path[-1] if found.path else ROOT
    rows = _rows(tree, end)
    bonus_depth = 1 + (int(tree.depth[end]) if end != ROOT else 0)
    columns = 1 + max(int(tree.depth.max()), bonus_depth)
    width = 2 * MARGIN + columns * BOX + (columns - 1) * GAP
    height = TOP + max(rows.values()) * ROW + 12 + MARGIN
    title = f"A draft tree of {len(tree)} nodes, {len(found.path)} accepted"
    picture = Drawing(width, height, title)

    def place(depth: int, row: float) -> tuple[float, float]:
        return MARGIN + depth * (BOX + GAP), TOP + row * ROW

    bonus = place(bonus_depth, rows.pop(BONUS))
    kept = set(found.path)
    for depth in range(columns):
        x, _ = place(depth, 0)
        label = "anchor" if depth == 0 else f"depth {depth}"
        picture.text(x + BOX / 2, TOP - 32, label, size=12, fill=GREY)
    places = {n: place(0 if n == ROOT else int(tree.depth[n]), row) for n, row in rows.items()}
    for node in sorted(rows, key=lambda n: n in kept):
        if node == ROOT:
            continue
        (x0, y0), (x1, y1) = places[int(tree.parent[node])], places[node]
        good = node in kept
        picture.curve(
            (x0 + BOX, y0), (x1, y1), stroke=GREEN if good else GREY, width=2.4 if good else 1
        )
    (x0, y0), (x1, y1) = places[end], bonus
    picture.curve((x0 + BOX, y0), (x1, y1), stroke=BLUE, width=2, dashed=True)
    for node, (x, y) in places.items():
        if node == ROOT:
            _node(picture, x, y, found.anchor, "", INK, "#f4f5f7")
        else:
            good = node in kept
            percent = 100 * float(np.exp(tree.score[node]))
            odds = f"{percent:.{0 if percent >= 0.95 else 1}f}%"
            _node(picture, x, y, found.words[node], odds, GREEN if good else GREY,
                  LIGHT_GREEN if good else "#ffffff", bold=good)  # fmt: skip
    _node(picture, *bonus, found.bonus, "bonus", BLUE, LIGHT_BLUE, dashed=True)
    return str(picture)


def _node(
    picture: Drawing, x: float, y: float, word: str, note: str, stroke: str, fill: str,
    *, bold: bool = False, dashed: bool = False,
) -> None:  # fmt: skip
    shown = word.replace("\n", "⏎").replace(" ", "␣")
    room = 8 if note else 11
    if len(shown) > room:
        shown = shown[: room - 1] + "…"
    picture.box(x, y - 12, BOX, 24, fill=fill, stroke=stroke, dashed=dashed,
                width=1.6 if bold else 1)  # fmt: skip
    left = x + 7 if note else x + BOX / 2
    picture.text(left, y + 4, shown, size=11.5, mono=True, anchor="start" if note else "middle",
                 bold=bold)  # fmt: skip
    if note:
        picture.text(x + BOX - 6, y + 4, note, size=9.5, fill=stroke, anchor="end")


def _rows(tree: DraftTree, end: int) -> dict[int, float]:
    """The row of every node, of the root and of the bonus token below the walk's `end`.

    Leaves lie one below the other, parents beside their first child.
    """
    rows: dict[int, float] = {}
    following = 0

    def visit(node: int) -> float:
        nonlocal following
        children = sorted(tree.children.get(node, []), key=lambda n: -tree.score[n])
        if node == end:
            children.append(BONUS)
        if children:
            first, *_ = [visit(child) for child in children]
            rows[node] = first
        else:
            rows[node] = following
            following += 1
        return rows[node]

    visit(ROOT)
    return rows


def main() -> None:
    """Record, choose, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--prompt", default="Explain how plants make food.")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--nodes", type=int, default=15)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    target, drafter = default_pair() if args.target is None else (args.target, args.drafter)
    with Engine.load(target, drafter, n_ctx=1024, n_threads=args.threads) as engine:
        draft = DraftOptions(tokens=args.nodes, width=args.width)
        rounds = record(engine, args.prompt, draft, args.tokens)
    if not rounds:
        raise SystemExit("no round drafted anything; try another prompt or more --tokens")
    best = max(rounds, key=interest)
    args.out.write_text(draw(best), "utf-8")
    print(f"{args.out}: {len(best.tree)} nodes, {len(best.path)} accepted, of {len(rounds)} rounds")


if __name__ == "__main__":
    main()
