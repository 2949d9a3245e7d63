"""The drafter: absorbs target features, proposes a block."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError
from localspec.heads import Heads
from localspec.llama import Context
from localspec.pairs import DrafterInfo
from localspec.topk import shortlist
from localspec.tree import Block

Floats = npt.NDArray[np.float32]

# Published drafters lose acceptance far beyond the length they were trained with, and attending
# to everything costs time that the drafter exists to save.
DRAFTER_WINDOW = 4096
# Feature rows that go into the KV cache in one pass.
INJECT_ROWS = 256
# The logit of a token that cannot be drafted; infinity would not survive a subtraction.
_OUT_OF_REACH = np.float32(-1e9)


@dataclass(frozen=True)
class DrafterState:
    """What a drafter has absorbed, in main memory.

    Attributes:
        cells: its KV cache.
        n_absorbed: positions it has seen.
        first: the oldest one it still has.
        n_paired, last_token, states: of autoregressive drafters (`eagle.EagleDrafter`).
    """

    cells: npt.NDArray[np.uint8]
    n_absorbed: int
    first: int
    n_paired: int = 0
    last_token: int = -1
    states: Floats | None = None


def context_cells(info: DrafterInfo, n_ctx: int, window: int) -> int:
    """Cells of the KV cache that a block drafter needs beside a target of `n_ctx` tokens."""
    return min(n_ctx, own_window(info, window) + INJECT_ROWS) + info.block_size


def own_window(info: DrafterInfo, window: int) -> int:
    """Positions that a drafter keeps of the `window` it may: no more than it was trained to see."""
    return window if info.window is None else min(window, info.window)


class Drafter:
    """A DSpark or DFlash drafter in llama.cpp.

    Its KV cache holds the projected features of the target's committed positions. A block pass
    adds anchor and mask tokens, reads their outputs and takes them out again.

    Args:
        context: non-causal, with hidden states where the heads need them.
        info: what the drafter is.
        heads: its heads.
        window: most recent positions it keeps; older rows leave its KV cache. The context needs
            `context_cells`.
    """

    def __init__(
        self, context: Context, info: DrafterInfo, heads: Heads, window: int = DRAFTER_WINDOW
    ) -> None:
        self.context, self.info, self.heads = context, info, heads
        self.window = own_window(info, window)
        self.n_absorbed = 0
        self._first = 0  # the oldest position it still has
        self._waiting: list[Floats] = []
        self._n_waiting = 0
        self.pass_seconds = 0.0  # what the last block pass took
        self._selected: Floats | None = None  # kept: filling so many floats takes milliseconds
        self._selected_at: list[npt.NDArray[np.intp]] = []

    @property
    def n_past(self) -> int:
        """Positions whose features it has."""
        return self.n_absorbed + self._n_waiting

    def absorb(self, features: Floats, tokens: Sequence[int] = ()) -> None:
        """Take the features of the next positions.

        They go into the KV cache with the next proposal, or in batches when they pile up, so
        that rounds without a draft cost the drafter nothing.

        Args:
            features: [n, len(target_layers) * n_embd] float32, kept until then.
            tokens: the tokens at those positions, which only autoregressive drafters read.
        """
        self._waiting.append(features)
        self._n_waiting += len(features)
        if self._n_waiting >= INJECT_ROWS:
            self._inject()

    def _inject(self) -> None:
        if not self._waiting:
            return
        rows = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        self._waiting, self._n_waiting = [], 0
        for at in range(0, len(rows), INJECT_ROWS):
            chunk = rows[at : at + INJECT_ROWS]
            start = self.n_absorbed
            end = start + len(chunk)
            oldest = end - self.window
            if oldest > self._first:
                self.context.seq_remove(0, 0, oldest)
                self._first = oldest
            start = max(start, oldest)  # rows that would leave the window at once stay out
            self.context.decode_features(chunk[start - end :], np.arange(start, end))
            self.n_absorbed = end

    def propose(self, anchor: int, depth: int | None = None) -> Block:
        """One block pass after the absorbed positions.

        Args:
            anchor: the last chosen token.
            depth: how many draft depths are wanted; all when left out. A drafter is trained on
                whole blocks, so the pass always runs over the whole block.

        Returns:
            Logits and hidden states per depth, views that hold until the next pass.
        """
        self._inject()
        b, p = self.info.block_size, self.n_absorbed
        tokens = np.full(b, self.info.mask_token, np.int32)
        tokens[0] = anchor
        first = 0 if self.info.sample_from_anchor else 1
        started = time.perf_counter()
        try:
            self.context.decode(tokens, np.arange(p, p + b))
        finally:
            self.context.seq_remove(0, p)
        self.pass_seconds = time.perf_counter() - started
        last = first + min(depth or self.info.max_depth, self.info.max_depth)
        logits = self.context.logits()[first:last]
        if np.isnan(logits[:, 0]).any():  # in a hidden state, it is in every logit
            raise LocalspecError(
                f"the output of {self.context.model.path.name} is not a number; it is damaged or "
                "made for another target: convert it again, or leave it out"
            )
        hidden = self.context.hidden()[first:last] if self.heads.needs_hidden else None
        baked = None
        if self.info.logit_scale != 1 or self.info.softcap:
            logits = _reshaped(logits, self.info.logit_scale, self.info.softcap)
        if self.info.top_k:
            logits = self._candidates(logits, self.info.top_k)
        if self.heads.kind == "vanilla" and self.info.heads_path is None:
            # llama.cpp's graph has added the bias of the greedy chain, parent by parent.
            baked = np.concatenate([[anchor], logits[:-1].argmax(axis=1)]).astype(np.int32)
        return Block(anchor, logits, hidden, baked)

    def _candidates(self, logits: Floats, k: int) -> Floats:
        """[D, V] with everything but the k largest of each row out of reach."""
        if self._selected is None:
            shape = (self.info.max_depth, logits.shape[1])
            self._selected = np.full(shape, _OUT_OF_REACH, np.float32)
        for kept, at in zip(self._selected, self._selected_at, strict=False):
            kept[at] = _OUT_OF_REACH
        self._selected_at = []
        for row, kept in zip(logits, self._selected, strict=False):
            at = shortlist(row, k)
            at = at[np.argsort(-row[at], kind="stable")[:k]]
            kept[at] = row[at]
            self._selected_at.append(at)
        return self._selected[: len(logits)]

    @property
    def floor(self) -> int:
        """The least position, other than 0, that it could go back to.

        Rows that left the window are gone. Going on with less than half a window would draft
        badly for long, so then everything has to be evaluated again.
        """
        return self.floor_after(0)

    def floor_after(self, n: int) -> int:
        """What `floor` may be when `n` more positions have been absorbed."""
        first = max(self._first, self.n_past + n - self.window) if n else self._first
        return first + self.window // 2 if first > 0 else 0

    def cut_point(self, n: int) -> int:
        """How many of the first `n` positions it could go on from: `n`, fewer, or none."""
        n = min(n, self.n_past)
        return n if n >= self.floor else 0

    def state_size(self) -> int:
        """Bytes that `save` takes. What waits goes into the KV cache first: it is larger."""
        self._inject()
        return self.context.state_size()

    def save(self) -> DrafterState:
        """What it has absorbed, in main memory."""
        self._inject()
        return DrafterState(self.context.save_state(), self.n_absorbed, self._first)

    def restore(self, state: DrafterState) -> None:
        """Replace everything by what `save` gave.

        Raises:
            LocalspecError: llama.cpp cannot; then it has absorbed nothing.
        """
        self._waiting, self._n_waiting = [], 0
        self.n_absorbed = self._first = 0
        self.context.load_state(state.cells)
        self.n_absorbed, self._first = state.n_absorbed, state.first

    def clear(self) -> None:
        """After `cut(0)`: make the KV cache what it is after loading."""
        self.context.clear()

    def cut(self, n: int) -> None:
        """Forget everything from position `n` on."""
        if n < self.n_past:
            self._inject()
        # Also when nothing is to be forgotten: an interrupted pass may have left cells behind.
        self.n_absorbed = min(n, self.n_absorbed)
        self._first = min(self._first, self.n_absorbed)
        self.context.seq_remove(0, self.n_absorbed)


def _reshaped(logits: Floats, scale: float, softcap: float) -> Floats:
    """[D, V] logits as the output matrix gives them -> as the model means them."""
    if not softcap:
        return logits * np.float32(scale)
    out = logits * np.float32(scale / softcap)
    np.tanh(out, out=out)
    out *= np.float32(softcap)
    return out
