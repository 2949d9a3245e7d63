"""From logits to the distribution that the user's settings define.

The order is llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature. Truncation
therefore sees the distribution at temperature 1, and the temperature reshapes what is left. What a
grammar forbids is left out before all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.constraint import State, best, restrict, walk
from localspec.errors import LocalspecError
from localspec.topk import shortlist

Floats = npt.NDArray[np.float32]


# What "auto" means; benchmarks/sampling.py has the figures.
AUTO_REJECTS = ("rejection", "auto")
# OpenAI's limits of a logit bias; the second keeps a request from costing more than its answer.
MOST_BIAS, MOST_BIASED = 100.0, 1024


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token (greedy).
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens with this much probability; 1 keeps all.
        min_p: drop tokens less likely than this fraction of the most likely; 0 keeps all.
        repetition_penalty: divide (positive) or multiply (negative) the logits of recent tokens.
        presence_penalty: subtract from the logits of recent tokens, once.
        frequency_penalty: subtract from the logits of recent tokens, per occurrence.
        penalty_window: how many of the last tokens are recent; -1 means all of them.
        seed: same seed, same text on the same machine; None draws a fresh one.
        acceptance: how drafts are accepted when the temperature is not 0: "match" (the target
            draws, a drafted token is kept when it is the one drawn), "rejection" (speculative
            sampling), or "auto", whichever measures better. All follow the target's distribution
            exactly.
        logit_bias: token id -> number from -100 to 100, added to the token's logit before anything
            else: -100 bans it, 100 leaves no other one a chance. At most 1024 tokens.

    Raises:
        LocalspecError: a value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    seed: int | None = None
    acceptance: str = "auto"
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        rules = {
            "temperature": (0.0, math.inf),
            "top_k": (0, math.inf),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repetition_penalty": (1e-6, math.inf),
            "presence_penalty": (-math.inf, math.inf),
            "frequency_penalty": (-math.inf, math.inf),
            "penalty_window": (-1, math.inf),
        }
        for name, (low, high) in rules.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise LocalspecError(f"{name} must be a number, not {value!r}")
            if name in ("top_k", "penalty_window") and not isinstance(value, int):
                raise LocalspecError(f"{name} must be a whole number, not {value:g}")
            if not (low <= value <= high and math.isfinite(value)):
                allowed = (
                    f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
                )
                raise LocalspecError(f"{name} must be {allowed}, not {value:g}")
        if self.acceptance not in ("auto", "match", "rejection"):
            raise LocalspecError(
                f"acceptance must be auto, match or rejection, not {self.acceptance!r}"
            )
        if self.seed is not None and not (isinstance(self.seed, int) and self.seed >= 0):
            raise LocalspecError(f"seed must be a whole number of at least 0, not {self.seed!r}")
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def rejects(self) -> bool:
        """Whether drafts are sampled and accepted by rejection sampling."""
        return self.temperature > 0 and self.acceptance in AUTO_REJECTS

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution depends on the tokens before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _checked_bias(given: Any) -> dict[int, float]:
    """A copy of a logit bias.

    Raises:
        LocalspecError: it is none.
    """
    if not isinstance(given, Mapping):
        raise LocalspecError(f"logit_bias must map token ids to numbers, not be {given!r:.80}")
    if len(given) > MOST_BIASED:
        raise LocalspecError(
            f"logit_bias has {len(given)} tokens; at most {MOST_BIASED} are allowed"
        )
    out = {}
    for token, value in given.items():
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or token < 0:
            raise LocalspecError(
                f"logit_bias: {token!r:.40} is no token id; ids are whole numbers from 0"
            )
        if isinstance(value, bool) or not isinstance(value, int | float | np.floating):
            raise LocalspecError(f"logit_bias: token {token} needs a number, not {value!r:.40}")
        if not -MOST_BIAS <= value <= MOST_BIAS:
            raise LocalspecError(
                f"logit_bias must be between {-MOST_BIAS:g} and {MOST_BIAS:g}, but token {token} "
                f"has {value:g}"
            )
        out[int(token)] = float(value)
    return out


def adjust(logits: Floats, params: SamplingParams, history: Sequence[int]) -> Floats:
    """Logits with the user's bias added and penalties applied: what a choice starts from.

    Args:
        logits: [V] of the target.
        history: as in `penalize`.

    Returns:
        [V]; `logits` itself when there is nothing to do.
    """
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        logits = logits.copy()
        logits[ids] += np.fromiter(params.logit_bias.values(), np.float32, len(ids))
    return penalize(logits, params, history)


def penalize(logits: Floats, params: SamplingParams, history: Sequence[int]) -> Floats:
    """Logits with repetition, presence and frequency penalties applied.

    Args:
        logits: [V].
        history: tokens so far, the newest last; only the last `penalty_window` count.

    Returns:
        [V]; `logits` itself when there is nothing to do.
    """
    if not params.has_penalties or params.penalty_window == 0 or not history:
        return logits
    recent = history if params.penalty_window < 0 else history[-params.penalty_window :]
    counts = Counter(recent)
    ids = np.fromiter(counts.keys(), np.intp, len(counts))
    times = np.fromiter(counts.values(), np.float32, len(counts))
    out = logits.copy()
    old = out[ids]
    scaled = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    out[ids] = scaled - times * params.frequency_penalty - params.presence_penalty
    return out


def target_distribution(
    logits: Floats,
    params: SamplingParams,
    history: Sequence[int] = (),
    state: State | None = None,
) -> npt.NDArray[np.float64]:
    """The distribution p of the next token.

    Args:
        logits: [V] raw logits of the target.
        params: the user's settings.
        history: tokens before, prompt included (for penalties).
        state: where in a grammar the text is; what that forbids has no probability.

    Returns:
        [V] float64 probabilities; one-hot when the temperature is 0.
    """
    z = adjust(logits, params, history)
    out = np.zeros(len(z), np.float64)
    if params.temperature == 0:
        out[int(z.argmax()) if state is None else best(z, state)] = 1.0
        return out
    if state is not None:
        z = restrict(z, state, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    kept, values = _truncate(z, params)
    # float64: the sum over a large vocabulary must not lose the tail.
    # A smaller temperature would overflow, and acts the same.
    weights = np.exp((values - values.max()).astype(np.float64) / max(params.temperature, 1e-99))
    out[kept] = weights / weights.sum()
    return out


def _truncate(z: Floats, params: SamplingParams) -> tuple[npt.NDArray[np.intp] | slice, Floats]:
    """Indices (rising or falling) and logits of the tokens that top-k, top-p and min-p keep."""
    kept: npt.NDArray[np.intp] | slice = slice(None)
    if 0 < params.top_k < len(z):
        kept = shortlist(z, params.top_k)
        kept = kept[np.argsort(-z[kept], kind="stable")[: params.top_k]]
        z = z[kept]
    if params.top_p < 1:
        order = _top_p(z, params.top_p)
        kept = order if isinstance(kept, slice) else kept[order]
        z = z[order]
    if params.min_p > 0:
        keep = np.flatnonzero(z >= z.max() + math.log(params.min_p))
        kept = keep if isinstance(kept, slice) else kept[keep]
        z = z[keep]
    return kept, z


def _top_p(z: Floats, top_p: float) -> npt.NDArray[np.intp]:
    """The likeliest tokens that together reach `top_p`, in falling order; at least one.

    A token stays while the tokens before it have not reached top_p. Sorting only a shortlist that
    already reaches it gives the same as sorting all.
    """
    peak = float(z.max())
    goal = top_p * float(np.exp(z - np.float32(peak)).sum(dtype=np.float64))
    size = 256
    while True:
        few = shortlist(z, size)
        order = few[np.argsort(-z[few], kind="stable")]
        weights = np.exp(z[order].astype(np.float64) - peak)
        reached = np.cumsum(weights)
        if reached[-1] >= goal or len(few) == len(z):
            return order[: max(1, int((reached - weights < goal).sum()))]
        size *= 16


def draw(probabilities: npt.NDArray[np.float64], u: float) -> int:
    """The token at quantile `u` (0 <= u < 1) of a distribution, by inverting its CDF."""
    cumulative = np.cumsum(probabilities)
    at = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    if at >= len(probabilities) or probabilities[at] == 0:  # rounding at the very end
        at = int(np.flatnonzero(probabilities)[-1])
    return at


class Sampler:
    """Chooses tokens one after another.

    Every committed token uses up exactly one uniform number, in order. With the same seed the
    text is therefore the same whether or not it was speculated (up to the target's rounding).

    Args:
        params: the settings.
        history: the prompt's tokens.
        state: where in a grammar the answer begins; None without one.
    """

    def __init__(
        self,
        params: SamplingParams,
        history: Sequence[int],
        state: State | None = None,
    ) -> None:
        self.params, self.state = params, state
        # Drafts are asked about a few candidates, whose ids are not known there.
        self._draft_params = replace(
            params,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias={},
        )
        self.history = list(history)
        self._rng = np.random.default_rng(params.seed)
        # Draws of drafts and of acceptance must be independent of each other.
        self.draft_rng, self.accept_rng = self._rng.spawn(2)
        self._uniforms: list[float] = []

    def choose(self, logits: Floats, path: Sequence[int] = ()) -> int:
        """The next token after the history and then `path`.

        Args:
            logits: [V] of the target at that place.
            path: drafted tokens accepted so far in this round.
        """
        p = self.params
        history = [*self.history, *path] if p.has_penalties else ()
        state = self._state(path)
        if p.temperature == 0:
            z = adjust(logits, p, history)
            return int(z.argmax()) if state is None else best(z, state)
        while len(self._uniforms) <= len(path):
            self._uniforms.append(float(self._rng.random()))
        return draw(target_distribution(logits, p, history, state), self._uniforms[len(path)])

    def distribution(self, logits: Floats, path: Sequence[int] = ()) -> npt.NDArray[np.float64]:
        """[V] the target's distribution after the history and then `path`."""
        history = [*self.history, *path] if self.params.has_penalties else ()
        return target_distribution(logits, self.params, history, self._state(path))

    def draft_distribution(self, logits: Floats) -> npt.NDArray[np.float64]:
        """[C] the drafter's distribution over candidates: the user's settings, without penalties
        and logit bias."""
        return target_distribution(logits, self._draft_params)

    def _state(self, path: Sequence[int]) -> State | None:
        return None if self.state is None else walk(self.state, path)

    def commit(self, tokens: Sequence[int]) -> None:
        """Tell the sampler what was committed."""
        self.history.extend(tokens)
        if self.state is not None:
            self.state = walk(self.state, tokens).detach()
        del self._uniforms[: len(tokens)]
