"""Grammars: what a generation may say. llama.cpp's grammar sampler decides, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import DeadEndError, LocalspecError
from localspec.llama import GrammarSampler, Model

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Grammar:
    """A set of texts, one of which a generation has to write.

    Attributes:
        text: the grammar in llama.cpp's GBNF; its rule `root` is the whole answer.
    """

    text: str

    @classmethod
    def from_gbnf(cls, text: str) -> Grammar:
        """A grammar in GBNF (llama.cpp, grammars/README.md).

        Raises:
            LocalspecError: a syntax error, an undefined rule, left recursion, or more than
                llama.cpp could handle; the message names the line.
        """
        from localspec import gbnf, readings

        gbnf.check(text)
        readings.check(text)
        return cls(text)

    @classmethod
    def from_json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """The JSON texts that a JSON Schema allows, properties in the order it declares them.

        Objects have no other properties than the declared ones unless `additionalProperties` says
        so (JSON Schema's own default would allow any; leaving them out is always valid).

        Args:
            schema: the schema, or its JSON text.

        Raises:
            LocalspecError: it is no schema, or uses a keyword that a grammar cannot enforce.
        """
        from localspec import gbnf, json_schema

        text = json_schema.to_gbnf(schema)
        try:
            gbnf.check(text)
        except LocalspecError as e:
            raise LocalspecError(f"the JSON schema refers to itself or is too large: {e}") from e
        return cls(text)

    def start(self, model: Model) -> GrammarState:
        """The state at the beginning of an answer of this model.

        Raises:
            DeadEndError: none of its tokens can be the first.
            LocalspecError: the model has no token to end an answer with.
        """
        state = GrammarState(GrammarSampler(model, self.text))
        if not state.goes_on(model.n_vocab):
            raise DeadEndError(
                "no answer can begin: the grammar allows none of the model's tokens first; change "
                "what must come first"
            )
        return state


class GrammarState:
    """Where in a grammar a text has come to; states of longer texts hang below it.

    A state makes its llama.cpp object when it is first asked something, by cloning the one before.

    Args:
        sampler: llama.cpp's object for it; None for one that is made from `parent`.
        parent: the state before `token`.
        token: the token between the two.
    """

    __slots__ = ("_after", "_known", "_parent", "_sampler", "_token")

    def __init__(
        self,
        sampler: GrammarSampler | None,
        parent: GrammarState | None = None,
        token: int = -1,
    ) -> None:
        self._sampler, self._parent, self._token = sampler, parent, token
        self._after: dict[int, GrammarState] = {}
        self._known: dict[int, bool] = {}

    def after(self, token: int) -> GrammarState:
        """The state after one more token, which must be allowed."""
        if token not in self._after:
            self._after[token] = GrammarState(None, self, token)
        return self._after[token]

    def detach(self) -> GrammarState:
        """This state without what came before it, which can then be freed."""
        _ = self.sampler
        self._parent = None
        return self

    @property
    def sampler(self) -> GrammarSampler:
        """llama.cpp's object."""
        if self._sampler is None:
            assert self._parent is not None
            self._sampler = self._parent.sampler.after(self._token)
        return self._sampler

    def goes_on(self, n_vocab: int) -> bool:
        """Whether any token may come next, an end token included."""
        start, size = 0, 256  # most grammars allow one of the first, which spell single bytes
        while start < n_vocab:
            if self.allows(np.arange(start, min(start + size, n_vocab))).any():
                return True
            start, size = start + size, 4 * size
        return False

    def allows(self, tokens: Sequence[int] | Ints) -> Bools:
        """[n] whether each of some tokens may come next."""
        if len(tokens) == 1:  # drafts and the choice after them ask the same
            token = int(tokens[0])
            if token not in self._known:
                self._known[token] = bool(self.sampler.allowed(np.array([token]))[0])
            return np.array([self._known[token]])
        return self.sampler.allowed(np.asarray(tokens, np.int64))
