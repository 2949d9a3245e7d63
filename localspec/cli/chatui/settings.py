"""`/set NAME VALUE`: names as on the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from localspec.cli.chatui.session import Session
from localspec.drafting import DraftOptions
from localspec.errors import LocalspecError

_SAMPLING: dict[str, tuple[str, Callable[[str], Any]]] = {
    "temp": ("temperature", float),
    "top-k": ("top_k", int),
    "top-p": ("top_p", float),
    "min-p": ("min_p", float),
    "repetition-penalty": ("repetition_penalty", float),
    "presence-penalty": ("presence_penalty", float),
    "frequency-penalty": ("frequency_penalty", float),
    "penalty-window": ("penalty_window", int),
    "seed": ("seed", int),
    "acceptance": ("acceptance", str),
}
_DRAFTING: dict[str, tuple[str, Callable[[str], Any]]] = {
    "policy": ("policy", str),
    "draft-tokens": ("tokens", int),
    "tree-width": ("width", int),
}
NAMES = (*_SAMPLING, *_DRAFTING, "max-tokens", "speculation")
_NONE = ("none", "off", "random")


def listed(session: Session) -> str:
    """Every setting and its value, a line each."""
    values = {name: getattr(session.params, field) for name, (field, _) in _SAMPLING.items()}
    values |= {name: getattr(session.draft, field) for name, (field, _) in _DRAFTING.items()}
    values |= {"max-tokens": session.max_tokens, "speculation": _on(session.draft.tokens > 0)}
    width = max(map(len, values))
    return "\n".join(f"{n:{width}}  {'none' if v is None else v}" for n, v in values.items())


def change(session: Session, name: str, value: str) -> str:
    """Change a setting; what it is now.

    Raises:
        LocalspecError: no such setting, or a value it cannot take.
    """
    changed: dict[str, Any]
    name = {"temperature": "temp"}.get(name, name).replace("_", "-")
    if name in _SAMPLING:
        field, kind = _SAMPLING[name]
        new = None if name == "seed" and value in _NONE else _read(name, value, kind)
        changed = {field: new}
        session.chat.params = replace(session.params, **changed)
    elif name in _DRAFTING:
        field, kind = _DRAFTING[name]
        new = _read(name, value, kind)
        if new == "auto" and field == "policy":
            session.chat.draft = DraftOptions.auto()
        else:
            # Saying how much to draft means that the policy no longer decides it.
            start = session.draft if session.draft.policy == "fixed" else DraftOptions()
            changed = {field: new}
            session.chat.draft = replace(start, **changed)
    elif name == "max-tokens":
        new = None if value in _NONE else _read(name, value, int)
        if new is not None and new < 1:
            raise LocalspecError(f"max-tokens must be at least 1, not {new}")
        session.max_tokens = new
    elif name == "speculation":
        if value not in ("on", "off"):
            raise LocalspecError(f"speculation is on or off, not {value!r}")
        session.chat.draft = DraftOptions.auto() if value == "on" else DraftOptions(tokens=0)
    else:
        raise LocalspecError(f"{name} is no setting; there are {', '.join(NAMES)}")
    return f"{name} is {value} now"


def _read(name: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise LocalspecError(f"{name} takes {what}, not {value!r}") from None


def _on(yes: bool) -> str:
    return "on" if yes else "off"
