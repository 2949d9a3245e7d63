"""Time of the Python parts of a round, on synthetic logits of realistic shape.

python benchmarks/host.py [--vocab 49152] [--rank 64] [--nodes 31]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from common import median
from localspec.accept import accept_match, accept_rejection
from localspec.heads import Heads
from localspec.sampled import sample_tree
from localspec.sampling import Sampler, SamplingParams
from localspec.topk import shortlist
from localspec.tree import SHORTLIST, Block, build_tree

DEPTH, WIDTH = 7, 576


def main() -> None:
    """Print the medians per part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=31)
    args = parser.parse_args()
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    w1, w2 = normal(args.vocab, args.rank), normal(args.vocab, args.rank).astype(np.float16)
    heads = Heads("vanilla", args.rank, w1.__getitem__, lambda ids: w2[ids].astype(np.float32))
    logits = 3 * normal(DEPTH, args.vocab)
    # A few tokens stand out at every depth, as they do with a trained drafter.
    logits[np.arange(DEPTH)[:, None], rng.integers(0, args.vocab, (DEPTH, 8))] += 12
    baked = np.concatenate([[1], logits[:-1].argmax(axis=1)]).astype(np.int32)
    block = Block(1, logits, normal(DEPTH, WIDTH), baked)
    rows = 3 * normal(args.nodes + 1, args.vocab)
    greedy = Sampler(SamplingParams(), [1])
    sampled = Sampler(SamplingParams(temperature=1.0, seed=0), [1])
    grown = build_tree(block, heads, budget=args.nodes, children=4, frontier=12)

    def draw_tree() -> object:
        return sample_tree(
            block,
            heads,
            rng=sampled.draft_rng,
            draft_distribution=sampled.draft_distribution,
            budget=args.nodes,
            width=4,
            most_leaves=32,
        )

    drawn = draw_tree()
    parts: dict[str, Callable[[], object]] = {
        "shortlists of all depths": lambda: [shortlist(row, SHORTLIST) for row in logits],
        "chain of 7": lambda: build_tree(block, heads, budget=7, children=1, frontier=1),
        "tree (heads, top-k, best N)": lambda: build_tree(
            block, heads, budget=args.nodes, children=4, frontier=12
        ),
        "sequence ids": lambda: (
            type(grown)(grown.token, grown.parent, grown.depth, grown.score).sequence_ids
        ),
        "greedy acceptance": lambda: accept_match(
            grown, lambda row, path: greedy.choose(rows[row], path)
        ),
        "sampled tree": draw_tree,
        "rejection": lambda: accept_rejection(
            drawn,  # type: ignore[arg-type]
            lambda row, path: sampled.distribution(rows[row], path),
            sampled.accept_rng,
        ),
    }
    print(f"V = {args.vocab}, rank {args.rank}, N = {args.nodes}; medians of 50 in ms")
    for name, part in parts.items():
        print(f"  {name:30s} {1e3 * median(timed(part) for _ in range(50)):7.3f}")


def timed(part: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    part()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
