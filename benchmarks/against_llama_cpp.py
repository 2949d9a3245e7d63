"""auto against plain, fixed drafts and llama.cpp's own `draft-dspark`, interleaved, per file.

    python benchmarks/against_llama_cpp.py --llama-bin DIR [--prompts 2] [--tokens 512]

DIR holds `llama-speculative-simple` and `llama-completion`, built from the llama.cpp that
llama-cpp-python carries (see docs/benchmarks.md); without it only our own settings run. This is
`localspec bench` with a wide sweep; --sweep names another one, as `localspec bench --against` does.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from common import PROMPT_FILES, markdown_head, markdown_row, pair_parser, read
from localspec.bench.peer import Peer, find_programs
from localspec.bench.report import GROUPS, run_table, summary_table
from localspec.bench.run import Run, run
from localspec.bench.settings import AUTO, PLAIN, parse_settings
from localspec.bench.stats import geometric_mean
from localspec.engine import Engine

FIXED = "fixed:1x1,fixed:2x1,fixed:3x1,fixed:5x1,fixed:7x1,fixed:2x2,fixed:3x2,fixed:7x4,fixed:15x4"
PEER = "llama.cpp:0,llama.cpp:1,llama.cpp:1@0.5,llama.cpp:2,llama.cpp:3,llama.cpp:3@0.5,"
PEER += "llama.cpp:3@0.8,llama.cpp:7,llama.cpp:7@0.5,llama.cpp:7@0.8,llama.cpp:ngram-simple,"
PEER += "llama.cpp:ngram-map-k,llama.cpp:ngram-mod,llama.cpp:ngram-cache"


def main() -> None:
    """Print a table per prompt file and, last, auto against the best of every group."""
    parser = pair_parser(__doc__, prompts=2, tokens=512)
    parser.add_argument("--llama-bin", type=Path)
    parser.add_argument("--peer-drafter", help="another drafter for llama.cpp's programs")
    parser.add_argument("--sweep", help="settings to run instead of the built-in sweep")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--files", nargs="+", default=PROMPT_FILES)
    parser.add_argument("--n-ctx", type=int, default=2048)
    args = parser.parse_args()
    names = args.sweep or (FIXED if args.llama_bin is None else f"{FIXED},{PEER}")
    settings = list(dict.fromkeys([PLAIN, AUTO, *parse_settings(names, depths=7)]))
    programs = find_programs(settings, args.llama_bin)
    peer_drafter = Path(args.peer_drafter or args.drafter)
    peer = Peer(programs, Path(args.target), peer_drafter, args.n_ctx, args.threads)
    console = Console(width=160, highlight=False, markup=False)
    with Engine.load(args.target, args.drafter, n_ctx=args.n_ctx, n_threads=args.threads) as engine:
        engine.tune()
        report = run(
            engine,
            [read(name, args.prompts) for name in args.files],
            settings,
            temperatures=(args.temp,),
            max_tokens=args.tokens,
            repeats=args.repeats,
            peer=peer,
            on_run=lambda one: console.print(run_table(one)),
        )
    console.print(summary_table(report))
    print(markdown_head("all time", *GROUPS))
    rows = [over_the_best(one) for one in report.runs]
    for one, row in zip(report.runs, rows, strict=True):
        print(markdown_row([one.prompts, *(f"{ratio:.2f} ({name})" for name, ratio in row)]))
    means = (geometric_mean([ratio for _, ratio in column]) for column in zip(*rows, strict=True))
    print(markdown_row(["geometric mean", *(f"{mean:.2f}" for mean in means)]))


def over_the_best(one: Run) -> list[tuple[str, float]]:
    """Of every group the setting that took the least time for its tokens, and auto's speed by it.

    All tokens and all time of the prompt file count, where the table before takes the median
    prompt.
    """
    speeds = {name: f.overall_speed for name, f in one.settings.items()}
    out = []
    for belongs in GROUPS.values():
        members = {name: speed for name, speed in speeds.items() if belongs(name)}
        best = max(members, key=lambda name: members[name], default="")
        out.append((best, speeds[AUTO.name] / members[best] if best else float("nan")))
    return out


if __name__ == "__main__":
    main()
