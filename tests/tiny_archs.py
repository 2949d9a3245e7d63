"""Tiny random targets of architectures with special memories: sliding windows, recurrent states.

Their text means nothing; what counts is that llama.cpp evaluates them with the memory of the real
architecture.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

import tiny

D, FFN, HEADS, HEAD_DIM, V = 64, 128, 4, 16, 320


class _Builder:
    def __init__(self, path: Path, arch: str, layers: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.writer = gguf.GGUFWriter(str(path), arch)
        w = self.writer
        w.add_name(f"tiny-{arch}")
        w.add_block_count(layers)
        w.add_context_length(2048)
        w.add_embedding_length(D)
        w.add_feed_forward_length(FFN)
        w.add_vocab_size(V)
        w.add_layer_norm_rms_eps(1e-6)
        tiny.write_tokenizer(w, V)
        self.matrix("token_embd.weight", V, D, scale=1.0)

    def matrix(self, name: str, rows: int, columns: int, scale: float | None = None) -> None:
        scale = columns**-0.5 if scale is None else scale
        self.writer.add_tensor(name, scale * self.rng.standard_normal((rows, columns), np.float32))

    def noise(self, rows: int, columns: int) -> np.ndarray:
        return self.rng.standard_normal((rows, columns), np.float32)

    def vector(self, name: str, size: int, value: float = 1.0) -> None:
        self.writer.add_tensor(name, np.full(size, value, np.float32))

    def ffn(self, i: int) -> None:
        self.vector(f"blk.{i}.ffn_norm.weight", D)
        self.matrix(f"blk.{i}.ffn_gate.weight", FFN, D)
        self.matrix(f"blk.{i}.ffn_up.weight", FFN, D)
        self.matrix(f"blk.{i}.ffn_down.weight", D, FFN)

    def attention(self, i: int, kv_heads: int) -> None:
        for name, heads in (("attn_q", HEADS), ("attn_k", kv_heads), ("attn_v", kv_heads)):
            self.matrix(f"blk.{i}.{name}.weight", heads * HEAD_DIM, D)
        self.matrix(f"blk.{i}.attn_output.weight", D, HEADS * HEAD_DIM)
        self.vector(f"blk.{i}.attn_q_norm.weight", HEAD_DIM)
        self.vector(f"blk.{i}.attn_k_norm.weight", HEAD_DIM)

    def save(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def build_gemma3(path: Path, *, window: int = 32, layers: int = 6, seed: int = 0) -> Path:
    """Sliding windows in five of six layers, full attention in the sixth."""
    b = _Builder(path, "gemma3", layers, seed)
    b.writer.add_head_count(HEADS)
    b.writer.add_head_count_kv(2)
    b.writer.add_key_length(HEAD_DIM)
    b.writer.add_value_length(HEAD_DIM)
    b.writer.add_rope_freq_base(10000.0)
    b.writer.add_sliding_window(window)
    b.vector("output_norm.weight", D)
    for i in range(layers):
        b.vector(f"blk.{i}.attn_norm.weight", D)
        b.attention(i, 2)
        b.vector(f"blk.{i}.post_attention_norm.weight", D)
        b.ffn(i)
        b.vector(f"blk.{i}.post_ffw_norm.weight", D)
    b.save()
    return path


def build_gemma4(
    path: Path, *, window: int = 32, layers: int = 4, softcap: float = 30.0, seed: int = 0
) -> Path:
    """Sliding windows and global layers by turns, of other head sizes; keys are values in these.

    Also: scaled embeddings, proportional rope in the global layers, soft-capped logits.
    """
    local = [i % 2 == 0 for i in range(layers)]
    b = _Builder(path, "gemma4", layers, seed)
    w = b.writer
    w.add_head_count(HEADS)
    w.add_head_count_kv([2 if swa else 1 for swa in local])
    w.add_key_length(2 * HEAD_DIM)
    w.add_value_length(2 * HEAD_DIM)
    w.add_uint32("gemma4.attention.key_length_swa", HEAD_DIM)
    w.add_uint32("gemma4.attention.value_length_swa", HEAD_DIM)
    w.add_uint32("gemma4.rope.dimension_count", 2 * HEAD_DIM)
    w.add_uint32("gemma4.rope.dimension_count_swa", HEAD_DIM)
    w.add_rope_freq_base(1e6)
    w.add_float32("gemma4.rope.freq_base_swa", 10000.0)
    w.add_sliding_window(window)
    w.add_sliding_window_pattern(local)
    w.add_uint32("gemma4.embedding_length_per_layer_input", 0)
    w.add_float32("gemma4.final_logit_softcapping", softcap)
    w.add_tensor("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * 12, np.float32))
    b.vector("output_norm.weight", D, 0.7)
    for i, swa in enumerate(local):
        head_dim, kv_heads = (HEAD_DIM, 2) if swa else (2 * HEAD_DIM, 1)
        b.vector(f"blk.{i}.attn_norm.weight", D)
        b.matrix(f"blk.{i}.attn_q.weight", HEADS * head_dim, D)
        b.matrix(f"blk.{i}.attn_k.weight", kv_heads * head_dim, D)
        if swa:
            b.matrix(f"blk.{i}.attn_v.weight", kv_heads * head_dim, D)
        b.matrix(f"blk.{i}.attn_output.weight", D, HEADS * head_dim)
        b.vector(f"blk.{i}.attn_q_norm.weight", head_dim, 0.6)
        b.vector(f"blk.{i}.attn_k_norm.weight", head_dim, 0.6)
        b.vector(f"blk.{i}.post_attention_norm.weight", D)
        b.ffn(i)
        b.vector(f"blk.{i}.post_ffw_norm.weight", D)
        b.vector(f"blk.{i}.layer_output_scale.weight", 1, 0.8)
    b.save()
    return path


def build_lfm2(path: Path, *, layers: int = 4, seed: int = 0) -> Path:
    """Hybrid: short convolutions (a recurrent state) and attention by turns."""
    b = _Builder(path, "lfm2", layers, seed)
    b.writer.add_head_count(HEADS)
    b.writer.add_head_count_kv([0 if i % 2 == 0 else 2 for i in range(layers)])
    b.writer.add_rope_freq_base(10000.0)
    b.writer.add_uint32("lfm2.shortconv.l_cache", 3)
    b.vector("token_embd_norm.weight", D)
    for i in range(layers):
        b.vector(f"blk.{i}.attn_norm.weight", D)
        if i % 2 == 0:
            b.matrix(f"blk.{i}.shortconv.conv.weight", D, 3)
            b.matrix(f"blk.{i}.shortconv.in_proj.weight", 3 * D, D)
            b.matrix(f"blk.{i}.shortconv.out_proj.weight", D, D)
        else:
            b.attention(i, 2)
        b.ffn(i)
    b.save()
    return path


def build_mamba(path: Path, *, layers: int = 2, seed: int = 0) -> Path:
    """Recurrent, and llama.cpp cannot roll its state back."""
    inner, state, rank, kernel = 2 * D, 8, 4, 4
    b = _Builder(path, "mamba", layers, seed)
    b.writer.add_head_count(0)
    b.writer.add_ssm_conv_kernel(kernel)
    b.writer.add_ssm_inner_size(inner)
    b.writer.add_ssm_state_size(state)
    b.writer.add_ssm_time_step_rank(rank)
    b.vector("output_norm.weight", D)
    for i in range(layers):
        b.vector(f"blk.{i}.attn_norm.weight", D)
        b.matrix(f"blk.{i}.ssm_in.weight", 2 * inner, D)
        b.matrix(f"blk.{i}.ssm_conv1d.weight", inner, kernel)
        b.vector(f"blk.{i}.ssm_conv1d.bias", inner, 0.0)
        b.matrix(f"blk.{i}.ssm_x.weight", rank + 2 * state, inner)
        b.matrix(f"blk.{i}.ssm_dt.weight", inner, rank)
        b.vector(f"blk.{i}.ssm_dt.bias", inner, -1.0)
        a = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
        b.writer.add_tensor(f"blk.{i}.ssm_a", a)
        b.vector(f"blk.{i}.ssm_d", inner)
        b.matrix(f"blk.{i}.ssm_out.weight", D, inner)
    b.save()
    return path


def build_qwen35(path: Path, *, layers: int = 4, mtp: int = 1, seed: int = 0) -> Path:
    """Hybrid (gated delta nets, every second layer attention), with multi-token prediction layers.

    The MTP layer passes the token's embedding through; the output matrix reads the same
    successors off it that the target mostly chooses.
    """
    state, k_heads, v_heads = 16, 2, 4
    keys, values = state * k_heads, state * v_heads
    b = _Builder(path, "qwen35", layers + mtp, seed)
    w = b.writer
    w.add_head_count(HEADS)
    w.add_head_count_kv(2)
    w.add_key_length(HEAD_DIM)
    w.add_value_length(HEAD_DIM)
    w.add_rope_freq_base(10000.0)
    w.add_rope_dimension_count(HEAD_DIM)
    w.add_rope_dimension_sections([4, 2, 2, 0])
    w.add_ssm_conv_kernel(4)
    w.add_ssm_inner_size(values)
    w.add_ssm_state_size(state)
    w.add_ssm_time_step_rank(v_heads)
    w.add_ssm_group_count(k_heads)
    w.add_uint32("qwen35.full_attention_interval", 2)
    if mtp:
        w.add_nextn_predict_layers(mtp)
    b.vector("output_norm.weight", D)
    b.matrix("output.weight", V, D, scale=1.0)
    for i in range(layers + mtp):
        b.vector(f"blk.{i}.attn_norm.weight", D)
        b.vector(f"blk.{i}.post_attention_norm.weight", D)
        if i % 2 == 0 and i < layers:
            b.matrix(f"blk.{i}.attn_qkv.weight", 2 * keys + values, D)
            b.matrix(f"blk.{i}.attn_gate.weight", values, D)
            b.matrix(f"blk.{i}.ssm_conv1d.weight", 2 * keys + values, 4, scale=0.5)
            b.vector(f"blk.{i}.ssm_dt.bias", v_heads, -1.0)
            b.vector(f"blk.{i}.ssm_a", v_heads, -1.0)
            b.matrix(f"blk.{i}.ssm_beta.weight", v_heads, D)
            b.matrix(f"blk.{i}.ssm_alpha.weight", v_heads, D)
            b.vector(f"blk.{i}.ssm_norm.weight", state)
            b.matrix(f"blk.{i}.ssm_out.weight", D, values, scale=0.02)
        else:
            for name, rows in (
                ("attn_q", 2 * HEADS * HEAD_DIM),
                ("attn_k", 2 * HEAD_DIM),
                ("attn_v", 2 * HEAD_DIM),
            ):
                b.matrix(f"blk.{i}.{name}.weight", rows, D)
            b.matrix(f"blk.{i}.attn_output.weight", D, HEADS * HEAD_DIM, scale=0.02)
            b.vector(f"blk.{i}.attn_q_norm.weight", HEAD_DIM)
            b.vector(f"blk.{i}.attn_k_norm.weight", HEAD_DIM)
        b.matrix(f"blk.{i}.ffn_gate.weight", FFN, D)
        b.matrix(f"blk.{i}.ffn_up.weight", FFN, D)
        b.matrix(f"blk.{i}.ffn_down.weight", D, FFN, scale=0.02)
        if i >= layers:
            passing = np.hstack([np.eye(D, dtype=np.float32), np.zeros((D, D), np.float32)])
            w.add_tensor(f"blk.{i}.nextn.eh_proj.weight", passing + 0.02 * b.noise(D, 2 * D))
            b.vector(f"blk.{i}.nextn.enorm.weight", D)
            b.vector(f"blk.{i}.nextn.hnorm.weight", D)
            b.vector(f"blk.{i}.nextn.shared_head_norm.weight", D)
    b.save()
    return path
