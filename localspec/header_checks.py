"""Settings in a GGUF's header on which llama.cpp would end the process, or hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localspec.architectures import DRAFTER_ARCH, MAX_LAYERS
from localspec.errors import LocalspecError
from localspec.ggufio import GgufArray, GgufFile

_INTEGERS = frozenset(("I8", "I16", "I32", "I64"))


def check_numbers(model: GgufFile) -> None:
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


def check_tokens(model: GgufFile) -> None:
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray):
        texts = [text for text in tokens.strings() if text]
        if len(set(texts)) < len(texts):
            raise LocalspecError(
                f"{model.path} lists a token twice; it is damaged, download or convert it again"
            )


def positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


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
        "attention.output_group_count": positive(groups)
        and positive(heads)
        and heads % groups == 0,
        "attention.sliding_window": positive(get("attention.sliding_window")),
        "attention.value_length": positive(head) and get("attention.value_length") == head,
        "rope.dimension_count": positive(rope) and rope <= head and rope % 2 == 0,
        "expert_count": positive(experts) and experts <= 1024,
        "expert_used_count": positive(get("expert_used_count"))
        and get("expert_used_count") <= experts,
    }
    if model.architecture != DRAFTER_ARCH:
        # llama.cpp rotates the indexer's keys in blocks of 64.
        key = get("attention.indexer.key_length")
        fine["attention.indexer.key_length"] = positive(key) and key % 64 == 0
    for key, good in fine.items():
        if not good:
            raise LocalspecError(
                f"{model.path} says {key} = {get(key)}, which no DeepSeek-V4 has; it is damaged, "
                "download or convert it again"
            )
