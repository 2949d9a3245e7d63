"""Drafters that are GGUF files already: nothing to convert, only to check, and to copy if asked."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from localspec import pairs
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins like a GGUF."""
    try:
        with open(path, "rb") as f:
            return f.read(4) == b"GGUF"
    except (OSError, ValueError):
        return False


def use(drafter: Path, target: Path, out: Path | None, *, force: bool = False) -> Path | None:
    """Check a drafter against its target; copy it, with its heads, when `out` is given.

    Returns:
        Where the copy is; None without one.

    Raises:
        LocalspecError: it does not fit the target, or `out` cannot be written.
    """
    with GgufFile(drafter) as drafter_file, GgufFile(target) as target_file:
        info = pairs.check_pair(target_file, drafter_file)
    if out is None:
        return None
    if not out.parent.is_dir() or out.is_dir():
        raise LocalspecError(f"{out} cannot be written; name a file in an existing directory")
    copies = [(drafter, out)]
    if info.heads_path is not None:
        copies.insert(0, (info.heads_path, pairs.heads_path(out)))
    inputs = {os.path.realpath(p) for p in (target, *(source for source, _ in copies))}
    for _, to in copies:
        if os.path.realpath(to) in inputs:
            raise LocalspecError(f"{to} is an input; choose another output")
        if os.path.lexists(to) and not force:
            raise LocalspecError(f"{to} exists; use --force to replace it, or another output")
    aside = {to: to.with_name(f".{to.name}.{os.getpid()}.part") for _, to in copies}
    try:
        for source, to in copies:
            aside[to].unlink(missing_ok=True)
            shutil.copyfile(source, aside[to])
        for _, to in copies:
            os.replace(aside[to], to)
    except OSError as e:
        raise LocalspecError(f"{out} cannot be written: {e.strerror or e}") from e
    finally:
        for path in aside.values():
            path.unlink(missing_ok=True)
    return out
