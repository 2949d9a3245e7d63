"""The DSpark drafter of DeepSeek-V4: whole DeepSeek-V4 layers (stages) over a block of tokens.

Written after the inference code of the release: four residual streams mixed by hyper-connections,
attention with one key that is also the value, experts chosen by sqrt(softplus), and the vanilla
Markov head. Only the arithmetic of drafting: a block after given target features, in float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localspec.models.deepseek4_config import Deepseek4Config


@dataclass(frozen=True)
class Deepseek4Block:
    """What one pass proposes; B is the block size.

    Attributes:
        hidden: [B, d] streams collapsed into one, before the final norm; the confidence head
            reads these.
        base_logits: [B, V] before the Markov head.
        logits: [B, V] given the parents.
        parents: [B] the token before each, the anchor first.
        tokens: [B] the most likely token of each row of `logits`.
        confidence: [B] predicted probability that each is accepted.
    """

    hidden: Tensor
    base_logits: Tensor
    logits: Tensor
    parents: Tensor
    tokens: Tensor
    confidence: Tensor


class Deepseek4Drafter:
    """The drafter's arithmetic over its published tensors.

    Args:
        config: its sizes.
        tensors: float32, by published name ("mtp.0.attn.wkv.weight", ...).
        embedding: [V, d] token embeddings of the target.
        output: [V, d] output matrix of the target.
    """

    def __init__(
        self,
        config: Deepseek4Config,
        tensors: Mapping[str, Tensor],
        embedding: Tensor,
        output: Tensor,
    ) -> None:
        self.config, self._tensors = config, tensors
        self._embedding, self._output = embedding, output
        self.n_stages = 1 + max(int(name.split(".")[1]) for name in tensors)

    def propose(
        self, features: Tensor, anchor: int, parents: Sequence[int] | None = None
    ) -> Deepseek4Block:
        """One block after some features.

        Args:
            features: [n, len(target_layer_ids) * d] of positions 0..n-1; each layer's output,
                averaged over its streams.
            anchor: the token at position n.
            parents: [B] a given path; the greedy chain when left out.
        """
        c, last = self.config, f"mtp.{self.n_stages - 1}"
        with torch.no_grad():
            main = self._norm(
                features @ self._tensors["mtp.0.main_proj.weight"].T, "mtp.0.main_norm"
            )
            ids = torch.full((c.block_size,), c.mask_token_id)
            ids[0] = anchor
            streams = self._embedding[ids][:, None].repeat(1, c.hc_mult, 1)
            for stage in range(self.n_stages):
                streams = self._stage(f"mtp.{stage}", streams, main)
            hidden = self._collapse(last, streams)
            base = self._norm(hidden, f"{last}.norm") @ self._output.T
            return self._head(last, hidden, base, anchor, parents)

    def _head(
        self,
        last: str,
        hidden: Tensor,
        base: Tensor,
        anchor: int,
        given: Sequence[int] | None,
    ) -> Deepseek4Block:
        w1 = self._tensors[f"{last}.markov_head.markov_w1.weight"]
        w2 = self._tensors[f"{last}.markov_head.markov_w2.weight"]
        logits, path = base.clone(), [anchor]
        for i in range(len(base)):
            if given is not None:
                path[i:] = [given[i]]
            logits[i] += w2 @ w1[path[i]]
            path.append(int(logits[i].argmax()))
        parents = torch.tensor(path[:-1])
        seen = torch.cat([hidden, w1[parents]], dim=1)
        confidence = seen @ self._tensors[f"{last}.confidence_head.proj.weight"][0]
        return Deepseek4Block(
            hidden, base, logits, parents, logits.argmax(-1), torch.sigmoid(confidence)
        )

    def _stage(self, name: str, streams: Tensor, main: Tensor) -> Tensor:
        x, post, comb = self._mix(f"{name}.hc_attn", streams)
        x = self._attention(f"{name}.attn", self._norm(x, f"{name}.attn_norm"), main)
        streams = _spread(x, streams, post, comb)
        x, post, comb = self._mix(f"{name}.hc_ffn", streams)
        x = self._experts(f"{name}.ffn", self._norm(x, f"{name}.ffn_norm"))
        return _spread(x, streams, post, comb)

    def _mixes(self, name: str, streams: Tensor) -> Tensor:
        flat = streams.flatten(1)
        return _rms(flat, self.config.rms_norm_eps) @ self._tensors[f"{name}_fn"].T

    def _mix(self, name: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams [B, S, d] -> what a sublayer reads [B, d], and how it is written back.

        The latter: `post` [B, S], the share of each stream; `comb` [B, S, S], from stream (row)
        to stream (column), made doubly stochastic by Sinkhorn's iteration.
        """
        c, n = self.config, self.config.hc_mult
        scale, base = self._tensors[f"{name}_scale"], self._tensors[f"{name}_base"]
        pre, post, comb = self._mixes(name, streams).split([n, n, n * n], dim=1)
        pre = torch.sigmoid(pre * scale[0] + base[:n]) + c.hc_eps
        post = 2 * torch.sigmoid(post * scale[1] + base[n : 2 * n])
        comb = (comb * scale[2] + base[2 * n :]).unflatten(1, (n, n)).softmax(-1) + c.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        for _ in range(c.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + c.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + c.hc_eps)
        return (pre[..., None] * streams).sum(1), post, comb

    def _collapse(self, name: str, streams: Tensor) -> Tensor:
        mixes = self._mixes(f"{name}.hc_head", streams)
        scale, base = self._tensors[f"{name}.hc_head_scale"], self._tensors[f"{name}.hc_head_base"]
        pre = torch.sigmoid(mixes * scale + base) + self.config.hc_eps
        return (pre[..., None] * streams).sum(1)

    def _attention(self, name: str, x: Tensor, main: Tensor) -> Tensor:
        c, n, b = self.config, len(main), len(x)
        at = torch.arange(n + b)
        q = self._norm(x @ self._tensors[f"{name}.wq_a.weight"].T, f"{name}.q_norm")
        q = (q @ self._tensors[f"{name}.wq_b.weight"].T).unflatten(1, (-1, c.head_dim))
        q = self._rotate(_rms(q, c.rms_norm_eps), at[n:])
        kv = torch.cat([main, x]) @ self._tensors[f"{name}.wkv.weight"].T
        kv = self._rotate(self._norm(kv, f"{name}.kv_norm")[:, None], at)[:, 0]
        scores = torch.einsum("bhd,kd->bhk", q, kv) * c.head_dim**-0.5
        # Every position of the block sees all of it, and the same most recent features.
        scores = scores.masked_fill(at < n - c.sliding_window, -torch.inf)
        sink = self._tensors[f"{name}.attn_sink"].expand(b, -1)[..., None]
        shares = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        out = self._rotate(torch.einsum("bhk,kd->bhd", shares, kv), -at[n:])
        groups = out.reshape(b, c.o_groups, -1)
        down = self._tensors[f"{name}.wo_a.weight"].unflatten(0, (c.o_groups, -1))
        low = torch.einsum("bgd,grd->bgr", groups, down).flatten(1)
        return low @ self._tensors[f"{name}.wo_b.weight"].T

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate neighbouring pairs of the trailing `rope_dim` scalars of [n, heads, head_dim]."""
        c = self.config
        still, turning = x.split([c.head_dim - c.rope_dim, c.rope_dim], dim=-1)
        rate = c.rope_theta ** -(torch.arange(0, c.rope_dim, 2) / c.rope_dim)
        angle = (positions[:, None] * rate)[:, None]
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack(
            [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1
        )
        return torch.cat([still, turned.flatten(-2)], dim=-1)

    def _experts(self, name: str, x: Tensor) -> Tensor:
        c = self.config
        scores = F.softplus(x @ self._tensors[f"{name}.gate.weight"].T).sqrt()
        # The bias decides who is chosen, not with what weight.
        chosen = (scores + self._tensors[f"{name}.gate.bias"]).topk(c.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        if c.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * c.routed_scaling_factor
        out = self._mlp(f"{name}.shared_experts", x)
        for row, (experts, shares) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                out[row] += share * self._mlp(f"{name}.experts.{expert}", x[row])
        return out

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        limit = self.config.swiglu_limit
        gate = x @ self._tensors[f"{name}.w1.weight"].T
        up = x @ self._tensors[f"{name}.w3.weight"].T
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (F.silu(gate) * up) @ self._tensors[f"{name}.w2.weight"].T

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return _rms(x, self.config.rms_norm_eps) * self._tensors[f"{name}.weight"]


def _rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _spread(x: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sublayer's output [B, d] back to the mixed streams [B, S, d]."""
    return post[..., None] * x[:, None] + comb.transpose(1, 2) @ streams
