"""A tiny DeepSeek-V4: the target as GGUF, and the full checkpoint with its drafter, as released.

Numpy and torch's number formats only; nothing of the converter is used to write them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

import tiny

D, V, HEADS, HEAD, ROPE, Q_RANK, O_RANK, GROUPS = 192, 320, 4, 64, 16, 160, 32, 2
FFN, EXPERTS, USED, HC, RANK, INDEX_HEADS, INDEX_HEAD = 64, 8, 3, 4, 16, 2, 64
MIX = (2 + HC) * HC
LAYERS, RATIOS, STAGES, WINDOW = 3, [0, 4, 128], 2, 24
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": V,
    "hidden_size": D,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "qk_rope_head_dim": ROPE,
    "q_lora_rank": Q_RANK,
    "o_lora_rank": O_RANK,
    "o_groups": GROUPS,
    "moe_intermediate_size": FFN,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": USED,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "swiglu_limit": 1.0,
    "hc_mult": HC,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "num_hash_layers": 0,
    "sliding_window": WINDOW,
    "compress_ratios": RATIOS + [0] * STAGES,
    "compress_rope_theta": 160000.0,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": INDEX_HEAD,
    "index_topk": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 1024},
    "max_position_embeddings": 2048,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "dspark_block_size": 5,
    "dspark_noise_token_id": tiny.MASK_ID,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_markov_rank": RANK,
}
# One layer: name in the checkpoint, name in GGUF, shape, standard deviation, mean.
LAYER: list[tuple[str, str, tuple[int, ...], float, float]] = [
    ("attn_norm.weight", "attn_norm.weight", (D,), 0.1, 1.0),
    ("ffn_norm.weight", "ffn_norm.weight", (D,), 0.1, 1.0),
    ("attn.attn_sink", "attn_sinks.weight", (HEADS,), 1.0, 0.0),
    ("attn.wq_a.weight", "attn_q_a.weight", (Q_RANK, D), D**-0.5, 0.0),
    ("attn.q_norm.weight", "attn_q_a_norm.weight", (Q_RANK,), 0.1, 1.0),
    ("attn.wq_b.weight", "attn_q_b.weight", (HEADS * HEAD, Q_RANK), Q_RANK**-0.5, 0.0),
    ("attn.wkv.weight", "attn_kv.weight", (HEAD, D), D**-0.5, 0.0),
    ("attn.kv_norm.weight", "attn_kv_a_norm.weight", (HEAD,), 0.1, 1.0),
    (
        "attn.wo_a.weight", "attn_output_a.weight",
        (GROUPS * O_RANK, HEADS * HEAD // GROUPS), 0.1, 0.0,
    ),
    ("attn.wo_b.weight", "attn_output_b.weight", (D, GROUPS * O_RANK), 0.1, 0.0),
    ("hc_attn_fn", "hc_attn_fn.weight", (MIX, HC * D), (HC * D) ** -0.5, 0.0),
    ("hc_attn_base", "hc_attn_base.weight", (MIX,), 0.5, 0.0),
    ("hc_attn_scale", "hc_attn_scale.weight", (3,), 0.2, 1.0),
    ("hc_ffn_fn", "hc_ffn_fn.weight", (MIX, HC * D), (HC * D) ** -0.5, 0.0),
    ("hc_ffn_base", "hc_ffn_base.weight", (MIX,), 0.5, 0.0),
    ("hc_ffn_scale", "hc_ffn_scale.weight", (3,), 0.2, 1.0),
    ("ffn.gate.weight", "ffn_gate_inp.weight", (EXPERTS, D), 2 * D**-0.5, 0.0),
    ("ffn.gate.bias", "exp_probs_b.bias", (EXPERTS,), 0.3, 0.0),
    ("ffn.shared_experts.w1.weight", "ffn_gate_shexp.weight", (FFN, D), 2 * D**-0.5, 0.0),
    ("ffn.shared_experts.w2.weight", "ffn_down_shexp.weight", (D, FFN), FFN**-0.5, 0.0),
    ("ffn.shared_experts.w3.weight", "ffn_up_shexp.weight", (FFN, D), 2 * D**-0.5, 0.0),
]  # fmt: skip
EXPERT = [
    ("w1", "ffn_gate_exps.weight", (FFN, D), 2 * D**-0.5),
    ("w2", "ffn_down_exps.weight", (D, FFN), FFN**-0.5),
    ("w3", "ffn_up_exps.weight", (FFN, D), 2 * D**-0.5),
]
HEAD_STREAMS: list[tuple[str, str, tuple[int, ...], float, float]] = [
    ("hc_head_fn", "output_hc_fn.weight", (HC, HC * D), (HC * D) ** -0.5, 0.0),
    ("hc_head_base", "output_hc_base.weight", (HC,), 0.5, 0.0),
    ("hc_head_scale", "output_hc_scale.weight", (1,), 0.2, 1.0),
    ("norm.weight", "output_norm.weight", (D,), 0.1, 1.0),
]
# Stored in 8 bits by the release; its experts in 4.
EIGHT_BITS = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "main_proj", "shared_experts")

Stored = tuple[str, tuple[int, ...], bytes]


@dataclass(frozen=True)
class Tiny:
    """path: the checkpoint; gguf: the target; values: the drafter's tensors as float32, by name;
    shards: name -> shard; stored: all tensors as
    they are stored; embedding, output: the target's matrices."""

    path: Path
    gguf: Path
    values: dict[str, torch.Tensor]
    shards: dict[str, str]
    stored: dict[str, Stored]
    embedding: torch.Tensor
    output: torch.Tensor


def build(path: Path, *, released: bool = False, seed: int = 0) -> Tiny:
    """Write target and checkpoint.

    released: 8-bit matrices, 4-bit experts and bfloat16 norms, as published; float32 otherwise.
    """
    path.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)

    def normal(shape: tuple[int, ...], scale: float, mean: float = 0.0) -> np.ndarray:
        return (mean + scale * rng.standard_normal(shape)).astype(np.float32)

    target, main = _target(path / "target.gguf", normal)
    drafter: dict[str, np.ndarray] = {}
    for stage in range(STAGES):
        for name, _, shape, scale, mean in LAYER:
            drafter[f"mtp.{stage}.{name}"] = normal(shape, scale, mean)
        for expert in range(EXPERTS):
            for part, _, shape, scale in EXPERT:
                drafter[f"mtp.{stage}.ffn.experts.{expert}.{part}.weight"] = normal(shape, scale)
    features = D * len(CONFIG["dspark_target_layer_ids"])
    drafter["mtp.0.main_proj.weight"] = normal((D, features), features**-0.5)
    drafter["mtp.0.main_norm.weight"] = normal((D,), 0.1, 1.0)
    last = f"mtp.{STAGES - 1}"
    for name, _, shape, scale, mean in HEAD_STREAMS:
        drafter[f"{last}.{name}"] = normal(shape, scale, mean)
    drafter[f"{last}.markov_head.markov_w1.weight"] = normal((V, RANK), 1.0)
    drafter[f"{last}.markov_head.markov_w2.weight"] = normal((V, RANK), RANK**-0.5)
    drafter[f"{last}.confidence_head.proj.weight"] = normal((1, D + RANK), 0.1)

    (path / "config.json").write_text(json.dumps(CONFIG))
    stored: dict[str, Stored] = {}
    values: dict[str, torch.Tensor] = {}
    for name, value in drafter.items():
        parts = _store(name, value) if released else {name: _plain(value, "F32")}
        stored |= parts
        values[name] = _values(parts, name)
    shards: dict[str, str] = {}
    names = list(stored)
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        shards |= dict.fromkeys(part, f"model-0000{number + 2}-of-00004.safetensors")
    everything = stored | {name: _plain(value, "F32") for name, value in main.items()}
    for i, name in enumerate(main):
        shards[name] = f"model-0000{1 if i % 2 else 4}-of-00004.safetensors"
    # As in the release: the first of the drafter's shards also holds tensors of the target.
    shards["norm.weight"] = "model-00002-of-00004.safetensors"
    write(path, everything, shards)
    return Tiny(
        path, target, values, shards, everything,
        torch.from_numpy(main["embed.weight"]), torch.from_numpy(main["head.weight"]),
    )  # fmt: skip


def write(path: Path, tensors: dict[str, Stored], shards: dict[str, str]) -> None:
    """Shards and index."""
    for shard in set(shards.values()):
        save(path / shard, {n: tensors[n] for n in tensors if shards[n] == shard})
    index = {"metadata": {"total_size": 0}, "weight_map": {n: shards[n] for n in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def save(path: Path, tensors: dict[str, Stored]) -> None:
    """A safetensors file of any number formats."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _plain(value: np.ndarray, dtype: str) -> Stored:
    if dtype == "BF16":
        raw = torch.from_numpy(value).bfloat16().view(torch.int16).numpy().tobytes()
        return dtype, value.shape, raw
    return dtype, value.shape, value.tobytes()


def _store(name: str, value: np.ndarray) -> dict[str, Stored]:
    """A tensor the way the release stores it."""
    tensor, scale_name = torch.from_numpy(value), name.replace(".weight", ".scale")
    if ".experts." in name:
        blocks = tensor.unflatten(1, (-1, 32))
        exponent = (blocks.abs().amax(-1) / 6).log2().ceil()
        known = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        scaled = (blocks / exponent.exp2()[..., None]).flatten(1)
        codes = (scaled.abs()[..., None] - known).abs().argmin(-1) | (scaled < 0) * 8
        packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        scales = (exponent + 127).to(torch.uint8)
        return {
            name: ("I8", tuple(packed.shape), packed.numpy().tobytes()),
            scale_name: ("F8_E8M0", tuple(scales.shape), scales.numpy().tobytes()),
        }
    if any(part in name for part in EIGHT_BITS):
        rows, columns = (-(-n // 128) for n in tensor.shape)
        exponents = torch.zeros(rows, columns)
        codes = torch.zeros(tensor.shape, dtype=torch.uint8)
        for i in range(rows):
            for j in range(columns):
                at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                exponents[i, j] = (tensor[at].abs().max() / 448).log2().ceil()
                scaled = tensor[at] / exponents[i, j].exp2()
                codes[at] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
        scales = (exponents + 127).to(torch.uint8)
        return {
            name: ("F8_E4M3", tuple(codes.shape), codes.numpy().tobytes()),
            scale_name: ("F8_E8M0", tuple(scales.shape), scales.numpy().tobytes()),
        }
    kind = "F32" if "hc_" in name or "sink" in name or name.endswith("bias") else "BF16"
    return {name: _plain(value, kind)}


def _values(parts: dict[str, Stored], name: str) -> torch.Tensor:
    """What a stored tensor stands for, with torch's own formats."""
    dtype, shape, raw = parts[name]
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    if dtype == "F32":
        return codes.view(torch.float32).reshape(shape)
    if dtype == "BF16":
        return codes.view(torch.bfloat16).float().reshape(shape)
    _, scale_shape, scale_raw = parts[name.replace(".weight", ".scale")]
    scale = torch.frombuffer(bytearray(scale_raw), dtype=torch.uint8)
    scale = (scale.float() - 127).exp2().reshape(scale_shape)
    if dtype == "F8_E4M3":
        value = codes.view(torch.float8_e4m3fn).float().reshape(shape)
        scale = scale.repeat_interleave(128, 0)[: shape[0]]
        return value * scale.repeat_interleave(128, 1)[:, : shape[1]]
    size = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    known = torch.tensor([*size, *(-s for s in size)])
    pairs = torch.stack([codes & 15, codes >> 4], -1).long()
    return known[pairs].reshape(shape[0], -1) * scale.repeat_interleave(32, 1)


def _target(path: Path, normal: Any) -> tuple[Path, dict[str, np.ndarray]]:
    """The GGUF of the target, and its tensors as the checkpoint names them."""
    c = CONFIG
    w = gguf.GGUFWriter(str(path), "deepseek4")
    w.add_name("tiny-deepseek4")
    w.add_block_count(LAYERS)
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(D)
    w.add_feed_forward_length(FFN)
    w.add_vocab_size(V)
    w.add_head_count(HEADS)
    w.add_head_count_kv(1)
    w.add_key_length(HEAD)
    w.add_value_length(HEAD)
    w.add_rope_dimension_count(ROPE)
    w.add_rope_freq_base(c["rope_theta"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_expert_count(EXPERTS)
    w.add_expert_used_count(USED)
    w.add_uint32("deepseek4.expert_gating_func", 4)  # sqrt(softplus)
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(True)
    w.add_expert_shared_count(1)
    w.add_expert_feed_forward_length(FFN)
    w.add_sliding_window(WINDOW)
    w.add_embedding_length_out(HC * D)
    for key, value in {
        "attention.q_lora_rank": Q_RANK,
        "attention.indexer.head_count": INDEX_HEADS,
        "attention.indexer.key_length": INDEX_HEAD,
        "attention.indexer.top_k": c["index_topk"],
        "attention.output_group_count": GROUPS,
        "attention.output_lora_rank": O_RANK,
        "hyper_connection.count": HC,
        "hyper_connection.sinkhorn_iterations": c["hc_sinkhorn_iters"],
        "hash_layer_count": 0,
    }.items():
        w.add_uint32(f"deepseek4.{key}", value)
    w.add_float32("deepseek4.attention.compress_rope_freq_base", c["compress_rope_theta"])
    w.add_float32("deepseek4.hyper_connection.epsilon", c["hc_eps"])
    w.add_float32("deepseek4.swiglu_clamp_exp", c["swiglu_limit"])
    w.add_array("deepseek4.attention.compress_ratios", RATIOS)
    tiny.write_tokenizer(w, V)
    main: dict[str, np.ndarray] = {}

    def add(published: str, name: str, value: np.ndarray) -> None:
        main[published] = value
        w.add_tensor(name, value)

    add("embed.weight", "token_embd.weight", normal((V, D), 1.0))
    add("head.weight", "output.weight", normal((V, D), 2 * D**-0.5))
    for published, name, shape, scale, mean in HEAD_STREAMS:
        add(published, name, normal(shape, scale, mean))
    for i in range(LAYERS):
        for published, name, shape, scale, mean in LAYER:
            add(f"layers.{i}.{published}", f"blk.{i}.{name}", normal(shape, scale, mean))
        for part, name, shape, scale in EXPERT:
            every = normal((EXPERTS, *shape), scale)
            for j, one in enumerate(every):
                main[f"layers.{i}.ffn.experts.{j}.{part}.weight"] = one
            w.add_tensor(f"blk.{i}.{name}", every)
        for part, head in (("attn", HEAD), ("indexer", INDEX_HEAD))[
            : {0: 0, 4: 2}.get(RATIOS[i], 1)
        ]:
            wide = 2 * head if RATIOS[i] == 4 else head
            inner = "attn.compressor" if part == "attn" else "attn.indexer.compressor"
            for published, name, shape in (
                ("wkv.weight", "kv.weight", (wide, D)),
                ("wgate.weight", "gate.weight", (wide, D)),
                ("ape", "ape.weight", (RATIOS[i], wide)),
                ("norm.weight", "norm.weight", (head,)),
            ):
                add(
                    f"layers.{i}.{inner}.{published}", f"blk.{i}.{part}_compressor_{name}",
                    normal(shape, 0.1, 1.0 if name == "norm.weight" else 0.0),
                )  # fmt: skip
        if RATIOS[i] == 4:
            inner = f"layers.{i}.attn.indexer"
            add(f"{inner}.weights_proj.weight", f"blk.{i}.indexer.proj.weight",
                normal((INDEX_HEADS, D), 0.1))  # fmt: skip
            add(f"{inner}.wq_b.weight", f"blk.{i}.indexer.attn_q_b.weight",
                normal((INDEX_HEADS * INDEX_HEAD, Q_RANK), 0.1))  # fmt: skip
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path, main
