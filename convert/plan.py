"""Which tensor goes into which file, and as what."""

from __future__ import annotations

from dataclasses import dataclass

import gguf
from gguf import GGMLQuantizationType as Type

from localspec.convert import layout, metadata
from localspec.convert.source import Checkpoint
from localspec.convert.write import Output, copied, encoded, integers, numbers
from localspec.ggufio import GgufFile

_TYPES = {
    name.lower(): Type[name]
    for name in (
        "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
    )
}  # fmt: skip
# What llama.cpp takes instead when rows are no whole number of blocks (first 256, then 32 wide).
_FALLBACK = {
    Type.Q2_K: Type.Q4_0, Type.Q3_K: Type.Q4_0, Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1,
    Type.Q6_K: Type.Q8_0,
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Attributes:
    drafter: tensors of the drafter file.
    heads: tensors of the companion; empty when there is none.
    unused: published names that are checked and not written.
    notes: what the user should know, one line each.
    """

    drafter: tuple[Output, ...]
    heads: tuple[Output, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]


def plan(checkpoint: Checkpoint, target: GgufFile, outtype: str, *, standalone: bool) -> Plan:
    """Assign every tensor of a checked checkpoint."""
    config = checkpoint.config
    backbone = [_output(checkpoint, r, outtype) for r in layout.backbone_rules(config)]
    turning = metadata.rope_factors(config)
    if turning is not None:
        backbone.append(numbers("rope_freqs.weight", turning))
    heads = [_output(checkpoint, r, outtype) for r in layout.head_rules(config)]
    unused, notes = set(checkpoint.tensors), []
    if layout.head_type(config) == "none" and heads:
        heads = []
        notes.append("the confidence head is left out: without a Markov head it has no place")
    if config.causal_sliding:
        notes.append(
            "its sliding layers were trained to look back only, but llama.cpp's drafter has one "
            "direction for all layers: they will see the whole block, which costs some acceptance"
        )
    if checkpoint.draft_tokens is not None:
        # A reduced vocabulary has an output matrix of its own, and a list of what its rows mean.
        backbone.append(_output(checkpoint, layout.OUTPUT, outtype))
        backbone.append(integers("d2t", checkpoint.draft_tokens))
    if standalone:
        backbone += _embeddings(checkpoint, target, outtype)
    notes += _fallen_back(backbone, outtype)
    unused -= {o.source_name for o in (*backbone, *heads)}
    in_graph = layout.in_graph(config)
    return Plan(
        drafter=tuple(backbone + heads if in_graph else backbone),
        heads=() if in_graph else tuple(heads),
        unused=tuple(sorted(unused)),
        notes=tuple(notes),
    )


def _output(checkpoint: Checkpoint, rule: layout.Rule, outtype: str) -> Output:
    tensor = checkpoint.tensors[rule.published]
    kind = stored_type(rule.role, tensor.shape[-1], outtype)
    shape = None
    if rule.name == "conf_proj.weight":
        # Trained without the Markov feature: zeros on its part, so that one formula serves both.
        shape = (checkpoint.config.hidden_size + checkpoint.config.markov_rank,)
    return encoded(checkpoint, rule.published, rule.name, kind, shape)


def stored_type(role: str, columns: int, outtype: str) -> Type:
    """How a tensor is stored: norms as F32, heads at F16 or better, matrices as chosen.

    Rows that are no whole number of a type's blocks take the type that llama.cpp falls back to.
    """
    if role == layout.VECTOR:
        return Type.F32
    kind = _TYPES[outtype]
    if role == layout.TABLE:
        return kind if kind in (Type.F32, Type.F16, Type.BF16) else Type.F16
    if columns % _block(kind):
        kind = _FALLBACK.get(kind, Type.F16)
    return Type.F16 if columns % _block(kind) else kind


def _block(kind: Type) -> int:
    return int(gguf.GGML_QUANT_SIZES[kind][0])


def _fallen_back(outputs: list[Output], outtype: str) -> list[str]:
    """A line about the matrices that could not get the type asked for."""
    wanted = _TYPES[outtype]
    plain = (Type.F32, Type.I64)
    other = [o for o in outputs if len(o.shape) == 2 and o.kind not in (wanted, *plain)]
    other = [o for o in other if o.shape[-1] % _block(wanted)]
    if not other:
        return []
    first, more = other[0], f" and {len(other) - 1} more" if len(other) > 1 else ""
    return [
        f"{first.name}{more} stored as {first.kind.name.lower()}: rows of {first.shape[-1]} are "
        f"no multiple of the {_block(wanted)} that {outtype} needs"
    ]


def _embeddings(checkpoint: Checkpoint, target: GgufFile, outtype: str) -> list[Output]:
    """Token embeddings and output matrix: the checkpoint's own, else copies of the target's.

    A file without an output matrix uses its embeddings for both, so tied pairs stay tied.
    """
    embedding, output = layout.EMBEDDING, layout.OUTPUT
    own_embedding = embedding.published in checkpoint.tensors
    outputs = [
        _output(checkpoint, embedding, outtype)
        if own_embedding
        else copied(target, embedding.name, embedding.name)
    ]
    if checkpoint.draft_tokens is not None:
        pass  # already in
    elif output.published in checkpoint.tensors:
        outputs.append(_output(checkpoint, output, outtype))
    elif output.name in target.tensors and not checkpoint.config.tie_word_embeddings:
        outputs.append(copied(target, output.name, output.name))
    elif own_embedding and not checkpoint.config.tie_word_embeddings:
        outputs.append(copied(target, embedding.name, output.name))
    return outputs
