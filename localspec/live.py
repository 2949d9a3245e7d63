"""The text in the KV caches: brought to a prompt, extended, cut, set aside for later."""

from __future__ import annotations

import time
from collections.abc import Sequence

from localspec.drafter import INJECT_ROWS, Drafter
from localspec.drafting import MAX_NODES
from localspec.eagle import EagleDrafter
from localspec.prefixes import Kept, PrefixCache, State, common_prefix, worth_keeping
from localspec.steps import Prefill
from localspec.target import Target
from localspec.turns import Turn


class LiveText:
    """What a target and its drafter have evaluated and not forgotten.

    Args:
        target, drafter: whose KV caches these are.

    Attributes:
        tokens: those whose positions are in the KV caches.
        prefixes: texts that were set aside.
        deterministic: whether the text is a deterministic generation's. Such a text is neither set
            aside nor begun from one that was.
    """

    def __init__(self, target: Target, drafter: Drafter | EagleDrafter | None) -> None:
        self._target, self._drafter = target, drafter
        self.tokens: list[int] = []
        self.prefixes = PrefixCache(target, drafter)
        self.deterministic = False
        self._n_prompt = 0  # how many of the tokens the last prompt had
        self._prompt_kept = False  # whether going back to it was made sure of

    def prefill(self, prompt: list[int], turn: Turn, *, deterministic: bool = False) -> Prefill:
        """Bring the KV caches to exactly `prompt`, reusing the longest prefix there is.

        A cancelled turn ends it between two batches.
        """
        started = time.perf_counter()
        # The last token is always evaluated: its logits are needed.
        wanted = prompt[:-1]
        recalls = self.prefixes.on and not deterministic
        restored = self._recall(wanted) if recalls else 0
        self.cut(common_prefix(self.tokens, wanted))
        reused = len(self.tokens)
        self._n_prompt, self._prompt_kept = len(prompt), False
        self.deterministic = deterministic
        parts = [prompt[reused:]]
        if self._target.exact and recalls and reused < len(wanted):
            # What comes after the prompt cannot be taken back: the same prompt starts from here.
            parts = [prompt[reused:-1], prompt[-1:]]
        for part in parts:
            for start, n in () if turn.is_cancelled() else self._target.prefill(part):
                self.extend(prompt[start : start + n], n)
                if turn.is_cancelled():
                    break
            if part is not parts[-1] and not turn.is_cancelled():
                self.prefixes.keep(self.tokens)
        return Prefill(
            len(prompt), len(self.tokens) - reused, time.perf_counter() - started,
            reused, min(restored, reused),
        )  # fmt: skip

    def extend(self, tokens: Sequence[int], rows: int | list[int]) -> None:
        """Take in what the target has evaluated.

        Args:
            tokens: what was committed of its last pass.
            rows: their rows in that pass; the first so many if it is a number.
        """
        if self._drafter is not None:
            self._drafter.absorb(self._target.features(rows), tokens)
        self.tokens.extend(tokens)

    def cut(self, n: int) -> None:
        """Keep the first `n` tokens in every cache (fewer when a cache holds or keeps less).

        This is also what brings the caches in line again after a round that was interrupted
        anywhere: `tokens` is the last to grow.
        """
        if self._drafter is not None:
            n = self._drafter.cut_point(n)
        n = self._target.cut(n)
        if self._drafter is not None:
            self._drafter.cut(n)
        del self.tokens[n:]

    def clear(self) -> None:
        """Empty the KV caches, as they are after loading."""
        self.cut(0)
        # Cutting leaves the place where the search for free cells goes on.
        self._target.context.clear()
        if self._drafter is not None:
            self._drafter.clear()

    def set_aside(self) -> None:
        """Keep the text, if that is worth it, before a generation that starts over."""
        if not self.deterministic:
            self._keep(0)

    def secure_prompt(self) -> None:
        """Keep the text, once, before the drafter's window leaves the prompt too far behind for
        going back to it."""
        drafter, end = self._drafter, self._n_prompt - 1
        if drafter is None or self._target.exact or not self.prefixes.on or self.deterministic:
            return
        # Its floor moves in steps: by a batch of rows and a round's.
        if drafter.floor <= end < drafter.floor_after(INJECT_ROWS + MAX_NODES):
            if (
                not self._prompt_kept
                and self.prefixes.pool.find(self.tokens[:end], end - 1) is None
            ):
                self.prefixes.keep(self.tokens)
            self._prompt_kept = True

    def _recall(self, wanted: list[int]) -> int:
        """Bring back the text that was kept with the longest prefix of `wanted`, if it is longer
        than the live one; the tokens they share."""
        shared = common_prefix(self.tokens, wanted)
        live = shared if self._drafter is None else self._drafter.cut_point(shared)
        found = self.prefixes.pool.find(wanted, self._target.cut_point(live))
        self._keep(shared, hold=found)
        if found is None:
            return 0
        self.tokens.clear()
        if not self.prefixes.restore(found, wanted):
            return 0
        self.tokens.extend(found.tokens.tolist())
        return found.usable(wanted)

    def _keep(self, shared: int, hold: Kept[State] | None = None) -> None:
        """Keep the text, if that is worth it, before only `shared` tokens of it stay."""
        if not self.prefixes.on or not worth_keeping(len(self.tokens), self._n_prompt, shared):
            return
        self.cut(len(self.tokens))  # in line, also after an interrupted round
        if self.tokens:
            self.prefixes.keep(self.tokens, hold)
