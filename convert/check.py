"""What must hold before a byte is written: the checkpoint in itself, and against the target."""

from __future__ import annotations

import os
from collections.abc import Collection, Container, Iterable
from pathlib import Path

import numpy as np

from localspec import pairs
from localspec.convert import layout
from localspec.convert.source import Checkpoint, StoredTensor, Tensors, supported
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

# Trained-in copies of the target's embeddings differ by rounding only (8-bit quantisation leaves a
# cosine above 0.999, 2-bit above 0.9); those of an unrelated model are near 0.
SAME_EMBEDDINGS = 0.8


def check_fit(checkpoint: Checkpoint, target: GgufFile) -> None:
    """Whether the checkpoint can draft for this target.

    Raises:
        LocalspecError: the target is no target or gives no layer features, or the two differ in
            width, vocabulary or layers.
    """
    config, here = checkpoint.config, checkpoint.path
    n_vocab = usable_vocabulary(target)
    width = int(target.arch_get("embedding_length"))
    depth = n_layers(target)
    refuse_different(here, target, "width (hidden_size)", config.hidden_size, width)
    refuse_different(here, target, "vocabulary (vocab_size)", config.vocab_size, n_vocab)
    if config.num_target_layers is not None:
        refuse_different(
            here, target, "layer count (num_target_layers)", config.num_target_layers, depth
        )
    beyond = [i for i in config.target_layer_ids if not -1 <= i <= depth - 2]
    if beyond:
        raise LocalspecError(
            f"{here}: target_layer_ids has {beyond[0]}, but {target.path} has {depth} layers "
            f"(usable: -1 to {depth - 2}); it was trained for another target"
        )


def usable_vocabulary(target: GgufFile) -> int:
    """The vocabulary size of a target that can have a drafter.

    Raises:
        LocalspecError: it is no target, gives no layer features, or has no complete tokenizer.
    """
    pairs.check_target(target)
    if not pairs.features_available(target):
        raise LocalspecError(
            f"{target.path} is a {target.architecture} model; llama.cpp gives no layer features "
            "for that architecture, so no drafter can be used with it"
        )
    tokens = target.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        raise LocalspecError(
            f"{target.path} holds no tokenizer, which the drafter needs a copy of; use a complete "
            "GGUF of the target"
        )
    n_vocab = pairs.vocab_size(target)
    if n_vocab != len(tokens):
        raise LocalspecError(
            f"{target.path} has {n_vocab} rows of embeddings for {len(tokens)} tokens, which "
            "llama.cpp refuses to load; convert the target again"
        )
    return n_vocab


def n_layers(target: GgufFile) -> int:
    """Layers of the target proper; block_count also counts multi-token prediction layers."""
    extra = target.arch_get("nextn_predict_layers", 0)
    return int(target.arch_get("block_count")) - (int(extra) if isinstance(extra, int) else 0)


def check_tensors(checkpoint: Checkpoint) -> None:
    """Whether the checkpoint has exactly the tensors, shapes and types its config asks for.

    Raises:
        LocalspecError: naming the first tensor that does not fit.
    """
    config, here, found = checkpoint.config, checkpoint.path, checkpoint.tensors
    if config.attention_bias:
        raise LocalspecError(
            f"{here}: attention_bias is true, but llama.cpp's drafter has no attention biases; "
            "this drafter cannot be converted"
        )
    _check_backbone(checkpoint)
    needed = [*layout.backbone_rules(config), *layout.head_rules(config)]
    if checkpoint.draft_tokens is not None:
        needed.append(layout.OUTPUT)
    rules = {rule.published: rule for rule in (*needed, layout.EMBEDDING, layout.OUTPUT)}
    refuse_missing(here, (rule.published for rule in needed), found)
    refuse_unknown(
        here, found, rules, "config.json and the weights do not belong together, or this is "
        "another kind of model",
    )  # fmt: skip
    for name, tensor in found.items():
        refuse_misfit(here, name, tensor, layout.shape(rules[name], config))


def refuse_missing(here: Path, needed: Iterable[str], found: Container[str]) -> None:
    """Refuse a checkpoint that lacks one of the tensors it needs."""
    missing = [name for name in needed if name not in found]
    if missing:
        raise LocalspecError(
            f"{here}: tensor {missing[0]} is missing{_and_more(missing)}; config.json and the "
            "weights do not belong together, or the download is incomplete"
        )


def refuse_unknown(here: Path, found: Iterable[str], known: Container[str], why: str) -> None:
    """Refuse a checkpoint with a tensor that has no place; `why` says what that means."""
    extra = sorted(name for name in found if name not in known)
    if extra:
        raise LocalspecError(f"{here}: tensor {extra[0]} is unknown{_and_more(extra)}; {why}")


def refuse_misfit(
    here: Path,
    name: str,
    tensor: StoredTensor,
    shape: tuple[int, ...],
    types: Collection[str] = (),
) -> None:
    """Refuse a tensor of another shape, or of a type that is neither a float nor one of `types`."""
    if tensor.shape != shape:
        raise LocalspecError(
            f"{here}: tensor {name} has shape {list(tensor.shape)}, config.json asks for "
            f"{list(shape)}; they do not belong together"
        )
    if not supported(tensor.dtype) and tensor.dtype not in types:
        raise LocalspecError(
            f"{here}: tensor {name} is stored as {tensor.dtype}; use a checkpoint in "
            f"{'FP8, ' if types else ''}F32, F16 or BF16"
        )


def _check_backbone(checkpoint: Checkpoint) -> None:
    """Refuse, by name, what llama.cpp's drafter graph cannot compute exactly."""
    config, here = checkpoint.config, checkpoint.path
    problem = ""
    if config.backbone == "gemma4" and not config.attention_k_eq_v:
        problem = (
            "attention_k_eq_v is false, but llama.cpp's drafter normalises values only where they "
            "share their matrix with the keys"
        )
    elif config.final_logit_softcapping and checkpoint.draft_tokens is not None:
        problem = "a reduced vocabulary together with final_logit_softcapping is not supported"
    elif (here / "mask_embedding.pt").exists():
        problem = (
            "mask_embedding.pt holds an embedding of its own for the mask token, but llama.cpp's "
            "drafter takes all embeddings from one table"
        )
    k = config.selector_top_k
    if config.selector_rank and config.hidden_size < k * (k + 1):
        problem = (
            f"selector_top_k is {k}, but the candidates' scores must fit into one hidden state of "
            f"{config.hidden_size}"
        )
    if problem:
        raise LocalspecError(f"{here}: {problem}; this drafter cannot be converted")


def check_out(out: Path, checkpoint: Tensors, target: Path) -> None:
    """Whether `out` and its companion can be written without touching what is read.

    Raises:
        LocalspecError: no such directory, not writable, or one of the inputs would be replaced.
    """
    if out.is_dir():
        raise LocalspecError(f"{out} is a directory; name the GGUF file to write")
    if out.exists() and not out.is_file():  # e.g. /dev/null, which root would replace
        raise LocalspecError(f"{out} is not a regular file; choose another output")
    if not out.parent.is_dir():
        raise LocalspecError(f"{out.parent} is not a directory; create it or choose another output")
    if not os.access(out.parent, os.W_OK):
        raise LocalspecError(f"{out.parent} is not writable; choose another output")
    inputs = {os.path.realpath(path) for path in (target, *checkpoint.files)}
    for path in (out, pairs.heads_path(out)):
        if os.path.realpath(path) in inputs:
            raise LocalspecError(f"{path} is an input of the conversion; choose another output")


def embeddings_differ(checkpoint: Checkpoint, target: GgufFile) -> bool:
    """Whether the checkpoint's token embeddings are clearly not the target's.

    Compared on one chunk of rows only; False when either has none or the type cannot be read.
    """
    name, theirs = layout.EMBEDDING.published, layout.EMBEDDING.name
    if name not in checkpoint.tensors or theirs not in target.tensors:
        return False
    a = next(checkpoint.chunks(name)).astype(np.float64)
    try:
        b = target.tensor(theirs, 0, len(a)).astype(np.float64)
    except LocalspecError:
        return False
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return bool(norms > 0 and np.sum(a * b) / norms < SAME_EMBEDDINGS)


def refuse_different(here: Path, target: GgufFile, what: str, ours: int, theirs: int) -> None:
    """Refuse a checkpoint whose number `what` is not the target's."""
    if ours != theirs:
        raise LocalspecError(
            f"{here} does not fit {target.path}: its {what} is {ours}, the target's is {theirs}"
        )


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
