"""The shape of a new drafter, from the target's header and what a pass of the target costs.

What counts is the speed of the pair: a block pass must cost a small part of a target pass, and a
block longer than what is worth verifying is wasted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.models.config import DrafterConfig
from localspec.pairs import check_target, features_available, vocab_size

RANK = 64
COVERED = 0.98  # of the tokens the target writes, by a reduced vocabulary
_SIZES = (4096, 8192, 16384, 32768)
_CONTROL, _UNUSED, _USER_DEFINED = 3, 5, 4  # llama.cpp's token types
# Where a mask token is looked for, best first.
_MASKS = (r"mask", r"unused|reserved|extra_id|placeholder", r"fim|repo|file|jupyter|issue|gh_",
          r"pad")  # fmt: skip


def check_trainable(target: GgufFile) -> None:
    """Whether a drafter can be trained for this target.

    Raises:
        LocalspecError: it is no target, gives no layer features, or lacks a tensor.
    """
    check_target(target)
    if not features_available(target):
        raise LocalspecError(
            f"{target.path} is a {target.architecture} model; llama.cpp gives no layer features "
            "for that architecture, so no drafter can be trained for it"
        )
    for name in ("token_embd.weight",):
        if name not in target.tensors:
            raise LocalspecError(f"{target.path} has no {name}; use a complete GGUF of the target")
    if target.metadata.get("tokenizer.ggml.tokens") is None:
        raise LocalspecError(f"{target.path} holds no tokenizer; use a complete GGUF of the target")


def n_layers(target: GgufFile) -> int:
    """Layers of the target itself, without multi-token prediction."""
    return int(target.arch_get("block_count")) - int(target.arch_get("nextn_predict_layers", 0))


def target_layer_ids(layers: int) -> tuple[int, ...]:
    """Feature layers spread over the depth; the last layer's output is no layer's input."""
    last = layers - 2
    if last < 1:
        return (last,)
    count = 4 if layers >= 12 else min(3, last)
    return tuple(sorted({round(float(x)) for x in np.linspace(1, last, count)}))


def drafter_config(
    target: GgufFile, asked: Mapping[str, Any], *, pass_ratio: float = 2.0
) -> DrafterConfig:
    """The shape of a drafter for a target, with the whole vocabulary (see `vocabulary_size`).

    Args:
        target: its GGUF.
        asked: what to take instead of the defaults: layers, block_size, rank, head, ffn,
            target_layers.
        pass_ratio: time of a target pass over 8 tokens against one over 1. Where verifying is
            dear, long blocks are never verified.

    Raises:
        LocalspecError: the header lacks a number, or what was asked for cannot be.
    """
    width, layers = int(target.arch_get("embedding_length")), n_layers(target)
    heads = _first(target.arch_get("attention.head_count"))
    if heads < 1:
        raise LocalspecError(f"{target.path} does not say its attention.head_count; it is damaged")
    head_dim = _first(target.arch_get("attention.key_length")) or width // heads
    head_dim -= head_dim % 2
    ffn = asked.get("ffn") or _ffn(target, width)
    ids = tuple(asked.get("target_layers") or target_layer_ids(layers))
    if any(not -1 <= i <= layers - 2 for i in ids) or list(ids) != sorted(set(ids)):
        raise LocalspecError(
            f"target_layers must be increasing numbers from -1 to {layers - 2}, "
            f"not {', '.join(map(str, ids))}"
        )
    block = asked.get("block_size") or (7 if pass_ratio < 3 else 6 if pass_ratio < 4.5 else 5)
    depth = asked.get("layers") or min(4, max(1, round(layers / 16)))
    return DrafterConfig(
        vocab_size=vocab_size(target),
        hidden_size=width,
        intermediate_size=ffn,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        block_size=block,
        mask_token_id=mask_token(target),
        target_layer_ids=ids,
        rope_theta=float(target.arch_get("rope.freq_base", 10000.0)),
        rms_norm_eps=float(target.arch_get("attention.layer_norm_rms_epsilon", 1e-6)),
        max_position_embeddings=int(target.arch_get("context_length", 2048)),
        layer_types=("full_attention",) * depth,
        markov_rank=asked.get("rank") or min(RANK, width),
        markov_head_type=asked.get("head") or "vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        num_target_layers=int(target.arch_get("block_count")),
    )


def _ffn(target: GgufFile, width: int) -> int:
    """The target's own, where its layers are dense and of usual size."""
    stated = _first(target.arch_get("feed_forward_length"))
    usual = -(-width * 8 // 3 // 32) * 32
    return stated if width <= stated <= 4 * width else usual


def _first(value: Any) -> int:
    """A number of the header; some models have one per layer, 0 where a layer has none."""
    values = value if isinstance(value, list) else [value]
    return max((int(v) for v in values if isinstance(v, int) and v > 0), default=0)


def vocabulary_size(counts: npt.NDArray[np.int64], asked: int | None) -> int | None:
    """Rows of the drafter's output matrix; None for the whole vocabulary.

    Args:
        counts: [V] how often the target wrote each token.
        asked: a size; 0 for the whole vocabulary; None for the smallest usual one that covers
            `COVERED` of the text, where it saves half of the rows.

    Raises:
        LocalspecError: a size larger than the vocabulary.
    """
    n_vocab = len(counts)
    if asked is not None:
        if asked > n_vocab:
            raise LocalspecError(f"vocab is {asked}, but the target has {n_vocab} tokens")
        return asked if 0 < asked < n_vocab else None
    covered = np.cumsum(np.sort(counts)[::-1]) / max(1, counts.sum())
    for size in _SIZES:
        if size <= n_vocab // 2 and covered[size - 1] >= COVERED:
            return size
    return _SIZES[-1] if n_vocab >= 4 * _SIZES[-1] else None


def mask_token(target: GgufFile) -> int:
    """A token that texts do not have, with an embedding of its own to tell masks from anchors."""
    stated = target.get("tokenizer.ggml.mask_token_id")
    tokens = target.get("tokenizer.ggml.tokens")
    if isinstance(stated, int) and 0 <= stated < len(tokens):
        return stated
    kinds = target.get("tokenizer.ggml.token_type") or [_CONTROL] * len(tokens)
    taken = {target.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
    special = [
        i
        for i, kind in enumerate(kinds)
        if kind in (_CONTROL, _UNUSED, _USER_DEFINED) and i not in taken
    ]
    usable = _with_embedding(target, special)
    for pattern in _MASKS:
        for i in usable:
            if re.search(pattern, tokens[i], re.IGNORECASE):
                return i
    plain = [i for i in usable if kinds[i] != _USER_DEFINED]  # those may be runs of spaces
    return plain[-1] if plain else len(tokens) - 1


def _with_embedding(target: GgufFile, ids: list[int]) -> list[int]:
    """Those whose embedding is not next to zero: masks at zero could not be told apart."""
    if not ids:
        return []
    rows = target.rows("token_embd.weight")
    size = np.linalg.norm(rows(np.array(ids)), axis=1)
    usual = np.linalg.norm(rows(np.arange(0, len(target.metadata["tokenizer.ggml.tokens"]), 97)),
                           axis=1)  # fmt: skip
    least = 0.1 * float(np.median(usual))
    return [i for i, norm in zip(ids, size.tolist(), strict=True) if norm >= least]
