"""Eagle3 drafters with normalised queries and keys (DeepSpec's release), on stock llama.cpp.

llama.cpp's `eagle3` graph has no such norms, its `qwen3` graph has them but reads one vector per
position, which it also adds the attention to. A qwen3 layer three times as wide does both: its
input is

    x = [s * e; s * n; g]      e = norm(E[token]),  n = norm(g),  s = EPSILON * rms(x)

with s so small that g alone decides the layer's root mean squares. The layer's first norm weighs
e and n with 1 / EPSILON and g with 0, so attention reads exactly [e; n]; it writes into the last
third only, and there the MLP reads and writes. Errors are of the order EPSILON^2, below rounding.
The layer is a file of its own (`pairs.heads_path`); the drafter's file fuses the features and maps
the layer's output to logits, its own layer passing states through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.drafter import DRAFTER_WINDOW
from localspec.eagle import EagleDrafter, Floats
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.llama import Context
from localspec.pairs import DrafterInfo

EPSILON = 1e-3
LAYERS_KEY = "localspec.target_layers"
LAYER_ARCH = "qwen3"


class WideEagleDrafter(EagleDrafter):
    """An Eagle3 drafter whose layer is a file of its own.

    Args:
        context: of the drafter's file, for fusing and logits.
        layer: of the layer's file, with hidden states; holds the KV cache.
        info: what the drafter is.
        drafter: the drafter's file, for two norms.
        embed: rows of the target's token embeddings.
        window: as for `EagleDrafter`.
    """

    def __init__(
        self,
        context: Context,
        layer: Context,
        info: DrafterInfo,
        drafter: GgufFile,
        embed: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
        window: int = DRAFTER_WINDOW,
    ) -> None:
        super().__init__(context, info, window)
        self.cells = layer
        self._embed = embed
        self._token_norm = drafter.tensor("blk.0.attn_norm.weight")
        self._state_norm = drafter.tensor("blk.0.attn_norm_2.weight")
        self._eps = float(drafter.arch_get("attention.layer_norm_rms_epsilon"))
        self._padding = int(drafter.arch_get("target_hidden_size")) * 3
        if layer.model.n_embd != 3 * info.n_embd or len(self._token_norm) != info.n_embd:
            raise LocalspecError(
                f"{layer.model.path.name} does not belong to {context.model.path.name}; keep the "
                "two files of one conversion together"
            )

    def _fuse(self, features: Floats) -> Floats:
        padded = np.zeros((len(features), self._padding), np.float32)
        padded[:, : features.shape[1]] = features
        return self.context.encode_features(padded)

    def run(
        self,
        tokens: Sequence[int],
        positions: npt.NDArray[np.integer],
        states: Floats,
        outputs: bool,
        sequences: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Evaluate pairs of a token and a state."""
        d = self.info.n_embd
        e = self._normed(self._embed(np.asarray(tokens)), self._token_norm)
        n = self._normed(states, self._state_norm)
        s = EPSILON * np.sqrt((states**2).sum(-1, keepdims=True) / (3 * d))
        x = np.concatenate([s * e, s * n, states], axis=1).astype(np.float32)
        self.cells.decode_states(x, positions, outputs=outputs, sequences=sequences)
        if not outputs:
            return
        y = self.cells.hidden()
        # The file's last norm has no weights: one known number gives the scale it took away.
        at, rows = np.abs(x[:, : 2 * d]).argmax(axis=1), np.arange(len(x))
        after = y[:, 2 * d :] * (x[rows, at] / y[rows, at])[:, None]
        self.context.seq_remove(0)
        self.context.decode(list(tokens), rows, states=after)

    def _normed(self, x: npt.NDArray[Any], weight: Floats) -> npt.NDArray[Any]:
        y: npt.NDArray[Any] = x / np.sqrt((x**2).mean(-1, keepdims=True) + self._eps) * weight
        return y
