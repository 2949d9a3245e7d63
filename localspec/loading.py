"""From files to what an engine works with: checked, measured against memory, loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from localspec import eagle, eagle_wide, memory, mtp, pairs
from localspec.drafter import DRAFTER_WINDOW, INJECT_ROWS, Drafter, context_cells
from localspec.drafter_header import DrafterInfo
from localspec.drafting import MAX_LEAVES, MAX_NODES, MAX_ROLLBACK
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.heads import Heads
from localspec.llama import (
    MIN_N_CTX,
    Context,
    ContextOptions,
    Model,
    ModelOptions,
    default_threads,
    has_gpu,
    valid_context,
)
from localspec.rpc import parse as parse_workers
from localspec.target import Target

AnyDrafter = Drafter | eagle.EagleDrafter
Progress = Callable[[float], bool | None]

T = TypeVar("T", Context, Model, GgufFile)

logger = logging.getLogger("localspec")


@dataclass(frozen=True)
class LoadOptions:
    """How to load a target and its drafter; `Engine.load` says what each of these means."""

    n_ctx: int = 4096
    n_batch: int = 512
    n_threads: int = 0
    n_gpu_layers: int = -1
    flash_attn: bool | None = None
    kv_type: str = "f16"
    drafter_window: int = DRAFTER_WINDOW
    use_mmap: bool = True
    use_mlock: bool = False
    fit: bool = False
    check_memory: bool = True
    prefix_cache: int | str = 0
    rpc: str | Sequence[str] = ()


@dataclass(frozen=True)
class Loaded:
    """What was loaded.

    Attributes:
        model: the target's weights.
        target, drafter: ready to evaluate.
        n_ctx: context length in tokens.
        prefix_cache: bytes for earlier conversations.
        contexts: all of them.
        threads: how many each of them uses.
        adapts: whether that may change: nobody asked for it, and the work is done on CPU cores.
        notes: what a user should know, e.g. that `fit` shortened the context.
        files: the GGUFs.
        settings: what measured times depend on beside the files.
        owned: closes everything: contexts before their models, the drafter (which borrows from the
            target) before both.
    """

    model: Model
    target: Target
    drafter: AnyDrafter | None
    n_ctx: int
    prefix_cache: int
    contexts: tuple[Context, ...]
    threads: int
    adapts: bool
    notes: tuple[str, ...]
    files: tuple[Path, ...]
    settings: tuple[object, ...]
    owned: ExitStack


def load(
    target: str | Path,
    drafter: str | Path | None,
    options: LoadOptions,
    progress: Progress | None = None,
) -> Loaded:
    """Load a target and, if given, its drafter. `Engine.load` names arguments and errors."""
    if options.drafter_window < 1:
        raise LocalspecError(f"drafter_window must be at least 1, not {options.drafter_window}")
    workers = parse_workers(options.rpc)
    if workers and options.n_gpu_layers == 0:
        raise LocalspecError(
            "n_gpu_layers=0 leaves nothing to the workers of rpc; it counts the layers on "
            "them and on local GPUs (-1: all)"
        )
    with ExitStack() as owned:
        return _Loader(target, drafter, options, workers, owned).load(progress)


class _Loader:
    """The steps of `load`, each with what the ones before it found."""

    def __init__(
        self,
        target: str | Path,
        drafter: str | Path | None,
        options: LoadOptions,
        workers: tuple[str, ...],
        owned: ExitStack,
    ) -> None:
        self.target, self.drafter, self.options = target, drafter, options
        self.workers, self.owned = workers, owned
        self.contexts: list[Context] = []
        self.info: DrafterInfo | None = None
        self.heads = Heads("none")

    def load(self, progress: Progress | None) -> Loaded:
        self.read_headers()
        prefix_cache, notes = self.fit()
        share = 1.0 if self.drafter is None or self.inside else 0.9
        model = self.model(
            self.target, progress and (lambda f: progress(share * f)), workers=self.workers
        )
        self.options = replace(self.options, n_ctx=self.options.n_ctx or model.n_ctx_train)
        context = self.context(model, self.target_options(model))
        drafter = None
        if self.info is not None:
            drafter = self.open_drafter(
                self.info, context, progress and (lambda f: progress(share + 0.1 * f))
            )
        if model.recurrent and context.rollback == 0:
            logger.warning(
                "%s is recurrent and llama.cpp cannot roll its state back: decoding plainly",
                model.path.name,
            )
        files = (self.target, None if self.inside else self.drafter)
        return Loaded(
            model,
            Target(context),
            drafter,
            self.options.n_ctx,
            prefix_cache,
            tuple(self.contexts),
            self.options.n_threads or default_threads(),
            self.options.n_threads == 0
            and not self.workers
            and (self.options.n_gpu_layers == 0 or not has_gpu()),
            notes,
            tuple(Path(f) for f in files if f is not None),
            self.settings(),
            self.owned.pop_all(),
        )

    def settings(self) -> tuple[object, ...]:
        o, inside = self.options, [mtp.MTP] if self.inside else []
        return (
            o.n_threads or default_threads(), o.n_gpu_layers, o.flash_attn, o.kv_type, o.use_mmap,
            *inside, *self.workers,
        )  # fmt: skip

    @property
    def inside(self) -> bool:
        """Whether the drafter is a part of the target's file."""
        return self.info is not None and self.info.family == mtp.MTP

    def read_headers(self) -> None:
        """What the files say before any weights are read, and whether they fit together."""
        with GgufFile(self.target) as header:
            pairs.check_target(header)
            self.target_flash = self.options.flash_attn
            if self.target_flash is None and not self.workers:  # whose devices llama.cpp knows best
                self.target_flash = flash_attention(header, self.options.kv_type)
            if self.drafter == mtp.MTP:
                self.info = mtp.read_mtp(header)
            elif self.drafter is not None:
                self.drafter_file = self.file(self.drafter)
                self.info = pairs.check_pair(header, self.drafter_file)
                self.heads = Heads.from_gguf(self.drafter_file, self.info)

    def fit(self) -> tuple[int, tuple[str, ...]]:
        """Make the options fit into memory, where that is wanted; refuse what does not fit.

        Returns:
            Bytes for earlier conversations, and what was changed.
        """
        o = self.options
        budget = memory.prefix_budget(o.prefix_cache)
        known = not self.workers and valid_context(o.n_ctx or MIN_N_CTX, o.kv_type)
        if not known or not (o.fit or o.check_memory):
            return budget, ()
        found = memory.estimate(
            self.target, self.drafter, n_ctx=o.n_ctx, n_batch=o.n_batch,
            n_gpu_layers=o.n_gpu_layers, flash_attn=o.flash_attn, kv_type=o.kv_type,
            drafter_window=o.drafter_window, fit=o.fit, prefix_cache=o.prefix_cache,
        )  # fmt: skip
        if o.check_memory:
            memory.check(found, self.target)
        notes = memory.changes(found)
        if notes:
            self.options = replace(o, n_ctx=found.n_ctx, n_gpu_layers=found.n_gpu_layers)
        return found.prefix_cache, tuple(notes)

    def target_options(self, model: Model) -> ContextOptions:
        o = self.options
        return ContextOptions(
            n_ctx=o.n_ctx,
            n_batch=max(min(o.n_batch, o.n_ctx), MAX_NODES + 1),
            n_outputs=MAX_NODES + 1,
            n_seq_max=1 if model.recurrent else MAX_LEAVES,
            rollback=MAX_ROLLBACK if model.recurrent else 0,
            n_threads=o.n_threads,
            flash_attn=self.target_flash,
            kv_type=o.kv_type,
            layer_inputs=self.info.target_layers if self.info else (),
            next_states="all" if self.inside else None,
        )

    def open_drafter(
        self, info: DrafterInfo, target: Context, progress: Progress | None
    ) -> AnyDrafter:
        window, options = self.options.drafter_window, self.drafter_options(info)
        if self.inside:
            return mtp.MtpDrafter(self.context(target.model, options), info, window)
        assert self.drafter is not None
        context = self.context(self.model(self.drafter, progress), options, other=target)
        if info.family != "eagle3":
            return Drafter(context, info, self.heads, window)
        if info.heads_path is None:
            return eagle.EagleDrafter(context, info, window)
        layer = self.context(self.model(info.heads_path), eagle.layer_options(options))
        embed = self.file(self.target).rows("token_embd.weight")
        return eagle_wide.WideEagleDrafter(context, layer, info, self.drafter_file, embed, window)

    def drafter_options(self, info: DrafterInfo) -> ContextOptions:
        o = self.options
        flash = False if o.flash_attn is None and not has_gpu() else o.flash_attn
        if info.family != "block":
            return eagle.context_options(
                info, o.n_ctx, window=o.drafter_window, n_threads=o.n_threads, flash_attn=flash
            )
        return ContextOptions(
            n_ctx=context_cells(info, o.n_ctx, o.drafter_window),
            n_batch=max(INJECT_ROWS, info.block_size),
            n_outputs=info.block_size,
            n_threads=o.n_threads,
            flash_attn=flash,
            causal=info.causal,
            hidden_states=self.heads.needs_hidden,
        )

    def model(
        self, path: str | Path, progress: Progress | None = None, *, workers: tuple[str, ...] = ()
    ) -> Model:
        o = self.options
        options = ModelOptions(o.n_gpu_layers, o.use_mmap, o.use_mlock, self.inside, workers)
        return self.own(Model(path, options, progress))

    def context(
        self, model: Model, options: ContextOptions, other: Context | None = None
    ) -> Context:
        self.contexts.append(self.own(Context(model, options, other)))
        return self.contexts[-1]

    def file(self, path: str | Path) -> GgufFile:
        return self.own(GgufFile(path))

    def own(self, thing: T) -> T:
        self.owned.callback(thing.close)
        return thing


def flash_attention(target: GgufFile, kv_type: str) -> bool | None:
    """What suits the target: None is llama.cpp's choice, which is on wherever it can be.

    llama.cpp's CPU kernel takes the rows of a pass one by one. Passes of different sizes therefore
    agree better, with most quantised weights to the bit on one thread, and fewer greedy choices
    flip by rounding. With float weights the rest of the graph differs anyway, and without the
    kernel larger passes are faster and less noisy.
    """
    if has_gpu() or kv_type not in ("f32", "f16", "bf16"):
        return None
    total = sum(t.nbytes for t in target.tensors.values())
    floats = sum(t.nbytes for t in target.tensors.values() if t.type_name in ("F32", "F16", "BF16"))
    return False if 2 * floats > total else None
