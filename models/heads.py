"""The heads that turn base logits into logits conditioned on the parent token.

Shapes: `...` any leading dimensions, r = Markov rank, d = hidden size, V = vocabulary, B = depths.
Formulas: DESIGN.md section 2. Parameter names are those of published checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localspec.models.config import DrafterConfig


class VanillaMarkovHead(nn.Module):
    """`z_d(u) = L_d + W2 W1[u]`: a low-rank table of transition logits, blind to the context."""

    def __init__(self, vocab_size: int, rank: int, drafted: int | None = None) -> None:
        """`drafted`: rows of a reduced vocabulary, V from here on."""
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, drafted or vocab_size, bias=False)

    def initial_state(self, *leading: int) -> Tensor:
        """[*leading, r] zeros: what `step` takes at the root. Only the rnn head ever changes it."""
        return self.markov_w1.weight.new_zeros(*leading, self.rank)

    def step(self, parents: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One depth for any number of parents at once.

        parents [...] token ids, hidden [..., d] of this depth, state [..., r] of the parents
        -> (bias [..., V] to add to L_d, state [..., r] of the children).
        """
        return self.markov_w2(self.markov_w1(parents)), state

    def block_bias(self, parents: Tensor, hidden: Tensor) -> Tensor:
        """Biases of whole given paths: parents [..., B], hidden [..., B, d] -> [..., B, V]."""
        state = self.initial_state(*parents.shape[:-1])
        rows = []
        for depth in range(parents.shape[-1]):
            bias, state = self.step(parents[..., depth], hidden[..., depth, :], state)
            rows.append(bias)
        return torch.stack(rows, dim=-2)


class GatedMarkovHead(VanillaMarkovHead):
    """`z_d(u) = L_d + W2 (sigmoid(G [h_d ; W1[u]] + b) * W1[u])`."""

    def __init__(
        self, vocab_size: int, rank: int, hidden_size: int, drafted: int | None = None
    ) -> None:
        super().__init__(vocab_size, rank, drafted)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(self, parents: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        u = self.markov_w1(parents)
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, u], dim=-1)))
        return self.markov_w2(gate * u), state


class RnnMarkovHead(VanillaMarkovHead):
    """`[g;c;o] = J [s ; W1[u] ; h_d] + b`, `s' = sig(g)*s + (1-sig(g))*tanh(c)`,
    `z = L_d + W2 tanh(o)`: the state s carries the whole path below the anchor."""

    def __init__(
        self, vocab_size: int, rank: int, hidden_size: int, drafted: int | None = None
    ) -> None:
        super().__init__(vocab_size, rank, drafted)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, parents: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joint = self.joint_proj(torch.cat([state, self.markov_w1(parents), hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return self.markov_w2(torch.tanh(output)), state


class ConfidenceHead(nn.Module):
    """`c_d(u) = sigmoid(w [h_d ; W1[u]] + b)`, or `sigmoid(w h_d + b)` with rank 0."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, parent_embedding: Tensor | None) -> Tensor:
        """hidden [..., d], parent_embedding [..., r] (ignored with rank 0) -> LOGITS [...]."""
        if self.rank:
            if parent_embedding is None:
                raise ValueError("this confidence head needs W1 of the parent tokens")
            hidden = torch.cat([hidden, parent_embedding], dim=-1)
        return self.proj(hidden).squeeze(-1)


def build_markov_head(config: DrafterConfig) -> VanillaMarkovHead | None:
    """The Markov head the config names, None with rank 0."""
    if config.markov_rank == 0:
        return None
    if config.markov_head_type == "vanilla":
        return VanillaMarkovHead(config.vocab_size, config.markov_rank, config.reduced_vocab)
    kind = {"gated": GatedMarkovHead, "rnn": RnnMarkovHead}[config.markov_head_type]
    return kind(config.vocab_size, config.markov_rank, config.hidden_size, config.reduced_vocab)


def build_confidence_head(config: DrafterConfig) -> ConfidenceHead | None:
    """The confidence head the config names, None when it has none."""
    if not config.enable_confidence_head:
        return None
    rank = config.markov_rank if config.confidence_head_with_markov else 0
    return ConfidenceHead(config.hidden_size, rank)
