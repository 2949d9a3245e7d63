"""A whole training run: prompts, text, training, checkpoint, GGUF, calibration.

Its directory holds everything: `run.json` (settings), `state.json` (what was measured once),
`prompts.jsonl`, `text/`, `features/`, `snapshot.pt`, `log.jsonl`, and at the end `checkpoint/`,
`drafter.gguf` and `drafter.calibration.json`. Every file appears whole or not at all, so that a
run killed at any moment goes on from there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.llama import Model
from localspec.models import prompting, settings, shape, speed, writing
from localspec.models.config import DrafterConfig
from localspec.models.progress import Report, Run
from localspec.models.prompting import Messages
from localspec.models.settings import Settings
from localspec.models.store import Store
from localspec.models.synthesis import Writer
from localspec.models.warm import config_of, open_init

if TYPE_CHECKING:
    from localspec.models.finish import Finished

# Free space a run needs beside `disk`: text, checkpoints, the drafter.
_FREE = 256 << 20
_CALIBRATED = 64  # prompts answered to calibrate


def train(
    target: str | os.PathLike[str] | None,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    report: Report = lambda progress: None,
    **options: Any,
) -> Finished:
    """Train a drafter for one GGUF, or go on with a run that was stopped.

    Args:
        target: the GGUF that the drafter is to draft for; None with `resume`.
        out: the run's directory.
        resume: go on with the run in `out`; options given must be those it was begun with.
        report: called with the progress, often.
        options: fields of `settings.Settings`: prompts, hours or tokens, steps, init, disk, seed,
            device, precision, threads, layers, block_size, rank, head, vocab, ...

    Raises:
        LocalspecError: anything wrong with the inputs or the disk, in one line.
        KeyboardInterrupt: stopped; what was done is kept.
    """
    out = Path(out)
    asked = {**options, "target": None if target is None else str(Path(target).resolve())}
    chosen = settings.begin(out, asked, resume=resume)
    file = Path(chosen.target)
    with GgufFile(file) as header:
        shape.check_trainable(header)
        given = _init_config(chosen, header)
        if chosen.prompts is not None:
            prompting.read(Path(chosen.prompts))  # before anything takes long
        elif "tokenizer.chat_template" not in header.metadata:
            raise prompting.no_template(file.name)
        config = given or shape.drafter_config(header, chosen.shape)
        _check_budget(chosen, config)
        _check_out(out)
        from localspec.models.learning import device_of  # torch takes seconds to import

        device_of(chosen.device)
        settings.write(out, chosen)
        run = Run(out, chosen, report)
        return _phases(run, file, header, given)


def _phases(run: Run, file: Path, header: GgufFile, given: DrafterConfig | None) -> Finished:
    from localspec.models.finish import finish
    from localspec.models.learning import learn

    chosen = run.settings
    run.enter("prompts")
    evaluated = speed.fastest(run, file)
    ratio = run.facts.get("pass_ratio", 2.0)
    config = given or shape.drafter_config(header, chosen.shape, pass_ratio=ratio)
    store = Store(run.out, speed.features_budget(run))
    model = Model(evaluated)
    try:
        prompts = writing.make_prompts(run, model)
        if not run.facts.get("text"):
            _check_outputs(model, header, config, prompts, chosen)
        writing.write_text(run, model, prompts, store, config.target_layer_ids, config.num_depths)
        unseen = _unseen(run, model, prompts, store)
    finally:
        model.close()
    trained = learn(run, header, evaluated, store, config, len(prompts))
    return finish(run, file, trained, unseen)


def _init_config(chosen: Settings, header: GgufFile) -> DrafterConfig | None:
    if chosen.init is None:
        return None
    if chosen.shape:
        name = next(iter(chosen.shape)).replace("_", "-")
        raise LocalspecError(f"--init gives the drafter's shape; leave --{name} out")
    return config_of(open_init(chosen.init, header))


def _check_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as e:
        raise LocalspecError(
            f"{out} cannot be written ({e.strerror or e}); choose another directory with -o"
        ) from e
    free = shutil.disk_usage(out).free
    if free < _FREE:
        raise LocalspecError(
            f"only {free / 1e6:.0f} MB are free in {out}; a run needs {_FREE / 1e6:.0f} MB beside "
            "its features: free some, or choose another directory with -o"
        )


def _check_budget(chosen: Settings, config: DrafterConfig) -> None:
    row = 2 * (config.num_features + config.hidden_size) + 4
    least = writing.SHARD * chosen.longest * row
    if chosen.disk < least:
        raise LocalspecError(
            f"a disk budget of {chosen.disk / 1e6:.0f} MB holds no features of this target; give "
            f"--disk at least {-(-least // 1000000)}M"
        )


def _check_outputs(
    model: Model, header: GgufFile, config: DrafterConfig, prompts: list[Messages],
    chosen: Settings,
) -> None:  # fmt: skip
    """Whether the target's logits are what training takes them for: W h, perhaps soft-capped.

    Raises:
        LocalspecError: they are not.
    """
    ids = prompting.tokens_of(model, prompting.template(model), prompts[0])[: chosen.longest]
    writer = Writer(model, config.target_layer_ids, streams=1, longest=len(ids),
                    n_threads=chosen.threads)  # fmt: skip
    try:
        _, hidden, _ = writer.evaluate(np.array(ids, np.int32))
        theirs = np.array(writer.context.logits()[-1])
    finally:
        writer.close()
    output = "output.weight" if "output.weight" in header.tensors else "token_embd.weight"
    ours = header.tensor(output) @ hidden[-1].astype(np.float32)
    cap = header.arch_get("final_logit_softcapping")
    if cap:
        ours = cap * np.tanh(ours / cap)
    off = np.sqrt(np.mean((ours - theirs) ** 2)) / max(1e-6, float(theirs.std()))
    if not off < 0.2:
        raise LocalspecError(
            f"{model.path.name} ({header.architecture}) makes its logits in a way that training "
            "does not know; no drafter can be trained for it yet"
        )


def _unseen(run: Run, model: Model, prompts: list[Messages], store: Store) -> list[list[int]]:
    """Tokens of prompts that training leaves out: held-out ones, then ones nobody answered.

    Where there are too few to calibrate with, others follow.
    """
    from localspec.models.batches import split
    from localspec.models.learning import HELD_OUT

    _, held = split(store.entries, HELD_OUT, run.settings.seed)
    first = [entry.index for entry in held if entry.index < len(prompts)]
    answered = {entry.index for entry in store.entries}
    rest = [i for i in range(len(prompts)) if i not in answered]
    wanted: list[int] = [*first, *rest]
    if len(wanted) < 16:
        wanted += [i for i in range(len(prompts)) if i not in set(wanted)][: 16 - len(wanted)]
    order = prompting.order(len(prompts), run.settings.seed)
    chat = prompting.template(model)
    found: list[list[int]] = []
    for i in wanted[:_CALIBRATED]:
        ids = prompting.tokens_of(model, chat, prompts[order[i]])
        if len(ids) + 16 <= run.settings.longest:
            found.append(ids)
    return found
