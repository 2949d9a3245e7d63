"""Eagle3 checkpoints become GGUF files of llama.cpp's `eagle3` architecture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from localspec import pairs
from localspec.convert import check, layout, packaging, source
from localspec.convert.metadata import FILE_TYPES, QUANTIZATION_VERSION
from localspec.convert.plan import stored_type
from localspec.convert.write import Output, copied, encoded, integers
from localspec.eagle_header import DEPTH_KEY, N_FEATURES
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.models.eagle_config import EagleConfig, packaging_of

D2T, T2D = "d2t", "t2d"
_LAYER = ("midlayer.", "model.layers.0.", "layers.0.")

Floats = np.ndarray[Any, np.dtype[np.float32]]


def _rules(*rows: tuple[str, str, str, str]) -> tuple[layout.Rule, ...]:
    return tuple(layout.Rule(a, b, tuple(dims.split()), role) for a, b, dims, role in rows)


RULES = _rules(
    ("fc.weight", "fc.weight", "width features", layout.MATRIX),
    ("norm.weight", "output_norm.weight", "width", layout.VECTOR),
    ("midlayer.input_layernorm.weight", "blk.0.attn_norm.weight", "width", layout.VECTOR),
    ("midlayer.hidden_norm.weight", "blk.0.attn_norm_2.weight", "width", layout.VECTOR),
    ("midlayer.self_attn.q_proj.weight", "blk.0.attn_q.weight", "queries both", layout.MATRIX),
    ("midlayer.self_attn.k_proj.weight", "blk.0.attn_k.weight", "keys both", layout.MATRIX),
    ("midlayer.self_attn.v_proj.weight", "blk.0.attn_v.weight", "keys both", layout.MATRIX),
    ("midlayer.self_attn.o_proj.weight", "blk.0.attn_output.weight", "width queries",
     layout.MATRIX),
    ("midlayer.post_attention_layernorm.weight", "blk.0.ffn_norm.weight", "width", layout.VECTOR),
    ("midlayer.mlp.gate_proj.weight", "blk.0.ffn_gate.weight", "ffn width", layout.MATRIX),
    ("midlayer.mlp.up_proj.weight", "blk.0.ffn_up.weight", "ffn width", layout.MATRIX),
    ("midlayer.mlp.down_proj.weight", "blk.0.ffn_down.weight", "width ffn", layout.MATRIX),
)  # fmt: skip
INPUT_NORM, OUTPUT, EMBEDDING = _rules(
    ("input_norm.weight", "enc.output_norm.weight", "features", layout.VECTOR),
    ("lm_head.weight", "output.weight", "draft_vocabulary width", layout.MATRIX),
    ("embed_tokens.weight", "token_embd.weight", "vocabulary width", layout.MATRIX),
)
QK_NORMS = _rules(
    ("midlayer.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight", "head", layout.VECTOR),
    ("midlayer.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight", "head", layout.VECTOR),
)
# llama.cpp rotates neighbours in this architecture; checkpoints rotate halves.
_ROTATED = ("midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight")


def recognised(path: Path) -> bool:
    """Whether a checkpoint directory says that it holds an Eagle3 drafter."""
    try:
        data = json.loads((_located(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, Mapping) and packaging_of(data) is not None


def _located(path: Path) -> Path:
    """The directory that holds the checkpoint: `path`, or one inside training output."""
    try:
        return packaging.locate(path) if path.is_dir() else path
    except LocalspecError:
        return path


class EagleCheckpoint(source.Checkpoint):
    """An Eagle3 checkpoint opened for reading; names are SpecForge's (`midlayer.`).

    Attributes:
        eagle: its config.json, checked.
        draft_tokens: [draft vocabulary] target ids of the output matrix's rows; None: all tokens.

    Raises:
        LocalspecError: a file is missing or damaged, or llama.cpp has no graph for this drafter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path = _located(path)
        self.eagle = EagleConfig.from_file(path)
        if self.eagle.num_features != N_FEATURES and not self.eagle.qk_norm:
            raise LocalspecError(
                f"{path}: this Eagle3 drafter reads {self.eagle.num_features} target layers, but "
                f"llama.cpp's graph reads {N_FEATURES}; it cannot be converted"
            )
        stored = source._stored_tensors(path, None)
        tensors = {}
        for name, tensor in stored.items():
            new = _canonical(name)
            # The qwen3 graph, which runs layers with these norms, rotates halves itself.
            head = self.eagle.head_dim if new in _ROTATED and not self.eagle.qk_norm else 0
            tensors[new] = dataclasses.replace(tensor, name=new, head=head)
        self.draft_tokens = self._draft_tokens(tensors.pop(D2T, None))
        tensors.pop(T2D, None)  # the same table, from the other side
        self.tensors = tensors

    def chunks(self, name: str) -> Iterator[Floats]:
        """The tensor as float32 [rows, columns]; rotated rows in llama.cpp's order."""
        tensor = self.tensors[name]
        for values in self._chunks(tensor):
            yield to_neighbours(values, tensor.head) if tensor.head else values

    def _draft_tokens(
        self, d2t: source.StoredTensor | None
    ) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        c = self.eagle
        if d2t is None:
            if c.draft_vocab_size != c.vocab_size:
                raise LocalspecError(
                    f"{self.path}: draft_vocab_size is {c.draft_vocab_size} of {c.vocab_size}, but "
                    "there is no d2t table that says which tokens; the export is incomplete"
                )
            return None
        offsets = source._integers(d2t)
        ids = np.arange(len(offsets)) + offsets
        fine = len(ids) == c.draft_vocab_size and len(np.unique(ids)) == len(ids)
        if not fine or ids.min(initial=0) < 0 or ids.max(initial=0) >= c.vocab_size:
            raise LocalspecError(
                f"{self.path}: d2t does not name {c.draft_vocab_size} different tokens of "
                f"{c.vocab_size}; was the vocabulary mapping exported with the weights?"
            )
        if len(ids) == c.vocab_size and not offsets.any():
            return None
        tokens: np.ndarray[Any, np.dtype[np.int64]] = ids.astype(np.int64)
        return tokens


def _canonical(name: str) -> str:
    """SpecForge's name of a tensor."""
    for prefix in _LAYER:
        if name.startswith(prefix):
            return "midlayer." + name.removeprefix(prefix)
    return name.removeprefix("model.")


def to_neighbours(values: Floats, head: int) -> Floats:
    """Rows of whole heads, from rotary halves (i pairs with i + head/2) to neighbours."""
    heads = values.reshape(-1, 2, head // 2, values.shape[-1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)


def check_fit(checkpoint: EagleCheckpoint, target: GgufFile) -> None:
    """Whether the checkpoint can draft for this target.

    Raises:
        LocalspecError: with the reason.
    """
    c, here = checkpoint.eagle, checkpoint.path
    n_vocab = check.usable_vocabulary(target)
    depth = check.n_layers(target)
    width = int(target.arch_get("embedding_length"))
    check.refuse_different(here, target, "feature width", c.target_hidden_size, width)
    check.refuse_different(here, target, "vocabulary (vocab_size)", c.vocab_size, n_vocab)
    if c.num_target_layers is not None:
        check.refuse_different(
            here, target, "layer count (num_target_layers)", c.num_target_layers, depth
        )
    layers = c.layers_of(depth)
    if not all(0 <= i <= depth - 2 for i in layers):
        raise LocalspecError(
            f"{here} reads target layers {list(layers)}, but {target.path} has {depth} layers "
            f"(usable: 0 to {depth - 2}); it was trained for another target"
        )


def check_tensors(checkpoint: EagleCheckpoint) -> None:
    """Whether the checkpoint has exactly the tensors, shapes and types its config asks for.

    Raises:
        LocalspecError: naming the first tensor that does not fit.
    """
    c, here, found = checkpoint.eagle, checkpoint.path, checkpoint.tensors
    needed = [*RULES, INPUT_NORM] if c.norm_before_fc else [*RULES]
    if c.draft_vocab_size != c.vocab_size or c.hidden_size != c.target_hidden_size:
        needed.append(OUTPUT)
    if c.hidden_size != c.target_hidden_size:
        needed.append(EMBEDDING)
    if c.qk_norm:
        needed += QK_NORMS
    rules = {rule.published: rule for rule in (*needed, OUTPUT, EMBEDDING)}
    check.refuse_missing(here, (rule.published for rule in needed), found)
    check.refuse_unknown(
        here, found, rules,
        "llama.cpp's Eagle3 graph has no place for it, so this drafter cannot be converted",
    )  # fmt: skip
    sizes = _sizes(c)
    for name, tensor in found.items():
        check.refuse_misfit(here, name, tensor, tuple(sizes[d] for d in rules[name].dims))


def plan(
    checkpoint: EagleCheckpoint, target: GgufFile, outtype: str, *, standalone: bool
) -> list[Output]:
    """The tensors of the file; token embeddings only where they are not the target's."""
    c, found = checkpoint.eagle, checkpoint.tensors
    rules = [r for r in (*RULES, INPUT_NORM, OUTPUT) if r.published in found]
    own = EMBEDDING.published in found
    if own and (
        standalone
        or c.hidden_size != c.target_hidden_size
        or check.embeddings_differ(checkpoint, target)
    ):
        rules.append(EMBEDDING)
    outputs = [
        encoded(checkpoint, r.published, r.name, stored_type(r.role, found[r.published].shape[-1],
                                                       outtype))
        for r in rules
    ]  # fmt: skip
    if standalone:
        outputs += [
            copied(target, theirs, name)
            for name, theirs in (
                (EMBEDDING.name, EMBEDDING.name),
                (OUTPUT.name, OUTPUT.name if OUTPUT.name in target.tensors else EMBEDDING.name),
            )
            if name not in {o.name for o in outputs}
        ]
    if checkpoint.draft_tokens is not None:
        outputs.append(integers(D2T, checkpoint.draft_tokens))
    return outputs


def drafter_metadata(checkpoint: EagleCheckpoint, target: GgufFile, outtype: str) -> dict[str, Any]:
    """Everything llama.cpp and localspec need to run the drafter."""
    c = checkpoint.eagle
    name = target.get("general.name") or target.architecture
    values: dict[str, Any] = {
        "general.architecture": pairs.EAGLE_ARCH,
        "general.type": "model",
        "general.name": f"Drafter for {name}",
        "general.file_type": FILE_TYPES[outtype],
        "general.quantization_version": QUANTIZATION_VERSION,
        "localspec.target.name": name,
        "localspec.target.block_count": int(target.arch_get("block_count")),
        DEPTH_KEY: c.depth,
        "eagle3.context_length": c.max_position_embeddings,
        "eagle3.embedding_length": c.hidden_size,
        "eagle3.block_count": 1,
        "eagle3.feed_forward_length": c.intermediate_size,
        "eagle3.attention.head_count": c.num_attention_heads,
        "eagle3.attention.head_count_kv": c.num_key_value_heads,
        "eagle3.attention.key_length": c.head_dim,
        "eagle3.attention.value_length": c.head_dim,
        "eagle3.attention.layer_norm_rms_epsilon": c.rms_norm_eps,
        "eagle3.rope.freq_base": c.rope_theta,
        "eagle3.rope.dimension_count": c.head_dim,
        "eagle3.vocab_size": c.vocab_size,
        # llama.cpp counts layer inputs: input i is the output of layer i - 1.
        "eagle3.target_layers": [i + 1 for i in c.layers_of(check.n_layers(target))],
        "eagle3.target_hidden_size": c.target_hidden_size,
        "eagle3.norm_before_residual": c.norm_before_residual,
        "eagle3.norm_before_fc": c.norm_before_fc,
    }
    values.update(
        (key, target.stored_value(key)) for key in target.metadata if key.startswith("tokenizer.")
    )
    return values


def _sizes(c: EagleConfig) -> dict[str, int]:
    return {
        "width": c.hidden_size,
        "both": 2 * c.hidden_size,
        "features": c.num_features * c.target_hidden_size,
        "queries": c.num_attention_heads * c.head_dim,
        "keys": c.num_key_value_heads * c.head_dim,
        "ffn": c.intermediate_size,
        "head": c.head_dim,
        "vocabulary": c.vocab_size,
        "draft_vocabulary": c.draft_vocab_size,
    }
