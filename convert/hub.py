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
from localspec.hub import (
    Say,
    UnreachableError,
    cached_files,
    fetch,
    hub_id,
    listing,
    safe_name,
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
    at = f" at revision {revision}" if revision else ""
    try:
        found = listing(name, revision)
        names = wanted(found.sizes)
        say(f"downloading {name}{at} (commit {found.commit[:12]})")

        def get(file: str) -> Path:
            return fetch(name, file, found.commit, revision=revision, say=say)

        small = {n: get(n) for n in names if n == "config.json" or n in INDEXES}
        keep = None
        if INDEXES[0] in small:
            keep = needed_shards(_json(small[INDEXES[0]]), _json(small.get("config.json")))
        rest = [n for n in names if n not in small]
        if keep is not None:
            rest = [n for n in rest if not n.endswith(".safetensors") or n in keep]
        ggufs = [n for n in rest if n.endswith(".gguf")]
        if len(ggufs) > 1:
            raise LocalspecError(
                f"{name} holds {len(ggufs)} GGUF files ({', '.join(sorted(ggufs)[:4])}, ...); "
                f"use one of them: -d {name}/{sorted(ggufs)[0]}"
            )
        weights = [get(n) for n in rest]
        if ggufs:
            return weights[rest.index(ggufs[0])]
        if not weights or "config.json" not in small:
            raise LocalspecError(
                f"{name}{at} holds no config.json with weights beside it; it is no checkpoint"
            )
        return small["config.json"].parent
    except UnreachableError as e:
        return _cached(name, revision, e)


def _cached(name: str, revision: str | None, problem: UnreachableError) -> Path:
    """A snapshot that an earlier download left, complete."""
    files = cached_files(name, revision)
    ggufs = [path for file, path in files.items() if file.endswith(".gguf")]
    if "config.json" in files and any(f.endswith((".safetensors", ".bin", ".pt")) for f in files):
        return files["config.json"].parent
    if len(ggufs) == 1:
        return ggufs[0]
    raise LocalspecError(f"{problem}, or name a directory on this machine") from problem


def _json(path: Path | None) -> Any:
    try:
        return None if path is None else json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
