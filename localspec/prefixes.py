"""The prefix cache: earlier conversations, ready to go on from, within a budget of memory.

The KV caches hold one text. When another one is about to take its place, its cells are copied to
main memory; when a prompt begins like a text that was kept, they are copied back. A copy takes a
small part of the time of evaluating the tokens, and what is kept costs a pass nothing, as further
sequences in the live KV cache would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from localspec.drafter import Drafter, DrafterState
from localspec.eagle import EagleDrafter
from localspec.errors import LocalspecError
from localspec.target import Target

Tokens = npt.NDArray[np.int32]
S = TypeVar("S")

# The budget that chooses itself: a quarter of what is left, and no more than this.
AUTO, AUTO_MOST = "auto", 1 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Losing an answer but not its prompt (an edit, another attempt) is worth a copy of everything from
# this many tokens and this part of the text.
_WORTH_TOKENS, _WORTH_PART = 16, 0.25
# Copying this many tokens is cheaper than evaluating one (1,800 on a CPU with the default pair).
_COPIES_PER_TOKEN = 256


def parse_size(size: int | str) -> int:
    """Bytes of a size such as 268435456, "256M" or "1.5G" (units of 1024).

    Raises:
        LocalspecError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", str(size).strip().upper())
    if found is None or isinstance(size, bool):
        raise LocalspecError(
            f"a prefix cache of {size!r} is no size; give one such as 256M or 1G, or 0 for none"
        )
    return int(float(found[1]) * _UNITS[found[2]])


def common_prefix(a: Sequence[int] | Tokens, b: Sequence[int] | Tokens) -> int:
    """How many tokens two texts have in common at their beginnings."""
    n = min(len(a), len(b))
    differ = np.asarray(a[:n], np.int32) != np.asarray(b[:n], np.int32)
    return int(differ.argmax()) if differ.any() else n


def worth_keeping(n: int, n_prompt: int, shared: int) -> bool:
    """Whether a live text is worth a copy when only its first `shared` tokens stay.

    Args:
        n: its tokens.
        n_prompt: how many of them are the last prompt's.
        shared: how many the next prompt has in common with it.
    """
    if min(n, n_prompt) - shared > 1:  # the last token of a prompt is always evaluated
        return True
    return n - shared >= max(_WORTH_TOKENS, _WORTH_PART * n)


def worth_restoring(n: int, usable: int, n_wanted: int, live: int) -> bool:
    """Whether a kept text is worth a copy.

    Always, when it is the beginning of a text that goes on, or all that is wanted; otherwise, when
    evaluating what it has in common takes longer than copying all of it.

    Args:
        n: its tokens.
        usable: how many of them can be used.
        n_wanted: how many are wanted.
        live: how many of those the live text has.
    """
    if usable <= live:
        return False
    return usable in (n, n_wanted) or (usable - live) * _COPIES_PER_TOKEN >= n


@dataclass(frozen=True)
class Kept(Generic[S]):
    """A text that was kept.

    Attributes:
        tokens: [n] the text.
        floor: the fewest of its tokens, other than none, that one can go on from.
        n_bytes: memory it takes.
        state: what brings it back.
    """

    tokens: Tokens
    floor: int
    n_bytes: int
    state: S

    def usable(self, wanted: Sequence[int] | Tokens) -> int:
        """How many tokens of `wanted` it saves."""
        n = common_prefix(self.tokens, wanted)
        return n if n >= self.floor else 0


class PrefixPool(Generic[S]):
    """Texts that were kept, the least recently used one first.

    Args:
        budget: most bytes they take together.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.evicted = 0
        self._kept: list[Kept[S]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def used(self) -> int:
        """Bytes taken."""
        return sum(k.n_bytes for k in self._kept)

    def find(self, wanted: Sequence[int] | Tokens, live: int = 0) -> Kept[S] | None:
        """Of those worth a copy, the one that saves most tokens of `wanted`.

        Args:
            wanted: the text.
            live: how many of its tokens need not be evaluated anyway.
        """
        wanted = np.asarray(wanted, np.int32)
        best, most = None, (0, 0)
        for kept in self._kept:
            n, usable = len(kept.tokens), kept.usable(wanted)
            if worth_restoring(n, usable, len(wanted), live) and (usable, -n) > most:
                best, most = kept, (usable, -n)
        return best

    def touch(self, kept: Kept[S]) -> None:
        """Make it the most recently used one."""
        self.drop(kept)
        self._kept.append(kept)

    def drop(self, kept: Kept[S]) -> None:
        """Forget it. Without effect when it is gone."""
        self._kept = [k for k in self._kept if k is not kept]

    def clear(self) -> None:
        """Forget everything."""
        self._kept = []

    def put(
        self,
        tokens: Sequence[int],
        floor: int,
        n_bytes: int,
        save: Callable[[], S],
        *,
        hold: Kept[S] | None = None,
    ) -> bool:
        """Keep a text, in the place of those used least recently where there is no room.

        Args:
            tokens, floor, n_bytes: as in `Kept`.
            save: makes the copy, once there is room for it.
            hold: one that must stay.

        Returns:
            Whether it is kept (now or already).
        """
        text = np.array(tokens, np.int32)
        n_bytes += text.nbytes
        twin = next((k for k in self._kept if k.usable(text) == len(text)), None)
        if twin is not None:
            self.touch(twin)
            return True
        if n_bytes + (hold.n_bytes if hold is not None else 0) > self.budget:
            return False
        # A beginning of this text that can do no more than it is kept with it.
        self._kept = [
            k
            for k in self._kept
            if k is hold or k.floor < floor or common_prefix(k.tokens, text) < len(k.tokens)
        ]
        while self.used + n_bytes > self.budget:
            self.drop(next(k for k in self._kept if k is not hold))
            self.evicted += 1
        self._kept.append(Kept(text, floor, n_bytes, save()))
        return True


@dataclass(frozen=True)
class PrefixStats:
    """What a prefix cache holds and did.

    Attributes:
        budget: most bytes it takes; 0 when it is off.
        used: bytes it takes.
        kept: texts in it.
        restored: how often one was brought back.
        evicted: how many had to make room for others.
    """

    budget: int
    used: int
    kept: int
    restored: int
    evicted: int


State = tuple[npt.NDArray[np.uint8], "DrafterState | None"]


class PrefixCache:
    """The pool of an engine: copies of its target's and its drafter's memories.

    Args:
        target: the target.
        drafter: its drafter, if there is one.
        budget: most bytes of all copies; 0 keeps none.
    """

    def __init__(
        self, target: Target, drafter: Drafter | EagleDrafter | None, budget: int = 0
    ) -> None:
        self._target, self._drafter = target, drafter
        self.pool = PrefixPool[State](budget)
        self._restored = 0

    @property
    def on(self) -> bool:
        """Whether it keeps anything at all."""
        return self.pool.budget > 0

    @property
    def stats(self) -> PrefixStats:
        """What it holds and did."""
        pool = self.pool
        return PrefixStats(pool.budget, pool.used, len(pool), self._restored, pool.evicted)

    def keep(self, tokens: Sequence[int], hold: Kept[State] | None = None) -> bool:
        """Keep the live text.

        Args:
            tokens: exactly what target and drafter have in their memories.
            hold: one that must stay, because it is about to be brought back.

        Returns:
            Whether it is kept: not when it is larger than the budget.
        """
        target, drafter = self._target, self._drafter
        n_bytes, floor = target.context.state_size(), len(tokens) if target.exact else 0
        if drafter is not None:
            n_bytes += drafter.state_size()
            floor = max(floor, drafter.floor)

        def save() -> State:
            return target.save(), drafter.save() if drafter is not None else None

        try:
            return self.pool.put(tokens, floor, n_bytes, save, hold=hold)
        except MemoryError:
            return False

    def restore(self, kept: Kept[State], wanted: Sequence[int]) -> bool:
        """Bring a text back to life; it leaves the pool when all of it goes on living.

        Returns:
            False when llama.cpp cannot; target and drafter are empty then.
        """
        cells, drafter_state = kept.state
        try:
            self._target.restore(cells, len(kept.tokens))
            if self._drafter is not None and drafter_state is not None:
                self._drafter.restore(drafter_state)
        except LocalspecError:
            self.pool.drop(kept)
            return False
        self._restored += 1
        if not self._target.exact and kept.usable(wanted) == len(kept.tokens):
            self.pool.drop(kept)
        else:
            self.pool.touch(kept)
        return True
