"""A console program to freeze: answers one question with the default pair, or with given files.

python examples/pyinstaller/ask.py "Why is the sky blue?" [TARGET.gguf [DRAFTER.gguf]]
"""

from __future__ import annotations

import sys
import time

from localspec import Chat, Engine, LocalspecError
from localspec.pairs import default_pair


def main(question: str, *files: str) -> None:
    """Print the answer, and what it took."""
    started = time.perf_counter()
    target, drafter = (*files, None)[:2] if files else default_pair()
    with Engine.load(target, drafter, n_ctx=2048) as engine:
        ready = time.perf_counter() - started
        chat = Chat(engine)
        for step in chat.send(question, max_tokens=64):
            print(step.text, end="", flush=True)
        speed = chat.last.tokens_per_second if chat.last else 0.0
        print(f"\n[loaded in {ready:.1f} s, {speed:.0f} tokens/s]", file=sys.stderr)


if __name__ == "__main__":
    try:
        main(*(sys.argv[1:4] or ["Name three rivers in Europe."]))
    except LocalspecError as e:
        sys.exit(f"error: {e}")
