"""A copy of a drafter with random weights: what speculation costs when nothing is ever right.

python benchmarks/useless_drafter.py OUT.gguf [--drafter D.gguf] [--seed 0]

Names, shapes, types and settings stay, so every pass takes the time of the real one's.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np

from localspec import pairs
from localspec.ggufio import GgufFile, TensorInfo
from localspec.llama import quantize_rows


def randomise(source: Path, out: Path, seed: int = 0) -> None:
    """Write `out`: `source` with random matrices (and its heads' file beside it, if it has one)."""
    _randomise(source, out, np.random.default_rng(seed))
    heads = pairs.heads_path(source)
    if heads.exists():
        _randomise(heads, pairs.heads_path(out), np.random.default_rng(seed + 1))


def _randomise(source: Path, out: Path, rng: np.random.Generator) -> None:
    shutil.copyfile(source, out)
    with GgufFile(source) as file, open(out, "r+b") as f:
        for info in file.tensors.values():
            if info.type_name.startswith("I"):
                continue  # tables of indices
            f.seek(info.offset)
            f.write(_random(info, rng))


def _random(info: TensorInfo, rng: np.random.Generator) -> bytes:
    """Bytes of a random tensor: norms are left open, matrices keep the size of what they read."""
    columns = info.shape[-1]
    values = rng.standard_normal((max(1, int(np.prod(info.shape)) // columns), columns), np.float32)
    values /= np.sqrt(columns)
    if info.name.endswith("norm.weight"):
        values[:] = 1.0
    data = quantize_rows(values, info.type_name.lower()).tobytes()
    assert len(data) == info.nbytes, info
    return data


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--drafter", type=Path, default=pairs.default_drafter())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    randomise(args.drafter, args.out, args.seed)


if __name__ == "__main__":
    main()
