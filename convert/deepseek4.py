"""The DSpark drafter of a full DeepSeek-V4 checkpoint as a drafter GGUF.

llama.cpp loads it as a `dflash` model whose header has `hyper_connection.count`: its layers
(stages) are then whole DeepSeek-V4 layers. Embeddings and output matrix are always the target's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type

from localspec import pairs
from localspec.convert import check, metadata
from localspec.convert.deepseek4_source import (
    FP4,
    FP4_BLOCK,
    FP8,
    PREFIX,
    Bytes,
    Deepseek4Checkpoint,
    recognised,
)
from localspec.convert.layout import EMBEDDING, MATRIX, OUTPUT, TABLE, VECTOR, Rule, _rules
from localspec.convert.plan import Plan, _fallen_back, stored_type
from localspec.convert.source import CHUNK_VALUES
from localspec.convert.write import Output, copied, encoded
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.models.deepseek4_config import Deepseek4Config

__all__ = [
    "Deepseek4Checkpoint",
    "check_fit",
    "check_tensors",
    "drafter_metadata",
    "plan",
    "recognised",
]
TARGET_ARCH = "deepseek4"
HEAD_TYPE = "vanilla"
SQRT_SOFTPLUS = 4  # llama.cpp's number for this way of scoring experts

FIRST = _rules(
    ("main_proj.weight", "fc.weight", "width features", MATRIX),
    ("main_norm.weight", "enc.output_norm.weight", "width", VECTOR),
)
LAST = _rules(
    ("norm.weight", "output_norm.weight", "width", VECTOR),
    ("hc_head_fn", "output_hc_fn.weight", "hc hc*width", VECTOR),
    ("hc_head_base", "output_hc_base.weight", "hc", VECTOR),
    ("hc_head_scale", "output_hc_scale.weight", "1", VECTOR),
    ("markov_head.markov_w1.weight", "markov_w1.weight", "vocabulary rank", TABLE),
    ("markov_head.markov_w2.weight", "markov_w2.weight", "vocabulary rank", TABLE),
    ("confidence_head.proj.weight", "conf_proj.weight", "1 width+rank", VECTOR),
)
# What mixes the streams and chooses the experts stays float32: rounding there moves everything.
STAGE = _rules(
    ("attn_norm.weight", "attn_norm.weight", "width", VECTOR),
    ("attn.attn_sink", "attn_sinks.weight", "heads", VECTOR),
    ("attn.wq_a.weight", "attn_q_a.weight", "q_rank width", MATRIX),
    ("attn.q_norm.weight", "attn_q_a_norm.weight", "q_rank", VECTOR),
    ("attn.wq_b.weight", "attn_q_b.weight", "queries q_rank", MATRIX),
    ("attn.wkv.weight", "attn_kv.weight", "head width", MATRIX),
    ("attn.kv_norm.weight", "attn_kv_a_norm.weight", "head", VECTOR),
    ("attn.wo_a.weight", "attn_output_a.weight", "o_ranks group", MATRIX),
    ("attn.wo_b.weight", "attn_output_b.weight", "width o_ranks", MATRIX),
    ("hc_attn_fn", "hc_attn_fn.weight", "mix hc*width", VECTOR),
    ("hc_attn_base", "hc_attn_base.weight", "mix", VECTOR),
    ("hc_attn_scale", "hc_attn_scale.weight", "3", VECTOR),
    ("hc_ffn_fn", "hc_ffn_fn.weight", "mix hc*width", VECTOR),
    ("hc_ffn_base", "hc_ffn_base.weight", "mix", VECTOR),
    ("hc_ffn_scale", "hc_ffn_scale.weight", "3", VECTOR),
    ("ffn_norm.weight", "ffn_norm.weight", "width", VECTOR),
    ("ffn.gate.weight", "ffn_gate_inp.weight", "experts width", VECTOR),
    ("ffn.gate.bias", "exp_probs_b.bias", "experts", VECTOR),
    ("ffn.shared_experts.w1.weight", "ffn_gate_shexp.weight", "shared width", MATRIX),
    ("ffn.shared_experts.w2.weight", "ffn_down_shexp.weight", "width shared", MATRIX),
    ("ffn.shared_experts.w3.weight", "ffn_up_shexp.weight", "shared width", MATRIX),
)
# One tensor per expert in the checkpoint, all of them in one in GGUF; the inner `{}` is the expert.
EXPERTS = _rules(
    ("ffn.experts.{}.w1.weight", "ffn_gate_exps.weight", "ffn width", MATRIX),
    ("ffn.experts.{}.w2.weight", "ffn_down_exps.weight", "width ffn", MATRIX),
    ("ffn.experts.{}.w3.weight", "ffn_up_exps.weight", "ffn width", MATRIX),
)
# Types for which 4-bit experts do not stay what they are: unquantised ones, and smaller ones.
_NOT_PACKED = frozenset(("f32", "f16", "bf16", "q3_k", "q2_k"))
# Routing of image tokens, which are never drafted.
IGNORED = ("ffn.gate.bias_vl",)


def sizes(config: Deepseek4Config) -> dict[str, int]:
    """The dimensions that rules name, in scalars."""
    c = config
    width, queries = c.hidden_size, c.num_attention_heads * c.head_dim
    return {
        "1": 1,
        "3": 3,
        "width": width,
        "features": c.num_features,
        "heads": c.num_attention_heads,
        "head": c.head_dim,
        "queries": queries,
        "q_rank": c.q_lora_rank,
        "o_ranks": c.o_groups * c.o_lora_rank,
        "group": queries // c.o_groups,
        "hc": c.hc_mult,
        "hc*width": c.hc_mult * width,
        "mix": (2 + c.hc_mult) * c.hc_mult,
        "experts": c.n_routed_experts,
        "ffn": c.moe_intermediate_size,
        "shared": c.moe_intermediate_size * c.n_shared_experts,
        "vocabulary": c.vocab_size,
        "rank": c.markov_rank,
        "width+rank": width + c.markov_rank,
    }


def single_rules(checkpoint: Deepseek4Checkpoint) -> Iterator[Rule]:
    """The rules of everything but the experts, stages written out."""
    last = checkpoint.n_stages - 1
    for stage, rules in ((0, FIRST), (last, LAST)):
        for rule in rules:
            yield replace(rule, published=f"mtp.{stage}.{rule.published}")
    for stage in range(checkpoint.n_stages):
        for rule in STAGE:
            yield _at(rule, stage)


def expert_rules(checkpoint: Deepseek4Checkpoint) -> Iterator[Rule]:
    """The rules of the experts, stages written out; `published` keeps a `{}` for the expert."""
    for stage in range(checkpoint.n_stages):
        for rule in EXPERTS:
            yield _at(rule, stage)


def _at(rule: Rule, stage: int) -> Rule:
    return replace(rule, published=f"mtp.{stage}.{rule.published}", name=f"blk.{stage}.{rule.name}")


def check_fit(checkpoint: Deepseek4Checkpoint, target: GgufFile) -> None:
    """Whether the drafter can draft for this target.

    Raises:
        LocalspecError: the target is another kind of model, or the two differ in width,
            vocabulary or layers.
    """
    config, here = checkpoint.config, checkpoint.path
    pairs.check_target(target)
    if target.architecture != TARGET_ARCH:
        raise LocalspecError(
            f"{here} holds the drafter of a DeepSeek-V4 model, and {target.path} is a "
            f"{target.architecture} model; use the GGUF of the model it came with"
        )
    n_vocab, depth = check.usable_vocabulary(target), check.n_layers(target)
    for what, ours, theirs in (
        ("width (hidden_size)", config.hidden_size, int(target.arch_get("embedding_length"))),
        ("vocabulary (vocab_size)", config.vocab_size, n_vocab),
        ("layer count (num_hidden_layers)", config.num_target_layers, depth),
    ):
        check.refuse_different(here, target, what, ours, theirs)


def check_tensors(checkpoint: Deepseek4Checkpoint) -> None:
    """Whether the drafter has exactly the tensors, shapes and types its config asks for.

    Raises:
        LocalspecError: naming the first tensor that does not fit.
    """
    config, here, found = checkpoint.config, checkpoint.path, checkpoint.tensors
    known = sizes(config)
    wanted = {r.published: r.dims for r in single_rules(checkpoint)}
    for rule, expert in itertools.product(expert_rules(checkpoint), range(config.n_routed_experts)):
        wanted[rule.published.format(expert)] = rule.dims
    check.refuse_missing(here, wanted, found)
    for name in sorted(found.keys() - wanted.keys()):
        match = PREFIX.fullmatch(name)
        if match is None or match[2] not in IGNORED:
            raise LocalspecError(
                f"{here}: tensor {name} is unknown; this drafter is not the DSpark of DeepSeek-V4, "
                "and llama.cpp has no other in a full checkpoint"
            )
    for name, dims in wanted.items():
        shape = tuple(known[dim] for dim in dims)
        check.refuse_misfit(here, name, found[name], shape, types=(FP8, FP4))


def plan(
    checkpoint: Deepseek4Checkpoint, target: GgufFile, outtype: str, *, standalone: bool
) -> Plan:
    """Every tensor of a checked drafter as what it is written.

    Experts stored in 4 bits keep their bits where the type asked for is quantised and no smaller:
    llama.cpp's MXFP4 holds the same numbers.
    """
    outputs = [_single(checkpoint, rule, outtype) for rule in single_rules(checkpoint)]
    outputs += [_experts(checkpoint, rule, outtype) for rule in expert_rules(checkpoint)]
    if standalone:
        for rule in (EMBEDDING, OUTPUT):
            if rule.name in target.tensors:
                outputs.append(copied(target, rule.name, rule.name))
    notes = tuple(_fallen_back(outputs, outtype))
    return Plan(drafter=tuple(outputs), heads=(), unused=(), notes=notes)


def _single(checkpoint: Deepseek4Checkpoint, rule: Rule, outtype: str) -> Output:
    tensor = checkpoint.tensors[rule.published]
    # conf_proj is one row in GGUF, without the dimension of the rows.
    shape = (tensor.shape[-1],) if rule.name == "conf_proj.weight" else tensor.shape
    kind = stored_type(rule.role, tensor.shape[-1], outtype)
    return _priced(checkpoint, encoded(checkpoint, rule.published, rule.name, kind, shape))


def _experts(checkpoint: Deepseek4Checkpoint, rule: Rule, outtype: str) -> Output:
    """The experts' matrices, one after another: [experts, rows, columns]."""
    names = [rule.published.format(i) for i in range(checkpoint.config.n_routed_experts)]
    shape = checkpoint.tensors[names[0]].shape
    kind = stored_type(rule.role, shape[-1], outtype)
    packed = all(checkpoint.tensors[n].dtype == FP4 for n in names)
    packed = packed and outtype not in _NOT_PACKED
    packed = packed and all(checkpoint.power_of_two_scales(n) for n in names)
    parts = [
        _repacked(checkpoint, name, rule.name)
        if packed
        else _priced(checkpoint, encoded(checkpoint, name, rule.name, kind))
        for name in names
    ]
    return Output(
        name=rule.name,
        shape=(len(names), *shape),
        kind=parts[0].kind,
        source_name=names[0],
        source_bytes=sum(part.source_bytes for part in parts),
        blocks=lambda: itertools.chain.from_iterable(part.blocks() for part in parts),
    )


def _priced(checkpoint: Deepseek4Checkpoint, output: Output) -> Output:
    """The output with its progress counted in stored bytes, which are not those of the values."""
    total = checkpoint.cost(output.source_name)

    def blocks() -> Iterator[tuple[bytes, int]]:
        done = spent = 0
        for data, _ in output.blocks():
            done += len(data)
            now = total * done // output.nbytes
            yield data, now - spent
            spent = now

    return replace(output, source_bytes=total, blocks=blocks)


def _repacked(checkpoint: Deepseek4Checkpoint, source_name: str, name: str) -> Output:
    """A 4-bit tensor as MXFP4: the same codes and scales in another order."""
    rows, columns = checkpoint.tensors[source_name].shape
    step = max(1, CHUNK_VALUES // columns)

    def blocks() -> Iterator[tuple[bytes, int]]:
        scales = checkpoint.exponents(source_name)
        if (scales == 255).any():
            raise LocalspecError(
                f"{checkpoint.path}: tensor {source_name} has NaN values; the checkpoint is damaged"
            )
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            codes = checkpoint.packed(source_name, start, stop)
            yield mxfp4(codes, scales[start:stop]).tobytes(), 0

    output = Output(name, (rows, columns), Type.MXFP4, source_name, 0, blocks)
    return _priced(checkpoint, output)


def mxfp4(codes: Bytes, exponents: Bytes) -> Bytes:
    """4-bit codes and their scales in ggml's order.

    Args:
        codes: [rows, columns / 2], value 2i in the low half of byte i, 2i + 1 in the high one.
        exponents: [rows, columns / 32], powers of two with bias 127.

    Returns:
        [rows, columns / 32, 17]: the scale, then value i low and value i + 16 high in byte i.
    """
    blocks = codes.reshape(len(codes), -1, FP4_BLOCK // 2)
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:2], FP4_BLOCK)
    low, high = values[..., : FP4_BLOCK // 2], values[..., FP4_BLOCK // 2 :]
    packed: Bytes = np.concatenate([exponents[..., None], low | high << 4], axis=-1)
    return packed


def drafter_metadata(
    checkpoint: Deepseek4Checkpoint, target: GgufFile, outtype: str
) -> dict[str, Any]:
    """Everything llama.cpp and localspec need to run the drafter."""
    c, stages = checkpoint.config, checkpoint.n_stages
    name = metadata._name(target)
    values: dict[str, Any] = {
        "general.architecture": pairs.DRAFTER_ARCH,
        "general.type": "model",
        "general.name": f"Drafter for {name}",
        "general.file_type": metadata.FILE_TYPES[outtype],
        "general.quantization_version": metadata.QUANTIZATION_VERSION,
        "localspec.target.name": name,
        "localspec.target.block_count": int(target.arch_get("block_count")),
        "localspec.heads.type": HEAD_TYPE,
        "localspec.drafter.window": c.sliding_window,
    }
    ours = {
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "block_count": stages,
        "feed_forward_length": c.moe_intermediate_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "attention.q_lora_rank": c.q_lora_rank,
        # A block sees the same features from each of its positions: the most recent ones. The
        # window that llama.cpp moves along must not cut there; `Drafter` keeps no older ones.
        "attention.sliding_window": c.sliding_window + c.block_size,
        "attention.output_group_count": c.o_groups,
        "attention.output_lora_rank": c.o_lora_rank,
        "attention.compress_ratios": [0] * stages,  # no stage compresses what it attends to
        "rope.freq_base": c.rope_theta,
        "rope.dimension_count": c.rope_dim,
        "expert_count": c.n_routed_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_shared_count": c.n_shared_experts,
        "expert_feed_forward_length": c.moe_intermediate_size,
        "expert_weights_scale": c.routed_scaling_factor,
        "expert_weights_norm": c.norm_topk_prob,
        "expert_gating_func": SQRT_SOFTPLUS,
        "swiglu_clamp_exp": c.swiglu_limit,
        "swiglu_clamp_shexp": c.swiglu_limit,
        "hyper_connection.count": c.hc_mult,
        "hyper_connection.sinkhorn_iterations": c.hc_sinkhorn_iters,
        "hyper_connection.epsilon": c.hc_eps,
        "vocab_size": c.vocab_size,
        "block_size": c.block_size,
        # llama.cpp counts layer inputs: input i is the output of layer i - 1.
        "target_layers": [i + 1 for i in c.target_layer_ids],
        "sample_from_anchor": True,
        "has_confidence_head": True,
    }
    values |= {f"{pairs.DRAFTER_ARCH}.{key}": value for key, value in ours.items()}
    values |= {
        key: target.stored_value(key) for key in target.metadata if key.startswith("tokenizer.")
    }
    values["tokenizer.ggml.mask_token_id"] = c.mask_token_id
    return values
