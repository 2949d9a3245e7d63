"""What is compared: names like "fixed:7x4" and what they stand for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from localspec.drafting import MAX_LEAVES, MAX_NODES, DraftOptions
from localspec.errors import LocalspecError

TREE_NODES, TREE_WIDTH = 31, 4
# llama.cpp's own default is 3; the others show which way its best lies.
PEER_SWEEP = (1, 3, 7)
# What llama.cpp drafts from the text alone, with its own settings.
PEER_NGRAMS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
_KNOWN = (
    "plain, auto, chain, tree, fixed:NxK, llama.cpp, llama.cpp:N, llama.cpp:N@P, "
    "llama.cpp:ngram-..."
)


@dataclass(frozen=True)
class PeerOptions:
    """A setting of llama.cpp's programs.

    Attributes:
        n_max: `--spec-draft-n-max` of `draft-dspark`; 0 asks no drafter.
        p_min: `--spec-draft-p-min`.
        ngram: a `--spec-type` that needs no drafter, one of `PEER_NGRAMS`; empty without.
    """

    n_max: int
    p_min: float = 0.0
    ngram: str = ""

    @property
    def plain(self) -> bool:
        """Whether it is llama.cpp's plain decoding."""
        return not self.n_max and not self.ngram


@dataclass(frozen=True)
class Setting:
    """One way to decode.

    Attributes:
        name: as the user wrote it.
        draft: for our engine; None when llama.cpp's program runs.
        peer: for llama.cpp's program.
    """

    name: str
    draft: DraftOptions | None = None
    peer: PeerOptions | None = None

    @property
    def needs_drafter(self) -> bool:
        """Whether it is nothing but plain decoding without a drafter."""
        if self.peer is not None:
            return self.peer.n_max > 0
        return self.draft is not None and self.draft.tokens > 0 and not self.draft.context


PLAIN = Setting("plain", DraftOptions(tokens=0))
AUTO = Setting("auto", DraftOptions.auto())


def parse_settings(names: str, *, depths: int) -> list[Setting]:
    """Settings from their names, separated by commas; doubles are dropped.

    plain and auto; chain: one path as deep as the drafter goes; tree: 31 nodes, width 4;
    fixed:NxK: N nodes, width K, every round; llama.cpp:N@P: llama.cpp's `draft-dspark` with
    `--spec-draft-n-max N` and `--spec-draft-p-min P` (0 when left out); llama.cpp:0: its plain
    decoding; llama.cpp: its plain decoding and n-max 1, 3 and 7; llama.cpp:ngram-mod and the other
    `PEER_NGRAMS`: its drafts from the text alone.

    Args:
        names: e.g. "plain,chain,llama.cpp".
        depths: the drafter's draft depths.

    Raises:
        LocalspecError: a name is unknown, or a number out of range.
    """
    found: dict[str, Setting] = {}
    for name in (n.strip() for n in names.split(",")):
        if name:
            found |= {s.name: s for s in _parse(name, depths)}
    return list(found.values())


def _parse(name: str, depths: int) -> list[Setting]:
    if name == "plain":
        return [PLAIN]
    if name == "auto":
        return [AUTO]
    if name == "chain":
        return [Setting(name, DraftOptions(tokens=max(1, depths)))]
    if name == "tree":
        return [Setting(name, DraftOptions(tokens=TREE_NODES, width=TREE_WIDTH))]
    if name == "llama.cpp":
        return [s for n in (0, *PEER_SWEEP) for s in _parse(f"llama.cpp:{n}", depths)]
    fixed = re.fullmatch(r"fixed:(\d{1,4})(?:x(\d{1,4}))?", name)
    if fixed is not None:
        n, k = int(fixed[1]), int(fixed[2] or 1)
        if not 1 <= n <= MAX_NODES or not 1 <= k <= MAX_LEAVES:
            raise LocalspecError(
                f"{name!r} is out of range; N is 1..{MAX_NODES}, K is 1..{MAX_LEAVES}"
            )
        return [Setting(name, DraftOptions(tokens=n, width=k))]
    peer = re.fullmatch(r"llama\.cpp:(\d{1,4})(?:@(\d*\.?\d+))?", name)
    if peer is not None:
        p_min = float(peer[2] or 0)
        if p_min > 1:
            raise LocalspecError(f"{name!r} is out of range; P is a probability")
        return [Setting(name, peer=PeerOptions(int(peer[1]), p_min))]
    ngram = name.removeprefix("llama.cpp:")
    if ngram != name and ngram in PEER_NGRAMS:
        return [Setting(name, peer=PeerOptions(0, ngram=ngram))]
    raise LocalspecError(f"{name!r} is nothing to compare with; known are {_KNOWN}")
