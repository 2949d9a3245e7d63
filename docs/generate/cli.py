"""Writes the CLI reference from the commands' help: `python docs/generate/cli.py docs/cli.md`."""

from __future__ import annotations

import inspect
import re
import sys
from html import escape
from pathlib import Path

import click

from localspec.cli import cli

HEAD = """# Command line

Generated from the commands' own help, which `localspec COMMAND --help` prints, with
`python docs/generate/cli.py docs/cli.md`.

Errors are one line on standard error. Exit status: 0, 1 for an error, 2 for wrong usage, 130 when
interrupted.
"""


def reference() -> str:
    """The whole page."""
    context = click.Context(cli, info_name="localspec")
    parts = [HEAD]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        parts.append(_command(command, click.Context(command, info_name=name, parent=context)))
    return "\n".join(parts)


def _command(command: click.Command, context: click.Context, level: int = 2) -> str:
    path = context.command_path
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    parts = [f"{'#' * level} {path}\n", f"```text\n{usage}\n```\n", _prose(command.help or "")]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            below = click.Context(inner, info_name=name, parent=context)
            parts.append(_command(inner, below, level + 1))
        return "\n".join(parts)
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if isinstance(parameter, click.Option) and record is not None:
            rows.append(f"| {_code(record[0])} | {_plain(_cell(record[1]))} |")
    return "\n".join([*parts, "| option | |", "|---|---|", *rows, ""])


def _prose(text: str) -> str:
    """Click's help as Markdown: paragraphs after \\b are printed as they are."""
    out = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        lines = paragraph.split("\n")
        if lines[0].strip() == "\b":
            body = "\n".join(line.rstrip() for line in lines[1:])
            language = "sh" if body.lstrip().startswith("localspec ") else "text"
            out.append(f"```{language}\n{body}\n```\n")
        else:
            out.append(_plain(" ".join(line.strip() for line in lines)) + "\n")
    return "\n".join(out)


def _plain(text: str) -> str:
    """Text in which nothing but `code` is markup."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([<>*_\[\]#])", r"\\\1", piece)
        for piece in pieces
    )


def _code(text: str) -> str:
    """Code in a table's cell; a bar in backticks is read differently by every Markdown."""
    return f"<code>{escape(text).replace('|', '&#124;')}</code>" if "|" in text else f"`{text}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), "utf-8")
