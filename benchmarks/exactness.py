"""Is speculative output the target's own? Compares greedy decoding with and without a drafter.

    python benchmarks/exactness.py [--target T.gguf] [--drafter D.gguf] [--noise 0.75]

Where the two differ, the target's top-2 gap at the first difference is measured in a fresh
context: passes of different sizes round differently, and a difference is only the method's fault
where the gap is larger than that noise.
"""

from __future__ import annotations

import numpy as np

from common import PROMPT_FILES, accepted_length, first_turns, pair_parser, rendered
from localspec.engine import DraftOptions, Engine

PLAIN = DraftOptions(tokens=0)


def main() -> None:
    """Print one line per prompt file and one per difference."""
    parser = pair_parser(__doc__, prompts=8)
    parser.add_argument("--noise", type=float, default=0.75)
    parser.add_argument("--draft-tokens", type=int, default=7)
    parser.add_argument("--width", type=int, default=1)
    args = parser.parse_args()
    draft = DraftOptions(tokens=args.draft_tokens, width=args.width)
    runs = different = unexplained = 0
    # Two engines: neither sees a KV cache that the other's pass sizes have rounded.
    with (
        Engine.load(args.target, n_ctx=2048, n_threads=args.threads) as plain,
        Engine.load(args.target, args.drafter, n_ctx=2048, n_threads=args.threads) as fast,
    ):
        for name in PROMPT_FILES:
            results = []
            for content in first_turns(name, args.prompts):
                prompt = plain.tokenize(rendered(plain, content))
                expected = plain.complete(prompt, max_tokens=args.tokens, draft=PLAIN).token_ids
                result = fast.complete(prompt, max_tokens=args.tokens, draft=draft)
                results.append(result)
                runs += 1
                if result.token_ids == expected:
                    continue
                different += 1
                at, gap = first_difference(plain, prompt, expected, result.token_ids)
                explained = gap <= args.noise
                unexplained += not explained
                print(f"  {name}: differs at token {at}, top-2 gap {gap:.3f}"
                      f"{'' if explained else '  <-- not explained by rounding'}")  # fmt: skip
            print(f"{name}: accepted length {accepted_length(results):.2f}", flush=True)
    print(f"{different} of {runs} runs differ, {unexplained} beyond the noise of {args.noise}")


def first_difference(
    engine: Engine, prompt: list[int], expected: list[int], got: list[int]
) -> tuple[int, float]:
    """Where two outputs part, and the gap between the two tokens' logits there."""
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b),
        min(len(expected), len(got)),
    )
    engine.complete(prompt + expected[:at], max_tokens=1, draft=PLAIN)
    top = np.sort(engine.last_logits)[-2:]
    return at, float(top[1] - top[0])


if __name__ == "__main__":
    main()
