"""What DFlash 2 adds to DFlash: dynamic convolutions around each sublayer, a candidate selector.

After llama.cpp's graph of it (`src/models/dflash.cpp`) and the published tensor names. Shapes: n
positions in blocks of B, d = hidden size, G = d / group groups, K taps, V = vocabulary, r = rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.models.layers import Attention, Layer


class DynamicConvolution(nn.Module):
    """Causal depthwise convolutions inside a block, before and after a sublayer.

    Channel c at position t: `sum_k (base[k, c] + dynamic[t, k, group of c]) x[t - k, c]`, with
    zeros before the block; `dynamic` is a projection of the sublayer's normalised input.
    """

    def __init__(self, hidden_size: int, block: int, kernel: int, group: int) -> None:
        super().__init__()
        self.block, self.kernel, self.group = block, kernel, group
        groups = hidden_size // group
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel * groups, bias=False)

    def kernels(self, normed: Tensor) -> Tensor:
        """[n, d] -> [n, 2, K, d]: before the sublayer, and after it."""
        dynamic = self.kernel_projection(normed).view(len(normed), 2, self.kernel, -1)
        return self.base_kernel + dynamic.repeat_interleave(self.group, dim=-1)

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        """x [n, d], kernel [n, K, d] -> [n, d]."""
        blocks = x.view(-1, self.block, x.shape[-1])
        shifted = torch.stack(
            [F.pad(blocks, (0, 0, k, 0))[:, : self.block] for k in range(self.kernel)], dim=2
        )
        return (shifted.reshape(len(x), self.kernel, -1) * kernel).sum(1)


class DFlash2Layer(Layer):
    """A layer whose attention and MLP each stand between two dynamic convolutions."""

    def __init__(
        self,
        attention: Attention,
        hidden_size: int,
        intermediate_size: int,
        eps: float,
        *,
        block: int,
        kernel: int,
        group: int,
    ) -> None:
        super().__init__(attention, hidden_size, intermediate_size, eps)
        self.attention_conv = DynamicConvolution(hidden_size, block, kernel, group)
        self.mlp_conv = DynamicConvolution(hidden_size, block, kernel, group)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        past: tuple[Tensor, Tensor],
        visible: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As `Layer.forward`; x must be whole blocks. The context's keys are not convolved."""
        normed = self.input_layernorm(x)
        kernels = self.attention_conv.kernels(normed)
        normed = self.attention_conv.convolve(normed, kernels[:, 0])
        own = self.self_attn.keys_values(normed, rope)
        k, v = (torch.cat(pair) for pair in zip(past, own, strict=True))
        out = self.self_attn(normed, rope, k, v, visible)
        x = x + self.attention_conv.convolve(out, kernels[:, 1])
        normed = self.post_attention_layernorm(x)
        kernels = self.mlp_conv.kernels(normed)
        fed = self.mlp(self.mlp_conv.convolve(normed, kernels[:, 0]))
        return x + self.mlp_conv.convolve(fed, kernels[:, 1]), own


class CandidateSelector(nn.Module):
    """Scores of the candidates v after a parent u: `L_d[v] + P[u] * (H h_d) . S[v]`.

    The candidates of a depth are the `selector_top_k` tokens with the highest base logits.
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, base: Tensor, hidden: Tensor, parent: Tensor, top_k: int) -> Tensor:
        """base [n, V], hidden [n, d], parent [n] -> [n, V], -inf outside the candidates."""
        ids = base.topk(top_k, dim=-1).indices
        scores = (base + self.bias(hidden, parent)).gather(-1, ids)
        return torch.full_like(base, -torch.inf).scatter(-1, ids, scores)

    def bias(self, hidden: Tensor, parent: Tensor) -> Tensor:
        """hidden [n, d], parent [n] -> [n, V], what is added to the base logits of each token."""
        code = self.predecessor_codebook[parent] * self.hidden_projection(hidden)
        return F.linear(code, self.successor_codebook)
