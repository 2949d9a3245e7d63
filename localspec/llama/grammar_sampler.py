"""llama.cpp's grammar sampler, asked which tokens may come next."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError
from localspec.llama.model import Model
from localspec.llama.owned import Owned

Ints = npt.NDArray[np.integer]

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class GrammarSampler:
    """A state of llama.cpp's grammar sampler; never changes once it is made.

    Args:
        model: whose tokens are constrained.
        text: GBNF that `gbnf.check` accepts, with a rule `root`.

    Raises:
        LocalspecError: llama.cpp refuses the grammar, or the model has no end token.
    """

    def __init__(self, model: Model, text: str) -> None:
        self._api, self.model = model._api, model
        vocab = model._live_vocab
        if not model.can_end:
            raise LocalspecError(
                f"{model.path.name} has no token to end an answer with; use it without a grammar"
            )
        handle = self._api.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        if not handle:
            raise LocalspecError("llama.cpp refuses the grammar; check it with its own tools")
        self._own(handle)
        # Control tokens have no text; llama.cpp would take their names for it.
        self._silent = model.silent_tokens

    def _own(self, handle: Any) -> None:
        self._handle = handle
        self._owned: Owned = Owned(handle, self._api.llama_sampler_free, self.model._owned)

    def allowed(self, tokens: Ints) -> npt.NDArray[np.bool_]:
        """[n] whether each of some tokens may come next (end tokens: whether it may end here).

        Raises:
            LocalspecError: an id is out of range.
        """
        data = np.zeros(len(tokens), _TOKEN_DATA)
        if len(tokens):
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.model.n_vocab:
                raise LocalspecError(f"token ids must be 0..{self.model.n_vocab - 1}")
            data["id"] = tokens
            kind = self._api.llama_token_data_array
            pointer = ctypes.cast(data.ctypes.data, dict(kind._fields_)["data"])
            array = kind(data=pointer, size=len(tokens), selected=-1, sorted=False)
            _ = self.model.handle
            self._api.llama_sampler_apply(self._handle, ctypes.byref(array))
        allowed: npt.NDArray[np.bool_] = data["logit"] == 0
        allowed &= ~self._silent[tokens]
        return allowed

    def after(self, token: int) -> GrammarSampler:
        """The state after one more token.

        Raises:
            LocalspecError: the grammar does not allow it (llama.cpp would end the process).
        """
        if not self.allowed(np.array([token]))[0]:
            raise LocalspecError(f"the grammar does not allow token {token} here")
        other = object.__new__(GrammarSampler)
        other._api, other.model, other._silent = self._api, self.model, self._silent
        other._own(self._api.llama_sampler_clone(self._handle))
        self._api.llama_sampler_accept(other._handle, token)
        return other

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._owned.release()
