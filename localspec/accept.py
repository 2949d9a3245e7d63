"""Which drafted tokens are kept. Pure functions; no model in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localspec.errors import DeadEndError
from localspec.sampling import draw
from localspec.tree import ROOT, DraftTree, Proposal


@dataclass(frozen=True)
class Acceptance:
    """The outcome of one verification.

    Attributes:
        path: accepted nodes, root to leaf.
        bonus: the target's own token after them.
    """

    path: tuple[int, ...]
    bonus: int


def accept_match(tree: DraftTree, choose: Callable[[int, Sequence[int]], int]) -> Acceptance:
    """Walk the tree along the tokens that the target itself chooses.

    With the argmax as `choose` this is greedy acceptance; with a draw from the target's
    distribution it is the match rule, exact for every tree that does not depend on the draw: the
    token committed at each place is the one the target drew there.

    Args:
        tree: the draft.
        choose: (row, path tokens) -> token; row 0 is the anchor's, row i + 1 node i's.

    Raises:
        DeadEndError: there is no token to choose after the anchor.
    """
    children: dict[tuple[int, int], int] = {}
    for node in range(len(tree) - 1, -1, -1):  # of equal siblings the first one stays
        children[int(tree.parent[node]), int(tree.token[node])] = node
    path: list[int] = []
    tokens: list[int] = []
    at = ROOT
    while True:
        try:
            token = choose(at + 1, tokens)
        except DeadEndError:
            if not path:
                raise
            return _before_dead_end(path, tokens)
        child = children.get((at, token))
        if child is None:
            return Acceptance(tuple(path), token)
        path.append(child)
        tokens.append(token)
        at = child


def accept_rejection(
    tree: DraftTree,
    distribution: Callable[[int, Sequence[int]], npt.NDArray[np.float64]],
    rng: np.random.Generator,
) -> Acceptance:
    """Speculative sampling on a sampled tree, without replacement; exact.

    At a node with target distribution p, the children are tried in draw order. A child v is
    accepted with probability min(1, p(v) / q(v)); else p <- norm((p - q)+), and v leaves q, which
    is renormalised for the next one. A given (not drawn) child has q = 1 at its token. When all
    fail, the bonus token comes from what is left of p. (Leviathan et al., 2023; for several
    children Miao et al., 2024; without replacement Jeon et al., 2024.)

    Args:
        tree: a tree with `proposals`.
        distribution: (row, path tokens) -> [V] probabilities of the target; row 0 is the
            anchor's, row i + 1 node i's.
        rng: source of the draws; independent of those that made the tree.

    Raises:
        DeadEndError: there is no token to draw after the anchor.
    """
    assert tree.proposals is not None
    path: list[int] = []
    tokens: list[int] = []
    at = ROOT
    while True:
        try:
            p = distribution(at + 1, tokens)
        except DeadEndError:
            if not path:
                raise
            return _before_dead_end(path, tokens)
        accepted = None
        proposal = tree.proposals.get(at)
        if proposal is not None:
            accepted, p = _try_children(tree, at, proposal, p, rng)
        if accepted is None:
            return Acceptance(tuple(path), draw(p, float(rng.random())))
        path.append(accepted)
        tokens.append(int(tree.token[accepted]))
        at = accepted


def _before_dead_end(path: list[int], tokens: list[int]) -> Acceptance:
    """What was accepted where the target can say nothing more, so that no text is lost.

    The last token takes the bonus token's place: it is the target's own choice as well. The next
    round has nothing before the dead end then, and raises.
    """
    return Acceptance(tuple(path[:-1]), tokens[-1])


def _try_children(
    tree: DraftTree,
    at: int,
    proposal: Proposal,
    p: npt.NDArray[np.float64],
    rng: np.random.Generator,
) -> tuple[int | None, npt.NDArray[np.float64]]:
    """The accepted child of a node, or None and what is left of p."""
    p, q = p.copy(), proposal.probs.copy()
    for i, child in enumerate(tree.children[at]):
        token = int(tree.token[child])
        if i < proposal.fixed:
            if rng.random() < p[token]:
                return child, p
            p[token] = 0.0
        else:
            where = int(np.flatnonzero(proposal.ids == token)[0])
            if rng.random() * q[where] < p[token]:
                return child, p
            p[proposal.ids] = np.maximum(p[proposal.ids] - q, 0.0)
            q[where] = 0.0
            left = q.sum()
            q = q / left if left > 0 else q
        total = p.sum()
        if total <= 0:
            # Only rounding gets here: p and q were equal, and then every draw is accepted.
            return child, p
        p /= total
    return None, p
