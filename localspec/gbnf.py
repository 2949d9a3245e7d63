"""Checks a grammar before llama.cpp sees it.

llama.cpp's parser prints to stderr, loops on a repetition like {5,2}, takes exponential time to
look for left recursion, misses left recursion behind rules that are empty only indirectly (and
then never returns), and silently lifts limits above 2000. What passes here does none of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, NoReturn

from localspec.errors import LocalspecError

MAX_TEXT = 1 << 20
MAX_REPEATS = 2000  # MAX_REPETITION_THRESHOLD
MAX_ELEMENTS = 100_000
MAX_RULES = 20_000
MAX_NESTING = 100
# What llama.cpp expands before the next character: its recursion has no memory.
MAX_EXPANSIONS = 50_000
MAX_DEPTH = 3000

_WORD = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", **{c: c for c in '\\"[]-'}}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


class Chars(NamedTuple):
    """A terminal: characters in (or, negated, outside of) ranges of code points."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    def match(self, c: int) -> bool:
        """Whether a code point fits."""
        return any(a <= c <= b for a, b in self.ranges) != self.negated


# A string names a rule.
Item = Chars | str
Alternatives = list[list[Item]]


@dataclass
class Rules:
    """A grammar's structure.

    Attributes:
        rules: name -> alternatives; those made for groups and repetitions have a space in theirs.
        lines: name -> line of its definition.
        used: name -> line of its first use.
    """

    rules: dict[str, Alternatives] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)


def check(text: str) -> None:
    """Check that llama.cpp can take a grammar.

    Raises:
        LocalspecError: it cannot; the message says where and why.
    """
    parsed(text)


@lru_cache(maxsize=8)  # a large one takes 20 MB
def parsed(text: str) -> Rules:
    """The structure of a grammar, checked.

    Raises:
        LocalspecError: as `check`.
    """
    if not isinstance(text, str):
        raise LocalspecError(f"a grammar is a text in GBNF, not {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise LocalspecError(f"a grammar of {len(text)} characters is too long; most {MAX_TEXT}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise LocalspecError("the grammar holds half of a surrogate pair; remove it") from None
    found = _Parser(text).parse()
    for name, line in found.used.items():
        if name not in found.rules:
            raise LocalspecError(f"grammar line {line}: the rule {name!r} is not defined")
    if "root" not in found.rules:
        raise LocalspecError("the grammar has no rule `root`; define one for the whole answer")
    _check_recursion(found)
    finished = _derives(found.rules, terminals=True)
    endless = [name for name in found.rules if name not in finished]
    if endless:
        raise LocalspecError(
            f"grammar line {_line(found, endless[0])}: the rule {_shown(endless[0])!r} can never "
            "be completed; give it an end"
        )
    return found


class _Parser:
    """Reads GBNF as llama.cpp does, and counts as it does."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.nesting = text, 0, 0
        self.counted, self.lines = 0, 1  # characters whose line ends were counted, and the line
        self.found = Rules()
        self.symbols: set[str] = set()
        self.elements = 0

    def parse(self) -> Rules:
        self.space(True)
        while self.at < len(self.text):
            name = self.name()
            self.space(False)
            if name in self.found.rules:
                self.fail(f"the rule {name!r} is defined a second time")
            self.symbols.add(name)
            self.found.lines[name] = self.line()
            if not self.text.startswith("::=", self.at):
                self.fail(f"expected ::= after {name!r}")
            self.at += 3
            self.space(True)
            self.found.rules[name] = []  # known from here on: a second definition is an error
            self.found.rules[name] = self.alternatives(name, nested=False)
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                self.fail(f"unexpected {self.text[self.at]!r}")
            self.space(True)
        return self.found

    def alternatives(self, name: str, *, nested: bool) -> Alternatives:
        out = [self.sequence(name, nested=nested)]
        while self.peek() == "|":
            self.at += 1
            self.space(True)
            out.append(self.sequence(name, nested=nested))
        return out

    def sequence(self, name: str, *, nested: bool) -> list[Item]:
        items: list[Item] = []
        last, repeats = 0, 1  # where the last symbol begins, and the rules that it stands for
        while self.at < len(self.text):
            c = self.text[self.at]
            if c == '"':
                last, repeats = len(items), 1
                self.add(items, *(Chars(((c, c),)) for c in self.literal()))
            elif c == "[":
                last, repeats = len(items), 1
                self.add(items, self.char_class())
            elif c == ".":
                self.at += 1
                last, repeats = len(items), 1
                self.add(items, Chars((), negated=True))
            elif c in "<!":
                # llama.cpp allows tokens that reach from a text into <token>, and then ends the
                # process when they are chosen.
                self.fail("tokens by name or number (<...>) do not work; write the text instead")
            elif c in _WORD:
                used = self.name()
                if used not in self.found.used:
                    self.found.used[used] = self.line()
                self.symbols.add(used)
                last, repeats = len(items), 1
                self.add(items, used)
            elif c == "(":
                last = len(items)
                repeats = self.group(name, items)
            elif c in "*+?{":
                low, high = self.bounds(c)
                repeats = self.repeat(name, items, last, low, high, repeats)
            else:
                break
            self.space(nested)
        return items

    def add(self, items: list[Item], *new: Item) -> None:
        items.extend(new)
        self.count(sum(map(_weight, new)))

    def count(self, elements: int) -> None:
        self.elements += elements
        if self.elements > MAX_ELEMENTS or len(self.found.rules) > MAX_RULES:
            self.fail("the grammar is too large from here on; use fewer or smaller repetitions")

    def group(self, name: str, items: list[Item]) -> int:
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            self.fail(f"more than {MAX_NESTING} parentheses are open")
        self.at += 1
        self.space(True)
        before = len(self.symbols)
        inner = self.generated(name)
        self.found.rules[inner] = self.alternatives(name, nested=True)
        if self.peek() != ")":
            self.fail("a parenthesis is not closed")
        self.at += 1
        self.nesting -= 1
        self.add(items, inner)
        return max(1, len(self.symbols) - before)

    def generated(self, name: str) -> str:
        """A name for a rule of our own."""
        made = f"{name} {len(self.symbols)}"
        self.symbols.add(made)
        return made

    def bounds(self, c: str) -> tuple[int, int | None]:
        self.at += 1
        if c != "{":
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[c]
        self.space(False)
        low = self.number()
        high: int | None = low
        self.space(False)
        if self.peek() == ",":
            self.at += 1
            self.space(False)
            high = self.number() if self.peek() in _DIGITS else None
            self.space(False)
        if self.peek() != "}":
            self.fail("expected }")
        self.at += 1
        if high is not None and high < low:
            self.fail(f"the repetition {{{low},{high}}} ends before it begins")
        if max(low, high or 0) > MAX_REPEATS:
            self.fail(f"llama.cpp repeats at most {MAX_REPEATS} times; nest two repetitions")
        return low, high

    def number(self) -> int:
        start = self.at
        while self.peek() in _DIGITS:
            self.at += 1
        if not 0 < self.at - start < 10:
            self.fail("expected a number")
        return int(self.text[start : self.at])

    def repeat(
        self, name: str, items: list[Item], last: int, low: int, high: int | None, repeats: int
    ) -> int:
        """S{low,high} as llama.cpp rewrites it; the rules the result stands for."""
        symbol = items[last:]
        if not symbol:
            self.fail("there is nothing to repeat before this")
        total = high or low or 1
        if repeats * total > MAX_REPEATS:
            self.fail("llama.cpp does not repeat so much; name the repeated part as a rule")
        weight = sum(map(_weight, symbol)) + 2
        self.count(weight * total)
        del items[last:]
        items.extend(symbol * low)
        optional = 1 if high is None else high - low
        inner = ""
        for i in range(optional):
            made = self.generated(name)
            tail: list[Item] = [made] if high is None else [inner] if i else []
            self.found.rules[made] = [[*symbol, *tail], []]
            inner = made
        if optional:
            items.append(inner)
        return repeats * total

    def literal(self) -> list[int]:
        self.at += 1
        out = []
        while self.peek() != '"':
            out.append(self.char())
        self.at += 1
        return out

    def char_class(self) -> Chars:
        self.at += 1
        negated = self.peek() == "^"
        self.at += negated
        ranges = []
        while self.peek() != "]":
            a = b = self.char()
            if self.peek() == "-" and not self.text.startswith("-]", self.at):
                self.at += 1
                b = self.char()
            ranges.append((a, b))
        if not ranges:
            self.fail("a character class is empty")
        self.at += 1
        return Chars(tuple(ranges), negated)

    def char(self) -> int:
        c = self.peek()
        if c == "" or c == "\0":
            self.fail("a text or character class is not closed")
        self.at += 1
        if c != "\\":
            return ord(c)
        kind = self.peek()
        self.at += 1
        size = _HEX_ESCAPES.get(kind)
        if size is None:
            if kind not in _ESCAPES:
                self.fail(f"unknown escape {chr(92) + kind!r}")
            return ord(_ESCAPES[kind])
        digits = self.text[self.at : self.at + size]
        if len(digits) != size or not _HEX.issuperset(digits):
            self.fail(f"expected {size} hexadecimal digits after \\{kind}")
        self.at += size
        return int(digits, 16)

    def name(self) -> str:
        start = self.at
        while self.peek() in _WORD:
            self.at += 1
        if self.at == start:
            self.fail(f"expected the name of a rule, not {self.peek()!r}")
        return self.text[start : self.at]

    def space(self, newline: bool) -> None:
        while (c := self.peek()) and c in (" \t#\r\n" if newline else " \t#"):
            if c == "#":
                while self.peek() not in ("", "\r", "\n"):
                    self.at += 1
            else:
                self.at += 1

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def line(self) -> int:
        self.lines += self.text.count("\n", self.counted, self.at)
        self.counted = self.at
        return self.lines

    def fail(self, why: str) -> NoReturn:
        raise LocalspecError(f"grammar line {self.line()}: {why}")


def _check_recursion(found: Rules) -> None:
    """Refuse left recursion, and what would expand too far before the next character."""
    rules = found.rules
    empty = _derives(rules, terminals=False)
    first: dict[str, list[str]] = {}
    for name, alternatives in rules.items():
        leads: list[str] = []
        for items in alternatives:
            for item in items:
                if isinstance(item, Chars):
                    break
                leads.append(item)
                if item not in empty:
                    break
        first[name] = leads
    # Depth first, with a stack of our own: chains of rules may be long.
    size: dict[str, int] = {}
    depth: dict[str, int] = {}
    for start in rules:
        stack, open_rules = [(start, 0)], {start}
        while stack:
            name, at = stack.pop()
            if name in size:
                open_rules.discard(name)
                continue
            if at < len(first[name]):
                stack.append((name, at + 1))
                lead = first[name][at]
                if lead in open_rules:
                    raise LocalspecError(
                        f"grammar line {_line(found, lead)}: the rule {_shown(lead)!r} is left "
                        "recursive (it can begin with itself), which llama.cpp does not support; "
                        "write a repetition instead"
                    )
                if lead not in size:
                    open_rules.add(lead)
                    stack.append((lead, 0))
                continue
            size[name] = 1 + len(rules[name]) + sum(size[lead] for lead in first[name])
            depth[name] = 1 + max((depth[lead] for lead in first[name]), default=0)
            open_rules.discard(name)
            if size[name] > MAX_EXPANSIONS or depth[name] > MAX_DEPTH:
                raise LocalspecError(
                    f"grammar line {_line(found, name)}: the rule {_shown(name)!r} begins in too "
                    "many ways; simplify it"
                )


def _derives(rules: dict[str, Alternatives], *, terminals: bool) -> set[str]:
    """Rules that can be empty, also through others; with `terminals`, that can be finished."""
    # Alternatives wait for the rules in them; those with a terminal never become empty.
    waiting = [
        (name, [i for i in items if isinstance(i, str)])
        for name, alternatives in rules.items()
        for items in alternatives
        if terminals or not any(isinstance(i, Chars) for i in items)
    ]
    users: dict[str, list[int]] = {}
    left = [len(items) for _, items in waiting]
    for i, (_, items) in enumerate(waiting):
        for item in items:
            users.setdefault(item, []).append(i)
    empty: set[str] = set()
    ready = [name for (name, _), n in zip(waiting, left, strict=True) if n == 0]
    while ready:
        name = ready.pop()
        if name in empty:
            continue
        empty.add(name)
        for i in users.get(name, ()):
            left[i] -= 1
            if left[i] == 0:
                ready.append(waiting[i][0])
    return empty


def _weight(item: Item) -> int:
    """The elements that llama.cpp makes of it."""
    if isinstance(item, str):
        return 1
    return max(1, sum(1 + (a != b) for a, b in item.ranges))


def _shown(name: str) -> str:
    return name.split(" ")[0]


def _line(found: Rules, name: str) -> int:
    return found.lines.get(_shown(name), 1)
