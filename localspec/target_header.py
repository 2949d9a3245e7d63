"""What a target's header says, and whether it is a target at all."""

from __future__ import annotations

from localspec.architectures import FEATURE_ARCHS, NOT_TARGETS
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.header_checks import check_numbers, check_tokens, positive


def check_target(target: GgufFile) -> None:
    """Refuse files that are no target.

    Raises:
        LocalspecError: the file is a drafter, its heads, or has no architecture.
    """
    if target.architecture in NOT_TARGETS:
        raise LocalspecError(
            f"{target.path} is {NOT_TARGETS[target.architecture]}, not a target; give the model "
            "itself with -m and the drafter with -d"
        )
    if not target.architecture or not target.tensors:
        raise LocalspecError(f"{target.path} holds no model (no architecture or no tensors)")
    missing = [
        key for key in ("block_count", "embedding_length") if not positive(target.arch_get(key))
    ]
    if missing:
        raise LocalspecError(
            f"{target.path} does not say its {' and '.join(missing)}; it is damaged or not a model"
        )
    check_numbers(target)
    check_tokens(target)


def features_available(target: GgufFile) -> bool:
    """Whether llama.cpp can hand out this target's layer inputs, as a drafter needs."""
    return target.architecture in FEATURE_ARCHS


def vocab_size(gguf_file: GgufFile) -> int:
    """Vocabulary size of a target: rows of its token embeddings, else tokens listed."""
    embedding = gguf_file.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    tokens = gguf_file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if tokens is not None else int(gguf_file.arch_get("vocab_size", 0))
