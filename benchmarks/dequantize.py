"""An F32 copy of a GGUF: the same weights without the noise of quantised arithmetic.

python benchmarks/dequantize.py IN.gguf OUT.gguf
"""

from __future__ import annotations

import sys
from pathlib import Path

from localspec.models.copy16 import write_copy


def main(source: str, out: str) -> None:
    """Write `out` with every tensor of `source` as float32 and all of its metadata."""
    write_copy(Path(source), Path(out), "F32")


if __name__ == "__main__":
    main(*sys.argv[1:])
