"""Where a checkpoint comes from: a directory, a file, or the Hugging Face hub.

`localspec.hub` does the downloading. Only the files a conversion reads are fetched, and all of them
from one commit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError
from localspec.gguf_choice import is_heads
from localspec.hub import (
    Say,
    UnreachableError,
    fetch,
    hub_id,
    listing,
    remember,
    safe_name,
    snapshots,
)

__all__ = ["INDEXES", "hub_id", "needed_shards", "resolve", "wanted"]

INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_DRAFTER_PART = "mtp."  # the drafter's tensors inside a full DeepSeek-V4 checkpoint


def resolve(
    source: str | os.PathLike[str], revision: str | None = None, say: Say = lambda line: None
) -> Path:
    """The directory or file on this machine; downloaded when `source` is a hub id.

    Args:
        source: a path, `owner/name`, or `hf:owner/name`.
        revision: branch, tag or commit on the hub.
        say: told, in a line, what is being downloaded.

    Raises:
        LocalspecError: not found, gated, offline and not in the cache, or nothing to convert.
    """
    name = hub_id(str(source))
    if name is None:
        if revision is not None:
            raise LocalspecError(f"--revision is for hub ids, and {source} is a path; leave it out")
        return Path(source)
    return _download(name, revision, say)


def wanted(files: Iterable[str]) -> list[str]:
    """Of a hub listing, what a conversion reads: config, indexes, weights of one kind.

    Raises:
        LocalspecError: a name that would lead out of the directory.
    """
    files = list(files)
    for name in files:
        if not safe_name(name):
            raise LocalspecError(
                f"the listing names the file {name!r}, which leads out of the checkpoint; it is "
                "not to be trusted"
            )
    top = [name for name in files if "/" not in name]
    weights = [n for n in top if n.endswith(".safetensors")]
    if not weights:
        weights = [n for n in top if re.fullmatch(r"pytorch_model.*\.bin|model\.pt", n)]
    if not weights:
        weights = [n for n in top if n.endswith(".gguf") and not n.startswith("mmproj")]
    extra = [n for n in top if n in ("config.json", "mask_embedding.pt", *INDEXES)]
    return sorted({*weights, *extra})


def needed_shards(index: Any, config: Any) -> set[str] | None:
    """The weight files to fetch; None for all.

    Of a full DeepSeek-V4 checkpoint only the shards that hold the drafter are needed.
    """
    weight_map = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(weight_map, Mapping) or not isinstance(config, Mapping):
        return None
    if not any(str(key).startswith("dspark_") for key in config):
        return None
    shards = {str(f) for name, f in weight_map.items() if str(name).startswith(_DRAFTER_PART)}
    return shards or None


def _download(name: str, revision: str | None, say: Say) -> Path:
    # Commits are nothing that anybody wrote.
    at = f" at revision {revision}" if revision and len(revision) < 40 else ""
    try:
        found = listing(name, revision)
    except UnreachableError as e:
        return _cached(name, revision, e)
    names = wanted(found.sizes)
    say(f"downloading {name}{at} (commit {found.commit[:12]})")

    def get(file: str) -> Path:
        return fetch(name, file, found.commit, revision=revision, say=say, whole=False)

    small = {n: get(n) for n in names if n == "config.json" or n in INDEXES}
    keep = None
    if INDEXES[0] in small:
        keep = needed_shards(_json(small[INDEXES[0]]), _json(small.get("config.json")))
    rest = [n for n in names if n not in small]
    if keep is not None:
        rest = [n for n in rest if not n.endswith(".safetensors") or n in keep]
    ggufs = [n for n in rest if n.endswith(".gguf") and not is_heads(n)]
    if len(ggufs) > 1:
        raise LocalspecError(
            f"{name} holds {len(ggufs)} GGUF files ({', '.join(sorted(ggufs)[:4])}, ...); "
            f"use one of them: -d {name}/{sorted(ggufs)[0]}"
        )
    # Heads first: where a drafter's file is, they are too.
    weights = {n: get(n) for n in sorted(rest, key=lambda n: not is_heads(n))}
    if not ggufs and (not weights or "config.json" not in small):
        raise LocalspecError(
            f"{name}{at} holds no config.json with weights beside it; it is no checkpoint"
        )
    remember(name, revision, found.commit)
    return weights[ggufs[0]] if ggufs else small["config.json"].parent


def _cached(name: str, revision: str | None, problem: UnreachableError) -> Path:
    """The newest snapshot that earlier downloads left complete."""
    for files in snapshots(name, revision):
        ggufs = [p for file, p in files.items() if file.endswith(".gguf") and not is_heads(file)]
        if "config.json" in files and _has_weights(files):
            return files["config.json"].parent
        if len(ggufs) == 1:
            return ggufs[0]
    raise LocalspecError(f"{problem}, or name a directory on this machine") from problem


def _has_weights(files: Mapping[str, Path]) -> bool:
    """Whether the weights of a checkpoint are there, with all shards that are needed."""
    weights = [f for f in files if f.endswith((".safetensors", ".bin", ".pt"))]
    index = next((_json(files[i]) for i in INDEXES if i in files), None)
    needed = needed_shards(index, _json(files["config.json"]))
    if needed is None and isinstance(index, Mapping):
        shards = index.get("weight_map")
        needed = {str(f) for f in shards.values()} if isinstance(shards, Mapping) else None
    if needed is None:
        needed = {part for file in weights for part in _shards_with(file)}
    return bool(weights) and needed <= files.keys()


def _shards_with(file: str) -> set[str]:
    """The files that one of several shards comes with, by their names."""
    match = re.search(r"-\d{5}-of-(\d{5})(?=\.\w+$)", file)
    if match is None:
        return {file}
    stem, end, count = file[: match.start()], file[match.end() :], int(match[1])
    return {f"{stem}-{i:05d}-of-{count:05d}{end}" for i in range(1, count + 1)}


def _json(path: Path | None) -> Any:
    try:
        return None if path is None else json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
