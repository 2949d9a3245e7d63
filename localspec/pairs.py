"""Which target goes with which drafter.

Everything is decided from GGUF headers, before llama.cpp sees the files: llama.cpp ends the
process when a drafter asks for layer inputs that a target does not have. What the two headers say
is in `target_header`, `drafter_header` and `eagle_header`; names of models are in `registry`.
"""

from __future__ import annotations

from localspec.architectures import (
    DRAFTER_ARCH,
    DRAFTER_ARCHS,
    EAGLE_ARCH,
    FEATURE_ARCHS,
    HEADS_ARCH,
    LAST_OUTPUT_ARCHS,
    MAX_BLOCK,
    MAX_LAYERS,
    NO_TREE_ARCHS,
)
from localspec.default_pair import default_drafter, default_pair, default_target
from localspec.drafter_header import DrafterInfo, heads_path, read_drafter, reduced_vocabulary
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.header_checks import check_tokens
from localspec.target_header import check_target, features_available, vocab_size

__all__ = [
    "DRAFTER_ARCH",
    "DRAFTER_ARCHS",
    "EAGLE_ARCH",
    "FEATURE_ARCHS",
    "HEADS_ARCH",
    "LAST_OUTPUT_ARCHS",
    "MAX_BLOCK",
    "MAX_LAYERS",
    "NO_TREE_ARCHS",
    "DrafterInfo",
    "check_pair",
    "check_target",
    "default_drafter",
    "default_pair",
    "default_target",
    "features_available",
    "heads_path",
    "read_drafter",
    "reduced_vocabulary",
    "vocab_size",
]


def check_pair(target: GgufFile, drafter: GgufFile) -> DrafterInfo:
    """Whether `drafter` can draft for `target`; what the drafter is.

    Raises:
        LocalspecError: with the reason, when the two do not fit together.
    """
    check_target(target)
    info = read_drafter(drafter)
    if not features_available(target):
        raise LocalspecError(
            f"{target.path.name} is a {target.architecture} model, and llama.cpp gives no layer "
            "features for that architecture, so no drafter can be used; leave -d out to decode "
            "plainly"
        )
    width = int(target.arch_get("embedding_length"))
    if info.family == "eagle3":
        from localspec.eagle_header import check_target_width

        check_target_width(drafter, target, width)
    else:
        _same(drafter, target, "width", info.n_embd, width)
    _same(drafter, target, "vocabulary size", info.n_vocab, vocab_size(target))
    n_layer = int(target.arch_get("block_count"))
    tokens = "tokenizer.ggml.tokens"
    if tokens in target.metadata and drafter.stored_value(tokens) != target.stored_value(tokens):
        check_tokens(drafter)
    trained_on = drafter.get("localspec.target.block_count")
    if trained_on is not None:
        _same(drafter, target, "number of target layers", int(trained_on), n_layer)
    most = n_layer if target.architecture in LAST_OUTPUT_ARCHS else n_layer - 1
    out_of_range = [i for i in info.target_layers if not 0 <= i <= most]
    if out_of_range:
        raise LocalspecError(
            f"{drafter.path.name} reads target layer {out_of_range[0]}, but {target.path.name} has "
            f"{n_layer} layers; it was trained for another target"
        )
    return info


def _same(drafter: GgufFile, target: GgufFile, what: str, ours: int, theirs: int) -> None:
    if ours != theirs:
        raise LocalspecError(
            f"{drafter.path.name} does not fit {target.path.name}: its {what} is {ours}, the "
            f"target's is {theirs}"
        )
