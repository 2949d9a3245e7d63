"""How fast a target is evaluated here: what decides between a file and its BF16 copy."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np

from localspec.errors import LocalspecError
from localspec.llama import Context, ContextOptions, Model, has_gpu
from localspec.models.copy16 import write_copy
from localspec.models.progress import Progress, Run

COPY = "target-bf16.gguf"
_GAIN = 1.2  # a copy must be this much faster to be kept
_BATCH = 64


def prefill_rate(model: Model, n_threads: int, seconds: float = 1.0) -> float:
    """Tokens per second of prefill in batches of 64."""
    return _BATCH / _pass_time(model, _BATCH, n_threads, seconds)


def pass_ratio(model: Model, n_threads: int, seconds: float = 0.5) -> float:
    """Time of a pass over 8 tokens against a pass over one."""
    one = _pass_time(model, 1, n_threads, seconds)
    return _pass_time(model, 8, n_threads, seconds) / one


def _pass_time(model: Model, size: int, n_threads: int, seconds: float) -> float:
    """The shortest of the passes that fit into some seconds; the first one does not count."""
    context = Context(
        model, ContextOptions(n_ctx=256, n_batch=_BATCH, n_outputs=1, n_threads=n_threads)
    )
    try:
        outputs = np.zeros(size, bool)
        outputs[-1] = True
        taken: list[float] = []
        until = time.perf_counter() + seconds
        while len(taken) < 3 or time.perf_counter() < until:
            context.clear()
            begun = time.perf_counter()
            context.decode(np.arange(size) % model.n_vocab, np.arange(size), outputs=outputs)
            taken.append(time.perf_counter() - begun)
    finally:
        context.close()
    return min(taken[1:])


def fastest(run: Run, target: Path) -> Path:
    """The file to evaluate the target with: itself, or a BF16 copy where that is faster.

    The weights are the same. The copy lies in the run's directory and counts as disk space used.

    Raises:
        LocalspecError: the target cannot be loaded.
    """
    copy = run.out / COPY
    if "fastest" not in run.facts:
        run.facts["fastest"] = _measured(run, target, copy)
        run.save()
    if run.facts["fastest"] == COPY and not copy.is_file():
        write_copy(target, copy)
    return copy if run.facts["fastest"] == COPY else target


def _measured(run: Run, target: Path, copy: Path) -> str:
    threads = run.settings.threads
    model = Model(target)
    try:
        run.facts["pass_ratio"] = round(pass_ratio(model, threads), 3)
        own = prefill_rate(model, threads)
        # A copy takes 2 bytes a weight; files that are F16 or larger gain nothing.
        size = _copy_size(target)
        if has_gpu() or model.n_bytes > 0.7 * size or size > _room(run):
            return "target"
    finally:
        model.close()
    run.report(Progress("text", 0.0, "trying a BF16 copy of the target"))
    try:
        write_copy(target, copy)
        model = Model(copy)
    except LocalspecError:  # a type that cannot be read, or no space: do without
        copy.unlink(missing_ok=True)
        return "target"
    try:
        rate = prefill_rate(model, threads)
    finally:
        model.close()
    run.facts["prefill"] = {"target": round(own), "copy": round(rate)}
    if rate >= _GAIN * own:
        return COPY
    copy.unlink(missing_ok=True)
    return "target"


def _copy_size(target: Path) -> int:
    from localspec.ggufio import GgufFile

    with GgufFile(target) as file:
        return 2 * sum(int(np.prod(t.shape)) for t in file.tensors.values())


def _room(run: Run) -> int:
    """Half of what the run may use, and of what is free."""
    return min(run.settings.disk, shutil.disk_usage(run.out).free) // 2


def features_budget(run: Run) -> int:
    """Bytes that features may take: what the copy leaves of the disk space."""
    copy = run.out / COPY
    return max(0, run.settings.disk - (copy.stat().st_size if copy.is_file() else 0))
