"""Accepted length of chains and trees on greedy text, per prompt file.

    python benchmarks/trees.py [--prompts 16] [--tokens 128]

Greedy text does not depend on the draft, so every prompt is answered once, plainly. Then one
drafter pass at every position of the answer tells, for every setting, how many tokens a round
starting there accepts, and the rounds of a setting are read off by jumping from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from common import PROMPT_FILES, first_turns, pair_parser, rendered
from localspec.engine import DraftOptions, Engine
from localspec.heads import Heads
from localspec.tree import ROOT, Block, DraftTree, build_tree

Grow = Callable[[Block, Heads], DraftTree]


def settings(shortlist: int) -> dict[str, Grow]:
    """Name -> how the tree is grown."""

    def tree(n: int, children: int, frontier: int, confidence: float = 0.0) -> Grow:
        return lambda block, heads: build_tree(
            block,
            heads,
            budget=n,
            children=children,
            frontier=frontier,
            confidence=confidence,
            shortlist=shortlist,
        )

    grown = {"chain 7": tree(7, 1, 1)}
    grown |= {f"tree {n}": tree(n, 4, 12) for n in (3, 7, 11, 15, 23, 31)}
    grown |= {f"conf {n}": tree(n, 4, 12, 1.0) for n in (7, 15, 31)}
    return grown


def main() -> None:
    """Print the table."""
    parser = pair_parser(__doc__, prompts=16)
    parser.add_argument("--shortlist", type=int, default=128)
    args = parser.parse_args()
    grown = settings(args.shortlist)
    print(f"{'':10s} " + " ".join(f"{name:>8s}" for name in grown))
    total = {name: np.zeros(2) for name in grown}
    with Engine.load(args.target, args.drafter, n_ctx=2048, n_threads=args.threads) as engine:
        for file in PROMPT_FILES:
            sums = {name: np.zeros(2) for name in grown}
            for content in first_turns(file, args.prompts):
                prompt = engine.tokenize(rendered(engine, content))
                answer = engine.complete(
                    prompt, max_tokens=args.tokens, draft=DraftOptions(tokens=0)
                ).token_ids
                accepted = accepted_everywhere(engine, prompt, answer, grown)
                for name, counts in accepted.items():
                    sums[name] += rounds(counts)
            row(file, sums)
            for name in grown:
                total[name] += sums[name]
        row("all", total)


def row(label: str, sums: dict[str, np.ndarray]) -> None:
    """One line of the table: tokens per round of every setting."""
    print(f"{label:10s} " + " ".join(f"{t / n:8.3f}" for t, n in sums.values()), flush=True)


def accepted_everywhere(
    engine: Engine, prompt: list[int], answer: list[int], grown: dict[str, Grow]
) -> dict[str, list[int]]:
    """Per setting and position of the answer: drafted tokens a round with that anchor accepts."""
    out: dict[str, list[int]] = {name: [] for name in grown}
    drafter = engine._drafter
    assert drafter is not None
    for i, block in blocks(engine, prompt, answer):
        for name, grow in grown.items():
            out[name].append(matches(grow(block, drafter.heads), answer[i + 1 :]))
    return out


def blocks(engine: Engine, prompt: list[int], answer: list[int]) -> Iterator[tuple[int, Block]]:
    """(i, block with anchor answer[i]) for every i but the last."""
    drafter, target = engine._drafter, engine._target
    assert drafter is not None
    engine._live.cut(0)
    tokens = prompt + answer[:-1]
    features = np.concatenate([target.features(n) for _, n in target.prefill(tokens)])
    target.cut(0)
    drafter.absorb(features[: len(prompt)])
    for i, anchor in enumerate(answer[:-1]):
        yield i, drafter.propose(anchor)
        drafter.absorb(features[len(prompt) + i :][:1])
    engine._live.cut(0)


def matches(tree: DraftTree, future: list[int]) -> int:
    """How far the tree follows the text."""
    at, n = ROOT, 0
    for token in future:
        at = next((c for c in tree.children.get(at, ()) if tree.token[c] == token), ROOT)
        if at == ROOT:
            break
        n += 1
    return n


def rounds(accepted: list[int]) -> np.ndarray:
    """[tokens, rounds] of a run that starts at position 0 and jumps from round to round."""
    at = n = 0
    while at < len(accepted):
        at += accepted[at] + 1
        n += 1
    return np.array([at, n], float)


if __name__ == "__main__":
    main()
