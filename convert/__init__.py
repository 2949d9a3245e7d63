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
    from localspec.convert.source import Tensors
    from localspec.convert.verify import Report
    from localspec.convert.write import Output

__all__ = ["OUTTYPES", "ConvertResult", "convert", "resolve_outtype"]

OUTTYPES = (
    "auto", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0",
    "q3_k", "q2_k",
)  # fmt: skip
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
    from localspec.convert import check, deepseek4, eagle3, hub, layout, metadata, packaging, plan
    from localspec.convert.source import Checkpoint

    out = Path(out)
    path = packaging.locate(hub.resolve(checkpoint, revision))
    if deepseek4.recognised(path):
        return _convert_deepseek4(
            path, Path(target), out, outtype,
            standalone=standalone, verify=verify, progress=progress,
        )  # fmt: skip
    if eagle3.recognised(path):
        return _convert_eagle3(
            path, Path(target), out, outtype,
            standalone=standalone, verify=verify, progress=progress,
        )  # fmt: skip
    source = Checkpoint(path)
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
            beside = pairs.heads_path(files[0].aside)
            files.insert(0, _File(companion, heads_meta, planned.heads, beside))
        proof = _proof(source, target_file.path, outtype) if verify else None
        report = _write(files, source, planned.unused, progress, proof)
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
        report=report,
    )


def resolve_outtype(checkpoint: str | os.PathLike[str], outtype: str) -> str:
    """What `outtype` means for this checkpoint: "auto" becomes "f32" or "q8_0".

    Raises:
        LocalspecError: the checkpoint cannot be read. ValueError: an unknown `outtype`.
    """
    from localspec.convert import deepseek4, eagle3, packaging
    from localspec.convert.source import Checkpoint

    path = packaging.locate(Path(checkpoint))
    if eagle3.recognised(path):
        return _resolved(eagle3.EagleCheckpoint(path), outtype)
    kind = deepseek4.Deepseek4Checkpoint if deepseek4.recognised(path) else Checkpoint
    return _resolved(kind(path), outtype)


def _convert_deepseek4(
    checkpoint: Path,
    target: Path,
    out: Path,
    outtype: str,
    *,
    standalone: bool,
    verify: bool,
    progress: Progress | None,
) -> ConvertResult:
    """`convert` for the drafter inside a full DeepSeek-V4 checkpoint."""
    from localspec.convert import check, deepseek4

    source = deepseek4.Deepseek4Checkpoint(checkpoint)
    outtype = _resolved(source, outtype)
    with GgufFile(target) as target_file:
        deepseek4.check_fit(source, target_file)
        deepseek4.check_tensors(source)
        check.check_out(out, source, target_file.path)
        planned = deepseek4.plan(source, target_file, outtype, standalone=standalone)
        meta = deepseek4.drafter_metadata(source, target_file, outtype)
        proof = _proof(source, target_file.path, outtype) if verify else None
        report = _write([_File(out, meta, planned.drafter)], source, (), progress, proof)
    return ConvertResult(
        path=out,
        heads_path=None,
        outtype=outtype,
        head_type=deepseek4.HEAD_TYPE,
        n_tensors=len(planned.drafter),
        nbytes=out.stat().st_size,
        notes=planned.notes,
        report=report,
    )


def _convert_eagle3(
    checkpoint: Path,
    target: Path,
    out: Path,
    outtype: str,
    *,
    standalone: bool,
    verify: bool,
    progress: Progress | None,
) -> ConvertResult:
    """`convert` for Eagle3 drafters."""
    from localspec.convert import check, eagle3, eagle3_wide

    source = eagle3.EagleCheckpoint(checkpoint)
    outtype = _resolved(source, outtype)
    with GgufFile(target) as target_file:
        eagle3.check_fit(source, target_file)
        eagle3.check_tensors(source)
        check.check_out(out, source, target_file.path)
        if source.eagle.qk_norm:
            if standalone:
                raise LocalspecError(
                    f"{checkpoint}: this Eagle3 drafter cannot be made standalone; it always uses "
                    "the target's matrices"
                )
            meta = eagle3_wide.wide_metadata(source, target_file, outtype, _NO_ID)
            files = [_File(out, meta, tuple(eagle3_wide.drafter_outputs(source, outtype)))]
            companion = pairs.heads_path(out)
            layer_meta = eagle3_wide.layer_metadata(source, outtype, _NO_ID)
            layer = tuple(eagle3_wide.layer_outputs(source, outtype))
            beside = pairs.heads_path(files[0].aside)
            files.insert(0, _File(companion, layer_meta, layer, beside))
        else:
            planned = tuple(eagle3.plan(source, target_file, outtype, standalone=standalone))
            companion = None
            files = [_File(out, eagle3.drafter_metadata(source, target_file, outtype), planned)]
        outputs = [output for file in files for output in file.outputs]
        notes: tuple[str, ...] = ()
        if companion and check.embeddings_differ(source, target_file):
            notes = (
                "the checkpoint's token embeddings are not the target's; if it was trained for "
                "another target, its drafts will be useless",
            )
        unused = sorted(set(source.tensors) - {o.source_name for o in outputs})
        proof = _proof(source, target_file.path, outtype) if verify else None
        report = _write(files, source, unused, progress, proof)
    return ConvertResult(
        path=out,
        heads_path=companion,
        outtype=outtype,
        head_type="eagle3",
        n_tensors=len(outputs),
        nbytes=sum(file.path.stat().st_size for file in files),
        notes=notes,
        report=report,
    )


def _resolved(source: Tensors, outtype: str) -> str:
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
    beside: Path | None = None

    @property
    def aside(self) -> Path:
        """Where it is written before it gets its name."""
        return self.beside or self.path.with_name(f".{self.path.name}.{os.getpid()}.part")


def _proof(source: Any, target: Path, outtype: str) -> Callable[[Path], Report]:
    """A function that compares a finished file with the reference."""
    from localspec.convert import verify
    from localspec.convert.deepseek4_source import Deepseek4Checkpoint
    from localspec.convert.eagle3 import EagleCheckpoint

    opener: verify.Opener | None = None
    if isinstance(source, Deepseek4Checkpoint) and verify.available():
        from localspec.convert.deepseek4_verify import open_deepseek4 as opener
    elif isinstance(source, EagleCheckpoint) and verify.available():
        from localspec.convert.eagle3_verify import open_eagle3 as opener
    return lambda drafter: verify.verify(source, target, drafter, outtype, opener)


def _keep_failed(files: list[_File], report: Report) -> LocalspecError:
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
    files: list[_File],
    source: Tensors,
    unused: Iterable[str],
    progress: Progress | None,
    proof: Callable[[Path], Report] | None = None,
) -> Report | None:
    """Write and verify all files aside, then rename them; on any exception none is left."""
    from localspec.convert import write

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
                write.fill_in(file.aside, "localspec.pair_id", digest.hexdigest()[:_ID_LENGTH])
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
    files: Iterable[_File], source: Tensors, unused: Iterable[str], progress: Progress | None
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
