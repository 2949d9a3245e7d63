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
from typing import TYPE_CHECKING

from localspec import pairs
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

if TYPE_CHECKING:
    from localspec.convert.families import AnyCheckpoint, PlannedFile
    from localspec.convert.source import Tensors
    from localspec.convert.verify import Report

__all__ = ["OUTTYPES", "ConvertResult", "convert", "resolve_outtype"]

OUTTYPES = (
    "auto", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0",
    "q3_k", "q2_k",
)  # fmt: skip

Progress = Callable[[str, int, int, int, int], None]


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion wrote.

    Attributes:
        path: the drafter.
        heads_path: the companion with gated or rnn heads; None when there is none.
        outtype: one of `OUTTYPES`, not "auto".
        head_type: "none", "vanilla", "gated" or "rnn"; "eagle3" for Eagle3 drafters.
        n_tensors: tensors written, over both files.
        nbytes: size of both files in bytes.
        notes: what the user should know, one line each.
        report: how the file compares with the reference; None when that was not asked for.
    """

    path: Path
    heads_path: Path | None
    outtype: str
    head_type: str
    n_tensors: int
    nbytes: int
    notes: tuple[str, ...]
    report: Report | None = None


def convert(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    outtype: str = "auto",
    standalone: bool = False,
    verify: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
) -> ConvertResult:
    """Convert a drafter checkpoint to GGUF; an existing `out` is replaced at the very end.

    Memory stays near that of one chunk of a tensor, whatever the size of the checkpoint. The same
    input gives the same bytes.

    Args:
        checkpoint: directory with config.json and weights (whole or in shards), a training's
            output, a weights file beside its config.json, or a hub id such as
            "deepseek-ai/dspark_qwen3_8b_block7".
        target: GGUF of the target; gives the tokenizer.
        out: GGUF to write. Gated and rnn heads go beside it, into `pairs.heads_path(out)`.
        outtype: type of the matrices. "auto": f32 for a float32 checkpoint, q8_0 otherwise.
            Heads stay at f16 or better, norms and the confidence head at f32.
        standalone: put token embeddings and output matrix in; otherwise they are the target's.
        verify: compare the file with the torch reference before it gets its name (needs torch,
            and memory for the drafter and the target's embeddings in float32). When the two
            differ by more than the type explains, the file is kept as `x.failed.gguf`.
        revision: branch, tag or commit of a hub id.
        progress: called with (tensor, its number from 0, number of tensors, bytes read so far,
            bytes to read); what it raises ends the conversion and nothing is left behind.

    Raises:
        LocalspecError: anything wrong with the inputs or the output, in one line.
        ValueError: an unknown `outtype`.
    """
    from localspec.convert import families, hub, packaging

    out = Path(out)
    source = families.open_checkpoint(packaging.locate(hub.resolve(checkpoint, revision)))
    outtype = _resolved(source, outtype)
    with GgufFile(target) as target_file:
        planned = families.planned(source, target_file, out, outtype, standalone=standalone)
        proof = _proof(source, target_file.path, outtype) if verify else None
        report = _write(planned.files, source, planned.unused, progress, proof)
    return ConvertResult(
        path=out,
        heads_path=planned.companion,
        outtype=outtype,
        head_type=planned.head_type,
        n_tensors=sum(len(file.outputs) for file in planned.files),
        nbytes=sum(file.path.stat().st_size for file in planned.files),
        notes=planned.notes,
        report=report,
    )


def resolve_outtype(checkpoint: str | os.PathLike[str], outtype: str) -> str:
    """What `outtype` means for this checkpoint: "auto" becomes "f32" or "q8_0".

    Raises:
        LocalspecError: the checkpoint cannot be read. ValueError: an unknown `outtype`.
    """
    from localspec.convert import families, packaging

    return _resolved(families.open_checkpoint(packaging.locate(Path(checkpoint))), outtype)


def _resolved(source: Tensors, outtype: str) -> str:
    if outtype not in OUTTYPES:
        raise ValueError(f"outtype must be one of {', '.join(OUTTYPES)}, not {outtype!r}")
    if outtype != "auto":
        return outtype
    return "f32" if {t.dtype for t in source.tensors.values()} == {"F32"} else "q8_0"


def _proof(source: AnyCheckpoint, target: Path, outtype: str) -> Callable[[Path], Report]:
    """A function that compares a finished file with the reference."""
    from localspec.convert import families, verify

    opener = families.reference(source) if verify.available() else None
    return lambda drafter: verify.verify(source, target, drafter, outtype, opener)


def _keep_failed(files: list[PlannedFile], report: Report) -> LocalspecError:
    """Give files that are not what their checkpoint is a name that says so."""
    drafter = files[-1]
    failed = drafter.path.with_name(drafter.path.stem + ".failed.gguf")
    for file in files:
        os.replace(file.aside, failed if file is drafter else pairs.heads_path(failed))
    return LocalspecError(
        f"the converted drafter is not what its checkpoint is: {report.worst()}; it is kept as "
        f"{failed}, please report this, or convert with --no-verify"
    )


def _write(
    files: list[PlannedFile],
    source: Tensors,
    unused: Iterable[str],
    progress: Progress | None,
    proof: Callable[[Path], Report] | None = None,
) -> Report | None:
    """Write and verify all files aside, then rename them; on any exception none is left."""
    from localspec.convert import families, write

    report = None
    advance = _reporter(files, source, unused, progress)
    fresh = [file for file in files if not file.path.exists()]
    renamed = []
    try:
        for name in unused:
            for _, cost in write.finite_chunks(source, name):
                advance(name, cost)
        digest = hashlib.sha256() if len(files) > 1 else None
        for file in files:
            write.write_gguf(file.aside, file.metadata, file.outputs, advance, digest)
        if digest is not None:
            for file in files:
                write.fill_in(
                    file.aside, "localspec.pair_id", digest.hexdigest()[: families.ID_LENGTH]
                )
        for file in files:
            write.verify(file.aside, file.metadata, file.outputs)
        if proof is not None:
            report = proof(files[-1].aside)
            if not report.fine:
                raise _keep_failed(files, report)
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
    return report


def _reporter(
    files: Iterable[PlannedFile], source: Tensors, unused: Iterable[str], progress: Progress | None
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
