"""How much memory a target and its drafter need, from their headers, before anything is loaded.

The sizes of weights and KV caches are exact (they follow llama.cpp's `llama-kv-cache.cpp` and
`llama-memory-recurrent.cpp`); those of its working buffers are close upper bounds, fitted to what
llama.cpp reports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localspec import cgroup, eagle, mtp
from localspec.drafter import DRAFTER_WINDOW, INJECT_ROWS, context_cells
from localspec.drafting import MAX_LEAVES, MAX_NODES, MAX_ROLLBACK
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.pairs import DrafterInfo, check_pair, check_target, vocab_size
from localspec.prefixes import AUTO, AUTO_MOST, parse_size

MIN_CTX = 512  # a context is not made smaller than this to make things fit
ROOMY_CTX = 4096  # nor, before layers leave the GPU, is one of n_ctx = 0 smaller than this
# Bytes per element of the KV cache types.
_KV_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32, "q5_1": 24 / 32,
             "q5_0": 22 / 32, "q4_1": 20 / 32, "q4_0": 18 / 32}  # fmt: skip
# Recurrent architectures whose states llama.cpp keeps several of, to roll back.
_ROLLBACK_ARCHS = frozenset(
    "bailingmoe3 deepseek4 kimi-k3 lfm2 lfm2moe nemotron_h nemotron_h_moe qwen35 qwen35moe".split()
)
_TOKEN_BYTES = 450  # tokenizer tables per vocabulary entry, measured
_PAD = 256  # llama.cpp rounds contexts up to this many cells


@dataclass(frozen=True)
class MemoryEstimate:
    """What loading a pair takes, in bytes.

    Attributes:
        weights: the target's weights.
        kv: the target's KV cache and recurrent states, for the whole context.
        drafter: the drafter's weights, KV cache and buffers; 0 without one.
        buffers: llama.cpp's working memory for the target: activations, logits, tokenizer.
        on_device: the part of all that on GPUs.
        available: main memory that is free.
        device_available: memory of all GPUs that is free; 0 without any.
        n_ctx: the context length this is for.
        n_gpu_layers: layers on the GPU this is for; -1 means all.
        unified: whether the GPU uses main memory.
        shortened: whether `fit` had to lower n_ctx.
        offloaded_less: whether `fit` had to lower n_gpu_layers.
        prefix_cache: most that earlier conversations take, in main memory.
        fewer_prefixes: whether `fit` had to lower that.
    """

    weights: int
    kv: int
    drafter: int
    buffers: int
    on_device: int
    available: int
    device_available: int
    n_ctx: int
    n_gpu_layers: int
    unified: bool = False
    shortened: bool = False
    offloaded_less: bool = False
    prefix_cache: int = 0
    fewer_prefixes: bool = False

    @property
    def total(self) -> int:
        """All of it, wherever it lies."""
        return self.weights + self.kv + self.drafter + self.buffers + self.prefix_cache

    @property
    def on_host(self) -> int:
        """The part in main memory."""
        return self.total if self.unified else self.total - self.on_device

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.on_host <= self.available and self.on_device <= self.device_available

    def __str__(self) -> str:
        parts = f"weights {_mb(self.weights)}, KV cache {_mb(self.kv)}"
        if self.drafter:
            parts += f", drafter {_mb(self.drafter)}"
        if self.prefix_cache:
            parts += f", prefix cache {_mb(self.prefix_cache)}"
        return f"{_mb(self.total)} ({parts}, buffers {_mb(self.buffers)})"


@dataclass(frozen=True)
class Free:
    """Free memory in bytes: the machine's, and that of all GPUs llama.cpp can use.

    unified: whether GPUs use main memory too, so that both count against the same.
    """

    host: int
    device: int = 0
    unified: bool = False


def estimate(
    target: str | Path,
    drafter: str | Path | None = None,
    *,
    n_ctx: int = 4096,
    n_batch: int = 512,
    n_gpu_layers: int = -1,
    flash_attn: bool | None = None,
    kv_type: str = "f16",
    drafter_window: int = DRAFTER_WINDOW,
    fit: bool = False,
    prefix_cache: int | str = 0,
    free: Free | None = None,
) -> MemoryEstimate:
    """Estimate what `Engine.load` with the same arguments takes. Only headers are read.

    Args:
        target: GGUF of the target.
        drafter: GGUF of a drafter for it, or "mtp" as for `Engine.load`.
        n_ctx: context length in tokens; 0 takes what the target was trained with.
        n_batch: tokens per prefill pass.
        n_gpu_layers: layers on the GPU; -1 means all.
        flash_attn: as for `Engine.load`.
        kv_type: element type of the target's KV cache.
        drafter_window: most recent positions the drafter keeps.
        fit: lower the prefix cache, n_gpu_layers and n_ctx until it fits, if it can; the estimate
            says to what.
        prefix_cache: as for `Engine.load`.
        free: what is free; this machine's when left out.

    Raises:
        LocalspecError: a file is missing, damaged, or the two do not fit together.
    """
    from localspec.loading import flash_attention

    with contextlib.ExitStack() as files:
        header = files.enter_context(GgufFile(target))
        check_target(header)
        drafter_header = info = None
        if drafter == mtp.MTP:
            drafter_header, info = header, mtp.read_mtp(header)
        elif drafter is not None:
            drafter_header = files.enter_context(GgufFile(drafter))
            info = check_pair(header, drafter_header)
        if flash_attn is None:
            flash_attn = flash_attention(header, kv_type)
        needs = Needs(
            header, drafter_header, info, n_batch, flash_attn is not False, kv_type, drafter_window
        )
        free = free or free_memory()
        auto = prefix_cache == AUTO
        budget = 0 if auto else parse_size(prefix_cache)
        best = _choose(needs, n_ctx, n_ctx_train(header), n_gpu_layers, free, fit, budget)
        return replace(best, prefix_cache=_share(best.available - best.on_host)) if auto else best


class Needs:
    """What a pair needs as a function of the context length and the layers on GPUs.

    Args:
        target: the target's header.
        drafter: the drafter's, with what it is; None without one.
        info: what the drafter is.
        n_batch, kv_type, drafter_window: as for `estimate`.
        flash: whether attention runs in tiles instead of writing all scores out.
    """

    def __init__(
        self,
        target: GgufFile,
        drafter: GgufFile | None,
        info: DrafterInfo | None,
        n_batch: int,
        flash: bool,
        kv_type: str,
        drafter_window: int,
    ) -> None:
        if kv_type not in _KV_BYTES:
            raise LocalspecError(f"KV type {kv_type!r} is unknown; one of {', '.join(_KV_BYTES)}")
        self._flash, self._kv_type, self._window = flash, kv_type, drafter_window
        self._batch = max(n_batch, MAX_NODES + 1)
        self._target, self._drafter, self._info = _Shape(target), None, info
        self._heads, self._layer = 0, None
        if drafter is not None and info is not None:
            self._drafter = self._target if drafter is target else _Shape(drafter)
            if info.heads_path is not None:
                self._heads = info.heads_path.stat().st_size
                if info.family == "eagle3":  # a layer of its own: see `eagle_wide`
                    with GgufFile(info.heads_path) as layer:
                        self._layer = _Shape(layer)
        self.n_layer = self._target.n_layer

    def at(self, n_ctx: int, n_gpu_layers: int, free: Free) -> MemoryEstimate:
        """The estimate for one choice of both."""
        t, batch = self._target, min(self._batch, n_ctx)
        layers = self.n_layer + 1 if n_gpu_layers < 0 else min(n_gpu_layers, self.n_layer + 1)
        if not free.device:
            layers = 0
        first = self.n_layer + 1 - layers  # the first layer on the GPU; the output is the last
        kv = [t.cache_bytes(i, n_ctx, self._kv_type) for i in range(self.n_layer)]
        outputs = min(batch, MAX_NODES + 1)
        captured = 0 if self._info is None else len(self._info.target_layers)
        work = t.work_bytes(batch, n_ctx, outputs, self._flash, features=captured > 0)
        host_outputs = 4 * t.n_vocab * max(outputs, MAX_LEAVES)
        if self._info is not None:  # MTP layers read one state
            host_outputs += 2 * 4 * batch * max(captured, 1) * t.n_embd
        buffers = work + host_outputs + _TOKEN_BYTES * t.n_vocab
        drafter = self._drafter_bytes(n_ctx)
        on_device = 0
        if layers:
            on_device = sum(t.layer_weights[first:]) + sum(kv[first:]) + t.output_weights + work
            on_device += drafter
        return MemoryEstimate(
            t.all_weights, sum(kv), drafter, buffers, on_device, free.host, free.device,
            n_ctx, n_gpu_layers, free.unified,
        )  # fmt: skip

    def _drafter_bytes(self, n_ctx: int) -> int:
        d, info = self._drafter, self._info
        if d is None or info is None:
            return 0
        batch = max(INJECT_ROWS, info.block_size)
        states = 0
        if info.family == "block":
            cells, outputs = context_cells(info, n_ctx, self._window), info.block_size
        else:
            options = eagle.context_options(
                info, n_ctx, window=self._window, n_threads=1, flash_attn=None
            )
            cells, outputs = options.n_ctx, options.n_outputs
            states = 4 * min(cells, self._window + INJECT_ROWS) * info.n_embd
        # The target's vocabulary: a drafter's file may leave its embeddings out.
        work = d.work_bytes(batch, cells, outputs, self._flash, n_vocab=info.n_vocab)
        rows = 4 * info.n_vocab * outputs + states
        if info.family == mtp.MTP:  # weights and tokenizer are the target's
            return d.mtp_bytes(cells, "f16") + work + rows
        kv = sum(d.cache_bytes(i, cells, "f16") for i in range(d.n_layer))
        if self._layer is not None:
            kv += self._layer.cache_bytes(0, cells, "f16")
            work += self._layer.work_bytes(batch, cells, outputs, self._flash, n_vocab=1)
        features = 4 * batch * len(info.target_layers) * info.n_embd
        tables = _TOKEN_BYTES * info.n_vocab
        return d.all_weights + self._heads + kv + 2 * features + work + rows + tables


class _Shape:
    """The numbers of a header that decide about memory."""

    def __init__(self, header: GgufFile) -> None:
        def number(key: str, default: int) -> int:
            value = header.arch_get(key)
            if isinstance(value, list):
                value = max((v for v in value if isinstance(v, int)), default=default)
            return value if isinstance(value, int) and value > 0 else default

        self.n_layer, self.n_embd = number("block_count", 1), number("embedding_length", 1)
        self.n_ff = number("feed_forward_length", number("expert_feed_forward_length", 0))
        if expert := number("expert_feed_forward_length", 0):
            self.n_ff = max(self.n_ff, expert * number("expert_used_count", 1))
        self.n_head = number("attention.head_count", 1)
        self.n_vocab = vocab_size(header)
        width = self.n_embd // self.n_head
        heads_kv = _per_layer(header, "attention.head_count_kv", self.n_layer, self.n_head)
        local = _per_layer(header, "attention.sliding_window_pattern", self.n_layer, 0)
        shared = number("attention.shared_kv_layers", 0)
        unused = number("nextn_predict_layers", 0)  # layers of their own, for drafting
        self.layer_weights = [0] * self.n_layer
        self.all_weights = self.output_weights = embeddings = 0
        attends, recurs = set[int](), set[int]()
        for name, tensor in header.tensors.items():
            self.all_weights += tensor.nbytes
            head, _, rest = name.partition(".")
            layer, _, part = rest.partition(".")
            if head == "blk" and layer.isdigit() and int(layer) < self.n_layer:
                self.layer_weights[int(layer)] += tensor.nbytes
                if part.startswith("attn_k"):
                    attends.add(int(layer))
                elif part.startswith(("ssm_", "shortconv", "time_mix")):
                    recurs.add(int(layer))
            elif head in ("output", "output_norm"):
                self.output_weights += tensor.nbytes
            elif head == "token_embd":
                embeddings = max(embeddings, tensor.nbytes)
        if "output.weight" not in header.tensors:
            self.output_weights += embeddings  # a GPU gets a copy of tied embeddings
        # Scalars per cell and layer.
        self._cells: list[int] = []
        self._mtp_cells = 0  # of its multi-token prediction layers, which have a cache of their own
        for i in range(self.n_layer):
            swa = "_swa" if local[i] and header.arch_get("attention.key_length_swa") else ""
            each = number(f"attention.key_length{swa}", width) + number(
                f"attention.value_length{swa}", width
            )
            has = i < self.n_layer - max(shared, unused) and (i in attends or i not in recurs)
            self._cells.append(heads_kv[i] * each if has else 0)
            if i >= self.n_layer - unused:
                self._mtp_cells += heads_kv[i] * each
        conv = (
            max(0, number("ssm.conv_kernel", 0) - 1)
            * (
                number("ssm.inner_size", 0)
                + 2 * number("ssm.group_count", 0) * number("ssm.state_size", 0)
            )
            + max(0, number("shortconv.l_cache", 0) - 1) * self.n_embd
        )
        state = number("ssm.state_size", 0) * number("ssm.inner_size", 0)
        rollback = MAX_ROLLBACK if header.architecture in _ROLLBACK_ARCHS else 0
        self._states = [
            4 * (conv + state) * (1 + rollback) if i in recurs else 0 for i in range(self.n_layer)
        ]

    def cache_bytes(self, layer: int, n_ctx: int, kv_type: str) -> int:
        """KV cache and recurrent states of one layer."""
        cells = -(-n_ctx // _PAD) * _PAD
        return int(cells * self._cells[layer] * _KV_BYTES[kv_type]) + self._states[layer]

    def mtp_bytes(self, n_ctx: int, kv_type: str) -> int:
        """KV cache of its multi-token prediction layers."""
        return int(-(-n_ctx // _PAD) * _PAD * self._mtp_cells * _KV_BYTES[kv_type])

    def work_bytes(
        self,
        batch: int,
        n_ctx: int,
        outputs: int,
        flash: bool,
        *,
        features: bool = False,
        n_vocab: int = 0,
    ) -> int:
        """llama.cpp's compute buffer: what is alive at the widest place of the graph.

        Asking for features keeps the inputs of all layers alive.
        """
        rows = 4 * batch * (2 * self.n_ff + 3 * self.n_embd)
        cells = -(-n_ctx // _PAD) * _PAD
        mask = batch * cells * (2 if flash else 4)
        if not flash:
            rows = max(rows, 4 * batch * cells * self.n_head + 4 * batch * 4 * self.n_embd)
        logits = 4 * outputs * (n_vocab or self.n_vocab)
        kept = 4 * batch * self.n_layer * self.n_embd if features else 0
        return max(rows, logits) + mask + kept


def n_ctx_train(header: GgufFile) -> int:
    """The context length a target was trained with."""
    value = header.arch_get("context_length")
    return value if isinstance(value, int) and value > 0 else ROOMY_CTX


def _per_layer(header: GgufFile, key: str, n_layer: int, default: int) -> list[int]:
    value: Any = header.arch_get(key, default)
    if isinstance(value, list):
        numbers = [int(v) if isinstance(v, int) and v > 0 else 0 for v in value]
        return (numbers + [default] * n_layer)[:n_layer]
    return [value if isinstance(value, int) and value > 0 else default] * n_layer


def _choose(
    needs: Needs,
    n_ctx: int,
    n_ctx_train: int,
    n_gpu_layers: int,
    free: Free,
    fit: bool,
    prefix_cache: int = 0,
) -> MemoryEstimate:
    asked = n_ctx or n_ctx_train
    kept = prefix_cache

    def at(n_ctx: int, layers: int) -> MemoryEstimate:
        return replace(
            needs.at(n_ctx, layers, free), prefix_cache=kept, fewer_prefixes=kept < prefix_cache
        )

    best = at(asked, n_gpu_layers)
    if not fit or best.fits:
        return best
    # What only saves time goes first.
    kept -= min(kept, max(0, best.on_host - best.available))
    best = at(asked, n_gpu_layers)
    if best.fits:
        return best
    # A context nobody asked for goes first, then layers leave the GPU, then the context shrinks.
    if n_ctx == 0 and asked > ROOMY_CTX:
        best = _largest(lambda n: at(n * _PAD, n_gpu_layers), ROOMY_CTX // _PAD, asked // _PAD)
    if not best.fits and best.on_device > best.device_available:
        most = needs.n_layer + 1 if n_gpu_layers < 0 else min(n_gpu_layers, needs.n_layer + 1)
        best = _largest(lambda n: at(best.n_ctx, n), 0, most)
    if not best.fits and best.n_ctx > MIN_CTX:
        layers = best.n_gpu_layers
        best = _largest(lambda n: at(n * _PAD, layers), MIN_CTX // _PAD, best.n_ctx // _PAD)
    return replace(
        best, shortened=best.n_ctx < asked, offloaded_less=best.n_gpu_layers != n_gpu_layers
    )


def _largest(at: Callable[[int], MemoryEstimate], low: int, high: int) -> MemoryEstimate:
    """The estimate of the largest number in [low, high] that fits; that of `low` if none does."""
    best = at(low)
    while low < high:
        middle = (low + high + 1) // 2
        there = at(middle)
        if there.fits:
            best, low = there, middle
        else:
            high = middle - 1
    return best


def check(found: MemoryEstimate, target: str | Path) -> None:
    """Refuse what does not fit.

    Raises:
        LocalspecError: with the numbers.
    """
    if found.fits:
        return
    name = Path(target).name
    if found.on_device > found.device_available:
        lacking = f"{_mb(found.on_device)} on the GPU, where {_mb(found.device_available)} are free"
        advice = "lower n_gpu_layers or n_ctx"
    else:
        lacking = f"{_mb(found.on_host)} of memory, and {_mb(found.available)} are free"
        advice = "lower n_ctx or use a smaller model"
    raise LocalspecError(
        f"{name} with a context of {found.n_ctx} tokens needs {lacking}: {found}; {advice}, load "
        "with fit=True to have that done, or with check_memory=False to try anyway"
    )


def changes(found: MemoryEstimate) -> list[str]:
    """What `fit` changed, in words for the user."""
    notes = []
    free = found.device_available if found.on_device else found.available
    if found.offloaded_less:
        notes.append(
            f"{found.n_gpu_layers} layers are on the GPU; more do not fit into its "
            f"{_mb(found.device_available)} of free memory"
        )
    if found.fewer_prefixes:
        notes.append(
            f"the prefix cache is {_mb(found.prefix_cache) if found.prefix_cache else 'off'}; more "
            f"does not fit into {_mb(found.available)} of free memory"
        )
    if found.shortened:
        notes.append(
            f"the context is {found.n_ctx} tokens; more do not fit into {_mb(free)} of free memory"
        )
    return notes


def prefix_budget(size: int | str) -> int:
    """Bytes of a `prefix_cache` setting where nothing else is estimated.

    Raises:
        LocalspecError: it is no size.
    """
    return _share(free_memory().host) if size == AUTO else parse_size(size)


def _share(free: int) -> int:
    return max(0, min(AUTO_MOST, free // 4))


def free_memory() -> Free:
    """What this process could still take: of the machine or its container, and of the GPUs."""
    import psutil

    from localspec.llama import devices

    host = int(psutil.virtual_memory().available)
    left = cgroup.memory_free()
    if left is not None:
        host = min(host, left)
    gpus = [d for d in devices() if d.kind != "cpu"]
    return Free(host, sum(d.free for d in gpus), any(d.unified for d in gpus))


def _mb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{max(1, round(size / 1e6))} MB"
