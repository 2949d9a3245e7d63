"""The end of a run: a checkpoint in the published format, its GGUF, its calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from localspec import calibration, calibration_file
from localspec.calibrating import checked_drafter, record
from localspec.calibration import Records
from localspec.convert import convert
from localspec.drafting import DraftOptions
from localspec.engine import Engine
from localspec.models import card
from localspec.models.checkpoint import save_drafter
from localspec.models.drafter import Drafter
from localspec.models.learning import Trained
from localspec.models.progress import Progress, Run
from localspec.models.trainer import Trainer
from localspec.sampling import SamplingParams

CHECKPOINT, DRAFTER = "checkpoint", "drafter.gguf"
FEWEST_ANSWERS = 5  # that a calibration is fitted to
_ENOUGH_ANSWERS = 12  # where time is short
_MEASURED = 8  # prompts for the accepted length in the runtime
_LONGEST = 96  # tokens of an answer at this stage


@dataclass(frozen=True)
class Finished:
    """What a run gave.

    Attributes:
        checkpoint: directory with config.json, model.safetensors and the card.
        drafter: the GGUF.
        calibration: its side file; None when it was left out.
        length: accepted length of a greedy chain in the runtime, on held-out prompts; None
            without any.
        plain_length: what the training's own evaluation expects of it.
    """

    checkpoint: Path
    drafter: Path
    calibration: Path | None
    length: float | None
    plain_length: float | None


def drafter_of(trainer: Trainer, dtype: torch.dtype) -> Drafter:
    """The trained drafter for features as they are, on the CPU."""
    config = trainer.drafter.config
    drafter = Drafter(config, own_embed=False, own_lm_head=config.reduced_vocab is not None)
    drafter.load_state_dict({name: t.cpu() for name, t in trainer.folded().items()})
    drafter.to(dtype).eval()
    return drafter


def finish(run: Run, target: Path, trained: Trained, prompts: Sequence[Sequence[int]]) -> Finished:
    """Save, convert, measure and calibrate.

    Args:
        run: the run.
        target: the target's own file.
        trained: what training gave.
        prompts: tokens of prompts it was not trained on.

    Raises:
        LocalspecError: a file cannot be written, or the conversion is not what the checkpoint is.
    """
    checkpoint, gguf = run.out / CHECKPOINT, run.out / DRAFTER
    run.enter("save")
    run.report(Progress("save", 0.0, str(checkpoint), trained.steps))
    dtype = torch.float32 if run.settings.outtype == "f32" else torch.bfloat16
    drafter = drafter_of(trained.trainer, dtype)
    save_drafter(drafter, checkpoint)
    card.write(checkpoint, run, target, drafter.config, trained, None)
    run.enter("convert")
    run.report(Progress("convert", 0.0, str(gguf), trained.steps))
    convert(checkpoint, target, gguf, outtype=run.settings.outtype, verify=True)
    run.enter("calibrate")
    side, length = _in_the_runtime(run, target, gguf, prompts)
    card.write(checkpoint, run, target, drafter.config, trained, length)
    run.save()
    expected = None if trained.held is None else trained.held.length
    return Finished(checkpoint, gguf, side, length, expected)


def _in_the_runtime(
    run: Run, target: Path, gguf: Path, prompts: Sequence[Sequence[int]]
) -> tuple[Path | None, float | None]:
    """(calibration, accepted length) of the GGUF."""
    n_ctx = -(-(run.settings.longest + _LONGEST + 64) // 256) * 256
    side = length = None
    if not prompts:
        return None, None
    with Engine.load(target, gguf, n_ctx=n_ctx, n_threads=run.settings.threads) as engine:
        length = accepted_length(engine, prompts[:_MEASURED])
        if run.settings.calibrate:
            side = _calibrate(run, engine, gguf, prompts)
    return side, length


def accepted_length(engine: Engine, prompts: Sequence[Sequence[int]]) -> float | None:
    """Tokens per round of greedy chains as long as a block; None when nothing was drafted."""
    chain = DraftOptions(tokens=checked_drafter(engine).info.max_depth)
    tokens = rounds = 0
    for prompt in prompts:
        result = engine.complete(prompt, max_tokens=_LONGEST, draft=chain)
        tokens += max(0, len(result.token_ids) - 1)
        rounds += len(result.rounds)
    return tokens / rounds if rounds else None


def _calibrate(
    run: Run, engine: Engine, gguf: Path, prompts: Sequence[Sequence[int]]
) -> Path | None:
    answers: list[Records] = []
    for i, prompt in enumerate(prompts):
        if run.share() >= 1 and len(answers) >= _ENOUGH_ANSWERS:
            break
        params = SamplingParams(temperature=0.0, seed=run.settings.seed + i)
        found = record(engine, prompt, max_tokens=_LONGEST, params=params)
        if len(found.chain):
            answers.append(found)
        run.report(Progress("calibrate", (i + 1) / len(prompts), f"{len(answers)} answers"))
    if len(answers) < FEWEST_ANSWERS:
        return None
    table, report = calibration.calibrate(answers, checked_drafter(engine).info.max_depth)
    about = {"target": engine.model.description, "prompts": report.prompts}
    return calibration_file.save(gguf, table, about)
