"""Snapshots of a training: weights, optimisers and where it stood, whole or not at all."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from localspec.errors import LocalspecError
from localspec.models.trainer import Trainer

FILE = "snapshot.pt"


@dataclass(frozen=True)
class Snapshot:
    """Attributes:
    step: steps done.
    seconds: spent on them.
    scale: [n_features] what features are divided by.
    weights, optimizers: state dicts.
    length: of the last evaluation, if there was one.
    """

    step: int
    seconds: float
    scale: Tensor
    weights: dict[str, Tensor]
    optimizers: list[dict[str, Any]]
    length: float | None = None

    def restore(self, trainer: Trainer) -> None:
        """Put a trainer of the same shape where this one was."""
        trainer.drafter.load_state_dict(self.weights)
        for optimizer, state in zip(trainer.optimizers, self.optimizers, strict=True):
            optimizer.load_state_dict(state)


def save(out: Path, trainer: Trainer, step: int, seconds: float, length: float | None) -> None:
    """Write a snapshot aside and rename it.

    Raises:
        LocalspecError: the disk is full.
    """
    file, aside = out / FILE, out / f".{FILE}.part"
    data = {
        "step": step,
        "seconds": seconds,
        "scale": trainer.scale.cpu(),
        "weights": {name: t.cpu() for name, t in trainer.drafter.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "length": length,
    }
    try:
        with open(aside, "wb") as f:
            torch.save(data, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, file)
    except (OSError, RuntimeError) as e:
        aside.unlink(missing_ok=True)
        raise LocalspecError(
            f"{file} cannot be written ({' '.join(str(e).split())}); free some space and go on "
            "with --resume"
        ) from e


def load(out: Path, device: torch.device) -> Snapshot | None:
    """The snapshot of a run; None before the first. Nothing in it is executed.

    Raises:
        LocalspecError: it is damaged.
    """
    file = out / FILE
    if not file.exists():
        return None
    try:
        return Snapshot(**torch.load(file, map_location=device, weights_only=True))
    except Exception as e:  # torch raises pickle, zip, runtime and value errors here
        raise LocalspecError(
            f"{file} is damaged; delete it, and --resume begins the training anew with the same "
            "text"
        ) from e
