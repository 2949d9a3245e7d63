"""Is what comes out of a round distributed as the target says?

The models need not run 200,000 times: the target's logits after the anchor and after every token
that can follow it, and the drafter's block at the anchor and at each of these tokens, are kept
(`Place`). Nor need the code between two random decisions: a round is a function of them, so it is
run once per sequence of decisions (`Decisions`) while every decision (the children drawn for a
node, the coin of a child, the token of the target) is drawn anew for each draw.

Covered, each by `DRAWS` = 200,000 pairs of tokens, settings and seeds fixed in advance:
temperature 0.7, 1.0, 1.5 x no truncation, top-k 20, top-p 0.9, min-p 0.05, repetition penalty 1.2
x chain, tree x match, rejection: 60 settings, and 4 with a logit bias. A pair is what one round
commits, or two rounds where the first commits a single token. First tokens are compared with the
target's own distribution, pairs with the product of its two, by chi-square with p > 0.001.

Beside that: 10,000 rounds of each rule without any of these shortcuts; the exact law of small
rounds, without chance; and wrong rules, which must fail the same chi-square.

The models are the golden ones where they are there (V = 512), else the tiny ones (V = 320).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import pytest
from conftest import prompt_of
from scipy.stats import chi2

from localspec import accept, sampled, sampling
from localspec.convert import convert
from localspec.engine import Engine, _accept
from localspec.heads import Heads, Linear
from localspec.sampled import sample_tree
from localspec.sampling import Sampler, SamplingParams
from localspec.tree import ROOT, Block, DraftTree, Proposal, build_tree

GOLDEN = Path(
    os.environ.get("LOCALSPEC_GOLDEN", Path(__file__).resolve().parents[1] / "../shared/golden")
)
F = np.float32
T = TypeVar("T")
N = TypeVar("N", int, float)

DRAWS = 200_000
SURE = 0.001
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "top-k 20": {"top_k": 20},
    "top-p 0.9": {"top_p": 0.9},
    "min-p 0.05": {"min_p": 0.05},
    "repetition 1.2": {"repetition_penalty": 1.2},
}
# At temperature 1 only: added to the logits, it changes every row.
BIAS: dict[str, dict[str, Any]] = {"bias": {"logit_bias": {t: t % 7 - 3 for t in range(300)}}}
# Two levels decide two tokens. The tree has two children at the anchor and two nodes below.
# Any q is exact, and few candidates make few different trees.
SHAPES = {
    "chain": {"budget": 2, "width": 1, "shortlist": 32},
    "tree": {"budget": 4, "width": 2, "shortlist": 8},
}


@dataclass(frozen=True)
class Setting:
    """One of the settings; `wrong` names a rule of WRONG."""

    temperature: float
    truncation: str
    shape: str
    rule: str
    seed: int
    wrong: str | None = None

    def __str__(self) -> str:
        return f"{self.temperature}, {self.truncation}, {self.shape}, {self.wrong or self.rule}"

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            acceptance=self.rule,
            seed=self.seed,
            **(TRUNCATIONS | BIAS)[self.truncation],
        )


SETTINGS = [
    Setting(*options, seed)
    for seed, options in enumerate(
        itertools.product((0.7, 1.0, 1.5), TRUNCATIONS, SHAPES, ("match", "rejection"))
    )
]
SETTINGS += [
    Setting(*options, seed)
    for seed, options in enumerate(
        itertools.product((1.0,), BIAS, SHAPES, ("match", "rejection")), len(SETTINGS)
    )
]


# ---- one place in one text


@dataclass(frozen=True)
class Place:
    """What the models say there.

    history: prompt and text, the anchor last; root: [V] target logits after the anchor; second:
    [V, V] after the anchor and each token; logits, hidden, baked: the drafter's block at the
    anchor (two depths); next_*: its first depth at every token that may become the next anchor;
    the rest are the heads (vanilla, with confidence).
    """

    history: np.ndarray
    root: np.ndarray
    second: np.ndarray
    logits: np.ndarray
    hidden: np.ndarray
    baked: np.ndarray
    next_logits: np.ndarray
    next_hidden: np.ndarray
    w1: np.ndarray
    w2: np.ndarray
    weight: np.ndarray
    bias: np.ndarray

    @property
    def heads(self) -> Heads:
        return Heads(
            "vanilla",
            self.w1.shape[1],
            self.w1.__getitem__,
            self.w2.__getitem__,
            confidence=Linear(self.weight, self.bias),
        )

    def block(self, token: int | None) -> Block:
        """The drafter's block at the anchor (None), or once `token` has become the anchor."""
        if token is None:
            return Block(int(self.history[-1]), self.logits, self.hidden, self.baked)
        baked = np.array([token], np.int32)
        return Block(token, self.next_logits[token][None], self.next_hidden[token][None], baked)


def look(target: Path, drafter: Path, text: Sequence[int]) -> Place:
    """Run the models behind `text`, whose last token is the anchor."""
    with Engine.load(target, drafter, n_ctx=256, n_threads=1) as engine:
        vocab, n = engine.model.n_vocab, len(text) - 1
        models, drafts = engine._target, engine._drafter
        assert drafts is not None
        for _, new in models.prefill(text[:-1]):
            drafts.absorb(models.features(new))
        block = drafts.propose(text[-1])
        assert block.hidden is not None and block.baked is not None
        first = [np.array(part[:2]) for part in (block.logits, block.hidden, block.baked)]
        second = np.zeros((vocab, vocab), F)
        for at in range(0, vocab, 16):
            tokens = np.arange(at, at + 16, dtype=np.int32)
            flat = np.full(16, ROOT, np.int32)
            tree = DraftTree(tokens, flat, np.ones(16, np.int32), np.zeros(16, F))
            models.cut(n)
            rows = models.verify(text[-1], tree)
            root = np.array(rows[0])
            second[at : at + 16] = rows[1:]
        drafts.absorb(models.features([0]))
        later = []
        for token in range(vocab):
            block = drafts.propose(token)
            assert block.hidden is not None
            later.append((np.array(block.logits[0]), np.array(block.hidden[0])))
        heads = drafts.heads
        every = np.arange(vocab)
        assert heads._w2 is not None and heads._confidence is not None
        return Place(
            np.array(text),
            root,
            second,
            *first,
            np.stack([logits for logits, _ in later]),
            np.stack([hidden for _, hidden in later]),
            np.array(heads.embed(every)),
            np.array(heads._w2(every)),
            np.array(heads._confidence.weight),
            np.array(heads._confidence.bias),
        )


@pytest.fixture(scope="module")
def place_file(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """A file with a place where the target is unsure of two tokens in a row and the drafter sees
    them otherwise (total variation 0.26 and 0.59; with the tiny models 0.46 and 0.49)."""
    folder = tmp_path_factory.mktemp("exact-sampling")
    if GOLDEN.is_dir():
        target = GOLDEN / "tiny-qwen3" / "tiny-qwen3-f32.gguf"
        drafter = folder / "drafter.gguf"
        convert(GOLDEN / "dspark-vanilla", target, drafter, outtype="f32")
        runs = json.loads((GOLDEN / "dspark-vanilla" / "golden.json").read_text())
        text = runs[2]["output_ids"][:40]
    else:
        target = request.getfixturevalue("tiny_target").gguf
        drafter = request.getfixturevalue("tiny_drafter")("vanilla")[1]
        text = prompt_of(10)
    place = look(target, drafter, text)
    np.savez(folder / "place.npz", **dataclasses.asdict(place))
    return str(folder / "place.npz")


@lru_cache
def load_place(path: str) -> Place:
    with np.load(path) as file:
        return Place(**file)


# ---- the target's own distribution, written down once more


def own_distribution(
    logits: np.ndarray, params: SamplingParams, history: Sequence[int]
) -> np.ndarray:
    """Bias, penalty, top-k, top-p, min-p, temperature; [V] float64."""
    z = logits.astype(float)
    for token, value in params.logit_bias.items():
        z[token] += value
    for token in set(history[-params.penalty_window :]):
        z[token] *= params.repetition_penalty if z[token] < 0 else 1 / params.repetition_penalty
    order = np.argsort(-z, kind="stable")
    p = np.exp(z[order] - z[order[0]])
    keep = np.ones(len(z), bool)
    if params.top_k:
        keep[params.top_k :] = False
    share = np.where(keep, p, 0) / p[keep].sum()
    if params.top_p < 1:
        keep &= np.cumsum(share) - share < params.top_p
    keep &= p >= params.min_p
    out = np.zeros(len(z))
    out[order[keep]] = p[keep] ** (1 / params.temperature)
    return out / out.sum()


def own_pairs(place: Place, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """([V] of the first token, [V, V] of pairs)."""
    history = place.history.tolist()
    first = own_distribution(place.root, params, history)
    pairs = np.zeros((len(first), len(first)))
    for token in np.flatnonzero(first).tolist():
        pairs[token] = first[token] * own_distribution(
            place.second[token], params, [*history, token]
        )
    return first, pairs


def p_value(counts: np.ndarray, p: np.ndarray) -> float:
    """Chi-square of some counts; outcomes expected less than 10 times are taken together."""
    counts, expected = counts.ravel(), p.ravel() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    common = expected >= 10
    seen, due = counts[common], expected[common]
    if not common.all():
        seen, due = np.append(seen, counts[~common].sum()), np.append(due, expected[~common].sum())
    due, seen = due[due > 0], seen[due > 0]
    assert len(due) > 1
    return float(chi2.sf(((seen - due) ** 2 / due).sum(), len(due) - 1))


# ---- the draws

Answer = Any


@dataclass(frozen=True)
class Children:
    """Which children are drawn (`sampled._draw`)."""

    probs: np.ndarray
    count: int

    def draw(self, times: int, rng: np.random.Generator) -> Counter[Answer]:
        possible = np.flatnonzero(self.probs)
        count = min(self.count, len(possible))
        if count == 0:
            return Counter({(): times})
        keys = np.log(self.probs[possible]) + rng.gumbel(size=(times, len(possible)))
        order = np.argsort(-keys, axis=1, kind="stable")[:, :count]
        return Counter(map(tuple, possible[order].tolist()))

    def law(self) -> list[tuple[Answer, float]]:
        possible = np.flatnonzero(self.probs).tolist()
        out = []
        for row in itertools.permutations(possible, min(self.count, len(possible))):
            chance, left = 1.0, 1.0
            for child in row:
                chance *= self.probs[child] / left
                left -= self.probs[child]
            out.append((row, float(chance)))
        return out

    def first(self) -> Answer:
        best = np.argsort(-self.probs, kind="stable")
        return tuple(best[: min(self.count, np.count_nonzero(self.probs))].tolist())


@dataclass(frozen=True)
class Coin:
    """Whether u * scale < p."""

    scale: float
    p: float

    def draw(self, times: int, rng: np.random.Generator) -> Counter[Answer]:
        heads = int((rng.random(times) * self.scale < self.p).sum())
        return +Counter({True: heads, False: times - heads})

    def law(self) -> list[tuple[Answer, float]]:
        heads = min(1.0, self.p / self.scale)
        return [(answer, p) for answer, p in ((True, heads), (False, 1 - heads)) if p > 0]

    def first(self) -> Answer:
        return self.p > 0


@dataclass(frozen=True)
class Token:
    """Which token the target draws (`sampling.draw`)."""

    p: np.ndarray

    def draw(self, times: int, rng: np.random.Generator) -> Counter[Answer]:
        cumulative = np.cumsum(self.p)
        at = np.searchsorted(cumulative, rng.random(times) * cumulative[-1], side="right")
        return Counter(at.tolist())

    def law(self) -> list[tuple[Answer, float]]:
        possible = np.flatnonzero(self.p)
        return list(zip(possible.tolist(), (self.p[possible] / self.p.sum()).tolist(), strict=True))

    def first(self) -> Answer:
        return int(self.p.argmax())


Question = Children | Coin | Token


class Number:
    """A uniform number that is used once: in one comparison or in one draw of a token."""

    def __init__(self, decisions: Decisions, scale: float = 1.0) -> None:
        self._decisions, self._scale, self._used = decisions, scale, False

    def __mul__(self, factor: float) -> Number:
        self._use()
        return Number(self._decisions, self._scale * float(factor))

    def __lt__(self, p: float) -> bool:
        self._use()
        return bool(self._decisions.ask(Coin(self._scale, float(p))))

    def __float__(self) -> float:
        self._use()
        return self._decisions.fresh()

    def _use(self) -> None:
        assert not self._used, "one random number decides two things"
        self._used = True


class Decisions:
    """Answers for everything a run draws; also the generator that the run believes to draw from.

    The first answers are given, the others are the likeliest ones, and what was asked is noted.
    """

    def __init__(self) -> None:
        self._given: tuple[Answer, ...] = ()
        self._answers: list[Answer] = []
        self._asked: list[Question] = []
        self._floats: set[float] = set()

    def random(self) -> Number:
        return Number(self)

    def fresh(self) -> float:
        """A float that stands for a number not used yet."""
        self._floats.add(len(self._floats) / 2**20)
        return max(self._floats)

    def ask(self, question: Question) -> Answer:
        at = len(self._answers)
        if at >= len(self._given):
            self._asked.append(question)
        self._answers.append(question.first() if at >= len(self._given) else self._given[at])
        return self._answers[-1]

    @contextlib.contextmanager
    def deciding(self) -> Iterator[Decisions]:
        """Every draw is a decision of this object."""

        def draw_children(probs: np.ndarray, count: int, rng: object) -> np.ndarray:
            assert rng is self
            return np.array(self.ask(Children(probs, count)), np.intp)

        def draw(p: np.ndarray, u: float) -> int:
            assert u in self._floats, "one random number decides two things"
            self._floats.remove(u)
            return int(self.ask(Token(p)))

        with (
            mock.patch.object(sampled, "_draw", draw_children),
            mock.patch.object(sampling, "draw", draw),
            mock.patch.object(accept, "draw", draw),
        ):
            yield self

    def outcomes(
        self,
        run: Callable[[], T],
        share: Callable[[Question, N], Iterable[tuple[Answer, N]]],
        all: N,
    ) -> Iterator[tuple[T, N]]:
        """What `run` returns and how often.

        Args:
            run: a function of the decisions it asks for.
            share: how the runs that come to a decision share out among its answers.
            all: number (or probability) of all runs.
        """
        known: dict[tuple[Answer, ...], Question | tuple[T]] = {}
        waiting: list[tuple[tuple[Answer, ...], N]] = [((), all)]
        while waiting:
            given, n = waiting.pop()
            if given not in known:
                self._given, self._answers, self._asked, self._floats = given, [], [], set()
                result = run()
                for i, question in enumerate(self._asked, len(given)):
                    known[tuple(self._answers[:i])] = question
                known[tuple(self._answers)] = (result,)
            found = known.pop(given)
            if isinstance(found, tuple):
                yield found[0], n
            else:
                waiting += [((*given, answer), part) for answer, part in share(found, n)]


def test_decisions_are_those_of_the_real_functions():
    # Same numbers, same answers.
    rng = np.random.default_rng(0)
    for seed, count in enumerate([0, 1, 2, 3, 5, 9] * 3):
        probs = rng.dirichlet(np.full(9, 0.3)) * (rng.random(9) < 0.6)
        one = np.random.default_rng(seed)
        real = Counter(tuple(sampled._draw(probs, count, one).tolist()) for _ in range(50))
        assert Children(probs, count).draw(50, np.random.default_rng(seed)) == real
        probs[4] += 0.1
        one = np.random.default_rng(seed)
        real = Counter(sampling.draw(probs, float(one.random())) for _ in range(50))
        assert Token(probs).draw(50, np.random.default_rng(seed)) == real


def count_pairs(path: str, setting: Setting, draws: int = DRAWS) -> np.ndarray:
    """How often the rounds of a setting committed each pair of tokens, [V, V]."""
    place, rng = load_place(path), np.random.default_rng(setting.seed)
    table = np.zeros((len(place.root),) * 2, np.int64)

    def share(question: Question, times: int) -> Iterable[tuple[Answer, int]]:
        return question.draw(times, rng).items()

    with Decisions().deciding() as decisions, wrong(setting.wrong):
        first, singles = Round(place, setting, decisions), Counter[int]()
        for tree, times in decisions.outcomes(first.draft, share, draws):
            for tokens, n in decisions.outcomes(lambda: first.accept(tree), share, times):  # noqa: B023
                if len(tokens) == 1:
                    singles[tokens[0]] += n
                else:
                    table[tokens[0], tokens[1]] += n
        for token, times in singles.items():
            second = Round(place, setting, decisions, token)
            for tree, m in decisions.outcomes(second.draft, share, times):
                for tokens, n in decisions.outcomes(lambda: second.accept(tree), share, m):  # noqa: B023
                    table[token, tokens[0]] += n
    return table


class Round:
    """A round of the engine at a place, the target's pass looked up.

    Args:
        place: where.
        setting: how.
        rng: source of every draw; the sampler's own when left out.
        token: None at the anchor; else the token that was committed behind it, now the anchor.
    """

    def __init__(
        self, place: Place, setting: Setting, rng: Any = None, token: int | None = None
    ) -> None:
        self._place, self._token, self._shape = place, token, SHAPES[setting.shape]
        history = [*place.history.tolist(), *(() if token is None else (token,))]
        self.sampler = Sampler(setting.params, history)
        if rng is not None:
            self.sampler._rng = self.sampler.draft_rng = self.sampler.accept_rng = rng
        self._rejects, self._change = setting.params.rejects, CHANGES.get(setting.wrong or "")
        self._block, self._heads = place.block(token), place.heads
        # What comes after the second token is no matter: always token 0.
        self._later = np.where(np.arange(len(place.root)) == 0, F(1e4), F(-1e4))

    def draft(self) -> DraftTree:
        budget, width = self._shape["budget"], self._shape["width"]
        if not self._rejects:
            return build_tree(self._block, self._heads, budget=budget, children=width, frontier=4)
        tree = sample_tree(
            self._block,
            self._heads,
            rng=self.sampler.draft_rng,
            draft_distribution=self.sampler.draft_distribution,
            budget=budget,
            width=width,
            most_leaves=32,
            shortlist=self._shape["shortlist"],
        )
        return tree if self._change is None else self._change(tree)

    def accept(self, tree: DraftTree) -> list[int]:
        """The tokens that are committed."""
        place, rows = self._place, []
        if self._token is None:
            rows = [
                place.second[token] if depth == 1 else self._later
                for token, depth in zip(tree.token.tolist(), tree.depth.tolist(), strict=True)
            ]
            rows.insert(0, place.root)
        else:
            rows = [place.second[self._token], *[self._later] * len(tree)]
        outcome = _accept(tree, rows, self.sampler)  # type: ignore[arg-type]
        tokens = [*tree.token[list(outcome.path)].tolist(), outcome.bonus]
        n = len(self.sampler.history)
        self.sampler.commit(tokens)
        assert not self.sampler._uniforms
        del self.sampler.history[n:]
        return tokens


def count_pairs_plainly(path: str, setting: Setting, draws: int) -> np.ndarray:
    """`count_pairs` round after round with the sampler's own numbers."""
    place = load_place(path)
    table = np.zeros((len(place.root),) * 2, np.int64)
    first, after = Round(place, setting), dict[int, Round]()
    for _ in range(draws):
        tokens = first.accept(first.draft())
        if len(tokens) == 1:
            if tokens[0] not in after:
                seeded = dataclasses.replace(setting, seed=1000 * setting.seed + tokens[0])
                after[tokens[0]] = Round(place, seeded, token=tokens[0])
            second = after[tokens[0]]
            tokens += second.accept(second.draft())
        table[tokens[0], tokens[1]] += 1
    return table


# ---- wrong rules


def peek(tree: DraftTree) -> DraftTree:
    """The least likely of a node's drawn children goes, because of what it is."""
    assert tree.proposals is not None
    gone: set[int] = set()
    for node, nodes in tree.children.items():
        if len(nodes) > 1:
            proposal = tree.proposals[node]
            q = dict(zip(proposal.ids.tolist(), proposal.probs.tolist(), strict=True))
            gone.add(min(nodes, key=lambda child: q[int(tree.token[child])]))
    kept = [node for node in range(len(tree)) if not gone & set(tree.path(node))]
    proposals = {
        kept.index(node) if node != ROOT else ROOT: proposal
        for node, proposal in tree.proposals.items()
        if node == ROOT or node in kept
    }
    return dataclasses.replace(
        dataclasses.replace(tree, proposals=None).keep(kept), proposals=proposals
    )


def likeliest(probs: np.ndarray, count: int, rng: object) -> np.ndarray:
    """Children that were not drawn at all."""
    return np.array(Children(probs, count).first(), np.intp)


def trying(remove: bool, renormalise: bool) -> Callable[..., Any]:
    """`accept._try_children` for trees without given children, written down once more.

    Args:
        remove: take a rejected child out of q.
        renormalise: p after the subtraction.
    """

    def try_children(
        tree: DraftTree, at: int, proposal: Proposal, p: np.ndarray, rng: Any
    ) -> tuple[int | None, np.ndarray]:
        q = np.zeros(len(p))
        q[proposal.ids] = proposal.probs
        for child in tree.children[at]:
            token = tree.token[child]
            if rng.random() * q[token] < p[token]:
                return child, p
            p = np.maximum(p - q, 0)
            if remove:
                q = np.where(np.arange(len(q)) == token, 0, q)
                q = q / q.sum() if q.any() else q
            if renormalise:
                p = p / p.sum()
        return None, p

    return try_children


CHANGES = {"peeking": peek}
PATCHES: dict[str, tuple[Any, str, Any]] = {
    "not wrong": (accept, "_try_children", trying(True, True)),
    "rejected child stays in q": (accept, "_try_children", trying(False, True)),
    "p not renormalised": (accept, "_try_children", trying(True, False)),
    "likeliest children": (sampled, "_draw", likeliest),
}


def wrong(name: str | None) -> contextlib.AbstractContextManager[Any]:
    if name not in PATCHES:
        return contextlib.nullcontext()
    return mock.patch.object(*PATCHES[name])


def wrong_setting(shape: str, name: str) -> Setting:
    """The setting at temperature 1 without truncation, with a wrong rule."""
    right = next(
        s for s in SETTINGS if (s.temperature, s.truncation, s.shape) == (1.0, "all", shape)
        and s.rule == "rejection"
    )  # fmt: skip
    return dataclasses.replace(right, wrong=name)


WRONG = [
    wrong_setting("tree", "peeking"),
    wrong_setting("tree", "rejected child stays in q"),
    wrong_setting("tree", "p not renormalised"),
    wrong_setting("tree", "likeliest children"),
    wrong_setting("chain", "likeliest children"),
]


# ---- the tests


@pytest.fixture(scope="module")
def counted(
    place_file: str, request: pytest.FixtureRequest
) -> Iterator[dict[Setting, Future[np.ndarray]]]:
    """The draws of every setting that is about to be tested, under way in two processes."""
    wanted: list[Setting] = [
        item.callspec.params["setting"]  # type: ignore[attr-defined]
        for item in request.session.items
        if getattr(item, "module", None) is request.module
        and "counted" in getattr(item, "fixturenames", ())
    ]
    with mock.patch.dict(os.environ, {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}):
        pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))
        yield {setting: pool.submit(count_pairs, place_file, setting) for setting in wanted}
        pool.shutdown(cancel_futures=True)


def compare(place_file: str, setting: Setting, table: np.ndarray) -> tuple[float, float]:
    """p-values of first tokens and of pairs."""
    first, pairs = own_pairs(load_place(place_file), setting.params)
    return p_value(table.sum(axis=1), first), p_value(table, pairs)


def drawn_p_values(
    setting: Setting, counted: dict[Setting, Future[np.ndarray]], place_file: str
) -> tuple[float, float]:
    """p-values of a setting's draws, all of which must be there."""
    table = counted[setting].result()
    assert table.sum() == DRAWS
    first, pairs = compare(place_file, setting, table)
    print(f"p {first:.3g} for first tokens, {pairs:.3g} for pairs")
    return first, pairs


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_rounds_follow_the_target(
    setting: Setting, counted: dict[Setting, Future[np.ndarray]], place_file: str
) -> None:
    first, pairs = drawn_p_values(setting, counted, place_file)
    assert first > SURE and pairs > SURE


@pytest.mark.parametrize("setting", WRONG, ids=str)
def test_wrong_rules_are_noticed(
    setting: Setting, counted: dict[Setting, Future[np.ndarray]], place_file: str
) -> None:
    first, pairs = drawn_p_values(setting, counted, place_file)
    assert first < SURE and pairs < SURE


def test_without_its_fault_the_wrong_rule_is_the_real_one(place_file: str) -> None:
    right = wrong_setting("tree", "not wrong")
    expected = count_pairs(place_file, dataclasses.replace(right, wrong=None), 20_000)
    assert (count_pairs(place_file, right, 20_000) == expected).all()


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_rounds_without_shortcuts_follow_the_target(place_file: str, rule: str) -> None:
    setting = Setting(1.0, "all", "tree", rule, seed=5)
    first, pairs = compare(place_file, setting, count_pairs_plainly(place_file, setting, 10_000))
    assert first > SURE and pairs > SURE


@pytest.mark.parametrize("branch", [(), (2,), (1, 3)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_law_of_small_rounds(branch: tuple[int, ...], seed: int) -> None:
    """Every sequence of decisions with its probability: p(t1) p(t2 | t1) to rounding error.

    Five tokens, random heads, distributions with zeros, a tree of up to three children a node; and
    a branch from the context.
    """
    rng, vocab, rank, width = np.random.default_rng([seed, *branch]), 5, 2, 3
    w1, w2, weight = (
        rng.normal(size=shape).astype(F) for shape in ((vocab, rank), (vocab, rank), (1, 5))
    )
    heads = Heads(
        "vanilla",
        rank,
        w1.__getitem__,
        w2.__getitem__,
        confidence=Linear(weight, np.zeros(1, F)) if seed else None,
    )
    block = Block(0, rng.normal(size=(2, vocab)).astype(F), rng.normal(size=(2, width)).astype(F))
    target = rng.dirichlet(np.full(vocab, 0.7), size=1 + vocab)
    target[rng.random(target.shape) < 0.2] = 0
    target[:, 3] += 0.1
    target /= target.sum(axis=1, keepdims=True)
    third = np.eye(vocab)[0]

    def distribution(row: int, path: Sequence[int]) -> np.ndarray:
        return [target[0], target[1 + path[0]] if path else third, third][len(path)]

    def draft_distribution(z: np.ndarray) -> np.ndarray:
        keep = z >= np.sort(z)[seed % 2]  # one child is sometimes impossible
        p = np.where(keep, np.exp(z.astype(float)), 0)
        return p / p.sum()

    def grow() -> DraftTree:
        return sample_tree(
            block,
            heads,
            rng=decisions,  # type: ignore[arg-type]
            draft_distribution=draft_distribution,
            budget=6,
            width=3,
            most_leaves=4,
            branch=branch,
            branch_odds=[0.6] * len(branch),
        )

    def committed(tree: DraftTree) -> list[int]:
        outcome = accept.accept_rejection(tree, distribution, decisions)  # type: ignore[arg-type]
        return [*tree.token[list(outcome.path)].tolist(), outcome.bonus]

    def share(question: Question, chance: float) -> Iterable[tuple[Answer, float]]:
        return [(answer, chance * p) for answer, p in question.law()]

    law, trees = np.zeros((vocab, vocab)), 0
    with Decisions().deciding() as decisions:
        for tree, chance in decisions.outcomes(grow, share, 1.0):
            trees += 1
            for tokens, p in decisions.outcomes(lambda: committed(tree), share, chance):  # noqa: B023
                if len(tokens) == 1:
                    law[tokens[0]] += p * target[1 + tokens[0]]
                else:
                    law[tokens[0], tokens[1]] += p
    assert trees > 10
    np.testing.assert_allclose(law, target[0][:, None] * target[1:], atol=1e-12)
