"""Conversations as JSON files: written whole or not at all, checked before they are believed."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError
from localspec.sampling import SamplingParams

_FORMAT = "localspec-chat"
_VERSION = 1
_ROLES = ("system", "user", "assistant", "tool")
_TYPES: dict[str, tuple[type, ...]] = {
    "float": (int, float), "int": (int,), "str": (str,), "int | None": (int, type(None)),
    "Mapping[int, float]": (dict,),
}  # fmt: skip


@dataclass(frozen=True)
class Transcript:
    """What a file held: the messages, the sampling (None when it was left to the default) and
    the name of the model that answered."""

    messages: list[dict[str, str]]
    params: SamplingParams | None
    model: str


def save(
    path: str | os.PathLike[str],
    messages: Sequence[Mapping[str, str]],
    params: SamplingParams | None = None,
    *,
    model: str = "",
) -> None:
    """Write a conversation.

    Raises:
        LocalspecError: the file cannot be written; what was there before stays.
    """
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "model": model,
        "params": None if params is None else asdict(params),
        "messages": [dict(m) for m in messages],
    }
    target = Path(path)
    temporary = ""
    try:
        # Lone surrogates (from broken terminals) have no UTF-8 form; as \\u escapes they do.
        text = json.dumps(data, ensure_ascii=True, indent=1, allow_nan=False) + "\n"
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        with open(handle, "w", encoding="ascii") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, target)
    except (OSError, ValueError, TypeError) as e:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise LocalspecError(f"the conversation cannot be saved to {path}: {_why(e)}") from e


def load(path: str | os.PathLike[str]) -> Transcript:
    """Read a conversation.

    Raises:
        LocalspecError: the file cannot be read, or is no conversation.
    """
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except OSError as e:
        raise LocalspecError(f"{path} cannot be read: {_why(e)}") from e
    except (ValueError, RecursionError) as e:
        raise LocalspecError(f"{path} is no saved conversation: it is not JSON") from e
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise LocalspecError(f"{path} is no saved conversation (its format is not {_FORMAT!r})")
    if data.get("version") != _VERSION:
        raise LocalspecError(
            f"{path} is a conversation of version {data.get('version')}, this localspec reads "
            f"version {_VERSION}; update localspec"
        )
    messages = data.get("messages")
    if not isinstance(messages, list):
        raise LocalspecError(f"{path} has no list of messages; it is damaged")
    for i, message in enumerate(messages):
        if not (
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and message["role"] in _ROLES
            and isinstance(message["content"], str)
        ):
            raise LocalspecError(
                f"{path}: message {i} is not a role ({', '.join(_ROLES)}) and a text; it is damaged"
            )
    model = data.get("model")
    return Transcript(messages, _params(path, data), model if isinstance(model, str) else "")


def _params(path: str | os.PathLike[str], data: Mapping[str, Any]) -> SamplingParams | None:
    saved = data.get("params")
    if saved is None:
        return None
    known = {f.name: str(f.type) for f in fields(SamplingParams)}
    if not isinstance(saved, dict) or not set(saved) <= set(known):
        raise LocalspecError(f"{path}: its sampling settings are unknown; update localspec")
    for name, value in saved.items():
        if isinstance(value, bool) or not isinstance(value, _TYPES[known[name]]):
            raise LocalspecError(f"{path}: {name} = {value!r} is no valid setting; it is damaged")
    try:
        if "logit_bias" in saved:  # JSON's names are texts
            bias = {int(k) if k.isdecimal() else k: v for k, v in saved["logit_bias"].items()}
            saved = saved | {"logit_bias": bias}
        return SamplingParams(**saved)
    except LocalspecError as e:
        raise LocalspecError(f"{path}: {e}") from e


def _why(e: Exception) -> str:
    return e.strerror or str(e) if isinstance(e, OSError) else str(e)
