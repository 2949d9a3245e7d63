"""The auto policy against plain decoding, turn by turn in one run.

python benchmarks/never_slower.py [--prompts 4] [--temp 0]
"""

from __future__ import annotations

from common import PROMPT_FILES, accepted_length, first_turns, median, pair_parser, rendered
from localspec.engine import DraftOptions, Engine
from localspec.sampling import SamplingParams


def main() -> None:
    """Print speeds, their ratio and the accepted length per prompt file."""
    parser = pair_parser(__doc__, prompts=4)
    parser.add_argument("--temp", type=float, default=0.0)
    args = parser.parse_args()
    every = []
    with Engine.load(args.target, args.drafter, n_ctx=2048, n_threads=args.threads) as engine:
        engine.tune()
        for file in PROMPT_FILES:
            ratios, plain_speed, auto_speed, results = [], [], [], []
            for seed, content in enumerate(first_turns(file, args.prompts)):
                prompt = engine.tokenize(rendered(engine, content))
                params = SamplingParams(temperature=args.temp, seed=seed)
                speed = {}
                for name, draft in (
                    ("plain", DraftOptions(tokens=0)),
                    ("auto", DraftOptions.auto()),
                    ("plain again", DraftOptions(tokens=0)),
                ):
                    result = engine.complete(prompt, params, max_tokens=args.tokens, draft=draft)
                    speed[name] = result.tokens_per_second
                    if name == "auto":
                        results.append(result)
                plain_speed.append((speed["plain"] + speed["plain again"]) / 2)
                auto_speed.append(speed["auto"])
                ratios.append(auto_speed[-1] / plain_speed[-1])
            every += ratios
            print(
                f"{file:10s} plain {median(plain_speed):6.1f}  auto {median(auto_speed):6.1f} "
                f"tokens/s  ratio {median(ratios):.3f} ({min(ratios):.2f}..{max(ratios):.2f})  "
                f"accepted length {accepted_length(results):.2f}",
                flush=True,
            )
    print(f"median ratio of all {median(every):.3f}")


if __name__ == "__main__":
    main()
