"""What a training run was asked for: kept in its directory, so that it goes on as it began."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError

FILE = "run.json"
_FORMAT, _VERSION = "localspec-training", 1
HEADS = ("vanilla", "gated", "rnn")
DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("auto", "bf16", "f32")
# What a resumed run may do otherwise than the one before: none of it changes what is learned.
_FREE = ("threads", "checkpoint_minutes", "disk", "calibrate")


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run.

    Attributes:
        target: GGUF of the target.
        prompts: file or folder of prompts; None: the target writes its own.
        hours: of wall-clock time for everything; None when `tokens` or `steps` bound the run.
        tokens: of text to train on, prompts included; None when `hours` do.
        steps: of training; None: what `hours` leave, or what `tokens` need.
        init: a checkpoint to start from; None starts anew.
        disk: most bytes of features and of a faster copy of the target.
        seed: of prompts, text, batches and weights.
        device: of training: "cpu", "cuda", "mps" or "auto".
        precision: of matrix products in training: "bf16", "f32" or "auto".
        threads: CPU threads; 0 means one per physical core.
        answer: most tokens of an answer.
        longest: most tokens of a prompt and its answer together.
        sequences: conversations per step.
        anchors: most blocks per conversation and step.
        lr: peak learning rate of matrices (Muon).
        adam_lr: peak learning rate of the rest (AdamW).
        checkpoint_minutes: between two checkpoints.
        layers, block_size, rank, head, vocab, ffn, target_layers: shape; None is chosen from the
            target's. vocab 0: the whole vocabulary.
        outtype: type of the matrices in the GGUF.
        calibrate: whether the drafter is calibrated at the end.
    """

    target: str
    prompts: str | None = None
    hours: float | None = None
    tokens: int | None = None
    steps: int | None = None
    init: str | None = None
    disk: int = 8 << 30
    seed: int = 0
    device: str = "auto"
    precision: str = "auto"
    threads: int = 0
    answer: int = 192
    longest: int = 384
    sequences: int = 2
    anchors: int = 96
    lr: float = 0.02
    adam_lr: float = 3e-3
    checkpoint_minutes: float = 5.0
    layers: int | None = None
    block_size: int | None = None
    rank: int | None = None
    head: str | None = None
    vocab: int | None = None
    ffn: int | None = None
    target_layers: tuple[int, ...] | None = None
    outtype: str = "q8_0"
    calibrate: bool = True

    def __post_init__(self) -> None:
        """Raises LocalspecError for a value that no run can have."""
        known = {"head": (self.head, HEADS), "device": (self.device, DEVICES),
                 "precision": (self.precision, PRECISIONS)}  # fmt: skip
        for name, (value, allowed) in known.items():
            if value is not None and value not in allowed:
                raise LocalspecError(f"{name} is {value!r}; known ones are {', '.join(allowed)}")
        positive = ("hours", "tokens", "steps", "answer", "longest", "sequences", "anchors", "lr",
                    "adam_lr", "checkpoint_minutes", "layers", "rank", "ffn")  # fmt: skip
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise LocalspecError(f"{name} must be more than 0, not {value}")
        if self.seed < 0 or self.threads < 0 or (self.vocab or 0) < 0:
            raise LocalspecError("seed, threads and vocab cannot be less than 0")
        if self.block_size is not None and not 2 <= self.block_size <= 16:
            raise LocalspecError(f"block_size must be 2 to 16, not {self.block_size}")
        if self.hours is not None and self.tokens is not None:
            raise LocalspecError("hours and tokens both bound the text; give one of them")
        if self.longest < self.answer + 16:
            raise LocalspecError(
                f"an answer of {self.answer} tokens leaves no room for a prompt in "
                f"{self.longest}; raise the length or lower the answer's"
            )

    @property
    def shape(self) -> dict[str, Any]:
        """What was asked for of the drafter's shape."""
        names = ("layers", "block_size", "rank", "head", "vocab", "ffn", "target_layers")
        return {name: v for name in names if (v := getattr(self, name)) is not None}


def begin(out: Path, asked: Mapping[str, Any], *, resume: bool) -> Settings:
    """The settings of a new run, written down; or those of the run that is resumed.

    Args:
        out: the run's directory.
        asked: fields of `Settings`; None leaves one to the default, or to the earlier run.
        resume: go on with what is there.

    Raises:
        LocalspecError: there is no run to resume or one already, other settings than before, a
            directory that cannot be written.
    """
    given = {name: value for name, value in asked.items() if value is not None}
    file = out / FILE
    if resume:
        return _resumed(file, given)
    if file.exists():
        raise LocalspecError(
            f"{out} holds a training run already; go on with --resume, or choose another "
            "directory with -o"
        )
    if "target" not in given:
        raise LocalspecError("a new run needs a target; name its GGUF with --target")
    settings = Settings(**given)
    if settings.hours is None and settings.tokens is None:
        settings = replace(settings, hours=2.0)
    return settings


def write(out: Path, settings: Settings) -> None:
    """Write the settings down, making the directory.

    Raises:
        LocalspecError: it cannot be written.
    """
    data = {"format": _FORMAT, "version": _VERSION, **asdict(settings)}
    write_json(out / FILE, data)


def _resumed(file: Path, given: Mapping[str, Any]) -> Settings:
    saved = load(file)
    for name, value in given.items():
        before = getattr(saved, name)
        if value != before and name not in _FREE:
            raise LocalspecError(
                f"{file.parent} was begun with {name} = {before}, not {value}; leave it out to go "
                "on, or begin another run with another -o"
            )
    return replace(saved, **{name: given[name] for name in _FREE if name in given})


def load(file: Path) -> Settings:
    """Settings from a run's run.json.

    Raises:
        LocalspecError: there is none, or it is damaged.
    """
    try:
        data = json.loads(file.read_text("utf-8"))
    except OSError as e:
        raise LocalspecError(
            f"{file.parent} holds no training run to resume; leave --resume out to begin one"
        ) from e
    except ValueError as e:
        raise LocalspecError(f"{file} is damaged; begin another run with another -o") from e
    names = {f.name for f in fields(Settings)}
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise LocalspecError(f"{file} is not of a training run; choose another directory with -o")
    values = {k: v for k, v in data.items() if k not in ("format", "version")}
    if data.get("version") != _VERSION or not set(values) <= names:
        raise LocalspecError(f"{file} was written by another version of localspec; begin anew")
    if values.get("target_layers") is not None:
        values["target_layers"] = tuple(values["target_layers"])
    try:
        return Settings(**values)
    except TypeError as e:
        raise LocalspecError(f"{file} is damaged; begin another run with another -o") from e


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON file aside and rename it, making its directory.

    Raises:
        LocalspecError: it cannot be written.
    """
    aside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
        os.replace(aside, path)
    except OSError as e:
        raise LocalspecError(
            f"{path.parent} cannot be written ({e.strerror or e}); choose another directory with -o"
        ) from e
