"""The losses, computed by hand on cases small enough for that; and where their gradients go."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from localspec.ggufio import GgufFile  # noqa: E402
from localspec.models.batches import Example  # noqa: E402
from localspec.models.initial import draft_vocabulary, new_drafter  # noqa: E402
from localspec.models.objective import Weights, block_losses  # noqa: E402
from localspec.models.shape import drafter_config  # noqa: E402
from localspec.models.trainer import Recipe, Trainer  # noqa: E402

torch.set_num_threads(1)


def logs(*rows):
    return torch.tensor(rows).log()[None]


def test_two_depths_by_hand():
    """q, p and the label of both depths are simple fractions."""
    q = logs((1 / 2, 1 / 4, 1 / 4), (1 / 8, 1 / 8, 3 / 4))
    p = logs((1 / 4, 1 / 4, 1 / 2), (1 / 4, 1 / 4, 1 / 2))
    # What can be accepted: sum of min(p, q).
    accepted = (1 / 4 + 1 / 4 + 1 / 4, 1 / 8 + 1 / 8 + 1 / 2)
    first = 1 / (1 + math.exp(-1 / 4))  # exp(-k/4), scaled to a sum of 1
    w = (first, 1 - first)
    logit = 0.4
    c = 1 / (1 + math.exp(-logit))
    bce = [-(a * math.log(c) + (1 - a) * math.log(1 - c)) for a in accepted]
    ce = w[0] * math.log(2) + w[1] * math.log(8)
    tv = w[0] * (1 - accepted[0]) + w[1] * (1 - accepted[1])
    conf = w[0] * bce[0] + w[1] * bce[1]
    # Softmax does not mind a constant in every logit.
    found = block_losses(
        q + 3, torch.full((1, 2), logit), p, torch.tensor([[0, 1]]), Weights(0.1, 0.9, 1.0, 4.0)
    )
    assert float(found.ce) == pytest.approx(ce, abs=1e-6)
    assert float(found.tv) == pytest.approx(tv, abs=1e-6)
    assert float(found.confidence) == pytest.approx(conf, abs=1e-6)
    assert float(found.total) == pytest.approx(0.1 * ce + 0.9 * tv + conf, abs=1e-6)
    np.testing.assert_allclose(found.accepted, accepted, atol=1e-6)
    assert found.agreed.tolist() == [1.0, 0.0] and float(found.prefix) == 1.0


def test_the_total_variation_is_the_distance():
    """1/2 sum |p - q| of whole distributions, and a mean over anchors."""
    rng = torch.Generator().manual_seed(3)
    q, p = torch.rand(2, 5, 1, 9, generator=rng).log_softmax(-1)
    found = block_losses(q, None, p, torch.zeros(5, 1, dtype=torch.long), Weights())
    distance = 0.5 * (q.exp() - p.exp()).abs().sum(-1).mean()
    assert float(found.tv) == pytest.approx(float(distance), abs=1e-6)
    assert float(found.confidence) == 0


def test_what_cannot_be_drafted_counts_as_rejected():
    """The target puts 3/4 on tokens outside the reduced vocabulary; the label is one of them."""
    q = logs((1 / 2, 1 / 2))
    p = logs((1 / 8, 1 / 8))
    found = block_losses(q, None, p, torch.tensor([[-1]]), Weights())
    assert float(found.accepted[0]) == pytest.approx(1 / 4)
    assert float(found.tv) == pytest.approx(3 / 4)
    assert float(found.ce) == 0 and float(found.agreed[0]) == 0


def example(config, length: int = 24, seed: int = 0) -> Example:
    """A text of random tokens and states."""
    rng = torch.Generator().manual_seed(seed)
    hidden = torch.randn(length, config.hidden_size, generator=rng)
    return Example(
        tokens=torch.randint(4, config.vocab_size, (length,), generator=rng),
        features=torch.randn(length, config.num_features, generator=rng),
        hidden=hidden,
        log_norm=torch.full((length,), 9.0),
        anchors=torch.tensor([2, 7, 11]),
    )


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("muon", [False, True])
def test_gradients_reach_what_is_trained_and_nothing_else(head, reduced, muon, tiny_target):
    with GgufFile(tiny_target.gguf) as target:
        config = drafter_config(target, {"head": head, "block_size": 4, "layers": 2, "rank": 8})
        ids = draft_vocabulary(np.arange(320), 100) if reduced else None
        config = replace(config, draft_vocab_size=100 if reduced else None)
        drafter = new_drafter(config, target, draft_ids=ids, seed=1)
        embed = drafter.target_embed.clone()
    trainer = Trainer(drafter, torch.ones(config.num_features), Recipe(muon=muon, bfloat16=False))
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    for step in range(3):  # W2 starts at zero, so W1 and the head's gates learn from then on
        trainer.step([example(config, seed=step)], 0.5)
    after = drafter.state_dict()
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    frozen = {"lm_head.weight", "d2t"} & set(after)
    assert frozen == ({"lm_head.weight", "d2t"} if reduced else set())
    assert moved == set(after) - frozen
    assert torch.equal(drafter.target_embed, embed)


def test_the_scale_of_features_is_folded_back(tiny_target):
    """Training on scaled features and drafting from raw ones is the same arithmetic."""
    with GgufFile(tiny_target.gguf) as target:
        config = drafter_config(target, {"block_size": 4, "layers": 1})
        drafter = new_drafter(config, target, seed=1)
    scale = torch.linspace(0.1, 30, config.num_features)
    text = example(config)
    before = drafter.forward_blocks(text.features, text.anchors, text.tokens).detach()
    trainer = Trainer(drafter, scale, Recipe(bfloat16=False))
    scaled = drafter.forward_blocks(text.features / scale, text.anchors, text.tokens)
    torch.testing.assert_close(scaled, before, atol=1e-4, rtol=1e-4)
    drafter.load_state_dict(trainer.folded())
    folded = drafter.forward_blocks(text.features, text.anchors, text.tokens)
    torch.testing.assert_close(folded, before, atol=1e-4, rtol=1e-4)


def test_a_softcapped_target_is_compared_with_what_it_says(tiny_target):
    """Gemma's c tanh(z / c): without it the accepted share would be computed for other logits."""
    with GgufFile(tiny_target.gguf) as target:
        config = drafter_config(target, {"block_size": 4, "layers": 1})
        drafter = new_drafter(config, target, seed=1)
    text, cap = example(config), 2.0
    z = cap * torch.tanh(text.hidden @ drafter.target_lm_head.T / cap)
    text = replace(text, log_norm=z.logsumexp(-1))
    recipe = Recipe(bfloat16=False)
    trainer = Trainer(drafter, torch.ones(config.num_features), recipe, softcap=cap)
    at = text.anchors[:, None] + torch.arange(4)
    hidden = drafter.forward_blocks(text.features, text.anchors, text.tokens)
    logits = drafter.path_logits(hidden, text.tokens[at])
    right = block_losses(logits, None, z.log_softmax(-1)[at], text.tokens[at + 1], Weights())
    found = trainer.losses(text)
    assert float(found.tv) == pytest.approx(float(right.tv), abs=1e-5)
    assert float(found.ce) == pytest.approx(float(right.ce), abs=1e-5)
