"""The drafter: absorbs target features, proposes a block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError
from localspec.heads import Heads
from localspec.llama import Context
from localspec.pairs import DrafterInfo
from localspec.tree import Block

Floats = npt.NDArray[np.float32]

# Published drafters lose acceptance far beyond the length they were trained with, and attending
# to everything costs time that the drafter exists to save.
DRAFTER_WINDOW = 4096
# Feature rows that go into the KV cache in one pass.
INJECT_ROWS = 256


class Drafter:
    """A DSpark or DFlash drafter in llama.cpp.

    Its KV cache holds the projected features of the target's committed positions. A block pass
    adds anchor and mask tokens, reads their outputs and takes them out again.

    Args:
        context: non-causal, with hidden states where the heads need them.
        info: what the drafter is.
        heads: its heads.
        window: most recent positions it keeps; older rows leave its KV cache. The context needs
            `window + INJECT_ROWS + block_size` cells, or all of the target's.
    """

    def __init__(
        self, context: Context, info: DrafterInfo, heads: Heads, window: int = DRAFTER_WINDOW
    ) -> None:
        self.context, self.info, self.heads, self.window = context, info, heads, window
        self.n_absorbed = 0
        self._first = 0  # the oldest position it still has
        self._waiting: list[Floats] = []
        self._n_waiting = 0

    @property
    def n_past(self) -> int:
        """Positions whose features it has."""
        return self.n_absorbed + self._n_waiting

    def absorb(self, features: Floats) -> None:
        """Take the features of the next positions.

        They go into the KV cache with the next proposal, or in batches when they pile up, so
        that rounds without a draft cost the drafter nothing.

        Args:
            features: [n, len(target_layers) * n_embd] float32, kept until then.
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
            oldest = start + len(chunk) - self.window
            if oldest > self._first:
                self.context.seq_remove(0, 0, oldest)
                self._first = oldest
            self.context.decode_features(chunk, np.arange(start, start + len(chunk)))
            self.n_absorbed += len(chunk)

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
        try:
            self.context.decode(tokens, np.arange(p, p + b))
        finally:
            self.context.seq_remove(0, p)
        last = first + min(depth or self.info.max_depth, self.info.max_depth)
        logits = self.context.logits()[first:last]
        if np.isnan(logits[:, 0]).any():  # in a hidden state, it is in every logit
            raise LocalspecError(
                f"the output of {self.context.model.path.name} is not a number; it is damaged or "
                "made for another target: convert it again, or leave it out"
            )
        hidden = self.context.hidden()[first:last] if self.heads.needs_hidden else None
        baked = None
        if self.heads.kind == "vanilla":
            # llama.cpp's graph has added the bias of the greedy chain, parent by parent.
            baked = np.concatenate([[anchor], logits[:-1].argmax(axis=1)]).astype(np.int32)
        return Block(anchor, logits, hidden, baked)

    def cut_point(self, n: int) -> int:
        """How many of the first `n` positions it could go on from: `n`, fewer, or none.

        Rows that left the window are gone. Going on with less than half a window would draft
        badly for long, so then everything has to be evaluated again.
        """
        n = min(n, self.n_past)
        return 0 if self._first > 0 and n - self._first < self.window // 2 else n

    def cut(self, n: int) -> None:
        """Forget everything from position `n` on."""
        if n < self.n_past:
            self._inject()
        # Also when nothing is to be forgotten: an interrupted pass may have left cells behind.
        self.n_absorbed = min(n, self.n_absorbed)
        self._first = min(self._first, self.n_absorbed)
        self.context.seq_remove(0, self.n_absorbed)
