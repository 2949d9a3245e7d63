"""Writing a GGUF file as a stream: the header first, then each tensor a chunk at a time.

The header is packed here and not by gguf.GGUFWriter because the target's tokenizer is copied as
the bytes it is stored as: types stay what they are, and tokens that are no valid UTF-8 survive.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from localspec import llama
from localspec.convert.source import Floats, Tensors
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

ALIGNMENT = 32
_U32, _F32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_COPY_BYTES = 4 << 20
# The largest magnitude each type can hold; above it a value would silently become infinite.
_LARGEST = {Type.F32: math.inf, Type.F16: 65504.0, Type.BF16: 3.3895e38, Type.Q8_0: 65504.0 * 127}
_LARGEST_SCALE = 65504.0  # the other types hold a half-precision scale and few steps


@dataclass(frozen=True)
class Output:
    """A tensor to be written.

    Attributes:
        name: GGUF name.
        shape: numpy order, in scalars.
        kind: how it is stored.
        source_name: its name where it comes from.
        source_bytes: what reading it costs, for progress.
        blocks: gives the stored bytes in order, with the part of `source_bytes` each stands for.
    """

    name: str
    shape: tuple[int, ...]
    kind: Type
    source_name: str
    source_bytes: int
    blocks: Callable[[], Iterator[tuple[bytes, int]]]

    @property
    def nbytes(self) -> int:
        """Stored size in bytes."""
        per_block, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        return math.prod(self.shape) // int(per_block) * int(block_bytes)


def encoded(
    checkpoint: Tensors, source_name: str, name: str, kind: Type,
    shape: tuple[int, ...] | None = None,
) -> Output:  # fmt: skip
    """A tensor of the checkpoint as `kind`; a larger `shape` is filled up with zeros at the end."""
    tensor = checkpoint.tensors[source_name]
    shape = tensor.shape if shape is None else shape

    def blocks() -> Iterator[tuple[bytes, int]]:
        for values, cost in finite_chunks(checkpoint, source_name):
            if _largest(values) > _LARGEST.get(kind, _LARGEST_SCALE):
                raise LocalspecError(
                    f"{checkpoint.path}: tensor {source_name} has values beyond the range of "
                    f"{kind.name}; use --outtype bf16 or f32"
                )
            yield _encode(values, kind), cost
        padding = math.prod(shape) - math.prod(tensor.shape)
        if padding:
            yield _encode(np.zeros((1, padding), np.float32), kind), 0

    return Output(name, shape, kind, source_name, tensor.nbytes, blocks)


def copied(target: GgufFile, source_name: str, name: str) -> Output:
    """A tensor of the target, bytes as they are."""
    info = target.tensors[source_name]

    def blocks() -> Iterator[tuple[bytes, int]]:
        with open(target.path, "rb") as f:
            f.seek(info.offset)
            for start in range(0, info.nbytes, _COPY_BYTES):
                data = f.read(min(_COPY_BYTES, info.nbytes - start))
                yield data, len(data)

    return Output(name, info.shape, Type[info.type_name], source_name, info.nbytes, blocks)


def integers(name: str, values: np.ndarray[Any, np.dtype[np.int64]]) -> Output:
    """A list of whole numbers that is already in memory."""
    data = values.astype("<i8").tobytes()
    return Output(name, values.shape, Type.I64, name, len(data), lambda: iter([(data, len(data))]))


def numbers(name: str, values: Floats) -> Output:
    """A list of numbers that is already in memory."""
    data = values.astype("<f4").tobytes()
    return Output(name, values.shape, Type.F32, name, len(data), lambda: iter([(data, len(data))]))


def finite_chunks(checkpoint: Tensors, name: str) -> Iterator[tuple[Floats, int]]:
    """The chunks of a checkpoint tensor with the stored bytes each stands for.

    Raises:
        LocalspecError: a value is NaN or infinite.
    """
    tensor = checkpoint.tensors[name]
    itemsize = tensor.nbytes // max(1, math.prod(tensor.shape))
    for values in checkpoint.chunks(name):
        if not math.isfinite(_largest(values)):
            what = "NaN" if np.isnan(values).any() else "infinite"
            raise LocalspecError(
                f"{checkpoint.path}: tensor {name} has {what} values; the checkpoint is damaged "
                "or its training diverged"
            )
        yield values, values.size * itemsize


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    outputs: Sequence[Output],
    advance: Callable[[str, int], None],
    digest: Any = None,
) -> None:
    """Write a complete file and force it to the disk.

    Args:
        path: created or replaced.
        metadata: key -> int, float, bool, str, list of int or bool, or bytes (a value in its
            stored form, see `GgufFile.stored_value`).
        outputs: the tensors, in file order.
        advance: called after each block with the tensor's name and the source bytes read.
        digest: a hashlib object that is fed everything written; None where nothing needs it.

    Raises:
        LocalspecError: bad values in a tensor or in the metadata.
        OSError: the file cannot be written.
    """
    path.unlink(missing_ok=True)
    # A link planted under this name is not followed.
    with open(path, "xb") as f:
        _put(f, _header(metadata, outputs), digest)
        for output in outputs:
            _put(f, bytes(-f.tell() % ALIGNMENT), digest)
            for data, cost in output.blocks():
                _put(f, data, digest)
                advance(output.name, cost)
        _put(f, bytes(-f.tell() % ALIGNMENT), digest)
        f.flush()
        os.fsync(f.fileno())


def verify(path: Path, metadata: Mapping[str, Any], outputs: Sequence[Output]) -> None:
    """Open a written file again: names, shapes, types, and finite values at both ends.

    Raises:
        LocalspecError: the file is not what was meant to be written.
    """
    with GgufFile(path) as written:
        planned = {o.name: (o.shape, o.kind.name, o.nbytes) for o in outputs}
        found = {t.name: (t.shape, t.type_name, t.nbytes) for t in written.tensors.values()}
        good = found == planned and list(written.metadata) == list(metadata)
        for output in outputs if good else ():
            rows = output.shape[0] if len(output.shape) > 1 else 0
            ends = [(0, 1), (rows - 1, rows)] if rows else [(0, None)]
            try:
                good = all(np.isfinite(written.tensor(output.name, *end)).all() for end in ends)
            except LocalspecError:  # a type of the target that cannot be decoded here
                continue
            if not good:
                break
    if not good:
        raise LocalspecError(f"{path} reads back differently than written; check the disk")


def fill_in(path: Path, key: str, text: str) -> None:
    """Replace a string of the metadata by another one of the same length.

    Raises:
        OSError: the file cannot be written.
    """
    with GgufFile(path) as written:
        _, end = written.value_span(key)
    data = text.encode()
    with open(path, "r+b") as f:
        f.seek(end - len(data))
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def _put(f: BinaryIO, data: bytes, digest: Any) -> None:
    f.write(data)
    if digest is not None:
        digest.update(data)


def _largest(values: Floats) -> float:
    """The largest magnitude; NaN when there is one, which both extremes then are."""
    largest, least = float(values.max(initial=0.0)), float(values.min(initial=0.0))
    return math.nan if math.isnan(least) else max(largest, -least)


def _encode(values: Floats, kind: Type) -> bytes:
    """[rows, columns] float32 -> stored bytes. Quantisation blocks never cross a row."""
    flat = np.ascontiguousarray(values).reshape(1, -1)
    if kind == Type.F32:
        return flat.astype("<f4", copy=False).tobytes()
    if kind == Type.F16:
        return flat.astype("<f2").tobytes()
    # One long row instead of many short ones: the same blocks, in far fewer calls.
    return llama.quantize_rows(flat, kind.name.lower()).tobytes()


def _header(metadata: Mapping[str, Any], outputs: Sequence[Output]) -> bytes:
    out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(outputs), len(metadata)))
    for key, value in metadata.items():
        out += _string(key) + _stored(key, value)
    offset = 0
    for output in outputs:
        out += _string(output.name)
        dims = tuple(reversed(output.shape))
        out += struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
        out += struct.pack("<IQ", output.kind, offset)
        offset += -(-output.nbytes // ALIGNMENT) * ALIGNMENT
    return bytes(out)


def _stored(key: str, value: Any) -> bytes:
    try:
        return _value(value)
    except (struct.error, OverflowError) as e:
        raise LocalspecError(
            f"{key} = {value} is more than GGUF can hold; correct the checkpoint's config.json"
        ) from e


def _value(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, list):
        kind, code = (_BOOL, "?") if isinstance(value[0], bool) else (_U32, "I")
        return struct.pack(f"<IIQ{len(value)}{code}", _ARRAY, kind, len(value), *value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _U32, value)
    return struct.pack("<If", _F32, value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
