"""Which quantisation of the target suits speculation: what a pass costs, and what comes of it.

    python benchmarks/quantisations.py [--types q4_0 bf16] [--prompts 2] [--files gsm8k]

The target as it is comes first; the other types are made from it by way of an F32 copy
(llama.cpp's own quantiser), so a type that is finer than the original costs its time without its
quality. T(n) is the time of a target pass over n tokens. --keep DIR keeps the files.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import dequantize
from common import PROMPT_FILES, markdown_head, markdown_row, pair_parser, read
from localspec import llama
from localspec.bench.run import run
from localspec.bench.settings import AUTO, PLAIN, parse_settings
from localspec.bench.stats import geometric_mean
from localspec.engine import Engine
from localspec.tuning import Tuning

SIZES = (2, 4, 8, 16, 32)


def main() -> None:
    """Print a line per type."""
    parser = pair_parser(__doc__, prompts=2)
    parser.add_argument("--types", nargs="*", default=["q4_0", "q8_0", "bf16"],
                        help="quantisations to make: " + " ".join(llama.FILE_TYPES))  # fmt: skip
    parser.add_argument("--files", nargs="+", default=PROMPT_FILES)
    parser.add_argument("--fixed", default="fixed:3x1", help="a fixed draft for comparison")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="folder for the files that are made")
    args = parser.parse_args()
    for kind in args.types:
        if kind not in llama.FILE_TYPES:
            parser.error(f"{kind!r} is none of {', '.join(llama.FILE_TYPES)}")
    print(markdown_head("target", "MB", "T(1) ms", *(f"T({n})/T(1)" for n in SIZES),
                        "drafter ms", "plain tokens/s", "auto tokens/s", "auto / plain",
                        f"{args.fixed} / plain", "accepted length"))  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="localspec-") as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        line(Path(args.target), args)
        if args.types:
            whole = folder / "f32.gguf"
            if not whole.exists():
                dequantize.main(str(args.target), str(whole))
        for kind in args.types:
            made = folder / f"{kind}.gguf"
            if not made.exists():
                llama.quantize(whole, made, kind, n_threads=args.threads)
            line(made, args)


def line(target: Path, args: argparse.Namespace) -> None:
    """Measure one target and print its line."""
    settings = [PLAIN, AUTO, *parse_settings(args.fixed, depths=7)]
    with Engine.load(target, args.drafter, n_ctx=2048, n_threads=args.threads) as engine:
        tuning = engine.tune(force=True)
        report = run(
            engine,
            [read(name, args.prompts) for name in args.files],
            settings,
            temperatures=(args.temp,),
            max_tokens=args.tokens,
            repeats=args.repeats,
        )
        name = engine.model.description
    figures = {s.name: [r.settings[s.name] for r in report.runs] for s in settings}
    speed = {k: geometric_mean(f.tokens_per_second for f in v) for k, v in figures.items()}
    ratio = {k: geometric_mean(f.ratio or 0.0 for f in v) for k, v in figures.items()}
    lengths = [f.accepted_length for f in figures[args.fixed]]
    print(
        markdown_row([
            name, f"{target.stat().st_size / 1e6:.0f}", f"{1e3 * at(tuning, 1):.2f}",
            *(f"{at(tuning, n) / at(tuning, 1):.2f}" for n in SIZES),
            f"{1e3 * tuning.block_seconds:.1f}",
            f"{speed['plain']:.1f}", f"{speed['auto']:.1f}", f"{ratio['auto']:.3f}",
            f"{ratio[args.fixed]:.3f}", f"{sum(lengths) / len(lengths):.2f}",
        ]),
        flush=True,
    )  # fmt: skip


def at(tuning: Tuning, n: int) -> float:
    """Seconds of a pass over n tokens, at the shallow depth."""
    return tuning.seconds[0][tuning.sizes.index(n)]


if __name__ == "__main__":
    main()
