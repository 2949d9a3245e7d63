"""The DSpark drafter inside a full DeepSeek-V4 checkpoint, opened for reading.

The index says which shards hold the drafter's tensors (`mtp.N.*`); no other shard is opened, or
need even be there. Released weights are stored in 8 and 4 bits with a scale beside every block:
they are turned into float32 a few rows at a time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from localspec.convert.source import (
    CHUNK_VALUES,
    INDEX,
    WEIGHTS,
    Floats,
    StoredTensor,
    _damaged,
    _read_header,
    _widen,
)
from localspec.errors import LocalspecError
from localspec.models.deepseek4_config import MARK, Deepseek4Config, read_json

PREFIX = re.compile(r"mtp\.(\d{1,4})\.(.+)")
FP8, FP4 = "FP8", "FP4"  # quantised tensors: codes with a scale per block
FP8_BLOCK = 128  # rows and columns that share a scale
FP4_BLOCK = 32  # columns that share a scale
# What the scale of a weight is called: in DeepSeek's own releases, and in exports of transformers.
_SCALES = (".scale", ".weight_scale_inv", ".scale_inv")
_PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_EXPONENTS = ("F8_E8M0", "U8")
_PACKED = frozenset(("I8", "U8", "F4"))

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def _e4m3() -> Floats:
    """The 256 values of an 8-bit float: sign, 4 bits of exponent (bias 7), 3 of fraction."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    size = np.where(
        exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent.astype(float) - 10)
    )
    size[code & 127 == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


_E4M3 = _e4m3()
# Sign, 2 bits of exponent, 1 of fraction.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])


def recognised(path: Path) -> bool:
    """Whether a directory's config.json is that of a full model with a DSpark drafter inside."""
    data = read_json(path / "config.json")
    # A drafter of its own may carry the same settings as aliases of its block_size.
    return data is not None and MARK in data and "block_size" not in data


class Deepseek4Checkpoint:
    """A full checkpoint, of which only the drafter is read.

    Attributes:
        path: the directory.
        config: the drafter's settings in its config.json, checked.
        tensors: published name -> where it lies; shapes are those of the values, dtype is the
            safetensors name, or "FP8" and "FP4" for codes with scales.
        n_stages: the drafter's layers.

    Raises:
        LocalspecError: a file is missing, damaged or cut short, a setting is missing or invalid,
            or a scale does not fit its weight.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = Deepseek4Config.from_file(path)
        stored = {t.name: t for t in _drafter_tensors(path)}
        if not stored:
            raise LocalspecError(
                f"{path} has the settings of a DSpark drafter ({MARK}) but no tensors of one "
                "(mtp.N.*); use the release that contains it"
            )
        self._scales: dict[str, StoredTensor] = {}
        self.tensors: dict[str, StoredTensor] = {}
        taken = set()
        for name, tensor in stored.items():
            scale = _scale_of(name, stored)
            if scale is not None:
                taken.add(scale.name)
                self._scales[name] = scale
                tensor = _quantised(tensor, scale)
            self.tensors[name] = tensor
        for name in taken:
            del self.tensors[name]
        stages = {int(m[1]) for m in map(PREFIX.fullmatch, self.tensors) if m}
        self.n_stages = len(stages)
        if stages != set(range(self.n_stages)):
            missing = min(set(range(max(stages) + 1)) - stages)
            raise LocalspecError(
                f"{path}: the drafter's layer {missing} (mtp.{missing}.*) is missing; the "
                "checkpoint is incomplete, download it again"
            )

    @property
    def files(self) -> set[Path]:
        """Every file the conversion reads."""
        weights = {t.file for t in (*self.tensors.values(), *self._scales.values())}
        return {self.path / "config.json", self.path / INDEX} | weights

    def cost(self, name: str) -> int:
        """Stored bytes of a tensor, its scales included."""
        scale = self._scales.get(name)
        return self.tensors[name].nbytes + (scale.nbytes if scale else 0)

    def chunks(self, name: str) -> Iterator[Floats]:
        """The tensor as float32 [rows, columns], some rows at a time (1-D: one row).

        Raises:
            LocalspecError: the file became unreadable or shorter since it was opened.
        """
        tensor = self.tensors[name]
        columns = tensor.shape[-1] if tensor.shape else 1
        n_rows = math.prod(tensor.shape[:-1])
        step = max(1, CHUNK_VALUES // max(1, columns))
        scale = self._scale_values(name) if name in self._scales else None
        for start in range(0, n_rows, step):
            stop = min(start + step, n_rows)
            if scale is None:
                raw = self._rows(tensor, start, stop, columns, np.dtype(_PLAIN[tensor.dtype]))
                yield _widen(raw)
            elif tensor.dtype == FP8:
                codes = self._rows(tensor, start, stop, columns, np.dtype(np.uint8))
                rows = np.arange(start, stop) // FP8_BLOCK
                wide = np.repeat(scale[rows], FP8_BLOCK, axis=1)[:, :columns]
                yield _E4M3[codes] * wide
            else:
                codes = self.packed(name, start, stop)
                values = np.empty((stop - start, columns), np.float32)
                values[:, 0::2], values[:, 1::2] = _E2M1[codes & 15], _E2M1[codes >> 4]
                yield values * np.repeat(scale[start:stop], FP4_BLOCK, axis=1)

    def packed(self, name: str, start: int, stop: int) -> Bytes:
        """Rows of a 4-bit tensor as stored, [rows, columns / 2]: two values a byte, low first."""
        tensor = self.tensors[name]
        return self._rows(tensor, start, stop, tensor.shape[-1] // 2, np.dtype(np.uint8))

    def power_of_two_scales(self, name: str) -> bool:
        """Whether the scales of a quantised tensor are stored as powers of two."""
        return self._scales[name].dtype in _EXPONENTS

    def exponents(self, name: str) -> Bytes:
        """Scales of a quantised tensor that are powers of two, as stored: bias 127, 255 is NaN."""
        scale = self._scales[name]
        rows, columns = scale.shape
        return self._rows(scale, 0, rows, columns, np.dtype(np.uint8))

    def _scale_values(self, name: str) -> Floats:
        scale = self._scales[name]
        rows, columns = scale.shape
        if self.power_of_two_scales(name):
            codes = self.exponents(name)
            with np.errstate(over="ignore"):
                values = np.ldexp(np.float32(1), codes.astype(np.int32) - 127)
            return np.where(codes == 255, np.float32(np.nan), values)
        return _widen(self._rows(scale, 0, rows, columns, np.dtype(_PLAIN[scale.dtype])))

    def _rows(
        self, tensor: StoredTensor, start: int, stop: int, columns: int, kind: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        count = (stop - start) * columns
        try:
            with open(tensor.file, "rb") as f:
                f.seek(tensor.offset + start * columns * kind.itemsize)
                values = np.fromfile(f, kind, count)
        except OSError as e:
            raise LocalspecError(f"{tensor.file} cannot be read: {e.strerror or e}") from e
        if values.size != count:
            raise _damaged(tensor.file, f"tensor {tensor.name} is cut short")
        return values.reshape(stop - start, columns)


def _drafter_tensors(path: Path) -> Iterator[StoredTensor]:
    """The stored tensors named `mtp.N.*`; only shards that hold one are opened."""
    index = path / INDEX
    if not index.exists():
        if not (path / WEIGHTS).exists():
            raise LocalspecError(
                f"{path} has neither {WEIGHTS} nor {INDEX}; its download is incomplete"
            )
        yield from (t for t in _read_header(path / WEIGHTS) if PREFIX.fullmatch(t.name))
        return
    data = read_json(index)
    listed = data.get("weight_map") if data is not None else None
    if not isinstance(listed, dict):
        raise _damaged(index, "it holds no weight_map")
    wanted = {name: str(file) for name, file in listed.items() if PREFIX.fullmatch(name)}
    for file in sorted(set(wanted.values())):
        # A name with a directory in it would read outside the checkpoint.
        if Path(file).name != file or not (path / file).is_file():
            raise LocalspecError(
                f"{index} names the shard {file!r}, which holds tensors of the drafter and is not "
                f"in {path}; download it too"
            )
        names = {name for name, where in wanted.items() if where == file}
        for tensor in _read_header(path / file):
            if PREFIX.fullmatch(tensor.name):
                if tensor.name not in names:
                    raise LocalspecError(
                        f"{index} and the shards disagree about tensor {tensor.name}; download "
                        "both again"
                    )
                names.discard(tensor.name)
                yield tensor
        if names:
            raise LocalspecError(
                f"{path / file} lacks tensor {min(names)}, which {INDEX} says it has; download "
                "both again"
            )


def _scale_of(name: str, stored: dict[str, StoredTensor]) -> StoredTensor | None:
    if not name.endswith(".weight"):
        return None
    stem = name.removesuffix(".weight")
    return next((stored[stem + s] for s in _SCALES if stem + s in stored), None)


def _quantised(tensor: StoredTensor, scale: StoredTensor) -> StoredTensor:
    """A weight with a scale beside it: as what its values are."""
    good = len(tensor.shape) == 2 and len(scale.shape) == 2
    if good and tensor.dtype == "F8_E4M3":
        tensor = dataclasses.replace(tensor, dtype=FP8)
        good = scale.shape == tuple(-(-n // FP8_BLOCK) for n in tensor.shape)
    elif good and tensor.dtype in _PACKED:
        rows = tensor.shape[0]
        columns = 2 * tensor.nbytes // max(1, rows)  # two in a byte, however the shape counts them
        tensor = dataclasses.replace(tensor, shape=(rows, columns), dtype=FP4)
        good = scale.shape == (rows, columns // FP4_BLOCK) and columns % FP4_BLOCK == 0
    elif good:
        raise LocalspecError(
            f"{tensor.file}: tensor {tensor.name} is stored as {tensor.dtype} with a scale; known "
            "are F8_E4M3 and 4-bit floats packed in I8"
        )
    if not good or scale.dtype not in (*_PLAIN, *_EXPONENTS):
        raise LocalspecError(
            f"{scale.file}: {scale.name} ({scale.dtype} {list(scale.shape)}) is no scale for "
            f"{tensor.name} ({tensor.dtype} {list(tensor.shape)}); download the checkpoint again"
        )
    return tensor
