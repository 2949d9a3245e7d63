"""The pairs that have names: data/pairs.toml, checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.hub import HUB_ID

# What -d takes besides the names of drafters.
RESERVED = frozenset({"mtp", "none"})
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_FAMILY = re.compile(r"[a-z0-9][a-z0-9-]*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FILE = re.compile(r"(?!.*\.\.)[\w][\w./-]*\.gguf")


@dataclass(frozen=True)
class KnownTarget:
    """The GGUF of a target on the hub.

    Attributes:
        repo: `owner/name`.
        file: its name there.
        size: bytes.
        revision: the commit it is taken from.
        sha256: what it must be.
    """

    repo: str
    file: str
    size: int
    revision: str
    sha256: str


@dataclass(frozen=True)
class KnownDrafter:
    """A drafter's checkpoint on the hub.

    Attributes:
        family: what -d calls it, e.g. "dspark" or "dflash-b16".
        repo: `owner/name`.
        size: bytes to download, about; None when unknown.
    """

    family: str
    repo: str
    size: int | None


@dataclass(frozen=True)
class KnownPair:
    """A target that has a name, and the drafters made for it.

    Attributes:
        name: e.g. "qwen3-4b".
        title: for people.
        layers: what its header must say; so with `width`.
        target: where it is; None for the pair that comes with the package.
        drafters: the first is used when none is named; none for the packaged pair.
    """

    name: str
    title: str
    layers: int
    width: int
    target: KnownTarget | None
    drafters: tuple[KnownDrafter, ...]

    def drafter(self, family: str) -> KnownDrafter | None:
        """The drafter of a family; None when there is none."""
        return next((d for d in self.drafters if d.family == family), None)

    def check(self, target: GgufFile) -> None:
        """Refuse a target that the drafters were not made for.

        Raises:
            LocalspecError: its layers or width are others.
        """
        found = target.arch_get("block_count"), target.arch_get("embedding_length")
        if found != (self.layers, self.width):
            raise LocalspecError(
                f"{target.path.name} has {found[0]} layers of width {found[1]}, but {self.name} "
                f"has {self.layers} of width {self.width}; it is another model, name its file "
                "instead"
            )


@cache
def known_pairs() -> dict[str, KnownPair]:
    """Name -> pair, in the order of the file."""
    return read(Path(__file__).parent / "data" / "pairs.toml")


def read(path: Path) -> dict[str, KnownPair]:
    """A registry file.

    Raises:
        LocalspecError: it cannot be read, or an entry is not as it should be, by its name.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        data = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise LocalspecError(
            f"{path} cannot be read ({' '.join(str(e).split())}); reinstall localspec"
        ) from e
    return {name: _pair(name, entry, path) for name, entry in data.items()}


def _pair(name: str, entry: Any, path: Path) -> KnownPair:
    where = f"{path}: {name}"
    if not _NAME.fullmatch(name):
        raise LocalspecError(f"{where} is no name; use small letters, digits, dots and dashes")
    packaged = isinstance(entry, Mapping) and entry.get("packaged") is True
    needed = {"title": str, "layers": int, "width": int}
    if not packaged:
        needed |= {"target": dict, "drafters": dict}
    _fields(entry, needed, {"packaged": bool}, where)
    target, drafters = None, []
    if not packaged:
        target = _target(entry["target"], f"{where}.target")
        for family, drafter in entry["drafters"].items():
            drafters.append(_drafter(family, drafter, f"{where}.drafters.{family}"))
        if not drafters:
            raise LocalspecError(f"{where} has no drafter")
    return KnownPair(name, entry["title"], entry["layers"], entry["width"], target, tuple(drafters))


def _target(entry: Any, where: str) -> KnownTarget:
    needed = {"repo": str, "file": str, "size": int, "revision": str, "sha256": str, "from": str}
    _fields(entry, needed, {}, where)
    _matches(HUB_ID, entry["repo"], f"{where}.repo")
    _matches(_FILE, entry["file"], f"{where}.file")
    _matches(_COMMIT, entry["revision"], f"{where}.revision")
    _matches(_SHA256, entry["sha256"], f"{where}.sha256")
    return KnownTarget(
        entry["repo"], entry["file"], entry["size"], entry["revision"], entry["sha256"]
    )


def _drafter(family: str, entry: Any, where: str) -> KnownDrafter:
    _fields(entry, {"repo": str, "from": str}, {"size": int}, where)
    _matches(HUB_ID, entry["repo"], f"{where}.repo")
    if not _FAMILY.fullmatch(family) or family in RESERVED:
        raise LocalspecError(f"{where}: {family!r} cannot be a drafter's name")
    return KnownDrafter(family, entry["repo"], entry.get("size"))


def _fields(
    entry: Any, needed: Mapping[str, type], optional: Mapping[str, type], where: str
) -> None:
    if not isinstance(entry, Mapping):
        raise LocalspecError(f"{where} is no table")
    for key in (*needed, *(k for k in optional if k in entry)):
        kind = needed.get(key) or optional[key]
        value = entry.get(key)
        if type(value) is not kind or (type(value) is int and value <= 0):
            raise LocalspecError(f"{where}.{key} is missing, or no sensible {kind.__name__}")
    unknown = sorted(set(entry) - set(needed) - set(optional))
    if unknown:
        raise LocalspecError(f"{where} has an unknown setting {unknown[0]!r}")


def _matches(pattern: re.Pattern[str], value: str, where: str) -> None:
    if not pattern.fullmatch(value):
        raise LocalspecError(f"{where} cannot be {value!r}")
