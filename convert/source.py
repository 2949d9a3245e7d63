"""A drafter checkpoint on disk: config.json with model.safetensors, whole or in shards.

The safetensors library validates every header before an offset of it is used; the data is then
read with plain file reads, a few rows at a time, so that a tensor of any size costs the memory of
one chunk (a memory map would count every page it has touched).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.errors import LocalspecError
from localspec.models.config import DrafterConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CHUNK_VALUES = 1 << 20  # scalars per chunk: 4 MiB as float32

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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    nbytes: int


class Checkpoint:
    """A drafter checkpoint opened for reading.

    Attributes:
        path: the directory.
        config: its config.json, checked.
        tensors: published name -> `StoredTensor`.

    Raises:
        LocalspecError: no such directory, a file is missing, damaged or cut short, or a field of
            config.json is missing or invalid.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            what = "is a file, not" if path.exists() else "does not exist; name"
            raise LocalspecError(
                f"{path} {what} a checkpoint directory (config.json and {WEIGHTS})"
            )
        self.path = path
        self.config = DrafterConfig.from_file(path)
        self.tensors = {t.name: t for file in _weight_files(path) for t in _read_header(file)}

    @property
    def files(self) -> set[Path]:
        """Every file the conversion reads."""
        return {self.path / "config.json", self.path / INDEX} | {
            t.file for t in self.tensors.values()
        }

    def chunks(self, name: str) -> Iterator[Floats]:
        """The tensor as float32 [rows, columns], some rows at a time (1-D: one row).

        Raises:
            LocalspecError: the file became unreadable or shorter since it was opened.
        """
        tensor = self.tensors[name]
        columns = tensor.shape[-1] if tensor.shape else 1
        n_rows = math.prod(tensor.shape[:-1])
        step = max(1, CHUNK_VALUES // max(1, columns))
        stored = _STORED[tensor.dtype]
        try:
            with open(tensor.file, "rb") as f:
                f.seek(tensor.offset)
                for start in range(0, n_rows, step):
                    count = min(step, n_rows - start) * columns
                    values = np.fromfile(f, stored, count)
                    if values.size != count:
                        raise _damaged(tensor.file, f"tensor {name} is cut short")
                    yield _widen(values).reshape(-1, columns)
        except OSError as e:
            raise LocalspecError(f"{tensor.file} cannot be read: {e.strerror or e}") from e


def supported(dtype: str) -> bool:
    """Whether tensors of this safetensors dtype can be read."""
    return dtype in _STORED


def _widen(values: np.ndarray[Any, Any]) -> Floats:
    if values.dtype.kind == "u":  # bfloat16: the upper half of a float32
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


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
    files = [path / file for file in sorted(set(names.values()))]
    found = {t.name: t.file.name for file in files for t in _read_header(file)}
    differing = sorted(dict(names.items() ^ found.items()))
    if differing:
        raise LocalspecError(
            f"{index} and the shards disagree about tensor {differing[0]}; download both again"
        )
    return files


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
