"""Recordings of a pair: what its drafter proposes at every position of the target's own text.

Greedy text does not depend on what is drafted, so one drafter pass per position tells what any
policy would have seen there, and jumping from round to round replays any policy exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from common import rendered
from localspec.engine import DraftOptions, Engine
from localspec.tree import DraftTree, build_tree
from trees import blocks

NODES = 63


@dataclass(frozen=True)
class Trace:
    """One answer.

    Attributes:
        label: where its prompt came from.
        start: context depth of the first anchor in tokens.
        answer: the target's greedy tokens; `trees[i]` and `chains[i]` were drafted with
            `answer[i]` as the anchor.
        trees: the likeliest `NODES` nodes, scores are the drafter's own log probabilities.
        chains: the drafter's greedy chain.
    """

    label: str
    start: int
    answer: list[int]
    trees: list[DraftTree]
    chains: list[DraftTree]

    @cached_property
    def depth(self) -> int:
        """The drafter's draft depths."""
        return max((int(t.depth.max()) for t in (*self.trees, *self.chains) if len(t)), default=1)


def record(engine: Engine, label: str, prompts: Sequence[str], tokens: int) -> Iterator[Trace]:
    """Answer user messages and draft at every position of the answers."""
    assert engine._drafter is not None
    heads = engine._drafter.heads
    for content in prompts:
        prompt = engine.tokenize(rendered(engine, content))
        answer = list(
            engine.complete(prompt, max_tokens=tokens, draft=DraftOptions(tokens=0)).token_ids
        )
        trees, chains = [], []
        for _, block in blocks(engine, prompt, answer):
            trees.append(build_tree(block, heads, budget=NODES, children=4, frontier=12))
            chains.append(build_tree(block, heads, budget=NODES, children=1, frontier=1))
        yield Trace(label, len(prompt), answer, trees, chains)


def save(path: Path, traces: Sequence[Trace]) -> None:
    """Write traces as a compressed npz."""
    arrays: dict[str, np.ndarray] = {}
    about = [{"label": t.label, "start": t.start} for t in traces]
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    for i, trace in enumerate(traces):
        arrays[f"{i}.answer"] = np.array(trace.answer, np.int32)
        for kind, trees in (("tree", trace.trees), ("chain", trace.chains)):
            arrays[f"{i}.{kind}.size"] = np.array([len(t) for t in trees], np.int32)
            for field in ("token", "parent", "depth", "score"):
                parts = [getattr(t, field) for t in trees]
                arrays[f"{i}.{kind}.{field}"] = np.concatenate(parts) if parts else np.zeros(0)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def load(path: Path) -> list[Trace]:
    """Read what `save` wrote."""
    with np.load(path) as data:
        about = json.loads(bytes(data["about"]))
        return [
            Trace(
                entry["label"],
                entry["start"],
                data[f"{i}.answer"].tolist(),
                _trees(data, f"{i}.tree"),
                _trees(data, f"{i}.chain"),
            )
            for i, entry in enumerate(about)
        ]


def _trees(data: np.lib.npyio.NpzFile, name: str) -> list[DraftTree]:
    ends = np.cumsum(data[f"{name}.size"])[:-1]
    fields = (np.split(data[f"{name}.{f}"], ends) for f in ("token", "parent", "depth", "score"))
    return [DraftTree(*parts) for parts in zip(*fields, strict=True)]
