"""Deep in a context: accepted length, drafter pass and tokens/s, with and without drafter window.

    python benchmarks/long_context.py [--depths 512 2048 7000] [--windows 4096 0] [--prompts 2]

A prompt is a long user message: questions of the prompt files one after the other, cut to the
depth, and at its end one of them to answer. Window 0 lets the drafter see everything. `chain` is a
fixed chain of --draft-tokens, which shows what the drafter is worth at that depth; `auto` is what
users get. Evaluating the prompts takes most of the time: depth x prompts x windows tokens. A window
that is larger than a depth changes nothing there, so only the first of those is run.
"""

from __future__ import annotations

from collections.abc import Sequence

from common import PROMPT_FILES, first_turns, markdown_head, markdown_row, pair_parser, rendered
from localspec.bench.prompts import PromptFile
from localspec.bench.run import run
from localspec.bench.settings import AUTO, PLAIN, parse_settings
from localspec.drafter import DRAFTER_WINDOW
from localspec.engine import Engine

TASK = "\n\nAnswer only this last one, step by step: "


def main() -> None:
    """Print one table: a line per depth and window."""
    parser = pair_parser(__doc__, prompts=2)
    parser.add_argument("--depths", type=int, nargs="+", default=[512, 2048, 7000])
    parser.add_argument("--windows", type=int, nargs="+", default=[DRAFTER_WINDOW, 0])
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    settings = [PLAIN, AUTO, *parse_settings(f"fixed:{args.draft_tokens}x1", depths=7)]
    print(markdown_head("context", "window", "plain tokens/s", "auto tokens/s", "auto / plain",
                        "chain tokens/s", "chain / plain", "accepted length (chain)",
                        "accepted length (auto)", "drafter pass ms", "verify ms (chain)",
                        "memory MB"))  # fmt: skip
    for depth in args.depths:
        n_ctx = depth + args.tokens + 64
        windows = [min(w or n_ctx, n_ctx) for w in args.windows]
        for window in dict.fromkeys(w if w < depth else n_ctx for w in windows):
            with Engine.load(
                args.target,
                args.drafter,
                n_ctx=n_ctx,
                n_threads=args.threads,
                drafter_window=window,
            ) as engine:
                engine.tune()
                file = PromptFile(f"{depth} tokens", long_prompts(engine, depth, args.prompts))
                report = run(
                    engine,
                    [file],
                    settings,
                    temperatures=(args.temp,),
                    max_tokens=args.tokens,
                    repeats=args.repeats,
                )
            (one,) = report.runs
            plain, auto, chain = one.settings.values()
            parts = chain.milliseconds_per_round or {"draft": 0.0, "verify": 0.0}
            print(
                markdown_row([
                    depth, window if window < n_ctx else "all",
                    f"{plain.tokens_per_second:.1f}", f"{auto.tokens_per_second:.1f}",
                    f"{auto.ratio:.3f}", f"{chain.tokens_per_second:.1f}", f"{chain.ratio:.3f}",
                    f"{chain.accepted_length:.2f}", f"{auto.accepted_length:.2f}",
                    f"{parts['draft']:.1f}", f"{parts['verify']:.1f}",
                    f"{(one.peak_memory or 0) / 1e6:.0f}",
                ]),
                flush=True,
            )  # fmt: skip


def long_prompts(engine: Engine, depth: int, count: int) -> list[list[str]]:
    """User messages that render to about `depth` tokens (at most), each with its own texts."""
    texts = [t for name in PROMPT_FILES for t in first_turns(name, 40)]
    return [[_long(engine, texts[i::count], depth)] for i in range(count)]


def _long(engine: Engine, texts: Sequence[str], depth: int) -> str:
    question = TASK + texts[0]
    tokens: list[int] = []
    for i in range(depth):  # when the texts run out they come again
        if len(tokens) >= depth:
            break
        tokens += engine.model.tokenize(texts[1 + i % (len(texts) - 1)] + "\n\n")
    room = depth
    while room > 0:
        message = engine.model.text(tokens[:room]) + question
        # Cut and joined, text does not give the tokens it was made of.
        excess = len(engine.tokenize(rendered(engine, message))) - depth
        if excess <= 0:
            return message
        room -= excess
    return question


if __name__ == "__main__":
    main()
