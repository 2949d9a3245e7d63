"""One Qwen3-style decoder layer, shared by the drafter's backbone and the reference target.

Unbatched: n positions are [n, d]; keys and values are [n, kv_heads, head_dim].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """`w * x / sqrt(mean(x^2) + eps)`, the mean in float32 whatever the type of x."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope_angles(
    positions: Tensor, head_dim: int, theta: float, share: float = 1.0
) -> tuple[Tensor, Tensor]:
    """positions [n] -> (cos, sin), each [n, 1, head_dim] float32; halves repeat.

    `share` below 1 ("proportional" rope): only that part of the pairs turns, at the frequencies
    they would have anyway; the others stay where they are.
    """
    steps = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    speeds = 1.0 / theta**steps
    speeds[int(share * head_dim // 2) :] = 0
    angles = positions.float()[:, None] * speeds
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions by halves: dimension i pairs with i + head_dim/2. x [n, heads, head_dim]."""
    cos, sin = (part.to(x.dtype) for part in rope)
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys; what is visible is given."""

    scale: float | None = None  # of the scores; None: 1 / sqrt(head_dim)
    value_scale = 1.0

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        bias: bool = False,
        qk_norm: bool = True,
        output_bias: bool | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(hidden_size, heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden_size, kv_heads * head_dim, bias=bias)
        self.o_proj = nn.Linear(
            heads * head_dim, hidden_size, bias=bias if output_bias is None else output_bias
        )
        self.q_norm = RMSNorm(head_dim, eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps) if qk_norm else nn.Identity()

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """x [n, d] -> rotated keys and values, each [n, kv_heads, head_dim]."""
        shape = (len(x), self.kv_heads, self.head_dim)
        k = rotate(self.k_norm(self.k_proj(x).view(shape)), rope)
        return k, self.v_proj(x).view(shape)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], k: Tensor, v: Tensor, visible: Tensor | None
    ) -> Tensor:
        """Attend from x [n, d] to k, v of m positions; visible [n, m] bool, None = everything."""
        q = rotate(self.q_norm(self.q_proj(x).view(len(x), self.heads, self.head_dim)), rope)
        group = self.heads // self.kv_heads
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.repeat_interleave(group, dim=1).transpose(0, 1)[None],
            v.repeat_interleave(group, dim=1).transpose(0, 1)[None],
            attn_mask=visible,
            scale=self.scale,
        )
        return self.o_proj(self.value_scale * out[0].transpose(0, 1).reshape(len(x), -1))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP, each with a residual."""

    def __init__(self, attention: Attention, hidden_size: int, intermediate_size: int, eps: float):
        super().__init__()
        self.self_attn = attention
        self.mlp = SwiGLU(hidden_size, intermediate_size)
        self.input_layernorm = RMSNorm(hidden_size, eps)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps)

    def forward(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        past: tuple[Tensor, Tensor],
        visible: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [n, d] attends to the m past positions and to itself (visible [n, m + n]).

        -> (output [n, d], the keys and values of x, for those who keep them).
        """
        normed = self.input_layernorm(x)
        own = self.self_attn.keys_values(normed, rope)
        k, v = (torch.cat(pair) for pair in zip(past, own, strict=True))
        x = x + self.self_attn(normed, rope, k, v, visible)
        return x + self.mlp(self.post_attention_layernorm(x)), own


class ContextCache:
    """Keys and values of positions 0..length-1, per layer; positions are consecutive."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        """Empty; `like` gives type and device."""
        empty = like.new_empty(0, kv_heads, head_dim)
        self.layers: list[tuple[Tensor, Tensor]] = [(empty, empty)] * layers

    def __len__(self) -> int:
        return len(self.layers[0][0])

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Add n positions to one layer; k, v [n, kv_heads, head_dim]. Do it for every layer."""
        old_k, old_v = self.layers[layer]
        self.layers[layer] = (torch.cat([old_k, k]), torch.cat([old_v, v]))

    def crop(self, length: int) -> None:
        """Forget positions >= length. Raises ValueError when there are fewer."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot crop a cache of {len(self)} positions to {length}")
        self.layers = [(k[:length], v[:length]) for k, v in self.layers]
