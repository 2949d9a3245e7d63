"""Layers of a drafter with the Gemma 4 backbone.

After the release of DeepSpec (`deepspec/modeling/dspark/gemma4`): the target's global attention
in every layer. Unbatched shapes as in `layers`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.models.layers import Attention, Layer, RMSNorm, SwiGLU, rotate


class Gemma4Attention(Attention):
    """Scores are not scaled, values are RMS-normalised per head without a weight.

    With `k_eq_v` one matrix gives keys and values; they part at their norms and at the rope.
    """

    scale = 1.0

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        bias: bool = False,
        k_eq_v: bool = True,
    ) -> None:
        super().__init__(hidden_size, heads, kv_heads, head_dim, eps, bias=bias)
        self.eps, self.k_eq_v = eps, k_eq_v
        if k_eq_v:
            del self.v_proj

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [n, d] -> rotated keys and normalised values, each [n, kv_heads, head_dim]."""
        shape = (len(x), self.kv_heads, self.head_dim)
        k = self.k_proj(x).view(shape)
        v = (k if self.k_eq_v else self.v_proj(x).view(shape)).float()
        v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + self.eps)
        return rotate(self.k_norm(k), rope), v.to(x.dtype)


class GeGLU(SwiGLU):
    """`down(gelu(gate(x)) * up(x))`, the tanh approximation of gelu."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Gemma4Layer(Layer):
    """Norms before and after attention and MLP; the whole output times a scalar of the layer."""

    layer_scalar: Tensor

    def __init__(
        self, attention: Attention, hidden_size: int, intermediate_size: int, eps: float
    ) -> None:
        super().__init__(attention, hidden_size, intermediate_size, eps)
        self.mlp: nn.Module = GeGLU(hidden_size, intermediate_size)
        self.pre_feedforward_layernorm = RMSNorm(hidden_size, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden_size, eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        past: tuple[Tensor, Tensor],
        visible: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """As `Layer.forward`; here `post_attention_layernorm` really follows the attention."""
        normed = self.input_layernorm(x)
        own = self.self_attn.keys_values(normed, rope)
        k, v = (torch.cat(pair) for pair in zip(past, own, strict=True))
        x = x + self.post_attention_layernorm(self.self_attn(normed, rope, k, v, visible))
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        return (x + self.post_feedforward_layernorm(fed)) * self.layer_scalar, own
