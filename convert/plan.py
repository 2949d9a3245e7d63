"""Which tensor goes into which file, and as what."""

from __future__ import annotations

from dataclasses import dataclass

from gguf import GGMLQuantizationType as Type

from localspec.convert import layout
from localspec.convert.source import Checkpoint
from localspec.convert.write import Output, copied, encoded
from localspec.ggufio import GgufFile

_TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0}
_Q8_BLOCK = 32


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
    heads = [_output(checkpoint, r, outtype) for r in layout.head_rules(config)]
    unused, notes = set(checkpoint.tensors), []
    if layout.head_type(config) == "none" and heads:
        heads = []
        notes.append("the confidence head is left out: without a Markov head it has no place")
    if standalone:
        backbone += _embeddings(checkpoint, target, outtype)
    unused -= {o.source_name for o in (*backbone, *heads)}
    in_graph = layout.head_type(config) in layout.IN_GRAPH
    return Plan(
        drafter=tuple(backbone + heads if in_graph else backbone),
        heads=() if in_graph else tuple(heads),
        unused=tuple(sorted(unused)),
        notes=tuple(notes),
    )


def _output(checkpoint: Checkpoint, rule: layout.Rule, outtype: str) -> Output:
    tensor = checkpoint.tensors[rule.published]
    kind = _kind(rule.role, tensor.shape[-1], outtype)
    shape = None
    if rule.name == "conf_proj.weight":
        # Trained without the Markov feature: zeros on its part, so that one formula serves both.
        shape = (checkpoint.config.hidden_size + checkpoint.config.markov_rank,)
    return encoded(checkpoint, rule.published, rule.name, kind, shape)


def _kind(role: str, columns: int, outtype: str) -> Type:
    if role == layout.VECTOR:
        return Type.F32
    if outtype == "q8_0" and (role == layout.TABLE or columns % _Q8_BLOCK):
        return Type.F16
    return _TYPES[outtype]


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
    if output.published in checkpoint.tensors:
        outputs.append(_output(checkpoint, output, outtype))
    elif output.name in target.tensors and not checkpoint.config.tie_word_embeddings:
        outputs.append(copied(target, output.name, output.name))
    elif own_embedding and not checkpoint.config.tie_word_embeddings:
        outputs.append(copied(target, embedding.name, output.name))
    return outputs
