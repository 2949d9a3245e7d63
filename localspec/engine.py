"""The round: draft, choose, verify, accept, commit. `Engine.generate` yields what was committed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from localspec import pairs, tuning
from localspec.accept import Acceptance, accept_match, accept_rejection
from localspec.drafter import DRAFTER_WINDOW, INJECT_ROWS, Drafter
from localspec.drafting import MAX_LEAVES, MAX_NODES, MAX_ROLLBACK, Drafting, DraftOptions
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.heads import Heads
from localspec.llama import (
    Context,
    ContextOptions,
    Model,
    ModelOptions,
    default_threads,
    has_gpu,
)
from localspec.policy import AutoPolicy, CostCurve
from localspec.sampling import Sampler, SamplingParams
from localspec.steps import Prefill, Result, Round, Seconds, Step
from localspec.target import Target
from localspec.text import TextStream
from localspec.tree import DraftTree

__all__ = ["DraftOptions", "Engine", "Prefill", "Result", "Round", "Seconds", "Step"]

# Contexts shorter than this are not worth measuring in.
MIN_TUNED_CTX = 128

logger = logging.getLogger("localspec")


class Engine:
    """A target, perhaps a drafter, and the conversation in their KV caches.

    Made by `Engine.load`. One generation at a time; an engine is not for several threads at once.
    """

    def __init__(self, model: Model, target: Target, drafter: Drafter | None, n_ctx: int) -> None:
        self.model, self.n_ctx = model, n_ctx
        self._target, self._drafter = target, drafter
        self._cached: list[int] = []  # the tokens whose positions are in the KV caches
        self._running = False
        # For debugging: called with every verified tree and the accepted nodes.
        self.on_verified: Callable[[DraftTree, tuple[int, ...]], None] | None = None
        self._owned: list[Context | Model | GgufFile] = []
        self._auto: AutoPolicy | None = None
        # What the measured times depend on.
        self._files: list[Path] = []
        self._settings: list[object] = []

    @classmethod
    def load(
        cls,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        n_ctx: int = 4096,
        n_batch: int = 512,
        n_threads: int = 0,
        n_gpu_layers: int = -1,
        flash_attn: bool | None = None,
        kv_type: str = "f16",
        drafter_window: int = DRAFTER_WINDOW,
        use_mmap: bool = True,
        use_mlock: bool = False,
        progress: Callable[[float], bool | None] | None = None,
    ) -> Engine:
        """Load a target and, if given, its drafter.

        Args:
            target: GGUF of the target.
            drafter: GGUF of a drafter for it.
            n_ctx: context length in tokens; 0 takes what the target was trained with.
            n_batch: tokens per prefill pass.
            n_threads: CPU threads; 0 means one per physical core.
            n_gpu_layers: layers on the GPU; -1 means all.
            flash_attn: True, False, or None for what suits the device and the weights.
            kv_type: element type of the target's KV cache, e.g. "f16" or "q8_0".
            drafter_window: most recent positions whose features the drafter keeps; its memory
                and time stop growing with the context.
            use_mmap: map the files instead of reading them.
            use_mlock: keep the models in memory.
            progress: called with 0..1 while loading; returning False stops it.

        Raises:
            LocalspecError: a file is missing, damaged, or the two do not fit together.
        """
        owned: list[Context | Model | GgufFile] = []
        try:
            info = None
            if drafter_window < 1:
                raise LocalspecError(f"drafter_window must be at least 1, not {drafter_window}")
            with GgufFile(target) as header:
                pairs.check_target(header)
                target_flash = flash_attn
                if flash_attn is None:
                    target_flash = _flash_attention(header, kv_type)
                if drafter is not None:
                    drafter_file = GgufFile(drafter)
                    owned.append(drafter_file)
                    info = pairs.check_pair(header, drafter_file)
                    heads = Heads.from_gguf(drafter_file, info)
            options = ModelOptions(n_gpu_layers, use_mmap, use_mlock)
            share = 1.0 if drafter is None else 0.9
            model = Model(target, options, progress and (lambda f: progress(share * f)))
            owned.append(model)
            n_ctx = n_ctx or model.n_ctx_train
            context = Context(
                model,
                ContextOptions(
                    n_ctx=n_ctx,
                    n_batch=max(min(n_batch, n_ctx), MAX_NODES + 1),
                    n_outputs=MAX_NODES + 1,
                    n_seq_max=1 if model.recurrent else MAX_LEAVES,
                    rollback=MAX_ROLLBACK if model.recurrent else 0,
                    n_threads=n_threads,
                    flash_attn=target_flash,
                    kv_type=kv_type,
                    layer_inputs=info.target_layers if info else (),
                ),
            )
            owned.append(context)
            the_drafter = None
            if info is not None and drafter is not None:
                drafter_model = Model(
                    drafter, options, progress and (lambda f: progress(share + 0.1 * f))
                )
                owned.append(drafter_model)
                drafter_context = Context(
                    drafter_model,
                    ContextOptions(
                        n_ctx=min(n_ctx, drafter_window + INJECT_ROWS) + info.block_size,
                        n_batch=max(INJECT_ROWS, info.block_size),
                        n_outputs=info.block_size,
                        n_threads=n_threads,
                        flash_attn=False if flash_attn is None and not has_gpu() else flash_attn,
                        causal=False,
                        hidden_states=heads.needs_hidden,
                    ),
                    other=context,
                )
                owned.append(drafter_context)
                the_drafter = Drafter(drafter_context, info, heads, drafter_window)
            if model.recurrent and context.rollback == 0:
                logger.warning(
                    "%s is recurrent and llama.cpp cannot roll its state back: decoding plainly",
                    model.path.name,
                )
            engine = cls(model, Target(context), the_drafter, n_ctx)
            engine._owned = owned
            engine._files = [Path(f) for f in (target, drafter) if f is not None]
            engine._settings = [
                n_threads or default_threads(), n_gpu_layers, flash_attn, kv_type, use_mmap
            ]  # fmt: skip
            return engine
        except BaseException:
            _close_all(owned)
            raise

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter was loaded."""
        return self._drafter is not None

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """The tokens in the KV cache; a prompt that begins with them skips their evaluation."""
        return tuple(self._cached)

    @property
    def last_logits(self) -> npt.NDArray[np.float32]:
        """[V] the target's logits for the first token of the last prompt or round (a copy)."""
        self._check_open()
        rows = self._target.logits()
        if not len(rows):
            raise LocalspecError("there are no logits yet; generate something first")
        return np.array(rows[0])

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a prompt: special tokens read as such, the model's BOS put in front."""
        self._check_open()
        begins = self.model.add_bos and self.model.bos >= 0
        if begins and text.startswith(self.model.piece(self.model.bos, special=True).decode()):
            begins = False
        return self.model.tokenize(text, add_special=begins)

    def complete(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        draft: DraftOptions | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
    ) -> Result:
        """`generate`, collected into one `Result`."""
        result = Result()
        for step in self.generate(
            prompt,
            params,
            max_tokens=max_tokens,
            draft=draft,
            stop=stop,
            stop_token_ids=stop_token_ids,
        ):
            result.add(step)
        return result

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        draft: DraftOptions | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
    ) -> Iterator[Step]:
        """Generate, yielding what each round committed.

        The output is the target's own: greedy output equals plain greedy decoding, sampled output
        follows the target's distribution, whatever the drafter proposes. A generator that is
        closed early leaves the engine ready for the next prompt.

        Args:
            prompt: text (special tokens are parsed) or token ids.
            params: sampling; greedy when left out.
            max_tokens: most tokens to generate; until an end token or a full context when None.
            draft: how much to draft; when left out, the policy decides (`DraftOptions.auto()`;
                the first use on a machine measures it, which takes up to 3 seconds).
            stop: strings that end the text, also across token boundaries; not part of it.
            stop_token_ids: tokens that end it; the target's end tokens when left out.

        Raises:
            LocalspecError: the prompt is empty or does not fit the context, an id is no token, or
                another generation is running.
        """
        self._check_idle()
        tokens = self._checked_prompt(prompt)
        if max_tokens is not None and max_tokens < 1:
            raise LocalspecError(f"max_tokens must be at least 1, not {max_tokens}")
        if isinstance(stop, str):
            stop = (stop,)
        return self._generate(
            tokens,
            Sampler(params or SamplingParams(), tokens),
            max_tokens,
            draft or DraftOptions.auto(),
            TextStream(self.model.piece, stop),
            self.model.is_end if stop_token_ids is None else set(stop_token_ids).__contains__,
        )

    @property
    def max_nodes(self) -> int:
        """The largest tree this engine can verify."""
        return MAX_NODES

    @property
    def tuned(self) -> bool:
        """Whether the costs of this machine are known, so that nothing needs to be measured."""
        return self._auto is not None or tuning.load(self._tuning_file()) is not None

    def tune(
        self, *, force: bool = False, progress: Callable[[float], None] | None = None
    ) -> tuning.Tuning:
        """Measure this machine for the auto policy, or read what was measured before.

        Takes up to 3 seconds the first time; the result is cached in the user's cache directory.
        Afterwards the KV cache is empty if anything was measured.

        Args:
            force: measure again.
            progress: called with 0..1 while measuring.
        """
        self._check_idle()
        if self.n_ctx < MIN_TUNED_CTX:
            raise LocalspecError(
                f"a context of {self.n_ctx} tokens is too short to measure in; use an n_ctx of at "
                f"least {MIN_TUNED_CTX}"
            )
        return self._tune(force=force, progress=progress)

    def _tune(
        self, *, force: bool = False, progress: Callable[[float], None] | None = None
    ) -> tuning.Tuning:
        path = self._tuning_file()
        found = None if force else tuning.load(path)
        if found is None:
            found = tuning.measure(self, progress=progress)
            tuning.save(path, found)
        curve = CostCurve(found.sizes, found.depths, np.array(found.seconds))
        self._auto = AutoPolicy(
            curve,
            block_seconds=found.block_seconds,
            host_seconds=found.host_seconds,
            switch_seconds=found.switch_seconds,
            depths=self._drafter.info.max_depth if self._drafter is not None else 0,
        )
        return found

    def _tuning_file(self) -> Path:
        return tuning.cache_file(self, self._files, self._settings)

    def _policy(self, draft: DraftOptions) -> AutoPolicy | None:
        """The policy, when it is asked for and there is anything to decide."""
        if draft.policy != "auto" or draft.tokens == 0 or self.n_ctx < MIN_TUNED_CTX:
            return None
        if self._auto is None:
            self._tune()
        return self._auto

    def _checked_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        tokens = self.tokenize(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        if not tokens or (isinstance(prompt, str) and not prompt):
            raise LocalspecError("the prompt is empty; give at least one token of text")
        if len(tokens) >= self.n_ctx:
            raise LocalspecError(
                f"the prompt has {len(tokens)} tokens, but the context holds {self.n_ctx} (and "
                "needs room for an answer); shorten it or use a larger n_ctx"
            )
        bad = next((t for t in tokens if not 0 <= t < self.model.n_vocab), None)
        if bad is not None:
            raise LocalspecError(f"token {bad} is outside the vocabulary of {self.model.n_vocab}")
        return tokens

    def _generate(
        self,
        prompt: list[int],
        sampler: Sampler,
        max_tokens: int | None,
        draft: DraftOptions,
        stream: TextStream,
        is_end: Callable[[int], bool],
    ) -> Iterator[Step]:
        self._check_idle()  # again: a generator may have been started since this one was made
        self._running = True
        try:
            auto = self._policy(draft)
            if draft.policy == "auto" and auto is None:
                draft = DraftOptions(tokens=0)
            prefill = self._prefill(prompt)
            if np.isnan(self._target.logits()[0]).any():
                raise LocalspecError(
                    f"the output of {self.model.path.name} is not a number; the file is damaged, "
                    "download or convert it again"
                )
            room = self.n_ctx - len(prompt)
            left = room if max_tokens is None else min(max_tokens, room)
            anchor = sampler.choose(self._target.logits()[0])
            drafting = Drafting(self._target, self._drafter, draft, sampler, prompt, auto)
            step = self._step([anchor], left, stream, is_end, prefill=prefill)
            while True:
                sampler.commit(step.token_ids)
                drafting.commit(step.token_ids)
                left -= len(step.token_ids)
                yield step
                if step.finish_reason is not None:
                    return
                committed, the_round = self._round(anchor, sampler, drafting, left)
                anchor = committed[-1]
                step = self._step(committed, left, stream, is_end, the_round)
        finally:
            self._running = False

    def _prefill(self, prompt: list[int]) -> Prefill:
        """Bring the KV caches to exactly `prompt`, reusing the longest common prefix."""
        started = time.perf_counter()
        shared = 0
        # The last token is always evaluated: its logits are needed.
        for a, b in zip(self._cached, prompt[:-1], strict=False):
            if a != b:
                break
            shared += 1
        self._cut(shared)
        new = prompt[len(self._cached) :]
        for start, n in self._target.prefill(new):
            if self._drafter is not None:
                self._drafter.absorb(self._target.features(n))
            self._cached.extend(prompt[start : start + n])
        return Prefill(len(prompt), len(new), time.perf_counter() - started)

    def _round(
        self,
        anchor: int,
        sampler: Sampler,
        drafting: Drafting,
        left: int,
    ) -> tuple[list[int], Round]:
        """One round; the tokens it commits (accepted ones and the bonus)."""
        clock = time.perf_counter
        started = clock()
        room = self.n_ctx - self._target.n_past - 1
        draft = drafting.draft(anchor, room=room, left=left)
        tree = draft.tree
        at = clock()
        logits = self._target.verify(anchor, tree)
        verify_seconds = clock() - at
        outcome = _accept(tree, logits, sampler)
        self._target.commit(outcome.path)
        if self.on_verified is not None:
            self.on_verified(tree, outcome.path)
        if self._drafter is not None:
            self._drafter.absorb(self._target.features([0, *(i + 1 for i in outcome.path)]))
        accepted = [int(tree.token[i]) for i in outcome.path]
        self._cached.extend([anchor, *accepted])
        committed = [*accepted, outcome.bonus]
        drafting.learn(draft, committed, verify_seconds)
        host = clock() - started - draft.seconds - verify_seconds
        seconds = Seconds(draft.seconds, verify_seconds, host)
        return committed, Round(draft.drafted, len(tree), len(accepted), seconds)

    def _step(
        self,
        committed: list[int],
        left: int,
        stream: TextStream,
        is_end: Callable[[int], bool],
        the_round: Round | None = None,
        prefill: Prefill | None = None,
    ) -> Step:
        """Cut what a round committed at an end token, a stop string or the limit; make the text."""
        text, kept, reason = "", [], None
        for token in committed:
            kept.append(token)
            if is_end(token):
                reason = "stop"
                break
            text += stream.feed(token)
            if stream.stopped:
                reason = "stop"
                break
            if len(kept) == left:
                reason = "length"
                break
        if reason is not None:
            text += stream.finish()
        if the_round is not None and len(kept) < the_round.accepted:
            the_round = Round(the_round.drafted, the_round.verified, len(kept), the_round.seconds)
        return Step(text, tuple(kept), the_round, prefill, reason)

    def _cut(self, n: int) -> None:
        """Keep the first `n` tokens in every cache (fewer when a cache holds or keeps less).

        This is also what brings the caches in line again after a round that was interrupted
        anywhere: `_cached` is the last to grow.
        """
        if self._drafter is not None:
            n = self._drafter.cut_point(n)
        n = self._target.cut(n)
        if self._drafter is not None:
            self._drafter.cut(n)
        del self._cached[n:]

    def _check_open(self) -> None:
        if not self._owned:
            raise LocalspecError("this engine is closed; load it again")

    def _check_idle(self) -> None:
        self._check_open()
        if self._running:
            raise LocalspecError("this engine is generating already; finish or close that first")

    def close(self) -> None:
        """Free models and contexts. A second call does nothing."""
        owned, self._owned = self._owned, []
        _close_all(owned)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _flash_attention(target: GgufFile, kv_type: str) -> bool | None:
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


def _accept(tree: DraftTree, logits: npt.NDArray[np.float32], sampler: Sampler) -> Acceptance:
    if tree.proposals is not None:
        return accept_rejection(
            tree, lambda row, path: sampler.distribution(logits[row], path), sampler.accept_rng
        )
    return accept_match(tree, lambda row, path: sampler.choose(logits[row], path))


def _close_all(owned: list[Context | Model | GgufFile]) -> None:
    # Contexts before their models, the drafter (which borrows from the target) before both.
    for thing in reversed(owned):
        thing.close()
