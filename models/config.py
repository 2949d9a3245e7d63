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

    @property
    def num_features(self) -> int:
        """Width of the target features of one position: the chosen layers, concatenated."""
        return len(self.target_layer_ids) * self.hidden_size

    @property
    def num_depths(self) -> int:
        """How many tokens one block drafts: B, or B - 1 when the anchor's row predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

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
        read = _Reader(data, where)

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
        draft = _Reader({**data, **nested}, where) if isinstance(nested, Mapping) else read
        mask_token_id = draft.integer("mask_token_id", least=0)
        if mask_token_id >= vocab_size:
            read.fail(
                "mask_token_id",
                f"is {mask_token_id}, outside the vocabulary of {vocab_size}; "
                "use the id of the mask token",
            )
        num_target_layers = read.optional_integer("num_target_layers", least=1)
        target_layer_ids = _target_layer_ids(draft, num_target_layers)

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
        )

    def to_dict(self) -> dict[str, Any]:
        """The config.json of the published layout; `from_dict(to_dict())` gives an equal config."""
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
