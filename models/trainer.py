"""Training steps: masked block passes over conversations, the losses, the optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localspec.models.batches import Example
from localspec.models.drafter import Drafter
from localspec.models.initial import freeze
from localspec.models.objective import Losses, Weights, block_losses


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        sequences: conversations per step.
        anchors: most blocks per conversation.
        lr: peak learning rate of the matrices (Muon) and, times `adam_share`, of the rest (AdamW).
        warmup: share of the run over which the rate rises.
        weights: of the losses.
        muon: whether matrices are trained with Muon; AdamW trains everything otherwise.
        bfloat16: whether matrix products run in bfloat16 (weights stay in float32).
    """

    sequences: int = 4
    anchors: int = 128
    lr: float = 0.01
    adam_lr: float = 1e-3
    warmup: float = 0.03
    weights: Weights = field(default_factory=Weights)
    muon: bool = True
    bfloat16: bool = True
    weight_decay: float = 0.01


class Trainer:
    """A drafter, its optimisers, and what it needs of the target.

    Features reach it divided by `feature_scale`: a target's channels differ by orders of
    magnitude, and an optimiser moves all weights alike. `folded` gives the drafter that takes
    features as they are.

    Args:
        drafter: tied to its target; the target's own parts are frozen.
        feature_scale: [n_features] typical size of each feature.
        recipe: how to train.
        softcap: c of the target's own soft-cap c tanh(logits / c) of its logits, if it has one.
    """

    def __init__(
        self,
        drafter: Drafter,
        feature_scale: Tensor,
        recipe: Recipe,
        softcap: float | None = None,
    ) -> None:
        self.drafter, self.recipe, self.softcap = drafter.train(), recipe, softcap
        freeze(drafter)
        self.device = drafter.fc.weight.device
        self.scale = feature_scale.to(self.device)
        with torch.no_grad():
            drafter.fc.weight.mul_(self.scale)
        assert drafter.target_lm_head is not None
        self.ids = drafter.draft_ids
        self.output = drafter.target_lm_head[self.ids]
        self.row_of = torch.full((drafter.config.vocab_size,), -1, device=self.device)
        self.row_of[self.ids] = torch.arange(len(self.ids), device=self.device)
        self.optimizers = self._optimizers()

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        r = self.recipe
        matrices: list[nn.Parameter] = []
        rest: list[nn.Parameter] = []
        for name, parameter in self.drafter.named_parameters():
            if parameter.requires_grad:
                inside = name == "fc.weight" or name.startswith("layers.")
                (matrices if inside and parameter.ndim == 2 and r.muon else rest).append(parameter)
        adam = torch.optim.AdamW(
            rest, lr=r.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        if not matrices:
            return [adam]
        muon = torch.optim.Muon(
            matrices,
            lr=r.lr,
            weight_decay=r.weight_decay,
            momentum=0.95,
            adjust_lr_fn="original",
        )
        return [muon, adam]

    def losses(self, example: Example) -> Losses:
        """The losses of one conversation's blocks."""
        depths = self.drafter.config.num_depths
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.bfloat16):
            hidden = self.drafter.forward_blocks(
                example.features / self.scale, example.anchors, example.tokens
            )
            hidden = self.drafter.depth_rows(hidden)
            steps = torch.arange(depths, device=self.device)
            at = example.anchors[:, None] + steps  # row i of the target predicts token i + 1
            parents = example.tokens[at]
            labels = self.row_of[example.tokens[at + 1]]
            logits = self.drafter.path_logits(hidden, parents)
            confidence = self.drafter.confidence_logits(hidden, parents)
            with torch.no_grad():
                needed = F.linear(example.hidden, self.output)
                if self.softcap is not None:
                    needed = self.softcap * torch.tanh(needed.float() / self.softcap)
        if self.drafter.candidate_selector is not None:  # it drafts its candidates only
            reachable = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0].isfinite()
            labels = torch.where(reachable, labels, -1)
        target = (needed.float() - example.log_norm[:, None])[at]
        return block_losses(logits, confidence, target, labels, self.recipe.weights)

    def step(self, examples: Iterable[Example], progress: float) -> Losses | None:
        """One optimiser step over some conversations; None when no anchor was among them.

        Args:
            examples: evaluated one after the other, so that memory holds one.
            progress: 0..1 of the run, which decides the learning rate.
        """
        seen: list[Losses] = []
        n = 0
        for example in examples:
            losses = self.losses(example)
            weight = len(example.anchors)
            (losses.total * weight).backward()
            seen.append(replace(losses, total=losses.total.detach()))
            n += weight
        if not seen:
            return None
        for parameter in self.drafter.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(n)
        nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimizer, peak in zip(self.optimizers, self._peaks(), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * schedule(progress, self.recipe.warmup)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return mean(seen)

    def _peaks(self) -> list[float]:
        r = self.recipe
        return [r.lr, r.adam_lr] if len(self.optimizers) == 2 else [r.adam_lr]

    @torch.no_grad()
    def folded(self) -> dict[str, Tensor]:
        """The drafter's state for features as they are."""
        state = {name: tensor.clone() for name, tensor in self.drafter.state_dict().items()}
        state["fc.weight"] /= self.scale
        return state

    @torch.no_grad()
    def evaluate(self, examples: Iterable[Example]) -> Held:
        """How a drafter does on conversations it was not trained on."""
        self.drafter.eval()
        agreed: list[Tensor] = []
        accepted: list[Tensor] = []
        loss: list[float] = []
        prefix: list[float] = []
        for example in examples:
            one = self.losses(example)
            agreed.append(one.agreed)
            prefix.append(float(one.prefix))
            accepted.append(one.accepted)
            loss.append(float(one.total))
        self.drafter.train()
        return Held(
            float(sum(loss) / max(1, len(loss))),
            torch.stack(agreed).mean(0).tolist(),
            torch.stack(accepted).mean(0).tolist(),
            1 + sum(prefix) / max(1, len(prefix)),
        )


@dataclass(frozen=True)
class Held:
    """Means over held-out conversations: loss, agreement of the argmax by depth, acceptance, and
    the accepted length of a chain on text like this (the bonus token included)."""

    loss: float
    agreed: list[float]
    accepted: list[float]
    length: float


def schedule(progress: float, warmup: float) -> float:
    """Share of the peak rate: a rise, then half a cosine down to a twentieth."""
    if progress < warmup:
        return max(0.02, progress / warmup)
    fall = (progress - warmup) / (1 - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, fall)))


def mean(losses: Sequence[Losses]) -> Losses:
    """The plain mean of several conversations' losses."""
    names = ("total", "ce", "tv", "confidence", "accepted", "agreed", "prefix")
    return Losses(*(torch.stack([getattr(one, name) for one in losses]).mean(0) for name in names))
