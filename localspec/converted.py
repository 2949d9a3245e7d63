"""Drafters on the hub: their checkpoints are converted once, and kept.

They are kept apart from the hub's cache, in `places.drafters_dir()`: a folder per repository, and
in it a file per commit and target tokenizer. The checkpoint is not needed any more then.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from localspec import hub, places
from localspec.errors import LocalspecError
from localspec.gguf_choice import is_heads
from localspec.ggufio import GgufFile
from localspec.pairs import check_pair

if TYPE_CHECKING:
    from localspec.convert import Progress

# Raised when the converter writes something else than before.
_FORMAT = 1
# A conversion shows its progress; the context manager of `localspec convert`, or none.
ShowProgress = Callable[[], contextlib.AbstractContextManager["Progress | None"]]


def folder_of(repo: str) -> Path:
    """Where the drafters made from a repository lie."""
    return places.drafters_dir() / repo.replace("/", "--")


def existing(repo: str, target: Path) -> Path | None:
    """The newest drafter made from `repo` that fits `target`; None without one."""
    folder = folder_of(repo)
    if not folder.is_dir():
        return None
    with contextlib.suppress(OSError):
        found = sorted(folder.glob(f"*-{_key(target)}.gguf"), key=lambda p: -p.stat().st_mtime)
        return next((p for p in found if _fits(p, target)), None)
    return None


def drafter(
    repo: str,
    target: Path,
    *,
    update: bool = False,
    verify: bool = False,
    say: hub.Say = lambda line: None,
    show: ShowProgress = lambda: contextlib.nullcontext(None),
) -> Path:
    """A drafter of the hub as a GGUF that fits `target`; downloaded and converted if need be.

    Args:
        repo: `owner/name` of a checkpoint, or of a GGUF.
        target: the target's GGUF; the tokenizer is taken from it.
        update: ask the hub for a newer commit even when there is a drafter.
        verify: compare the conversion with the torch reference (needs torch and memory).
        say: told, in a line, what takes a while.
        show: opened around the conversion.

    Raises:
        UnreachableError: it has to be downloaded, and there is no network.
        LocalspecError: it does not fit the target, or cannot be downloaded or converted.
    """
    here = existing(repo, target) or _ready(repo)
    if here is not None and not update:
        return here
    try:
        commit = hub.listing(repo).commit
    except hub.UnreachableError as e:
        if here is None:
            raise
        say(f"{e}; using what is here")
        return here
    out = folder_of(repo) / f"{commit[:12]}-{_key(target)}.gguf"
    if here == out:
        return here
    return _convert(repo, commit, target, out, verify, say, show)


def _convert(
    repo: str,
    commit: str,
    target: Path,
    out: Path,
    verify: bool,
    say: hub.Say,
    show: ShowProgress,
) -> Path:
    from localspec.convert import convert, ready
    from localspec.convert import hub as checkpoints

    # Not a folder here of the same name, and nothing that the file's name would not be true of.
    source = checkpoints.resolve(f"hf:{repo}", commit, say=say)
    hub.remember(repo, None, commit)
    if ready.is_gguf(source):
        return source
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise LocalspecError(
            f"{out.parent} cannot be made: {e.strerror or e}; set LOCALSPEC_CACHE to a folder that "
            "can be written"
        ) from e
    say(f"converting {repo} for {target.name}")
    with show() as progress:
        result = convert(source, target, out, verify=verify, progress=progress)
    for note in result.notes:
        say(f"note: {note}")
    say(f"converted: {hub.size_in_words(result.nbytes)} in {out.parent}")
    return out


def _ready(repo: str) -> Path | None:
    """The GGUF of a repository that holds a finished drafter, when it is in the cache."""
    for files in hub.snapshots(repo):
        ggufs = [p for name, p in files.items() if name.endswith(".gguf") and not is_heads(name)]
        if ggufs:
            return ggufs[0] if len(ggufs) == 1 and "config.json" not in files else None
    return None


def _fits(path: Path, target: Path) -> bool:
    with contextlib.suppress(LocalspecError), GgufFile(path) as file, GgufFile(target) as header:
        check_pair(header, file)
        return True
    return False


def _key(target: Path) -> str:
    """What of a target goes into a drafter made for it: its tokenizer and shape."""
    found = hashlib.sha256(b"%d\n" % _FORMAT)
    with GgufFile(target) as header:
        for key in sorted(k for k in header.metadata if k.startswith("tokenizer.")):
            found.update(key.encode() + header.stored_value(key))
        for key in ("block_count", "embedding_length"):
            found.update(f"{header.architecture} {header.arch_get(key)}\n".encode())
    return found.hexdigest()[:8]
