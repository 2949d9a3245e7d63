"""What the benchmarks share: the default pair's options, prompt files, tables."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from localspec import pairs
from localspec.bench import prompts, stats
from localspec.bench.prompts import PromptFile
from localspec.bench.run import sample_of
from localspec.bench.stats import median
from localspec.chat import chat_template
from localspec.engine import Engine, Result

__all__ = ["median"]

PROMPT_FILES = ("gsm8k", "humaneval", "mbpp", "math500", "mt-bench")


def prompt_dir() -> Path:
    """Folder of prompt files: $LOCALSPEC_PROMPTS, else ../shared/prompts beside the repository."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "prompts"
    return Path(os.environ.get("LOCALSPEC_PROMPTS", default))


def pair_parser(about: str | None, *, prompts: int, tokens: int = 128) -> argparse.ArgumentParser:
    """The options every benchmark on a pair and the prompt files has.

    Args:
        about: the benchmark's docstring.
        prompts: default number of prompts per file.
        tokens: default number of tokens an answer may have.
    """
    target, drafter = pairs.default_pair()
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=target)
    parser.add_argument("--drafter", default=drafter)
    parser.add_argument("--prompts", type=int, default=prompts, help="prompts per file")
    parser.add_argument("--tokens", type=int, default=tokens, help="most per answer")
    parser.add_argument("--threads", type=int, default=0)
    return parser


def read(name: str, count: int) -> PromptFile:
    """The first turns of the first `count` lines of a prompt file, as single messages."""
    found = prompts.read_prompts(prompt_dir() / f"{name}.jsonl", count)
    return PromptFile(name, [turns[:1] for turns in found.conversations])


def first_turns(name: str, count: int) -> list[str]:
    """The first turns of the first `count` lines of a prompt file ({"turns": [...]} lines)."""
    return [turns[0] for turns in read(name, count).conversations]


def rendered(engine: Engine, content: str) -> str:
    """A user message in the target's chat template."""
    return chat_template(engine).render([{"role": "user", "content": content}])


def accepted_length(results: Sequence[Result]) -> float:
    """Tokens committed per round over several answers, the bonus token included."""
    return stats.accepted_length(sample_of(r) for r in results)


def markdown_row(cells: Iterable[object]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(str(c) for c in cells) + " |"


def markdown_head(*names: str) -> str:
    """The first two lines of a Markdown table; all columns but the first are numbers."""
    return "\n".join([markdown_row(names), markdown_row(["---", *["---:"] * (len(names) - 1)])])


@contextmanager
def busy_core(wanted: bool = True) -> Iterator[None]:
    """Another process that keeps one core busy meanwhile (a certain one where that can be said)."""
    if not wanted:
        yield
        return
    spin = "import os\nif hasattr(os, 'sched_setaffinity'):\n"
    spin += "    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        process.kill()
        process.wait()
