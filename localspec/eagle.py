"""Eagle3 drafters: one autoregressive layer behind llama.cpp's `eagle3` graph.

At position P the drafter reads the token of position P + 1 together with a hidden state g of
position P and predicts the token of position P + 2. For committed positions g is fused from
target features (`fc`); for drafted ones it is the drafter's own output state before its norm, so
every depth costs a pass. A whole level of a tree shares one: paths are sequence ids, as in
`target.Target`, given out while the tree grows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from localspec.drafter import DRAFTER_WINDOW, INJECT_ROWS, DrafterState
from localspec.errors import LocalspecError
from localspec.heads import Heads
from localspec.llama import Context, ContextOptions
from localspec.pairs import DrafterInfo

Floats = npt.NDArray[np.float32]

# Nodes of a level that may get children, and rows fused in one pass: each costs a row of
# vocabulary floats in llama.cpp's output buffer.
MOST_NODES = 32


def layer_options(options: ContextOptions) -> ContextOptions:
    """The context of a layer in a file of its own (`eagle_wide`), from the drafter's."""
    return replace(options, next_states=None, hidden_states=True)


def context_options(
    info: DrafterInfo, n_ctx: int, *, window: int, n_threads: int, flash_attn: bool | None
) -> ContextOptions:
    """The context an Eagle3 drafter needs beside a target of `n_ctx` tokens."""
    return ContextOptions(
        n_ctx=min(n_ctx, window + INJECT_ROWS) + MOST_NODES * info.max_depth,
        n_batch=INJECT_ROWS,
        n_outputs=MOST_NODES,
        n_seq_max=MOST_NODES + 1,
        n_threads=n_threads,
        flash_attn=flash_attn,
        next_states="outputs",
        mtp=info.family == "mtp",
    )


class EagleDrafter:
    """An Eagle3 drafter in llama.cpp.

    Args:
        context: made with `context_options`, sharing the target's matrices.
        info: what the drafter is.
        window: most recent positions it keeps; older ones leave its KV cache.
    """

    # How far behind the state's position a pair sits in the KV cache.
    shift = 0

    def __init__(self, context: Context, info: DrafterInfo, window: int = DRAFTER_WINDOW) -> None:
        self.context, self.info, self.window = context, info, window
        self.cells = context  # whose KV cache holds the positions
        self.heads = Heads("none")
        self.n_absorbed = 0
        # A rollout's time depends on its depth: nothing to compare with a measured pass.
        self.pass_seconds = 0.0
        self._first = 0  # the oldest position it still has
        # Positions 0..n_paired-1 are in the KV cache; the last one's token is that of position
        # n_paired, which may not be absorbed yet.
        self._n_paired = 0
        self._last_token = -1
        self._waiting: list[tuple[Floats, list[int]]] = []
        self._n_waiting = 0
        # Fused states of recent positions, position p in row p % len: a shortened text goes on
        # from one of them. The pages are only touched as they fill.
        self._states = np.zeros(
            (min(context.n_ctx, window + INJECT_ROWS), context.model.n_embd), np.float32
        )

    @property
    def n_past(self) -> int:
        """Positions whose features it has."""
        return self.n_absorbed + self._n_waiting

    def absorb(self, features: Floats, tokens: Sequence[int]) -> None:
        """Take the features of the next positions, and their tokens.

        Args:
            features: [n, 3 * target width] float32, kept until the next proposal.
            tokens: [n] the tokens at those positions.
        """
        if len(features) != len(tokens):
            raise LocalspecError(f"{len(features)} rows of features for {len(tokens)} tokens")
        self._waiting.append((features, [int(t) for t in tokens]))
        self._n_waiting += len(features)
        if self._n_waiting >= INJECT_ROWS:
            self._inject()

    def _fuse(self, features: Floats) -> Floats:
        """[n, n_embd] states of committed positions."""
        return self.context.encode_features(features)

    def _inject(self) -> None:
        """Fuse what waits, and put every position whose successor is known into the KV cache."""
        if not self._waiting:
            return
        features = np.concatenate([f for f, _ in self._waiting])
        tokens = np.array([t for _, ts in self._waiting for t in ts], np.int32)
        self._waiting, self._n_waiting = [], 0
        self._forget_paths()
        for at in range(0, len(features), MOST_NODES):
            fused = self._fuse(features[at : at + MOST_NODES])
            successors = tokens[at : at + MOST_NODES]
            start = self.n_absorbed
            if start == 0 and self.shift:
                # Nothing comes before the first token: it is read with a state of zeros.
                self.cells.seq_remove(0)
                nothing = np.zeros((1, self._states.shape[1]), np.float32)
                self.run([int(successors[0])], np.zeros(1, np.int64), nothing, outputs=False)
            self._states[np.arange(start, start + len(fused)) % len(self._states)] = fused
            self.n_absorbed += len(fused)
            if self._n_paired == start and start > 0 and self._last_token != successors[0]:
                self._unpair(start - 1)  # another anchor than was drafted from
            # Position p pairs with the token of p + 1; that of the last one is still unknown.
            done = np.arange(self._n_paired, start + len(fused) - 1)
            if len(done):
                self._decode(successors[done + 1 - start].tolist(), done, outputs=False)
            oldest = self.n_absorbed - self.window
            if oldest > self._first:
                self.cells.seq_remove(0, 0, oldest + self.shift)
                self._first = oldest

    def _decode(self, tokens: list[int], positions: npt.NDArray[np.integer], outputs: bool) -> None:
        states = self._states[positions % len(self._states)]
        self.run(tokens, positions + self.shift, states, outputs=outputs)
        self._n_paired, self._last_token = int(positions[-1]) + 1, tokens[-1]

    def run(
        self,
        tokens: Sequence[int],
        positions: npt.NDArray[np.integer],
        states: Floats,
        outputs: bool,
        sequences: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Evaluate pairs of a token and a state; `context` then has logits and next states."""
        self.context.decode(tokens, positions, outputs=outputs, sequences=sequences, states=states)

    def _unpair(self, n: int) -> None:
        self.cells.seq_remove(0, n + self.shift)
        self._n_paired = min(self._n_paired, n)

    def _forget_paths(self) -> None:
        self.cells.seq_keep(0)

    def propose(self, anchor: int, depth: int | None = None) -> EagleRollout:
        """The pass of the anchor; deeper levels follow as the rollout is asked for them.

        Args:
            anchor: the last chosen token.
            depth: how many draft depths are wanted; all when left out.
        """
        started = time.perf_counter()
        self._inject()
        if self.n_absorbed == 0:
            raise LocalspecError("an Eagle3 drafter needs at least one evaluated token to draft")
        self.begin(anchor)
        if np.isnan(self.context.next_states()[:, 0]).any():
            raise LocalspecError(
                f"the output of {self.context.model.path.name} is not a number; it is damaged or "
                "made for another target: convert it again, or leave it out"
            )
        depth = min(depth or self.info.max_depth, self.info.max_depth)
        return EagleRollout(self, anchor, depth, time.perf_counter() - started)

    def begin(self, anchor: int) -> None:
        """The pass of the anchor, whose logits are those of depth 1."""
        self._forget_paths()
        last = self.n_absorbed - 1
        self._unpair(last)
        self._decode([anchor], np.array([last]), outputs=True)

    @property
    def floor(self) -> int:
        """The least position, other than 0, that it could go back to."""
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
        """Bytes that `save` takes. What waits goes into the KV cache first."""
        self._inject()
        self._forget_paths()
        return self.cells.state_size() + self._states[: self.n_absorbed].nbytes

    def save(self) -> DrafterState:
        """What it has absorbed, in main memory."""
        self._inject()
        self._forget_paths()
        return DrafterState(
            self.cells.save_state(), self.n_absorbed, self._first, self._n_paired,
            self._last_token, self._states[: self.n_absorbed].copy(),
        )  # fmt: skip

    def restore(self, state: DrafterState) -> None:
        """Replace everything by what `save` gave.

        Raises:
            LocalspecError: llama.cpp cannot; then it has absorbed nothing.
        """
        assert state.states is not None
        self._waiting, self._n_waiting = [], 0
        self.n_absorbed = self._first = self._n_paired = 0
        self._last_token = -1
        self.cells.load_state(state.cells)
        self._states[: len(state.states)] = state.states
        self._n_paired, self._last_token = state.n_paired, state.last_token
        self.n_absorbed, self._first = state.n_absorbed, state.first

    def clear(self) -> None:
        """After `cut(0)`: make the KV caches what they are after loading."""
        self.context.clear()
        self.cells.clear()

    def cut(self, n: int) -> None:
        """Forget everything from position `n` on."""
        if n < self.n_past:
            self._inject()
        self.n_absorbed = min(n, self.n_absorbed)
        self._first = min(self._first, self.n_absorbed)
        self._forget_paths()
        # The last position kept was paired with a token that may be gone.
        self._unpair(max(0, self.n_absorbed - 1))


class EagleRollout:
    """The levels of one draft (`rollout.Rollout`); holds until the drafter's next call.

    Args:
        drafter: right after the anchor's pass.
        anchor: the anchor.
        depth: most levels.
        seconds: what the anchor's pass took.
    """

    most_nodes = MOST_NODES

    def __init__(self, drafter: EagleDrafter, anchor: int, depth: int, seconds: float) -> None:
        self._drafter, self._context, self._anchor = drafter, drafter.context, anchor
        self.depth = depth
        # Seconds in llama.cpp so far.
        self.seconds = seconds
        self._start()

    def _start(self) -> None:
        # Where the nodes of depth 1 sit in the drafter.
        self._first = self._at = self._drafter.n_absorbed + self._drafter.shift
        self._ids = [0]  # sequence id of each row of the last pass; 0 is the committed text
        self._states = self._context.next_states().copy()

    def root(self) -> Floats:
        """[1, V] logits of depth 1. A second tree from the same anchor starts over here."""
        if self._at > self._first:
            started = time.perf_counter()
            self._drafter.begin(self._anchor)
            self._start()
            self.seconds += time.perf_counter() - started
        return self._context.logits()

    def expand(self, origin: Sequence[int], tokens: Sequence[int]) -> Floats:
        """[P, V] logits of what follows each token (see `rollout.Rollout`)."""
        started = time.perf_counter()
        cells = self._drafter.cells
        kept = {self._ids[o] for o in origin}
        for dead in set(self._ids) - kept - {0}:
            cells.seq_remove(dead)
        free = iter(sorted(set(range(1, cells.options.n_seq_max)) - kept))
        # A first child goes on in its parent's sequence; another takes over a copy of its cells.
        taken, ids = {0}, []
        for o in origin:
            path = self._ids[o]
            if path in taken:
                path = next(free)
                cells.seq_copy(self._ids[o], path)
            taken.add(path)
            ids.append(path)
        positions = np.full(len(ids), self._at)
        states = self._states[np.asarray(origin)]
        self._drafter.run(tokens, positions, states, True, sequences=[[i] for i in ids])
        self._ids, self._states = ids, self._context.next_states().copy()
        self._at += 1
        self.seconds += time.perf_counter() - started
        return self._context.logits()
