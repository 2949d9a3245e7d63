"""Two drafters for one target, interleaved: tokens/s and accepted length at fixed trees.

    python benchmarks/drafters.py OLD.gguf NEW.gguf [--trees 3 7] [--prompts 2] [--tokens 96]

Every prompt is answered greedily by every drafter at every tree size, and plainly, one after the
other; ratios are medians over prompts of NEW against OLD on the same prompt.
"""

from __future__ import annotations

from common import PROMPT_FILES, accepted_length, first_turns, median, pair_parser, rendered
from localspec.engine import DraftOptions, Engine, Result


def main() -> None:
    """Print a line per prompt file and tree size."""
    parser = pair_parser(__doc__, prompts=2)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--trees", type=int, nargs="+", default=[3, 7])
    args = parser.parse_args()
    engines = [
        Engine.load(args.target, drafter, n_ctx=2048, n_threads=args.threads)
        for drafter in (args.old, args.new)
    ]
    sizes = {n: DraftOptions(tokens=n, width=4, context=False) for n in args.trees}
    plain = DraftOptions(tokens=0)
    names = ("file", "tree", "old", "new", "ratio", "old/plain", "new/plain", "len old", "len new")
    print("".join(f"{name:>10s}" for name in (*names, "ratio")))
    everything: dict[int, list[tuple[float, float, float]]] = {n: [] for n in sizes}
    for file in PROMPT_FILES:
        found: dict[int, list[tuple[Result, Result, Result]]] = {n: [] for n in sizes}
        for content in first_turns(file, args.prompts):
            prompt = engines[0].tokenize(rendered(engines[0], content))
            for engine in engines:  # the prompt is evaluated once, before anything is timed
                engine.complete(prompt, max_tokens=4, draft=plain)
            for n, draft in sizes.items():
                turns = ((engines[0], plain), (engines[0], draft), (engines[1], draft))
                unaided, old, new = (
                    engine.complete(prompt, max_tokens=args.tokens, draft=how)
                    for engine, how in turns
                )
                found[n].append((unaided, old, new))
        for n, rows in found.items():
            speeds = [[one.tokens_per_second for one in row] for row in rows]
            lengths = [accepted_length([row[k] for row in rows]) for k in (1, 2)]
            everything[n] += [(new / old, new / base, old / base) for base, old, new in speeds]
            old, new = (median(row[k] for row in speeds) for k in (1, 2))
            cells = (
                old, new, median(row[2] / row[1] for row in speeds),
                median(row[1] / row[0] for row in speeds),
                median(row[2] / row[0] for row in speeds),
                *lengths, lengths[1] / lengths[0],
            )  # fmt: skip
            print(f"{file:>10s}{n:10d}" + "".join(f"{cell:10.2f}" for cell in cells), flush=True)
    for n, ratios in everything.items():
        faster, of_plain, _ = (median(r[k] for r in ratios) for k in range(3))
        print(f"all        {n:5d}: new/old {faster:.2f}, new/plain {of_plain:.2f}")


if __name__ == "__main__":
    main()
