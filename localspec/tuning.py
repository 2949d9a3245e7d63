"""Measuring this machine: the target's cost curve, the drafter's pass, Python's share of a round.

The result is cached per device, files and settings, so that it is measured once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from localspec import places
from localspec.cost_curve import SIZES
from localspec.rollout import grow_tree
from localspec.tree import Block, DraftTree, build_tree

if TYPE_CHECKING:
    from localspec.engine import Engine

_FORMAT = 3
_SHALLOW, _DEEP = 32, 512
_DEEP_SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Tuning:
    """What was measured.

    Attributes:
        sizes: [M] pass sizes.
        depths: [K] context depths.
        seconds: [K][M] seconds of a target pass.
        block_seconds: one drafter pass, absorbing features included; 0 without a drafter.
        host_seconds: growing a tree in Python; 0 without a drafter.
        switch_seconds: what a pass costs more when the one before had another size (llama.cpp
            builds its graph anew).
    """

    sizes: list[int]
    depths: list[int]
    seconds: list[list[float]]
    block_seconds: float
    host_seconds: float
    switch_seconds: float


def measure(
    engine: Engine,
    *,
    budget: float = 3.0,
    progress: Callable[[float], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Tuning:
    """Measure an engine. Its KV caches are empty afterwards.

    Args:
        engine: at least 128 tokens of context.
        budget: seconds it may take; what does not fit is extrapolated.
        progress: called with 0..1.
        clock: for tests.
    """
    started = clock()

    def left() -> float:
        spent = (clock() - started) / budget
        if progress is not None:
            progress(min(1.0, spent))
        return 1.0 - spent

    engine._live.cut(0)
    target, drafter = engine._target, engine._drafter
    limit = min(engine.n_ctx - _SHALLOW - 1, engine.max_nodes + 1)
    sizes = [n for n in SIZES if n <= limit]
    text = _some_tokens(engine, _DEEP)
    features = [target.features(n) for _, n in target.prefill(text[:_SHALLOW]) if drafter]
    shallow: dict[int, float] = {}
    for n in sizes:
        if len(shallow) >= 2 and left() < 0.45:
            break
        shallow[n] = _pass_seconds(engine, text[:n], _SHALLOW, clock, repeats=3 if n <= 4 else 2)
    switch = _switch_seconds(engine, text, shallow, clock)
    block = host = 0.0
    if drafter is not None:
        drafter.absorb(np.concatenate(features), text[:_SHALLOW])
        drafter.propose(text[0])  # the first pass allocates
        for _ in range(3):
            at = clock()
            drafter.propose(text[0])
            block = min(block or np.inf, clock() - at)
        # A round absorbs a few rows before it drafts.
        at = clock()
        drafter.absorb(features[0][:2], text[:2])
        proposal = drafter.propose(text[0])
        block = max(block, clock() - at)
        for _ in range(3):
            at = clock()
            if isinstance(proposal, Block):
                build_tree(
                    proposal, drafter.heads, budget=engine.max_nodes, children=4, frontier=12
                )
            else:  # its levels are passes of the drafter
                grow_tree(proposal, budget=engine.max_nodes, children=4, frontier=12)
            host = min(host or np.inf, clock() - at)
    depths, curves = [_SHALLOW], [_complete(shallow, sizes)]
    # Prefill runs faster per token than any pass measured here, so this bounds it from above.
    deep = min(_DEEP, engine.n_ctx - limit - 1)
    prefill = shallow[max(shallow)] / max(shallow) * (deep - _SHALLOW)
    if deep > 2 * _SHALLOW and prefill < left() * budget * 0.7:
        engine._live.cut(0)
        for _ in target.prefill(text[:deep]):
            pass
        ratios: dict[int, float] = {}
        for n in (n for n in _DEEP_SIZES if n in shallow):
            if len(ratios) >= 2 and left() <= 0:
                break
            ratios[n] = _pass_seconds(engine, text[:n], deep, clock, repeats=2) / shallow[n]
        factor = np.interp(sizes, list(ratios), list(ratios.values()))
        depths.append(deep)
        curves.append([float(f * s) for f, s in zip(factor, curves[0], strict=True)])
    engine._live.cut(0)
    if progress is not None:
        progress(1.0)
    return Tuning(sizes, depths, curves, float(block), float(host), switch)


def _pass_seconds(
    engine: Engine, tokens: Sequence[int], depth: int, clock: Callable[[], float], repeats: int
) -> float:
    best = np.inf
    for _ in range(repeats):
        at = clock()
        engine._target.verify(tokens[0], DraftTree.chain(tokens[1:]))
        best = min(best, clock() - at)
        engine._target.cut(depth)
    return float(best)


def _switch_seconds(
    engine: Engine, tokens: Sequence[int], sizes: Collection[int], clock: Callable[[], float]
) -> float:
    """How much longer a pass takes after one of another size than after one of its own.

    Each is compared with the pass right after it: a machine changes its pace within a second, by
    more than what is looked for here.
    """
    extra = []
    for _ in range(5):
        for n in (1, next(n for n in (4, 3, 2, 1) if n in sizes)):
            first, second = (
                _pass_seconds(engine, tokens[:n], _SHALLOW, clock, repeats=1) for _ in range(2)
            )
            extra.append(first - second)
    return max(0.0, float(np.median(extra)))


def _complete(measured: dict[int, float], sizes: Sequence[int]) -> list[float]:
    """Times of all sizes; those beyond the measured ones go on with the last slope."""
    known = sorted(measured)
    a, b = known[-2], known[-1]
    slope = max(0.0, (measured[b] - measured[a]) / (b - a))
    return [measured.get(n, measured[b] + slope * (n - b)) for n in sizes]


def _some_tokens(engine: Engine, count: int) -> list[int]:
    text = "The quick brown fox jumps over the lazy dog, and the dog does not mind. "
    tokens = engine.model.tokenize(text) or [0]
    return (tokens * (count // len(tokens) + 1))[:count]


def cache_file(engine: Engine, files: Sequence[Path], settings: Sequence[object]) -> Path:
    """Where the tuning of an engine is kept: in $LOCALSPEC_CACHE or the user's cache directory.

    The name is a hash of everything the times depend on: device and build, the files (size,
    time, header), threads and cache settings.
    """
    key = hashlib.sha256()
    for part in (_FORMAT, engine.model.system_info(), platform.machine(), *settings):
        key.update(f"{part}\n".encode())
    for file in files:
        stat = file.stat()
        key.update(f"{stat.st_size} {stat.st_mtime_ns}\n".encode())
        with open(file, "rb") as f:
            key.update(f.read(1 << 16))
    return places.cache_dir() / "tuning" / f"{key.hexdigest()[:24]}.json"


def load(path: Path) -> Tuning | None:
    """A cached tuning; None when there is none or it cannot be read."""
    try:
        data = json.loads(path.read_text("utf-8"))
        tuning = Tuning(**data)
        return tuning if _sound(tuning) else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _sound(tuning: Tuning) -> bool:
    seconds = np.array(tuning.seconds, float)
    parts = np.array([tuning.block_seconds, tuning.host_seconds, tuning.switch_seconds], float)
    return (
        seconds.shape == (len(tuning.depths), len(tuning.sizes))
        and tuning.sizes[0] == 1
        and all(bool(np.all(np.diff(x) > 0)) for x in (tuning.sizes, tuning.depths))
        and bool(np.isfinite(seconds).all() and (seconds > 0).all())
        and bool(np.isfinite(parts).all() and (parts >= 0).all())
    )


def save(path: Path, tuning: Tuning) -> None:
    """Cache a tuning. A cache that cannot be written is no error: it is measured again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps(asdict(tuning)), "utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError:
        pass
