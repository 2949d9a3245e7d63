"""Does the GGUF compute what the checkpoint computes? The proof that goes with a conversion.

Both sides get the same random features and anchors: the torch reference in `models/` on the
checkpoint's own weights, and llama.cpp on the new file through the code that drafts at run time.
Embeddings and output matrix are the target file's on both sides, so that what differs is the
drafter alone.

Shapes: n context positions, D depths, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.convert.source import Checkpoint

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

# Largest difference allowed, relative to the spread of the values (root mean squares). Rounding
# of matrices to a type adds up over the layers; a wrong formula or order gives about 1.
TOLERANCE = {
    "f32": 0.02, "f16": 0.02, "bf16": 0.03, "q8_0": 0.06, "q6_k": 0.15, "q5_1": 0.25, "q5_0": 0.25,
    "q5_k": 0.25, "q4_1": 0.45, "q4_0": 0.5, "q4_k": 0.45, "q3_k": 0.7, "q2_k": 0.95,
}  # fmt: skip
CONTEXTS = (1, 9, 40)  # positions whose features are absorbed before each block
SEED = 20250


@dataclass(frozen=True)
class Proposed:
    """One block, as one side computes it. Row i belongs to depth i + 1.

    Attributes:
        hidden: [D, d] final-norm hidden states; None where a family has none to show.
        base: [D, V] base logits, before any head; -inf on tokens that are never drafted.
        logits: [D, V] conditioned on `parents`.
        parents: [D] the parent token of each depth, the anchor first.
        chain: [D] the most likely token of each row of `logits`.
        confidence: [D] in 0..1; None without a confidence head.
    """

    hidden: Floats | None
    base: Floats
    logits: Floats
    parents: Ints
    chain: Ints
    confidence: Floats | None


class Side(Protocol):
    """Something that drafts: the reference, or llama.cpp on a file."""

    def propose(self, features: Floats, anchor: int, parents: Ints | None = None) -> Proposed:
        """One block after n positions.

        Args:
            features: [n, number of features].
            anchor: the token at position n.
            parents: [D] a given path; the greedy chain when left out.
        """


@dataclass(frozen=True)
class Sides:
    """Both sides of a comparison, and what to feed them.

    slack: factor on the tolerances.
    """

    reference: Side
    runtime: Side
    n_features: int
    n_vocab: int
    slack: float = 1.0


# Family -> opens both sides from (checkpoint, target path, drafter path).
Opener = Callable[[Any, Path, Path], AbstractContextManager[Sides]]


@dataclass(frozen=True)
class Difference:
    """One line of the table.

    Attributes:
        what: "hidden states", "base logits", "logits", "chain" or "confidence".
        largest: largest absolute difference; for the chain, tokens that differ.
        relative: difference relative to the spread of the reference's values; for the chain, how
            much less likely its tokens are to the reference, in spreads.
        allowed: the tolerance for `relative`.
    """

    what: str
    largest: float
    relative: float
    allowed: float

    @property
    def fine(self) -> bool:
        """Whether the difference is within its tolerance; NaN never is."""
        return self.relative <= self.allowed


@dataclass(frozen=True)
class Report:
    """What a verification found.

    Attributes:
        outtype: type of the matrices, which sets the tolerance.
        differences: one for each thing compared.
    """

    outtype: str
    differences: tuple[Difference, ...]

    @property
    def fine(self) -> bool:
        """Whether everything is within its tolerance."""
        return all(d.fine for d in self.differences)

    def worst(self) -> str:
        """The differences that are too large, in one line."""
        return ", ".join(
            f"{d.what} differ by {d.relative:.3g} of their spread (allowed: {d.allowed:g})"
            for d in self.differences
            if not d.fine
        )


def available() -> bool:
    """Whether the reference can run here: torch is installed."""
    import importlib.util

    return importlib.util.find_spec("torch") is not None


def verify(
    checkpoint: Any, target: Path, drafter: Path, outtype: str, opener: Opener | None = None
) -> Report:
    """Compare a converted drafter with the reference on its checkpoint.

    Args:
        checkpoint: the opened checkpoint.
        target: GGUF of the target, whose embeddings and output matrix are used.
        drafter: the converted GGUF, with its heads beside it.
        outtype: what it was converted to.
        opener: how to open both sides; DSpark and DFlash when left out.

    Raises:
        LocalspecError: torch is missing, or llama.cpp cannot load one of the files.
    """
    if not available():
        raise LocalspecError(
            "verifying needs torch; install it with: pip install 'localspec[convert]', or use "
            "--no-verify"
        )
    with (opener or open_block)(checkpoint, target, drafter) as sides:
        pairs = list(_runs(sides))
        allowed = min(max(TOLERANCE.values()), TOLERANCE[outtype] * sides.slack)
    return Report(outtype, tuple(compare(pairs, allowed)))


def _runs(sides: Sides) -> Iterator[tuple[Proposed, Proposed, Proposed]]:
    """Per context: the reference, the runtime's own chain, the runtime on the reference's chain."""
    rng = np.random.default_rng(SEED)
    for n in CONTEXTS:
        features = rng.standard_normal((n, sides.n_features), dtype=np.float32)
        anchor = int(rng.integers(sides.n_vocab))
        reference = sides.reference.propose(features, anchor)
        own = sides.runtime.propose(features, anchor)
        forced = sides.runtime.propose(features, anchor, reference.parents)
        yield reference, own, forced


def compare(runs: list[tuple[Proposed, Proposed, Proposed]], allowed: float) -> list[Difference]:
    """The differences over some blocks: (reference, own chain, same chain) each."""
    found = []
    if all(r.hidden is not None and f.hidden is not None for r, _, f in runs):
        found.append(_difference("hidden states", [(r.hidden, f.hidden) for r, _, f in runs],
                                 allowed))  # fmt: skip
    found.append(_difference("base logits", [(r.base, f.base) for r, _, f in runs], allowed))
    found.append(_difference("logits", [(r.logits, f.logits) for r, _, f in runs], allowed))
    found.append(_chain(runs, allowed))
    known = [(r.confidence, f.confidence) for r, _, f in runs]
    if any(a is not None or b is not None for a, b in known):
        if any(a is None or b is None for a, b in known):
            found.append(Difference("confidence", np.inf, np.inf, allowed))
        else:
            off = max(_largest(a, b) for a, b in known)
            found.append(Difference("confidence", off, off, allowed))
    return found


def _largest(ours: Any, theirs: Any) -> float:
    return float(np.abs(ours - theirs).max()) if ours.shape == theirs.shape else np.inf


def _difference(what: str, pairs: list[tuple[Any, Any]], allowed: float) -> Difference:
    largest = squares = spread = 0.0
    for ours, theirs in pairs:
        known = np.isfinite(ours)
        if not np.array_equal(known, np.isfinite(theirs)):  # other shapes are unequal, too
            return Difference(what, np.inf, np.inf, allowed)
        off = ours[known].astype(np.float64) - theirs[known]
        largest = max(largest, float(np.abs(off).max(initial=0)))
        squares += float((off**2).mean())
        spread += float(ours[known].astype(np.float64).var())
    return Difference(what, largest, float(np.sqrt(squares / max(spread, 1e-30))), allowed)


def _chain(runs: list[tuple[Proposed, Proposed, Proposed]], allowed: float) -> Difference:
    """Greedy chains may part at near-ties; up to there they must agree."""
    differ, worst = 0, 0.0
    for reference, own, _ in runs:
        if reference.chain.shape != own.chain.shape:
            return Difference("chain", np.inf, np.inf, 8 * allowed)
        parted = np.flatnonzero(reference.chain != own.chain)
        if not len(parted):
            continue
        differ += len(parted)
        row, token = reference.logits[parted[0]], own.chain[parted[0]]
        gap = float(row.max() - row[token])
        worst = max(worst, gap / max(float(row[np.isfinite(row)].std()), 1e-30))
    # Two tokens may each be off by a few standard deviations of the error.
    return Difference("chain", differ, worst, 8 * allowed)


@contextmanager
def open_block(checkpoint: Checkpoint, target: Path, drafter: Path) -> Iterator[Sides]:
    """Both sides of a DSpark or DFlash drafter."""
    with ExitStack() as stack:
        runtime = stack.enter_context(open_runtime(target, drafter))
        yield Sides(
            reference=Reference(checkpoint, target),
            runtime=runtime,
            n_features=checkpoint.config.num_features,
            n_vocab=checkpoint.config.vocab_size,
        )


class Reference:
    """The torch reference on the checkpoint's weights and the target file's matrices."""

    def __init__(self, checkpoint: Checkpoint, target: Path) -> None:
        import torch

        from localspec.ggufio import GgufFile
        from localspec.models.drafter import Drafter

        self._torch = torch
        # With the one direction that llama.cpp has for all layers; `plan` notes the difference.
        config = dataclasses.replace(checkpoint.config, causal_sliding=False)
        # What the file shares with the target comes from the target on this side, too.
        state = {
            name: _whole(checkpoint, name)
            for name in checkpoint.tensors
            if name not in ("embed_tokens.weight", "lm_head.weight")
        }
        drafted = checkpoint.draft_tokens
        if drafted is not None and "markov_head.markov_w2.weight" in state:
            state["markov_head.markov_w2.weight"] = _scattered(
                state["markov_head.markov_w2.weight"], drafted, config.vocab_size
            )
        with torch.device("meta"):
            # The reduced rows are scattered over the whole vocabulary above.
            whole = replace(config, draft_vocab_size=None)
            self._drafter = Drafter(whole, own_embed=False, own_lm_head=False)
        self._drafter.load_state_dict(
            {name: torch.from_numpy(value) for name, value in state.items()}, assign=True
        )
        self._drafter.eval()
        with GgufFile(target) as file:
            embedding = output = torch.from_numpy(_matrix(file, "token_embd.weight"))
            if "output.weight" in file.tensors and drafted is None:
                output = torch.from_numpy(_matrix(file, "output.weight"))
        self._hidden_tokens: Any = None
        if drafted is not None:
            own = _scattered(_whole(checkpoint, "lm_head.weight"), drafted, config.vocab_size)
            output = torch.from_numpy(own)
            self._hidden_tokens = torch.full((config.vocab_size,), -torch.inf)
            self._hidden_tokens[torch.from_numpy(drafted)] = 0.0
        self._drafter.tie_target(embedding, output)

    def propose(self, features: Floats, anchor: int, parents: Ints | None = None) -> Proposed:
        """See `Side`."""
        torch, drafter = self._torch, self._drafter
        with torch.no_grad():
            cache = drafter.new_cache()
            drafter.absorb(torch.from_numpy(features), cache)
            hidden = drafter.depth_rows(drafter.forward_block(anchor, len(features), cache))
            base = drafter.base_logits(hidden)
            if self._hidden_tokens is not None:
                base = base + self._hidden_tokens
            if parents is None:
                parents = self._greedy(anchor, hidden, base)
            given = torch.from_numpy(np.asarray(parents, np.int64))
            logits = base
            if drafter.markov_head is not None:
                logits = base + drafter.markov_head.block_bias(given[None], hidden[None])[0]
            if drafter.candidate_selector is not None:
                # Of all tokens, so that near-ties at the last candidate make no difference.
                logits = base + drafter.candidate_selector.bias(hidden, given)
            confidence = drafter.confidence_logits(hidden, given)
            # Without a Markov head it has no place in the file, see `plan`.
            if drafter.markov_head is None:
                confidence = None
        return Proposed(
            hidden=hidden.numpy(),
            base=base.numpy(),
            logits=logits.numpy(),
            parents=np.asarray(parents, np.int64),
            chain=logits.numpy().argmax(-1),
            confidence=None if confidence is None else torch.sigmoid(confidence).numpy(),
        )

    def _greedy(self, anchor: int, hidden: Any, base: Any) -> Ints:
        torch, head, parents = self._torch, self._drafter.markov_head, [anchor]
        state = None if head is None else head.initial_state(1)
        for depth in range(len(hidden)):
            row = base[depth]
            if head is not None:
                parent = torch.tensor([parents[-1]])
                bias, state = head.step(parent, hidden[depth][None], state)
                row = row + bias[0]
            if self._drafter.candidate_selector is not None:
                parent = torch.tensor([parents[-1]])
                row = row + self._drafter.candidate_selector.bias(hidden[depth][None], parent)[0]
            parents.append(int(row.argmax()))
        return np.array(parents[:-1], np.int64)


@contextmanager
def open_runtime(target: Path, drafter: Path) -> Iterator[Runtime]:
    """The new file in llama.cpp, with a cache and attention in full precision."""
    from localspec import llama, pairs
    from localspec.drafter import Drafter
    from localspec.ggufio import GgufFile
    from localspec.heads import Heads

    threads = min(llama.default_threads(), int(os.environ.get("OMP_NUM_THREADS") or 512) or 1)
    with ExitStack() as stack:
        target_file = stack.enter_context(GgufFile(target))
        drafter_file = stack.enter_context(GgufFile(drafter))
        info = pairs.check_pair(target_file, drafter_file)
        heads = Heads.from_gguf(drafter_file, info)
        full: dict[str, Any] = {"flash_attn": False, "kv_type": "f32", "n_threads": threads}
        target_model = llama.Model(target)
        stack.callback(target_model.close)
        context = llama.Context(
            target_model,
            llama.ContextOptions(
                n_ctx=32, n_batch=32, n_outputs=1, layer_inputs=info.target_layers, **full
            ),
        )
        stack.callback(context.close)
        model = llama.Model(drafter)
        stack.callback(model.close)
        size = max(CONTEXTS) + info.block_size
        own = llama.Context(
            model,
            llama.ContextOptions(
                n_ctx=max(64, size), n_batch=max(64, size), n_outputs=info.block_size,
                causal=info.causal, hidden_states=True, **full,
            ),
            other=context,
        )  # fmt: skip
        stack.callback(own.close)
        yield Runtime(Drafter(own, info, heads), info.n_vocab)


class Runtime:
    """The runtime's own drafter, asked for whole rows of logits."""

    def __init__(self, drafter: Any, n_vocab: int) -> None:
        self._drafter, self._all = drafter, np.arange(n_vocab)

    def propose(self, features: Floats, anchor: int, parents: Ints | None = None) -> Proposed:
        """See `Side`."""
        drafter, heads = self._drafter, self._drafter.heads
        drafter.cut(0)
        drafter.absorb(features)
        block = drafter.propose(anchor)
        first = 0 if drafter.info.sample_from_anchor else 1
        base = np.array(block.logits)
        if drafter.info.top_k:  # the block holds the candidates only
            base = np.array(drafter.context.logits()[first:])
        hidden = np.array(drafter.context.hidden()[first : first + len(base)])
        if block.baked is not None:
            base -= heads.bias(heads.embed(block.baked), self._all)
        state, logits, confidence = heads.root_state(), [], []
        path = [anchor] if parents is None else [int(p) for p in parents]
        for depth in range(len(base) if parents is None else min(len(base), len(path))):
            parent = np.array([path[depth]])
            latent, state = heads.latent(parent, hidden[depth], state)
            row = base[depth] + heads.bias(latent, self._all)[0]
            logits.append(row)
            if heads.has_confidence:
                confidence.append(heads.confidence(parent, hidden[depth])[0])
            if parents is None:
                path.append(int(row.argmax()))
        rows = np.stack(logits)
        return Proposed(
            hidden=hidden,
            base=base,
            logits=rows,
            parents=np.array(path[: len(base)], np.int64),
            chain=rows.argmax(-1),
            confidence=np.array(confidence, np.float32) if confidence else None,
        )


def _whole(checkpoint: Checkpoint, name: str) -> Floats:
    """A tensor of the checkpoint in one piece."""
    shape = checkpoint.tensors[name].shape
    whole, at = np.empty(int(np.prod(shape)), np.float32), 0
    for values in checkpoint.chunks(name):
        whole[at : at + values.size] = values.reshape(-1)
        at += values.size
    return whole.reshape(shape)


def _matrix(file: Any, name: str) -> Floats:
    """A matrix of a GGUF as float32, some rows at a time: decoding needs several copies."""
    rows, columns = file.tensors[name].shape
    whole = np.empty((rows, columns), np.float32)
    for start in range(0, rows, 4096):
        whole[start : start + 4096] = file.tensor(name, start, min(rows, start + 4096))
    return whole


def _scattered(rows: Floats, at: Ints, n_rows: int) -> Floats:
    whole = np.zeros((n_rows, rows.shape[1]), np.float32)
    whole[at] = rows
    return whole
