"""The same prompt decoded plainly and speculatively: speeds, and whether the text is the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from localspec.drafting import DraftOptions
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.sampling import SamplingParams, adjust
from localspec.steps import Result

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt.

    Attributes:
        plain: decoded plainly.
        fast: with speculation.
        parts_at: index of the first token that differs; None when all are the same.
        words: the two words that differ there.
        gap: how far the logits of these two tokens lie apart there; None when sampled.
    """

    plain: Result
    fast: Result
    parts_at: int | None = None
    words: tuple[str, str] = ("", "")
    gap: float | None = None

    def __str__(self) -> str:
        old, new = self.plain.tokens_per_second, self.fast.tokens_per_second
        lines = [
            f"plain        {old:7.1f} tokens/s",
            f"speculative  {new:7.1f} tokens/s  accepted length {self.fast.tau:.2f}"
            + (f"  {new / old:.2f} times as fast" if old else ""),
        ]
        if self.parts_at is None:
            lines.append(f"same text, token for token ({len(self.plain.token_ids)} tokens)")
        else:
            a, b = (repr(w) for w in self.words)
            line = f"the texts part at token {self.parts_at + 1}: {a} and {b}"
            if self.gap is not None:
                line += f", whose logits are {self.gap:.3f} apart there (rounding)"
            lines.append(line)
        return "\n".join(lines)


def compare(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams | None,
    draft: DraftOptions | None,
    *,
    max_tokens: int | None = None,
    progress: Progress = lambda _: None,
) -> Comparison:
    """Decode a prompt twice. The conversation is not touched, only the KV cache.

    Sampled texts are compared with one seed and the match rule, under which the same draws give
    the same text.

    Args:
        engine: what answers.
        prompt: token ids.
        params: sampling.
        draft: drafting; the policy's when None or when it means plain decoding.
        max_tokens: most tokens of each answer.
        progress: called with a line to show after every step.

    Raises:
        LocalspecError: one of the two was cancelled, or the prompt does not fit.
    """
    params = params or SamplingParams()
    if params.temperature > 0:
        seed = 0 if params.seed is None else params.seed
        params = replace(params, seed=seed, acceptance="match")
    if draft is None or draft.tokens == 0:
        draft = DraftOptions.auto()

    def run(what: str, how: DraftOptions) -> Result:
        result = Result()
        steps = engine.generate(prompt, params, max_tokens=max_tokens, draft=how)
        with contextlib.closing(steps):
            for step in steps:
                result.add(step)
                progress(f"{what}: {len(result.token_ids)} tokens")
        if result.finish_reason == "cancelled":
            raise LocalspecError("stopped; there is nothing to compare")
        return result

    plain = run("plain", DraftOptions(tokens=0))
    fast = run("speculative", draft)
    at = first_difference(plain.token_ids, fast.token_ids)
    if at is None:
        return Comparison(plain, fast)
    pair = [ids[at] if at < len(ids) else None for ids in (plain.token_ids, fast.token_ids)]
    words = tuple("(end)" if t is None else engine.model.text([t], special=True) for t in pair)
    gap = None
    if params.temperature == 0 and None not in pair:
        before = [*prompt, *plain.token_ids[:at]]
        engine.complete(before, max_tokens=1, draft=DraftOptions(tokens=0))
        z = adjust(engine.last_logits, params, before)
        gap = float(np.abs(z[pair[0]] - z[pair[1]]))
    return Comparison(plain, fast, at, (words[0], words[1]), gap)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ; None when they are the same."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
