"""A DSpark drafter: the backbone, its heads, and the proposal of one block as a chain.

Shapes: D = num_depths, d = hidden size, V = vocabulary (the drafted part, where it is reduced).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.models.backbone import Backbone, ContextCache
from localspec.models.config import DrafterConfig
from localspec.models.heads import build_confidence_head, build_markov_head


@dataclass(frozen=True)
class Proposal:
    """One drafted block. Row i belongs to depth i + 1."""

    tokens: Tensor  # [D] the chain
    base: Tensor  # [D, V] base logits, before any head
    hidden: Tensor  # [D, d] final-norm hidden states
    logits: Tensor  # [D, V] conditioned on the parent in the chain
    probs: Tensor  # [D, V] what each token was drawn from; one-hot when greedy
    confidence: Tensor | None  # [D] in 0..1, None without a confidence head


class Drafter(Backbone):
    """The backbone with its heads; a subclass so that parameters keep their published names."""

    def __init__(
        self, config: DrafterConfig, *, own_embed: bool = True, own_lm_head: bool = True
    ) -> None:
        super().__init__(config, own_embed=own_embed, own_lm_head=own_lm_head)
        self.markov_head = build_markov_head(config)
        self.confidence_head = build_confidence_head(config)

    @torch.no_grad()
    def propose(
        self,
        anchor: int,
        start: int,
        cache: ContextCache,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        """Draft the chain after `anchor` at position `start`; the cache holds 0..start-1.

        temperature 0 takes the argmax of each row, else row d is drawn from softmax(z_d / t).
        """
        hidden = self.depth_rows(self.forward_block(anchor, start, cache))
        base = self.base_logits(hidden)
        ids = self.draft_ids
        state = None if self.markov_head is None else self.markov_head.initial_state(1)
        parent = torch.tensor([anchor], device=hidden.device)
        parents, tokens, logits, probs = [], [], [], []
        for depth in range(len(hidden)):
            row = base[depth]
            if self.markov_head is not None and state is not None:
                bias, state = self.markov_head.step(parent, hidden[depth][None], state)
                row = row + bias[0]
            if self.candidate_selector is not None:
                row = self._selected(row[None], hidden[depth][None], parent)[0]
            row_probs = _probabilities(row, temperature)
            parents.append(parent)
            drawn = (
                row_probs.argmax()[None]
                if temperature <= 0
                else torch.multinomial(row_probs, 1, generator=generator)
            )
            parent = ids[drawn]
            tokens.append(parent)
            logits.append(row)
            probs.append(row_probs)
        logit = self.confidence_logits(hidden, torch.cat(parents))
        return Proposal(
            tokens=torch.cat(tokens),
            base=base,
            hidden=hidden,
            logits=torch.stack(logits),
            probs=torch.stack(probs),
            confidence=None if logit is None else torch.sigmoid(logit),
        )

    def depth_rows(self, hidden: Tensor) -> Tensor:
        """[..., B, d] -> [..., D, d]: drops the anchor's row where it predicts nothing."""
        return hidden if self.config.sample_from_anchor else hidden[..., 1:, :]

    def path_logits(self, hidden: Tensor, parents: Tensor) -> Tensor:
        """`z_d` along given paths: hidden [..., D, d], parents [..., D] -> [..., D, V]."""
        base = self.base_logits(hidden)
        if self.candidate_selector is not None:
            rows = (base.flatten(0, -2), hidden.flatten(0, -2), parents.flatten())
            return self._selected(*rows).view(base.shape)
        if self.markov_head is None:
            return base
        return base + self.markov_head.block_bias(parents, hidden)

    def _selected(self, base: Tensor, hidden: Tensor, parents: Tensor) -> Tensor:
        assert self.candidate_selector is not None
        top_k = self.config.selector_top_k
        selected: Tensor = self.candidate_selector(base, hidden, parents, top_k)
        return selected

    def confidence_logits(self, hidden: Tensor, parents: Tensor) -> Tensor | None:
        """hidden [..., d], parents [...] token ids -> logits [...], None without the head."""
        if self.confidence_head is None:
            return None
        embedding = None if self.markov_head is None else self.markov_head.markov_w1(parents)
        return self.confidence_head(hidden, embedding).float()


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    """[V] -> [V] float32: softmax(logits / temperature), one-hot at temperature 0."""
    if temperature > 0:
        return torch.softmax(logits.float() / temperature, dim=-1)
    probs = torch.zeros_like(logits, dtype=torch.float32)
    probs[logits.argmax()] = 1.0
    return probs
