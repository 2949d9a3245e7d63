"""An evaluation state of a model: batches, outputs, the KV cache.

Arrays handed out by a `Context` are views of llama.cpp's own buffers: they hold until the next
`decode` of that context.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError
from localspec.llama.model import Model
from localspec.llama.owned import Owned
from localspec.llama.threads import MAX_THREADS, default_threads
from localspec.pairs import FEATURE_ARCHS, LAST_OUTPUT_ARCHS

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]

MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MIN_N_CTX, MAX_N_CTX = 8, 1 << 24
_MAX_VIEWS = 256  # one per layer input and size of a pass
# ggml_type numbers usable for the KV cache.
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}


@dataclass(frozen=True)
class ContextOptions:
    """How to evaluate a model.

    Attributes:
        n_ctx: cells of the KV cache.
        n_batch: most tokens in one `decode`.
        n_outputs: most rows of logits in one `decode`.
        n_seq_max: sequence ids available (paths of a tree).
        rollback: tokens a recurrent model should be able to forget again; what it really can is
            `Context.rollback`.
        n_threads: CPU threads; 0 means `default_threads()`.
        flash_attn: True, False, or None for llama.cpp's choice.
        kv_type: element type of the KV cache, a key of `KV_TYPES`.
        causal: False for drafters, whose blocks see themselves whole.
        hidden_states: also hand out final hidden states (`Context.hidden`).
        layer_inputs: layers whose inputs to capture (`Context.layer_input`).
        next_states: also hand out the hidden states before the final norm, which autoregressive
            drafters go on from (`Context.next_states`): of the outputs ("outputs"), or of every
            token of a batch ("all").
        mtp: evaluate the model's multi-token prediction layers instead of the model.
        streams: give every sequence id cells of its own, `n_ctx / n_seq_max` each, so that
            independent texts evaluated side by side do not walk over each other's cells.
    """

    n_ctx: int
    n_batch: int = 512
    n_outputs: int = 64
    n_seq_max: int = 1
    rollback: int = 0
    n_threads: int = 0
    flash_attn: bool | None = None
    kv_type: str = "f16"
    causal: bool = True
    hidden_states: bool = False
    layer_inputs: tuple[int, ...] = ()
    next_states: str | None = None
    mtp: bool = False
    streams: bool = False


class Context:
    """One evaluation state of a model: its KV cache and output buffers.

    Args:
        model: the model.
        options: sizes and types.
        other: for drafters, the target's context, whose token embeddings and output matrix are
            used (llama.cpp's `ctx_other`). It must outlive this context.

    Raises:
        LocalspecError: a setting is out of range, or llama.cpp cannot allocate the context.
    """

    def __init__(self, model: Model, options: ContextOptions, other: Context | None = None) -> None:
        self._lib, self._api = model._lib, model._api
        self.model, self.options, self.other = model, options, other
        self._handle: Any = None
        _check_context(model, options)
        params = self._api.llama_context_default_params()
        params.n_ctx = options.n_ctx
        params.n_batch = params.n_ubatch = options.n_batch
        params.n_outputs_max = max(options.n_outputs, options.n_seq_max)
        params.n_seq_max = options.n_seq_max
        params.n_rs_seq = options.rollback
        params.n_threads = params.n_threads_batch = options.n_threads or default_threads()
        params.flash_attn_type = {None: -1, False: 0, True: 1}[options.flash_attn]
        params.type_k = params.type_v = KV_TYPES[options.kv_type]
        params.embeddings = options.hidden_states
        params.kv_unified = not options.streams  # tree paths share the prefix's cells
        params.swa_full = True  # rejected nodes must be removable from sliding windows too
        params.no_perf = True
        params.ctx_type = int(options.mtp)
        if other is not None:
            params.ctx_other = other.handle
        self._lib.recent.clear()
        self._handle = self._api.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise LocalspecError(
                f"llama.cpp cannot create a context of {options.n_ctx} tokens for "
                f"{model.path.name}: {self._lib.why()}"
            )
        needs = [model._owned] if other is None else [model._owned, other._owned]
        self._owned: Owned = Owned(self._handle, self._api.llama_free, *needs)
        self._memory = self._api.llama_get_memory(self._handle)
        self.n_ctx: int = self._api.llama_n_ctx(self._handle)
        # llama.cpp cuts this to n_ctx and asserts on larger batches.
        self._n_batch = min(options.n_batch, int(self._api.llama_n_batch(self._handle)))
        self.rollback: int = self._api.llama_n_rs_seq(self._handle)
        self._api.llama_set_causal_attn(self._handle, options.causal)
        for layer in options.layer_inputs:
            self._lib.llama_set_embeddings_layer_inp(self._handle, layer, True)
        if options.next_states is not None:
            masked = options.next_states == "outputs"
            self._lib.llama_set_embeddings_nextn(self._handle, True, masked)
        self._hidden_on = options.hidden_states
        self._views: dict[tuple[int | None, int, int], Floats] = {}
        self._allocate(options.n_batch, options.n_seq_max)
        self._n_tokens = self._n_outputs = 0

    def _allocate(self, n_batch: int, n_seq_max: int) -> None:
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(n_batch, np.int32)
        self._n_seq = np.ones(n_batch, np.int32)
        self._seq = np.zeros((n_batch, n_seq_max), np.int32)
        self._output = np.zeros(n_batch, np.int8)
        rows = self._seq.ctypes.data + np.arange(n_batch, dtype=np.uint64) * self._seq.strides[0]
        self._seq_rows = rows.astype(np.uint64)
        batch = self._api.llama_batch()
        fields = dict(type(batch)._fields_)
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._n_seq),
            ("seq_id", self._seq_rows),
            ("logits", self._output),
        ):
            setattr(batch, name, ctypes.cast(array.ctypes.data, fields[name]))
        self._batch, self._embd_type = batch, fields["embd"]
        # Reading `batch.token` would give a view of the field, not a copy of the pointer.
        self._token_pointer = ctypes.cast(self._token.ctypes.data, fields["token"])

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer.

        Raises:
            LocalspecError: the context is closed.
        """
        if not self._handle:
            raise LocalspecError("this context is closed; load the model again")
        return self._handle

    def decode(
        self,
        tokens: Sequence[int] | Ints,
        positions: Sequence[int] | Ints,
        *,
        outputs: Sequence[bool] | bool | npt.NDArray[np.bool_] = True,
        sequences: Sequence[Sequence[int]] | None = None,
        states: Floats | None = None,
    ) -> None:
        """Evaluate a batch of tokens and wait for the results.

        Args:
            tokens: [n] token ids.
            positions: [n] positions, each one past the last of its sequences or later.
            outputs: which tokens give logits; one bool for all, or [n].
            sequences: per token the ids it belongs to (first = the one it attends by); all in
                sequence 0 when left out.
            states: [n, n_embd] float32 for drafters that take a hidden state with every token.

        Raises:
            LocalspecError: an id is out of range, the batch is too large, the cache is full.
        """
        n = len(tokens)
        self._check_size(n)
        self._token[:n] = tokens
        if n and not (
            0 <= int(self._token[:n].min()) <= int(self._token[:n].max()) < self.model.n_vocab
        ):
            raise LocalspecError(
                f"token ids must be 0..{self.model.n_vocab - 1}; check what made the prompt"
            )
        self._batch.token, self._batch.embd = self._token_pointer, None
        if states is not None:
            states = np.ascontiguousarray(states, np.float32)
            if states.shape != (n, self.model.n_embd):  # llama.cpp would read past their end
                raise LocalspecError(
                    f"states must be [{n}, {self.model.n_embd}], not {list(states.shape)}"
                )
            self._batch.embd = ctypes.cast(states.ctypes.data, self._embd_type)
        if self.options.hidden_states and not self._hidden_on:
            self._set_hidden(True)
        self._run(n, positions, outputs, sequences)

    def decode_features(self, features: Floats, positions: Sequence[int] | Ints) -> None:
        """Drafters: put target features into the KV cache.

        Args:
            features: [n, n_features] float32, the captured layer inputs side by side.
            positions: [n] positions of those target tokens.
        """
        n = len(features)
        self._check_size(n)
        rows = np.ascontiguousarray(features, np.float32)
        other = self.other
        width = 0 if other is None else len(other.options.layer_inputs) * other.model.n_embd
        if rows.shape != (n, width):  # llama.cpp would read past their end
            raise LocalspecError(f"features must be [{n}, {width}], not {list(rows.shape)}")
        self._batch.token = None
        self._batch.embd = ctypes.cast(rows.ctypes.data, self._embd_type)
        # Injection has no outputs; llama.cpp would warn that hidden states were asked for.
        if self._hidden_on:
            self._set_hidden(False)
        self._run(n, positions, False, None)

    def decode_states(
        self,
        states: Floats,
        positions: Sequence[int] | Ints,
        *,
        outputs: Sequence[bool] | bool | npt.NDArray[np.bool_] = True,
        sequences: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`decode` for vectors in the place of token embeddings.

        Args:
            states: [n, n_embd] float32.
            positions, outputs, sequences: as for `decode`.
        """
        n = len(states)
        self._check_size(n)
        rows = np.ascontiguousarray(states, np.float32)
        if rows.shape != (n, self.model.n_embd):
            raise LocalspecError(
                f"states must be [{n}, {self.model.n_embd}], not {list(rows.shape)}"
            )
        self._batch.token = None
        self._batch.embd = ctypes.cast(rows.ctypes.data, self._embd_type)
        # llama.cpp makes every row an output where hidden states are on.
        wanted = bool(np.any(outputs))
        if self.options.hidden_states and self._hidden_on != wanted:
            self._set_hidden(wanted)
        self._run(n, positions, outputs, sequences)

    def encode_features(self, features: Floats) -> Floats:
        """Eagle3 drafters: fuse target features into the drafter's own hidden states.

        Args:
            features: [n, n_features] float32; n at most the context's outputs.

        Returns:
            [n, n_embd] (a copy).
        """
        n = len(features)
        if not 0 < n <= min(self._n_batch, self.options.n_outputs):
            raise LocalspecError(f"{n} rows of features in one pass are too many or none")
        rows = np.ascontiguousarray(features, np.float32)
        width = 3 * int(self.model.meta("eagle3.target_hidden_size") or 0)
        if rows.shape != (n, width):
            raise LocalspecError(f"features must be [{n}, {width}], not {list(rows.shape)}")
        self._batch.token = None
        self._batch.embd = ctypes.cast(rows.ctypes.data, self._embd_type)
        # A row is fused by itself, but llama.cpp wants positions that go on from the cache.
        self._pos[:n] = np.arange(n) + self.seq_end(0) + 1
        self._output[:n], self._n_seq[:n], self._seq[:n, 0] = True, 1, 0
        self._batch.n_tokens = n
        self._lib.recent.clear()
        self._n_tokens = self._n_outputs = 0
        if self._api.llama_encode(self.handle, self._batch):
            raise LocalspecError(f"llama.cpp refused {n} rows of features: {self._lib.why()}")
        self._api.llama_synchronize(self.handle)
        pointer = ctypes.c_void_p(self._lib.llama_get_embeddings_nextn(self.handle))
        return _view(pointer, (n, self.model.n_embd)).copy()

    def _set_hidden(self, on: bool) -> None:
        self._api.llama_set_embeddings(self.handle, on)
        self._hidden_on = on

    def _check_size(self, n: int) -> None:
        if not 0 < n <= self._n_batch:
            raise LocalspecError(f"a batch must hold 1 to {self._n_batch} tokens, not {n}")

    def _run(
        self,
        n: int,
        positions: Sequence[int] | Ints,
        outputs: Sequence[bool] | bool | npt.NDArray[np.bool_],
        sequences: Sequence[Sequence[int]] | None,
    ) -> None:
        self._pos[:n] = positions
        self._output[:n] = outputs
        n_outputs = int(self._output[:n].sum())
        limit = max(self.options.n_outputs, self.options.n_seq_max)
        if n_outputs > limit:
            raise LocalspecError(f"{n_outputs} outputs asked of a context made for {limit}")
        if sequences is None:
            self._n_seq[:n] = 1
            self._seq[:n, 0] = 0
        else:
            for i, ids in enumerate(sequences):
                if not ids or not 0 <= min(ids) <= max(ids) < self.options.n_seq_max:
                    raise LocalspecError(
                        f"sequence ids must be 0..{self.options.n_seq_max - 1}, not {list(ids)}"
                    )
                self._n_seq[i] = len(ids)
                self._seq[i, : len(ids)] = ids
        self._batch.n_tokens = n
        self._lib.recent.clear()
        status = self._api.llama_decode(self.handle, self._batch)
        if status == 0:
            # Backends work asynchronously; waiting here lets callers time the pass.
            self._api.llama_synchronize(self.handle)
            self._n_tokens, self._n_outputs = n, n_outputs
            return
        self._n_tokens = self._n_outputs = 0
        if status == 1:
            raise LocalspecError(
                f"the context of {self.n_ctx} tokens is full; load the model with a larger n_ctx"
            )
        raise LocalspecError(f"llama.cpp refused a batch of {n} tokens: {self._lib.why()}")

    def logits(self) -> Floats:
        """[n_outputs, n_vocab] logits of the last batch, in batch order (a view)."""
        pointer = self._api.llama_get_logits(self.handle)
        return self._view(pointer, (self._n_outputs, self.model.n_vocab))

    def hidden(self) -> Floats:
        """[n_outputs, n_embd] final-norm hidden states of the last batch (a view)."""
        if not self._hidden_on:
            raise LocalspecError("this context was made without hidden states")
        pointer = self._api.llama_get_embeddings(self.handle)
        return self._view(pointer, (self._n_outputs, self.model.n_embd))

    def next_states(self) -> Floats:
        """[n_outputs or n_tokens, n_embd] states before the final norm (a view)."""
        if self.options.next_states is None or not self._n_tokens:
            raise LocalspecError("this context was made without next states")
        rows = self._n_outputs if self.options.next_states == "outputs" else self._n_tokens
        pointer = self._lib.llama_get_embeddings_nextn(self.handle)
        return self._view(pointer, (rows, self.model.n_embd))

    def layer_input(self, layer: int) -> Floats:
        """[n_tokens, n_embd] inputs of a layer for the whole last batch (a view)."""
        if layer not in self.options.layer_inputs or not self._n_tokens:
            raise LocalspecError(f"the inputs of layer {layer} were not captured")
        pointer = self._lib.llama_get_embeddings_layer_inp(self.handle, layer)
        return self._view(pointer, (self._n_tokens, self.model.n_embd))

    def _view(self, pointer: Any, shape: tuple[int, int]) -> Floats:
        """`_view` of a buffer; the views are kept, for llama.cpp hands out the same few."""
        if not isinstance(pointer, int):
            pointer = ctypes.cast(pointer, ctypes.c_void_p).value
        key = (pointer, *shape)
        view = self._views.get(key)
        if view is None:
            view = _view(ctypes.c_void_p(pointer), shape)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def set_threads(self, n: int) -> None:
        """Use another number of CPU threads from the next pass on.

        Raises:
            LocalspecError: it is out of range.
        """
        if not 1 <= n <= MAX_THREADS:
            raise LocalspecError(f"threads must be 1..{MAX_THREADS}, not {n}")
        self._api.llama_set_n_threads(self.handle, n, n)

    def seq_copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """Let sequence `target` own `source`'s cells at positions [start, end) too."""
        self._check_ids(source, target)
        self._api.llama_memory_seq_cp(self._memory_of_handle, source, target, start, end)

    def seq_remove(self, sequence: int, start: int = -1, end: int = -1) -> bool:
        """Take cells at positions [start, end) from a sequence; -1 means from or to the end.

        Returns:
            False when the memory cannot forget a part (recurrent models).
        """
        self._check_ids(sequence)
        return bool(self._api.llama_memory_seq_rm(self._memory_of_handle, sequence, start, end))

    def seq_keep(self, sequence: int) -> None:
        """Forget every other sequence."""
        self._check_ids(sequence)
        self._api.llama_memory_seq_keep(self._memory_of_handle, sequence)

    def seq_end(self, sequence: int) -> int:
        """The largest position of a sequence in the cache; -1 when it is empty."""
        self._check_ids(sequence)
        return int(self._api.llama_memory_seq_pos_max(self._memory_of_handle, sequence))

    def clear(self) -> None:
        """Forget everything."""
        self._api.llama_memory_clear(self._memory_of_handle, False)

    @property
    def _whole_states(self) -> bool:
        # The state of a single sequence leaves out what its window has passed, so that it could
        # not be shortened afterwards. Recurrent ones never can, and cannot be saved whole.
        return self.model.n_swa > 0 and not self.model.recurrent

    def state_size(self) -> int:
        """Bytes that `save_state` takes."""
        if self._whole_states:
            return int(self._api.llama_state_get_size(self.handle))
        return int(self._api.llama_state_seq_get_size(self.handle, 0))

    def save_state(self) -> npt.NDArray[np.uint8]:
        """The cells of sequence 0, the only one in use, as a copy in main memory.

        Raises:
            LocalspecError: llama.cpp cannot copy them.
            MemoryError: there is no room for the copy.
        """
        state = _pages(self.state_size())
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        self._lib.recent.clear()
        if self._whole_states:
            n = self._api.llama_state_get_data(self.handle, pointer, len(state))
        else:
            n = self._api.llama_state_seq_get_data(self.handle, pointer, len(state), 0)
        if not n or n != len(state):
            raise LocalspecError(f"llama.cpp cannot copy the KV cache: {self._lib.why()}")
        return state

    def load_state(self, state: npt.NDArray[np.uint8]) -> None:
        """Replace everything by what this context's `save_state` gave.

        Raises:
            LocalspecError: llama.cpp cannot bring it back; the context is empty then.
        """
        self.clear()
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        self._lib.recent.clear()
        if self._whole_states:
            n = self._api.llama_state_set_data(self.handle, pointer, len(state))
        else:
            n = self._api.llama_state_seq_set_data(self.handle, pointer, len(state), 0)
        if n != len(state):
            self.clear()
            raise LocalspecError(f"llama.cpp cannot bring a KV cache back: {self._lib.why()}")

    @property
    def _memory_of_handle(self) -> Any:
        _ = self.handle
        return self._memory

    def _check_ids(self, *ids: int) -> None:
        for i in ids:
            if not 0 <= i < self.options.n_seq_max:
                raise LocalspecError(f"sequence {i} is outside 0..{self.options.n_seq_max - 1}")

    def close(self) -> None:
        """Free the context. A second call does nothing."""
        handle, self._handle = self._handle, None
        self._views = {}
        if handle:
            self._owned.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _pages(size: int) -> npt.NDArray[np.uint8]:
    """[size] bytes that go back to the system when they are dropped, as the heap's need not."""
    try:
        if sys.platform == "win32":
            pages = mmap.mmap(-1, size)
        else:
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(str(e)) from e
    return np.frombuffer(pages, np.uint8)


def _view(pointer: Any, shape: tuple[int, int]) -> Floats:
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    if not address:
        raise LocalspecError("llama.cpp has no outputs for the last batch")
    buffer: Any = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
    view: Floats = np.frombuffer(buffer, np.float32).reshape(shape)
    return view


def valid_context(n_ctx: int, kv_type: str) -> bool:
    """Whether a context of this size and type can be asked for."""
    return MIN_N_CTX <= n_ctx <= MAX_N_CTX and kv_type in KV_TYPES


def _check_context(model: Model, o: ContextOptions) -> None:
    if not MIN_N_CTX <= o.n_ctx <= MAX_N_CTX:
        raise LocalspecError(f"n_ctx must be between {MIN_N_CTX} and {MAX_N_CTX}, not {o.n_ctx}")
    if o.n_batch < 1 or o.n_outputs < 1 or not 0 <= o.n_threads <= MAX_THREADS:
        raise LocalspecError(
            "n_batch and n_outputs must be at least 1, n_threads at least 0 and at most "
            f"{MAX_THREADS}"
        )
    if not 1 <= o.n_seq_max <= MAX_SEQUENCES:
        raise LocalspecError(f"n_seq_max must be 1..{MAX_SEQUENCES}, not {o.n_seq_max}")
    if o.kv_type not in KV_TYPES:
        raise LocalspecError(f"KV type {o.kv_type!r} is unknown; one of {', '.join(KV_TYPES)}")
    arch = model.meta("general.architecture")
    if o.layer_inputs and arch not in FEATURE_ARCHS:
        raise LocalspecError(f"llama.cpp gives no layer features for {arch} models")
    if o.next_states not in (None, "outputs", "all"):
        raise LocalspecError(f"next_states must be 'outputs' or 'all', not {o.next_states!r}")
    for layer in o.layer_inputs:
        # llama.cpp asserts on this; n_layer itself (the last layer's output) is not filled by
        # most architectures.
        most = model.n_layer if arch in LAST_OUTPUT_ARCHS else model.n_layer - 1
        if not 0 <= layer <= most:
            raise LocalspecError(f"layer {layer} is outside 0..{most}")
