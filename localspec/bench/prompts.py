"""Prompt files: JSON lines {"turns": ["first user message", "second", ...]}."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.errors import LocalspecError


@dataclass(frozen=True)
class PromptFile:
    """A prompt file.

    Attributes:
        name: the file's name without its ending.
        conversations: per line its user messages.
    """

    name: str
    conversations: list[list[str]]


def read_prompts(path: str | Path, limit: int | None = None) -> PromptFile:
    """Read a prompt file.

    Args:
        path: JSON lines; empty lines are skipped.
        limit: take only the first lines; None takes all.

    Raises:
        LocalspecError: it cannot be read, or a line holds no turns.
    """
    path = Path(path)
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or "it is no UTF-8 text"
        raise LocalspecError(f"cannot read the prompt file {path}: {reason}") from e
    found: list[list[str]] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(found) >= limit:
            break
        if line.strip():
            found.append(_turns(path, number, line))
    if not found:
        raise LocalspecError(f"{path} holds no prompts; write one a line: {_EXAMPLE}")
    return PromptFile(path.stem, found)


def prompt_files(folder: str | Path) -> list[Path]:
    """The `.jsonl` files of a folder, by name.

    Raises:
        LocalspecError: there is no such folder, or it has none.
    """
    folder = Path(folder)
    found = sorted(folder.glob("*.jsonl")) if folder.is_dir() else []
    if not found:
        what = "holds no .jsonl files" if folder.is_dir() else "is no folder"
        raise LocalspecError(f"{folder} {what}; name a folder of prompt files")
    return found


def first_turns(files: Sequence[PromptFile]) -> list[str]:
    """Every conversation's first message, file by file."""
    return [turns[0] for file in files for turns in file.conversations]


_EXAMPLE = '{"turns": ["a question"]}'


def _turns(path: Path, number: int, line: str) -> list[str]:
    try:
        turns = json.loads(line)["turns"]
    except (ValueError, TypeError, LookupError, RecursionError):
        turns = None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise LocalspecError(f"{path}, line {number}: no prompt; a line looks like {_EXAMPLE}")
    return turns
