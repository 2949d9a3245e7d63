"""What one training step sees: whole conversations, and the anchors drafted from in each.

Everything here follows from (seed, step) alone, so a resumed run goes on as if never stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from localspec.models.store import Entry, Rows, Store
from localspec.models.synthesis import Ints


@dataclass(frozen=True)
class Example:
    """One conversation with its anchors.

    Attributes:
        tokens: [T] int64.
        features: [T, n_features] float32.
        hidden: [T, d] float32 final-norm hidden states of the target.
        log_norm: [T] float32 log of the target's sum of exp.
        anchors: [A] positions; the text goes on for at least D tokens after each.
    """

    tokens: Tensor
    features: Tensor
    hidden: Tensor
    log_norm: Tensor
    anchors: Tensor


def split(entries: Sequence[Entry], held_out: int, seed: int) -> tuple[list[Entry], list[Entry]]:
    """(training, held-out) conversations. `held_out`: how many, at most a tenth of all.

    A conversation's side follows from its index alone, so that it is the same in every start.
    """
    share = min(0.1, held_out / max(1, len(entries)))
    kept: tuple[list[Entry], list[Entry]] = ([], [])
    for entry in sorted(entries, key=lambda e: e.index):
        draw = np.random.default_rng([seed, entry.index, 1]).random()
        kept[draw < share].append(entry)
    return kept


def chosen(entries: Sequence[Entry], step: int, size: int, seed: int) -> list[Entry]:
    """The conversations of one step: a new shuffle of all of them every epoch."""
    at = np.arange(step * size, (step + 1) * size)
    orders = {
        epoch: np.random.default_rng([seed, epoch, 2]).permutation(len(entries))
        for epoch in np.unique(at // len(entries)).tolist()
    }
    return [entries[orders[i // len(entries)][i % len(entries)]] for i in at.tolist()]


def anchors_of(entry: Entry, depths: int, most: int, rng: np.random.Generator | None) -> Ints:
    """Positions to draft from: from the answer's first token on, with D tokens to follow.

    All of them without `rng`, else at most `most`, drawn without replacement, in order.
    """
    first = max(1, entry.n_prompt)
    positions = np.arange(first, entry.n_tokens - depths, dtype=np.int32)
    if rng is not None and len(positions) > most:
        positions = np.sort(rng.choice(positions, most, replace=False))
    return positions[:most] if rng is None else positions


def load(
    store: Store,
    entries: Sequence[Entry],
    evaluate: Callable[[Ints], Rows],
    anchors: Sequence[Ints],
    device: torch.device | str = "cpu",
) -> Iterator[Example]:
    """The examples of some conversations; those without an anchor are left out."""
    for entry, at in zip(entries, anchors, strict=True):
        if not len(at):
            continue
        features, hidden, log_norm = store.rows([entry], evaluate)[0]
        tokens = store.tokens([entry])[0]
        yield Example(
            torch.from_numpy(tokens.astype(np.int64)).to(device),
            torch.from_numpy(features.astype(np.float32)).to(device),
            torch.from_numpy(hidden.astype(np.float32)).to(device),
            torch.from_numpy(log_norm).to(device),
            torch.from_numpy(at.astype(np.int64)).to(device),
        )
