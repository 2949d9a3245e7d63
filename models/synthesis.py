"""Text that the target writes itself, with the features and final hidden states of every token.

Many answers are written side by side, each in a KV stream of its own. The pass that writes a token
also gives what a drafter is trained on, so nothing has to be evaluated twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from localspec.llama import Context, ContextOptions, Model

Halfs = npt.NDArray[np.float16]
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]

_MOST = np.float32(65504)  # the largest float16


@dataclass(frozen=True)
class Prompt:
    """What the target is asked: `index` names it for good, `tokens` are in its chat template."""

    index: int
    tokens: Sequence[int]
    temperature: float


@dataclass(frozen=True)
class Conversation:
    """One prompt and its answer.

    Attributes:
        index: the prompt's.
        tokens: [n] prompt and answer.
        n_prompt: how many of them are the prompt.
        temperature: what the answer was sampled at.
        features: [n, n_features] float16, the outputs of the target layers side by side.
        hidden: [n, d] float16 final-norm hidden states; row i predicts token i + 1.
        log_norm: [n] float32, log of the sum of exp of all logits of row i: what makes a part of
            the vocabulary's logits probabilities.
    """

    index: int
    tokens: Ints
    n_prompt: int
    temperature: float
    features: Halfs
    hidden: Halfs
    log_norm: Floats


@dataclass
class _Slot:
    prompt: Prompt
    rng: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    rows: list[Halfs] = field(default_factory=list)  # [k, n_features + d] each
    log_norm: list[Floats] = field(default_factory=list)
    left: int | None = None  # tokens to write yet, once it has ended


class Writer:
    """Writes answers with one target.

    Args:
        model: the target.
        target_layer_ids: layers whose outputs are the features; -1 is the embedding output.
        streams: answers written side by side.
        longest: most tokens of a prompt and its answer together.
        n_threads: CPU threads; 0 means one per physical core.
        seed: with a prompt's index it decides what is drawn for it.
    """

    def __init__(
        self,
        model: Model,
        target_layer_ids: Sequence[int],
        *,
        streams: int,
        longest: int,
        n_threads: int = 0,
        seed: int = 0,
    ) -> None:
        self.model, self.longest, self.seed = model, longest, seed
        self.inputs = tuple(layer + 1 for layer in target_layer_ids)
        n_batch = max(longest, streams)
        self.context = Context(
            model,
            ContextOptions(
                n_ctx=-(-longest // 256) * 256 * streams,
                n_batch=n_batch,
                n_outputs=n_batch,
                n_seq_max=streams,
                n_threads=n_threads,
                hidden_states=True,
                layer_inputs=self.inputs,
                streams=True,
            ),
        )
        self._slots: list[_Slot | None] = [None] * streams
        self._after_end = 0

    def write(
        self, prompts: Iterable[Prompt], max_new: int, after_end: int = 0
    ) -> Iterator[Conversation]:
        """Conversations in the order in which they end.

        Prompts that leave no room for an answer of at least 8 tokens are left out.

        Args:
            prompts: what to answer.
            max_new: most tokens of an answer.
            after_end: tokens to go on for after the end token. With as many as a drafter has
                depths, and one, it learns how answers end.
        """
        self._after_end = after_end
        source = iter(prompts)
        exhausted = False
        while True:
            for slot in range(len(self._slots)):
                while not exhausted and self._slots[slot] is None:
                    prompt = next(source, None)
                    exhausted = prompt is None
                    if prompt is not None and len(prompt.tokens) + 8 <= self.longest:
                        self._begin(slot, prompt)
                        yield from self._finished(slot, max_new)
            active = [i for i, slot in enumerate(self._slots) if slot is not None]
            if not active:
                return
            self._step(active)
            for slot in active:
                yield from self._finished(slot, max_new)

    def _begin(self, index: int, prompt: Prompt) -> None:
        slot = _Slot(prompt, np.random.default_rng([self.seed, prompt.index]))
        slot.tokens = [int(token) for token in prompt.tokens]
        self.context.seq_remove(index)
        n = len(slot.tokens)
        # A pass of one sequence: a mix of long and short ones would be split and reordered.
        self.context.decode(slot.tokens, np.arange(n), sequences=[[index]] * n)
        slot.rows.append(self._rows())
        slot.log_norm.append(log_norm(self.context.logits()))
        self._slots[index] = slot
        self._choose([index], self.context.logits()[-1:])

    def _step(self, active: list[int]) -> None:
        slots = [self._at(i) for i in active]
        self.context.decode(
            [slot.tokens[-1] for slot in slots],
            [len(slot.tokens) - 1 for slot in slots],
            sequences=[[i] for i in active],
        )
        rows, norms = self._rows(), log_norm(self.context.logits())
        for i, slot in enumerate(slots):
            slot.rows.append(rows[i : i + 1])
            slot.log_norm.append(norms[i : i + 1])
        self._choose(active, self.context.logits())

    def _choose(self, active: list[int], logits: npt.NDArray[np.float32]) -> None:
        greedy = logits.argmax(axis=1)
        for row, index in enumerate(active):
            slot = self._at(index)
            token = int(greedy[row])
            if slot.prompt.temperature > 0:
                token = _draw(logits[row], slot.prompt.temperature, slot.rng)
            slot.tokens.append(token)

    def _finished(self, index: int, max_new: int) -> Iterator[Conversation]:
        slot = self._at(index)
        n_prompt = len(slot.prompt.tokens)
        room = min(self.longest, n_prompt + max_new)
        if slot.left is not None:
            slot.left -= 1
        elif self.model.is_end(slot.tokens[-1]):
            slot.left = self._after_end
        if len(slot.tokens) < room and slot.left != 0:
            return
        self._slots[index] = None
        rows = np.concatenate(slot.rows)
        split = rows.shape[1] - self.model.n_embd
        # The last token was chosen but never evaluated: it has no features.
        tokens = np.array(slot.tokens[: len(rows)], np.int32)
        yield Conversation(
            slot.prompt.index,
            tokens,
            n_prompt,
            slot.prompt.temperature,
            rows[:, :split],
            rows[:, split:],
            np.concatenate(slot.log_norm),
        )

    def _rows(self) -> Halfs:
        parts = [self.context.layer_input(layer) for layer in self.inputs]
        rows = np.concatenate([*parts, self.context.hidden()], axis=1)
        # Some models have single activations beyond what 16 bits hold.
        return rows.clip(-_MOST, _MOST).astype(np.float16)

    def evaluate(self, tokens: Ints) -> tuple[Halfs, Halfs, Floats]:
        """(features, hidden, log_norm) of a text, as `write` gives them.

        Not while `write` is under way.
        """
        self.context.clear()
        self.context.decode(tokens, np.arange(len(tokens)))
        rows = self._rows()
        split = rows.shape[1] - self.model.n_embd
        return rows[:, :split], rows[:, split:], log_norm(self.context.logits())

    def _at(self, index: int) -> _Slot:
        slot = self._slots[index]
        assert slot is not None
        return slot

    def close(self) -> None:
        """Free the context."""
        self.context.close()


def log_norm(logits: Floats) -> Floats:
    """[n, V] -> [n]: log of the sum of exp, a few rows at a time so that they stay in cache."""
    out = np.empty(len(logits), np.float32)
    for i in range(0, len(logits), 4):
        rows = logits[i : i + 4]
        top = rows.max(axis=1)
        out[i : i + 4] = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
    return out


def _draw(logits: Floats, temperature: float, rng: np.random.Generator) -> int:
    weights = np.exp((logits - logits.max()) / np.float32(temperature))
    heap = np.cumsum(weights, dtype=np.float64)
    return min(int(np.searchsorted(heap, rng.random() * heap[-1], side="right")), len(heap) - 1)
