"""The tiny models of the test-suite, and the reference target and loop on them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import tiny
from localspec.errors import LocalspecError
from localspec.models import TinyTarget, load_drafter, speculative_decode
from localspec.models.reference import Round

torch.set_num_threads(1)


def prompt(number: int) -> list[int]:
    """The chat template by hand, bytes as tokens."""

    def letters(text: str) -> list[int]:
        return [tiny.FIRST_BYTE + b for b in text.encode()]

    return [
        tiny.START_ID,
        *letters(f"user\n{number} hello"),
        tiny.EOS_ID,
        *letters("\n"),
        tiny.START_ID,
        *letters("assistant\n"),
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    return tiny.build_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(built: tiny.TinyModel) -> TinyTarget:
    return TinyTarget.load(built.path)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_drafts_are_accepted_sometimes_whole_sometimes_in_part(
    head: str, built: tiny.TinyModel, target: TinyTarget, tmp_path: Path
):
    drafter = load_drafter(tiny.build_drafter(tmp_path, built, head=head).path)
    rounds: list[Round] = []
    for number in range(8):
        ids, some = speculative_decode(target, drafter, prompt(number), 64, {tiny.EOS_ID})
        assert ids == target.greedy(prompt(number), 64, {tiny.EOS_ID})
        assert len(set(ids[len(prompt(number)) :])) > 10
        rounds += some
    accepted = np.array([r.accepted for r in rounds])
    assert 2 < accepted.mean() < 5
    assert set(accepted) >= {0, 1, 2, 3, 7}


def test_a_higher_noise_free_chain_is_accepted_more(tmp_path: Path):
    calm = tiny.build_target(tmp_path / "t", noise=0.0)
    built = tiny.build_drafter(tmp_path / "d", calm, base_noise=0.01, rank=96)
    _, rounds = speculative_decode(
        TinyTarget.load(calm.path), load_drafter(built.path), prompt(0), 64, {tiny.EOS_ID}
    )
    assert np.mean([r.accepted for r in rounds]) > 5


def test_other_drafter_shapes(built: tiny.TinyModel, target: TinyTarget, tmp_path: Path):
    for i, options in enumerate(
        [
            {"block_size": 16, "conf_markov": False},
            {"confidence": False, "target_layer_ids": [-1, 2]},
            {"head": "none"},
        ]
    ):
        drafter = load_drafter(tiny.build_drafter(tmp_path / str(i), built, **options).path)
        ids, rounds = speculative_decode(target, drafter, prompt(1), 24, {tiny.EOS_ID})
        assert ids == target.greedy(prompt(1), 24, {tiny.EOS_ID})
        assert len(rounds[0].draft) == options.get("block_size", 7)
        assert (rounds[0].conf is None) == (options.get("confidence") is False)


def test_a_stop_token_inside_a_draft_ends_the_run(
    built: tiny.TinyModel, target: TinyTarget, tmp_path: Path
):
    drafter = load_drafter(tiny.build_drafter(tmp_path, built).path)
    text = target.greedy(prompt(0), 64)[len(prompt(0)) :]
    for stop in dict.fromkeys(text[:24]):
        ids, rounds = speculative_decode(target, drafter, prompt(0), 64, {stop})
        assert ids[len(prompt(0)) :] == text[: text.index(stop) + 1]
        committed = 1 + sum(r.accepted for r in rounds)  # and a bonus token for all but the last
        assert len(text[: text.index(stop) + 1]) - committed in (len(rounds), len(rounds) - 1)


def test_builds_are_reproducible_and_seeds_differ(tmp_path: Path):
    def digest(name: str, seed: int) -> list[str]:
        model = tiny.build_target(tmp_path / name, seed=seed)
        tiny.build_drafter(tmp_path / name / "d", model, seed=seed)
        files = ["target.gguf", "model.safetensors", "d/model.safetensors"]
        return [hashlib.sha256((model.path / f).read_bytes()).hexdigest() for f in files]

    first, again, other = digest("a", 3), digest("b", 3), digest("c", 4)
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_target_cache_is_equivalent_to_one_pass(target: TinyTarget):
    tokens = torch.tensor(prompt(3))
    whole, hidden = target(tokens, target.new_cache())
    cache = target.new_cache()
    target(tokens[:5], cache)
    target(torch.tensor([40, 41]), cache)
    cache.crop(5)
    rest, rest_hidden = target(tokens[5:], cache)
    torch.testing.assert_close(rest, whole[5:], atol=1e-4, rtol=1e-4)
    assert len(hidden) == len(target.layers) + 1
    torch.testing.assert_close(rest_hidden[-1], hidden[-1][5:], atol=1e-4, rtol=1e-4)
    features = target.features(hidden, (-1, 1))
    assert torch.equal(features, torch.cat([target.embed_tokens(tokens), hidden[2]], -1))


@pytest.mark.parametrize("arch", ["qwen3", "llama", "qwen2"])
def test_gguf_and_directory_are_the_same_model(arch: str, tmp_path: Path):
    llama_cpp = pytest.importorskip("llama_cpp")
    built = tiny.build_target(tmp_path, arch=arch)
    ours = TinyTarget.load(built.path)
    theirs = llama_cpp.Llama(
        str(built.gguf), n_ctx=128, n_threads=1, logits_all=True, verbose=False
    )
    text = "<|im_start|>user\nhello the 日 12<|im_end|>\n".encode()
    tokens = theirs.tokenize(text, add_bos=False, special=True)
    assert tokens[0] == tiny.START_ID and theirs.detokenize(tokens, special=True) == text
    theirs.eval(tokens)
    expected = np.array(theirs.scores[: len(tokens)])
    theirs.close()
    logits, _ = ours(torch.tensor(tokens), ours.new_cache())
    # llama.cpp keeps keys and values in half precision by default.
    np.testing.assert_allclose(logits.numpy(), expected, atol=0.02)


def test_tied_embeddings_load(tmp_path: Path):
    built = tiny.build_target(tmp_path, tied=True, vocab=400)
    target = TinyTarget.load(built.path)
    assert target.lm_head is None and target.output_matrix.shape == (400, 96)
    assert len(target.greedy(prompt(0), 3)) == len(prompt(0)) + 3


def test_other_directories_are_refused(built: tiny.TinyModel, tmp_path: Path):
    with pytest.raises(LocalspecError, match="model directory"):
        TinyTarget.load(tmp_path)
    drafter = tiny.build_drafter(tmp_path, built)
    with pytest.raises(LocalspecError, match="is missing"):
        TinyTarget.load(drafter.path)
