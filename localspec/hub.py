"""Downloads from the Hugging Face hub that go on where they broke off, and are checked.

huggingface_hub does the talking, and its cache is where files end up, so that other programs find
them too. Its environment variables apply (HF_ENDPOINT for a mirror, HF_HUB_OFFLINE, HF_HOME,
HF_TOKEN). What it does not do is done here: an unfinished file is kept between runs, and a file
gets its name only when its checksum is what the hub said (SHA-256; git's SHA-1 for small files).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from filelock import FileLock

# owner/name as the hub allows it; a leading dot, slash or tilde is a path.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
PREFIXES = (
    "hf://", "hf:", "https://huggingface.co/", "https://www.huggingface.co/", "https://hf.co/",
    "huggingface.co/", "hf.co/",
)  # fmt: skip
_SHA256, _GIT_SHA1 = 64, 40
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK = 1 << 20
# Beyond this the hub serves files by its Xet protocol only, which huggingface_hub speaks.
_MOST_BY_HTTP = 50 * 10**9

Say = Callable[[str], None]


class UnreachableError(LocalspecError):
    """The hub cannot be reached; what is in the cache may do."""


@dataclass(frozen=True)
class Listing:
    """A repository at one commit.

    Attributes:
        name: `owner/name`.
        commit: the commit's hash.
        sizes: file name -> bytes; None where the hub does not say.
    """

    name: str
    commit: str
    sizes: dict[str, int | None]


def hub_id(source: str) -> str | None:
    """The hub id that `source` names; None when it is a path. What exists on disk is a path."""
    prefix = next((p for p in PREFIXES if source.startswith(p)), "")
    name = source[len(prefix) :].rstrip("/")
    if not prefix and os.path.lexists(source):
        return None
    return name if HUB_ID.fullmatch(name) and ".." not in name else None


def safe_name(name: str) -> bool:
    """Whether a file's name in a repository stays inside it."""
    path = PurePosixPath(name)
    return bool(
        name
        and "\\" not in name
        and "\0" not in name
        and ":" not in name
        and not path.is_absolute()
        and all(part not in ("", ".", "..") for part in name.split("/"))
    )


def listing(name: str, revision: str | None = None) -> Listing:
    """What a repository holds, by the hub.

    Raises:
        UnreachableError: there is no network, or HF_HUB_OFFLINE is set.
        LocalspecError: there is no such repository or revision, or it is private or gated.
    """
    with translated(name, revision):
        import huggingface_hub as hub

        info = hub.HfApi().model_info(name, revision=revision, files_metadata=True)
        sizes = {f.rfilename: f.size for f in info.siblings or ()}
        return Listing(name, info.sha or revision or "main", sizes)


def cached(name: str, file: str, revision: str | None = None) -> Path | None:
    """A file that lies in the cache; of the newest snapshot known as `revision` ("main")."""
    import huggingface_hub as hub

    with contextlib.suppress(ValueError):  # what the hub's own rules call no name
        found = hub.try_to_load_from_cache(name, file, revision=revision)
        if isinstance(found, str) and os.path.exists(found):
            return Path(found)
    return None


def snapshots(name: str, revision: str | None = None) -> Iterator[dict[str, Path]]:
    """What lies in the cache of a repository: file name -> path, a snapshot at a time.

    The one known as `revision` ("main") comes first. A download that broke off can have left it
    incomplete, so earlier ones of "main" follow, newest first: all that no other branch or tag
    leads to. Links whose content is missing, or not complete yet, are left out.

    Args:
        name: `owner/name`.
        revision: a branch, a tag or a commit.
    """
    folder = repo_folder(name)
    root = folder / "snapshots"
    leads = _notes(folder / "refs")
    noted = leads.pop(revision or "main", None)
    commits = [] if noted is None else [noted]
    if noted is None and revision is not None:
        commits = [revision]
    if revision in (None, "main"):
        with contextlib.suppress(OSError):
            ages = {p.name: p.stat().st_mtime for p in root.iterdir()}
            others = sorted(ages.keys() - {noted}, key=lambda c: -ages[c])
            commits += [c for c in others if c not in leads.values()]
            if noted is None:  # nothing of "main" is known: all there is
                commits += [c for c in others if c in leads.values()]
    for commit in commits:
        place = root / commit
        if place.parent == root and commit != "..":
            with contextlib.suppress(OSError):
                found = [p for p in sorted(place.rglob("*")) if p.is_file()]
                yield {p.relative_to(place).as_posix(): p for p in found}


def _notes(refs: Path) -> dict[str, str]:
    """Branch or tag -> the commit it leads to, as far as the cache knows."""
    found = {}
    for path in refs.rglob("*"):
        with contextlib.suppress(OSError, ValueError):
            if path.is_file():
                found[path.relative_to(refs).as_posix()] = path.read_text("utf-8").strip()
    return found


def repo_folder(name: str) -> Path:
    """Where the cache keeps a repository."""
    from huggingface_hub import constants, file_download

    folder = file_download.repo_folder_name(repo_id=name, repo_type="model")
    return Path(constants.HF_HUB_CACHE) / folder


def unfinished(name: str, sha256: str) -> int:
    """Bytes that have come of a file that is not complete yet."""
    with contextlib.suppress(OSError):
        return (repo_folder(name) / "blobs" / f"{sha256}.incomplete").stat().st_size
    return 0


def fetch(
    name: str,
    file: str,
    commit: str,
    *,
    revision: str | None = None,
    sha256: str | None = None,
    say: Say = lambda line: None,
    whole: bool = True,
) -> Path:
    """One file of a repository, downloaded unless the cache has it.

    Args:
        name: `owner/name`.
        file: its name in the repository.
        commit: the commit to take it from.
        revision: the branch or tag that led to `commit` ("main" when left out): recorded, so
            that it is found without a network.
        sha256: what it must be, where that is known beforehand.
        say: told what takes a while.
        whole: False for a part of something; `remember` the commit when all of it is here.

    Raises:
        UnreachableError: there is no network, or it broke off. What came so far is kept.
        LocalspecError: it is not there, not what it should be, or the disk is full.
    """
    if not safe_name(file):
        raise LocalspecError(
            f"{name} names the file {file!r}, which leads out of it; it is not to be trusted"
        )
    here = cached(name, file, commit)
    if here is None:
        with translated(name, revision):
            here = _download(name, file, commit, sha256, say)
    if whole:
        remember(name, revision, commit)
    return here


def _download(name: str, file: str, commit: str, sha256: str | None, say: Say) -> Path:
    import huggingface_hub as hub
    from filelock import FileLock
    from huggingface_hub import file_download

    meta = hub.get_hf_file_metadata(hub.hf_hub_url(name, file, revision=commit))
    etag, size = meta.etag or "", meta.size
    known = re.fullmatch(f"[0-9a-f]{{{_GIT_SHA1}}}|[0-9a-f]{{{_SHA256}}}", etag) is not None
    known = known and _COMMIT.fullmatch(commit) is not None
    if sha256 is not None and len(etag) == _SHA256 and etag != sha256:
        raise LocalspecError(
            f"{file} of {name} is not the file that localspec knows (its SHA-256 is "
            f"{etag[:12]}..., not {sha256[:12]}...); it is not downloaded"
        )
    folder = repo_folder(name)
    if known and size is not None and size <= _MOST_BY_HTTP:
        blob = folder / "blobs" / etag
        lock = folder.parent / ".locks" / folder.name / f"{etag}.lock"
        for place in (blob.parent, lock.parent):
            place.mkdir(parents=True, exist_ok=True)
        with _held(FileLock(lock), file, say):
            if not blob.exists():
                part = blob.with_name(f"{etag}.incomplete")
                _complete(part, name, file, size, meta)
                _check(part, name, file, sha256 or etag, say)
                if not file_download.are_symlinks_supported(folder.parent):
                    blob = folder / "snapshots" / commit / file
                    blob.parent.mkdir(parents=True, exist_ok=True)
                os.replace(part, blob)
    # Finds what is there, and puts it under its name.
    path = Path(hub.hf_hub_download(name, file, revision=commit))
    if sha256 is not None and not known:
        _check(path, name, file, sha256, say)
    return path


@contextlib.contextmanager
def _held(lock: FileLock, file: str, say: Say) -> Iterator[None]:
    """A lock, held; two programs may want the same file."""
    from filelock import Timeout

    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for another program that downloads {file}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _complete(part: Path, name: str, file: str, size: int, meta: Any) -> None:
    """Download what is missing of `part`."""
    from huggingface_hub import constants, file_download, utils

    have = part.stat().st_size if part.exists() else 0
    if have > size:
        part.unlink()
        have = 0
    _make_room(part.parent, name, file, size - have)
    headers = utils.build_hf_headers()  # type: ignore[attr-defined]
    address = meta.location
    if urlsplit(address).netloc != urlsplit(constants.ENDPOINT).netloc:
        headers.pop("authorization", None)  # the storage behind the hub has signed addresses
    with open(part, "ab") as out:
        # "accept-encoding: identity": offsets in a compressed answer would mean something else.
        file_download.http_get(
            address,
            out,
            resume_size=have,
            headers={**headers, "accept-encoding": "identity"},
            expected_size=size,
            displayed_filename=file.rsplit("/", 1)[-1],
        )


def _make_room(folder: Path, name: str, file: str, needed: int) -> None:
    """Refuse a download that the disk has no room for."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise LocalspecError(
            f"no room for {file} of {name} in {folder}: {size_in_words(needed)} needed, "
            f"{size_in_words(free)} free; free some, or set HF_HOME to a folder on a larger disk"
        )


def _check(path: Path, name: str, file: str, expected: str, say: Say) -> None:
    """Refuse, and remove, a file that is not what it should be."""
    size = path.stat().st_size
    if size > 100 * _CHUNK:
        say(f"checking {file}")
    if digest(path, expected) == expected:
        return
    real = Path(os.path.realpath(path))
    for broken in {path, real}:
        broken.unlink(missing_ok=True)
    raise LocalspecError(
        f"{file} of {name} arrived damaged: its checksum is not what it should be; it is removed, "
        "download it again"
    )


def digest(path: Path, like: str) -> str:
    """A file's checksum, of the kind that `like` is: SHA-256, or git's SHA-1 of a blob."""
    if len(like) == _SHA256:
        found = hashlib.sha256()
    else:
        found = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with open(path, "rb") as f:
        while chunk := f.read(_CHUNK):
            found.update(chunk)
    return found.hexdigest()


def remember(name: str, revision: str | None, commit: str) -> None:
    """Note which commit a branch or tag ("main") leads to, as the cache's layout has it.

    huggingface_hub does so itself when it is asked for the branch; here it is asked for commits.
    Only what is complete should be noted: other programs look for no older one.
    """
    revision = revision or "main"
    if revision == commit or ".." in revision or not _COMMIT.fullmatch(commit):
        return
    note = repo_folder(name) / "refs" / revision
    with contextlib.suppress(OSError):  # a cache that is only read
        if not note.exists() or note.read_text("utf-8") != commit:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(commit, "utf-8")


@contextlib.contextmanager
def translated(name: str, revision: str | None = None) -> Iterator[None]:
    """Everything that talking to the hub can raise, as a `LocalspecError` of one line."""
    try:
        from huggingface_hub import constants, errors
    except ImportError as e:
        raise LocalspecError(
            "downloading needs huggingface_hub; install it with: pip install huggingface_hub"
        ) from e
    # Commits are nothing that anybody wrote.
    at = f" at revision {revision}" if revision and len(revision) < _GIT_SHA1 else ""
    if constants.HF_HUB_OFFLINE:
        raise UnreachableError(
            f"the hub is not asked for {name}{at}: HF_HUB_OFFLINE is set; unset it to download"
        )
    try:
        yield
    except LocalspecError:
        raise
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
    except errors.LocalEntryNotFoundError as e:
        raise _unreachable(name, at, e) from e
    except errors.EntryNotFoundError as e:
        raise LocalspecError(f"{name}{at} does not hold that file any more: {_one_line(e)}") from e
    except errors.HfHubHTTPError as e:
        status = getattr(e.response, "status_code", "?")
        raise LocalspecError(f"the hub answered {status} for {name}; try again later") from e
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            raise LocalspecError(
                f"the disk is full: {name} cannot be downloaded to {constants.HF_HUB_CACHE}; free "
                "some, or set HF_HOME to a folder on a larger disk (what came so far is kept)"
            ) from e
        if e.errno is not None and not isinstance(e, ConnectionError | TimeoutError):
            raise LocalspecError(
                f"{name} cannot be downloaded to {constants.HF_HUB_CACHE}: {e.strerror or e}; set "
                "HF_HOME to a folder that can be written"
            ) from e
        raise _unreachable(name, at, e) from e
    except Exception as e:  # the HTTP client's own connection errors
        if type(e).__module__.startswith(("httpx", "httpcore", "requests", "urllib3")):
            raise _unreachable(name, at, e) from e
        raise LocalspecError(f"{name} cannot be downloaded: {_one_line(e)}") from e


def _unreachable(name: str, at: str, e: BaseException) -> UnreachableError:
    return UnreachableError(
        f"the hub cannot be reached for {name}{at} ({_one_line(e)}); what is downloaded is kept, "
        "try again later"
    )


def size_in_words(size: float) -> str:
    """Bytes in GB, MB or kB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"


def _one_line(e: BaseException) -> str:
    return " ".join(str(e).split())[:160] or type(e).__name__
