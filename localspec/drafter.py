"""The drafter: absorbs target features, proposes a block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localspec.heads import Heads
from localspec.llama import Context
from localspec.pairs import DrafterInfo
from localspec.tree import Block

Floats = npt.NDArray[np.float32]


class Drafter:
    """A DSpark or DFlash drafter in llama.cpp.

    Its KV cache holds the projected features of the target's committed positions. A block pass
    adds anchor and mask tokens, reads their outputs and takes them out again.

    Args:
        context: non-causal, with hidden states where the heads need them.
        info: what the drafter is.
        heads: its heads.
    """

    def __init__(self, context: Context, info: DrafterInfo, heads: Heads) -> None:
        self.context, self.info, self.heads = context, info, heads
        self.n_absorbed = 0
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
        if self._n_waiting >= self.context.options.n_batch:
            self._inject()

    def _inject(self) -> None:
        if not self._waiting:
            return
        rows = self._waiting[0] if len(self._waiting) == 1 else np.concatenate(self._waiting)
        self._waiting, self._n_waiting = [], 0
        size = self.context.options.n_batch
        for at in range(0, len(rows), size):
            chunk = rows[at : at + size]
            start = self.n_absorbed
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
        hidden = self.context.hidden()[first:last] if self.heads.needs_hidden else None
        baked = None
        if self.heads.kind == "vanilla":
            # llama.cpp's graph has added the bias of the greedy chain, parent by parent.
            baked = np.concatenate([[anchor], logits[:-1].argmax(axis=1)]).astype(np.int32)
        return Block(anchor, logits, hidden, baked)

    def cut(self, n: int) -> None:
        """Forget everything from position `n` on."""
        if n < self.n_past:
            self._inject()
        # Also when nothing is to be forgotten: an interrupted pass may have left cells behind.
        self.n_absorbed = min(n, self.n_absorbed)
        self.context.seq_remove(0, self.n_absorbed)
