"""Training text on disk: what the target wrote, and as many features as the disk budget holds.

Text is compact and always kept. Features are large (some kilobytes a token): those of the first
conversations are kept up to the budget, the others are evaluated again whenever they are needed.
Every file is written aside and renamed, so that a kill at any moment loses at most one shard.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from localspec.errors import LocalspecError
from localspec.models.synthesis import Conversation, Floats, Halfs, Ints

Rows = tuple[Halfs, Halfs, Floats]  # features, hidden, log_norm of one conversation

_TEXT, _FEATURES = "text", "features"
_COLUMNS = ("index", "length", "n_prompt", "temperature")
# Left free whatever the budget says: a full disk harms more than this training.
_RESERVE = 256 << 20


@dataclass(frozen=True)
class Entry:
    """Where one conversation lies."""

    index: int
    shard: int
    start: int  # first row in its shard
    n_tokens: int
    n_prompt: int
    temperature: float


class Store:
    """The shards of one training run.

    Args:
        path: a directory of its own.
        budget: most bytes of features on disk.

    Raises:
        LocalspecError: the directory cannot be used, or a shard in it is damaged.
    """

    def __init__(self, path: Path, budget: int) -> None:
        self.path, self.budget = path, budget
        try:
            for kind in (_TEXT, _FEATURES):
                (path / kind).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalspecError(
                f"{path}: cannot be written ({error.strerror}); choose another directory with -o"
            ) from error
        self.entries: list[Entry] = []
        self._n_shards = 0
        for file in sorted((path / _TEXT).glob("*.safetensors")):
            self._list(int(file.stem))

    def _list(self, shard: int) -> None:
        held = _read(self._file(_TEXT, shard), _COLUMNS)
        start = 0
        for index, length, n_prompt, temperature in zip(*(held[c] for c in _COLUMNS), strict=True):
            entry = Entry(int(index), shard, start, int(length), int(n_prompt), float(temperature))
            self.entries.append(entry)
            start += int(length)
        self._n_shards = shard + 1

    @property
    def n_tokens(self) -> int:
        """Tokens of all conversations, prompts included."""
        return sum(entry.n_tokens for entry in self.entries)

    @property
    def bytes_of_features(self) -> int:
        """What the features on disk take now."""
        return sum(f.stat().st_size for f in (self.path / _FEATURES).glob("*.safetensors"))

    def add(self, conversations: Sequence[Conversation]) -> None:
        """Write one shard; its features too, while the budget lasts.

        Raises:
            LocalspecError: the disk is full.
        """
        if not conversations:
            return
        shard = self._n_shards
        # A kill between features and text leaves features of a shard that never was.
        self._file(_FEATURES, shard).unlink(missing_ok=True)
        size = (
            sum(c.features.nbytes + c.hidden.nbytes + c.log_norm.nbytes for c in conversations)
            + 4096
        )
        free = shutil.disk_usage(self.path).free - _RESERVE
        if size <= min(self.budget - self.bytes_of_features, free):
            rows = {
                "features": np.concatenate([c.features for c in conversations]),
                "hidden": np.concatenate([c.hidden for c in conversations]),
                "log_norm": np.concatenate([c.log_norm for c in conversations]),
            }
            self._save(_FEATURES, shard, rows)
        text = {
            "index": np.array([c.index for c in conversations], np.int64),
            "length": np.array([len(c.tokens) for c in conversations], np.int64),
            "n_prompt": np.array([c.n_prompt for c in conversations], np.int64),
            "temperature": np.array([c.temperature for c in conversations], np.float32),
            "tokens": np.concatenate([c.tokens for c in conversations]),
        }
        self._save(_TEXT, shard, text)  # last: a shard exists once its text does
        self._list(shard)

    def _save(self, kind: str, shard: int, arrays: dict[str, Any]) -> None:
        file = self._file(kind, shard)
        aside = file.with_suffix(".part")
        try:
            save_file(arrays, aside)
            os.replace(aside, file)
        except (OSError, SafetensorError) as error:
            aside.unlink(missing_ok=True)
            raise LocalspecError(
                f"{file}: cannot be written ({error}); free some space and go on with --resume"
            ) from error

    def tokens(self, entries: Sequence[Entry]) -> list[Ints]:
        """The tokens of each."""
        return [self._read(_TEXT, entry, "tokens")[0].astype(np.int32) for entry in entries]

    def rows(self, entries: Sequence[Entry], evaluate: Callable[[Ints], Rows]) -> list[Rows]:
        """(features, hidden, log_norm) of each, from disk or else from `evaluate(tokens)`."""
        found: list[Rows] = []
        for entry in entries:
            if self._file(_FEATURES, entry.shard).exists():
                a, b, c = self._read(_FEATURES, entry, "features", "hidden", "log_norm")
                found.append((a, b, c))
            else:
                found.append(evaluate(self.tokens([entry])[0]))
        return found

    def _read(self, kind: str, entry: Entry, *names: str) -> list[npt.NDArray[Any]]:
        file = self._file(kind, entry.shard)
        rows = _read(file, names, slice(entry.start, entry.start + entry.n_tokens))
        if any(len(row) != entry.n_tokens for row in rows.values()):
            raise _damaged(file)
        return list(rows.values())

    def _file(self, kind: str, shard: int) -> Path:
        return self.path / kind / f"{shard:06}.safetensors"


def _read(
    file: Path, names: Sequence[str], span: slice = slice(None)
) -> dict[str, npt.NDArray[Any]]:
    try:
        with safe_open(file, "numpy") as opened:
            return {name: opened.get_slice(name)[span] for name in names}
    except (OSError, SafetensorError) as error:
        raise _damaged(file) from error


def _damaged(file: Path) -> LocalspecError:
    return LocalspecError(f"{file}: is damaged; delete it, and go on with --resume")
