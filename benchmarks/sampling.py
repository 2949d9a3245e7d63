"""Accepted length of the acceptance rules when sampling.

    python benchmarks/sampling.py [--prompts 4] [--temp 1.0]

llama.cpp's own speculation is the match rule on a chain; that is the line to compare with.
"""

from __future__ import annotations

from common import PROMPT_FILES, accepted_length, first_turns, pair_parser, rendered
from localspec.engine import DraftOptions, Engine
from localspec.sampling import SamplingParams

SETTINGS = {
    "match chain 7": ("match", DraftOptions(tokens=7, width=1)),
    "reject chain 7": ("rejection", DraftOptions(tokens=7, width=1)),
    "match tree 7": ("match", DraftOptions(tokens=7, width=4)),
    "reject tree 7": ("rejection", DraftOptions(tokens=7, width=4)),
    "match tree 15": ("match", DraftOptions(tokens=15, width=4)),
    "reject tree 15": ("rejection", DraftOptions(tokens=15, width=4)),
    "match tree 31": ("match", DraftOptions(tokens=31, width=4)),
    "reject tree 31": ("rejection", DraftOptions(tokens=31, width=8)),
}


def main() -> None:
    """Print accepted lengths per prompt file and setting."""
    parser = pair_parser(__doc__, prompts=4)
    parser.add_argument("--temp", type=float, default=1.0)
    args = parser.parse_args()
    print(f"{'':10s} " + " ".join(f"{name:>14s}" for name in SETTINGS))
    every: dict[str, list] = {name: [] for name in SETTINGS}
    with Engine.load(args.target, args.drafter, n_ctx=2048, n_threads=args.threads) as engine:
        for file in PROMPT_FILES:
            results: dict[str, list] = {name: [] for name in SETTINGS}
            for seed, content in enumerate(first_turns(file, args.prompts)):
                prompt = engine.tokenize(rendered(engine, content))
                for name, (acceptance, draft) in SETTINGS.items():
                    params = SamplingParams(temperature=args.temp, seed=seed, acceptance=acceptance)
                    result = engine.complete(prompt, params, max_tokens=args.tokens, draft=draft)
                    results[name].append(result)
            show(file, results)
            for name, more in results.items():
                every[name] += more
    show("all", every)


def show(label: str, results: dict[str, list]) -> None:
    """One line of the table."""
    values = " ".join(f"{accepted_length(r):14.3f}" for r in results.values())
    print(f"{label:10s} {values}", flush=True)


if __name__ == "__main__":
    main()
