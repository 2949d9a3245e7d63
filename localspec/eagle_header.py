"""What an Eagle3 drafter's GGUF header says, and all that llama.cpp would end the process over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from localspec.drafter_header import DrafterInfo, heads_path
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.header_checks import check_numbers

# Depths drafted where the file does not say: what published drafters are trained to look ahead.
DEPTHS = 7
MOST_DEPTHS = 32
DEPTH_KEY = "localspec.draft_depth"
N_FEATURES = 3


def read_eagle(drafter: GgufFile) -> DrafterInfo:
    """What an Eagle3 drafter is, checked for completeness.

    Raises:
        LocalspecError: a setting or tensor is missing, or llama.cpp would abort on it.
    """
    path = drafter.path
    layers = drafter.arch_get("target_layers")
    n_embd = drafter.arch_get("embedding_length")
    heads = drafter.arch_get("attention.head_count")
    kv_heads = drafter.arch_get("attention.head_count_kv", heads)
    tokens = drafter.metadata.get("tokenizer.ggml.tokens")
    needed = {
        "eagle3.target_layers": isinstance(layers, list)
        and len(layers) == N_FEATURES
        and all(isinstance(i, int) for i in layers),
        "eagle3.target_hidden_size": _positive(drafter.arch_get("target_hidden_size")),
        "eagle3.embedding_length": _positive(n_embd),
        "eagle3.attention.head_count": _positive(heads),
        "eagle3.attention.head_count_kv": _positive(kv_heads) and heads % kv_heads == 0
        if _positive(heads) else False,
        "tokenizer.ggml.tokens": tokens is not None and len(tokens) > 0,
    }  # fmt: skip
    for key, fine in needed.items():
        if not fine:
            raise LocalspecError(f"{path}: {key} is missing or invalid; convert the drafter again")
    if drafter.arch_get("block_count") != 1:
        raise LocalspecError(
            f"{path} has {drafter.arch_get('block_count')} layers; llama.cpp runs Eagle3 drafters "
            "of one layer only"
        )
    read_layers, companion = drafter.get("localspec.target_layers"), None
    if read_layers is not None:
        companion = _layer_file(drafter, int(n_embd))
        if not isinstance(read_layers, list) or not read_layers:
            raise LocalspecError(f"{path}: localspec.target_layers is invalid; convert it again")
        layers = read_layers
    _check_heads(drafter, int(n_embd) // int(heads))
    n_vocab = len(tokens or ())
    _check_vocabulary(drafter, n_vocab)
    return DrafterInfo(
        n_embd=int(n_embd),
        n_vocab=n_vocab,
        block_size=_depths(drafter),
        target_layers=tuple(int(x) for x in layers),
        mask_token=0,
        sample_from_anchor=True,
        head_type="none",
        has_confidence=False,
        heads_path=companion,
        family="eagle3",
    )


def check_target_width(drafter: GgufFile, target: GgufFile, width: int) -> None:
    """Whether an Eagle3 drafter reads features of this width, and has what it cannot borrow.

    Raises:
        LocalspecError: with the reason.
    """
    reads, own = (
        int(drafter.arch_get("target_hidden_size")),
        int(drafter.arch_get("embedding_length")),
    )
    layers = drafter.get("localspec.target_layers")
    if isinstance(layers, list):  # padded, and nothing in the file replaces the target's matrices
        reads = own if len(layers) * own <= 3 * reads else -1
    if reads != width:
        raise LocalspecError(
            f"{drafter.path.name} does not fit {target.path.name}: it reads features of width "
            f"{reads}, the target's are {width}"
        )
    missing = [n for n in ("token_embd.weight", "output.weight") if n not in drafter.tensors]
    if own != width and missing:
        raise LocalspecError(
            f"{drafter.path.name} is {own} wide and has no {missing[0]} of its own, but the "
            f"target's is {width} wide; convert the drafter again"
        )


def _layer_file(drafter: GgufFile, n_embd: int) -> Path:
    """The companion with the layer, checked."""
    path = heads_path(drafter.path)
    if not path.exists():
        raise LocalspecError(
            f"{drafter.path.name} keeps its layer in {path.name}, which is missing; put it beside "
            "the drafter or convert again"
        )
    with GgufFile(path) as layer:
        same = layer.get("localspec.pair_id") == drafter.get("localspec.pair_id") is not None
        check_numbers(layer)
        if layer.architecture != "qwen3" or layer.arch_get("block_count") != 1:
            same = False
        if not same or layer.arch_get("embedding_length") != 3 * n_embd:
            raise LocalspecError(
                f"{path.name} belongs to another drafter than {drafter.path.name}; keep the two "
                "files of one conversion together"
            )
    return path


def _check_heads(drafter: GgufFile, default: int) -> None:
    head = drafter.arch_get("attention.key_length", default)
    value = drafter.arch_get("attention.value_length", default)
    rotated = drafter.arch_get("rope.dimension_count", head)
    fine = _positive(head) and head == value and _positive(rotated) and rotated <= head
    if not fine or rotated % 2:
        raise LocalspecError(
            f"{drafter.path}: heads of {head}/{value} scalars, {rotated} of them rotated, do not "
            "fit together; convert the drafter again"
        )
    eps = drafter.arch_get("attention.layer_norm_rms_epsilon")
    if not isinstance(eps, float) or not 0 <= eps < 1:
        raise LocalspecError(
            f"{drafter.path} says attention.layer_norm_rms_epsilon = {eps}; convert it again"
        )
    for name, tensor in drafter.tensors.items():
        vector = len(tensor.shape) == 1
        integers = tensor.type_name in ("I8", "I16", "I32", "I64")
        if name != "d2t" and (integers or (vector and tensor.type_name != "F32")):
            raise LocalspecError(
                f"{drafter.path}: tensor {name!r} holds {tensor.type_name}; the file is damaged, "
                "convert the drafter again"
            )


def _check_vocabulary(drafter: GgufFile, n_vocab: int) -> None:
    """Token ids that point past a matrix end the process inside llama.cpp's kernels."""
    path, d2t = drafter.path, drafter.tensors.get("d2t")
    embedding, output = (drafter.tensors.get(n) for n in ("token_embd.weight", "output.weight"))
    if embedding is not None and (len(embedding.shape) != 2 or embedding.shape[0] != n_vocab):
        raise LocalspecError(
            f"{path}: token_embd.weight is {list(embedding.shape)} for {n_vocab} tokens; convert "
            "the drafter again"
        )
    rows = n_vocab if output is None else output.shape[0]
    if d2t is None:
        if rows != n_vocab:
            raise LocalspecError(
                f"{path} knows {rows} of {n_vocab} tokens but not which (d2t is missing); convert "
                "the drafter again"
            )
        return
    if d2t.type_name != "I64" or d2t.shape != (rows,):
        raise LocalspecError(
            f"{path}: d2t is {d2t.type_name} {list(d2t.shape)} for {rows} rows of output; convert "
            "the drafter again"
        )
    ids = drafter.integers("d2t")
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= n_vocab or len(np.unique(ids)) < len(ids):
        raise LocalspecError(
            f"{path}: d2t names tokens outside the vocabulary of {n_vocab}, or one twice; convert "
            "the drafter again"
        )


def _depths(drafter: GgufFile) -> int:
    depths: Any = drafter.get(DEPTH_KEY, DEPTHS)
    if not _positive(depths) or depths > MOST_DEPTHS:
        raise LocalspecError(
            f"{drafter.path}: {DEPTH_KEY} = {depths} is not 1..{MOST_DEPTHS}; convert it again"
        )
    return int(depths)


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
