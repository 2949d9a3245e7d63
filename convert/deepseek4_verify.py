"""Both sides of a verification, for the drafter of a DeepSeek-V4.

The reference reads each matrix from the checkpoint when it needs it and forgets it again: all of
the experts at once would not fit into memory, and a block asks only a few of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch

from localspec.convert.deepseek4_source import Deepseek4Checkpoint
from localspec.convert.verify import Floats, Ints, Proposed, Sides, _matrix, open_runtime
from localspec.ggufio import GgufFile
from localspec.models.deepseek4 import Deepseek4Drafter

# Rounding can change which experts a token goes to, where two are nearly as good; what comes out
# then differs by more than the rounding.
ROUTING_SLACK = 2.0


class _Stored(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint, read when asked for."""

    def __init__(self, checkpoint: Deepseek4Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> torch.Tensor:
        parts = [torch.from_numpy(np.array(part)) for part in self._checkpoint.chunks(name)]
        return torch.cat(parts).reshape(self._checkpoint.tensors[name].shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.tensors)


class Reference:
    """The torch reference on the checkpoint's weights and the target file's matrices."""

    def __init__(self, checkpoint: Deepseek4Checkpoint, target: Path) -> None:
        with GgufFile(target) as file:
            embedding, output = (
                torch.from_numpy(_matrix(file, name))
                for name in ("token_embd.weight", "output.weight")
            )
        self._drafter = Deepseek4Drafter(checkpoint.config, _Stored(checkpoint), embedding, output)

    def propose(self, features: Floats, anchor: int, parents: Ints | None = None) -> Proposed:
        """See `verify.Side`."""
        given = None if parents is None else [int(token) for token in parents]
        block = self._drafter.propose(torch.from_numpy(features), anchor, given)
        return Proposed(
            hidden=block.hidden.numpy(),
            base=block.base_logits.numpy(),
            logits=block.logits.numpy(),
            parents=block.parents.numpy(),
            chain=block.tokens.numpy(),
            confidence=block.confidence.numpy(),
        )


@contextmanager
def open_deepseek4(checkpoint: Deepseek4Checkpoint, target: Path, drafter: Path) -> Iterator[Sides]:
    """The torch reference and llama.cpp, for `verify.verify`."""
    with ExitStack() as stack:
        yield Sides(
            reference=Reference(checkpoint, target),
            runtime=stack.enter_context(open_runtime(target, drafter)),
            n_features=checkpoint.config.num_features,
            n_vocab=checkpoint.config.vocab_size,
            slack=ROUTING_SLACK,
        )
