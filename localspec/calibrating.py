"""Recording what calibration needs: the drafter's guesses along text that the target writes itself.

Drafts at every position of an answer are compared with what the target goes on to say; plain
decoding of the answer gives both the features to draft from and the truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localspec.calibration import Nodes, Records, log_odds_of
from localspec.drafter import Drafter
from localspec.drafting import DraftOptions
from localspec.errors import LocalspecError
from localspec.sampling import SamplingParams
from localspec.tree import ROOT, Block, DraftTree, build_tree

if TYPE_CHECKING:
    from localspec.engine import Engine
    from localspec.heads import Heads
    from localspec.template import ChatTemplate

# Trees as wide as the policy's, cut to the nodes that are ever verified where it pays.
_NODES, _CHILDREN, _FRONTIER = 31, 4, 12
_PLAIN = DraftOptions(tokens=0)
_PLACE = "LOCALSPEC-MESSAGE"
# What the target believes to be for decides what it makes users ask.
_ROLES = (
    None,
    "You are a programming assistant. You write short Python functions that pass the user's tests.",
    "You are a mathematics teacher. You solve word problems and competition problems step by step.",
    "You are a writer. You write and edit stories, letters, articles and summaries.",
)
_LONGEST_MESSAGE = 96


def own_messages(engine: Engine, count: int, *, seed: int = 0) -> Iterator[str]:
    """User messages that the target writes itself, after the header of the user's turn.

    An instruct model has seen so many user messages that it goes on with one of its own. Where the
    template takes system messages, some of them make it write about code, mathematics and prose.

    Args:
        engine: an engine whose target has a chat template.
        count: how many.
        seed: same seed, same messages.

    Raises:
        LocalspecError: the target has no chat template, or one that hides where a message goes.
    """
    headers = [engine.tokenize(header) for header in _headers(engine)]
    for i in range(count):
        ids = headers[i % len(headers)]
        for attempt in range(8):
            params = SamplingParams(temperature=1.0, top_p=0.95, seed=(seed + i) * 8 + attempt)
            result = engine.complete(ids, params, max_tokens=_LONGEST_MESSAGE, draft=_PLAIN)
            if result.text.strip():
                yield result.text.strip()
                break


def _headers(engine: Engine) -> list[str]:
    from localspec.chat import chat_template

    return user_headers(chat_template(engine))


def user_headers(template: ChatTemplate) -> list[str]:
    """Texts of conversations up to where the user's first message begins.

    Raises:
        LocalspecError: the template fails, or hides where a message goes.
    """
    headers: list[str] = []
    for role in _ROLES:
        system = [] if role is None else [{"role": "system", "content": role}]
        try:
            whole = template.render([*system, {"role": "user", "content": _PLACE}])
        except LocalspecError:
            if role is None:
                raise
            continue  # takes no system message
        header, found, _ = whole.partition(_PLACE)
        if found and header and header not in headers:
            headers.append(header)
    if not headers:
        raise LocalspecError(
            "the chat template has no header for user messages; give some with --prompts FILE"
        )
    return headers


def checked_drafter(engine: Engine) -> Drafter:
    """An engine's drafter.

    Raises:
        LocalspecError: it has none, or one that does not draft in blocks.
    """
    if engine._drafter is None:
        raise LocalspecError("there is nothing to calibrate without a drafter; give one with -d")
    if not isinstance(engine._drafter, Drafter):
        raise LocalspecError(
            "only DSpark and DFlash drafters are calibrated; leave this one as it is"
        )
    return engine._drafter


def rendered(engine: Engine, message: str) -> list[int]:
    """A prompt: the message in the chat template, or as it is for a target without one."""
    from localspec.chat import chat_template

    if engine.model.chat_template is None:
        return engine.tokenize(message)
    return engine.tokenize(chat_template(engine).render([{"role": "user", "content": message}]))


def record(
    engine: Engine, prompt: Sequence[int], *, max_tokens: int, params: SamplingParams | None = None
) -> Records:
    """Draft at every position of the target's answer to one prompt.

    Args:
        engine: an engine with a drafter.
        prompt: tokens.
        max_tokens: most tokens of the answer.
        params: how the answer is sampled; greedy when left out.

    Returns:
        The drafted nodes; positions whose future is shorter than a block are left out.

    Raises:
        LocalspecError: the engine has no drafter.
    """
    drafter = checked_drafter(engine)
    answer: list[int] = []
    drafts: list[tuple[Parts, Parts]] = []
    for step in engine.generate(prompt, params, max_tokens=max_tokens, draft=_PLAIN):
        answer.extend(step.token_ids)
        if step.finish_reason is None and step.token_ids:
            block = drafter.propose(answer[-1])
            chain = build_tree(block, drafter.heads, budget=block.depth, children=1, frontier=1)
            tree = build_tree(
                block, drafter.heads, budget=_NODES, children=_CHILDREN, frontier=_FRONTIER
            )
            drafts.append((_parts(chain, block, drafter.heads), _parts(tree, block, drafter.heads)))
    depth = drafter.info.max_depth
    # Position i drafts what follows answer[i].
    futures = [answer[i + 1 : i + 1 + depth] for i in range(len(drafts))]
    known = [i for i, future in enumerate(futures) if len(future) == depth]
    chains, trees = (_nodes([(drafts[i][kind], futures[i]) for i in known]) for kind in (0, 1))
    return Records(chains, trees, drafter.heads.has_confidence)


Parts = tuple[DraftTree, npt.NDArray[np.float32], npt.NDArray[np.float32]]


def _parts(tree: DraftTree, block: Block, heads: Heads) -> Parts:
    """A tree with, per node, its own log p and its parent's confidence in log odds."""
    above = np.where(tree.parent == ROOT, 0, tree.score[tree.parent])
    confidence = np.zeros(len(tree), np.float32)
    if heads.has_confidence and block.hidden is not None:
        parents = np.where(tree.parent == ROOT, block.anchor, tree.token[tree.parent])
        for d in range(1, int(tree.depth.max(initial=0)) + 1):
            at = tree.depth == d
            confidence[at] = log_odds_of(heads.confidence(parents[at], block.hidden[d - 1]))
    return tree, (tree.score - above).astype(np.float32), confidence


def _nodes(drafts: Sequence[tuple[Parts, Sequence[int]]]) -> Nodes:
    parts: list[Nodes] = []
    for (tree, log_p, confidence), future in drafts:
        right = np.zeros(len(tree), bool)
        first = np.zeros(len(tree), bool)
        # Siblings are in falling order of probability.
        first[np.unique(tree.parent, return_index=True)[1]] = True
        for i in range(len(tree)):
            p, d = int(tree.parent[i]), int(tree.depth[i])
            right[i] = (p == ROOT or right[p]) and tree.token[i] == future[d - 1]
        parent, depth = tree.parent.astype(np.int64), tree.depth - 1
        parts.append(Nodes(parent, depth, first, log_p, confidence, right))
    return Nodes.joined(parts)
