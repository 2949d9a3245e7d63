"""What the benchmarks share: prompt files, interleaving, medians."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from localspec import pairs
from localspec.chat import chat_template
from localspec.engine import Engine, Result

PROMPT_FILES = ("gsm8k", "humaneval", "mbpp", "math500", "mt-bench")


def prompt_dir() -> Path:
    """Folder of prompt files: $LOCALSPEC_PROMPTS, else ../shared/prompts beside the repository."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "prompts"
    return Path(os.environ.get("LOCALSPEC_PROMPTS", default))


def pair_parser(about: str | None, *, prompts: int) -> argparse.ArgumentParser:
    """The options every benchmark on a pair and the prompt files has.

    Args:
        about: the benchmark's docstring.
        prompts: default number of prompts per file.
    """
    target, drafter = pairs.default_pair()
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--target", default=target)
    parser.add_argument("--drafter", default=drafter)
    parser.add_argument("--prompts", type=int, default=prompts, help="prompts per file")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0)
    return parser


def first_turns(name: str, count: int) -> list[str]:
    """The first turns of the first `count` lines of a prompt file ({"turns": [...]} lines)."""
    lines = (prompt_dir() / f"{name}.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:count]]


def rendered(engine: Engine, content: str) -> str:
    """A user message in the target's chat template."""
    return chat_template(engine).render([{"role": "user", "content": content}])


def median(values: Iterable[float]) -> float:
    """The median; 0 of nothing."""
    ordered = list(values)
    return statistics.median(ordered) if ordered else 0.0


def accepted_length(results: Sequence[Result]) -> float:
    """Tokens committed per round over several answers, the bonus token included."""
    tokens = sum(len(r.token_ids) - 1 for r in results)
    rounds = sum(len(r.rounds) for r in results)
    return tokens / rounds if rounds else 0.0
