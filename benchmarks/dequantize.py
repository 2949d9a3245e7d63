"""An F32 copy of a GGUF: the same weights without the noise of quantised arithmetic.

python benchmarks/dequantize.py IN.gguf OUT.gguf
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

from localspec.ggufio import GgufFile


def main(source: str, out: str) -> None:
    """Write `out` with every tensor of `source` as float32 and all of its metadata."""
    reader = gguf.GGUFReader(source)
    file = GgufFile(source)
    writer = gguf.GGUFWriter(out, file.architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        if kind == gguf.GGUFValueType.ARRAY:
            writer.add_key_value(name, field.contents(), kind, field.types[1])
        else:
            writer.add_key_value(name, field.contents(), kind)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for name, info in file.tensors.items():
        writer.add_tensor_info(name, info.shape, np.dtype(np.float32), 4 * int(np.prod(info.shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in file.tensors:
        writer.write_tensor_data(file.tensor(name))
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
