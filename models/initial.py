"""How a drafter starts: shapes of the target, its embeddings and output rows, and its statistics.

A backbone from scratch learns slowly. What the target already knows is taken over where it fits
(benchmarks in docs/train.md say what each part gave).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.models.config import DrafterConfig
from localspec.models.drafter import Drafter
from localspec.models.layers import Layer

# Tensors of a layer in GGUF -> parameter names of a drafter's layer.
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
# llama.cpp's converter stores q and k of these with neighbouring rotary pairs.
_INTERLEAVED = ("llama", "mistral3")


def target_matrices(target: GgufFile) -> tuple[Tensor, Tensor]:
    """(token embeddings, output matrix) of a target, [V, d] float32 each."""
    embed = torch.from_numpy(target.tensor("token_embd.weight"))
    if "output.weight" in target.tensors:
        return embed, torch.from_numpy(target.tensor("output.weight"))
    return embed, embed


def draft_vocabulary(counts: np.ndarray, size: int) -> np.ndarray:
    """The `size` most frequent tokens of a text, in ascending order: [size] int64.

    Args:
        counts: [V] how often the target wrote each token.
        size: rows of the reduced output matrix. Ties go to the smaller id.
    """
    order = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(order[:size]).astype(np.int64)


def new_drafter(
    config: DrafterConfig,
    target: GgufFile,
    *,
    draft_ids: np.ndarray | None = None,
    layers: tuple[int, ...] = (),
    seed: int = 0,
) -> Drafter:
    """A drafter of this shape with the target's own matrices tied or copied into it.

    Args:
        config: its shape.
        target: the target's GGUF.
        draft_ids: the reduced vocabulary, as long as `config.draft_vocab_size`.
        layers: layers of the target whose weights the drafter's layers start from; none starts
            from random ones.
        seed: of the random ones.
    """
    torch.manual_seed(seed)
    drafter = Drafter(config, own_embed=False, own_lm_head=config.reduced_vocab is not None)
    for module in drafter.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    embed, output = target_matrices(target)
    drafter.tie_target(embed, output)
    if draft_ids is not None:
        assert drafter.d2t is not None and drafter.lm_head is not None
        ids = torch.from_numpy(draft_ids)
        drafter.d2t.copy_(ids - torch.arange(len(ids)))
        with torch.no_grad():
            drafter.lm_head.weight.copy_(output[ids])
    with torch.no_grad():
        if drafter.markov_head is not None:
            # No bias to begin with; W1 is random so that W2 has something to learn from.
            nn.init.normal_(drafter.markov_head.markov_w1.weight, std=1.0)
            nn.init.zeros_(drafter.markov_head.markov_w2.weight)
        nn.init.normal_(drafter.fc.weight, std=config.num_features**-0.5)
        if "output_norm.weight" in target.tensors:  # a few models call it otherwise
            norm = torch.from_numpy(target.tensor("output_norm.weight"))
            drafter.norm.weight.copy_(norm.reshape(-1))
        for layer, index in zip(drafter.layers, layers, strict=False):
            assert isinstance(layer, Layer)
            _take(layer, target, index, config)
    return drafter


def freeze(drafter: Drafter) -> None:
    """What belongs to the target stays as it is: embeddings and output matrix."""
    for module in (drafter.embed_tokens, drafter.lm_head):
        if module is not None:
            module.requires_grad_(False)


def _take(layer: Layer, target: GgufFile, index: int, config: DrafterConfig) -> None:
    state = layer.state_dict()
    for stored, ours in _LAYER.items():
        name, key = f"blk.{index}.{stored}.weight", f"{ours}.weight"
        if name not in target.tensors:
            continue
        values = target.tensor(name)
        values = values.reshape(-1) if state[key].ndim == 1 else values
        if tuple(values.shape) != tuple(state[key].shape):
            raise LocalspecError(
                f"{target.path}: {name} is {list(values.shape)}, but the drafter's layers need "
                f"{list(state[key].shape)}; start from random layers instead"
            )
        if stored in ("attn_q", "attn_k") and target.architecture in _INTERLEAVED:
            values = _halves(values, config.head_dim)
        state[key].copy_(torch.from_numpy(np.ascontiguousarray(values)))


def _halves(values: np.ndarray, head: int) -> np.ndarray:
    """[n * head, d]: rotary pairs from neighbours (0 1)(2 3) to halves."""
    pairs = values.reshape(-1, head // 2, 2, values.shape[1])
    return pairs.swapaxes(1, 2).reshape(values.shape)
