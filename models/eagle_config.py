"""What an Eagle3 checkpoint's config.json says, in the packagings it is published in. No torch.

DeepSpec's release ("Qwen3Eagle3Model") names its layers in `target_layer_ids` and normalises
queries and keys; SpecForge's exports ("LlamaForCausalLMEagle3") have three feature layers, a Llama
layer without those norms, and a reduced vocabulary (`draft_vocab_size`). "speculators" exports
are the same in another wrapping.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError
from localspec.models.config import MOST_LAYERS, _one_line, _Reader, _rope_theta

DEEPSPEC, SPECFORGE = "deepspec", "specforge"
ARCHITECTURES = {
    "Qwen3Eagle3Model": DEEPSPEC,
    "Gemma4Eagle3Model": DEEPSPEC,
    "LlamaForCausalLMEagle3": SPECFORGE,
    "Eagle3LlamaForCausalLM": SPECFORGE,
    "Eagle3Speculator": SPECFORGE,
    "Eagle3DraftModel": SPECFORGE,
}
# How far SpecForge and DeepSpec unroll the drafter in training.
DEPTH = 7


@dataclass(frozen=True)
class EagleConfig:
    """The shape of an Eagle3 drafter; build it with `from_dict`, which checks every field.

    Attributes:
        packaging: DEEPSPEC or SPECFORGE.
        vocab_size: tokens of the target.
        draft_vocab_size: rows of the output matrix.
        target_hidden_size: width of the features, per layer.
        target_layer_ids: layers whose outputs are read; None: derived from the target's depth.
        depth: how many tokens ahead it was trained to draft.
        qk_norm: queries and keys are normalised.
        norm_before_fc: the features are normalised as a whole before they are fused.
        norm_before_residual: the residual is the normalised state.
    """

    packaging: str
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    target_layer_ids: tuple[int, ...] | None
    depth: int = DEPTH
    num_target_layers: int | None = None
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    qk_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False

    @property
    def num_features(self) -> int:
        """How many target layers are read."""
        return 3 if self.target_layer_ids is None else len(self.target_layer_ids)

    def layers_of(self, depth: int) -> tuple[int, ...]:
        """The target layers whose outputs are read, for a target of `depth` layers."""
        if self.target_layer_ids is not None:
            return self.target_layer_ids
        return (1, depth // 2 - 1, depth - 4)  # SpecForge's and SGLang's default

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config.json") -> EagleConfig:
        """Check a parsed config.json.

        Raises:
            LocalspecError: one line naming the field and what to do. `where` prefixes it.
        """
        nested = data.get("transformer_layer_config")
        if isinstance(nested, Mapping):  # "speculators" exports keep the layer's shape apart
            data = {**nested, **{k: v for k, v in data.items() if v is not None}}
        read = _Reader(data, where)
        packaging = packaging_of(data)
        if packaging is None:
            read.fail("architectures", "names no Eagle3 drafter")
        if "Gemma4Eagle3Model" in _architectures(data):
            read.fail("architectures", "is Gemma4Eagle3Model, which llama.cpp has no graph for")
        if data.get("hidden_act", "silu") != "silu":
            read.fail("hidden_act", f"is {data['hidden_act']!r}; only 'silu' is supported")
        if read.integer("num_hidden_layers", least=1, default=1) != 1:
            read.fail("num_hidden_layers", "is not 1; llama.cpp runs Eagle3 drafters of one layer")
        for field, usual in (("fc_norm", False), ("norm_output", True), ("attention_bias", False),
                             ("mlp_bias", False)):  # fmt: skip
            if read.boolean(field, default=usual) != usual:
                read.fail(
                    field,
                    f"is {str(not usual).lower()}, which llama.cpp's Eagle3 graph cannot do; "
                    "this drafter cannot be converted",
                )
        hidden = read.integer("hidden_size", least=1)
        heads = read.integer("num_attention_heads", least=1)
        kv_heads = read.integer("num_key_value_heads", least=1, default=heads)
        if heads % kv_heads:
            read.fail("num_key_value_heads", f"is {kv_heads}, which does not divide {heads}")
        head_dim = read.integer("head_dim", least=2, default=max(2, hidden // heads))
        if head_dim % 2:
            read.fail("head_dim", f"is {head_dim}; rotary positions need an even number")
        vocab = read.integer("vocab_size", least=2)
        n_target = read.optional_integer("num_target_layers", least=1)
        with_theta = data
        if data.get("rope_theta") is None and not isinstance(data.get("rope_parameters"), Mapping):
            with_theta = {**data, "rope_theta": 10000.0}
        return cls(
            packaging=packaging,
            vocab_size=vocab,
            draft_vocab_size=read.integer("draft_vocab_size", least=1, most=vocab, default=vocab),
            hidden_size=hidden,
            target_hidden_size=read.integer("target_hidden_size", least=1, default=hidden),
            intermediate_size=read.integer("intermediate_size", least=1),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            target_layer_ids=_target_layer_ids(read, packaging),
            depth=read.integer("ttt_length", least=1, most=32, default=DEPTH),
            num_target_layers=n_target,
            rope_theta=_rope_theta(_Reader(with_theta, where)),
            rms_norm_eps=read.positive("rms_norm_eps", default=1e-6),
            max_position_embeddings=read.integer("max_position_embeddings", least=1, default=2048),
            qk_norm=packaging == DEEPSPEC,
            norm_before_fc=read.boolean("norm_before_fc", default=False),
            norm_before_residual=read.boolean("norm_before_residual", default=False),
        )

    @classmethod
    def from_file(cls, path: str | Path) -> EagleConfig:
        """Read config.json from a directory.

        Raises:
            LocalspecError: it cannot be read, is not JSON, or `from_dict` refuses it.
        """
        file = Path(path) / "config.json"
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as e:
            raise LocalspecError(
                f"{file} cannot be read ({_one_line(e)}); download it again"
            ) from e
        if not isinstance(data, Mapping):
            raise LocalspecError(f"{file} must hold a JSON object; download it again")
        return cls.from_dict(data, where=str(file))


def packaging_of(data: Mapping[str, Any]) -> str | None:
    """DEEPSPEC or SPECFORGE for the config of an Eagle3 drafter, None for any other."""
    for name in _architectures(data):
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    return None


def _architectures(data: Mapping[str, Any]) -> list[str]:
    names = data.get("architectures")
    return [n for n in names if isinstance(n, str)] if isinstance(names, list) else []


def _target_layer_ids(read: _Reader, packaging: str) -> tuple[int, ...] | None:
    field, ids = "target_layer_ids", read.data.get("target_layer_ids")
    if packaging == SPECFORGE:
        nested = read.data.get("eagle_config")
        field = "eagle_aux_hidden_state_layer_ids"
        ids = nested.get(field) if isinstance(nested, Mapping) else None
        if ids is None:
            # At the top level they are counted as vLLM counts them: one further.
            ids = read.data.get(field)
            if isinstance(ids, list) and all(type(i) is int for i in ids):
                ids = [i - 1 for i in ids]
        if ids is None:
            return None
    good = isinstance(ids, list) and ids and all(
        type(i) is int and 0 <= i < MOST_LAYERS for i in ids
    )  # fmt: skip
    if not good or ids is None:
        read.fail(field, "must be a non-empty list of layer numbers")
    return tuple(ids)
