"""Drafter checkpoints become GGUF files.

`convert` checks a checkpoint against its target, then streams it into a file that llama.cpp loads;
nothing appears under the output's name before it is complete and has been read back.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec import pairs
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

if TYPE_CHECKING:
    from localspec.convert.source import Checkpoint
    from localspec.convert.write import Output

__all__ = ["OUTTYPES", "ConvertResult", "convert", "resolve_outtype"]

OUTTYPES = ("auto", "f32", "f16", "bf16", "q8_0")
# The pair id depends on every byte of both files, so it is filled in when they are complete.
_ID_LENGTH = 32
_NO_ID = "?" * _ID_LENGTH

Progress = Callable[[str, int, int, int, int], None]


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion wrote.

    Attributes:
        path: the drafter.
        heads_path: the companion with gated or rnn heads; None when there is none.
        outtype: "f32", "f16", "bf16" or "q8_0".
        head_type: "none", "vanilla", "gated" or "rnn".
        n_tensors: tensors written, over both files.
        nbytes: size of both files in bytes.
        notes: what the user should know, one line each.
    """

    path: Path
    heads_path: Path | None
    outtype: str
    head_type: str
    n_tensors: int
    nbytes: int
    notes: tuple[str, ...]


def convert(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    outtype: str = "auto",
    standalone: bool = False,
    progress: Progress | None = None,
) -> ConvertResult:
    """Convert a drafter checkpoint to GGUF; an existing `out` is replaced at the very end.

    Memory stays near that of one chunk of a tensor, whatever the size of the checkpoint. The same
    input gives the same bytes.

    Args:
        checkpoint: directory with config.json and model.safetensors (whole or in shards).
        target: GGUF of the target; gives the tokenizer.
        out: GGUF to write. Gated and rnn heads go beside it, into `pairs.heads_path(out)`.
        outtype: type of the matrices. "auto": f32 for a float32 checkpoint, q8_0 otherwise.
            Heads stay at f16 or better, norms and the confidence head at f32.
        standalone: put token embeddings and output matrix in; otherwise they are the target's.
        progress: called with (tensor, its number from 0, number of tensors, bytes read so far,
            bytes to read); what it raises ends the conversion and nothing is left behind.

    Raises:
        LocalspecError: anything wrong with the inputs or the output, in one line.
        ValueError: an unknown `outtype`.
    """
    from localspec.convert import check, layout, metadata, plan
    from localspec.convert.source import Checkpoint

    out = Path(out)
    source = Checkpoint(Path(checkpoint))
    outtype = _resolved(source, outtype)
    with GgufFile(target) as target_file:
        check.check_fit(source, target_file)
        check.check_tensors(source)
        check.check_out(out, source, target_file.path)
        planned = plan.plan(source, target_file, outtype, standalone=standalone)
        companion = pairs.heads_path(out) if planned.heads else None
        pair_id = _NO_ID if companion else ""
        meta = metadata.drafter_metadata(
            source.config,
            target_file,
            outtype,
            has_confidence=any(o.name == "conf_proj.weight" for o in planned.drafter),
            pair_id=pair_id,
        )
        files = [_File(out, meta, planned.drafter)]
        if companion:
            heads_meta = metadata.heads_metadata(source.config, target_file, pair_id)
            # The heads first: a drafter is found by its own name, with or without them.
            files.insert(0, _File(companion, heads_meta, planned.heads))
        _write(files, source, planned.unused, progress)
        notes = list(planned.notes)
        if not standalone and check.embeddings_differ(source, target_file):
            notes.append(
                "the checkpoint's token embeddings are not the target's; if it was trained for "
                "another target, its drafts will be useless"
            )
    return ConvertResult(
        path=out,
        heads_path=companion,
        outtype=outtype,
        head_type=layout.head_type(source.config),
        n_tensors=len(planned.drafter) + len(planned.heads),
        nbytes=sum(file.path.stat().st_size for file in files),
        notes=tuple(notes),
    )


def resolve_outtype(checkpoint: str | os.PathLike[str], outtype: str) -> str:
    """What `outtype` means for this checkpoint: "auto" becomes "f32" or "q8_0".

    Raises:
        LocalspecError: the checkpoint cannot be read. ValueError: an unknown `outtype`.
    """
    from localspec.convert.source import Checkpoint

    return _resolved(Checkpoint(Path(checkpoint)), outtype)


def _resolved(source: Checkpoint, outtype: str) -> str:
    if outtype not in OUTTYPES:
        raise ValueError(f"outtype must be one of {', '.join(OUTTYPES)}, not {outtype!r}")
    if outtype != "auto":
        return outtype
    return "f32" if {t.dtype for t in source.tensors.values()} == {"F32"} else "q8_0"


@dataclass(frozen=True)
class _File:
    path: Path
    metadata: dict[str, Any]
    outputs: tuple[Output, ...]

    @property
    def aside(self) -> Path:
        """Where it is written before it gets its name."""
        return self.path.with_name(f".{self.path.name}.{os.getpid()}.part")


def _write(
    files: list[_File], source: Checkpoint, unused: Iterable[str], progress: Progress | None
) -> None:
    """Write and verify all files aside, then rename them; on any exception none is left."""
    from localspec.convert import write

    advance = _reporter(files, source, unused, progress)
    fresh = [file for file in files if not file.path.exists()]
    renamed = []
    try:
        for name in unused:
            for _, cost in write.finite_chunks(source, name):
                advance(name, cost)
        digest = hashlib.sha256()
        for file in files:
            write.write_gguf(file.aside, file.metadata, file.outputs, advance, digest)
        if len(files) > 1:
            for file in files:
                write.fill_in(file.aside, "localspec.pair_id", digest.hexdigest()[:_ID_LENGTH])
        for file in files:
            write.verify(file.aside, file.metadata, file.outputs)
        for file in files:
            os.replace(file.aside, file.path)
            renamed.append(file)
        _sync_directory(files[0].path.parent)
    except BaseException as e:
        for file in files:
            file.aside.unlink(missing_ok=True)
        if len(renamed) < len(files):  # half a pair is none
            for file in renamed:
                if file in fresh:
                    file.path.unlink(missing_ok=True)
        if isinstance(e, OSError):
            raise _cannot_write(files[-1].path, e) from e
        raise


def _reporter(
    files: Iterable[_File], source: Checkpoint, unused: Iterable[str], progress: Progress | None
) -> Callable[[str, int], None]:
    """A function that adds source bytes of a tensor and calls `progress` with the sums."""
    costs = [(name, source.tensors[name].nbytes) for name in unused]
    costs += [(output.name, output.source_bytes) for file in files for output in file.outputs]
    number = {name: i for i, (name, _) in enumerate(costs)}
    total, done = sum(cost for _, cost in costs), 0

    def advance(name: str, cost: int) -> None:
        nonlocal done
        done += cost
        if progress is not None:
            progress(name, number[name], len(costs), done, total)

    return advance


def _cannot_write(out: Path, e: OSError) -> LocalspecError:
    if e.errno in (errno.ENOSPC, errno.EDQUOT):
        return LocalspecError(
            f"no space left in {out.parent} for {out.name}; free some or choose another output"
        )
    return LocalspecError(f"{out} cannot be written: {e.strerror or e}; choose another output")


def _sync_directory(path: Path) -> None:
    """Make a rename survive a power cut, where the system can (Windows cannot open directories)."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass
    finally:
        os.close(fd)
