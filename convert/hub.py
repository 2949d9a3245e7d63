"""Where a checkpoint comes from: a directory, a file, or the Hugging Face hub.

huggingface_hub does the downloading, with its cache, its resuming and its environment variables
(HF_ENDPOINT for mirrors, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN). Only the files a conversion reads
are fetched, and all of them from one commit.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from localspec.errors import LocalspecError

# owner/name as the hub allows it; a leading dot, slash or tilde is a path.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PREFIXES = ("hf://", "hf:", "https://huggingface.co/", "https://hf.co/")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_DRAFTER_PART = "mtp."  # the drafter's tensors inside a full DeepSeek-V4 checkpoint

Say = Callable[[str], None]


def hub_id(source: str) -> str | None:
    """The hub id that `source` names; None when it is a path. What exists on disk is a path."""
    prefix = next((p for p in _PREFIXES if source.startswith(p)), "")
    name = source[len(prefix) :].rstrip("/")
    if not prefix and os.path.lexists(source):
        return None
    return name if _HUB_ID.fullmatch(name) and ".." not in name else None


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
        if not _safe(name):
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


def _safe(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(
        name
        and "\\" not in name
        and "\0" not in name
        and ":" not in name
        and not path.is_absolute()
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def _download(name: str, revision: str | None, say: Say) -> Path:
    try:
        import huggingface_hub as hub
        from huggingface_hub import constants, errors
    except ImportError as e:
        raise LocalspecError(
            "downloading needs huggingface_hub; install it with: pip install huggingface_hub"
        ) from e
    at = f" at revision {revision}" if revision else ""
    if constants.HF_HUB_OFFLINE:
        return _cached(name, revision, f"{name}{at} is not in the cache, and HF_HUB_OFFLINE is set")
    try:
        info = hub.HfApi().model_info(name, revision=revision)
        names = wanted(f.rfilename for f in info.siblings or ())
        commit = info.sha or revision
        say(f"downloading {name}{at} (commit {str(commit)[:12]})")

        def fetch(file: str) -> Path:
            return Path(hub.hf_hub_download(name, file, revision=commit))

        small = {n: fetch(n) for n in names if n == "config.json" or n in INDEXES}
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
                "download the one you want and name it"
            )
        weights = [fetch(n) for n in rest]
        if ggufs:
            return weights[rest.index(ggufs[0])]
        if not weights or "config.json" not in small:
            raise LocalspecError(
                f"{name}{at} holds no config.json with weights beside it; it is no checkpoint"
            )
        return small["config.json"].parent
    except errors.GatedRepoError as e:
        raise LocalspecError(
            f"{name} is gated: accept its terms on its page, then log in with: hf auth login"
        ) from e
    except errors.RevisionNotFoundError as e:
        raise LocalspecError(f"{name} has no revision {revision}; check --revision") from e
    except errors.RepositoryNotFoundError as e:
        raise LocalspecError(
            f"{name} is neither a path here nor a repository on the hub; check the name, or log in "
            "if it is private: hf auth login"
        ) from e
    except errors.HfHubHTTPError as e:
        status = getattr(e.response, "status_code", "?")
        raise LocalspecError(f"the hub answered {status} for {name}; try again later") from e
    except errors.LocalEntryNotFoundError as e:
        raise _unreachable(name, e) from e
    except OSError as e:
        if e.errno is not None and not isinstance(e, ConnectionError):
            raise LocalspecError(f"{name} cannot be downloaded: {e.strerror or e}") from e
        raise _unreachable(name, e) from e
    except LocalspecError:
        raise
    except Exception as e:  # the HTTP client's own connection errors
        if type(e).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            return _cached(name, revision, f"the hub cannot be reached for {name}{at}")
        raise LocalspecError(f"{name} cannot be downloaded: {_one_line(e)}") from e


def _cached(name: str, revision: str | None, problem: str) -> Path:
    """A snapshot that an earlier download left, complete."""
    import huggingface_hub as hub

    try:
        path = Path(hub.snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as e:
        raise LocalspecError(
            f"{problem}; connect and try again, or name a directory on this machine"
        ) from e
    ggufs = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file() and len(ggufs) == 1:
        return ggufs[0]
    return path


def _unreachable(name: str, e: BaseException) -> LocalspecError:
    return LocalspecError(
        f"the hub cannot be reached for {name} ({_one_line(e)}); what is downloaded is kept, try "
        "again later"
    )


def _json(path: Path | None) -> Any:
    try:
        return None if path is None else json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split())[:160] or type(e).__name__
