"""What a drafter checkpoint's config.json says, checked before anything is built from it.

No torch here: conversion reads checkpoints with this file alone.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from localspec.errors import LocalspecError

BACKBONES = ("qwen3", "gemma4")
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")
MOST = 2**31 - 1  # what every format these numbers end up in can hold
MOST_LAYERS = 1024  # far above any real model; keeps a typo from building layers for hours


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of one drafter. Sizes are counts of scalars, layers, heads or tokens.

    Build it with `from_dict` or `from_file`, which check every field; the constructor does not.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # -1 is the embedding output, i the output of layer i
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()  # one of LAYER_TYPES per layer
    sliding_window: int | None = None  # tokens; used by the sliding_attention layers only
    markov_rank: int = 0  # 0: no Markov head
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    sample_from_anchor: bool = True  # position 0 predicts depth 1; False for DFlash checkpoints
    tie_word_embeddings: bool = False
    num_target_layers: int | None = None
    num_anchors: int = 64  # blocks per training sequence
    draft_vocab_size: int | None = None  # rows of a reduced output matrix
    backbone: str = "qwen3"  # one of BACKBONES
    partial_rotary_factor: float = 1.0  # share of a head's pairs that turn (gemma4)
    attention_k_eq_v: bool = False  # keys and values share one matrix (gemma4)
    causal: bool = False  # positions of a block see only earlier ones of it
    causal_sliding: bool = False  # they do in the sliding layers, but not in the others
    embedding_scale: float = 1.0  # on the token embeddings
    attention_value_scale: float = 1.0  # on what attention gives
    logit_scale: float = 1.0  # on the output matrix's logits, before the soft-cap
    final_logit_softcapping: float | None = None  # c: logits become c tanh(logits / c)
    conv_kernel_size: int = 0  # DFlash 2: positions a dynamic convolution spans
    conv_group_size: int = 0  # DFlash 2: channels that share its coefficients
    selector_rank: int = 0  # DFlash 2: width of the candidate selector; 0: not a DFlash 2
    selector_top_k: int = 0  # DFlash 2: candidates per position

    @property
    def num_features(self) -> int:
        """Width of the target features of one position: the chosen layers, concatenated."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def num_depths(self) -> int:
        """How many tokens one block drafts: B, or B - 1 when the anchor's row predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def reduced_vocab(self) -> int | None:
        """Rows of the output matrix where it leaves tokens out."""
        return None if self.draft_vocab_size == self.vocab_size else self.draft_vocab_size

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, None where it sees everything."""
        sliding = bool(self.layer_types) and self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if sliding else None

    @classmethod
    def from_file(cls, path: str | Path) -> DrafterConfig:
        """Read config.json. `path` is the file or the directory that holds it.

        Raises LocalspecError when it cannot be read, is not JSON, or `from_dict` refuses it.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LocalspecError(
                f"{path}: cannot be read ({_one_line(error)}); "
                "point to a directory with a drafter's config.json"
            ) from error
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LocalspecError(
                f"{path}: is not JSON ({_one_line(error)}); download the checkpoint again"
            ) from error
        return cls.from_dict(data, where=str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "config.json") -> DrafterConfig:
        """Check a parsed config.json and keep what the drafter needs; unknown fields are ignored.

        Raises LocalspecError, one line naming the field and what to do. `where` prefixes it.
        """
        if not isinstance(data, Mapping):
            raise LocalspecError(f"{where}: must hold a JSON object, not {_kind(data)}")
        if _is_gemma4(data):
            return cls.from_dict(_gemma4(data, where), where=where)
        read = _Reader(data, where)
        backbone = data.get("backbone", "qwen3")
        if backbone not in BACKBONES:
            read.fail("backbone", f"is {backbone!r}; known ones are {', '.join(BACKBONES)}")

        hidden_act = data.get("hidden_act", "silu")
        if hidden_act != "silu":
            read.fail("hidden_act", f"is {hidden_act!r}; only 'silu' backbones are supported")

        vocab_size = read.integer("vocab_size", least=2)
        hidden_size = read.integer("hidden_size", least=1)
        layers = read.integer("num_hidden_layers", least=1, most=MOST_LAYERS)
        heads = read.integer("num_attention_heads", least=1)
        kv_heads = read.integer("num_key_value_heads", least=1, default=heads)
        if heads % kv_heads:
            read.fail(
                "num_key_value_heads",
                f"is {kv_heads}, which does not divide num_attention_heads = {heads}; "
                "use a divisor",
            )
        if data.get("head_dim") is None and hidden_size % heads:
            read.fail(
                "hidden_size",
                f"is {hidden_size}, not divisible by num_attention_heads = {heads}; "
                "set head_dim or fix one of them",
            )
        head_dim = read.integer("head_dim", least=2, default=hidden_size // heads)
        if head_dim % 2:
            read.fail("head_dim", f"is {head_dim}; rotary positions need an even number")

        # DFlash checkpoints keep these two in a nested object and predict at mask positions only.
        nested = data.get("dflash_config")
        if isinstance(nested, Mapping):
            data = _dflash(data, nested, layers)
            read = _Reader(data, where)
        mask_token_id = read.integer("mask_token_id", least=0)
        if mask_token_id >= vocab_size:
            read.fail(
                "mask_token_id",
                f"is {mask_token_id}, outside the vocabulary of {vocab_size}; "
                "use the id of the mask token",
            )
        num_target_layers = read.optional_integer("num_target_layers", least=1)
        target_layer_ids = _target_layer_ids(read, num_target_layers)

        layer_types = _layer_types(read, layers)
        sliding_window = read.optional_integer("sliding_window", least=1)
        if "sliding_attention" in layer_types and sliding_window is None:
            read.fail(
                "sliding_window", "is missing although layer_types has 'sliding_attention'; set it"
            )

        markov_rank = read.integer("markov_rank", least=0, default=0)
        markov_head_type = data.get("markov_head_type")
        if markov_rank > 0 and markov_head_type is None:
            read.fail(
                "markov_head_type",
                f"is missing although markov_rank is {markov_rank}; "
                f"set it to one of {', '.join(MARKOV_HEAD_TYPES)}",
            )
        if markov_head_type is None:
            markov_head_type = "vanilla"
        if not isinstance(markov_head_type, str) or (
            markov_head_type.lower() not in MARKOV_HEAD_TYPES
        ):
            read.fail(
                "markov_head_type",
                f"is {markov_head_type!r}; known heads are {', '.join(MARKOV_HEAD_TYPES)}",
            )
        enable_confidence = read.boolean("enable_confidence_head", default=False)
        with_markov = False
        if enable_confidence:
            with_markov = read.boolean("confidence_head_with_markov")
        if with_markov and markov_rank == 0:
            read.fail(
                "confidence_head_with_markov",
                "is true but markov_rank is 0; set it to false or give the drafter a Markov head",
            )

        causal = data.get("is_causal")
        if causal is None:
            causal = data.get("causal")
        if not isinstance(causal, bool | None):
            read.fail("is_causal", f"must be true or false, not {_kind(causal)}")

        selector_rank = read.integer("selector_rank", least=0, default=0)
        conv_group_size = read.integer("conv_group_size", least=0, default=0)
        of_dflash_2 = ("conv_kernel_size", "conv_group_size", "selector_top_k")
        if not selector_rank and any(read.integer(f, least=0, default=0) for f in of_dflash_2):
            read.fail("selector_rank", "is missing beside other settings of a DFlash 2; set it")
        if selector_rank:
            for field in of_dflash_2:
                read.integer(field, least=1)
            if hidden_size % conv_group_size:
                read.fail(
                    "conv_group_size",
                    f"is {conv_group_size}, which does not divide hidden_size = {hidden_size}; "
                    "use a divisor",
                )
            if markov_rank:
                read.fail("selector_rank", "is set beside markov_rank; a drafter has one head")
            if enable_confidence:
                read.fail("enable_confidence_head", "is true beside a selector; set it to false")

        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size", least=1),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            block_size=read.integer("block_size", least=2),
            mask_token_id=mask_token_id,
            target_layer_ids=target_layer_ids,
            rope_theta=_rope_theta(read),
            rms_norm_eps=read.positive("rms_norm_eps", default=1e-6),
            max_position_embeddings=read.integer("max_position_embeddings", least=1, default=2048),
            attention_bias=read.boolean("attention_bias", default=False),
            layer_types=layer_types,
            sliding_window=sliding_window,
            markov_rank=markov_rank,
            markov_head_type=markov_head_type.lower(),
            enable_confidence_head=enable_confidence,
            confidence_head_with_markov=with_markov,
            sample_from_anchor=read.boolean(
                "sample_from_anchor", default=not isinstance(nested, Mapping)
            ),
            tie_word_embeddings=read.boolean("tie_word_embeddings", default=False),
            num_target_layers=num_target_layers,
            num_anchors=read.integer("num_anchors", least=1, default=64),
            draft_vocab_size=read.optional_integer("draft_vocab_size", least=1),
            backbone=backbone,
            partial_rotary_factor=_rotary_share(read, head_dim) if backbone == "gemma4" else 1.0,
            attention_k_eq_v=read.boolean("attention_k_eq_v", default=False),
            causal=bool(causal),
            causal_sliding=read.boolean("causal_sliding", default=False),
            embedding_scale=read.positive("input_embedding_scale", default=1.0),
            attention_value_scale=read.positive("attention_value_scale", default=1.0),
            logit_scale=read.positive("output_multiplier", default=1.0),
            final_logit_softcapping=(
                read.positive("final_logit_softcapping")
                if data.get("final_logit_softcapping")
                else None
            ),
            conv_kernel_size=read.integer("conv_kernel_size", least=0, default=0),
            conv_group_size=conv_group_size,
            selector_rank=selector_rank,
            selector_top_k=read.integer("selector_top_k", least=0, default=0),
        )

    def to_dict(self) -> dict[str, Any]:
        """The config.json of the published layout; `from_dict(to_dict())` gives an equal config."""
        values = self._common()
        if self.backbone == "gemma4":
            return values | {
                "architectures": ["Gemma4DSparkModel"],
                "model_type": "gemma4_text",
                "hidden_activation": "gelu_pytorch_tanh",
                "attention_k_eq_v": self.attention_k_eq_v,
                "global_head_dim": self.head_dim,
                "num_global_key_value_heads": self.num_key_value_heads,
                "hidden_size_per_layer_input": 0,
                "enable_moe_block": False,
                "final_logit_softcapping": self.final_logit_softcapping,
                "rope_parameters": {
                    "full_attention": {
                        "rope_theta": self.rope_theta,
                        "rope_type": "proportional",
                        "partial_rotary_factor": self.partial_rotary_factor,
                    }
                },
            }
        if self._is_dflash():
            values |= {"architectures": ["DFlashDraftModel"], "is_causal": self.causal}
            if self.causal_sliding:
                values["causal_sliding"] = True
            values["dflash_config"] = {
                "input_embedding_scale": self.embedding_scale,
                "attention_value_scale": self.attention_value_scale,
                "output_multiplier": self.logit_scale,
                "final_logit_softcapping": self.final_logit_softcapping,
            }
            if self.selector_rank:
                values["architectures"] = ["DFlash2DraftModel"]
                values["dflash_config"] |= {
                    "conv_kernel_size": self.conv_kernel_size,
                    "conv_group_size": self.conv_group_size,
                    "selector_rank": self.selector_rank,
                    "selector_top_k": self.selector_top_k,
                }
        return values

    def _is_dflash(self) -> bool:
        """Whether anything is set that only DFlash's layout has a place for."""
        return (
            self.causal
            or self.causal_sliding
            or bool(self.selector_rank)
            or self.final_logit_softcapping is not None
            or not self.embedding_scale == self.attention_value_scale == self.logit_scale == 1
        )

    def _common(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_dropout": 0.0,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "block_size": self.block_size,
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.target_layer_ids),
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "attention_bias": self.attention_bias,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": "sliding_attention" in self.layer_types,
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": self.enable_confidence_head,
            "confidence_head_with_markov": self.confidence_head_with_markov,
            "sample_from_anchor": self.sample_from_anchor,
            "tie_word_embeddings": self.tie_word_embeddings,
            "num_target_layers": self.num_target_layers,
            "num_anchors": self.num_anchors,
            **({"draft_vocab_size": self.draft_vocab_size} if self.draft_vocab_size else {}),
        }


class _Reader:
    """Typed access to a parsed JSON object; every miss is a LocalspecError naming the field."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where

    def fail(self, field: str, problem: str) -> NoReturn:
        # A value that came from the file may hold line breaks; the message must stay one line.
        raise LocalspecError(_one_line(f"{self.where}: {field} {problem}"))

    def value(self, field: str, default: Any) -> Any:
        value = self.data.get(field)
        if value is None:
            value = default
        if value is None:
            self.fail(field, "is missing; this is not a complete DSpark drafter config")
        return value

    def integer(
        self, field: str, *, least: int, most: int = MOST, default: int | None = None
    ) -> int:
        value = self.value(field, default)
        if not isinstance(value, int) or isinstance(value, bool):
            self.fail(field, f"must be an integer, not {_kind(value)}")
        if value < least:
            self.fail(field, f"is {value}; it must be at least {least}")
        if value > most:
            self.fail(field, f"is {value}; it must be at most {most}")
        return int(value)

    def optional_integer(self, field: str, *, least: int) -> int | None:
        if self.data.get(field) is None:
            return None
        return self.integer(field, least=least)

    def positive(self, field: str, *, default: float | None = None) -> float:
        value = self.value(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            self.fail(field, f"must be a number, not {_kind(value)}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not (math.isfinite(number) and number > 0):
            self.fail(field, f"is {number}; it must be positive and finite")
        return number

    def boolean(self, field: str, *, default: bool | None = None) -> bool:
        value = self.value(field, default)
        if not isinstance(value, bool):
            self.fail(field, f"must be true or false, not {_kind(value)}")
        return bool(value)


def _is_gemma4(data: Mapping[str, Any]) -> bool:
    named = data.get("architectures")
    by_name = isinstance(named, list) and "Gemma4DSparkModel" in named
    return data.get("backbone") is None and (
        by_name or data.get("model_type") in ("gemma4_text", "gemma4_unified_text")
    )


def _gemma4(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A Gemma 4 drafter's config in the words of the other backbone.

    Defaults are those of transformers' Gemma4TextConfig, which leaves them out of what it saves.
    The released drafter uses the target's global attention in all its layers: `global_head_dim`,
    one rope, no windows.
    """
    read = _Reader(data, where)
    activation = data.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        read.fail("hidden_activation", f"is {activation!r}; Gemma 4 drafters use gelu_pytorch_tanh")
    if read.boolean("enable_moe_block", default=False):
        read.fail("enable_moe_block", "is true; drafters with experts are not supported")
    if read.integer("hidden_size_per_layer_input", least=0, default=0):
        read.fail("hidden_size_per_layer_input", "is not 0; per-layer inputs are not supported")
    shared = read.integer("num_kv_shared_layers", least=0, default=0)
    if shared and read.boolean("use_double_wide_mlp", default=False):
        read.fail("use_double_wide_mlp", "is true; double-wide layers are not supported")
    same = read.boolean("attention_k_eq_v", default=False)
    rope = data.get("rope_parameters")
    if isinstance(rope, Mapping) and isinstance(rope.get("full_attention"), Mapping):
        rope = rope["full_attention"]
    elif not rope:
        rope = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    if not isinstance(rope, Mapping):
        read.fail("rope_parameters", f"must be an object, not {_kind(rope)}")
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "proportional"):
        read.fail("rope_parameters", f"asks for rope type {kind!r}; only 'proportional' works here")
    share = rope.get("partial_rotary_factor") if kind == "proportional" else 1.0
    if share is None:
        read.fail("rope_parameters", "has no partial_rotary_factor, which 'proportional' needs")
    width = read.integer("hidden_size", least=1)
    return {
        **data,
        "backbone": "gemma4",
        "hidden_act": "silu",  # of the other backbone; this one knows its own
        "attention_k_eq_v": same,
        "head_dim": read.integer("global_head_dim", least=2, default=512),
        "num_key_value_heads": read.integer(
            "num_global_key_value_heads" if same else "num_key_value_heads", least=1
        ),
        "rope_parameters": {"rope_theta": rope.get("rope_theta", 1e6)},
        "rope_theta": rope.get("rope_theta", 1e6),
        "rope_scaling": None,
        "partial_rotary_factor": share,
        "input_embedding_scale": width**0.5,
    }


def _rotary_share(read: _Reader, head_dim: int) -> float:
    share = read.positive("partial_rotary_factor", default=1.0)
    turning = head_dim * share / 2
    if share > 1 or turning < 1 or turning != int(turning):
        read.fail(
            "partial_rotary_factor",
            f"is {share}, which does not turn a whole number of pairs of a head of {head_dim}",
        )
    return share


def _dflash(data: Mapping[str, Any], nested: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Everything DFlash keeps in its nested object, at the top; that wins over what was there."""
    flat = {**data, **{key: value for key, value in nested.items() if value is not None}}
    if nested.get("use_swa"):
        flat["sliding_window"] = nested.get("swa_window_size") or data.get("sliding_window")
        flat["layer_types"] = ["sliding_attention"] * layers
        flat["use_sliding_window"] = True
    elif data.get("use_sliding_window") is False:
        flat["layer_types"] = flat["sliding_window"] = None
    # Checkpoints that do not say so were trained with sliding layers that look back only: served
    # the other way, z-lab's for Gemma 4 31B lost 6% of its accepted tokens (SGLang, pull request
    # 34524). vLLM takes them so, too. Those with `use_swa` look both ways (MiMo).
    elif isinstance(flat.get("layer_types"), list):
        sliding = [kind == "sliding_attention" for kind in flat["layer_types"]]
        if any(sliding) and flat.get("is_causal") is None and flat.get("causal") is None:
            flat["is_causal" if all(sliding) else "causal_sliding"] = True
    of_target = flat.get("num_target_layers")
    if flat.get("target_layer_ids") is None and type(of_target) is int:
        flat["target_layer_ids"] = _spread(of_target, layers)
    return flat


def _spread(num_target_layers: int, layers: int) -> list[int]:
    """DFlash's default features: evenly from layer 1 to the fourth from the end."""
    if layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (layers - 1)) for i in range(layers)]


def _target_layer_ids(read: _Reader, num_target_layers: int | None) -> tuple[int, ...]:
    ids = read.value("target_layer_ids", None)
    if not isinstance(ids, list | tuple) or not ids:
        read.fail("target_layer_ids", "must be a non-empty list of layer numbers")
    for layer in ids:
        if not isinstance(layer, int) or isinstance(layer, bool) or not -1 <= layer < MOST_LAYERS:
            read.fail(
                "target_layer_ids",
                f"has {layer!r}; entries are layer numbers from 0, or -1 for the embedding output",
            )
    if any(a >= b for a, b in itertools.pairwise(ids)):
        read.fail("target_layer_ids", f"is {list(ids)}; it must be strictly increasing")
    # The last layer's output is nobody's input, so no engine can hand it out as a feature.
    if num_target_layers is not None and ids[-1] > num_target_layers - 2:
        read.fail(
            "target_layer_ids",
            f"has {ids[-1]}; with {num_target_layers} target layers the last usable one is "
            f"{num_target_layers - 2}",
        )
    return tuple(ids)


def _layer_types(read: _Reader, layers: int) -> tuple[str, ...]:
    types = read.data.get("layer_types")
    if types is None and read.boolean("use_sliding_window", default=False):
        read.fail("layer_types", "is missing although use_sliding_window is true; list every layer")
    if types is None:
        return ("full_attention",) * layers
    if not isinstance(types, list | tuple) or len(types) != layers:
        read.fail("layer_types", f"must be a list of num_hidden_layers = {layers} entries")
    for kind in types:
        if kind not in LAYER_TYPES:
            read.fail("layer_types", f"has {kind!r}; known types are {', '.join(LAYER_TYPES)}")
    return tuple(types)


def _rope_theta(read: _Reader) -> float:
    """rope_theta from the top level or from rope_parameters; partial rotation is not a thing here.

    A scaled rope (yarn, linear, ...) would silently give other positions, so it is refused.
    """
    nested: Mapping[str, Any] = {}
    for field in ("rope_parameters", "rope_scaling"):
        value = read.data.get(field)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            read.fail(field, f"must be an object, not {_kind(value)}")
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            read.fail(field, f"asks for rope type {kind!r}; only 'default' is supported")
        nested = {**nested, **value}
    return _Reader({**nested, **read.data}, read.where).positive("rope_theta")


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else repr(value))


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
