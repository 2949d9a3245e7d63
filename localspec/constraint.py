"""What a grammar does to drafts and distributions. Pure numpy; no model in here.

The grammar comes first: tokens that it forbids leave the target's distribution, and the drafter's,
before penalties, truncation and temperature. Asking a grammar about a whole vocabulary is slow, so
the likeliest tokens are asked about first, and all of them only where those do not decide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from localspec.errors import DeadEndError
from localspec.topk import shortlist, top_k

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
S = TypeVar("S", bound="State")

# Tokens asked about first; asking costs less than a microsecond each.
FEW = 256


class State(Protocol):
    """Where in a grammar a text has come to."""

    def allows(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> Bools:
        """[n] whether each of some tokens may come next."""
        ...

    def after(self: S, token: int) -> S:
        """The state after one more token, which must be allowed."""
        ...

    def detach(self: S) -> S:
        """This state, with what came before it forgotten."""
        ...


def walk(state: S, tokens: Sequence[int]) -> S:
    """The state after some more tokens, all allowed."""
    for token in tokens:
        state = state.after(token)
    return state


def prefix(state: State, tokens: Sequence[int]) -> int:
    """How many of some tokens, from the first one on, may come one after another."""
    for n, token in enumerate(tokens):
        if not state.allows([token])[0]:
            return n
        state = state.after(token)
    return len(tokens)


def best(logits: Floats, state: State) -> int:
    """The allowed token with the largest logit (the first of equal ones).

    Args:
        logits: [V].
        state: what decides.

    Raises:
        DeadEndError: nothing is allowed.
    """
    likeliest = int(logits.argmax())
    if state.allows([likeliest])[0]:
        return likeliest
    few = shortlist(logits, FEW)
    few = few[state.allows(few)]
    if not len(few):
        return int(masked(logits, state.allows(np.arange(len(logits)))).argmax())
    return int(few[logits[few].argmax()])  # the shortlist rises, so ties go to the first


def masked(logits: Floats, allowed: Bools) -> Floats:
    """Logits [V] with -inf where a token is not `allowed`.

    Raises:
        DeadEndError: nothing is allowed.
    """
    if not allowed.any():
        raise DeadEndError(
            "the answer cannot go on: the grammar allows none of the model's tokens after what was "
            "said; change what must come next there"
        )
    return np.where(allowed, logits, np.float32(-np.inf))


def restrict(logits: Floats, state: State, *, top_k: int, top_p: float, min_p: float) -> Floats:
    """Logits from which the truncated distribution over allowed tokens follows exactly.

    Every allowed token is kept, except where the likeliest tokens prove that the others would be
    cut by top-k, top-p or min-p in any case: then only those are asked about.

    Args:
        logits: [V], penalties applied.
        state: what decides.
        top_k, top_p, min_p: as in `SamplingParams`.

    Returns:
        [V] with -inf at the tokens left out.

    Raises:
        DeadEndError: nothing is allowed.
    """
    if top_k > 0 or top_p < 1 or min_p > 0:
        few = shortlist(logits, max(FEW, 2 * top_k))
        kept = few[state.allows(few)]
        if len(kept) and _decided(logits, few, kept, top_k, top_p, min_p):
            out = np.full(len(logits), -np.inf, np.float32)
            out[kept] = logits[kept]
            return out
    return masked(logits, state.allows(np.arange(len(logits))))


def _decided(
    logits: Floats,
    few: npt.NDArray[np.intp],
    kept: npt.NDArray[np.intp],
    top_k: int,
    top_p: float,
    min_p: float,
) -> bool:
    """Whether the tokens outside `few` cannot enter the distribution, allowed or not.

    Args:
        logits: [V].
        few: the likeliest tokens.
        kept: the allowed ones of them.
    """
    if len(few) == len(logits) or 0 < top_k <= len(kept):
        return True
    values = np.sort(logits[kept])[::-1].astype(np.float64)
    if top_p < 1:
        # The mass of the allowed tokens is between that of `kept` and that with all others.
        peak = values[0]
        weights = np.exp(values - peak)
        reached = np.cumsum(weights)
        others = np.exp(logits.astype(np.float64) - peak)
        others[few] = 0.0
        least = top_p * reached[-1] * (1 - 1e-6)
        most = top_p * (reached[-1] + others.sum()) * (1 + 1e-6)
        before = reached - weights
        return bool(most <= reached[-1] and (before < least).sum() == (before < most).sum())
    if min_p > 0:
        return bool(values[0] + math.log(min_p) > logits[few].min())
    return False


def forbid(
    log_pi: Floats,
    candidates: npt.NDArray[np.integer],
    states: Sequence[State],
    children: int,
) -> Floats:
    """A drafter's distributions without forbidden tokens.

    A parent whose likeliest children are all allowed keeps its row; the others lose the forbidden
    tokens and are normalised again over those candidates that are left.

    Args:
        log_pi: [P, C] log probabilities of the candidates after each parent.
        candidates: [C] tokens.
        states: [P] where each parent is.
        children: how many of each row will be asked for.

    Returns:
        [P, C]; -inf at forbidden tokens.
    """
    out = log_pi.copy()
    likeliest, _ = top_k(log_pi, children)
    for row, state, first in zip(out, states, likeliest, strict=True):
        if state.allows(candidates[first]).all():
            continue
        allowed = state.allows(candidates)
        row[~allowed] = -np.inf
        if allowed.any():
            left = row[allowed]
            peak = left.max()
            row[allowed] = np.minimum(left - peak - np.log(np.exp(left - peak).sum()), 0.0)
    return out
