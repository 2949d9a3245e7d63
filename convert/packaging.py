"""The same drafters in other people's layouts, brought into the published one.

Sources: the "speculators" library (nested `transformer_layer_config`, feature layers counted as
hidden states, reduced vocabularies), llama.cpp's converter of it, sglang's flag for interleaved
rotary positions, the directories that DeepSpec, speculators and NeMo AutoModel write in training.
Only names, numbers and orders of rows change here; nothing is computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localspec.errors import LocalspecError

CONFIG = "config.json"
# What training wrappers put in front of tensor names.
_PREFIXES = ("_orig_mod.", "module.", "draft_model.", "model.")
# Tensors of a training run that no drafter needs.
_UNUSED = frozenset(
    ("t2d", "verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq")
)
D2T = "d2t"
# Architectures that are DSpark by name, wherever their settings lie.
_DSPARK = frozenset(
    "Qwen3DSparkModel DSparkDraftModel DSparkSpeculator Lfm2DSparkDraftModel LingDSparkModel"
    .split()
)  # fmt: skip
# Packagings whose backbone really rotates only a part of each head when the config says so.
_PARTIAL_ROPE = frozenset(("Lfm2DSparkDraftModel", "LingDSparkModel"))
# What transformers leaves out of a saved Qwen3 config because it is the default.
_QWEN3_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "attention_bias": False,
}  # fmt: skip
_SPECULATORS = ("dspark", "dflash")
_ROTATED = re.compile(r"layers\.\d+\.self_attn\.[qk]_(proj|norm)\.weight")

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Packaged:
    """A checkpoint in the published form.

    Attributes:
        packaging: what it was: "published", "speculators" or "dspark".
        config: the fields of a published config.json.
        names: published tensor name -> stored name; what no drafter needs is left out.
        interleaved: head size where rotary pairs are stored as neighbours, else 0; those rows
            are put into halves (all first members, then all second ones) when read.
    """

    packaging: str
    config: Mapping[str, Any]
    names: Mapping[str, str]
    interleaved: int = 0

    def head_of(self, published: str) -> int:
        """Head size by which a tensor's rows are to be reordered; 0 when they stay."""
        return self.interleaved if _ROTATED.fullmatch(published) else 0


def locate(path: Path) -> Path:
    """The directory that holds config.json and weights: `path`, or the newest one of a training.

    Knows DeepSpec (`step_N`, `step_latest`), speculators (`0`, `1`, ..., `checkpoint_best`) and
    NeMo AutoModel (`LATEST`, `epoch_E_step_S/model/consolidated`). A link is followed only to a
    directory beside it.

    Raises:
        LocalspecError: the directory holds weights that are split over the ranks of a training.
    """
    if not path.is_dir() or (path / CONFIG).is_file():
        return path
    for inside in ("model/consolidated", "consolidated", "model"):
        if (path / inside / CONFIG).is_file():
            return path / inside
    for model in (path / "model", path):
        if any(model.glob("*.distcp")) or any(model.glob("shard-*.safetensors")):
            raise LocalspecError(
                f"{model} holds weights split over the ranks of a training; consolidate them "
                "first (NeMo AutoModel: save_consolidated: true, or model/consolidate.sh)"
            )
    for name in ("checkpoint_best", "step_latest", "LATEST"):
        chosen = path / name
        if chosen.is_dir() and chosen.resolve().parent == path.resolve():
            return locate(chosen)
    steps = [(step, entry) for entry in path.iterdir() for step in _steps(entry)]
    return locate(max(steps)[1]) if steps else path


def _steps(entry: Path) -> Iterator[tuple[int, ...]]:
    if entry.is_symlink() or not entry.is_dir():
        return
    found = re.fullmatch(r"(?:epoch_(\d{1,9})_)?(?:step_)?(\d{1,12})", entry.name)
    if found:
        yield int(found[1] or 0), int(found[2])


def unpack(config: Any, stored: Shapes, where: str) -> Packaged:
    """Recognise a packaging and bring it into the published form.

    Args:
        config: parsed config.json.
        stored: shapes of the stored tensors by name.
        where: the file, for messages.

    Raises:
        LocalspecError: a setting that this backbone cannot be given, by name.
    """
    names = _published_names(stored, where)
    if not isinstance(config, Mapping):
        return Packaged("published", {}, names)
    if config.get("speculators_model_type") in _SPECULATORS or (
        "speculators_model_type" not in config and "transformer_layer_config" in config
    ):
        config, packaging = _speculators(config, names, stored, where), "speculators"
    elif _is_dspark(config) and (
        isinstance(config.get("dflash_config"), Mapping) or "aux_hidden_state_layer_ids" in config
    ):
        config, packaging = _nested(config, where), "dspark"
    else:
        packaging = "published"
    shapes = {name: stored[names[name]] for name in names}
    config = _reduced(config if packaging == "published" else _heads(config, shapes), shapes)
    return Packaged(packaging, config, names, _interleaved(config, where))


def vocabulary_map(d2t: np.ndarray[Any, Any], n_vocab: int, where: str) -> np.ndarray[Any, Any]:
    """Token ids of the rows of a reduced output matrix: row i drafts token i + d2t[i].

    Raises:
        LocalspecError: ids outside the vocabulary, or one that appears twice.
    """
    ids: np.ndarray[Any, Any] = d2t.reshape(-1).astype(np.int64)
    if ids.size and np.abs(ids).max(initial=0) <= n_vocab:
        ids = ids + np.arange(ids.size, dtype=np.int64)
    if not ids.size or ids.min() < 0 or ids.max() >= n_vocab:
        raise LocalspecError(
            f"{where}: d2t leads outside the vocabulary of {n_vocab}; download it again"
        )
    if np.unique(ids).size != ids.size:
        raise LocalspecError(f"{where}: d2t names a token twice; download it again")
    return ids


def to_halves(values: np.ndarray[Any, Any], head: int) -> np.ndarray[Any, Any]:
    """[n * head, columns] or [1, head]: rotary pairs from neighbours (0 1)(2 3) to halves."""
    shape = values.shape
    rows = values.reshape(-1, 1) if shape[0] == 1 else values
    pairs = rows.reshape(-1, head // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(shape)


def _published_names(stored: Shapes, where: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in stored:
        short = name
        while prefix := next((p for p in _PREFIXES if short.startswith(p)), ""):
            short = short[len(prefix) :]
        if short in _UNUSED:
            continue
        if short in names:
            raise LocalspecError(
                f"{where}: tensors {names[short]} and {name} are the same part of a drafter; "
                "this is no drafter checkpoint"
            )
        names[short] = name
    return names


def _is_dspark(config: Mapping[str, Any]) -> bool:
    named = config.get("architectures")
    by_name = isinstance(named, list) and any(a in _DSPARK for a in named if isinstance(a, str))
    nested = config.get("dflash_config")
    inside = nested if isinstance(nested, Mapping) else {}
    return by_name or any("markov_rank" in c or "markov_head_type" in c for c in (config, inside))


def _speculators(
    config: Mapping[str, Any], names: Mapping[str, str], stored: Shapes, where: str
) -> dict[str, Any]:
    nested = config.get("transformer_layer_config")
    if not isinstance(nested, Mapping):
        raise LocalspecError(
            f"{where}: transformer_layer_config must be an object; download the checkpoint again"
        )
    backbone = dict(nested)
    if backbone.get("model_type", "qwen3") == "qwen3":
        backbone = {**_QWEN3_DEFAULTS, **backbone}
        if "rope_theta" not in backbone and not backbone.get("rope_parameters"):
            backbone["rope_theta"] = 10000.0
    flat = {k: v for k, v in config.items() if k != "transformer_layer_config"} | backbone
    listed = flat.get("layer_types")
    sliding = isinstance(listed, list) and "sliding_attention" in listed
    if not sliding and flat.get("use_sliding_window") is False:
        flat["sliding_window"] = None  # the target's own, which no layer here has
    if sliding and not config.get("sliding_window_non_causal", False):
        raise LocalspecError(
            f"{where}: sliding_window_non_causal is false, so its sliding layers see a block only "
            "backwards; llama.cpp's drafter has one direction for all layers, so this one cannot "
            "be converted"
        )
    width = config.get("target_hidden_size")
    if width is not None and width != flat.get("hidden_size"):
        raise LocalspecError(
            f"{where}: target_hidden_size {width} differs from hidden_size; llama.cpp's drafter "
            "needs the target's width, so this one cannot be converted"
        )
    return _taps(flat, where, from_anchor=False)


def _nested(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Settings out of `dflash_config`; DSpark samples from the anchor also there."""
    inside = config.get("dflash_config")
    flat = {k: v for k, v in config.items() if k != "dflash_config"}
    if isinstance(inside, Mapping):
        flat = {**flat, **{k: v for k, v in inside.items() if v is not None}}
        if inside.get("use_swa"):
            layers = flat.get("num_hidden_layers")
            flat["sliding_window"] = inside.get("swa_window_size", flat.get("sliding_window"))
            if isinstance(layers, int) and 0 < layers <= 1024:
                flat["layer_types"] = ["sliding_attention"] * layers
    return _taps(flat, where, from_anchor="aux_hidden_state_layer_ids" not in config)


def _taps(flat: dict[str, Any], where: str, *, from_anchor: bool) -> dict[str, Any]:
    """Feature layers counted as hidden states (0 is the embedding output) -> as layers."""
    if flat.get("sample_from_anchor") is None:
        flat["sample_from_anchor"] = from_anchor
    ids = flat.pop("aux_hidden_state_layer_ids", None)
    if ids is not None:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise LocalspecError(
                f"{where}: aux_hidden_state_layer_ids must be a list of numbers; download it again"
            )
        flat["target_layer_ids"] = [i - 1 for i in ids]
    if flat.get("layer_types") and isinstance(flat["layer_types"], list):
        count = flat.get("num_hidden_layers")
        if type(count) is int and 0 < count < len(flat["layer_types"]):
            flat["layer_types"] = flat["layer_types"][:count]
    return flat


def _heads(config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """What exports leave out about the heads, and their tensors say."""
    known = dict(config)
    table = shapes.get("markov_head.markov_w1.weight", ())
    if len(table) == 2 and known.get("markov_rank") is None:
        known["markov_rank"] = table[1]
    if known.get("markov_head_type") is None:
        heads = {"gate_proj": "gated", "joint_proj": "rnn"}
        found = [heads[n] for n in heads if f"markov_head.{n}.weight" in shapes]
        known["markov_head_type"] = found[0] if found else "vanilla"
    confidence = shapes.get("confidence_head.proj.weight", ())
    # A head that the config asks for and the export left out is nothing a drafter needs.
    if known.get("enable_confidence_head") is None or not confidence:
        known["enable_confidence_head"] = bool(confidence)
    if known.get("confidence_head_with_markov") is None and len(confidence) == 2:
        known["confidence_head_with_markov"] = confidence[1] != known.get("hidden_size")
    return known


def _reduced(config: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    """`draft_vocab_size` only where the vocabulary really is reduced."""
    known = dict(config)
    if known.get("draft_vocab_size") == known.get("vocab_size") and D2T not in shapes:
        known["draft_vocab_size"] = None
    if "lm_head.weight" in shapes and known.get("draft_vocab_size"):
        known["tie_word_embeddings"] = False
    return known


def _interleaved(config: Mapping[str, Any], where: str) -> int:
    if config.get("rope_is_neox_style", True) is not False:
        head = 0
    else:
        head = config.get("head_dim") or 0
        if not head:
            width, heads = config.get("hidden_size"), config.get("num_attention_heads")
            if type(width) is int and type(heads) is int and heads > 0:
                head = width // heads
        if type(head) is not int or head < 2 or head % 2:
            raise LocalspecError(
                f"{where}: rope_is_neox_style is false, but head_dim is no even number; "
                "download it again"
            )
    named = config.get("architectures")
    if isinstance(named, list) and any(a in _PARTIAL_ROPE for a in named if isinstance(a, str)):
        rope = config.get("rope_parameters") or {}
        part = (rope if isinstance(rope, Mapping) else {}).get("partial_rotary_factor", 1.0)
        if part not in (None, 1, 1.0):
            raise LocalspecError(
                f"{where}: partial_rotary_factor is {part}; drafters of this packaging that "
                "rotate a part of each head are not supported"
            )
    return head
