"""Markov heads and the confidence head on numpy arrays.

All three Markov heads add `W2 @ x` to the base logits of a depth and differ in the latent vector
x they make of the parent token u:

    vanilla   x = W1[u]
    gated     x = sigmoid(G [h; W1[u]] + b) * W1[u]
    rnn       [g; c; o] = J [s; W1[u]; h] + b,  s' = sig(g) s + (1 - sig(g)) tanh(c),  x = tanh(o)

DFlash 2's candidate selector has the same form, among the top candidates of a depth only:

    selector  x = (G h) * W1[u]

(DSpark; formulas in docs/how-it-works.md.) Only the rows of W2 that belong to candidate tokens
are ever multiplied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.pairs import DrafterInfo, reduced_vocabulary

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
# OpenBLAS multiplies m x k by k x n on one thread while m * n * k stays below 2**18.
_SINGLE_THREADED = 1 << 18
# Matrices up to this size are kept as float32: converting rows costs more than the memory.
_KEEP_BYTES = 64 << 20

Rows = Callable[[npt.NDArray[np.integer]], Floats]


@dataclass(frozen=True)
class Linear:
    """y = W x + b with W [out, in], b [out]."""

    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        y: Floats = x @ self.weight.T + self.bias
        return y


class Heads:
    """The heads of one drafter.

    Args:
        kind: "none", "vanilla", "gated", "rnn" or "selector".
        rank: r, width of the latent vectors (0 for "none").
        w1: rows of W1 [V, r] by token ids.
        w2: rows of W2 [V, r] by token ids.
        mixer: G [r, d + r] (gated), G [r, d] (selector) or J [3r, 2r + d] (rnn).
        confidence: [1, d + r], or None without a confidence head.
    """

    def __init__(
        self,
        kind: str,
        rank: int = 0,
        w1: Rows | None = None,
        w2: Rows | None = None,
        mixer: Linear | None = None,
        confidence: Linear | None = None,
    ) -> None:
        self.kind, self.rank = kind, rank
        self._w1, self._w2, self._mixer, self._confidence = w1, w2, mixer, confidence

    @classmethod
    def from_gguf(cls, drafter: GgufFile, info: DrafterInfo) -> Heads:
        """The heads stored in a drafter's file or in its companion.

        Both files must stay open as long as the heads are used (W1 and W2 are read from them row
        by row).

        Raises:
            LocalspecError: a tensor is missing or has the wrong shape.
        """
        source = drafter if info.heads_path is None else GgufFile(info.heads_path)
        kind, confidence = info.head_type, None
        if kind == "none":
            return cls("none")
        if kind == "selector":
            return cls._selector(source, info)
        rank = _shape(source, "markov_w1.weight", 2)[1]
        drafted = reduced_vocabulary(drafter)
        n_drafted = info.n_vocab if drafted is None else len(drafted)
        _expect(source, "markov_w1.weight", (info.n_vocab, rank))
        _expect(source, "markov_w2.weight", (n_drafted, rank))
        if "conf_proj.weight" in source.tensors:
            weight = source.tensor("conf_proj.weight").reshape(1, -1)
            if weight.shape[1] != info.n_embd + rank:
                raise _misfit(source, "conf_proj.weight")
            bias = np.zeros(1, np.float32)
            if "conf_proj.bias" in source.tensors:
                bias = source.tensor("conf_proj.bias").reshape(-1)
                if len(bias) != 1:
                    raise _misfit(source, "conf_proj.bias")
            confidence = Linear(weight, bias)
        mixer = None
        if kind in ("gated", "rnn"):
            name = "gate_proj" if kind == "gated" else "joint_proj"
            out, into = (rank, info.n_embd + rank) if kind == "gated" else (
                3 * rank, info.n_embd + 2 * rank)  # fmt: skip
            _expect(source, f"{name}.weight", (out, into))
            _expect(source, f"{name}.bias", (out,))
            mixer = Linear(source.tensor(f"{name}.weight"), source.tensor(f"{name}.bias"))
        elif kind != "vanilla":
            raise LocalspecError(
                f"{drafter.path.name} has a {kind!r} Markov head; localspec knows vanilla, gated "
                "and rnn"
            )
        return cls(
            kind,
            rank,
            source.rows("markov_w1.weight"),
            _scattered(_fast_rows(source, "markov_w2.weight"), drafted, info.n_vocab),
            mixer,
            confidence,
        )

    @classmethod
    def _selector(cls, source: GgufFile, info: DrafterInfo) -> Heads:
        names = ("selector_predecessor.weight", "selector_successor.weight")
        rank = _shape(source, "selector_hidden.weight", 2)[0]
        _expect(source, "selector_hidden.weight", (rank, info.n_embd))
        for name in names:
            _expect(source, name, (info.n_vocab, rank))
        gate = Linear(source.tensor("selector_hidden.weight"), np.zeros(rank, np.float32))
        return cls("selector", rank, source.rows(names[0]), _fast_rows(source, names[1]), gate)

    @property
    def needs_hidden(self) -> bool:
        """Whether hidden states are used at all (they cost a copy per pass)."""
        return self._mixer is not None or self._confidence is not None

    @property
    def has_confidence(self) -> bool:
        """Whether there is a confidence head."""
        return self._confidence is not None

    def embed(self, tokens: npt.NDArray[np.integer]) -> Floats:
        """W1 of some tokens, [P, r]."""
        if self._w1 is None:
            return np.zeros((len(tokens), 0), np.float32)
        return self._w1(tokens)

    def root_state(self) -> Floats:
        """[1, s] state at the anchor: zeros (s = r for rnn, else 0)."""
        return np.zeros((1, self.rank if self.kind == "rnn" else 0), np.float32)

    def latent(
        self, tokens: npt.NDArray[np.integer], hidden: Floats | None, state: Floats
    ) -> tuple[Floats, Floats]:
        """The latent vectors of some parents at one depth.

        Args:
            tokens: [P] parent tokens.
            hidden: [d] hidden state of the depth (unused by "none" and vanilla heads).
            state: [P, s] states that travelled to the parents.

        Returns:
            (latent [P, r], state [P, s] for the parents' children).
        """
        u = self.embed(tokens)
        if self._mixer is None:
            return u, state
        assert hidden is not None
        if self.kind == "selector":
            return self._mixer(hidden) * u, state
        h = np.broadcast_to(hidden, (len(u), len(hidden)))
        if self.kind == "gated":
            return _sigmoid(self._mixer(np.concatenate([h, u], axis=1))) * u, state
        gate, candidate, out = np.split(
            self._mixer(np.concatenate([state, u, h], axis=1)), 3, axis=1
        )
        gate = _sigmoid(gate)
        return np.tanh(out), gate * state + (1 - gate) * np.tanh(candidate)

    def bias(self, latent: Floats, candidates: npt.NDArray[np.integer]) -> Floats:
        """[P, C] what the head adds to the logits of candidate tokens [C]."""
        if self._w2 is None:
            return np.zeros((len(latent), len(candidates)), np.float32)
        w2 = self._w2(candidates).T
        # Small products one after another: OpenBLAS would wake threads for the whole, and they
        # would spin against llama.cpp's.
        step = max(1, _SINGLE_THREADED // w2.size)
        if len(latent) <= step:
            return latent @ w2
        return np.concatenate([latent[i : i + step] @ w2 for i in range(0, len(latent), step)])

    def confidence(self, tokens: npt.NDArray[np.integer], hidden: Floats) -> Floats:
        """[P] predicted probability that a draft is accepted at one depth, per parent token.

        c = sigmoid(w [h; W1[u]] + b); a head trained without the Markov feature has zeros there.

        Args:
            tokens: [P] parent tokens.
            hidden: [d] hidden state of the depth.
        """
        if self._confidence is None:
            raise LocalspecError("this drafter has no confidence head")
        d = len(hidden)
        weight = self._confidence.weight[0]
        logit = self.embed(tokens) @ weight[d:] + (hidden @ weight[:d] + self._confidence.bias[0])
        return _sigmoid(logit)


def _fast_rows(source: GgufFile, name: str) -> Rows:
    if 4 * math.prod(source.tensors[name].shape) > _KEEP_BYTES:
        return source.rows(name)
    return source.tensor(name).__getitem__


def _scattered(rows: Rows, drafted: npt.NDArray[np.int64] | None, n_vocab: int) -> Rows:
    """Rows of W2 by token ids where only some tokens have one; the others' logits are -inf."""
    if drafted is None:
        return rows
    row_of = np.full(n_vocab, -1, np.int64)
    row_of[drafted] = np.arange(len(drafted))

    def get(tokens: npt.NDArray[np.integer]) -> Floats:
        at = row_of[tokens]
        found: Floats = np.where((at >= 0)[:, None], rows(np.maximum(at, 0)), np.float32(0))
        return found

    return get


def _sigmoid(x: Floats) -> Floats:
    # tanh never overflows, exp does.
    y: Floats = 0.5 * (np.tanh(0.5 * x) + 1)
    return y


def _misfit(source: GgufFile, name: str) -> LocalspecError:
    return LocalspecError(f"{source.path}: {name} is missing or has the wrong shape; convert again")


def _shape(source: GgufFile, name: str, dims: int) -> tuple[int, ...]:
    info = source.tensors.get(name)
    if info is None or len(info.shape) != dims:
        raise _misfit(source, name)
    return info.shape


def _expect(source: GgufFile, name: str, shape: Sequence[int]) -> None:
    if _shape(source, name, len(shape)) != tuple(shape):
        raise _misfit(source, name)
