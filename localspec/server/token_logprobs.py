"""Log probabilities as the two kinds of completion write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from localspec.llama import Model
from localspec.steps import TokenLogprobs


def for_chat(model: Model, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """OpenAI's `logprobs.content`. The end token is not part of the text and left out."""
    return [
        _entry(model, t.token_id, t.logprob)
        | {"top_logprobs": [_entry(model, token, logprob) for token, logprob in t.top]}
        for t in tokens
        if not model.is_end(t.token_id)
    ]


def _entry(model: Model, token: int, logprob: float) -> dict[str, Any]:
    data = model.piece(token, special=True)
    return {
        "token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)
    }  # fmt: skip


def for_completion(
    model: Model, tokens: Sequence[TokenLogprobs], offset: int
) -> tuple[dict[str, Any], int]:
    """OpenAI's `logprobs` of text completions.

    Args:
        model: the target.
        tokens: the tokens.
        offset: characters of the answer before them.

    Returns:
        The object, and the characters of the answer up to its end.
    """
    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [],
                           "text_offset": []}  # fmt: skip
    for t in tokens:
        if model.is_end(t.token_id):
            continue
        text = model.text([t.token_id], special=True)
        out["tokens"].append(text)
        out["token_logprobs"].append(_finite(t.logprob))
        # Different tokens can have the same text (halves of characters): the likeliest counts.
        top: dict[str, float] = {}
        for token, logprob in t.top:
            top.setdefault(model.text([token], special=True), _finite(logprob))
        out["top_logprobs"].append(top)
        out["text_offset"].append(offset)
        offset += len(text)
    return out, offset


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes -9999 for it."""
    return max(logprob, -9999.0)
