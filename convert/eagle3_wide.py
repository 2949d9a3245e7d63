"""DeepSpec's Eagle3 drafters as two files: see `localspec.eagle_wide` for the arithmetic.

The drafter's file is of the `eagle3` architecture: it fuses the features, maps states to logits,
and its layer passes them through. The companion is a `qwen3` layer three times as wide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from localspec.convert import layout
from localspec.convert.eagle3 import EagleCheckpoint, drafter_metadata
from localspec.convert.metadata import FILE_TYPES, QUANTIZATION_VERSION
from localspec.convert.plan import stored_type
from localspec.convert.write import (
    _LARGEST,
    _LARGEST_SCALE,
    Output,
    _encode,
    _largest,
    encoded,
    finite_chunks,
)
from localspec.eagle_wide import EPSILON, LAYER_ARCH, LAYERS_KEY
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.models.eagle_config import EagleConfig

# The layer of the drafter's file does nothing; one head and one block of numbers suffice.
_IDLE = 32
# Features are padded to three llama.cpp layers, each a whole number of quantisation blocks.
_FEATURE_BLOCK = 3 * 32


def padded_features(c: EagleConfig) -> int:
    """Columns of the fused matrix in the file."""
    return -(-c.num_features * c.target_hidden_size // _FEATURE_BLOCK) * _FEATURE_BLOCK


def drafter_outputs(checkpoint: EagleCheckpoint, outtype: str) -> list[Output]:
    """The drafter's file."""
    c = checkpoint.eagle
    d, columns = c.hidden_size, padded_features(c)

    def vector(published: str, name: str) -> Output:
        return encoded(checkpoint, published, name, Type.F32)

    idle = [
        ("attn_q", (_IDLE, 2 * d)), ("attn_k", (_IDLE, 2 * d)), ("attn_v", (_IDLE, 2 * d)),
        ("attn_output", (d, _IDLE)), ("ffn_gate", (_IDLE, d)), ("ffn_up", (_IDLE, d)),
        ("ffn_down", (d, _IDLE)),
    ]  # fmt: skip
    return [
        _placed(
            checkpoint, "fc.weight", "fc.weight", outtype,
            after=columns - c.num_features * c.target_hidden_size,
        ),
        vector("norm.weight", "output_norm.weight"),
        vector("midlayer.input_layernorm.weight", "blk.0.attn_norm.weight"),
        vector("midlayer.hidden_norm.weight", "blk.0.attn_norm_2.weight"),
        _fixed("blk.0.ffn_norm.weight", np.ones(d)),
        *(_fixed(f"blk.0.{name}.weight", np.zeros(shape)) for name, shape in idle),
    ]  # fmt: skip


def layer_outputs(checkpoint: EagleCheckpoint, outtype: str) -> list[Output]:
    """The companion with the layer."""
    c = checkpoint.eagle
    d, wide = c.hidden_size, 3 * c.hidden_size
    # A norm over 3 d numbers, d of them counting, against one over these d.
    scale = float(np.sqrt(d / wide))

    def matrix(name: str, gguf_name: str, **how: Any) -> Output:
        return _placed(checkpoint, f"midlayer.{name}.weight", gguf_name, outtype, **how)

    attention, blk = "self_attn.", "blk.0."
    first = np.concatenate([np.full(2 * d, 1 / EPSILON), np.zeros(d)])
    return [
        _fixed("token_embd.weight", np.zeros((1, wide))),
        _fixed("output_norm.weight", np.ones(wide)),
        _fixed("blk.0.attn_norm.weight", first),
        matrix(attention + "q_proj", blk + "attn_q.weight", after=d, scale=scale),
        matrix(attention + "k_proj", blk + "attn_k.weight", after=d, scale=scale),
        matrix(attention + "v_proj", blk + "attn_v.weight", after=d),
        matrix(attention + "o_proj", blk + "attn_output.weight", above=2 * d),
        encoded(
            checkpoint, "midlayer.self_attn.q_norm.weight", blk + "attn_q_norm.weight", Type.F32
        ),
        encoded(
            checkpoint, "midlayer.self_attn.k_norm.weight", blk + "attn_k_norm.weight", Type.F32
        ),
        matrix("post_attention_layernorm", blk + "ffn_norm.weight", before=2 * d, scale=scale),
        matrix("mlp.gate_proj", blk + "ffn_gate.weight", before=2 * d),
        matrix("mlp.up_proj", blk + "ffn_up.weight", before=2 * d),
        matrix("mlp.down_proj", blk + "ffn_down.weight", above=2 * d),
    ]


def _placed(
    checkpoint: EagleCheckpoint,
    published: str,
    name: str,
    outtype: str,
    *,
    before: int = 0,
    after: int = 0,
    above: int = 0,
    scale: float = 1.0,
) -> Output:
    """A tensor inside a larger one of zeros: columns before and after it, rows above it."""
    tensor = checkpoint.tensors[published]
    columns = before + tensor.shape[-1] + after
    vector = len(tensor.shape) == 1
    kind = stored_type(layout.VECTOR if vector else layout.MATRIX, columns, outtype)
    shape = (columns,) if vector else (above + tensor.shape[0], columns)

    def blocks() -> Iterator[tuple[bytes, int]]:
        for at in range(0, above, 64):
            yield _encode(np.zeros((min(64, above - at), columns), np.float32), kind), 0
        for values, cost in finite_chunks(checkpoint, published):
            if _largest(values) > _LARGEST.get(kind, _LARGEST_SCALE):
                raise LocalspecError(
                    f"{checkpoint.path}: tensor {published} has values beyond the range of "
                    f"{kind.name}; use --outtype bf16 or f32"
                )
            rows = np.zeros((len(values), columns), np.float32)
            rows[:, before : columns - after] = values * np.float32(scale)
            yield _encode(rows, kind), cost

    return Output(name, shape, kind, published, tensor.nbytes, blocks)


def _fixed(name: str, values: np.ndarray[Any, Any]) -> Output:
    data = values.astype("<f4").tobytes()
    return Output(name, values.shape, Type.F32, name, len(data), lambda: iter([(data, len(data))]))


def wide_metadata(
    checkpoint: EagleCheckpoint, target: GgufFile, outtype: str, pair_id: str
) -> dict[str, Any]:
    """The drafter's file: as of other Eagle3 drafters, with what is particular."""
    c = checkpoint.eagle
    values = drafter_metadata(checkpoint, target, outtype)
    layers: Sequence[int] = values["eagle3.target_layers"]
    return values | {
        LAYERS_KEY: list(layers),
        "localspec.pair_id": pair_id,
        "eagle3.target_layers": [0, 1, 2],  # llama.cpp wants three, and does not look at them
        "eagle3.target_hidden_size": padded_features(c) // 3,
        "eagle3.feed_forward_length": _IDLE,
        "eagle3.attention.head_count": 1,
        "eagle3.attention.head_count_kv": 1,
        "eagle3.attention.key_length": _IDLE,
        "eagle3.attention.value_length": _IDLE,
        "eagle3.rope.dimension_count": _IDLE,
    }


def layer_metadata(checkpoint: EagleCheckpoint, outtype: str, pair_id: str) -> dict[str, Any]:
    """The companion's metadata: a qwen3 model of one layer without a vocabulary."""
    c, a = checkpoint.eagle, LAYER_ARCH
    return {
        "general.architecture": a,
        "general.type": "model",
        "general.name": "Layer of an Eagle3 drafter",
        "general.file_type": FILE_TYPES[outtype],
        "general.quantization_version": QUANTIZATION_VERSION,
        "localspec.pair_id": pair_id,
        f"{a}.context_length": c.max_position_embeddings,
        f"{a}.embedding_length": 3 * c.hidden_size,
        f"{a}.block_count": 1,
        f"{a}.feed_forward_length": c.intermediate_size,
        f"{a}.attention.head_count": c.num_attention_heads,
        f"{a}.attention.head_count_kv": c.num_key_value_heads,
        f"{a}.attention.key_length": c.head_dim,
        f"{a}.attention.value_length": c.head_dim,
        f"{a}.attention.layer_norm_rms_epsilon": c.rms_norm_eps / 3,
        f"{a}.rope.freq_base": c.rope_theta,
        f"{a}.rope.dimension_count": c.head_dim,
        f"{a}.vocab_size": 1,
        "tokenizer.ggml.model": "no_vocab",
    }
