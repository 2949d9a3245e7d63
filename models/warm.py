"""Starting from an existing drafter: any checkpoint that converts, in whatever layout it came."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from localspec.convert import check, hub, packaging
from localspec.convert.source import Checkpoint
from localspec.ggufio import GgufFile
from localspec.models.config import DrafterConfig

if TYPE_CHECKING:
    from localspec.models.drafter import Drafter


def open_init(init: str, target: GgufFile) -> Checkpoint:
    """A checkpoint to start from, checked against the target.

    Args:
        init: a directory, a training's output or a hub id.
        target: the target it is to draft for.

    Raises:
        LocalspecError: it cannot be read, or does not fit the target.
    """
    path = hub.resolve(init)
    inside = path / "checkpoint"  # of a run of ours
    source = Checkpoint(packaging.locate(inside if inside.is_dir() else path))
    check.check_fit(source, target)
    check.check_tensors(source)
    return source


def config_of(source: Checkpoint) -> DrafterConfig:
    """Its shape, as it is trained and saved here."""
    return replace(source.config, tie_word_embeddings=False)


def warm_drafter(source: Checkpoint, target: GgufFile) -> Drafter:
    """The checkpoint's drafter with this target's embeddings and output matrix.

    Those of the checkpoint are of the model it was trained on, before it was quantised or
    fine-tuned. A reduced output matrix stays its own.
    """
    import torch

    from localspec.models.drafter import Drafter
    from localspec.models.initial import target_matrices

    config = config_of(source)
    reduced = config.reduced_vocab is not None
    drafter = Drafter(config, own_embed=False, own_lm_head=reduced)
    state = drafter.state_dict()
    for name, value in state.items():
        if name == "d2t":
            assert source.draft_tokens is not None
            rows = np.arange(len(source.draft_tokens))
            value.copy_(torch.from_numpy(source.draft_tokens - rows))
        else:
            value.copy_(torch.from_numpy(_whole(source, name)).view(value.shape))
    embed, output = target_matrices(target)
    drafter.tie_target(embed, output)
    return drafter


def _whole(source: Checkpoint, name: str) -> np.ndarray:
    size = math.prod(source.tensors[name].shape)
    whole, at = np.empty(size, np.float32), 0
    for values in source.chunks(name):
        whole[at : at + values.size] = values.reshape(-1)
        at += values.size
    return whole
