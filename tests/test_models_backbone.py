"""models.backbone and models.drafter: the block pass, the masked pass, the proposal."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.errors import LocalspecError
from localspec.models import ContextCache, Drafter, DrafterConfig

torch.set_num_threads(1)

CONFIG = DrafterConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    block_size=5,
    mask_token_id=3,
    target_layer_ids=(-1, 1),
    layer_types=("full_attention", "full_attention"),
    markov_rank=6,
    markov_head_type="rnn",
    enable_confidence_head=True,
    confidence_head_with_markov=True,
)


def make(seed: int = 0, **changes: Any) -> Drafter:
    """A random drafter; norm weights differ from one so that a forgotten one is seen."""
    torch.manual_seed(seed)
    drafter = Drafter(dataclasses.replace(CONFIG, **changes))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.ndim == 2:
                parameter.normal_(0, 2 / parameter.shape[1] ** 0.5)
    return drafter.eval()


def context_of(drafter: Drafter, features: torch.Tensor) -> ContextCache:
    cache = drafter.new_cache()
    drafter.absorb(features, cache)
    return cache


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 30),
    window=st.none() | st.integers(2, 12),
    data=st.data(),
)
@torch.no_grad()
def test_masked_pass_equals_incremental_pass(length: int, window: int | None, data: Any):
    anchors = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=6))
    kinds = ("full_attention", "sliding_attention" if window else "full_attention")
    drafter = make(layer_types=kinds, sliding_window=window)
    generator = torch.Generator().manual_seed(length)
    features = torch.randn(length, CONFIG.num_features, generator=generator)
    tokens = torch.randint(CONFIG.vocab_size, (length,), generator=generator)
    masked = drafter.forward_blocks(features, torch.tensor(anchors), tokens)
    assert masked.shape == (len(anchors), CONFIG.block_size, CONFIG.hidden_size)
    for row, anchor in zip(masked, anchors, strict=True):
        block = drafter.forward_block(
            int(tokens[anchor]), anchor, context_of(drafter, features[:anchor])
        )
        torch.testing.assert_close(row, block, atol=1e-4, rtol=0)


def oracle(drafter: Drafter, features: np.ndarray, anchor: int) -> np.ndarray:
    """The block pass in float64 loops, written from the formulas and nothing of models."""
    c = drafter.config
    p = {name: tensor.double().numpy() for name, tensor in drafter.state_dict().items()}
    start, size, half = len(features), c.block_size, c.head_dim // 2

    def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean() + c.rms_norm_eps) * weight

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        out = np.empty_like(x)
        for i in range(half):
            angle = position * c.rope_theta ** (-2 * i / c.head_dim)
            turn = np.exp(1j * angle) * complex(x[i], x[i + half])
            out[i], out[i + half] = turn.real, turn.imag
        return out

    injected = [rms(p["fc.weight"] @ f, p["hidden_norm.weight"]) for f in features]
    tokens = [anchor] + [c.mask_token_id] * (size - 1)
    x = [p["embed_tokens.weight"][t] for t in tokens]
    for layer in range(c.num_hidden_layers):
        w = {k.split(".", 2)[2]: v for k, v in p.items() if k.startswith(f"layers.{layer}.")}
        normed = [rms(row, w["input_layernorm.weight"]) for row in x]
        sources = injected + normed
        output = []
        for i in range(size):
            heads = []
            for head in range(c.num_attention_heads):
                own = slice(head * c.head_dim, (head + 1) * c.head_dim)
                group = head * c.num_key_value_heads // c.num_attention_heads
                shared = slice(group * c.head_dim, (group + 1) * c.head_dim)
                q = rms(w["self_attn.q_proj.weight"][own] @ normed[i], w["self_attn.q_norm.weight"])
                q = rope(q, start + i)
                scores, values = [], []
                for position, source in enumerate(sources):
                    if c.window(layer) and start + i - position >= c.window(layer):
                        continue
                    k = w["self_attn.k_proj.weight"][shared] @ source
                    k = rope(rms(k, w["self_attn.k_norm.weight"]), position)
                    scores.append(q @ k / np.sqrt(c.head_dim))
                    values.append(w["self_attn.v_proj.weight"][shared] @ source)
                weights = np.exp(np.array(scores) - max(scores))
                heads.append(weights / weights.sum() @ np.array(values))
            output.append(w["self_attn.o_proj.weight"] @ np.concatenate(heads))
        x = [row + out for row, out in zip(x, output, strict=True)]
        for i, row in enumerate(x):
            normed_row = rms(row, w["post_attention_layernorm.weight"])
            gate = w["mlp.gate_proj.weight"] @ normed_row
            up = w["mlp.up_proj.weight"] @ normed_row
            x[i] = row + w["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return np.array([rms(row, p["norm.weight"]) for row in x])


@pytest.mark.parametrize("length", [0, 1, 9])
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_block_against_plain_loops(length: int, window: int | None):
    drafter = make(layer_types=("full_attention", "sliding_attention"), sliding_window=window or 99)
    features = torch.randn(length, CONFIG.num_features)
    hidden = drafter.forward_block(7, length, context_of(drafter, features))
    expected = oracle(drafter, features.double().numpy(), 7)
    np.testing.assert_allclose(hidden.numpy(), expected, atol=2e-5)


@torch.no_grad()
def test_context_can_grow_in_pieces_and_be_cropped():
    drafter = make()
    features = torch.randn(11, CONFIG.num_features)
    whole = drafter.forward_block(5, 9, context_of(drafter, features[:9]))
    cache = context_of(drafter, features[:4])
    drafter.absorb(features[4:7], cache)
    drafter.absorb(torch.randn(2, CONFIG.num_features), cache)  # rejected and taken back
    cache.crop(7)
    drafter.absorb(features[7:9], cache)
    assert len(cache) == 9
    torch.testing.assert_close(drafter.forward_block(5, 9, cache), whole, atol=1e-5, rtol=0)
    assert len(cache) == 9
    with pytest.raises(ValueError, match="crop"):
        cache.crop(10)
    with pytest.raises(ValueError, match="positions"):
        drafter.forward_block(5, 8, cache)


def test_masked_pass_trains():
    drafter = make()
    features, tokens = torch.randn(12, CONFIG.num_features), torch.randint(40, (12,))
    hidden = drafter.depth_rows(drafter.forward_blocks(features, torch.tensor([3, 8]), tokens))
    parents = torch.randint(40, (2, CONFIG.num_depths))
    loss = drafter.path_logits(hidden, parents).logsumexp(-1).mean()
    logits = drafter.confidence_logits(hidden, parents)
    assert logits is not None
    (loss + logits.mean()).backward()
    without = [n for n, p in drafter.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_greedy_proposal_is_consistent(head: str):
    drafter = make(markov_head_type=head)
    features = torch.randn(6, CONFIG.num_features)
    proposal = drafter.propose(9, 6, context_of(drafter, features))
    assert torch.equal(proposal.tokens, proposal.logits.argmax(-1))
    assert torch.equal(proposal.probs.argmax(-1), proposal.tokens)
    assert torch.equal(proposal.probs.sum(-1), torch.ones(5))
    parents = torch.cat([torch.tensor([9]), proposal.tokens[:-1]])
    torch.testing.assert_close(drafter.path_logits(proposal.hidden, parents), proposal.logits)
    torch.testing.assert_close(drafter.base_logits(proposal.hidden), proposal.base)
    logits = drafter.confidence_logits(proposal.hidden, parents)
    assert logits is not None and proposal.confidence is not None
    torch.testing.assert_close(torch.sigmoid(logits), proposal.confidence)


def test_sampled_proposal_draws_from_its_probs():
    drafter = make()
    cache = context_of(drafter, torch.randn(6, CONFIG.num_features))
    generator = torch.Generator().manual_seed(1)
    proposals = [drafter.propose(9, 6, cache, 1.5, generator) for _ in range(600)]
    for proposal in proposals[:20]:
        torch.testing.assert_close(proposal.probs, torch.softmax(proposal.logits / 1.5, -1))
    first = torch.bincount(torch.stack([p.tokens[0] for p in proposals]), minlength=40) / 600
    # Total variation of 600 draws over 40 tokens stays far below this; a wrong rule does not.
    assert (first - proposals[0].probs[0]).abs().sum() / 2 < 0.12
    again = drafter.propose(9, 6, cache, 1.5, torch.Generator().manual_seed(1))
    assert torch.equal(again.tokens, proposals[0].tokens)


def test_without_heads_the_chain_is_the_base_argmax():
    drafter = make(markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    proposal = drafter.propose(9, 0, drafter.new_cache())
    assert proposal.confidence is None
    assert torch.equal(proposal.tokens, proposal.base.argmax(-1))


def test_mask_positions_only():
    anchored, masked = make(), make(sample_from_anchor=False)
    masked.load_state_dict(anchored.state_dict())
    cache = context_of(anchored, torch.randn(4, CONFIG.num_features))
    one, other = anchored.propose(9, 4, cache), masked.propose(9, 4, cache)
    assert len(one.tokens) == 5 and len(other.tokens) == 4
    torch.testing.assert_close(other.hidden, one.hidden[1:])
    # Depth 1 is now row 1, and its parent is still the anchor.
    assert masked.markov_head is not None
    bias, _ = masked.markov_head.step(
        torch.tensor([9]), one.hidden[1][None], masked.markov_head.initial_state(1)
    )
    torch.testing.assert_close(other.logits[0], one.base[1] + bias[0])


def test_target_matrices_when_the_checkpoint_has_none():
    full = make()
    bare = Drafter(CONFIG, own_embed=False, own_lm_head=False)
    assert bare.load_state_dict(full.state_dict(), strict=False).missing_keys == []
    assert not any("embed" in name or "lm_head" in name for name in bare.state_dict())
    with pytest.raises(LocalspecError, match="tie_target"):
        bare.propose(9, 0, bare.new_cache())
    with pytest.raises(LocalspecError, match="tie_target"):
        bare.base_logits(torch.zeros(24))
    assert full.embed_tokens is not None and full.lm_head is not None
    embed, lm_head = full.embed_tokens.weight, full.lm_head.weight
    with pytest.raises(LocalspecError, match="trained for"):
        bare.tie_target(embed, lm_head[:-1])
    bare.tie_target(embed, lm_head)
    assert not any("target" in name for name in bare.state_dict())
    torch.testing.assert_close(
        bare.propose(9, 0, bare.new_cache()).logits, full.propose(9, 0, full.new_cache()).logits
    )
