"""The drafter settings inside the config.json of a full DeepSeek-V4 checkpoint.

Such a checkpoint holds the target and its DSpark drafter: the drafter's layers are called stages
and are full DeepSeek-V4 layers without compressed attention, so most of their sizes are the
target's own. No torch here: conversion reads checkpoints with this file alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError
from localspec.models.config import MOST_LAYERS, _kind, _one_line, _Reader

# What makes a config.json one of these; the other three settings must then be there too.
MARK = "dspark_block_size"
MODEL_TYPE = "deepseek_v4"
HYPER_CONNECTIONS = 4  # the only number llama.cpp's graph knows
MOST_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
# The released reference code takes these where a config says nothing.
_ROPE_THETA, _HC_EPS, _RMS_EPS = 10000.0, 1e-6, 1e-6


@dataclass(frozen=True)
class Deepseek4Config:
    """The shape of the drafter. Sizes are counts of scalars, layers, heads, experts or tokens.

    Build it with `from_dict` or `from_file`, which check every field. How many stages there are
    is not in the config; the tensors say.
    """

    vocab_size: int
    hidden_size: int
    num_target_layers: int
    num_attention_heads: int
    head_dim: int
    rope_dim: int  # trailing scalars of a head that rotate
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    swiglu_limit: float  # 0: no limit
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # i is the output of layer i
    markov_rank: int

    @property
    def num_features(self) -> int:
        """Width of the target features of one position: the chosen layers, concatenated."""
        return len(self.target_layer_ids) * self.hidden_size

    @classmethod
    def from_file(cls, path: str | Path) -> Deepseek4Config:
        """Read config.json. `path` is the directory that holds it.

        Raises LocalspecError when it cannot be read, is not JSON, or `from_dict` refuses it.
        """
        path = Path(path) / "config.json"
        data = read_json(path)
        if data is None:
            raise LocalspecError(
                f"{path}: cannot be read as a JSON object; download the checkpoint again"
            )
        return cls.from_dict(data, where=str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config.json") -> Deepseek4Config:
        """Check a parsed config.json; fields of the target alone are ignored.

        Raises LocalspecError, one line naming the field and what to do. `where` prefixes it.
        """
        read = _Reader(data, where)
        kind = data.get("model_type", MODEL_TYPE)
        if kind != MODEL_TYPE:
            read.fail(
                "model_type",
                f"is {kind!r}; a DSpark drafter inside a full checkpoint is known for "
                f"{MODEL_TYPE} only, which is also all that llama.cpp loads",
            )
        for field, wanted in (("scoring_func", "sqrtsoftplus"), ("hidden_act", "silu")):
            if data.get(field, wanted) != wanted:
                read.fail(field, f"is {data[field]!r}; llama.cpp's drafter knows {wanted} only")
        vocab = read.integer("vocab_size", least=2)
        layers = read.integer("num_hidden_layers", least=1, most=MOST_LAYERS)
        heads = read.integer("num_attention_heads", least=1)
        head_dim = read.integer("head_dim", least=2)
        rope_dim = read.integer("qk_rope_head_dim", least=2, most=head_dim)
        if rope_dim % 2:
            read.fail("qk_rope_head_dim", f"is {rope_dim}; rotary positions need an even number")
        groups = read.integer("o_groups", least=1)
        if heads % groups:
            read.fail("o_groups", f"is {groups}, which does not divide {heads} attention heads")
        experts = read.integer("n_routed_experts", least=1, most=MOST_EXPERTS)
        hc_mult = read.integer("hc_mult", least=1)
        if hc_mult != HYPER_CONNECTIONS:
            read.fail("hc_mult", f"is {hc_mult}; llama.cpp's drafter has {HYPER_CONNECTIONS}")
        mask = read.integer("dspark_noise_token_id", least=0)
        if mask >= vocab:
            read.fail("dspark_noise_token_id", f"is {mask}, outside the vocabulary of {vocab}")
        rms_norm_eps = read.positive("rms_norm_eps", default=_RMS_EPS)
        if rms_norm_eps >= 1:
            read.fail("rms_norm_eps", f"is {rms_norm_eps}; no norm has one of 1 or more")
        limit = data.get("swiglu_limit")
        return cls(
            vocab_size=vocab,
            hidden_size=read.integer("hidden_size", least=1),
            num_target_layers=layers,
            num_attention_heads=heads,
            head_dim=head_dim,
            rope_dim=rope_dim,
            q_lora_rank=read.integer("q_lora_rank", least=1),
            o_lora_rank=read.integer("o_lora_rank", least=1),
            o_groups=groups,
            moe_intermediate_size=read.integer("moe_intermediate_size", least=1),
            n_routed_experts=experts,
            n_shared_experts=read.integer("n_shared_experts", least=1),
            num_experts_per_tok=read.integer("num_experts_per_tok", least=1, most=experts),
            routed_scaling_factor=read.positive("routed_scaling_factor", default=1.0),
            norm_topk_prob=read.boolean("norm_topk_prob", default=True),
            swiglu_limit=read.positive("swiglu_limit") if limit else 0.0,
            hc_mult=hc_mult,
            hc_sinkhorn_iters=read.integer("hc_sinkhorn_iters", least=1, most=1000),
            hc_eps=read.positive("hc_eps", default=_HC_EPS),
            sliding_window=read.integer("sliding_window", least=1, most=1 << 24),
            rms_norm_eps=rms_norm_eps,
            rope_theta=_rope_theta(data, where),
            max_position_embeddings=read.integer("max_position_embeddings", least=1),
            block_size=read.integer(MARK, least=2),
            mask_token_id=mask,
            target_layer_ids=_layers(read, layers),
            markov_rank=read.integer("dspark_markov_rank", least=1),
        )


def read_json(path: Path) -> Mapping[str, Any] | None:
    """A JSON object of a file; None when it cannot be read or is no object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _rope_theta(data: Mapping[str, Any], where: str) -> float:
    """The base of uncompressed layers: at the top, or among `rope_parameters` (transformers 5).

    The scaling (yarn) beside it is for compressed layers only, and the drafter has none.
    """
    nested = data.get("rope_parameters")
    if isinstance(nested, Mapping):
        main = nested.get("main")
        data = {**nested, **(main if isinstance(main, Mapping) else {}), **data}
    return _Reader(data, where).positive("rope_theta", default=_ROPE_THETA)


def _layers(read: _Reader, layers: int) -> tuple[int, ...]:
    field = "dspark_target_layer_ids"
    ids = read.value(field, None)
    if not isinstance(ids, list) or not ids:
        read.fail(field, "must be a non-empty list of layer numbers")
    for i in ids:
        if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < layers:
            what = i if isinstance(i, int) else _kind(i)
            read.fail(field, f"has {what}; the model has layers 0 to {layers - 1}")
    if sorted(set(ids)) != ids:
        read.fail(field, _one_line(f"is {ids}; it must be strictly increasing"))
    return tuple(ids)
