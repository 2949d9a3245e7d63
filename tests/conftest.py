"""Tiny models shared by the tests of the runtime, and the rule by which texts are compared."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Before numpy is imported: BLAS threads would spin against llama.cpp's.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["LOCALSPEC_CACHE"] = tempfile.mkdtemp(prefix="localspec-tests-")

import numpy as np
import pytest

import tiny
from localspec.convert import convert
from localspec.engine import DraftOptions, Engine

# What `tiny_drafter` can build: options of tiny.build_drafter, and config fields to change.
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vanilla": ({}, {}),
    "gated": ({"head": "gated"}, {}),
    "rnn": ({"head": "rnn"}, {}),
    "vanilla-b16": ({"block_size": 16, "conf_markov": False}, {}),
    "gated-no-markov-conf": ({"head": "gated", "conf_markov": False}, {}),
    "rnn-no-markov-conf": ({"head": "rnn", "conf_markov": False}, {}),
    "no-conf": ({"confidence": False}, {}),
    "plain": ({"head": "none", "confidence": False}, {}),
    "dflash": ({"head": "none", "confidence": False}, {"sample_from_anchor": False}),
}
HEADS = ("vanilla", "gated", "rnn")
PLAIN = DraftOptions(tokens=0)
CHAIN = DraftOptions(tokens=7)
TREE = DraftOptions(tokens=15, width=3)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    """A Qwen3 target of 4 layers, width 96, 320 tokens; F32."""
    return tiny.build_target(tmp_path_factory.mktemp("tiny-target"))


@pytest.fixture(scope="session")
def tiny_drafter(
    tiny_target: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[tiny.TinyModel, Path]]:
    """Name from DRAFTERS -> (checkpoint, F32 GGUF), each built once."""
    made: dict[str, tuple[tiny.TinyModel, Path]] = {}

    def get(name: str) -> tuple[tiny.TinyModel, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp(f"tiny-{name}")
            options, changes = DRAFTERS[name]
            model = tiny.build_drafter(folder / "checkpoint", tiny_target, **options)
            (model.path / "config.json").write_text(json.dumps(model.config | changes))
            out = folder / "drafter.gguf"
            convert(model.path, tiny_target.gguf, out, outtype="f32")
            made[name] = model, out
        return made[name]

    return get


@pytest.fixture
def load(
    tiny_target: tiny.TinyModel, tiny_drafter: Callable[[str], tuple[tiny.TinyModel, Path]]
) -> Iterator[Callable[..., Engine]]:
    """Name of a drafter or None -> a fresh engine, closed after the test."""
    loaded: list[Engine] = []

    def get(name: str | None = None, **options: Any) -> Engine:
        path = None if name is None else tiny_drafter(name)[1]
        options = {"n_ctx": 256, "n_threads": 1} | options
        loaded.append(Engine.load(tiny_target.gguf, path, **options))
        return loaded[-1]

    yield get
    for engine in loaded:
        engine.close()


def command(*args: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """`localspec ARGS` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "localspec", *(str(a) for a in args)],
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


def fails(result: subprocess.CompletedProcess[str], status: int, text: str) -> None:
    """Fail unless a command ended with this exit status and, for 1, one line of error."""
    assert result.returncode == status, result
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    if status == 1:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def prompt_of(seed: int, length: int | None = None) -> list[int]:
    """A prompt in the tiny models' chat format, or random text tokens of a given length."""
    rng = np.random.default_rng(seed)
    if length is not None:
        return rng.integers(tiny.FIRST_BYTE + 32, 320, length).tolist()
    words = [tiny.FIRST_BYTE + b for b in rng.integers(97, 123, rng.integers(3, 20)).tolist()]
    line = tiny.FIRST_BYTE + ord("\n")
    return [tiny.START_ID, *words, tiny.EOS_ID, line, tiny.START_ID, line]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ; None when they are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def top_two_gap(engine: Engine, prompt: Sequence[int], tokens: Sequence[int], at: int) -> float:
    """How far the target's two best logits lie apart where `tokens[at]` was chosen, plainly."""
    target = engine._target
    engine._live.cut(0)
    for piece in (list(prompt), *([token] for token in tokens[:at])):
        for _ in target.prefill(piece):
            pass
    second, best = np.sort(target.logits()[-1])[-2:]
    engine._live.cut(0)
    return float(best - second)


def same_text(
    engine: Engine,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    noise: float = 0.05,
) -> bool:
    """Fail unless two greedy texts are equal or part at a near-tie; whether they are equal.

    Passes of different sizes round differently, so a first difference is allowed where the two
    best logits of the plain run lie within `noise` (0.05 for F32 models, 0.75 for quantised ones).
    """
    at = first_difference(plain, other)
    if at is None:
        return True
    gap = top_two_gap(engine, prompt, plain, at)
    assert gap < noise, f"texts part at token {at}, where the target is sure (gap {gap:.3f})"
    return False
