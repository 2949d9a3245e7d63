"""The metadata of the files a conversion writes."""

from __future__ import annotations

from typing import Any

import numpy as np

from localspec.convert import layout
from localspec.ggufio import GgufFile
from localspec.models.config import DrafterConfig
from localspec.pairs import DRAFTER_ARCH, HEADS_ARCH

# llama.cpp's numbers for general.file_type.
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k": 11, "q4_k": 14, "q5_k": 16, "q6_k": 18, "bf16": 32,
}  # fmt: skip
QUANTIZATION_VERSION = 2
HEADS_VERSION = 1


def drafter_metadata(
    config: DrafterConfig, target: GgufFile, outtype: str, *, has_confidence: bool, pair_id: str
) -> dict[str, Any]:
    """Everything llama.cpp and localspec need to run the drafter.

    Args:
        config: the checkpoint's config.
        target: gives the tokenizer, copied whole.
        outtype: a key of `FILE_TYPES`.
        has_confidence: a confidence head lies in this file.
        pair_id: names the companion that belongs to this file; "" without one.
    """
    c = config
    target_name = _name(target)
    values: dict[str, Any] = {
        "general.architecture": DRAFTER_ARCH,
        "general.type": "model",
        "general.name": f"Drafter for {target_name}",
        "general.file_type": FILE_TYPES[outtype],
        "general.quantization_version": QUANTIZATION_VERSION,
        "localspec.target.name": target_name,
        "localspec.target.block_count": int(target.arch_get("block_count")),
        "localspec.heads.type": layout.head_type(c),
        "dflash.context_length": c.max_position_embeddings,
        "dflash.embedding_length": c.hidden_size,
        "dflash.block_count": c.num_hidden_layers,
        "dflash.feed_forward_length": c.intermediate_size,
        "dflash.attention.head_count": c.num_attention_heads,
        "dflash.attention.head_count_kv": c.num_key_value_heads,
        "dflash.attention.key_length": c.head_dim,
        "dflash.attention.value_length": c.head_dim,
        "dflash.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "dflash.rope.freq_base": c.rope_theta,
        # All of a head rotates; a partial factor in the config is the target's, not the drafter's.
        "dflash.rope.dimension_count": c.head_dim,
        "dflash.vocab_size": c.vocab_size,
        "dflash.block_size": c.block_size,
        # llama.cpp counts layer inputs: input i is the output of layer i - 1.
        "dflash.target_layers": [i + 1 for i in c.target_layer_ids],
        "dflash.sample_from_anchor": c.sample_from_anchor,
        "dflash.has_confidence_head": has_confidence,
    }
    values |= _arithmetic(c)
    if pair_id:
        values["localspec.pair_id"] = pair_id
    windows = [c.window(layer) is not None for layer in range(c.num_hidden_layers)]
    if any(windows):
        values["dflash.attention.sliding_window"] = c.sliding_window
        values["dflash.attention.sliding_window_pattern"] = windows
    values.update(
        (key, target.stored_value(key)) for key in target.metadata if key.startswith("tokenizer.")
    )
    values["tokenizer.ggml.mask_token_id"] = c.mask_token_id
    return values


def _arithmetic(c: DrafterConfig) -> dict[str, Any]:
    """Where the backbone computes otherwise than llama.cpp's graph does when nothing is said."""
    values: dict[str, Any] = {}
    if c.backbone == "gemma4":
        values["dflash.attention.scale"] = 1.0
        values["dflash.hidden_activation"] = "gelu_pytorch_tanh"
    if c.causal:
        values["dflash.attention.causal"] = True
    for key, value, usual in (
        ("embedding_scale", c.embedding_scale, 1.0),
        ("attention.value_scale", c.attention_value_scale, 1.0),
        # The graph applies these two for DFlash 2 only; for the others localspec does.
        ("logit_scale", c.logit_scale, 1.0),
        ("final_logit_softcapping", c.final_logit_softcapping, None),
    ):
        if value != usual:
            values[f"dflash.{key}"] = value
    if c.selector_rank:
        values |= {
            "dflash.conv_kernel_size": c.conv_kernel_size,
            "dflash.conv_group_size": c.conv_group_size,
            "dflash.selector_rank": c.selector_rank,
            "dflash.selector_top_k": c.selector_top_k,
        }
    return values


def rope_factors(c: DrafterConfig) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """[head_dim / 2] divisors of the rotary frequencies, None where every pair turns.

    llama.cpp has no share of pairs that turn in place; pairs slowed down by 1e30 stand still.
    """
    if c.partial_rotary_factor == 1:
        return None
    factors = np.full(c.head_dim // 2, 1e30, np.float32)
    factors[: int(c.partial_rotary_factor * c.head_dim / 2)] = 1
    return factors


def heads_metadata(config: DrafterConfig, target: GgufFile, pair_id: str) -> dict[str, Any]:
    """What the companion file says about the heads it holds."""
    return {
        "general.architecture": HEADS_ARCH,
        "general.name": f"Drafter heads for {_name(target)}",
        "localspec.heads.version": HEADS_VERSION,
        "localspec.heads.type": layout.head_type(config),
        "localspec.heads.rank": config.markov_rank,
        "localspec.heads.embedding_length": config.hidden_size,
        "localspec.heads.vocab_size": config.vocab_size,
        "localspec.pair_id": pair_id,
    }


def _name(target: GgufFile) -> str:
    name = target.get("general.name")
    return name if isinstance(name, str) and name else target.architecture
