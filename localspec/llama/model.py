"""A loaded model: its weights' place, its vocabulary, its metadata."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import reasoning
from localspec.errors import LocalspecError
from localspec.llama.backends import connected, spread
from localspec.llama.library import library
from localspec.llama.owned import Owned
from localspec.pairs import NO_TREE_ARCHS


class _BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override: where tensors whose names match a pattern go."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


# llama_token_attr: UNKNOWN and CONTROL, whose tokens llama.cpp turns into no text.
_NO_TEXT = 1 | 8


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model.

    Attributes:
        n_gpu_layers: layers on the GPU; -1 means all of them (ignored without a GPU).
        use_mmap: map the file instead of reading it.
        use_mlock: keep the model in memory.
        mtp: load multi-token prediction layers too.
        workers: "HOST:PORT" of RPC workers that hold its layers together with local GPUs.
    """

    n_gpu_layers: int = -1
    use_mmap: bool = True
    use_mlock: bool = False
    mtp: bool = False
    workers: tuple[str, ...] = ()


# Pre-tokenizers (`tokenizer.ggml.pre`) for which llama.cpp has code of its own.
_OWN_SPLITTERS = frozenset(
    ["gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "lfm2", "qwen2", "qwen35"]
)
_MAX_RUN = 4000


def cut_long_runs(text: str, most: int = _MAX_RUN) -> list[str]:
    """A text in parts without endless words or gaps.

    C++'s regular expressions take a few hundred bytes of stack for every character of a match: a
    word of 40,000 letters ends the process.
    """
    # White space beyond ASCII counts for both: expressions differ in what they take it for.
    long = re.finditer(rf"[^ \t\n\r\v\f]{{{most}}}|\s{{{most}}}", text)
    ends = [0, *(m.end() for m in long), len(text)]
    parts = [text[a:b] for a, b in pairwise(ends) if a < b]
    return parts or [text]


class Model:
    """A model that llama.cpp has loaded.

    Args:
        path: a GGUF file.
        options: where and how to load it.
        progress: called with 0..1 while loading; returning False stops it.

    Raises:
        LocalspecError: the file cannot be loaded; the message carries llama.cpp's reason.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: ModelOptions | None = None,
        progress: Callable[[float], bool | None] | None = None,
    ) -> None:
        options = options or ModelOptions()
        self._lib = library()
        self._api = self._lib.api
        self.path = Path(path)
        self._handle: Any = None
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = options.n_gpu_layers
        params.load_mode = _load_mode(self._api, options)
        params.load_mtp = options.mtp
        if options.workers:
            self._place(params, options.workers)
        stopped = []

        def report(fraction: float, _user_data: Any) -> bool:
            try:
                keep_going = progress is None or progress(fraction) is not False
            except BaseException as e:  # must not cross the C frames below
                stopped.append(e)
                return False
            if not keep_going:
                stopped.append(LocalspecError(f"loading {self.path} was cancelled"))
            return keep_going

        callback = self._api.llama_progress_callback(report)
        params.progress_callback = callback
        self._lib.recent.clear()
        self._handle = self._api.llama_model_load_from_file(os.fsencode(self.path), params)
        if stopped:
            if self._handle:
                self._api.llama_model_free(self._handle)
                self._handle = None
            raise stopped[0]
        if not self._handle:
            raise LocalspecError(f"llama.cpp cannot load {self.path}: {self._lib.why()}")
        api, h = self._api, self._handle
        connected.update(options.workers)
        self._owned: Owned = Owned(h, lambda h: _free_model(api, h, options.workers))
        self._vocab = api.llama_model_get_vocab(h)
        self.n_layer: int = api.llama_model_n_layer(h)
        self.n_embd: int = api.llama_model_n_embd(h)
        self.n_vocab: int = api.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: int = api.llama_model_n_ctx_train(h)
        self.n_bytes: int = api.llama_model_size(h)
        self.recurrent: bool = (
            api.llama_model_is_recurrent(h)
            or api.llama_model_is_hybrid(h)
            or self.meta("general.architecture") in NO_TREE_ARCHS
        )
        self.n_swa: int = api.llama_model_n_swa(h)  # sliding window; 0 without
        self.bos: int = api.llama_vocab_bos(self._vocab)
        self.eos: int = api.llama_vocab_eos(self._vocab)
        self.add_bos: bool = api.llama_vocab_get_add_bos(self._vocab)
        self._pieces: dict[tuple[int, bool], bytes] = {}

    def _place(self, params: Any, workers: Sequence[str]) -> None:
        """Spread the model over workers and local GPUs."""
        chosen, ends = spread(workers)
        self._devices = (ctypes.c_void_p * (len(chosen) + 1))(*chosen, None)
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        if ends is not None:
            self._overrides = (_BufferOverride * 2)()
            self._overrides[0].pattern = rb"^(token_embd|output)\."
            self._overrides[0].buft = ends
            params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer.

        Raises:
            LocalspecError: the model is closed.
        """
        if not self._handle:
            raise LocalspecError(f"{self.path.name} is closed; load it again")
        return self._handle

    def meta(self, key: str) -> str | None:
        """A metadata value as text; None when the key is absent."""
        buf = ctypes.create_string_buffer(1 << 10)
        size = self._api.llama_model_meta_val_str(self.handle, key.encode(), buf, len(buf))
        if size < 0:
            return None
        if size >= len(buf):
            buf = ctypes.create_string_buffer(size + 1)
            self._api.llama_model_meta_val_str(self.handle, key.encode(), buf, len(buf))
        return buf.value.decode("utf-8", "replace")

    @property
    def description(self) -> str:
        """e.g. "llama 135M Q4_1"."""
        buf = ctypes.create_string_buffer(256)
        self._api.llama_model_desc(self.handle, buf, len(buf))
        return buf.value.decode("utf-8", "replace")

    def system_info(self) -> str:
        """Build and devices of llama.cpp, as it describes them."""
        info = self._api.llama_print_system_info()
        return f"{self._lib.version} {info.decode('utf-8', 'replace')}"

    @property
    def chat_template(self) -> str | None:
        """The jinja template in the file; None when it has none."""
        text = self._api.llama_model_chat_template(self.handle, None)
        return text.decode("utf-8", "replace") if text else None

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: add the beginning-of-text token where the model wants one.
            parse_special: read "<|im_start|>" and the like as special tokens.
        """
        parts = cut_long_runs(text) if self._splits_by_regex else [text]
        ids = self._tokenized(parts[0], add_special, parse_special)
        if len(parts) > 1:
            ends = add_special and self._api.llama_vocab_get_add_eos(self._live_vocab)
            last = [ids.pop()] if ends else []
            for part in parts[1:]:
                ids += self._tokenized(part, False, parse_special)
            ids += last
        return ids

    @cached_property
    def _splits_by_regex(self) -> bool:
        """Whether llama.cpp splits texts into words by C++'s regular expressions."""
        bpe = self._api.llama_vocab_type(self._live_vocab) == self._api.LLAMA_VOCAB_TYPE_BPE
        return bpe and self.meta("tokenizer.ggml.pre") not in _OWN_SPLITTERS

    def _tokenized(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        # Lone surrogates (from broken terminals) have no UTF-8 form.
        data = text.encode("utf-8", "replace")
        size = len(data) + 2
        buf = (ctypes.c_int32 * size)()
        n = self._api.llama_tokenize(
            self._live_vocab, data, len(data), buf, size, add_special, parse_special
        )
        if n < 0:  # the buffer was too small; -n fits
            buf = (ctypes.c_int32 * -n)()
            n = self._api.llama_tokenize(
                self._live_vocab, data, len(data), buf, -n, add_special, parse_special
            )
        return list(buf[:n])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; special tokens are empty unless asked for.

        Those around reasoning are not: without them nobody could tell it from the answer.
        """
        key = (token, special)
        if key not in self._pieces:
            if not 0 <= token < self.n_vocab:
                raise LocalspecError(f"token {token} is outside the vocabulary of {self.n_vocab}")
            special = special or token in self._around_reasoning
            buf = ctypes.create_string_buffer(64)
            n = self._api.llama_token_to_piece(self._live_vocab, token, buf, 64, 0, special)
            if n < 0:
                buf = ctypes.create_string_buffer(-n)
                n = self._api.llama_token_to_piece(self._live_vocab, token, buf, -n, 0, special)
            self._pieces[key] = buf.raw[:n]
        return self._pieces[key]

    @cached_property
    def _around_reasoning(self) -> frozenset[int]:
        marks = (self._tokenized(mark, False, True) for mark in reasoning.TOKENS)
        return frozenset(ids[0] for ids in marks if len(ids) == 1)

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(t, special=special) for t in tokens).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """Whether a token ends a generation (end of text, end of turn)."""
        return bool(self._api.llama_vocab_is_eog(self._live_vocab, token))

    @cached_property
    def silent_tokens(self) -> npt.NDArray[np.bool_]:
        """[V] tokens without a text of their own (control tokens), end tokens excepted."""
        vocab, attributes = self._live_vocab, self._api.llama_vocab_get_attr
        kinds = np.array([attributes(vocab, t) for t in range(self.n_vocab)])
        silent: npt.NDArray[np.bool_] = (kinds & _NO_TEXT) != 0
        for token in np.flatnonzero(silent).tolist():
            silent[token] = not self.is_end(token)
        return silent

    @property
    def can_end(self) -> bool:
        """Whether it has a token to end a generation with."""
        ends = (self.eos, self._api.llama_vocab_eot(self._live_vocab))
        return any(t >= 0 and self.is_end(t) for t in ends)

    @property
    def _live_vocab(self) -> Any:
        _ = self.handle
        return self._vocab

    def close(self) -> None:
        """Free the model, at once or with the last of its contexts. A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle:
            self._owned.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _free_model(api: Any, handle: Any, workers: Sequence[str]) -> None:
    api.llama_model_free(handle)
    connected.subtract(workers)


def _load_mode(api: Any, options: ModelOptions) -> int:
    name = {
        (False, False): "LLAMA_LOAD_MODE_NONE",
        (True, False): "LLAMA_LOAD_MODE_MMAP",
        (False, True): "LLAMA_LOAD_MODE_MLOCK",
        (True, True): "LLAMA_LOAD_MODE_MMAP_MLOCK",
    }[options.use_mmap, options.use_mlock]
    return int(getattr(api, name))
