"""Torch reference of DSpark drafters.

`config` is free of torch, so importing this package is too: the names below are looked up on
first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from localspec.models.backbone import Backbone, ContextCache
    from localspec.models.checkpoint import load_drafter, save_drafter
    from localspec.models.config import DrafterConfig
    from localspec.models.drafter import Drafter, Proposal
    from localspec.models.heads import (
        ConfidenceHead,
        GatedMarkovHead,
        RnnMarkovHead,
        VanillaMarkovHead,
    )
    from localspec.models.reference import TinyTarget, speculative_decode

__all__ = [
    "Backbone",
    "ConfidenceHead",
    "ContextCache",
    "Drafter",
    "DrafterConfig",
    "GatedMarkovHead",
    "Proposal",
    "RnnMarkovHead",
    "TinyTarget",
    "VanillaMarkovHead",
    "load_drafter",
    "save_drafter",
    "speculative_decode",
]

_HOME = {
    "Backbone": "backbone",
    "ConfidenceHead": "heads",
    "ContextCache": "backbone",
    "Drafter": "drafter",
    "DrafterConfig": "config",
    "GatedMarkovHead": "heads",
    "Proposal": "drafter",
    "RnnMarkovHead": "heads",
    "TinyTarget": "reference",
    "VanillaMarkovHead": "heads",
    "load_drafter": "checkpoint",
    "save_drafter": "checkpoint",
    "speculative_decode": "reference",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
