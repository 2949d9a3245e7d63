"""Markdown that is still being written: which blocks will not change any more."""

from __future__ import annotations


def finished(markdown: str) -> int:
    """How many characters at the beginning belong to blocks that more text cannot change.

    The last block may still grow: a paragraph, a list that may get another item, an open fence.
    """
    from markdown_it import MarkdownIt

    starts = [
        token.map[0]
        for token in MarkdownIt("commonmark").enable("table").parse(markdown)
        if token.level == 0 and token.map is not None and token.nesting >= 0
    ]
    if len(starts) < 2:
        return 0
    lines = markdown.splitlines(keepends=True)
    return sum(len(line) for line in lines[: starts[-1]])
