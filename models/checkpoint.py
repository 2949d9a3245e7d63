"""Drafter checkpoints: config.json with model.safetensors, whole or in shards.

Everything is checked against the config before a byte of it is used; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from localspec.errors import LocalspecError
from localspec.models.config import DrafterConfig
from localspec.models.drafter import Drafter

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
VOCABULARY_MAP = "d2t"  # row i of a reduced output matrix drafts token i + d2t[i]
# What a checkpoint may leave to the target.
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight")


def load_drafter(path: str | Path, dtype: torch.dtype = torch.float32) -> Drafter:
    """Load a checkpoint directory in evaluation mode, parameters as `dtype`.

    Without `embed_tokens` or `lm_head` in it, call `Drafter.tie_target` before use. Raises
    LocalspecError, one line, for anything missing, left over, mis-shaped or unreadable.
    """
    path = Path(path)
    config = DrafterConfig.from_file(path)
    files = tensor_files(path)
    try:
        with torch.device("meta"):
            drafter = Drafter(
                config, own_embed=TARGETS_OWN[0] in files, own_lm_head=TARGETS_OWN[1] in files
            )
    except RuntimeError as error:  # a product of sizes beyond any memory
        raise LocalspecError(
            f"{path}: config.json asks for impossibly large tensors; download it again"
        ) from error
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    missing, extra = sorted(expected.keys() - files.keys()), sorted(files.keys() - expected.keys())
    if missing:
        raise LocalspecError(
            f"{path}: tensor {missing[0]} is missing{_and_more(missing)}; "
            "config.json and the weights do not belong together or the download is incomplete"
        )
    if extra:
        raise LocalspecError(
            f"{path}: tensor {extra[0]} is unknown{_and_more(extra)}; "
            "config.json and the weights do not belong together or this is another kind of model"
        )
    state = {
        name: tensor if name == VOCABULARY_MAP else tensor.to(dtype)
        for name, tensor in read_tensors(files, expected).items()
    }
    drafter.load_state_dict(state, assign=True)
    return drafter.eval()


def tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it, from the index if there is one.

    Raises LocalspecError when there are no weights or the index is not what it should be.
    """
    index = path / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            names = {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LocalspecError(f"{index}: is not a weight index; download it again") from error
        for file in sorted(set(names.values())):
            # A name with a directory in it would read outside the checkpoint.
            if Path(file).name != file or not (path / file).is_file():
                raise LocalspecError(
                    f"{index}: names {file!r}, which is not a file of this directory; "
                    "download the missing shard"
                )
        for file in sorted(set(names.values())):
            listed = {name for name, home in names.items() if home == file}
            differing = sorted(listed ^ _names_in(path / file))
            if differing:
                raise LocalspecError(
                    f"{path / file}: disagrees with {INDEX} about tensor {differing[0]}"
                    f"{_and_more(differing)}; download both again"
                )
        return {name: path / file for name, file in names.items()}
    if not (path / WEIGHTS).is_file():
        raise LocalspecError(
            f"{path}: has neither {WEIGHTS} nor {INDEX}; point to a drafter checkpoint directory"
        )
    return dict.fromkeys(_names_in(path / WEIGHTS), path / WEIGHTS)


def read_tensors(files: dict[str, Path], expected: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read the expected tensors; shapes and types are compared before the data is read."""
    tensors = {}
    for file in sorted(set(files.values())):
        with _open(file) as opened:
            for name in sorted(name for name in expected if files[name] == file):
                header = opened.get_slice(name)
                shape = tuple(header.get_shape())
                if shape != expected[name]:
                    raise LocalspecError(
                        f"{file}: tensor {name} is {list(shape)} but config.json asks for "
                        f"{list(expected[name])}; they do not belong together"
                    )
                known = ("I64",) if name == VOCABULARY_MAP else ("F32", "F16", "BF16")
                if header.get_dtype() not in known:
                    raise LocalspecError(
                        f"{file}: tensor {name} has type {header.get_dtype()}; "
                        f"use a checkpoint in {' or '.join(known)}"
                    )
                tensors[name] = opened.get_tensor(name)
    return tensors


def save_drafter(drafter: Drafter, path: str | Path, max_shard_bytes: int | None = None) -> None:
    """Write config.json and the weights in the published layout; a tied target is left out.

    With `max_shard_bytes` the tensors are split, in name order, over files of at most that size
    (one larger tensor gets a file of its own). Every file is written aside and renamed, so a
    reader never sees half a file; weights of an earlier save are removed last.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in sorted(drafter.state_dict().items())
    }
    shards = _split(state, max_shard_bytes)
    if len(shards) == 1:
        names = [WEIGHTS]
    else:
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in _counted(shards)]
    for name, shard in zip(names, shards, strict=True):
        _replace(path / name, partial(save_file, shard, metadata={"format": "pt"}))
    written = set(names)
    if len(shards) > 1:
        weight_map = {
            tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard
        }
        size = sum(tensor.nbytes for tensor in state.values())
        _replace_json(path / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        written.add(INDEX)
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    _replace_json(path / "config.json", {**drafter.config.to_dict(), "dtype": dtype})
    for old in [*path.glob("model*.safetensors"), path / INDEX]:
        if old.name not in written:
            old.unlink(missing_ok=True)


def _split(state: dict[str, Tensor], limit: int | None) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in state.items():
        if limit is not None and shards[-1] and filled + tensor.nbytes > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _replace(path: Path, write: Callable[[str], Any]) -> None:
    """Have `write` fill a temporary file of the same directory, then rename it to `path`."""
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    try:
        write(aside)
        # mkstemp makes private files, and so may `write`; a checkpoint gets the permissions any
        # new file would.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(aside, 0o666 & ~mask)
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _replace_json(path: Path, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2) + "\n"
    _replace(path, lambda to: Path(to).write_text(text, encoding="utf-8"))


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise LocalspecError(
            f"{file}: is not a readable safetensors file; download it again"
        ) from error


def _names_in(file: Path) -> set[str]:
    with _open(file) as opened:
        return set(opened.keys())


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _counted(shards: list[dict[str, Tensor]]) -> range:
    return range(1, len(shards) + 1)
