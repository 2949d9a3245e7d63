"""The round: draft, choose, verify, accept, commit. `Engine.generate` yields what was committed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from localspec import aio, calibration_file, determinism, loading, tuning
from localspec.accept import Acceptance, accept_match, accept_rejection
from localspec.calibration import Calibration
from localspec.cost_curve import CostCurve
from localspec.drafter import DRAFTER_WINDOW
from localspec.drafting import MAX_NODES, Drafting, DraftOptions, threads_of
from localspec.errors import LocalspecError
from localspec.grammar import Grammar
from localspec.live import LiveText
from localspec.loading import Loaded, LoadOptions
from localspec.logprobs import path_logprobs
from localspec.policy import AutoPolicy
from localspec.prefixes import PrefixStats
from localspec.sampling import Sampler, SamplingParams
from localspec.steps import Prefill, Result, Round, Seconds, Step, TokenLogprobs
from localspec.text import TextStream
from localspec.tree import DraftTree
from localspec.turns import ThreadedTurn, Turn, Turns

__all__ = ["DraftOptions", "Engine", "Prefill", "Result", "Round", "Seconds", "Step"]

# Contexts shorter than this are not worth measuring in.
MIN_TUNED_CTX = 128


@dataclass(frozen=True)
class _Request:
    """One generation, checked.

    Attributes:
        prompt: its tokens.
        sampler: chooses tokens; remembers what was said.
        max_tokens: most tokens; None for as many as the context holds.
        draft: how much to draft.
        stream: makes the text, honours stop strings.
        is_end: whether a token ends it.
        logprobs: alternatives per token; None for no log probabilities.
    """

    prompt: list[int]
    sampler: Sampler
    max_tokens: int | None
    draft: DraftOptions
    stream: TextStream
    is_end: Callable[[int], bool]
    logprobs: int | None


class Engine:
    """A target, perhaps a drafter, and the conversation in their KV caches.

    Made by `Engine.load`. One generation at a time: a generation holds the engine from its first
    step until it ends or is closed, and other threads that want to generate wait for their turn,
    first come, first served. The thread (or asyncio task) that has a generation under way must
    finish or close it before it starts another.
    """

    def __init__(self, loaded: Loaded) -> None:
        self.model, self.n_ctx = loaded.model, loaded.n_ctx
        # What a user should know about how it was loaded, e.g. that fit=True shortened the context.
        self.notes = loaded.notes
        # For debugging: called with every verified tree and the accepted nodes.
        self.on_verified: Callable[[DraftTree, tuple[int, ...]], None] | None = None
        self._target, self._drafter = loaded.target, loaded.drafter
        self._live = LiveText(loaded.target, loaded.drafter)
        self._live.prefixes.pool.budget = loaded.prefix_cache
        self._contexts, self._threads = loaded.contexts, loaded.threads
        self._threads_adapt, self._threads_now = loaded.adapts, loaded.threads
        self._turns = Turns()
        # Held while llama.cpp works, so that nothing is freed under it.
        self._working = threading.RLock()
        self._working_thread: int | None = None
        self._pid = os.getpid()
        self._owned: contextlib.ExitStack | None = loaded.owned
        self._auto: AutoPolicy | None = None
        self._tuning: tuning.Tuning | None = None
        self._calibration: Calibration | None = None
        self._single_rows_differ: bool | None = None  # not known before it is needed
        # What the measured times depend on.
        self._files, self._settings = loaded.files, loaded.settings

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
        fit: bool = False,
        check_memory: bool = True,
        prefix_cache: int | str = 0,
        rpc: str | Sequence[str] = (),
        progress: Callable[[float], bool | None] | None = None,
    ) -> Engine:
        """Load a target and, if given, its drafter.

        Args:
            target: GGUF of the target.
            drafter: GGUF of a drafter for it; "mtp" for the multi-token prediction layers inside
                the target's own file.
            n_ctx: context length in tokens; 0 takes what the target was trained with.
            n_batch: tokens per prefill pass.
            n_threads: CPU threads; 0 means `localspec.llama.default_threads()`.
            n_gpu_layers: layers on the GPU; -1 means all.
            flash_attn: True, False, or None for what suits the device and the weights.
            kv_type: element type of the target's KV cache, e.g. "f16" or "q8_0".
            drafter_window: most recent positions whose features the drafter keeps; its memory
                and time stop growing with the context.
            use_mmap: map the files instead of reading them.
            use_mlock: keep the models in memory.
            fit: when memory is short, lower prefix_cache, n_gpu_layers and n_ctx until everything
                fits; `notes` says to what.
            check_memory: refuse to load what does not fit (`localspec.estimate`).
            prefix_cache: most main memory for earlier conversations, so that a prompt that goes on
                from one of them is not evaluated again: bytes, or a text such as "256M"; 0 keeps
                none; "auto" takes a quarter of what is free, at most 1G.
            rpc: llama.cpp's RPC workers, "HOST:PORT" each (or one text with commas), that hold the
                target's layers together with local GPUs; the drafter stays on this machine. Memory
                is not checked ahead then.
            progress: called with 0..1 while loading; returning False stops it.

        Raises:
            LocalspecError: a file is missing, damaged, the two do not fit together, memory is
                short, or loading was cancelled.
        """
        options = LoadOptions(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_threads=n_threads,
            n_gpu_layers=n_gpu_layers,
            flash_attn=flash_attn,
            kv_type=kv_type,
            drafter_window=drafter_window,
            use_mmap=use_mmap,
            use_mlock=use_mlock,
            fit=fit,
            check_memory=check_memory,
            prefix_cache=prefix_cache,
            rpc=rpc,
        )
        return cls(loading.load(target, drafter, options, progress))

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter was loaded."""
        return self._drafter is not None

    @property
    def cached_tokens(self) -> tuple[int, ...]:
        """The tokens in the KV cache; a prompt that begins with them skips their evaluation."""
        return tuple(self._live.tokens)

    @property
    def prefix_cache(self) -> PrefixStats:
        """What the prefix cache holds, and what it did so far."""
        return self._live.prefixes.stats

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
        grammar: Grammar | None = None,
        logprobs: int | None = None,
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
            grammar=grammar,
            logprobs=logprobs,
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
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> Generator[Step, None, None]:
        """Generate, yielding what each round committed.

        The output is the target's own: greedy output equals plain greedy decoding, sampled output
        follows the target's distribution, whatever the drafter proposes. A generator that is
        closed early or cancelled leaves the engine ready for the next prompt. Nothing happens
        before the first step is asked for; then, if another thread is generating, this one waits
        for its turn.

        Args:
            prompt: text (special tokens are parsed) or token ids.
            params: sampling; greedy when left out.
            max_tokens: most tokens to generate; until an end token or a full context when None.
            draft: how much to draft; when left out, the policy decides (`DraftOptions.auto()`;
                the first use on a machine measures it, which takes up to 3 seconds).
            stop: strings that end the text, also across token boundaries; not part of it.
            stop_token_ids: tokens that end it; the target's end tokens when left out.
            grammar: what the answer has to look like. What it forbids is never chosen and never
                drafted; where it allows nothing more, the answer ends. `max_tokens`, a stop string
                or a full context can end it earlier.
            logprobs: give every token its log probability and that many alternatives
                (`Step.logprobs`; 0: only its own).

        Raises:
            LocalspecError: the prompt is empty or does not fit the context, an id is no token,
                the target cannot follow the grammar (a `DeadEndError`, from `localspec.errors`,
                also when that shows after some steps only), or this thread has another generation
                under way.
        """
        return self._start(
            Turn(),
            prompt,
            params,
            max_tokens,
            draft,
            stop,
            stop_token_ids,
            grammar=grammar,
            logprobs=logprobs,
        )

    def agenerate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        max_tokens: int | None = None,
        draft: DraftOptions | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> aio.AsyncSteps:
        """`generate` for `async for`: rounds run in a worker thread.

        Cancelling the task, or leaving the loop, cancels the generation; it ends with the round
        that is under way.
        """
        turn = ThreadedTurn()

        def start() -> Generator[Step, None, None]:
            return self._start(
                turn,
                prompt,
                params,
                max_tokens,
                draft,
                stop,
                stop_token_ids,
                grammar=grammar,
                logprobs=logprobs,
            )

        return aio.AsyncSteps(start, turn, self._turns)

    def cancel(self) -> None:
        """Cancel the generation under way, from any thread.

        It ends within one round (while the prompt is evaluated: within one batch of it) with the
        finish reason "cancelled". Without effect when nothing is under way: neither generations
        that wait for their turn nor later ones are cancelled.
        """
        self._turns.cancel()

    def _start(
        self,
        turn: Turn,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        max_tokens: int | None,
        draft: DraftOptions | None,
        stop: Sequence[str],
        stop_token_ids: Sequence[int] | None,
        *,
        grammar: Grammar | None = None,
        logprobs: int | None = None,
    ) -> Generator[Step, None, None]:
        """Check everything that `generate` takes; its generator."""
        self._check_open()
        self._turns.check(turn)
        tokens = self._checked_prompt(prompt)
        if max_tokens is not None and max_tokens < 1:
            raise LocalspecError(f"max_tokens must be at least 1, not {max_tokens}")
        if logprobs is not None and not 0 <= logprobs <= self.model.n_vocab:
            raise LocalspecError(f"logprobs must be 0..{self.model.n_vocab}, not {logprobs}")
        if isinstance(stop, str):
            stop = (stop,)
        params = params or SamplingParams()
        if max(params.logit_bias, default=0) >= self.model.n_vocab:
            raise LocalspecError(
                f"logit_bias: token {max(params.logit_bias)} is outside the vocabulary of "
                f"{self.model.n_vocab}"
            )
        is_end = self.model.is_end if stop_token_ids is None else set(stop_token_ids).__contains__
        state = None if grammar is None else grammar.start(self.model)
        request = _Request(
            tokens,
            Sampler(params, tokens, state),
            max_tokens,
            draft or DraftOptions.auto(),
            TextStream(self.model.piece, stop),
            # A grammar allows an end token only where the answer is complete.
            is_end if state is None else lambda t: is_end(t) or self.model.is_end(t),
            logprobs,
        )
        return self._in_turn(turn, request)

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
        self._check_open()
        if self.n_ctx < MIN_TUNED_CTX:
            raise LocalspecError(
                f"a context of {self.n_ctx} tokens is too short to measure in; use an n_ctx of at "
                f"least {MIN_TUNED_CTX}"
            )
        turn = Turn()
        self._turns.begin(turn)
        try:
            with self._work():
                return self._tune(force=force, progress=progress)
        finally:
            self._turns.end(turn)

    def _tune(
        self, *, force: bool = False, progress: Callable[[float], None] | None = None
    ) -> tuning.Tuning:
        path = self._tuning_file()
        found = None if force else tuning.load(path)
        if found is None:
            self._use_threads(None)
            found = tuning.measure(self, progress=progress)
            tuning.save(path, found)
        if self._drafter is not None and len(self._files) > 1:
            depths = self._drafter.info.max_depth
            self._calibration = calibration_file.load(self._files[1], depths)
        self._tuning = found
        self._auto = self._new_policy(found)
        return found

    def _new_policy(self, found: tuning.Tuning, *, pad: bool = False) -> AutoPolicy:
        """A policy that has learned nothing yet; with `pad`, plain rounds are two rows."""
        seconds = np.array(found.seconds)
        if pad:
            seconds[:, 0] = seconds[:, 1]
        return AutoPolicy(
            CostCurve(found.sizes, found.depths, seconds),
            block_seconds=found.block_seconds,
            host_seconds=found.host_seconds,
            switch_seconds=found.switch_seconds,
            depths=self._drafter.info.max_depth if self._drafter is not None else 0,
            calibration=self._calibration,
            threads=self._threads if self._threads_adapt and self._threads > 1 else None,
        )

    def _use_threads(self, count: int | None) -> None:
        """From the next pass on; None: all of them."""
        count = count or self._threads
        if count != self._threads_now:
            for context in self._contexts:
                context.set_threads(count)
            self._threads_now = count

    def _tuning_file(self) -> Path:
        return tuning.cache_file(self, self._files, self._settings)

    def _policy(self, draft: DraftOptions, turn: Turn) -> AutoPolicy | None:
        """The policy, when it is asked for and there is anything to decide."""
        if draft.policy != "auto" or draft.tokens == 0 or self.n_ctx < MIN_TUNED_CTX:
            return None
        if self._auto is None:

            def look(_fraction: float) -> None:
                if turn.is_cancelled():
                    raise _Cancelled

            self._tune(progress=look)
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

    def _in_turn(self, turn: Turn, request: _Request) -> Generator[Step, None, None]:
        """Wait for the turn, then generate; llama.cpp works only between the steps."""
        self._check_open()
        if not self._turns.begin(turn):
            yield Step("", (), None, None, "cancelled")
            return
        try:
            steps = self._generate(turn, request)
            while True:
                with self._work():
                    step = next(steps, None)
                if step is None:
                    return
                yield step
        finally:
            self._turns.end(turn)

    @contextlib.contextmanager
    def _work(self) -> Iterator[None]:
        """Whoever calls llama.cpp does it in here; `close` waits for the end of it."""
        self._check_open()  # before the lock: in a forked child it may never be free
        with self._working:
            self._check_open()
            self._working_thread = threading.get_ident()
            try:
                yield
            finally:
                self._working_thread = None

    def _generate(self, turn: Turn, request: _Request) -> Generator[Step, None, None]:
        prompt, sampler, draft = request.prompt, request.sampler, request.draft
        try:
            auto = self._policy(draft, turn)
        except _Cancelled:
            yield Step("", (), None, None, "cancelled")
            return
        if draft.policy == "auto" and auto is None:
            draft = replace(draft, policy="fixed", tokens=0)
        self._use_threads(threads_of(auto, draft))
        pad = False
        if draft.deterministic:
            self._live.set_aside()
            pad = self._pads(draft)
            self._live.clear()
            if auto is not None and self._tuning is not None:
                auto = self._new_policy(self._tuning, pad=pad)
        prefill = self._live.prefill(prompt, turn, deterministic=draft.deterministic)
        if turn.is_cancelled():
            yield Step("", (), None, prefill, "cancelled")
            return
        if np.isnan(self._target.logits()[0]).any():
            raise LocalspecError(
                f"the output of {self.model.path.name} is not a number; the file is damaged, "
                "download or convert it again"
            )
        room = self.n_ctx - len(prompt)
        left = room if request.max_tokens is None else min(request.max_tokens, room)
        anchor = sampler.choose(self._target.logits()[0])
        drafting = Drafting(self._target, self._drafter, draft, sampler, prompt, auto, pad)
        likely = self._logprobs([0], [anchor], request.logprobs)
        step = self._step(request, [anchor], left, likely, prefill=prefill)
        while True:
            sampler.commit(step.token_ids)
            drafting.commit(step.token_ids)
            left -= len(step.token_ids)
            yield step
            if step.finish_reason is not None:
                return
            if turn.is_cancelled():
                yield Step(request.stream.finish(), (), None, None, "cancelled")
                return
            self._live.secure_prompt()
            committed, the_round, likely = self._round(request, anchor, drafting, left)
            anchor = committed[-1]
            step = self._step(request, committed, left, likely, the_round)

    def _pads(self, draft: DraftOptions) -> bool:
        """Whether deterministic rounds may not be single rows."""
        if draft.tokens == 0:
            return False  # all of them are
        if self._single_rows_differ is None:
            self._single_rows_differ = determinism.single_rows_differ(self)
        return self._single_rows_differ

    def _round(
        self, request: _Request, anchor: int, drafting: Drafting, left: int
    ) -> tuple[list[int], Round, tuple[TokenLogprobs, ...]]:
        """One round; the tokens it commits (accepted ones and the bonus)."""
        clock = time.perf_counter
        started = clock()
        room = self.n_ctx - self._target.n_past - 1
        draft = drafting.draft(anchor, room=room, left=left)
        tree = draft.tree
        at = clock()
        logits = self._target.verify(anchor, tree)
        verify_seconds = clock() - at
        outcome = _accept(tree, logits, request.sampler)
        self._target.commit(outcome.path)
        if self.on_verified is not None:
            self.on_verified(tree, outcome.path)
        accepted = [int(tree.token[i]) for i in outcome.path]
        rows = [0, *(i + 1 for i in outcome.path)]
        self._live.extend([anchor, *accepted], rows)
        committed = [*accepted, outcome.bonus]
        likely = self._logprobs(rows, committed, request.logprobs)
        threads = self._threads_now
        drafting.learn(draft, committed, verify_seconds)
        self._use_threads(drafting.threads)
        host = clock() - started - draft.seconds - verify_seconds
        seconds = Seconds(draft.seconds, verify_seconds, host)
        the_round = Round(
            draft.drafted,
            len(tree),
            len(accepted),
            seconds,
            draft.chosen,
            draft.paused,
            draft.probing,
            threads,
        )
        return committed, the_round, likely

    def _logprobs(
        self, rows: list[int], tokens: list[int], top: int | None
    ) -> tuple[TokenLogprobs, ...]:
        """Those of tokens chosen from rows of the target's last pass, if asked for."""
        if top is None:
            return ()
        return path_logprobs(self._target.logits(), rows, tokens, top)

    def _step(
        self,
        request: _Request,
        committed: list[int],
        left: int,
        likely: tuple[TokenLogprobs, ...],
        the_round: Round | None = None,
        prefill: Prefill | None = None,
    ) -> Step:
        """Cut what a round committed at an end token, a stop string or the limit; make the text."""
        stream, text, kept, reason = request.stream, "", [], None
        for token in committed:
            kept.append(token)
            if request.is_end(token):
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
            the_round = replace(the_round, accepted=len(kept))
        return Step(text, tuple(kept), the_round, prefill, reason, likely[: len(kept)])

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise LocalspecError(
                "this engine belongs to the process that this one was forked from; load one in "
                'each process, and start processes with the "spawn" method'
            )
        if self._owned is None:
            raise LocalspecError("this engine is closed; load it again")

    def close(self) -> None:
        """Free models and contexts, from any thread. A second call does nothing.

        A generation under way is cancelled: this waits for the end of its round, and asking it for
        more steps raises LocalspecError.

        Raises:
            LocalspecError: called from a callback of this engine, while llama.cpp works.
        """
        if os.getpid() != self._pid:
            return  # the parent's; its memory is not ours to free
        if self._working_thread == threading.get_ident():
            raise LocalspecError("an engine cannot be closed by its own callback; cancel it first")
        self._turns.cancel()
        with self._working:
            owned, self._owned = self._owned, None
            self._live.prefixes.pool.clear()
            if owned is not None:
                owned.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Cancelled(Exception):
    """Ends a measurement when the generation that needed it is cancelled."""


def _accept(tree: DraftTree, logits: npt.NDArray[np.float32], sampler: Sampler) -> Acceptance:
    if tree.proposals is not None:
        return accept_rejection(
            tree, lambda row, path: sampler.distribution(logits[row], path), sampler.accept_rng
        )
    return accept_match(tree, lambda row, path: sampler.choose(logits[row], path))
