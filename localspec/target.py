"""The target: prefill, verification of a draft tree, commit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.llama import Context
from localspec.tree import DraftTree

Floats = npt.NDArray[np.float32]


class Target:
    """The target's context with the bookkeeping of tree verification.

    Committed tokens live in sequence 0 at positions 0..n_past-1. A tree is verified in one batch
    without any mask: every root-to-leaf path is a sequence id that shares the prefix's cells, and
    a node carries the ids of all leaves below it (`DraftTree.sequence_ids`).

    Args:
        context: made with `layer_inputs` when features are wanted, and with `n_seq_max` at least
            the leaves of the trees to come.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self.layers = context.options.layer_inputs
        self.n_past = 0
        # Recurrent: the memory can go back to this position, not further.
        self._floor = 0
        self._tree: DraftTree | None = None

    @property
    def exact(self) -> bool:
        """Whether a saved state is good for going on from its end only."""
        return self.context.model.recurrent

    @property
    def max_leaves(self) -> int:
        """Most leaves a tree may have."""
        return self.context.options.n_seq_max

    def prefill(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Evaluate prompt tokens in chunks, after what is committed already.

        Yields:
            (start, n) after each chunk: positions start..start+n-1 are done and `features(n)`
            gives theirs. After the last chunk `logits()` has one row, that of the last token.
        """
        size = self.context.options.n_batch
        for at in range(0, len(tokens), size):
            chunk = tokens[at : at + size]
            outputs = np.zeros(len(chunk), bool)
            outputs[-1] = at + len(chunk) == len(tokens)
            start = self.n_past
            self._set_floor(start, len(chunk))
            self.context.decode(chunk, np.arange(start, start + len(chunk)), outputs=outputs)
            self.n_past += len(chunk)
            yield start, len(chunk)

    def verify(self, anchor: int, tree: DraftTree) -> Floats:
        """Evaluate the anchor and a tree after the committed tokens, in one batch.

        Args:
            anchor: the last chosen token, not evaluated yet.
            tree: any tree with at most `max_leaves` leaves (the chain and the empty tree too).

        Returns:
            [N + 1, V] logits: row 0 follows the anchor, row i + 1 node i (a view that holds until
            the next pass).
        """
        p = self.n_past
        self._tree = tree
        self._set_floor(p, 1 + len(tree))
        if not len(tree):
            self.context.decode([anchor], [p])
            return self.context.logits()
        ids, n_leaves = tree.sequence_ids, len(tree.leaves)
        for s in range(1, n_leaves):
            self.context.seq_copy(0, s)
        tokens = np.concatenate([[anchor], tree.token])
        positions = np.concatenate([[p], p + tree.depth])
        sequences = None if n_leaves == 1 else [range(n_leaves), *ids]
        self.context.decode(tokens, positions, outputs=True, sequences=sequences)
        return self.context.logits()

    def logits(self) -> Floats:
        """[rows, V] logits of the last pass."""
        return self.context.logits()

    def features(self, rows: int | Sequence[int] | npt.NDArray[np.integer]) -> Floats:
        """Captured layer inputs of the last pass, side by side; or its next states.

        Args:
            rows: the first n rows of the batch, or row indices.

        Returns:
            [n, len(layers) * n_embd] float32 (a copy).
        """
        pick: Any = slice(rows) if isinstance(rows, int) else rows
        if not isinstance(rows, int) and len(rows) == 1:  # plain rounds: no gathering
            pick = slice(rows[0], rows[0] + 1)
        if self.context.options.next_states is not None:
            return np.array(self.context.next_states()[pick])
        return np.concatenate([self.context.layer_input(i)[pick] for i in self.layers], axis=1)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the anchor and the nodes of `path`; forget the rest of the last verified tree.

        Args:
            path: node indices from depth 1 downwards, each the parent of the next; may end
                before a leaf or be empty.
        """
        tree, p, end = self._tree, self.n_past, self.n_past + 1 + len(path)
        assert tree is not None
        ids = tree.sequence_ids
        winner = ids[path[-1]][0] if len(path) else 0
        # Sequence 0 owns the first leaf's path; it keeps what the two paths share.
        shared = sum(1 for node in path if ids[node][0] == 0)
        if len(tree) > len(path) or winner:
            self.context.seq_remove(0, p + 1 + shared)
        if winner:
            self.context.seq_copy(winner, 0, p + 1 + shared, end)
        if len(tree.leaves) > 1:
            self.context.seq_keep(0)
        self.n_past, self._tree = end, None
        if self.exact and len(tree) > len(path):
            self._floor = end  # it goes back once per pass

    def _set_floor(self, start: int, n: int) -> None:
        """Before a pass: recurrent memories keep the states after each of its tokens, if any."""
        if self.exact:
            self._floor = start + n - min(n - 1, self.context.rollback)

    def cut_point(self, n: int) -> int:
        """How many of the first `n` tokens it could go on from: `n`, or none when this memory
        cannot forget the rest."""
        n = min(n, self.n_past)
        return n if n >= self._floor else 0

    def cut(self, n: int) -> int:
        """Forget everything from position `n` on, and every unfinished tree.

        Returns:
            The number of tokens kept: `n`, or 0 when this memory cannot forget a part.
        """
        self._tree = None
        n, end = self.cut_point(n), self.n_past
        if self.max_leaves > 1:
            self.context.seq_keep(0)
        if not self.context.seq_remove(0, n):
            self.context.clear()
            n = 0
        self.n_past = n
        if self.exact and n < end:
            self._floor = n
        return n

    def save(self) -> npt.NDArray[np.uint8]:
        """The memory of the committed tokens, in main memory. After `cut`: no tree is open."""
        return self.context.save_state()

    def restore(self, state: npt.NDArray[np.uint8], n: int) -> None:
        """Replace everything by the `n` tokens that `save` saw.

        Raises:
            LocalspecError: llama.cpp cannot; nothing is committed then.
        """
        self._tree, self.n_past, self._floor = None, 0, 0
        self.context.load_state(state)
        self.n_past = n
        self._floor = n if self.exact else 0
