"""The heads: hand-made numbers, the torch reference, and what comes out of the files."""

from __future__ import annotations

import math

import numpy as np
import pytest

from localspec import heads as module
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.heads import Heads, Linear
from localspec.pairs import read_drafter

F = np.float32


def rows(matrix):
    return np.asarray(matrix, F).__getitem__


def linear(weight, bias):
    return Linear(np.asarray(weight, F), np.asarray(bias, F))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


W1 = [[1.0, 2.0], [0.0, -1.0], [3.0, 0.5]]
W2 = [[1.0, 0.0], [0.0, 1.0], [2.0, -1.0]]
NO_STATE = np.zeros((1, 0), F)


def test_vanilla_adds_w2_w1():
    head = Heads("vanilla", 2, rows(W1), rows(W2))
    latent, state = head.latent(np.array([0, 2]), None, head.root_state())
    assert latent.tolist() == [[1, 2], [3, 0.5]] and state.shape == (1, 0)
    # Candidates 2 and 1, in that order: [2*1 - 2, 2], [2*3 - 0.5, 0.5].
    assert head.bias(latent, np.array([2, 1])).tolist() == [[0, 2], [5.5, 0.5]]


def test_gated_by_hand():
    head = Heads(
        "gated", 2, rows(W1), rows(W2), linear([[0.5, 0, 1, 0], [0, -1, 0, 0.25]], [0.1, -0.2])
    )
    latent, _ = head.latent(np.array([2]), np.array([2.0, 3.0], F), NO_STATE)
    gate = [sigmoid(0.5 * 2 + 3 + 0.1), sigmoid(-3 + 0.25 * 0.5 - 0.2)]
    np.testing.assert_allclose(latent[0], [gate[0] * 3, gate[1] * 0.5], rtol=1e-6)


def test_rnn_by_hand():
    # Rank 1, one hidden unit: [g; c; o] = J [s; W1[u]; h] + b.
    joint = linear([[1, 0.5, 0], [0, 1, -1], [2, 0, 1]], [0.1, 0.2, 0.3])
    head = Heads("rnn", 1, rows([[1.0], [2.0]]), rows([[1.0], [-1.0]]), joint)
    s, h = 0.4, 0.7
    latent, state = head.latent(np.array([1]), np.array([h], F), np.array([[s]], F))
    keep = sigmoid(s + 0.5 * 2 + 0.1)
    assert latent[0, 0] == pytest.approx(math.tanh(2 * s + h + 0.3), rel=1e-6)
    assert state[0, 0] == pytest.approx(keep * s + (1 - keep) * math.tanh(2 - h + 0.2), rel=1e-6)
    assert head.root_state().tolist() == [[0]]


def test_confidence_by_hand():
    head = Heads("vanilla", 2, rows(W1), rows(W2), None, linear([[1, -1, 0.5, 2]], [0.25]))
    found = head.confidence(np.array([0, 1]), np.array([0.5, 1.0], F))
    expected = [sigmoid(0.5 - 1 + 0.5 + 4 + 0.25), sigmoid(0.5 - 1 - 2 + 0.25)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    blind = Heads("vanilla", 2, rows(W1), rows(W2), None, linear([[1, -1, 0, 0]], [0.25]))
    np.testing.assert_allclose(
        blind.confidence(np.array([0, 1]), np.array([0.5, 1.0], F)), [sigmoid(-0.25)] * 2, rtol=1e-6
    )


def test_confidence_of_sure_heads_neither_overflows_nor_warns():
    head = Heads("vanilla", 2, rows(W1), rows(W2), None, linear([[500, 0, 0, 0]], [0]))
    with np.errstate(all="raise"):
        assert head.confidence(np.array([0]), np.array([1.0, 0], F)).tolist() == [1]
        assert head.confidence(np.array([0]), np.array([-1.0, 0], F)).tolist() == [0]


def test_without_a_head_nothing_is_added():
    head = Heads("none")
    latent, _ = head.latent(np.array([4, 5]), None, head.root_state())
    assert head.bias(latent, np.arange(3)).tolist() == [[0] * 3] * 2
    assert not head.needs_hidden and not head.has_confidence
    with pytest.raises(LocalspecError, match="no confidence head"):
        head.confidence(np.array([0]), np.zeros(2, F))


@pytest.mark.parametrize("parents", [1, 2, 5, 23])
def test_chunked_products_equal_whole_ones(parents, monkeypatch):
    rng = np.random.default_rng(0)
    w2 = rng.normal(size=(40, 6)).astype(F)
    head = Heads("vanilla", 6, rows(rng.normal(size=(9, 6))), rows(w2))
    latent, candidates = rng.normal(size=(parents, 6)).astype(F), rng.permutation(40)[:11]
    for limit in (1, 66, 200, 10**6):
        monkeypatch.setattr(module, "_SINGLE_THREADED", limit)
        np.testing.assert_allclose(
            head.bias(latent, candidates), latent @ w2[candidates].T, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("with_markov", [True, False])
def test_equal_to_the_torch_reference_along_a_path(kind, with_markov):
    torch = pytest.importorskip("torch")
    from localspec.models import heads as reference

    torch.manual_seed(3)
    v, r, d, depth = 30, 5, 8, 6
    theirs = {
        "vanilla": lambda: reference.VanillaMarkovHead(v, r),
        "gated": lambda: reference.GatedMarkovHead(v, r, d),
        "rnn": lambda: reference.RnnMarkovHead(v, r, d),
    }[kind]()
    confidence = reference.ConfidenceHead(d, r if with_markov else 0)
    hidden, path = torch.randn(depth, d), torch.randint(v, (depth,))
    with torch.no_grad():
        bias = theirs.block_bias(path, hidden).numpy()
        sure = torch.sigmoid(confidence(hidden, theirs.markov_w1(path))).numpy()
    state = {name: value.numpy() for name, value in theirs.state_dict().items()}
    name = {"vanilla": None, "gated": "gate_proj", "rnn": "joint_proj"}[kind]
    weight = np.zeros((1, d + r), F)
    weight[:, : d + r * with_markov] = confidence.proj.weight.detach().numpy()
    ours = Heads(
        kind,
        r,
        rows(state["markov_w1.weight"]),
        rows(state["markov_w2.weight"]),
        name and linear(state[f"{name}.weight"], state[f"{name}.bias"]),
        linear(weight, confidence.proj.bias.detach().numpy()),
    )
    travelling = ours.root_state()
    for at in range(depth):
        h = hidden[at].numpy()
        latent, travelling = ours.latent(path[at : at + 1].numpy(), h, travelling)
        np.testing.assert_allclose(ours.bias(latent, np.arange(v))[0], bias[at], atol=1e-5)
        np.testing.assert_allclose(
            ours.confidence(path[at : at + 1].numpy(), h), sure[at], atol=1e-6
        )


def test_every_parent_of_a_level_travels_with_its_own_state():
    rng = np.random.default_rng(1)
    joint = linear(rng.normal(size=(9, 8)), rng.normal(size=9))
    head = Heads("rnn", 3, rows(rng.normal(size=(7, 3))), rows(rng.normal(size=(7, 3))), joint)
    tokens, states = np.array([4, 1, 4]), rng.normal(size=(3, 3)).astype(F)
    h = rng.normal(size=2).astype(F)
    together = head.latent(tokens, h, states)
    for i in range(3):
        alone = head.latent(tokens[i : i + 1], h, states[i : i + 1])
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[i], b[0], rtol=1e-5, atol=1e-6)
    assert not np.allclose(together[0][0], together[0][2])


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn", "vanilla-b16", "no-conf"])
def test_heads_read_from_converted_files(name, tiny_drafter):
    checkpoint, path = tiny_drafter(name)
    t = checkpoint.tensors
    with GgufFile(path) as file:
        info = read_drafter(file)
        head = Heads.from_gguf(file, info)
        tokens = np.array([7, 0, 319])
        np.testing.assert_array_equal(head.embed(tokens), t["markov_head.markov_w1.weight"][tokens])
        latent = np.eye(head.rank, dtype=F)[:2]
        np.testing.assert_allclose(
            head.bias(latent, tokens), t["markov_head.markov_w2.weight"][tokens, :2].T, rtol=1e-6
        )
        assert head.has_confidence == (name != "no-conf")
        assert head.needs_hidden == (name != "no-conf")
        assert head.kind == info.head_type == checkpoint.config["markov_head_type"]


def test_misshapen_heads_are_refused(tiny_drafter):
    path = tiny_drafter("rnn")[1]
    with GgufFile(path) as file:
        info = read_drafter(file)
        wrong = type(info)(**{**vars(info), "n_vocab": info.n_vocab + 1})
        with pytest.raises(LocalspecError, match=r"markov_w1\.weight is missing or has the wrong"):
            Heads.from_gguf(file, wrong)
        wrong = type(info)(**{**vars(info), "head_type": "gated"})
        with pytest.raises(LocalspecError, match=r"gate_proj\.weight is missing"):
            Heads.from_gguf(file, wrong)
        wrong = type(info)(**{**vars(info), "head_type": "quantum"})
        with pytest.raises(LocalspecError, match="'quantum' Markov head"):
            Heads.from_gguf(file, wrong)
