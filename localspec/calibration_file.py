"""Where calibrations are kept: a JSON file beside the drafter, or in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from localspec import places
from localspec.calibration import Calibration
from localspec.errors import LocalspecError

_FORMAT = "localspec-calibration"
_VERSION = 1
_FIELDS = ("offsets", "slopes", "first", "confidence", "confidence_mean")
_MOST_BYTES = 1 << 20
_HASHED = 1 << 16

logger = logging.getLogger("localspec")


def fingerprint(drafter: str | Path) -> str:
    """What ties a calibration to a drafter's file: a hash of its size, first and last 64 KiB.

    The end is hashed too: weights of another training lie there, behind an equal header.
    """
    key = hashlib.sha256()
    with open(drafter, "rb") as f:
        size = f.seek(0, os.SEEK_END)
        key.update(f"{size}\n".encode())
        for at in (0, max(0, size - _HASHED)):
            f.seek(at)
            key.update(f.read(_HASHED))
    return key.hexdigest()


def side_file(drafter: str | Path) -> Path:
    """The file beside the drafter: `x.gguf` -> `x.calibration.json`."""
    path = Path(drafter)
    return path.with_name(path.stem + ".calibration.json")


def cached_file(drafter: str | Path) -> Path:
    """The file in $LOCALSPEC_CACHE or the user's cache directory."""
    return places.cache_dir() / "calibration" / f"{fingerprint(drafter)[:24]}.json"


def load(drafter: str | Path, depths: int) -> Calibration | None:
    """A drafter's calibration: the user's own, else the one beside the drafter, else None.

    A file that is damaged or belongs to another drafter is passed over with a warning.

    Args:
        drafter: its GGUF.
        depths: its draft depths.
    """
    for path in (cached_file(drafter), side_file(drafter)):
        if path.exists():
            try:
                return read(path, drafter, depths)
            except LocalspecError as e:
                logger.warning("%s", e)
    return None


def read(path: Path, drafter: str | Path, depths: int) -> Calibration:
    """One file, checked.

    Raises:
        LocalspecError: it cannot be read, is no calibration, or is another drafter's.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError("too large")
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != _FORMAT or data["version"] != _VERSION:
            raise ValueError("another format")
        owner = data["drafter"]
        table = Calibration(*(_numbers(data["depths"], name) for name in _FIELDS))
    except (OSError, ValueError, TypeError, LookupError, RecursionError, AttributeError) as e:
        raise LocalspecError(
            f"{path} is no calibration that can be used; remove it, or make it again with "
            "`localspec calibrate`"
        ) from e
    if owner != fingerprint(drafter):
        raise LocalspecError(
            f"{path.name} was made for another drafter than {Path(drafter).name}; make it again "
            "with `localspec calibrate`"
        )
    if table.depths != depths or not table.sound:
        raise LocalspecError(
            f"{path.name} does not fit {Path(drafter).name}; make it again with "
            "`localspec calibrate`"
        )
    return table


def save(drafter: str | Path, table: Calibration, about: Mapping[str, object]) -> Path:
    """Write a calibration where `load` finds it.

    Args:
        drafter: its GGUF.
        table: what was fitted.
        about: what to note beside it, e.g. the errors before and after.

    Returns:
        The file: beside the drafter, or in the cache directory when that cannot be written.

    Raises:
        LocalspecError: neither can be written.
    """
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "drafter": fingerprint(drafter),
        **about,
        "depths": [
            dict(zip(_FIELDS, (round(x, 6) for x in row), strict=True))
            for row in zip(*(asdict(table)[name] for name in _FIELDS), strict=True)
        ],
    }
    text = json.dumps(data, indent=1) + "\n"
    beside, cached = side_file(drafter), cached_file(drafter)
    try:
        _write(beside, text)
        cached.unlink(missing_ok=True)  # it would be found first
        return beside
    except OSError:
        pass
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        _write(cached, text)
        return cached
    except OSError as e:
        raise LocalspecError(
            f"cannot write {beside} or {cached}: {e.strerror or e}; set LOCALSPEC_CACHE to a "
            "folder that can be written"
        ) from e


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _numbers(rows: Sequence[Mapping[str, object]], name: str) -> tuple[float, ...]:
    values = [row[name] for row in rows]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) for x in values):
        raise ValueError(f"{name} are no numbers")
    return tuple(float(x) for x in values)  # type: ignore[arg-type]
