"""Names of models on the hub, as llama.cpp and Ollama write them, and which file they mean."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from localspec.errors import LocalspecError
from localspec.hub import HUB_ID, PREFIXES

# Files beside a model that are none, or only a part of one.
_NOT_MODELS = re.compile(r"mmproj|imatrix|\.heads\.gguf$|(^|/)mtp-", re.I)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.I)
# What is taken when nobody says: llama.cpp's default first, then what is next best for its size.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_K_XL", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0")


@dataclass(frozen=True)
class HubModel:
    """A model on the hub.

    Attributes:
        repo: `owner/name`.
        file: the file in it, or None.
        tag: part of a file name that chooses one, e.g. "Q4_K_M"; or None.
        revision: of a web address; else None.
    """

    repo: str
    file: str | None = None
    tag: str | None = None
    revision: str | None = None


def parse(text: str) -> HubModel | None:
    """What a name means on the hub; None when it can only be a path.

    owner/name, owner/name:Q4_K_M, owner/name/file.gguf, each also behind hf: or hf.co/, and the
    web address of a file. What exists on disk is a path, and so are files in a folder that does.
    """
    prefix = next((p for p in PREFIXES if text.startswith(p)), "")
    rest = text[len(prefix) :].split("?")[0] if prefix.startswith("http") else text[len(prefix) :]
    parts = rest.rstrip("/").split("/")
    if len(parts) < 2 or "\\" in rest or ".." in rest:
        return None
    if not prefix and (os.path.lexists(text) or (len(parts) > 2 and os.path.isdir(parts[0]))):
        return None
    revision = None
    if len(parts) > 4 and parts[2] in ("blob", "resolve", "tree"):
        revision, parts = parts[3], parts[:2] + parts[4:]
    if len(parts) == 2:
        name, colon, tag = parts[1].partition(":")
        repo = f"{parts[0]}/{name}"
        if not HUB_ID.fullmatch(repo) or (colon and not re.fullmatch(r"[\w.-]+", tag)):
            return None
        # "models/x.gguf" is a file that is not there.
        if name.lower().endswith(".gguf") and not prefix:
            return None
        return HubModel(repo, tag=tag or None)
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    if not HUB_ID.fullmatch(repo) or not file.lower().endswith(".gguf") or ":" in file:
        return None
    return HubModel(repo, file=file, revision=revision)


def choose(files: Iterable[str], repo: str, tag: str | None = None) -> list[str]:
    """The GGUF that is meant: its file, or all of its parts in order.

    Args:
        files: names in a repository.
        repo: its name, for messages.
        tag: chooses among several; without one the usual quantisations are looked for.

    Raises:
        LocalspecError: there is none, or none for this tag.
    """
    models = sorted(f for f in files if f.lower().endswith(".gguf") and not _NOT_MODELS.search(f))
    firsts = [f for f in models if not (m := _PART.search(f)) or int(m[1]) == 1]
    if not firsts:
        raise LocalspecError(
            f"{repo} holds no GGUF model; look for a repository of the same model that has GGUF "
            "in its name"
        )
    if tag is not None:
        found = [f for f in firsts if has_tag(f, tag)]
        if not found:
            raise LocalspecError(
                f"{repo} holds no file for {tag!r}; it has {_some(firsts)}: name one as "
                f"{repo}/{firsts[0]}"
            )
    else:
        tagged = ([f for f in firsts if has_tag(f, t)] for t in PREFERRED)
        found = firsts if len(firsts) == 1 else next((hits for hits in tagged if hits), [])
        if not found:
            raise LocalspecError(
                f"{repo} holds {len(firsts)} GGUF files, {_some(firsts)}: name one as "
                f"{repo}/{firsts[0]}"
            )
    # "Q4_K_M" also ends other names (UD-Q4_K_M): the plain one is the shortest.
    return parts_of(min(found, key=lambda f: (len(f), f)), models)


def parts_of(file: str, files: Iterable[str]) -> list[str]:
    """All parts of a model in several files, in order; the file alone when it is whole.

    Raises:
        LocalspecError: a part is missing.
    """
    match = _PART.search(file)
    if match is None:
        return [file]
    stem, count, there = file[: match.start()], int(match[2]), set(files)
    parts = [f"{stem}-{i:05d}-of-{count:05d}{file[match.end() - 5 :]}" for i in range(1, count + 1)]
    missing = [p for p in parts if p not in there]
    if missing:
        raise LocalspecError(f"{missing[0]} is missing beside {file}; choose another file")
    return parts


def is_heads(file: str) -> bool:
    """Whether this is the companion of a drafter, with the heads that llama.cpp cannot run."""
    return file.endswith(".heads.gguf")


def heads_of(file: str, files: Iterable[str]) -> list[str]:
    """The companion of a drafter's file, where a repository has it."""
    name = f"{file.removesuffix('.gguf')}.heads.gguf"
    return [name] if name in set(files) else []


def has_tag(file: str, tag: str) -> bool:
    """Whether a tag stands in a name as a word: "Q4_K" is not "Q4_K_M"."""
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(tag)}(?![A-Za-z0-9_])", file, re.I) is not None


def _some(files: list[str]) -> str:
    return ", ".join(files[:4]) + (", ..." if len(files) > 4 else "")
