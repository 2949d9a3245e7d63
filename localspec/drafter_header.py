"""What a block drafter's header says (DSpark, DFlash), and the files that belong to a drafter.

Eagle3 drafters are read by `eagle_header`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.architectures import (
    DRAFTER_ARCH,
    EAGLE_ARCH,
    HEADS_ARCH,
    MAX_BLOCK,
    NOT_TARGETS,
)
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.header_checks import check_numbers, positive

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


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


def read_drafter(drafter: GgufFile) -> DrafterInfo:
    """What the drafter is, checked for completeness.

    Raises:
        LocalspecError: the file is no drafter, lacks a setting, or its heads are missing.
    """
    if drafter.architecture == EAGLE_ARCH:
        from localspec.eagle_header import read_eagle

        return read_eagle(drafter)
    if drafter.architecture != DRAFTER_ARCH:
        what = NOT_TARGETS.get(
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
        "dflash.block_size": positive(block_size) and 2 <= block_size <= MAX_BLOCK,
        "tokenizer.ggml.mask_token_id": isinstance(mask, int) and not isinstance(mask, bool),
        "dflash.embedding_length": positive(n_embd),
        "tokenizer.ggml.tokens": tokens is not None,
    }
    for key, fine in needed.items():
        if not fine:
            raise LocalspecError(f"{path}: {key} is missing or invalid; convert the drafter again")
    check_numbers(drafter)
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
        window=window if positive(window) else None,
        causal=drafter.arch_get("attention.causal") is True,
        logit_scale=_number(drafter, "logit_scale", 1.0) if reshape else 1.0,
        softcap=_number(drafter, "final_logit_softcapping", 0.0) if reshape else 0.0,
        top_k=_top_k(drafter, int(n_embd)) if head_type == "selector" else 0,
    )
    reduced_vocabulary(drafter)
    if not 0 <= info.mask_token < n_vocab:
        raise LocalspecError(f"{path}: mask token {info.mask_token} is outside the vocabulary")
    return info


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
    fine = all(positive(n) for n in (k, rank, kernel, group))
    fine = fine and drafter.tensors["selector_hidden.weight"].shape[:1] == (rank,)
    if not fine or width % group or width < k * (k + 1) or k > n_vocab:
        raise LocalspecError(
            f"{drafter.path}: the settings of its candidate selector are missing or do not fit "
            "together; convert the drafter again"
        )
    return int(k)


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
