"""What a DSpark drafter is trained on: three losses over blocks drafted along real text.

Shapes: A anchors, D depths, V rows of the drafter's output matrix, d = hidden size.

For the row of depth k (0-based) with draft distribution q, target distribution p and the text's
next token y:

    ce   = -log q(y)
    tv   = 1/2 sum |p - q| = 1 - sum min(p, q)     (1 - the chance that a draft is accepted)
    conf = BCE(confidence, sum min(p, q))

    loss = sum_k w_k (0.1 ce + 0.9 tv + 1.0 conf) / sum_k w_k,   w_k = exp(-k / gamma)

Source: the DSpark paper's weights and decay; `sum min(p, q)` is the acceptance rate of speculative
sampling (Leviathan et al. 2023), which the target's distribution gives without drawing anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Weights:
    """Shares of the three losses, and how fast deeper rows count less."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    gamma: float = 4.0


@dataclass(frozen=True)
class Losses:
    """Sums over the rows of one call, and what a progress bar shows.

    Attributes:
        total: what is minimised (a mean over anchors).
        ce, tv, confidence: the three terms, each as it enters `total` before its share.
        accepted: [D] mean of `sum min(p, q)` by depth.
        agreed: [D] how often the draft's argmax is the text's token, by depth.
        prefix: mean number of depths agreed on from the first: on greedy text, what a chain
            commits beyond the bonus token.
    """

    total: Tensor
    ce: Tensor
    tv: Tensor
    confidence: Tensor
    accepted: Tensor
    agreed: Tensor
    prefix: Tensor


def depth_weights(depths: int, gamma: float, like: Tensor) -> Tensor:
    """[D]: exp(-k / gamma), scaled to a sum of 1."""
    w = torch.exp(-torch.arange(depths, device=like.device, dtype=torch.float32) / gamma)
    return w / w.sum()


def block_losses(
    logits: Tensor,
    confidence: Tensor | None,
    target_log_probs: Tensor,
    labels: Tensor,
    weights: Weights,
) -> Losses:
    """The losses of A blocks.

    Args:
        logits: [A, D, V] of the drafter, conditioned on the text's tokens as parents.
        confidence: [A, D] logits of the confidence head, None without one.
        target_log_probs: [A, D, V] log p of the drafted tokens under the whole vocabulary, so
            that what the drafter cannot draft counts as never accepted.
        labels: [A, D] rows of the text's next tokens; -1 where the drafter cannot draft it.
        weights: shares and decay.
    """
    anchors, depths, _ = logits.shape
    w = depth_weights(depths, weights.gamma, logits)
    log_q = F.log_softmax(logits.float(), dim=-1)
    known = labels >= 0
    picked = log_q.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    ce = -(w * torch.where(known, picked, 0.0)).sum() / anchors
    accepted = torch.minimum(log_q.exp(), target_log_probs.exp()).sum(-1)
    tv = (w * (1 - accepted)).sum() / anchors
    if confidence is None:
        conf = torch.zeros_like(tv)
    else:
        rows = F.binary_cross_entropy_with_logits(
            confidence.float(), accepted.detach().clamp(0, 1), reduction="none"
        )
        conf = (w * rows).sum() / anchors
    total = weights.ce * ce + weights.tv * tv + weights.confidence * conf
    with torch.no_grad():
        agreed = ((log_q.argmax(-1) == labels) & known).float()
        prefix = agreed.cumprod(-1).sum(-1).mean()
    return Losses(
        total,
        ce.detach(),
        tv.detach(),
        conf.detach(),
        accepted.detach().mean(0),
        agreed.mean(0),
        prefix,
    )
