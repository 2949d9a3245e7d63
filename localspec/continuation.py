"""The tokens of a text that goes on from one whose tokens are known.

Generated text, tokenized again, need not give the tokens that were generated. Keeping those and
tokenizing only what follows is faithful and leaves the KV cache valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.steps import Result


def continued(engine: Engine, known: str, known_ids: Sequence[int], text: str) -> list[int] | None:
    """Token ids of `text`, which begins with `known`.

    Args:
        engine: what tokenizes.
        known: the beginning.
        known_ids: its tokens; an end token that `known` does not spell out may be the last.
        text: the whole.

    Returns:
        None when the tokenizer cannot tokenize the rest by itself (for instance because it puts a
        space in front).
    """
    model = engine.model
    ids, rest = list(known_ids), text[len(known) :]
    if ids and model.is_end(ids[-1]):
        end = model.text(ids[-1:], special=True)
        if rest.startswith(end):
            rest = rest[len(end) :]
        else:
            ids.pop()
    if not rest:
        return ids
    new = model.tokenize(rest)
    return ids + new if model.text(new, special=True) == rest else None


def spelled(engine: Engine, result: Result) -> bool:
    """Whether an answer's tokens say no more than its text.

    Otherwise a stop string or half a character was cut off.
    """
    model = engine.model
    return model.text([t for t in result.token_ids if not model.is_end(t)]) == result.text
