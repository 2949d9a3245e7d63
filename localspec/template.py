"""Chat templates: jinja in a sandbox, from messages to the text a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from localspec.errors import LocalspecError

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template.

    Templates come out of downloaded files, so they run sandboxed and bounded (`sandbox.py`): no
    attribute of Python's own, nothing mutable, no endless loops, no texts without end.

    Args:
        source: jinja text, usually `tokenizer.chat_template` of a GGUF.
        bos: text of the begin-of-text token.
        eos: text of the end-of-text token.

    Raises:
        LocalspecError: the text is no valid template.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        from localspec.generation_tag import GenerationTag
        from localspec.sandbox import BoundedEnvironment

        environment = self._environment = BoundedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
        )
        environment.filters["tojson"] = _to_json
        environment.seal()
        environment.globals.update(
            raise_exception=_raise,
            strftime_now=lambda form: datetime.now().strftime(form),
            bos_token=bos,
            eos_token=eos,
        )
        try:
            self._template = environment.from_string(source)
        except Exception as e:  # jinja's errors, and Python's for what jinja makes of it
            raise LocalspecError(f"the model's chat template is not valid: {_line(e)}") from e

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of a conversation.

        Args:
            messages: mappings with "role" and "content".
            add_generation_prompt: end with the header of the assistant's turn.
            variables: more variables for the template, e.g. `enable_thinking=False`.

        Raises:
            LocalspecError: the template refuses the messages or fails.
        """
        from jinja2.exceptions import SecurityError

        from localspec.sandbox import Bounded

        def pieces() -> Iterator[str]:
            return self._template.generate(
                **variables,
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
            )

        try:
            return self._environment.metered(pieces)
        except _Refused as e:
            raise LocalspecError(
                f"the model's chat template refuses these messages: {_line(e)}"
            ) from e
        except (Bounded, SecurityError) as e:
            raise LocalspecError(
                f"the model's chat template was stopped: {_line(e)}; use a model file from a "
                "source you trust"
            ) from e
        except Exception as e:  # a template is a program: it can fail in every way
            raise LocalspecError(f"the model's chat template failed: {_line(e)}") from e


def _line(e: Exception) -> str:
    return " ".join(str(e).split()).rstrip(".") or type(e).__name__


class _Refused(Exception):
    """A template called raise_exception."""


def _raise(message: str) -> NoReturn:
    raise _Refused(message)


def _to_json(value: Any, indent: int | None = None, **_ignored: Any) -> str:
    # jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
