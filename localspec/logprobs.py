"""Log probabilities of generated tokens. Pure numpy; no model in here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localspec.steps import TokenLogprobs
from localspec.topk import shortlist


def token_logprobs(logits: npt.NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    """The log probability of a token and the most likely alternatives.

    Args:
        logits: [V] the target's, as they come out of it.
        token: the token that was chosen.
        top: how many of the most likely tokens to list (the chosen one is among them only if it
            belongs there); at most V.

    Returns:
        log softmax of the logits; equal values in rising order of token id.
    """
    peak = float(logits.max())
    # The sum over a large vocabulary must not lose the tail.
    norm = peak + float(np.log(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    best: Sequence[int] = ()
    if top > 0:
        few = shortlist(logits, top)
        best = few[np.argsort(-logits[few], kind="stable")[:top]].tolist()
    return TokenLogprobs(
        token, float(logits[token]) - norm, tuple((t, float(logits[t]) - norm) for t in best)
    )


def path_logprobs(
    logits: npt.NDArray[np.float32], rows: Sequence[int], tokens: Sequence[int], top: int
) -> tuple[TokenLogprobs, ...]:
    """`token_logprobs` along a path: token i was chosen from row `rows[i]` of the logits."""
    return tuple(token_logprobs(logits[r], t, top) for r, t in zip(rows, tokens, strict=True))
