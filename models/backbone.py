"""The parallel backbone of a DSpark drafter: one non-causal pass gives a whole block.

Shapes: T context positions, A anchors, B = block_size, d = hidden size, V = vocabulary,
n_feat = len(target_layer_ids) * d. Formula: DESIGN.md section 2.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.errors import LocalspecError
from localspec.models.config import DrafterConfig
from localspec.models.dflash2 import CandidateSelector, DFlash2Layer
from localspec.models.gemma4 import Gemma4Attention, Gemma4Layer
from localspec.models.layers import Attention, ContextCache, Layer, RMSNorm, rope_angles

__all__ = ["Backbone", "ContextCache"]


class Backbone(nn.Module):
    """Embeddings in, final-norm hidden states out; the context comes from target features.

    Each layer makes the keys and values of the context from `hidden_norm(fc(features))` with its
    own projections: the context itself never passes through the layers, so it is computed once
    per position and kept in a ContextCache.
    """

    def __init__(
        self, config: DrafterConfig, *, own_embed: bool = True, own_lm_head: bool = True
    ) -> None:
        """`own_embed`, `own_lm_head`: False when the checkpoint leaves them to the target."""
        super().__init__()
        self.config = config
        d, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, d) if own_embed else None
        rows = config.reduced_vocab or config.vocab_size
        self.lm_head = nn.Linear(d, rows, bias=False) if own_lm_head else None
        # Row i of a reduced output matrix drafts token i + d2t[i].
        self.register_buffer(
            "d2t", torch.zeros(rows, dtype=torch.int64) if config.reduced_vocab else None
        )
        self.fc = nn.Linear(config.num_features, d, bias=False)
        self.hidden_norm = RMSNorm(d, eps)
        self.layers = nn.ModuleList(_layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(d, eps)
        self.candidate_selector = (
            CandidateSelector(config.vocab_size, d, config.selector_rank)
            if config.selector_rank
            else None
        )
        # Buffers outside the state dict: they are the target's and are never saved with us.
        self.register_buffer("target_embed", None, persistent=False)
        self.register_buffer("target_lm_head", None, persistent=False)

    def tie_target(self, embed: Tensor, lm_head: Tensor) -> None:
        """Use the target's matrices, each [V, d], where the checkpoint has none of its own.

        Raises LocalspecError on other shapes: the drafter belongs to another target.
        """
        shape = (self.config.vocab_size, self.config.hidden_size)
        for name, matrix in (("token embeddings", embed), ("output matrix", lm_head)):
            if tuple(matrix.shape) != shape:
                raise LocalspecError(
                    f"the target's {name} are {list(matrix.shape)} but this drafter needs "
                    f"{list(shape)}; use the target it was trained for"
                )
        like = self.fc.weight
        self.target_embed = embed.detach().to(like.device, like.dtype)
        self.target_lm_head = lm_head.detach().to(like.device, like.dtype)

    def _embed(self, tokens: Tensor) -> Tensor:
        weight = self.target_embed if self.embed_tokens is None else self.embed_tokens.weight
        if weight is None:
            raise LocalspecError(
                "this drafter has no token embeddings of its own; "
                "call tie_target with the target's matrices first"
            )
        return F.embedding(tokens, weight) * self.config.embedding_scale

    def base_logits(self, hidden: Tensor) -> Tensor:
        """`L = lm_head(h)`, scaled and soft-capped where the config says so: [..., d] -> [..., V].

        With a reduced vocabulary V is `draft_vocab_size`; `draft_ids` says which tokens those are.
        Raises LocalspecError when the checkpoint has no output matrix and no target is tied.
        """
        if self.lm_head is not None:
            weight: Tensor | None = self.lm_head.weight
        elif self.config.tie_word_embeddings and self.embed_tokens is not None:
            weight = self.embed_tokens.weight
        else:
            weight = self.target_lm_head
        if weight is None:
            raise LocalspecError(
                "this drafter has no output matrix of its own; "
                "call tie_target with the target's matrices first"
            )
        logits = F.linear(hidden, weight) * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @property
    def draft_ids(self) -> Tensor:
        """[V] token id of each row of the output matrix."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size, device=self.fc.weight.device)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def new_cache(self) -> ContextCache:
        """An empty context."""
        c = self.config
        return ContextCache(c.num_hidden_layers, c.num_key_value_heads, c.head_dim, self.fc.weight)

    def absorb(self, features: Tensor, cache: ContextCache) -> None:
        """Append target features [n, n_feat] of the next n positions to the context."""
        first = len(cache)
        rope = self._rope(torch.arange(first, first + len(features), device=features.device))
        for index, (k, v) in enumerate(self._context(features, rope)):
            cache.append(index, k, v)

    def forward_block(self, anchor: int, start: int, cache: ContextCache) -> Tensor:
        """The block of an anchor at position `start`, given the features of 0..start-1.

        -> hidden [B, d]. The cache is left as it was. Raises ValueError when it holds another
        number of positions than `start`.
        """
        if len(cache) != start:
            raise ValueError(f"the context holds {len(cache)} positions; the block is at {start}")
        device = self.fc.weight.device
        context = torch.arange(start, device=device)
        block = torch.arange(start, start + self.config.block_size, device=device)
        tokens = self._block_tokens(torch.tensor([anchor], device=device))
        return self._run(tokens, block, cache.layers, torch.cat([context, block]), None)

    def forward_blocks(self, features: Tensor, anchors: Tensor, tokens: Tensor) -> Tensor:
        """Many blocks of one sequence in one masked pass, as training needs them.

        features [T, n_feat], tokens [T], anchors [A] positions below T -> hidden [A, B, d].
        Each block sees the features at positions < its anchor, and itself.
        """
        size, device = self.config.block_size, features.device
        context = torch.arange(len(features), device=device)
        positions = (anchors[:, None] + torch.arange(size, device=device)).reshape(-1)
        block_of = torch.arange(len(anchors), device=device).repeat_interleave(size)
        visible = torch.cat(
            [context < anchors[block_of][:, None], block_of[:, None] == block_of], dim=1
        )
        hidden = self._run(
            self._block_tokens(tokens[anchors]),
            positions,
            self._context(features, self._rope(context)),
            torch.cat([context, positions]),
            visible,
        )
        return hidden.view(len(anchors), size, -1)

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        context: list[tuple[Tensor, Tensor]],
        key_positions: Tensor,
        visible: Tensor | None,
    ) -> Tensor:
        """tokens, positions [n]; context: keys and values of m positions per layer;
        key_positions [m + n]; visible [n, m + n] -> final-norm hidden states [n, d]."""
        rope = self._rope(positions)
        x = self._embed(tokens)
        for index, layer in enumerate(self.layers):
            window = self.config.window(index)
            seen = visible
            if window is not None:
                near = positions[:, None] - key_positions < window
                seen = near if visible is None else visible & near
            if self.config.causal or (self.config.causal_sliding and window is not None):
                earlier = key_positions <= positions[:, None]
                seen = earlier if seen is None else seen & earlier
            x, _ = layer(x, rope, context[index], seen)
        return self.norm(x)

    def _context(
        self, features: Tensor, rope: tuple[Tensor, Tensor]
    ) -> list[tuple[Tensor, Tensor]]:
        """features [n, n_feat] -> keys and values per layer."""
        injected = self.hidden_norm(self.fc(features))
        layers = cast("list[Layer]", list(self.layers))
        return [layer.self_attn.keys_values(injected, rope) for layer in layers]

    def _rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        return rope_angles(positions, c.head_dim, c.rope_theta, c.partial_rotary_factor)

    def _block_tokens(self, anchors: Tensor) -> Tensor:
        """anchors [A] token ids -> [A * B]: each followed by B-1 mask tokens."""
        blocks = anchors.new_full((len(anchors), self.config.block_size), self.config.mask_token_id)
        blocks[:, 0] = anchors
        return blocks.reshape(-1)


def _layer(config: DrafterConfig) -> Layer:
    c = config
    sizes = (
        c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps
    )  # fmt: skip
    if c.backbone == "gemma4":
        shared = Gemma4Attention(*sizes, bias=c.attention_bias, k_eq_v=c.attention_k_eq_v)
        return Gemma4Layer(shared, c.hidden_size, c.intermediate_size, c.rms_norm_eps)
    attention = Attention(*sizes, bias=c.attention_bias)
    attention.value_scale = c.attention_value_scale
    rest = (attention, c.hidden_size, c.intermediate_size, c.rms_norm_eps)
    if c.selector_rank:
        return DFlash2Layer(
            *rest, block=c.block_size, kernel=c.conv_kernel_size, group=c.conv_group_size
        )
    return Layer(*rest)
