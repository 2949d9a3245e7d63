"""The auto policy against plain decoding, turn by turn in one run.

    python benchmarks/never_slower.py [--prompts 4] [--tokens 512] [--temp 0] [--repeats 2]
    python benchmarks/never_slower.py --busy-core
    python benchmarks/never_slower.py --drafter useless.gguf

--busy-core keeps one core busy with another process meanwhile; useless_drafter.py writes a drafter
of random weights. `ratio` is the median over the prompts, `all time` that of all tokens and all
time of the file. Answers go on to their end or to --tokens; repeats, which is what a context branch
lives on, come late in an answer.
"""

from __future__ import annotations

import contextlib

from common import PROMPT_FILES, busy_core, markdown_head, markdown_row, pair_parser, read
from localspec.bench.run import run
from localspec.bench.settings import AUTO, PLAIN
from localspec.bench.stats import geometric_mean
from localspec.engine import Engine


def main() -> None:
    """Print speeds, their ratio and the accepted length per prompt file."""
    parser = pair_parser(__doc__, prompts=4, tokens=512)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--files", nargs="+", default=PROMPT_FILES)
    parser.add_argument("--busy-core", action="store_true")
    args = parser.parse_args()
    ratios, overall = [], []
    print(markdown_head("prompts", "plain", "auto", "ratio", "lowest", "all time",
                        "accepted length", "verified/round"))  # fmt: skip
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(
            Engine.load(args.target, args.drafter, n_ctx=2048, n_threads=args.threads)
        )
        engine.tune()  # on the quiet machine: that it gets busy must be noticed
        stack.enter_context(busy_core(args.busy_core))
        for name in args.files:
            report = run(
                engine,
                [read(name, args.prompts)],
                [PLAIN, AUTO],
                temperatures=(args.temp,),
                max_tokens=args.tokens,
                repeats=args.repeats,
            )
            (one,) = report.runs
            plain, auto = one.settings["plain"], one.settings["auto"]
            assert auto.ratio is not None
            assert auto.ratio_range is not None
            ratios.append(auto.ratio)
            overall.append(auto.overall_speed / plain.overall_speed)
            print(
                markdown_row([
                    name, f"{plain.tokens_per_second:.1f}", f"{auto.tokens_per_second:.1f}",
                    f"{auto.ratio:.3f}", f"{auto.ratio_range[0]:.2f}",
                    f"{overall[-1]:.3f}",
                    f"{auto.accepted_length:.2f}", f"{auto.verified_per_round:.2f}",
                ]),
                flush=True,
            )  # fmt: skip
    print(
        f"geometric mean {geometric_mean(ratios):.3f}, lowest {min(ratios):.3f}; "
        f"all time: {geometric_mean(overall):.3f}, lowest {min(overall):.3f}"
    )


if __name__ == "__main__":
    main()
