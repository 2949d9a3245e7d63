"""localspec against llama.cpp's own `draft-dspark`, on the same files, threads and prompts.

    python benchmarks/against_llama_cpp.py --llama-bin DIR [--prompts 4] [--draft-tokens 7]

DIR holds `llama-speculative-simple`, built from the llama.cpp that llama-cpp-python carries (see
docs/benchmarks.md). The two run turn by turn on every prompt; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

from common import PROMPT_FILES, first_turns, median, pair_parser, rendered
from localspec.engine import DraftOptions, Engine


def main() -> None:
    """Print a line per prompt and the ratio of the medians."""
    parser = pair_parser(__doc__, prompts=2)
    parser.set_defaults(threads=2)
    parser.add_argument("--llama-bin", type=Path, required=True)
    parser.add_argument("--draft-tokens", type=int, default=7)
    args = parser.parse_args()
    draft = DraftOptions(tokens=args.draft_tokens)
    ours, theirs, ratios, host, same = [], [], [], [], 0
    with Engine.load(args.target, args.drafter, n_ctx=2048, n_threads=args.threads) as engine:
        contents = [c for name in PROMPT_FILES for c in first_turns(name, args.prompts)]
        for content in contents:
            prompt = rendered(engine, content)
            result = engine.complete(prompt, max_tokens=args.tokens, draft=draft)
            speed, rounds, text = run_llama_cpp(args, prompt)
            host += [1e3 * r.seconds.host for r in result.rounds]
            ours.append(result.tokens_per_second)
            theirs.append(speed)
            ratios.append(ours[-1] / speed)
            same += text.startswith(result.text[:200])
            print(
                f"ours {ours[-1]:6.1f} tokens/s in {len(result.rounds):3d} rounds   "
                f"llama.cpp {speed:6.1f} tokens/s in {rounds:3d} rounds   ratio {ratios[-1]:.2f}",
                flush=True,
            )
    print(f"median: ours {median(ours):.1f}, llama.cpp {median(theirs):.1f} tokens/s")
    print(
        f"ratio of medians {median(ours) / median(theirs):.3f}, median ratio {median(ratios):.3f}"
    )
    print(f"host time per round: median {median(host):.2f} ms; same text {same} of {len(contents)}")


def run_llama_cpp(args: argparse.Namespace, prompt: str) -> tuple[float, int, str]:
    """One run of llama-speculative-simple: (tokens per second, rounds, text)."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt + "\n")  # llama.cpp takes one line break off a file's end
        file.flush()
        command = [
            args.llama_bin / "llama-speculative-simple", "-m", args.target, "-md", args.drafter,
            "--spec-type", "draft-dspark", "--spec-draft-n-max", args.draft_tokens, "-f", file.name,
            "-n", args.tokens, "--temp", 0, "--no-escape", "-t", args.threads, "-c", 2048,
        ]  # fmt: skip
        out = subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True)
    log = out.stdout + out.stderr
    decoded = re.search(r"decoded\s+\d+ tokens in\s+[\d.]+ seconds, speed:\s+([\d.]+)", log)
    drafted = re.search(r"n_drafted = (\d+)", log)
    if decoded is None or drafted is None:
        raise SystemExit(f"llama-speculative-simple printed something else:\n{log[-2000:]}")
    text = out.stdout.split("assistant\n", 1)[-1].lstrip("\n")
    return float(decoded[1]), int(drafted[1]) // args.draft_tokens, text


if __name__ == "__main__":
    main()
