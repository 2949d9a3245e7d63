"""A drafter checkpoint on disk: config.json with its weights, whole or in shards.

The safetensors library validates every header before an offset of it is used; the data is then
read with plain file reads, a few rows at a time, so that a tensor of any size costs the memory of
one chunk (a memory map would count every page it has touched). Weights in torch's own format are
read by torch, which is told to take tensors only and to execute nothing.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from localspec.convert import packaging
from localspec.errors import LocalspecError
from localspec.models.config import DrafterConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_WEIGHTS = ("pytorch_model.bin", "pytorch_model.pt", "model.pt", "model.bin")
TORCH_INDEX = "pytorch_model.bin.index.json"
CHUNK_VALUES = 1 << 20  # scalars per chunk: 4 MiB as float32

_AHEAD = 16 << 20  # bytes to be fetched ahead of a chunk

# safetensors dtype -> how the bytes are read; BF16 has no numpy type and is widened by shifting.
_STORED: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor of the checkpoint lies.

    Attributes:
        name: published name.
        shape: as stored.
        dtype: safetensors name, e.g. "BF16".
        file: the shard that holds it.
        offset: absolute byte offset in that file.
        nbytes: stored size in bytes.
        head: size of the heads whose rows are put from rotary neighbours into halves; 0: none.
        loaded: the torch tensor, where torch has read (mapped) it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int
    head: int = 0
    loaded: Any = dataclasses.field(default=None, repr=False, compare=False)


class Tensors(Protocol):
    """What writing needs of an opened checkpoint, of whatever kind."""

    path: Path
    tensors: dict[str, StoredTensor]

    @property
    def files(self) -> set[Path]:
        """Every file the conversion reads."""

    def chunks(self, name: str) -> Iterator[Floats]:
        """The tensor as float32 [rows, columns], some rows at a time (1-D: one row)."""


class Checkpoint:
    """A drafter checkpoint opened for reading.

    Attributes:
        path: the directory.
        packaging: the layout it came in, see `packaging.Packaged`.
        config: its config.json in the published form, checked.
        tensors: published name -> `StoredTensor`.
        draft_tokens: [rows of the output matrix] token ids, where the vocabulary is reduced.

    Raises:
        LocalspecError: no such directory, a file is missing, damaged or cut short, or a field of
            config.json is missing or invalid.
    """

    def __init__(self, path: Path) -> None:
        weights: Path | None = None
        if path.is_file() and (path.parent / packaging.CONFIG).is_file():
            if path.suffix in (".safetensors", ".bin", ".pt", ".pth"):
                weights = path
            if weights or path.suffix == ".json":
                path = path.parent
        if not path.is_dir():
            what = "is a file, not" if path.exists() else "does not exist; name"
            raise LocalspecError(
                f"{path} {what} a checkpoint directory (config.json and {WEIGHTS})"
            )
        self.path = path = packaging.locate(path)
        # Alone it names everything a config can lack, before the weights are looked for.
        raw = _read_config(path)
        if raw is None:
            self.config = DrafterConfig.from_file(path)
        stored = _stored_tensors(path, weights)
        where = str(path / packaging.CONFIG)
        unpacked = packaging.unpack(
            raw, {name: tensor.shape for name, tensor in stored.items()}, where
        )
        self.packaging = unpacked.packaging
        self.config = DrafterConfig.from_dict(unpacked.config, where=where)
        tensors = {
            name: dataclasses.replace(stored[old], name=name, head=unpacked.head_of(name))
            for name, old in unpacked.names.items()
        }
        self.draft_tokens: np.ndarray[Any, np.dtype[np.int64]] | None = None
        d2t = tensors.pop(packaging.D2T, None)
        if d2t is not None:
            self.draft_tokens = packaging.vocabulary_map(
                _integers(d2t), self.config.vocab_size, where
            )
        rows = None if self.draft_tokens is None else len(self.draft_tokens)
        if self.config.draft_vocab_size != rows and (rows or self.config.draft_vocab_size):
            raise LocalspecError(
                f"{where}: draft_vocab_size is {self.config.draft_vocab_size}, but "
                + (f"d2t lists {rows} tokens" if rows else "there is no d2t table")
                + "; config.json and the weights do not belong together"
            )
        for name, tensor in tensors.items():
            if tensor.head and (tensor.shape[0] if tensor.shape else 0) % tensor.head:
                raise LocalspecError(
                    f"{path}: tensor {name} has shape {list(tensor.shape)}, which is no whole "
                    f"number of heads of {tensor.head}; it does not belong to config.json"
                )
        self.tensors = tensors

    @property
    def files(self) -> set[Path]:
        """Every file the conversion reads."""
        return {self.path / packaging.CONFIG, self.path / INDEX} | {
            t.file for t in self.tensors.values()
        }

    def chunks(self, name: str) -> Iterator[Floats]:
        """The tensor as float32 [rows, columns], some rows at a time (1-D: one row).

        Raises:
            LocalspecError: the file became unreadable or shorter since it was opened.
        """
        tensor = self.tensors[name]
        for values in self._chunks(tensor):
            yield packaging.to_halves(values, tensor.head) if tensor.head else values

    def _chunks(self, tensor: StoredTensor) -> Iterator[Floats]:
        """As stored; whole heads where their rows will be reordered."""
        name = tensor.name
        columns = tensor.shape[-1] if tensor.shape else 1
        n_rows = math.prod(tensor.shape[:-1])
        step = max(1, CHUNK_VALUES // max(1, columns))
        if tensor.head and n_rows > 1:
            step = max(1, step // tensor.head) * tensor.head
        if tensor.loaded is not None:
            rows = tensor.loaded.reshape(n_rows, columns)
            for start in range(0, n_rows, step):
                yield rows[start : start + step].float().numpy()
            return
        stored = _STORED[tensor.dtype]
        try:
            with open(tensor.file, "rb") as f:
                f.seek(tensor.offset)
                for start in range(0, n_rows, step):
                    count = min(step, n_rows - start) * columns
                    _read_ahead(f.fileno(), f.tell())
                    values = np.fromfile(f, stored, count)
                    if values.size != count:
                        raise _damaged(tensor.file, f"tensor {name} is cut short")
                    yield _widen(values).reshape(-1, columns)
        except OSError as e:
            raise LocalspecError(f"{tensor.file} cannot be read: {e.strerror or e}") from e


def _read_ahead(fd: int, offset: int) -> None:
    """Have the system fetch what comes next while a chunk is being encoded, where it can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, _AHEAD, os.POSIX_FADV_WILLNEED)


def supported(dtype: str) -> bool:
    """Whether tensors of this safetensors dtype can be read."""
    return dtype in _STORED


def _widen(values: np.ndarray[Any, Any]) -> Floats:
    if values.dtype.kind == "u":  # bfloat16: the upper half of a float32
        wide = values.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return values.astype(np.float32, copy=False)


def _read_config(path: Path) -> Any:
    """config.json parsed; None when that fails (`DrafterConfig.from_file` says how)."""
    try:
        return json.loads((path / packaging.CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _stored_tensors(path: Path, weights: Path | None) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint under the names they are stored with."""
    if weights is not None and weights.suffix != ".safetensors":
        return _read_torch(weights)
    if weights is not None:
        return {t.name: t for t in _read_header(weights)}
    torch_files = _torch_files(path)
    if torch_files:
        return {name: t for file in torch_files for name, t in _read_torch(file).items()}
    return {t.name: t for file in _weight_files(path) for t in _read_header(file)}


def _torch_files(path: Path) -> list[Path]:
    """Weights in torch's format, where there are none in safetensors."""
    if (path / INDEX).exists() or (path / WEIGHTS).exists():
        return []
    if (path / TORCH_INDEX).is_file():
        return [path / file for file in sorted(set(_weight_map(path / TORCH_INDEX).values()))]
    return [path / name for name in TORCH_WEIGHTS if (path / name).is_file()][:1]


def _integers(tensor: StoredTensor) -> np.ndarray[Any, Any]:
    """A small table of integers as int64."""
    if tensor.loaded is not None:
        values: np.ndarray[Any, Any] = tensor.loaded.reshape(-1).long().numpy()
        return values
    kind = {"I64": "<i8", "I32": "<i4"}.get(tensor.dtype)
    if kind is None:
        raise _damaged(tensor.file, f"{tensor.name} is stored as {tensor.dtype}")
    try:
        return np.fromfile(tensor.file, kind, math.prod(tensor.shape), offset=tensor.offset).astype(
            np.int64
        )
    except OSError as e:
        raise LocalspecError(f"{tensor.file} cannot be read: {e.strerror or e}") from e


def _read_torch(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a torch file, mapped and not copied; nothing in it is executed."""
    try:
        import torch
    except ImportError as e:
        raise LocalspecError(
            f"{file} is in torch's format; install torch, or convert it to safetensors"
        ) from e
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as e:  # torch raises pickle, zip, runtime and value errors here
        why = "it holds more than weights" if "weights_only" in str(e).lower() else type(e).__name__
        raise LocalspecError(
            f"{file} cannot be read as weights only ({why}), so it is not opened; use a "
            "checkpoint in safetensors"
        ) from e
    for key in ("model", "state_dict", "module"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    names |= {torch.int64: "I64", torch.int32: "I32"}
    found = {}
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(name, str) and isinstance(value, torch.Tensor):
            found[name] = StoredTensor(
                name=name,
                shape=tuple(value.shape),
                dtype=names.get(value.dtype, str(value.dtype).removeprefix("torch.")),
                file=file,
                offset=0,
                nbytes=value.numel() * value.element_size(),
                loaded=value.detach().contiguous(),
            )
    if not found:
        raise LocalspecError(f"{file} holds no tensors by name; it is no checkpoint of a drafter")
    return found


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint; shards are named by the index."""
    index = path / INDEX
    if not index.exists():
        if not (path / WEIGHTS).exists():
            raise LocalspecError(
                f"{path} has neither {WEIGHTS} nor {INDEX}; it is no checkpoint, or its download "
                "is incomplete"
            )
        return [path / WEIGHTS]
    names = _weight_map(index)
    files = [path / file for file in sorted(set(names.values()))]
    found = {t.name: t.file.name for file in files for t in _read_header(file)}
    differing = sorted(dict(names.items() ^ found.items()))
    if differing:
        raise LocalspecError(
            f"{index} and the shards disagree about tensor {differing[0]}; download both again"
        )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file beside the index that holds it."""
    path = index.parent
    try:
        listed = json.loads(index.read_text("utf-8"))["weight_map"]
        names = {str(name): str(file) for name, file in listed.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise _damaged(index, "it holds no weight_map") from e
    for file in sorted(set(names.values())):
        # A name with a directory in it would read outside the checkpoint.
        if Path(file).name != file or not (path / file).is_file():
            raise LocalspecError(
                f"{index} names the shard {file!r}, which is not in {path}; download it too"
            )
    return names


def _read_header(file: Path) -> list[StoredTensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as e:
        raise LocalspecError(
            "converting needs the safetensors package; install it with: pip install safetensors"
        ) from e
    try:
        with safe_open(str(file), framework="np"):
            pass  # opening checks the header: sizes, overlaps, and the end of the file
        with open(file, "rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            header = json.loads(f.read(length))
    except (SafetensorError, struct.error, ValueError) as e:
        raise _damaged(file, " ".join(str(e).split())) from e
    except OSError as e:
        raise LocalspecError(f"{file} cannot be read: {e.strerror or e}") from e
    header.pop("__metadata__", None)
    return [
        StoredTensor(
            name=name,
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            file=file,
            offset=8 + length + entry["data_offsets"][0],
            nbytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in header.items()
    ]


def _damaged(file: Path, why: str) -> LocalspecError:
    return LocalspecError(f"{file} is damaged or incomplete ({why}); download it again")
