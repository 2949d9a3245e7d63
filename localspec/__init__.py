"""localspec: fast local LLM inference for one person on one machine.

from localspec import Engine, SamplingParams

with Engine.load("target.gguf", drafter="drafter.gguf") as engine:
    for step in engine.generate("Once upon a time", SamplingParams(seed=1), max_tokens=64):
        print(step.text, end="", flush=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from localspec._version import __version__
from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.chat import Chat
    from localspec.engine import DraftOptions, Engine, Prefill, Result, Round, Seconds, Step
    from localspec.finding import fetch
    from localspec.grammar import Grammar
    from localspec.memory import MemoryEstimate, estimate
    from localspec.sampling import SamplingParams
    from localspec.steps import TokenLogprobs

# Loaded when first used, so that `import localspec` costs next to nothing.
_LAZY = {
    "Chat": "localspec.chat",
    "DraftOptions": "localspec.engine",
    "Engine": "localspec.engine",
    "Grammar": "localspec.grammar",
    "MemoryEstimate": "localspec.memory",
    "Prefill": "localspec.engine",
    "Result": "localspec.engine",
    "Round": "localspec.engine",
    "SamplingParams": "localspec.sampling",
    "Seconds": "localspec.engine",
    "Step": "localspec.engine",
    "TokenLogprobs": "localspec.steps",
    "estimate": "localspec.memory",
    "fetch": "localspec.finding",
}

__all__ = [
    "Chat",
    "DraftOptions",
    "Engine",
    "Grammar",
    "LocalspecError",
    "MemoryEstimate",
    "Prefill",
    "Result",
    "Round",
    "SamplingParams",
    "Seconds",
    "Step",
    "TokenLogprobs",
    "__version__",
    "estimate",
    "fetch",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'localspec' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
