"""The policy on machines one does not have: recorded rounds replayed under published cost curves.

    python benchmarks/simulate.py record OUT.npz [--target T --drafter D] [--messages FILE.json]
    python benchmarks/simulate.py replay REC.npz [REC.npz ...] [--share 0.19]

`record` lets a pair draft at every position of its own greedy text. `replay` runs the real
`AutoPolicy` over that under every curve of cost_curves.json and compares it with every fixed
choice in hindsight: tokens/s, the sizes it chose, its regret (the share of the best fixed
choice's speed that it misses), and how it does after the text changes its kind.

The drafter's pass is taken as `share` of the target's pass over one block: 5 layers of 36 and the
output matrix make 0.19 of the weights of an 8B target, whose time these curves have.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import PROMPT_FILES, first_turns
from localspec import pairs
from localspec.cost_curve import CostCurve
from localspec.engine import Engine
from localspec.policy import AutoPolicy
from localspec.tree import ROOT, DraftTree
from recording import NODES, Trace, load, record, save
from trees import matches

CURVES = Path(__file__).with_name("cost_curves.json")
HOST_SECONDS = 0.001


@dataclass(frozen=True)
class Machine:
    """Costs of one device: T(n) for n = 1..64, one drafter pass, in seconds."""

    name: str
    target: np.ndarray
    block: float

    def policy(self, depths: int) -> AutoPolicy:
        """A fresh policy that was tuned on this machine."""
        sizes = range(1, len(self.target) + 1)
        curve = CostCurve(list(sizes), [0], self.target[None])
        return AutoPolicy(curve, block_seconds=self.block, host_seconds=HOST_SECONDS, depths=depths)

    def seconds(self, nodes: int, drafted: bool) -> float:
        """One round."""
        return float(self.target[nodes]) + (self.block + HOST_SECONDS if drafted else 0.0)


@dataclass
class Run:
    """What a replay came to; one entry per round."""

    tokens: list[int]
    seconds: list[float]
    sizes: list[int]

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / sum(self.seconds)


def machines(share: float, block: int) -> list[Machine]:
    """Every curve of cost_curves.json."""
    out = []
    for curve in json.loads(CURVES.read_text("utf-8"))["curves"]:
        ms = np.interp(np.arange(1, NODES + 2), curve["n"], curve["ms"])
        name = f"{curve['device']} · {curve['model']}"
        out.append(Machine(name, ms / 1000, share * float(ms[block - 1]) / 1000))
    return out


def fixed(traces: Sequence[Trace], machine: Machine, nodes: int, chain: bool) -> Run:
    """Every round verifies the best `nodes` nodes."""
    run = Run([], [], [])
    for trace in traces:
        at, last = 0, len(trace.answer) - 1
        while at < last:
            tree = (trace.chains if chain else trace.trees)[at].best(nodes)
            n = matches(tree, trace.answer[at + 1 :])
            run.tokens.append(n + 1)
            run.seconds.append(machine.seconds(len(tree), nodes > 0))
            run.sizes.append(len(tree))
            at += n + 1
    return run


def auto(traces: Sequence[Trace], machine: Machine, policy: AutoPolicy | None = None) -> Run:
    """The policy decides; it learns from round to round and from trace to trace."""
    policy = policy or machine.policy(max(t.depth for t in traces))
    run = Run([], [], [])
    for trace in traces:
        at, last = 0, len(trace.answer) - 1
        while at < last:
            asked = policy.pacing.ask()
            whole = estimated(trace.trees[at], policy) if asked else DraftTree.empty()
            tree = DraftTree.empty()
            if asked:
                tree = policy.choose(whole, trace.start + at)
            n = matches(tree, trace.answer[at + 1 :])
            committed = trace.answer[at + 1 : at + n + 2]
            policy.last_size = len(tree) + 1
            policy.learn_draft(whole, committed)
            run.tokens.append(n + 1)
            run.seconds.append(machine.seconds(len(tree), asked))
            run.sizes.append(len(tree))
            at += n + 1
    return run


def estimated(tree: DraftTree, policy: AutoPolicy) -> DraftTree:
    """The tree with the policy's own estimates as scores."""
    score = np.zeros(len(tree), np.float32)
    own = tree.score - np.where(tree.parent == ROOT, 0.0, tree.score[tree.parent])
    for depth in range(1, int(tree.depth.max(initial=0)) + 1):
        at = np.flatnonzero(tree.depth == depth)
        above = 0.0 if depth == 1 else score[tree.parent[at]]
        score[at] = above + policy.survival.log_odds(depth - 1, own[at].astype(np.float32))
    return DraftTree(tree.token, tree.parent, tree.depth, score)


def best(runs: dict[int, Run]) -> tuple[int, Run]:
    """The fastest of fixed choices."""
    nodes = max(runs, key=lambda n: runs[n].speed)
    return nodes, runs[nodes]


def replay(traces: Sequence[Trace], machine: Machine) -> dict[str, object]:
    """Compare the policy with all fixed choices on one machine."""
    depths = max(t.depth for t in traces)
    trees = {n: fixed(traces, machine, n, False) for n in range(0, 33)}
    trees |= {n: fixed(traces, machine, n, False) for n in (40, 47, 56, 63)}
    chains = {n: fixed(traces, machine, n, True) for n in range(0, depths + 1)}
    chosen = auto(traces, machine)
    n_tree, tree = best(trees)
    n_chain, chain = best(chains)
    top = max(tree.speed, chain.speed)
    return {
        "plain": trees[0].speed,
        "chain": (n_chain, chain.speed),
        "tree": (n_tree, tree.speed),
        "auto": chosen.speed,
        "regret": 1 - chosen.speed / top,
        "over chain": chosen.speed / chain.speed,
        "sizes": Counter(chosen.sizes).most_common(4),
    }


def after_switch(before: Sequence[Trace], after: Sequence[Trace], machine: Machine) -> float:
    """The policy's speed from 40 rounds after a change of text on, over the best fixed choice's.

    Both over the same stretch of text.
    """
    policy = machine.policy(max(t.depth for t in (*before, *after)))
    auto(before, machine, policy)
    run = auto(after, machine, policy)
    sizes = (*range(8), 10, 12, 15, 16, 20, 24, 31)
    ratios = [fixed(after, machine, n, False).speed for n in sizes]
    late = Run(run.tokens[40:], run.seconds[40:], run.sizes[40:])
    return late.speed / max(ratios) if late.tokens else float("nan")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("out", type=Path)
    target, drafter = pairs.default_pair()
    recorder.add_argument("--target", default=target)
    recorder.add_argument("--drafter", default=drafter)
    recorder.add_argument("--messages", type=Path, help="JSON list of user messages")
    recorder.add_argument("--prompts", type=int, default=4, help="prompts per file")
    recorder.add_argument("--tokens", type=int, default=128)
    recorder.add_argument("--threads", type=int, default=0)
    player = commands.add_parser("replay")
    player.add_argument("recordings", nargs="+", type=Path)
    player.add_argument("--share", type=float, default=0.19)
    args = parser.parse_args()
    if args.command == "record":
        run_record(args)
    else:
        run_replay(args)


def run_record(args: argparse.Namespace) -> None:
    """Record a pair."""
    traces: list[Trace] = []
    with Engine.load(args.target, args.drafter, n_ctx=2048, n_threads=args.threads) as engine:
        if args.messages:
            messages = json.loads(args.messages.read_text("utf-8"))[: args.prompts]
            traces += record(engine, args.messages.stem, messages, args.tokens)
        else:
            for file in PROMPT_FILES:
                traces += record(engine, file, first_turns(file, args.prompts), args.tokens)
    save(args.out, traces)
    print(f"{args.out}: {len(traces)} answers, {sum(len(t.trees) for t in traces)} positions")


def run_replay(args: argparse.Namespace) -> None:
    """Replay recordings on every machine."""
    print(
        f"{'recording':24s} {'machine':48s} {'plain':>6s} {'chain (n)':>12s} {'tree (n)':>12s} "
        f"{'auto':>7s} {'regret':>7s} {'/chain':>6s}  sizes"
    )
    everything = []
    for path in args.recordings:
        traces = [t for t in load(path) if len(t.answer) > 1]
        everything.append((path.stem, traces))
        for machine in machines(args.share, max(t.depth for t in traces)):
            r = replay(traces, machine)
            chain, tree = (f"{s:.1f} ({n})" for n, s in (r["chain"], r["tree"]))  # type: ignore[misc]
            sizes = " ".join(f"{n}:{count}" for n, count in r["sizes"])  # type: ignore[misc]
            print(
                f"{path.stem:24s} {machine.name:48s} {r['plain']:6.1f} {chain:>12s} {tree:>12s} "
                f"{r['auto']:7.1f} {r['regret']:7.1%} {r['over chain']:6.2f}  {sizes}",
                flush=True,
            )
    print("\n40 rounds after a change of text: speed of the policy over that of the best choice")
    kinds = [(f"{stem}:{label}", [t for t in traces if t.label == label])
             for stem, traces in everything
             for label in dict.fromkeys(t.label for t in traces)]  # fmt: skip
    pairs_of_kinds = [(a, b) for a in kinds for b in kinds if a is not b]
    if not pairs_of_kinds:
        return
    for i, name in enumerate(machine.name for machine in machines(args.share, 1)):
        ratios = {}
        for (kind, before), (other, after) in pairs_of_kinds:
            machine = machines(args.share, max(t.depth for t in (*before, *after)))[i]
            ratios[f"{kind} -> {other}"] = after_switch(before, after, machine)
        ratios = {k: ratio for k, ratio in ratios.items() if ratio == ratio}
        worst = min(ratios, key=lambda k: ratios[k])
        print(
            f"{name:48s} median {float(np.median(list(ratios.values()))):.3f}, "
            f"{sum(r < 0.95 for r in ratios.values())} of {len(ratios)} below 0.95, "
            f"worst {ratios[worst]:.3f} ({worst}), "
            f"code to chat {', '.join(f'{r:.3f}' for k, r in ratios.items() if code_to_chat(k))}",
            flush=True,
        )


def code_to_chat(change: str) -> bool:
    """Whether a change of text is from a file of programs to one of conversations."""
    before, after = (kind.rpartition(":")[2] for kind in change.split(" -> "))
    return before in ("humaneval", "mbpp") and after == "mt-bench"


if __name__ == "__main__":
    main()
