"""The tag `{% generation %}` of chat templates: what is between it and its end is the answer.

Training takes its loss from there (transformers' `return_assistant_tokens_mask`); rendering has no
use for it.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser


class GenerationTag(Extension):
    """Renders what is inside. As in transformers, what is set in there is not known outside."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja: a mutable set

    def parse(self, parser: Parser) -> nodes.Node:
        """A scope with the statements up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)
