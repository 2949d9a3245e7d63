"""Published tensor names and shapes of drafters, and what they are called in GGUF.

Everything about a family of drafters is data: a table of rules whose dimensions are names that
`sizes` resolves from the config. Another family is another table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from localspec.models.config import DrafterConfig

# What a tensor is, which decides its precision: a "matrix" takes the chosen output type, a "table"
# (the heads' matrices, where rounding directly moves logits) at least half precision, a "vector"
# (norms, biases, the confidence head) always float32.
MATRIX, TABLE, VECTOR = "matrix", "table", "vector"


@dataclass(frozen=True)
class Rule:
    """One tensor of a family.

    Attributes:
        published: name in the checkpoint; `{}` stands for the layer.
        name: name in GGUF; `{}` stands for the layer.
        dims: dimensions, by their names in `sizes`.
        role: MATRIX, TABLE or VECTOR.
    """

    published: str
    name: str
    dims: tuple[str, ...]
    role: str


def _rules(*rows: tuple[str, str, str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(published, name, tuple(dims.split()), role) for published, name, dims, role
                 in rows)  # fmt: skip


# The Qwen3-style backbone. Its rotary embedding pairs the two halves of a head, as llama.cpp's
# dflash graph does, so no rows are permuted.
BACKBONE = _rules(
    ("fc.weight", "fc.weight", "width features", MATRIX),
    ("hidden_norm.weight", "enc.output_norm.weight", "width", VECTOR),
    ("norm.weight", "output_norm.weight", "width", VECTOR),
)
LAYER = _rules(
    ("layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", "width", VECTOR),
    ("layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight", "queries width", MATRIX),
    ("layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight", "keys width", MATRIX),
    ("layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight", "keys width", MATRIX),
    ("layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight", "width queries", MATRIX),
    ("layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight", "head", VECTOR),
    ("layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight", "head", VECTOR),
    ("layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight", "width", VECTOR),
    ("layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight", "ffn width", MATRIX),
    ("layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight", "ffn width", MATRIX),
    ("layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight", "width ffn", MATRIX),
)
# What the Gemma 4 backbone has in other places: its attention and MLP are followed by norms, and
# keys and values share a matrix. Its fifth norm in place of the one before the MLP.
GEMMA4_LAYER = tuple(
    rule for rule in LAYER if "v_proj" not in rule.published and "layernorm" not in rule.published
) + _rules(
    ("layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight", "width", VECTOR),
    ("layers.{}.post_attention_layernorm.weight", "blk.{}.post_attention_norm.weight", "width",
     VECTOR),
    ("layers.{}.pre_feedforward_layernorm.weight", "blk.{}.ffn_norm.weight", "width", VECTOR),
    ("layers.{}.post_feedforward_layernorm.weight", "blk.{}.post_ffw_norm.weight", "width",
     VECTOR),
    ("layers.{}.layer_scalar", "blk.{}.layer_output_scale.weight", "1", VECTOR),
)  # fmt: skip
# DFlash 2: a dynamic convolution before and after each sublayer (the first dimension).
CONVOLUTIONS = _rules(
    ("layers.{}.attention_conv.base_kernel", "blk.{}.attn_conv_base", "2 kernel width", VECTOR),
    ("layers.{}.attention_conv.kernel_projection.weight", "blk.{}.attn_conv_proj.weight",
     "kernels width", MATRIX),
    ("layers.{}.mlp_conv.base_kernel", "blk.{}.ffn_conv_base", "2 kernel width", VECTOR),
    ("layers.{}.mlp_conv.kernel_projection.weight", "blk.{}.ffn_conv_proj.weight",
     "kernels width", MATRIX),
)  # fmt: skip
MARKOV = _rules(
    ("markov_head.markov_w1.weight", "markov_w1.weight", "vocabulary rank", TABLE),
    ("markov_head.markov_w2.weight", "markov_w2.weight", "drafted rank", TABLE),
)
HEADS = {
    "none": (),
    "vanilla": MARKOV,
    "gated": MARKOV
    + _rules(
        ("markov_head.gate_proj.weight", "gate_proj.weight", "rank width+rank", TABLE),
        ("markov_head.gate_proj.bias", "gate_proj.bias", "rank", VECTOR),
    ),
    "rnn": MARKOV
    + _rules(
        ("markov_head.joint_proj.weight", "joint_proj.weight", "3rank width+2rank", TABLE),
        ("markov_head.joint_proj.bias", "joint_proj.bias", "3rank", VECTOR),
    ),
    "selector": _rules(
        (
            "candidate_selector.predecessor_codebook",
            "selector_predecessor.weight",
            "vocabulary codes",
            TABLE,
        ),
        (
            "candidate_selector.successor_codebook",
            "selector_successor.weight",
            "vocabulary codes",
            TABLE,
        ),
        (
            "candidate_selector.hidden_projection.weight",
            "selector_hidden.weight",
            "codes width",
            TABLE,
        ),
    ),
}
# The output file holds the confidence weights as one row over [hidden state ; W1 of the parent].
CONFIDENCE = _rules(
    ("confidence_head.proj.weight", "conf_proj.weight", "1 confidence", VECTOR),
    ("confidence_head.proj.bias", "conf_proj.bias", "1", VECTOR),
)
# Copies of the target's own matrices; published checkpoints may or may not carry them.
EMBEDDING, OUTPUT = _rules(
    ("embed_tokens.weight", "token_embd.weight", "vocabulary width", MATRIX),
    ("lm_head.weight", "output.weight", "drafted width", MATRIX),
)
# Head types whose arithmetic llama.cpp's graph knows: their tensors go into the drafter itself.
IN_GRAPH = frozenset({"none", "vanilla", "selector"})


def head_type(config: DrafterConfig) -> str:
    """ "none", "vanilla", "gated", "rnn" or DFlash 2's "selector"."""
    if config.selector_rank:
        return "selector"
    return config.markov_head_type if config.markov_rank else "none"


def in_graph(config: DrafterConfig) -> bool:
    """Whether llama.cpp's graph can do the head's arithmetic, so that it lies in the drafter.

    The Markov bias comes after the soft-cap, which the graph leaves out (but for DFlash 2).
    """
    reshaped = config.final_logit_softcapping is not None or config.logit_scale != 1
    kind = head_type(config)
    return kind in IN_GRAPH and not (kind == "vanilla" and reshaped)


def sizes(config: DrafterConfig) -> dict[str, int]:
    """The dimensions that rules name, in scalars."""
    c = config
    width, rank = c.hidden_size, c.markov_rank
    return {
        "1": 1,
        "2": 2,
        "width": width,
        "features": c.num_features,
        "queries": c.num_attention_heads * c.head_dim,
        "keys": c.num_key_value_heads * c.head_dim,
        "head": c.head_dim,
        "ffn": c.intermediate_size,
        "vocabulary": c.vocab_size,
        "drafted": c.draft_vocab_size or c.vocab_size,  # rows of the output matrix
        "rank": rank,
        "3rank": 3 * rank,
        "width+rank": width + rank,
        "width+2rank": width + 2 * rank,
        "codes": c.selector_rank,
        "kernel": c.conv_kernel_size,
        "kernels": 2 * c.conv_kernel_size * (width // max(1, c.conv_group_size)),
        "confidence": width + (rank if c.confidence_head_with_markov else 0),
    }


def backbone_rules(config: DrafterConfig) -> Iterator[Rule]:
    """The rules of the backbone, layers written out."""
    yield from BACKBONE
    layers = GEMMA4_LAYER if config.backbone == "gemma4" else LAYER
    if config.selector_rank:
        layers += CONVOLUTIONS
    for layer in range(config.num_hidden_layers):
        for rule in layers:
            yield Rule(rule.published.format(layer), rule.name.format(layer), rule.dims, rule.role)


def head_rules(config: DrafterConfig) -> Iterator[Rule]:
    """The rules of the Markov head and of the confidence head, where there are any."""
    yield from HEADS[head_type(config)]
    if config.enable_confidence_head:
        yield from CONFIDENCE


def shape(rule: Rule, config: DrafterConfig) -> tuple[int, ...]:
    """The shape a checkpoint must have for this rule."""
    known = sizes(config)
    return tuple(known[dim] for dim in rule.dims)
