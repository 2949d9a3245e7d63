"""The second half of a run: training steps over the text, snapshots, evaluation."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.interrupts import wish_to_stop
from localspec.llama import Model, default_threads
from localspec.models import snapshot
from localspec.models.batches import Example, anchors_of, chosen, load, split
from localspec.models.config import DrafterConfig
from localspec.models.drafter import Drafter
from localspec.models.initial import draft_vocabulary, new_drafter
from localspec.models.objective import Losses, Weights
from localspec.models.progress import Progress, Run
from localspec.models.shape import vocabulary_size
from localspec.models.store import Entry, Rows, Store
from localspec.models.synthesis import Ints, Writer
from localspec.models.trainer import Held, Recipe, Trainer
from localspec.models.warm import open_init, warm_drafter

LOG = "log.jsonl"
HELD_OUT = 48  # conversations kept from training, at most a tenth of all
_EVALUATED = 24
_EVALUATION_ANCHORS = 128
_SCALED = 32  # conversations that the scale of features is measured on
_PASSES = 6  # over the text, where neither hours nor steps say how long
_WARM = 0.25  # of the learning rates, from an existing drafter
# An untrained drafter that is as sure as the target learns to be unsure first.
_UNSURE = 0.3  # of the target's final norm
# Cross-entropy moves a drafter that knows nothing faster than total variation, whose gradient
# vanishes where the two distributions do not overlap.
FIRST_WEIGHTS = Weights(ce=1.0)
FIRST_SHARE = 0.6  # of the run; none from an existing drafter
_LOGIT_BYTES = 256 << 20  # of one [blocks, depths, V] array


@dataclass(frozen=True)
class Trained:
    """What training gave.

    Attributes:
        trainer: at its last step.
        held: the last evaluation; None without held-out text.
        steps: taken.
        n_tokens: of the text, prompts included.
        n_conversations: trained on.
    """

    trainer: Trainer
    held: Held | None
    steps: int
    n_tokens: int
    n_conversations: int


class Text:
    """The conversations of a run by side, and the examples made of them."""

    def __init__(
        self,
        run: Run,
        store: Store,
        evaluated: Path,
        config: DrafterConfig,
        n_prompts: int,
        device: torch.device,
    ) -> None:
        settings = run.settings
        self._store, self._evaluated, self._config = store, evaluated, config
        self._settings, self._device = settings, device
        self._writer: Writer | None = None
        train, held = split(store.entries, HELD_OUT, settings.seed)
        # Another answer to a held-out prompt would give it away.
        known = {entry.index % n_prompts for entry in held}
        usable = [e for e in train if e.index % n_prompts not in known]
        self.train = [e for e in usable if len(anchors_of(e, config.num_depths, 1, None))]
        long_enough = [e for e in held if len(anchors_of(e, config.num_depths, 8, None)) >= 8]
        greedy = [e for e in long_enough if e.temperature == 0]
        self.held = (greedy or long_enough)[:_EVALUATED]
        if not self.train:
            raise LocalspecError(
                f"no answer has the {config.num_depths + 1} tokens that a block needs; give other "
                "prompts, or a smaller --block-size"
            )

    def counts(self) -> npt.NDArray[np.int64]:
        """[V] how often the target wrote each token, in what is trained on."""
        counts = np.zeros(self._config.vocab_size, np.int64)
        for entry, tokens in zip(self.train, self._store.tokens(self.train), strict=True):
            counts += np.bincount(tokens[entry.n_prompt :], minlength=len(counts))
        return counts

    def examples(
        self, entries: Sequence[Entry], most: int, rng: np.random.Generator
    ) -> Iterator[Example]:
        """Examples with at most `most` anchors each."""
        rows = self._config.reduced_vocab or self._config.vocab_size
        most = min(most, max(8, _LOGIT_BYTES // (4 * rows * self._config.num_depths)))
        anchors = [anchors_of(e, self._config.num_depths, most, rng) for e in entries]
        return load(self._store, entries, self._evaluate, anchors, self._device)

    def shaped(self, config: DrafterConfig) -> None:
        """From now on for a drafter of this vocabulary."""
        self._config = config

    def scale(self) -> Tensor:
        """[n_features] root mean square of each feature, the first tokens left out: some of
        them have activations like no others."""
        total, n = torch.zeros(self._config.num_features), 0
        some = self.train[:_SCALED]
        for example in load(
            self._store, some, self._evaluate, [np.array([1], np.int32)] * len(some)
        ):
            rows = example.features[4:]
            total += rows.pow(2).sum(0)
            n += len(rows)
        return (total / max(1, n)).sqrt().clamp(min=1e-4)

    def _evaluate(self, tokens: Ints) -> Rows:
        if self._writer is None:
            longest = max(e.n_tokens for e in self._store.entries)
            self._model = Model(self._evaluated)
            self._writer = Writer(
                self._model,
                self._config.target_layer_ids,
                streams=1,
                longest=longest,
                n_threads=self._settings.threads,
            )
        return self._writer.evaluate(tokens)

    def close(self) -> None:
        """Free the target, if features had to be evaluated again."""
        if self._writer is not None:
            self._writer.close()
            self._model.close()


def learn(
    run: Run,
    target: GgufFile,
    evaluated: Path,
    store: Store,
    config: DrafterConfig,
    n_prompts: int,
) -> Trained:
    """Train until the hours or the steps are over, from the last snapshot on.

    Raises:
        LocalspecError: the text is too short, the disk is full, or the loss is not a number.
        KeyboardInterrupt: after a snapshot.
    """
    run.enter("training")
    settings, device = run.settings, device_of(run.settings.device)
    torch.set_num_threads(settings.threads or default_threads())
    with ExitStack() as stack:
        text = Text(run, store, evaluated, config, n_prompts, device)
        stack.callback(text.close)
        drafter = start(run, target, config, text)
        text.shaped(drafter.config)
        saved = snapshot.load(run.out, device)
        scale = text.scale() if saved is None else saved.scale
        trainer = Trainer(drafter.to(device), scale, recipe(run, device), softcap=_softcap(target))
        if saved is not None:
            saved.restore(trainer)
        loop = _Loop(run, trainer, text, saved)
        try:
            held = loop.run()
        finally:
            loop.close()
        return Trained(trainer, held, loop.step, store.n_tokens, len(text.train))


def start(run: Run, target: GgufFile, config: DrafterConfig, text: Text) -> Drafter:
    """The drafter before its first step."""
    settings = run.settings
    if settings.init is not None:
        return warm_drafter(open_init(settings.init, target), target)
    counts = text.counts()
    size = vocabulary_size(counts, settings.vocab)
    ids = None if size is None else draft_vocabulary(counts, size)
    shaped = replace(config, draft_vocab_size=size)
    run.facts["covered"] = 1.0 if ids is None else round(float(counts[ids].sum() / counts.sum()), 4)
    drafter = new_drafter(shaped, target, draft_ids=ids, seed=settings.seed)
    with torch.no_grad():
        drafter.norm.weight.mul_(_UNSURE)
    return drafter


def recipe(run: Run, device: torch.device) -> Recipe:
    """The settings of the steps; how precise they are is measured once."""
    settings = run.settings
    if "bf16" not in run.facts:
        run.facts["bf16"] = (
            bfloat16_helps(device) if settings.precision == "auto" else settings.precision == "bf16"
        )
        run.save()
    slower = 1.0 if settings.init is None else _WARM
    return Recipe(
        sequences=settings.sequences,
        anchors=settings.anchors,
        lr=slower * settings.lr,
        adam_lr=slower * settings.adam_lr,
        muon=hasattr(torch.optim, "Muon"),
        bfloat16=run.facts["bf16"],
    )


def device_of(name: str) -> torch.device:
    """The device of that name; "auto": the first that is there of cuda, mps and cpu.

    Raises:
        LocalspecError: it is not there.
    """
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(kind for kind, found in there.items() if found)
    if not there[name]:
        raise LocalspecError(f"torch finds no {name} device here; use --device cpu or auto")
    return torch.device(name)


def bfloat16_helps(device: torch.device) -> bool:
    """Whether matrix products are clearly faster in bfloat16 than in float32."""
    if device.type != "cpu":
        return str(device.type) == "cuda"
    taken = []
    for kind in (torch.float32, torch.bfloat16):
        a, b = torch.ones(512, 576, dtype=kind), torch.ones(576, 1536, dtype=kind)
        times = []
        for _ in range(12):
            begun = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - begun)
        taken.append(min(times[2:]))
    fast: bool = taken[1] < 0.8 * taken[0]
    return fast


def _softcap(target: GgufFile) -> float | None:
    value = target.arch_get("final_logit_softcapping")
    return float(value) if value else None


class _Loop:
    """Steps with what surrounds them: the log, snapshots, the end."""

    def __init__(
        self, run: Run, trainer: Trainer, text: Text, saved: snapshot.Snapshot | None
    ) -> None:
        self._run, self._trainer, self._text = run, trainer, text
        settings = run.settings
        self.step = 0 if saved is None else saved.step
        self._seconds = 0.0 if saved is None else saved.seconds  # of earlier starts
        self._length = None if saved is None else saved.length
        self._begun = time.monotonic()
        self._budget = self._time_left() if settings.steps is None and settings.hours else None
        passes = -(-_PASSES * len(text.train) // settings.sequences)
        self._steps = settings.steps or (None if self._budget is not None else passes)
        self._log = _open_log(run.out / LOG, self.step)
        self._last = trainer.recipe
        self._first = replace(self._last, weights=FIRST_WEIGHTS)
        if settings.init is not None:
            self._first = self._last

    def _time_left(self) -> float:
        """Seconds that training has in all; fixed when it begins, so that rates fall the same."""
        facts = self._run.facts
        if "training_seconds" not in facts:
            assert self._run.settings.hours is not None
            whole = 3600 * self._run.settings.hours
            before = self._run.spent() - self._run.spent("training")
            facts["training_seconds"] = max(1.0, 0.95 * whole - before)
            self._run.save()
        return float(facts["training_seconds"])

    def seconds(self) -> float:
        """Spent on training, earlier starts included."""
        return self._seconds + time.monotonic() - self._begun

    def progress(self) -> float:
        """0..1 of the training."""
        if self._steps is not None:
            return min(1.0, self.step / self._steps)
        assert self._budget is not None
        return min(1.0, self.seconds() / self._budget)

    def run(self) -> Held | None:
        """Steps until the end; a snapshot at the end, on the way, and when interrupted."""
        every = 60 * self._run.settings.checkpoint_minutes
        last = time.monotonic()
        # Never inside a step: half a step is a state that no run has.
        with wish_to_stop() as interrupted:
            while self.progress() < 1 and not interrupted():
                self._one()
                if time.monotonic() - last > every:
                    self.evaluate()
                    self._save()
                    last = time.monotonic()
            self._save()
            if interrupted():
                raise KeyboardInterrupt
        return self.evaluate()

    def _one(self) -> None:
        settings, train = self._run.settings, self._text.train
        entries = chosen(train, self.step, settings.sequences, settings.seed)
        rng = np.random.default_rng([settings.seed, self.step])
        progress = self.progress()
        self._trainer.recipe = self._first if progress < FIRST_SHARE else self._last
        losses = self._trainer.step(self._text.examples(entries, settings.anchors, rng), progress)
        self.step += 1
        if losses is None:
            return
        if not torch.isfinite(losses.total):
            raise LocalspecError(
                f"the loss is not a number after {self.step} steps; go on from the last checkpoint "
                "with --resume, or begin anew with lower rates (--lr, --adam-lr)"
            )
        self._write(losses)

    def _write(self, losses: Losses) -> None:
        agreed = [round(float(v), 4) for v in losses.agreed]
        row = {
            "step": self.step,
            "loss": round(float(losses.total), 6),
            "ce": round(float(losses.ce), 6),
            "tv": round(float(losses.tv), 6),
            "confidence": round(float(losses.confidence), 6),
            "agreed": agreed,
        }
        self._log.write(json.dumps(row) + "\n")
        self._run.report(
            Progress(
                "training", self.progress(), f"step {self.step}", self.step,
                float(losses.total), tuple(agreed), self._length,
            )
        )  # fmt: skip

    def evaluate(self) -> Held | None:
        """How it does on held-out text; noted in the log."""
        if not self._text.held:
            return None
        self._trainer.recipe = self._last  # so that losses can be compared
        rng = np.random.default_rng([self._run.settings.seed, 4])
        examples = self._text.examples(self._text.held, _EVALUATION_ANCHORS, rng)
        held: Held = self._trainer.evaluate(examples)
        self._length = held.length
        shown = {name: _rounded(value) for name, value in asdict(held).items()}
        self._log.write(json.dumps({"step": self.step, "held_out": shown}) + "\n")
        self._log.flush()
        return held

    def _save(self) -> None:
        snapshot.save(self._run.out, self._trainer, self.step, self.seconds(), self._length)
        self._log.flush()
        self._run.save()

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _open_log(file: Path, step: int) -> TextIO:
    """The log, cut to the steps up to `step`: what came after a snapshot is done again."""
    kept = []
    if file.is_file():
        for line in file.read_text("utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if row["step"] <= step:
                kept.append(line)
    aside = file.with_name(f".{file.name}.part")
    aside.write_text("".join(line + "\n" for line in kept), "utf-8")
    os.replace(aside, file)
    return open(file, "a", encoding="utf-8")


def _rounded(value: float | list[float]) -> float | list[float]:
    return [round(v, 4) for v in value] if isinstance(value, list) else round(value, 4)
