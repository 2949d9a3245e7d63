"""The families of checkpoints: how each is opened, and planned into files.

A family is a class of checkpoint and a function that checks one against a target and plans its
files; everything after that (writing, verifying, renaming) is the same for all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localspec import pairs
from localspec.convert import check, deepseek4, eagle3, eagle3_wide, layout, metadata, plan
from localspec.convert.source import Checkpoint
from localspec.convert.write import Output
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

if TYPE_CHECKING:
    from localspec.convert.verify import Opener

# The pair id depends on every byte of both files, so it is filled in when they are complete.
ID_LENGTH = 32
NO_ID = "?" * ID_LENGTH

AnyCheckpoint = Checkpoint | deepseek4.Deepseek4Checkpoint | eagle3.EagleCheckpoint


@dataclass(frozen=True)
class PlannedFile:
    """A GGUF to write.

    Attributes:
        path: its name in the end.
        metadata: its key-value pairs.
        outputs: its tensors.
        beside: where it is written before that; a name beside `path` when left out.
    """

    path: Path
    metadata: dict[str, Any]
    outputs: tuple[Output, ...]
    beside: Path | None = None

    @property
    def aside(self) -> Path:
        """Where it is written before it gets its name."""
        return self.beside or self.path.with_name(f".{self.path.name}.{os.getpid()}.part")


@dataclass(frozen=True)
class Planned:
    """What a conversion will write.

    Attributes:
        files: the drafter, last; before it its companion, if there is one. The companion gets its
            name first: a drafter is found by its own name, with or without it.
        unused: tensors of the checkpoint that are checked and not written.
        head_type: as in `ConvertResult`.
        notes: what the user should know, one line each.
    """

    files: list[PlannedFile]
    unused: tuple[str, ...]
    head_type: str
    notes: tuple[str, ...] = ()

    @property
    def companion(self) -> Path | None:
        """The file beside the drafter."""
        return self.files[0].path if len(self.files) > 1 else None


def open_checkpoint(path: Path) -> AnyCheckpoint:
    """A checkpoint of whichever family it is.

    Raises:
        LocalspecError: it cannot be read, or is of no family.
    """
    if deepseek4.recognised(path):
        return deepseek4.Deepseek4Checkpoint(path)
    if eagle3.recognised(path):
        return eagle3.EagleCheckpoint(path)
    return Checkpoint(path)


def planned(
    source: AnyCheckpoint, target: GgufFile, out: Path, outtype: str, *, standalone: bool
) -> Planned:
    """Check a checkpoint against its target and plan its files.

    Raises:
        LocalspecError: the two do not fit, the checkpoint is incomplete, or `out` cannot be.
    """
    if isinstance(source, deepseek4.Deepseek4Checkpoint):
        return _deepseek4(source, target, out, outtype, standalone)
    if isinstance(source, eagle3.EagleCheckpoint):
        return _eagle3(source, target, out, outtype, standalone)
    return _blocks(source, target, out, outtype, standalone)


def reference(source: AnyCheckpoint) -> Opener | None:
    """What opens a family's torch reference for `verify`; None for the usual one."""
    if isinstance(source, deepseek4.Deepseek4Checkpoint):
        from localspec.convert.deepseek4_verify import open_deepseek4

        return open_deepseek4
    if isinstance(source, eagle3.EagleCheckpoint):
        from localspec.convert.eagle3_verify import open_eagle3

        return open_eagle3
    return None


def _blocks(
    source: Checkpoint, target: GgufFile, out: Path, outtype: str, standalone: bool
) -> Planned:
    """DSpark, DFlash and DFlash 2."""
    check.check_fit(source, target)
    check.check_tensors(source)
    check.check_out(out, source, target.path)
    tensors = plan.plan(source, target, outtype, standalone=standalone)
    pair_id = NO_ID if tensors.heads else ""
    drafter_metadata = metadata.drafter_metadata(
        source.config,
        target,
        outtype,
        has_confidence=any(o.name == "conf_proj.weight" for o in tensors.drafter),
        pair_id=pair_id,
    )
    drafter = PlannedFile(out, drafter_metadata, tensors.drafter)
    files = [drafter]
    if tensors.heads:
        heads_metadata = metadata.heads_metadata(source.config, target, pair_id)
        files.insert(0, _companion(drafter, heads_metadata, tensors.heads))
    notes = tensors.notes if standalone else (*tensors.notes, *_of_another_target(source, target))
    return Planned(files, tensors.unused, layout.head_type(source.config), notes)


def _deepseek4(
    source: deepseek4.Deepseek4Checkpoint,
    target: GgufFile,
    out: Path,
    outtype: str,
    standalone: bool,
) -> Planned:
    """The drafter inside a full DeepSeek-V4 checkpoint."""
    deepseek4.check_fit(source, target)
    deepseek4.check_tensors(source)
    check.check_out(out, source, target.path)
    tensors = deepseek4.plan(source, target, outtype, standalone=standalone)
    file = PlannedFile(out, deepseek4.drafter_metadata(source, target, outtype), tensors.drafter)
    return Planned([file], (), deepseek4.HEAD_TYPE, tensors.notes)


def _eagle3(
    source: eagle3.EagleCheckpoint, target: GgufFile, out: Path, outtype: str, standalone: bool
) -> Planned:
    eagle3.check_fit(source, target)
    eagle3.check_tensors(source)
    check.check_out(out, source, target.path)
    notes: tuple[str, ...] = ()
    if source.eagle.qk_norm:
        if standalone:
            raise LocalspecError(
                f"{source.path}: this Eagle3 drafter cannot be made standalone; it always uses "
                "the target's matrices"
            )
        drafter = PlannedFile(
            out,
            eagle3_wide.wide_metadata(source, target, outtype, NO_ID),
            tuple(eagle3_wide.drafter_outputs(source, outtype)),
        )
        layer_metadata = eagle3_wide.layer_metadata(source, outtype, NO_ID)
        layer = tuple(eagle3_wide.layer_outputs(source, outtype))
        files = [_companion(drafter, layer_metadata, layer), drafter]
        notes = _of_another_target(source, target)
    else:
        outputs = tuple(eagle3.plan(source, target, outtype, standalone=standalone))
        files = [PlannedFile(out, eagle3.drafter_metadata(source, target, outtype), outputs)]
    used = {output.source_name for file in files for output in file.outputs}
    return Planned(files, tuple(sorted(set(source.tensors) - used)), "eagle3", notes)


def _companion(
    drafter: PlannedFile, values: dict[str, Any], outputs: tuple[Output, ...]
) -> PlannedFile:
    """The file beside a drafter; found beside its unfinished one too, for verification."""
    return PlannedFile(
        pairs.heads_path(drafter.path), values, outputs, pairs.heads_path(drafter.aside)
    )


def _of_another_target(
    source: Checkpoint | eagle3.EagleCheckpoint, target: GgufFile
) -> tuple[str, ...]:
    if not check.embeddings_differ(source, target):
        return ()
    return (
        "the checkpoint's token embeddings are not the target's; if it was trained for another "
        "target, its drafts will be useless",
    )
