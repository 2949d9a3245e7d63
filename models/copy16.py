"""A copy of a GGUF with other matrices: the same weights without quantised arithmetic.

On CPUs without kernels that reuse a quantised weight for many rows, a BF16 file of a quantised
model prefills several times faster than the file itself; `speed.fastest` measures before it is
believed. An F32 copy has none of the noise of quantised arithmetic.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile


def write_copy(source: Path, out: Path, matrices: str = "BF16") -> None:
    """Write `source` to `out` with every matrix in another type; all metadata is kept.

    `matrices`: "BF16" or "F32"; vectors are F32 either way.

    Written aside and renamed. Raises LocalspecError when a tensor cannot be read or the disk is
    full.
    """
    file = GgufFile(source)
    reader = gguf.GGUFReader(source)
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=out.parent, suffix=".part")
    os.close(handle)
    try:
        writer = gguf.GGUFWriter(aside, file.architecture)
        _copy_metadata(reader, writer, matrices)
        for name, info in file.tensors.items():
            kind = _kind(info.shape, matrices)
            writer.add_tensor_info(
                name, info.shape, np.dtype(np.float32), _nbytes(info.shape, kind), raw_dtype=kind
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, info in file.tensors.items():
            values = file.tensor(name)
            writer.write_tensor_data(gguf.quants.quantize(values, _kind(info.shape, matrices)))
        writer.close()
        os.replace(aside, out)
    except OSError as error:
        raise LocalspecError(f"{out}: cannot be written ({error}); free some space") from error
    finally:
        if os.path.exists(aside):
            os.unlink(aside)


def _copy_metadata(reader: Any, writer: Any, matrices: str) -> None:
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, field.contents(), kind, field.types[1])
        else:
            writer.add_key_value(name, field.contents(), kind)
    types = {"BF16": gguf.LlamaFileType.MOSTLY_BF16, "F32": gguf.LlamaFileType.ALL_F32}
    writer.add_file_type(types[matrices])


def _kind(shape: tuple[int, ...], matrices: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[matrices if len(shape) > 1 else "F32"]


def _nbytes(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> int:
    return int(np.prod(shape)) * (2 if kind == gguf.GGMLQuantizationType.BF16 else 4)
