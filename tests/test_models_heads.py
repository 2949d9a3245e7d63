"""models.heads against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from localspec.models.heads import (
    ConfidenceHead,
    GatedMarkovHead,
    RnnMarkovHead,
    VanillaMarkovHead,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def fill(head: torch.nn.Module, **values: list) -> None:
    """Set parameters by name; `__` stands for the dot."""
    parameters = dict(head.named_parameters())
    assert {name.replace("__", ".") for name in values} == set(parameters)
    with torch.no_grad():
        for name, value in values.items():
            parameters[name.replace("__", ".")].copy_(torch.tensor(value))


def test_vanilla():
    head = VanillaMarkovHead(3, 2)
    fill(
        head,
        markov_w1__weight=[[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]],
        markov_w2__weight=[[1.0, 0.0], [0.0, 1.0], [2.0, -1.0]],
    )
    state = head.initial_state(1)
    bias, after = head.step(torch.tensor([2]), torch.zeros(1, 5), state)
    assert bias.tolist() == [[3.0, 0.5, 5.5]]
    assert torch.equal(after, state)


def test_gated():
    head = GatedMarkovHead(2, 1, hidden_size=2)
    fill(
        head,
        markov_w1__weight=[[2.0], [-1.0]],
        markov_w2__weight=[[1.0], [3.0]],
        gate_proj__weight=[[0.5, -0.25, 2.0]],  # two of the hidden state, then W1[u]
        gate_proj__bias=[0.1],
    )
    hidden = torch.tensor([[1.0, 2.0]])
    bias, _ = head.step(torch.tensor([1]), hidden, head.initial_state(1))
    latent = sigmoid(0.5 * 1 - 0.25 * 2 + 2.0 * -1 + 0.1) * -1.0
    assert bias[0].tolist() == pytest.approx([latent, 3 * latent])


def test_rnn_carries_its_state_along_the_path():
    head = RnnMarkovHead(2, 1, hidden_size=1)
    # rows: gate, candidate, output; columns: state, W1[u], hidden
    fill(
        head,
        markov_w1__weight=[[0.5], [-1.0]],
        markov_w2__weight=[[1.0], [-2.0]],
        joint_proj__weight=[[0.3, 1.0, -0.5], [0.7, -0.2, 0.4], [1.1, 0.6, 0.9]],
        joint_proj__bias=[0.05, -0.1, 0.2],
    )
    parents, hidden = [1, 0, 1], [0.5, -1.0, 2.0]
    w1 = [0.5, -1.0]
    state, expected, states = 0.0, [], []
    for u, h in zip(parents, hidden, strict=True):
        gate = sigmoid(0.3 * state + 1.0 * w1[u] - 0.5 * h + 0.05)
        candidate = math.tanh(0.7 * state - 0.2 * w1[u] + 0.4 * h - 0.1)
        output = math.tanh(1.1 * state + 0.6 * w1[u] + 0.9 * h + 0.2)
        state = gate * state + (1 - gate) * candidate
        expected.append([output, -2 * output])
        states.append(state)
    block = head.block_bias(torch.tensor(parents), torch.tensor(hidden)[:, None])
    torch.testing.assert_close(block, torch.tensor(expected))

    # The same path step by step, two copies of it at once.
    running = head.initial_state(2)
    for depth, (u, h) in enumerate(zip(parents, hidden, strict=True)):
        bias, running = head.step(torch.tensor([u, u]), torch.full((2, 1), h), running)
        torch.testing.assert_close(bias, torch.tensor([expected[depth]] * 2))
        torch.testing.assert_close(running, torch.full((2, 1), states[depth]))


def test_confidence_with_and_without_the_markov_feature():
    head = ConfidenceHead(2, 1)
    fill(head, proj__weight=[[1.0, -2.0, 0.5]], proj__bias=[0.25])
    hidden = torch.tensor([[3.0, 1.0]])
    assert head(hidden, torch.tensor([[4.0]])).tolist() == [3.0 - 2.0 + 2.0 + 0.25]
    with pytest.raises(ValueError, match="W1"):
        head(hidden, None)

    plain = ConfidenceHead(2, 0)
    fill(plain, proj__weight=[[1.0, -2.0]], proj__bias=[0.25])
    assert plain(hidden, torch.tensor([[4.0]])).tolist() == [1.25]
    assert plain(hidden, None).tolist() == [1.25]


@pytest.mark.parametrize("kind", [VanillaMarkovHead, GatedMarkovHead, RnnMarkovHead])
def test_a_level_of_parents_equals_one_by_one(kind: type):
    torch.manual_seed(0)
    head = kind(20, 4) if kind is VanillaMarkovHead else kind(20, 4, 6)
    parents, hidden, state = torch.randint(20, (5,)), torch.randn(5, 6), torch.randn(5, 4)
    bias, after = head.step(parents, hidden, state)
    for i in range(5):
        one, one_after = head.step(parents[i], hidden[i], state[i])
        torch.testing.assert_close(bias[i], one)
        torch.testing.assert_close(after[i], one_after)
