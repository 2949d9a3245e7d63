"""Tiny Eagle3 checkpoints in the published packagings: numpy only, seeded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import tiny

FLOAT = np.float32


def build(
    path: Path,
    target: tiny.TinyModel,
    *,
    packaging: str = "specforge",
    draft_vocab: int | None = 200,
    layers: Sequence[int] | None = (0, 1, 2),
    ttt_length: int | None = None,
    noise: float = 0.2,
    own_output: bool = True,
    seed: int = 0,
    **changes: Any,
) -> Path:
    """Write an Eagle3 checkpoint for `target`.

    Attention looks at its own position and replaces the state by what is best known of the
    token's embedding; the target's output matrix reads the next token off it. Noise in the fused
    features and in the MLP makes some drafts wrong.
    """
    rng = np.random.default_rng(seed + 77)
    c = target.config
    d, vocab, ffn = c["hidden_size"], c["vocab_size"], c["intermediate_size"]
    heads, kv, head = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    specforge = packaging != "deepspec"
    layer = "midlayer" if packaging == "specforge" else "layers.0"
    n_layers = 3 if layers is None else len(layers)

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return (scale * columns**-0.5 * rng.standard_normal((rows, columns))).astype(FLOAT)

    def vector(size: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(size)).astype(FLOAT)

    embed = target.tensors["model.embed_tokens.weight"]
    output = target.tensors["lm_head.weight"]
    # One projection for queries and keys: the same input agrees with itself most.
    keys = np.hstack([matrix(kv * head, d, 2.5), np.zeros((kv * head, d), FLOAT)])
    queries = np.repeat(keys.reshape(kv, head, 2 * d), heads // kv, axis=0).reshape(-1, 2 * d)
    # The directions of the embedding that matter for the output, minus those of the state.
    best = np.linalg.svd(output, full_matrices=False)[2][: kv * head]
    share = np.sqrt(len(best) / d)
    values = np.hstack([best, -share * best]).astype(FLOAT)
    back = np.zeros((d, heads, head), FLOAT)
    back[:, :: heads // kv] = best.T.reshape(d, kv, head)
    tensors = {
        "fc.weight": matrix(d, n_layers * d, noise),
        "norm.weight": vector(d),
        f"{layer}.input_layernorm.weight": vector(d),
        f"{layer}.hidden_norm.weight": vector(d),
        f"{layer}.post_attention_layernorm.weight": vector(d),
        f"{layer}.self_attn.q_proj.weight": queries,
        f"{layer}.self_attn.k_proj.weight": keys,
        f"{layer}.self_attn.v_proj.weight": values,
        f"{layer}.self_attn.o_proj.weight": back.reshape(d, heads * head),
        f"{layer}.mlp.gate_proj.weight": matrix(ffn, d, 1.0),
        f"{layer}.mlp.up_proj.weight": matrix(ffn, d, 1.0),
        f"{layer}.mlp.down_proj.weight": matrix(d, ffn, noise),
    }
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if specforge else "Qwen3Eagle3Model"],
        "model_type": "llama" if specforge else "qwen3",
        "hidden_act": "silu",
        "hidden_size": d,
        "intermediate_size": ffn,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": c["max_position_embeddings"],
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if ttt_length is not None:
        config["ttt_length"] = ttt_length
    if specforge:
        config |= {"rope_theta": 10000.0, "rope_scaling": None}
        if layers is not None:
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
        known = np.arange(vocab)
        if draft_vocab is not None:
            config["draft_vocab_size"] = draft_vocab
            known = np.sort(rng.choice(vocab, draft_vocab, replace=False))
            tensors["d2t"] = known - np.arange(draft_vocab)
            tensors["t2d"] = np.isin(np.arange(vocab), known)
        if own_output:
            tensors["lm_head.weight"] = output[known]
    else:
        config |= {
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "target_layer_ids": list(layers or ()),
            "num_target_layers": c["num_hidden_layers"],
            "ttt_length": ttt_length or 7,
            "step_loss_decay": 0.8,
            "draft_num_hidden_layers": 1,
        }
        tensors[f"{layer}.self_attn.q_norm.weight"] = vector(head)
        tensors[f"{layer}.self_attn.k_norm.weight"] = vector(head)
        tensors["embed_tokens.weight"] = embed
        tensors["lm_head.weight"] = output
    if packaging == "speculators":
        config = _speculators(config)
    tiny._write_directory(path, config | changes, {})
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()},
              str(path / "model.safetensors"), metadata={"format": "pt"})  # fmt: skip
    return path


def _speculators(config: dict[str, Any]) -> dict[str, Any]:
    """The same in the wrapping of "speculators" exports."""
    ids = config.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.pop("draft_vocab_size"),
        "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids],
        "norm_before_residual": True,
        "target_hidden_size": None,
        "transformer_layer_config": config,
    }
