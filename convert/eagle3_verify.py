"""Both sides of a verification, for Eagle3 drafters (see `verify`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from localspec.convert.eagle3 import EMBEDDING, OUTPUT, EagleCheckpoint
from localspec.convert.verify import CONTEXTS, Floats, Ints, Proposed, Sides, _matrix
from localspec.ggufio import GgufFile
from localspec.models.eagle import Eagle3


def _context_tokens(n: int, anchor: int, n_vocab: int) -> list[int]:
    """The tokens both sides read with the features: any, but the same."""
    return [int(t) for t in (anchor + 7 * np.arange(1, n + 1)) % n_vocab]


class Reference:
    """The torch reference on the checkpoint's weights; what it lacks is the target file's."""

    def __init__(self, checkpoint: EagleCheckpoint, target: Path, drafter: Path) -> None:
        config = checkpoint.eagle
        state = {
            name: torch.from_numpy(_whole(checkpoint, name))
            for name in checkpoint.tensors
            if name != EMBEDDING.published
        }
        # Embeddings are the target's unless the file holds the checkpoint's own.
        with GgufFile(drafter) as file:
            own = EMBEDDING.name in file.tensors and EMBEDDING.published in checkpoint.tensors
            if OUTPUT.name not in file.tensors:
                state.pop(OUTPUT.published, None)
        with GgufFile(target) as file:
            embed = (
                _whole(checkpoint, EMBEDDING.published) if own else _matrix(file, EMBEDDING.name)
            )
            if OUTPUT.published not in state:
                name = OUTPUT.name if OUTPUT.name in file.tensors else EMBEDDING.name
                state[OUTPUT.published] = torch.from_numpy(_matrix(file, name))
        drafted = checkpoint.draft_tokens
        d2t = None if drafted is None else torch.from_numpy(drafted)
        self._drafter = Eagle3(config, torch.from_numpy(embed), d2t)
        self._drafter.load_state_dict(state)
        self._drafter.eval()

    def propose(self, features: Floats, anchor: int, parents: Ints | None = None) -> Proposed:
        """See `verify.Side`."""
        config = self._drafter.config
        n = len(features)
        tokens = [*_context_tokens(n, anchor, config.vocab_size)[1:], anchor]
        path = [anchor] if parents is None else [int(p) for p in parents]
        rows, states = [], []
        with torch.no_grad():
            cache = self._drafter.new_cache()
            fused = self._drafter.fuse(torch.from_numpy(features))
            state = self._drafter(torch.tensor(tokens), fused, cache, 0)[-1:]
            for d in range(config.depth):
                if d:
                    state = self._drafter(torch.tensor(path[d : d + 1]), state, cache, n + d - 1)
                row = self._drafter.logits(state)[0].numpy()
                rows.append(row)
                states.append(state[0].numpy())
                if parents is None:
                    path.append(int(row.argmax()))
        return _proposed(rows, states, path)


class Runtime:
    """The runtime's own drafter, along one path."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter

    def propose(self, features: Floats, anchor: int, parents: Ints | None = None) -> Proposed:
        """See `verify.Side`."""
        drafter = self._drafter
        drafter.cut(0)
        drafter.absorb(features, _context_tokens(len(features), anchor, drafter.info.n_vocab))
        rollout = drafter.propose(anchor)
        path = [anchor] if parents is None else [int(p) for p in parents]
        rows, states = [], []
        for d in range(rollout.depth):
            logits = rollout.expand([0], path[d : d + 1]) if d else rollout.root()
            rows.append(logits[0].copy())
            states.append(drafter.context.next_states()[0].copy())
            if parents is None:
                path.append(int(rows[-1].argmax()))
        return _proposed(rows, states, path)


def _proposed(rows: list[Floats], states: list[Floats], path: list[int]) -> Proposed:
    logits = np.stack(rows)
    return Proposed(
        hidden=np.stack(states),
        base=logits,
        logits=logits,
        parents=np.array(path[: len(rows)], np.int64),
        chain=logits.argmax(-1),
        confidence=None,
    )


@contextmanager
def open_eagle3(checkpoint: EagleCheckpoint, target: Path, drafter: Path) -> Iterator[Sides]:
    """The torch reference and llama.cpp, for `verify.verify`."""
    with ExitStack() as stack:
        runtime = stack.enter_context(_open_runtime(target, drafter))
        yield Sides(
            reference=Reference(checkpoint, target, drafter),
            runtime=runtime,
            n_features=checkpoint.eagle.num_features * checkpoint.eagle.target_hidden_size,
            n_vocab=checkpoint.eagle.vocab_size,
        )


@contextmanager
def _open_runtime(target: Path, drafter: Path) -> Iterator[Runtime]:
    from localspec import eagle, eagle_wide, llama, pairs

    threads = min(llama.default_threads(), int(os.environ.get("OMP_NUM_THREADS") or 512) or 1)
    with ExitStack() as stack:
        with GgufFile(target) as target_file, GgufFile(drafter) as drafter_file:
            info = pairs.check_pair(target_file, drafter_file)
        target_model = llama.Model(target)
        stack.callback(target_model.close)
        context = llama.Context(
            target_model,
            llama.ContextOptions(
                n_ctx=32,
                n_batch=32,
                n_outputs=1,
                n_threads=threads,
                layer_inputs=info.target_layers,
            ),
        )
        stack.callback(context.close)
        model = llama.Model(drafter)
        stack.callback(model.close)
        options = eagle.context_options(
            info, max(64, 2 * max(CONTEXTS)), window=4096, n_threads=threads, flash_attn=False
        )
        # In full precision, so that what differs is the file.
        own = llama.Context(model, replace(options, kv_type="f32"), other=context)
        stack.callback(own.close)
        if info.heads_path is None:
            yield Runtime(eagle.EagleDrafter(own, info))
            return
        layer_model = llama.Model(info.heads_path)
        stack.callback(layer_model.close)
        layer = llama.Context(layer_model, eagle.layer_options(own.options))
        stack.callback(layer.close)
        target_file, drafter_file = (stack.enter_context(GgufFile(p)) for p in (target, drafter))
        rows = target_file.rows("token_embd.weight")
        yield Runtime(eagle_wide.WideEagleDrafter(own, layer, info, drafter_file, rows))


def _whole(checkpoint: EagleCheckpoint, name: str) -> Floats:
    """A tensor of the checkpoint in one piece, its rows as stored."""
    tensor = checkpoint.tensors[name]
    parts = list(checkpoint._chunks(tensor))
    return np.concatenate(parts).reshape(tensor.shape)
