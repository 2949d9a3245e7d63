"""How many readings of one text a grammar has, as far as a search for bad texts finds out.

llama.cpp follows every way to read what was said so far, each with what it expects next. In some
grammars their number doubles with every character; a few dozen of them would take all memory.
"""

from __future__ import annotations

from functools import lru_cache

from localspec.errors import LocalspecError
from localspec.gbnf import Chars, Item, Rules, parsed

MOST = 2000
STEPS, BEAM = 200, 8
# Work that the search may do: states looked at.
BUDGET = 200_000
CANDIDATES = 16

_END = 0


@lru_cache(maxsize=8)
def check(text: str) -> None:
    """Look for a text with too many readings: a beam of texts, longest lists of readings first.

    Args:
        text: a grammar that `gbnf.check` accepts.

    Raises:
        LocalspecError: there is one.
    """
    states = _States(parsed(text))
    beam = [frozenset(states.begin())]
    seen = set(beam)
    for _ in range(STEPS):
        found = {
            frozenset(states.step(now, c)) for now in beam for c in states.candidates(now)
        } - seen
        found.discard(frozenset())
        if not found or states.left < 0:
            return
        seen |= found
        # Of equal ones the deeper: they have more to multiply.
        ranked = sorted(found, key=lambda s: (len(s), max(states.depth[i] for i in s)))
        beam = ranked[-BEAM:]


class _States:
    """What a grammar can expect next: stacks of places, each known by a number."""

    def __init__(self, rules: Rules) -> None:
        self.left = BUDGET
        self.alternatives: list[tuple[Item, ...]] = []
        self.of_rule: dict[str, list[int]] = {}
        for name, alternatives in rules.rules.items():
            first = len(self.alternatives)
            self.alternatives += [tuple(items) for items in alternatives]
            self.of_rule[name] = list(range(first, len(self.alternatives)))
        # Stack number -> (alternative, place in it, number of the stack below).
        self.places: list[tuple[int, int, int]] = [(-1, -1, -1)]
        self.depth = [0]
        self.numbers: dict[tuple[int, int, int], int] = {}
        self.known: dict[int, frozenset[int]] = {}

    def begin(self) -> set[int]:
        return {s for a in self.of_rule["root"] for s in self.expanded(self.put(a, 0, _END))}

    def put(self, alternative: int, place: int, below: int) -> int:
        """The stack with one more place; a finished alternative leaves the one below."""
        if place >= len(self.alternatives[alternative]):
            return below
        key = (alternative, place, below)
        if key not in self.numbers:
            self.numbers[key] = len(self.places)
            self.places.append(key)
            self.depth.append(self.depth[below] + 1)
        return self.numbers[key]

    def expanded(self, stack: int) -> frozenset[int]:
        """Stacks with a terminal on top (or empty) that a stack stands for."""
        if stack not in self.known:
            found, waiting, seen = set(), [stack], {stack}
            while waiting:
                self.left -= 1
                at = waiting.pop()
                item = None if at == _END else self.top(at)
                if not isinstance(item, str):
                    found.add(at)
                    if len(found) > MOST:
                        raise _too_many()
                    continue
                alternative, place, below = self.places[at]
                rest = self.put(alternative, place + 1, below)
                for other in self.of_rule[item]:
                    new = self.put(other, 0, rest)
                    if new not in seen:
                        seen.add(new)
                        waiting.append(new)
            self.known[stack] = frozenset(found)
        return self.known[stack]

    def top(self, stack: int) -> Item:
        alternative, place, _ = self.places[stack]
        return self.alternatives[alternative][place]

    def step(self, stacks: frozenset[int], c: int) -> set[int]:
        """The stacks after one more character."""
        after: set[int] = set()
        for stack in stacks:
            self.left -= 1
            item = None if stack == _END else self.top(stack)
            if isinstance(item, Chars) and item.match(c):
                alternative, place, below = self.places[stack]
                after |= self.expanded(self.put(alternative, place + 1, below))
                if len(after) > MOST:
                    raise _too_many()
        return after

    def candidates(self, stacks: frozenset[int]) -> list[int]:
        """Characters worth trying, those that most stacks wait for first."""
        wanted: dict[int, int] = {}
        for item in {self.top(s) for s in stacks if s != _END}:
            assert isinstance(item, Chars)
            for c in [a for a, _ in item.ranges] if not item.negated else [0x61, 0x20, 0x22]:
                wanted[c] = wanted.get(c, 0) + 1
        return sorted(wanted, key=lambda c: -wanted[c])[:CANDIDATES]


def _too_many() -> LocalspecError:
    return LocalspecError(
        f"the grammar has more than {MOST} readings of one text, which would take llama.cpp all "
        "memory; let alternatives that nest differ in how they begin"
    )
