"""Torch reference of Eagle3 drafters (DeepSpec's `Qwen3Eagle3Model`, SpecForge's
`LlamaForCausalLMEagle3`).

Unbatched. Row i holds the token of position p + 1 and the state g of position p = positions[i]:

    x = [input_layernorm(E[token]); hidden_norm(g)]
    h = g + attention(x)                    (rotary position p)
    h = h + mlp(post_attention_layernorm(h))
    logits = lm_head(norm(h))               (the token of position p + 2)

g is `fc(features)` for committed positions and the drafter's own h for drafted ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.errors import LocalspecError
from localspec.models.eagle_config import EagleConfig
from localspec.models.layers import Attention, ContextCache, RMSNorm, SwiGLU, rope_angles

__all__ = ["Eagle3", "load_eagle"]


class EagleLayer(nn.Module):
    """The decoder layer, which reads a token and a state side by side."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        c, d, eps = config, config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = c.norm_before_residual
        self.self_attn = Attention(
            2 * d, c.num_attention_heads, c.num_key_value_heads, c.head_dim, eps, qk_norm=c.qk_norm
        )
        self.self_attn.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, d, bias=False)
        self.mlp = SwiGLU(d, c.intermediate_size)
        self.input_layernorm = RMSNorm(d, eps)
        self.hidden_norm = RMSNorm(d, eps)
        self.post_attention_layernorm = RMSNorm(d, eps)

    def forward(
        self, embedded: Tensor, states: Tensor, rope: tuple[Tensor, Tensor], cache: ContextCache
    ) -> Tensor:
        """embedded, states [n, d] -> [n, d]; the keys and values join the cache."""
        normed = self.hidden_norm(states)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        past = len(cache)
        cache.append(0, *self.self_attn.keys_values(x, rope))
        n = len(x)
        visible = torch.ones(n, past + n, dtype=torch.bool).tril(past)
        residual = normed if self.norm_before_residual else states
        h = residual + self.self_attn(x, rope, *cache.layers[0], visible)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Eagle3(nn.Module):
    """An Eagle3 drafter.

    Args:
        config: its shape.
        embed: [V, d] token embeddings.
        d2t: [draft vocabulary] target id of each row of the output matrix; None: the identity.
    """

    d2t: Tensor | None

    def __init__(self, config: EagleConfig, embed: Tensor, d2t: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        d, features = config.hidden_size, config.num_features * config.target_hidden_size
        self.fc = nn.Linear(features, d, bias=False)
        self.input_norm = (
            RMSNorm(features, config.rms_norm_eps) if config.norm_before_fc else nn.Identity()
        )
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size, bias=False)
        self.register_buffer("embed", embed.detach(), persistent=False)
        self.register_buffer("d2t", d2t, persistent=False)

    def new_cache(self) -> ContextCache:
        """An empty cache."""
        c = self.config
        return ContextCache(1, c.num_key_value_heads, c.head_dim, self.fc.weight)

    def fuse(self, features: Tensor) -> Tensor:
        """[n, layers * target width] -> g [n, d]."""
        out: Tensor = self.fc(self.input_norm(features))
        return out

    def forward(self, tokens: Tensor, states: Tensor, cache: ContextCache, start: int) -> Tensor:
        """tokens [n] and states [n, d] at positions start.. -> h [n, d]."""
        positions = torch.arange(start, start + len(tokens))
        rope = rope_angles(positions, self.config.head_dim, self.config.rope_theta)
        embed: Tensor = self.get_buffer("embed")
        out: Tensor = self.midlayer(F.embedding(tokens, embed), states, rope, cache)
        return out

    def logits(self, states: Tensor) -> Tensor:
        """h [n, d] -> [n, V]; -inf for tokens the drafter does not know."""
        own: Tensor = self.lm_head(self.norm(states))
        if self.d2t is None:
            return own
        full = own.new_full((len(own), self.config.vocab_size), float("-inf"))
        full[:, self.d2t] = own
        return full

    @torch.no_grad()
    def propose(
        self, features: Tensor, tokens: Tensor, depth: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The greedy chain after n committed tokens and the anchor.

        Args:
            features: [n, layers * target width] of the committed positions.
            tokens: [n + 1] the committed tokens and the anchor.
            depth: tokens to draft.

        Returns:
            (drafted [depth], logits [depth, V], states h [depth, d]).
        """
        cache, n = self.new_cache(), len(features)
        state = self(tokens[1:], self.fuse(features), cache, 0)[-1:]
        drafted, logits, states = [], [], []
        for d in range(depth):
            row = self.logits(state)
            logits.append(row)
            states.append(state)
            drafted.append(row.argmax(dim=-1))
            if d + 1 < depth:
                state = self(drafted[-1], state, cache, n + d)
        return torch.cat(drafted), torch.cat(logits), torch.cat(states)


def load_eagle(
    path: str | Path, embed: Tensor | None = None, output: Tensor | None = None
) -> Eagle3:
    """Load a checkpoint directory in evaluation mode, float32.

    Args:
        path: directory with config.json and model.safetensors.
        embed: [V, d] the target's token embeddings, where the checkpoint has none.
        output: [V, d] the target's output matrix, likewise.

    Raises:
        LocalspecError: a tensor is missing, left over or has the wrong shape.
    """
    from safetensors.torch import load_file

    path = Path(path)
    config = EagleConfig.from_file(path)
    stored = load_file(str(path / "model.safetensors"))
    stored = {name.replace("layers.0.", "midlayer."): value for name, value in stored.items()}
    stored.pop("t2d", None)
    offsets = stored.pop("d2t", None)
    own = stored.pop("embed_tokens.weight", embed)
    if own is None:
        raise LocalspecError(f"{path} has no token embeddings; give those of its target")
    if output is not None:
        stored.setdefault("lm_head.weight", torch.as_tensor(output))
    d2t = None if offsets is None else torch.arange(len(offsets)) + offsets
    model = Eagle3(config, own.float(), d2t)
    try:
        model.load_state_dict({name: value.float() for name, value in stored.items()})
    except RuntimeError as e:
        raise LocalspecError(f"{path}: {' '.join(str(e).split())}") from e
    return model.eval()
