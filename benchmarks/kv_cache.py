"""Does the KV cache stay what it should be after thousands of rounds of random trees?

    python benchmarks/kv_cache.py [--target T.gguf] [--rounds 5000]

Random trees are verified and random paths committed; now and then the conversation is cut back.
Every so often the logits of the next token are compared with a fresh decode of the same tokens.
"""

from __future__ import annotations

import argparse

import numpy as np

from localspec import pairs
from localspec.engine import Engine
from localspec.tree import ROOT, DraftTree, merge_branch


def main() -> None:
    """Print the difference at every check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default=None)
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--longest", type=int, default=600)
    parser.add_argument("--nodes", type=int, default=15)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    path = args.target or pairs.default_target()
    engines = [Engine.load(path, n_ctx=args.longest + 128) for _ in range(2)]
    model = engines[0].model
    target, fresh = (engine._target for engine in engines)
    text = [int(t) for t in rng.integers(0, model.n_vocab, 40)]
    for _ in target.prefill(text):
        pass
    for done in range(1, args.rounds + 1):
        anchor = int(rng.integers(model.n_vocab))
        tree = random_tree(rng, args.nodes, model.n_vocab)
        target.verify(anchor, tree)
        path = tree.path(int(rng.integers(len(tree))))
        path = path[: int(rng.integers(len(path) + 1))]
        target.commit(path)
        text += [anchor, *(int(tree.token[i]) for i in path)]
        assert target.n_past == len(text)
        assert target.context.seq_end(0) == len(text) - 1
        if len(text) > args.longest:
            text = text[: int(rng.integers(40, args.longest // 2))]
            target.cut(len(text))
        if done % args.every == 0:
            probe = int(rng.integers(model.n_vocab))
            ours = target.verify(probe, DraftTree.empty())[0].copy()
            target.cut(len(text))
            fresh.cut(0)
            for _ in fresh.prefill([*text, probe]):
                pass
            gap = np.abs(ours - fresh.logits()[0])
            print(
                f"round {done}: {len(text)} tokens, logits differ by {gap.mean():.4f} on average, "
                f"{gap.max():.4f} at most",
                flush=True,
            )


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> DraftTree:
    """A tree of random shape and tokens."""
    tree = DraftTree.empty()
    while len(tree) < nodes:
        at = int(rng.integers(-1, len(tree))) if len(tree) else ROOT
        start = [] if at == ROOT else [int(tree.token[i]) for i in tree.path(at)]
        chain = [*start, *(int(t) for t in rng.integers(0, vocab, int(rng.integers(1, 5))))]
        tree = merge_branch(tree, chain, [-float(i) for i in range(len(chain))])
    return tree.prune_leaves(32)


if __name__ == "__main__":
    main()
