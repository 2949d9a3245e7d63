"""The metadata of the files a conversion writes."""

from __future__ import annotations

from typing import Any

from localspec.convert import layout
from localspec.ggufio import GgufFile
from localspec.models.config import DrafterConfig
from localspec.pairs import DRAFTER_ARCH, HEADS_ARCH

# llama.cpp's numbers for general.file_type.
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
QUANTIZATION_VERSION = 2
HEADS_VERSION = 1


def drafter_metadata(
    config: DrafterConfig, target: GgufFile, outtype: str, *, has_confidence: bool, pair_id: str
) -> dict[str, Any]:
    """Everything llama.cpp and localspec need to run the drafter.

    Args:
        config: the checkpoint's config.
        target: gives the tokenizer, copied whole.
        outtype: "f32", "f16", "bf16" or "q8_0".
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
