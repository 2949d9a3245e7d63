"""A jinja environment for templates nobody has vetted: sandboxed, and bounded in time and memory.

Chat templates come out of downloaded files. jinja's own sandbox keeps them from Python's
attributes, but not from running for ever (nested loops, recursion) or from filling the memory
(`'a' * 10**9`, texts or lists that double in a loop). Here everything a template does is charged
to a meter: every pass of a loop, call, filter and output, and the size of what they make.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_STEPS = 1_000_000  # loop passes, calls, filters, outputs
MAX_SECONDS = 10.0
MAX_SIZE = 20_000_000  # of one value: characters, and _ELEMENT for everything else in it
MAX_TOTAL = 400_000_000  # characters of all texts made
_ELEMENT = 64
_MAX_BITS = 100_000  # of an integer
_MAX_WIDTH = 100_000  # a text is not padded further
# Names of filters and methods that take widths or counts.
_WIDTHS = frozenset(
    "batch center expandtabs filesizeformat indent ljust rjust round slice to_bytes tojson "
    "truncate wordwrap zfill".split()
)


class Bounded(Exception):
    """A template asked for too much."""


class _Meter:
    def __init__(self) -> None:
        self.steps = self.total = 0
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self, size: int = 0) -> None:
        self.steps += 1
        self.total += size
        if self.steps > MAX_STEPS or time.monotonic() > self.deadline:
            raise Bounded("it runs for too long (an endless loop?)")
        if size > MAX_SIZE or self.total > MAX_TOTAL:
            raise Bounded("it makes too much text")


def _size(value: Any) -> int:
    """The size of a value as if it were written out, for `MAX_SIZE`; gives up above that.

    What is contained twice counts twice: nested doubling is what this must notice.
    """
    if isinstance(value, str | bytes):
        return len(value)
    total, waiting = 0, [value]
    while waiting and total <= MAX_SIZE:
        item = waiting.pop()
        total += _ELEMENT
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, Mapping):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            waiting.extend(item)
        elif isinstance(item, int) and item.bit_length() > _MAX_BITS:
            raise Bounded("it makes too large a number")
        if len(waiting) * _ELEMENT > MAX_SIZE:
            return MAX_SIZE + 1
    return total


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Call `metered` around rendering: without a meter nothing but single sizes is bounded."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=self._output, **options)
        self._threads = threading.local()
        self.globals.pop("lipsum", None)
        self.filters["_counted"] = self._counted
        self.filters["_sized"] = self._sized
        self.filters["_joined"] = self._joined

    def seal(self) -> None:
        """Put every filter and test behind the meter; to be called once all are there."""
        for table in (self.filters, self.tests):
            for name, function in list(table.items()):
                if not name.startswith("_"):
                    table[name] = self._guarded(name, function)

    def metered(self, render: Callable[[], Iterable[str]]) -> str:
        """The text that `render` gives in pieces, made within the bounds.

        Raises:
            Bounded: it asked for too much.
        """
        self._threads.meter = _Meter()
        try:
            return "".join(render())
        finally:
            self._threads.meter = None

    def _step(self, size: int = 0) -> None:
        meter = getattr(self._threads, "meter", None)
        if meter is not None:
            meter.step(size)

    # ---- what the syntax tree is changed to call

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        self._rewrite(source)
        return super()._generate(source, *args, **options)

    def _rewrite(self, node: nodes.Node) -> None:
        for name, value in list(node.iter_fields()):
            if isinstance(value, list):
                value[:] = [self._rewritten(v) if isinstance(v, nodes.Node) else v for v in value]
            elif isinstance(value, nodes.Node):
                setattr(node, name, self._rewritten(value))

    def _rewritten(self, node: nodes.Node) -> nodes.Node:
        self._rewrite(node)
        if isinstance(node, nodes.For):
            node.iter = self._through("_counted", node.iter)
        elif isinstance(node, nodes.TemplateData):
            # A constant of the text would be written out without passing `_output`.
            return nodes.Const(node.data, lineno=node.lineno, environment=self)
        elif isinstance(node, nodes.Concat):
            items = nodes.List(node.nodes, lineno=node.lineno, environment=self)
            return self._through("_joined", items)
        elif isinstance(node, nodes.List | nodes.Dict) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        ):
            return self._through("_sized", node)
        return node

    def _through(self, name: str, node: Any) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=self)

    def _counted(self, items: Any) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _sized(self, value: Any) -> Any:
        """Charge a new value. Only texts add up: what a list holds was charged already."""
        size = _size(value)
        if size > MAX_SIZE:
            raise Bounded("it makes too much text")
        self._step(size if isinstance(value, str | bytes) else 0)
        return value

    def _joined(self, items: list[Any]) -> str:
        texts = [self._text(item) for item in items]
        self._step(sum(len(text) for text in texts))
        return "".join(texts)

    def _text(self, value: Any) -> str:
        return value if isinstance(value, str) else str(self._sized(value))

    @pass_context
    def _output(self, _context: Context, value: Any) -> Any:
        text = self._text(value)
        self._step(len(text))
        return text

    # ---- what jinja's sandbox calls

    def call(__self, __context: Context, __obj: Any, *args: Any, **options: Any) -> Any:
        """Every call in a template."""
        # jinja wraps `str.format` to check what it reaches for.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        before = (owner, *args) if isinstance(owner, str | bytes | int) else args
        __self._check(getattr(__obj, "__name__", ""), before, options)
        return __self._sized(super().call(__context, __obj, *args, **options))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Every arithmetic operation that can make something large."""
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    if isinstance(many, int):
                        self._check_bits(many.bit_length() + times.bit_length())
                    elif isinstance(many, str | bytes | list | tuple):
                        self._room(_size(many) * max(0, times))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            self._check_bits(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str | bytes):
            self._check("format", (left, right), {})
        elif operator == "+" and not (isinstance(left, int) and isinstance(right, int)):
            self._room(_size(left) + _size(right))
            if isinstance(left, str):
                self._step(len(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def _room(self, size: int) -> None:
        if size > MAX_SIZE:
            raise Bounded("it makes too much text")

    def _check_bits(self, bits: int) -> None:
        if bits > _MAX_BITS:
            raise Bounded("it makes too large a number")

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **options: Any) -> Any:
            skip = hasattr(function, "jinja_pass_arg")
            self._check(name, args[1:] if skip else args, options)
            return self._sized(function(*args, **options))

        return guarded

    def _check(self, name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """Refuse calls whose result would be too large, before they make it."""
        self._step()
        values = [*args, *options.values()]
        if name in _WIDTHS and any(isinstance(v, int) and abs(v) > _MAX_WIDTH for v in values[1:]):
            raise Bounded("it makes too much text")
        if name in ("format", "format_map") and args and isinstance(args[0], str | bytes):
            form = args[0] if isinstance(args[0], str) else args[0].decode("latin-1")
            flat = [w for v in values[1:] for w in (v if isinstance(v, list | tuple) else [v])]
            large = any(isinstance(v, int) and abs(v) > _MAX_WIDTH for v in flat)
            if re.search(r"\d{6}", form) or (large and re.search(r"\*|:[^{}]*\{", form)):
                raise Bounded("it makes too much text")
            # Every field could hold all of the arguments.
            fields = form.count("%") + form.count("{")
            self._room(len(form) + fields * sum(_size(v) for v in flat))
        elif name == "replace" and len(values) >= 3:
            old, new = (v if isinstance(v, str) else "" for v in values[1:3])
            size = len(values[0]) if isinstance(values[0], str) else 0
            self._room(size // max(1, len(old)) * len(new) + size)
        elif name == "join" and len(values) >= 2:
            texts, glue = values[:2] if not isinstance(values[0], str) else values[1::-1]
            if isinstance(texts, list | tuple) and isinstance(glue, str):
                self._room(_size(texts) + len(texts) * len(glue))
        elif name == "indent" and isinstance(values[0], str):
            width = next((v for v in values[1:] if isinstance(v, int | str)), 4)
            by = len(width) if isinstance(width, str) else width
            self._room(len(values[0]) + (values[0].count("\n") + 1) * max(0, by))
        elif name == "sum" and any(isinstance(v, str | list | tuple) for v in values[1:]):
            raise Bounded("it adds up lists")
