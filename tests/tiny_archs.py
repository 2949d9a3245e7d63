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
