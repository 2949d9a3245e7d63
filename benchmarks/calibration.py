"""How far the odds of drafted tokens are off on prompts that no weight was fitted to.

    python benchmarks/calibration.py [--prompts 16] [--tokens 256]

Expected calibration error of path survival per depth (10 bins), on greedy answers to the prompt
files: of the drafter's own probabilities, of the calibration, and of the calibration with what the
policy learns on the way. That last one is for the rounds of a chain that is drafted all the time,
instead of every position; "rounds" has the calibration alone on the same ones. "chance" is what
perfect odds would show if every position were a text of its own; those of one answer are alike, so
that not all of the rest is error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from common import PROMPT_FILES, first_turns, markdown_head, markdown_row, pair_parser
from localspec import calibration_file
from localspec.calibrating import record, rendered
from localspec.calibration import (
    Calibration,
    Nodes,
    Records,
    errors_by_depth,
    expected_calibration_error,
    survival,
)
from localspec.engine import Engine
from localspec.odds import Survival

Floats = npt.NDArray[np.float64]


def main() -> None:
    """Print the errors."""
    parser = pair_parser(__doc__, prompts=16, tokens=256)
    parser.add_argument("--files", nargs="+", default=PROMPT_FILES)
    args = parser.parse_args()
    threads = args.threads or 1
    with Engine.load(args.target, args.drafter, n_ctx=2048, n_threads=threads) as engine:
        answers = [
            record(engine, rendered(engine, message), max_tokens=args.tokens)
            for name in args.files
            for message in first_turns(name, args.prompts)
        ]
    whole = Records.joined(answers)
    depths = int(whole.chain.depth.max()) + 1
    table = calibration_file.load(args.drafter, depths) or Calibration.identity(depths)
    print(f"{int((whole.chain.depth == 0).sum())} positions of {len(answers)} answers\n")
    print(markdown_head("error in %", *(f"depth {d + 1}" for d in range(depths))))
    for name, nodes in (("chain", whole.chain), ("tree", whole.tree)):
        for how, log_odds in (("before", nodes.logit_p), ("after", table.log_odds(nodes))):
            show(f"{name}, {how}", errors_by_depth(nodes, survival(nodes, log_odds), depths))
    show("chain, chance", chance(whole.chain, survival(whole.chain, table.log_odds(whole.chain))))
    chains = [a.chain for a in answers]
    for how, learns in (("rounds", False), ("rounds, learning", True)):
        predicted, right = of_rounds(chains, table, learns)
        show(f"chain, {how}", [error(predicted[:, d], right[:, d]) for d in range(depths)])


def show(name: str, errors: list[float]) -> None:
    """One row of the table."""
    print(markdown_row([name, *(f"{100 * e:.1f}" for e in errors)]), flush=True)


def error(predicted: Floats, right: Floats) -> float:
    """Of the rounds that went so deep."""
    known = ~np.isnan(predicted)
    return expected_calibration_error(predicted[known], right[known] > 0)


def chance(chain: Nodes, predicted: Floats, draws: int = 20) -> list[float]:
    """Mean errors of texts that follow the predictions exactly."""
    rng = np.random.default_rng(0)
    depths = int(chain.depth.max()) + 1
    found = np.zeros((draws, depths))
    for draw in range(draws):
        right = np.ones(len(chain) + 1, bool)  # the last one is the anchor, parent -1
        for d in range(depths):
            at = np.flatnonzero(chain.depth == d)
            above = np.append(predicted, 1.0)[chain.parent[at]]
            right[at] = right[chain.parent[at]] & (rng.random(len(at)) * above < predicted[at])
            found[draw, d] = expected_calibration_error(predicted[at], right[at])
    out: list[float] = found.mean(axis=0).tolist()
    return out


def of_rounds(answers: list[Nodes], table: Calibration, learns: bool) -> tuple[Floats, Floats]:
    """[rounds, D] survival as the policy estimates it before each round, and what came true; NaN
    where an answer ended before. An engine goes on learning from answer to answer."""
    depths = table.depths
    policy = Survival(depths, calibration=table)
    predicted, right = [], []
    for chain in answers:
        log_odds = table.log_odds(chain)
        starts = np.append(np.flatnonzero(chain.depth == 0), len(chain))
        at = 0
        while at < len(starts) - 1:
            nodes = slice(starts[at], starts[at + 1])
            moved = (policy.offsets - policy.start)[chain.depth[nodes]]
            odds = 1 / (1 + np.exp(-(log_odds[nodes] + moved)))
            row = np.full((2, depths), np.nan)
            row[:, : len(odds)] = np.cumprod(odds), chain.right[nodes]
            predicted.append(row[0])
            right.append(row[1])
            accepted = int(chain.right[nodes].sum())
            for d in range(min(accepted + 1, len(odds)) if learns else 0):
                policy.observe(d, float(odds[d]), d < accepted)
            at += accepted + 1
    return np.array(predicted), np.array(right)


if __name__ == "__main__":
    main()
