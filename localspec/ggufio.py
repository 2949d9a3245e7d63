"""Reading a GGUF file: header checked before anything is trusted, tensors read on demand.

llama.cpp reads GGUF files too, but it cannot hand single tensors to numpy, and a damaged file
must be recognised before a process-wide abort can happen. Everything here is bounded by the size
of the file: a length that points past the end is an error, never an allocation.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3,
little-endian).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.errors import LocalspecError

_MAX_TENSORS = 1 << 20
_MAX_KEYS = 1 << 20
_MAX_NAME = 1 << 16
_STRING, _ARRAY, _BOOL = 8, 9, 7
# GGUF value type -> little-endian struct code.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file.

    Attributes:
        name: the tensor's name.
        shape: numpy order (the fastest dimension last), the reverse of ggml's.
        type_name: ggml type, e.g. "F32" or "Q8_0".
        offset: absolute byte offset in the file.
        nbytes: stored size in bytes.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    nbytes: int


class GgufArray:
    """An array value of the metadata, decoded when asked for (vocabularies are long)."""

    def __init__(self, buf: mmap.mmap, offset: int, kind: int, count: int) -> None:
        self._buf, self._offset, self._kind, self._count = buf, offset, kind, count

    def __len__(self) -> int:
        return self._count

    def tolist(self) -> list[Any]:
        """The values as Python objects; strings as str (undecodable bytes replaced)."""
        if self._kind != _STRING:
            return list(struct.unpack_from(f"<{self._count}{_SCALARS[self._kind]}", self._buf,
                                           self._offset))  # fmt: skip
        return [text.decode("utf-8", "replace") for text in self.strings()]

    def strings(self) -> Iterator[bytes]:
        """The values of an array of strings, as stored; nothing for other arrays."""
        at = self._offset
        for _ in range(self._count if self._kind == _STRING else 0):
            (size,) = struct.unpack_from("<Q", self._buf, at)
            yield self._buf[at + 8 : at + 8 + size]
            at += 8 + size


class GgufFile:
    """A GGUF file opened for reading.

    Attributes:
        path: the file.
        metadata: key -> Python scalar, str, or `GgufArray`.
        tensors: name -> `TensorInfo`, in file order.

    Raises:
        LocalspecError: the file is missing, is not GGUF, is damaged or is cut short.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._buf = _map(self.path)
        try:
            self.metadata, self._values, self.tensors = _parse(self._buf, self.path)
        except (struct.error, UnicodeDecodeError, OverflowError) as e:
            self.close()
            raise _damaged(self.path, "its header ends too early or is garbled") from e
        except LocalspecError:
            self.close()
            raise

    @property
    def architecture(self) -> str:
        """`general.architecture`, or "" when the file does not say."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value with arrays decoded to lists; `default` when the key is absent."""
        value = self.metadata.get(key, default)
        return value.tolist() if isinstance(value, GgufArray) else value

    def arch_get(self, key: str, default: Any = None) -> Any:
        """`<architecture>.<key>`, e.g. `arch_get("block_count")`."""
        return self.get(f"{self.architecture}.{key}", default)

    def stored_value(self, key: str) -> bytes:
        """A metadata value exactly as stored, its type included; KeyError when there is none."""
        start, end = self.value_span(key)
        return self._buf[start:end]

    def value_span(self, key: str) -> tuple[int, int]:
        """Start and end of a stored metadata value in the file; KeyError when there is none."""
        return self._values[key]

    def tensor(
        self, name: str, start: int = 0, stop: int | None = None
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The tensor dequantised to float32, numpy shape; KeyError when there is none.

        `start` and `stop` choose rows (entries of the first dimension), as in a slice.
        """
        info = self.tensors[name]
        if len(info.shape) < 2:
            if (start, stop) != (0, None):
                raise ValueError(f"{name} has no rows to choose from")
            raw = np.frombuffer(self._buf, np.uint8, info.nbytes, info.offset)
            return self._dequantize(info, raw).reshape(info.shape)
        n_rows = info.shape[0]
        start, stop, _ = slice(start, stop).indices(n_rows)
        count = max(0, stop - start)
        row_bytes = info.nbytes // n_rows if n_rows else 0
        raw = np.frombuffer(self._buf, np.uint8, count * row_bytes, info.offset + start * row_bytes)
        return self._dequantize(info, raw).reshape(count, *info.shape[1:])

    def integers(self, name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        """An I64 tensor as stored; KeyError when there is none, ValueError for another type."""
        info = self.tensors[name]
        if info.type_name != "I64":
            raise ValueError(f"{name} holds {info.type_name}")
        raw = np.frombuffer(self._buf, "<i8", info.nbytes // 8, info.offset)
        return raw.astype(np.int64).reshape(info.shape)

    def rows(self, name: str) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        """A function that reads single rows of a matrix as float32, straight from the file.

        Nothing is copied up front: large matrices stay in the page cache that llama.cpp's own
        mapping of the file shares. The file must stay open.
        """
        info = self.tensors[name]
        n_rows, width = info.shape
        raw = np.frombuffer(self._buf, np.uint8, info.nbytes, info.offset).reshape(n_rows, -1)
        if info.type_name == "F32":
            f32 = raw.view(np.float32)
            return lambda ids: f32[ids]
        if info.type_name == "F16":
            f16 = raw.view(np.float16)
            return lambda ids: f16[ids].astype(np.float32)
        if info.type_name == "BF16":
            bf16 = raw.view(np.uint16)
            return lambda ids: (bf16[ids].astype(np.uint32) << 16).view(np.float32)
        return lambda ids: self._dequantize(info, raw[ids]).reshape(-1, width)

    def _dequantize(
        self, info: TensorInfo, raw: np.ndarray[Any, Any]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Stored bytes of whole rows -> a float32 copy, shape [rows, columns]."""
        import gguf

        kind = gguf.GGMLQuantizationType[info.type_name]
        if not raw.size:
            return np.zeros(0, np.float32)
        rows = raw.reshape(-1, info.nbytes // max(1, math.prod(info.shape[:-1])))
        if kind == gguf.GGMLQuantizationType.F32:
            return rows.view(np.float32).copy()
        try:
            values: np.ndarray[Any, np.dtype[np.float32]] = gguf.quants.dequantize(rows, kind)
        except NotImplementedError as e:
            raise LocalspecError(
                f"{self.path}: tensor {info.name} is stored as {info.type_name}, which localspec "
                "cannot read; use a file with F32, F16, BF16 or Q8_0 heads"
            ) from e
        return values

    def close(self) -> None:
        """Release the mapping. Arrays returned by `tensor` are copies and stay valid."""
        # While a caller still looks at the bytes, closing is left to the garbage collector.
        with contextlib.suppress(BufferError):
            self._buf.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _damaged(path: Path, why: str) -> LocalspecError:
    return LocalspecError(f"{path} is damaged or incomplete ({why}); download or convert it again")


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as f:
            if os.fstat(f.fileno()).st_size < 24 or f.read(4) != b"GGUF":
                raise LocalspecError(
                    f"{path} is not a GGUF file; checkpoints become GGUF with `localspec convert`"
                )
            return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as e:
        raise LocalspecError(f"{path} does not exist; check the path") from e
    except IsADirectoryError as e:
        raise LocalspecError(
            f"{path} is a directory, not a GGUF file; checkpoints become GGUF with "
            "`localspec convert`"
        ) from e
    except (OSError, ValueError) as e:  # ValueError: a name that no file can have
        why = e.strerror if isinstance(e, OSError) else None
        raise LocalspecError(f"{path} cannot be read: {why or e}") from e


class _Cursor:
    """Reads little-endian values and never past the end of the file."""

    def __init__(self, buf: mmap.mmap, path: Path) -> None:
        self.buf, self.path, self.at, self.size = buf, path, 4, len(buf)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buf, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def skip(self, nbytes: int) -> None:
        if nbytes > self.size - self.at:
            raise _damaged(self.path, "its header ends too early")
        self.at += nbytes

    def string(self, limit: int | None = None) -> str:
        size = self.scalar("Q")
        if limit is not None and size > limit:
            raise _damaged(self.path, "a name is absurdly long")
        start = self.at
        self.skip(size)
        return self.buf[start : self.at].decode("utf-8", "replace")

    def value(self) -> Any:
        kind = self.scalar("I")
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise _damaged(self.path, f"unknown value type {kind}")
        kind, count = self.scalar("I"), self.scalar("Q")
        start = self.at
        if kind == _STRING:
            if count > self.size // 8:
                raise _damaged(self.path, "an array is longer than the file")
            for _ in range(count):
                (size,) = struct.unpack_from("<Q", self.buf, self.at)
                self.skip(8 + size)
        elif kind in _SCALARS:
            self.skip(count * struct.calcsize("<" + _SCALARS[kind]))
        else:
            raise _damaged(self.path, f"unsupported array of type {kind}")
        return GgufArray(self.buf, start, kind, count)


def _parse(
    buf: mmap.mmap, path: Path
) -> tuple[Mapping[str, Any], Mapping[str, tuple[int, int]], Mapping[str, TensorInfo]]:
    """Metadata, where each of its values lies (start and end in the file), tensors."""
    cur = _Cursor(buf, path)
    version, n_tensors, n_keys = cur.scalar("I"), cur.scalar("Q"), cur.scalar("Q")
    if version not in (2, 3):
        raise LocalspecError(
            f"{path} is GGUF version {version}; localspec reads versions 2 and 3 (little-endian)"
        )
    if n_tensors > _MAX_TENSORS or n_keys > _MAX_KEYS:
        raise _damaged(path, "its counts are absurd")
    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(n_keys):
        key = cur.string(_MAX_NAME)
        if key in metadata:
            raise _damaged(path, f"key {key!r} appears twice")
        start = cur.at
        metadata[key] = cur.value()
        spans[key] = (start, cur.at)
    return metadata, spans, {t.name: t for t in _tensors(cur, n_tensors, metadata)}


def _tensors(cur: _Cursor, count: int, metadata: Mapping[str, Any]) -> Iterator[TensorInfo]:
    import gguf

    path, seen, raw = cur.path, set(), []
    for _ in range(count):
        name = cur.string(_MAX_NAME)
        n_dims = cur.scalar("I")
        if n_dims > 8:
            raise _damaged(path, f"tensor {name!r} has {n_dims} dimensions")
        dims = [cur.scalar("Q") for _ in range(n_dims)]
        kind, offset = cur.scalar("I"), cur.scalar("Q")
        if name in seen:
            raise _damaged(path, f"tensor {name!r} appears twice")
        seen.add(name)
        raw.append((name, tuple(reversed(dims)), kind, offset))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align <= 0 or align & (align - 1):
        raise _damaged(path, f"alignment {align!r} is not a power of two")
    base = -(-cur.at // align) * align
    for name, shape, kind, offset in raw:
        try:
            type_name = gguf.GGMLQuantizationType(kind).name
        except ValueError as e:
            raise LocalspecError(
                f"{path}: tensor {name!r} has the unknown type {kind}; a newer gguf package may "
                "know it (pip install -U gguf)"
            ) from e
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        count = math.prod(shape)
        if (shape[-1] if shape else 1) % per_block:
            raise _damaged(path, f"tensor {name!r} has rows that are no multiple of {per_block}")
        nbytes = count // per_block * block_bytes
        if base + offset + nbytes > cur.size:
            raise _damaged(path, f"tensor {name!r} lies beyond the end of the file")
        yield TensorInfo(name, shape, type_name, base + offset, nbytes)
