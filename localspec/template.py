"""Chat templates: jinja in a sandbox, from messages to the text a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from localspec.errors import LocalspecError

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template.

    Templates come out of downloaded files, so they run sandboxed: no attribute of Python's own,
    nothing mutable.

    Args:
        source: jinja text, usually `tokenizer.chat_template` of a GGUF.
        bos: text of the begin-of-text token.
        eos: text of the end-of-text token.

    Raises:
        LocalspecError: the text is no valid template.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise,
            strftime_now=lambda form: datetime.now().strftime(form),
            bos_token=bos,
            eos_token=eos,
        )
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as e:
            raise LocalspecError(f"the model's chat template is not valid: {_line(e)}") from e

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation.

        Args:
            messages: mappings with "role" and "content".
            add_generation_prompt: end with the header of the assistant's turn.

        Raises:
            LocalspecError: the template refuses the messages or fails.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt
            )
        except _Refused as e:
            raise LocalspecError(
                f"the model's chat template refuses these messages: {_line(e)}"
            ) from e
        except Exception as e:  # a template is a program: it can fail in every way
            raise LocalspecError(f"the model's chat template failed: {_line(e)}") from e


def _line(e: Exception) -> str:
    return " ".join(str(e).split()) or type(e).__name__


class _Refused(Exception):
    """A template called raise_exception."""


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(value: Any, indent: int | None = None, **_ignored: Any) -> str:
    # jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
