"""ggml's own quantisers, for matrices and for whole files."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError
from localspec.llama.library import library
from localspec.llama.threads import default_threads

Floats = npt.NDArray[np.float32]

# What matrices can be stored as: name -> (ggml_type, scalars per block, bytes per block).
TENSOR_TYPES = {
    "f32": (0, 1, 4), "f16": (1, 1, 2), "bf16": (30, 1, 2), "q8_0": (8, 32, 34),
    "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24),
    "q2_k": (10, 256, 84), "q3_k": (11, 256, 110), "q4_k": (12, 256, 144), "q5_k": (13, 256, 176),
    "q6_k": (14, 256, 210),
}  # fmt: skip
# What whole files can be quantised to: llama-quantize's names -> llama_ftype.
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16,
    "q5_k_m": 17, "q6_k": 18, "bf16": 32, "q3_k": 12, "q4_k": 15, "q5_k": 17,
}  # fmt: skip


def quantize_rows(values: Floats, kind: str) -> npt.NDArray[np.uint8]:
    """Rows of a matrix in one of ggml's types, by ggml's own quantiser.

    Args:
        values: [rows, columns], finite; columns a multiple of the type's block.
        kind: a key of `TENSOR_TYPES`.

    Returns:
        [rows, bytes per row].

    Raises:
        ValueError: an unknown type, or columns that are no whole number of blocks.
    """
    if kind not in TENSOR_TYPES:
        raise ValueError(f"{kind!r} is none of {', '.join(TENSOR_TYPES)}")
    number, per_block, block_bytes = TENSOR_TYPES[kind]
    rows, columns = values.shape
    if columns < 1 or columns % per_block:
        raise ValueError(f"rows of {columns} are no whole number of {per_block}-blocks")
    source = np.ascontiguousarray(values, np.float32)
    out = np.empty((rows, columns // per_block * block_bytes), np.uint8)
    if rows:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        quantise = library().ggml_function(
            "ggml_quantize_chunk", ctypes.c_size_t,
            ctypes.c_int, pointer, pointer, size, size, size, pointer,
        )  # fmt: skip
        quantise(number, source.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    return out


def quantize(
    path_in: str | os.PathLike[str],
    path_out: str | os.PathLike[str],
    kind: str,
    *,
    n_threads: int = 0,
) -> None:
    """Quantise a whole GGUF, as llama-quantize does; `path_out` appears when it is complete.

    Args:
        path_in: a GGUF in any type (from a quantised one, errors add up).
        path_out: the GGUF to write; replaced if it exists.
        kind: a key of `FILE_TYPES`, e.g. "q4_0" or "q4_k_m".
        n_threads: CPU threads; 0 means `default_threads()`.

    Raises:
        LocalspecError: llama.cpp cannot read, quantise or write it; the message carries its reason.
        ValueError: an unknown `kind`.
    """
    if kind not in FILE_TYPES:
        raise ValueError(f"{kind!r} is none of {', '.join(FILE_TYPES)}")
    source, out = Path(path_in), Path(path_out)
    if not source.is_file():
        raise LocalspecError(f"{source} does not exist or is not a file; name a GGUF")
    if out.is_dir() or not out.parent.is_dir():
        raise LocalspecError(f"{out} cannot be written; name a file in an existing directory")
    if os.path.realpath(source) == os.path.realpath(out):
        raise LocalspecError(f"{out} is the file to quantise; choose another output")
    lib = library()
    params = lib.api.llama_model_quantize_default_params()
    params.nthread = n_threads or default_threads()
    params.ftype = FILE_TYPES[kind]
    params.allow_requantize = True
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    lib.recent.clear()
    try:
        failed = lib.api.llama_model_quantize(
            os.fsencode(source), os.fsencode(aside), ctypes.byref(params)
        )
        if failed or not aside.is_file():
            raise LocalspecError(f"llama.cpp cannot quantise {source} to {kind}: {lib.why()}")
        os.replace(aside, out)
    except OSError as e:
        raise LocalspecError(f"{out} cannot be written: {e.strerror or e}") from e
    finally:
        aside.unlink(missing_ok=True)
