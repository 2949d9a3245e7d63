"""The drafter in llama.cpp against the torch reference, and what its passes leave behind."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from conftest import HEADS, prompt_of

from localspec import drafter as drafter_module
from localspec import drafting
from localspec.drafter import Drafter
from localspec.engine import DraftOptions
from localspec.ggufio import GgufFile
from localspec.heads import Heads
from localspec.llama import Context, ContextOptions, Model
from localspec.pairs import read_drafter
from localspec.target import Target
from localspec.tree import Block, build_tree

EXACT = {"kv_type": "f32", "flash_attn": False, "n_threads": 1}
NEAR = 1e-4
KINDS = [*HEADS, "vanilla-b16", "gated-no-markov-conf", "rnn-no-markov-conf"]


@contextmanager
def opened(tiny_target, path) -> Iterator[tuple[Target, Drafter]]:
    """A target and a drafter, float32 all the way."""
    with ExitStack() as stack:
        file = GgufFile(path)
        stack.callback(file.close)
        info = read_drafter(file)
        models = [Model(tiny_target.gguf), Model(path)]
        context = Context(models[0], ContextOptions(512, layer_inputs=info.target_layers, **EXACT))
        other = Context(
            models[1],
            ContextOptions(512, causal=False, hidden_states=True, **EXACT),
            other=context,
        )
        for thing in (*models, context, other):
            stack.callback(thing.close)
        yield Target(context), Drafter(other, info, Heads.from_gguf(file, info))


def feed(target: Target, tokens) -> np.ndarray:
    return np.concatenate([target.features(n) for _, n in target.prefill(list(tokens))])


def base_logits(drafter: Drafter, block: Block) -> np.ndarray:
    """[D, V] without any head."""
    every = np.arange(block.logits.shape[1])
    if block.baked is None:
        return block.logits.copy()
    return block.logits - drafter.heads.bias(drafter.heads.embed(block.baked), every)


def copied(block: Block) -> tuple[np.ndarray, np.ndarray]:
    hidden = np.zeros(0) if block.hidden is None else block.hidden.copy()
    return block.logits.copy(), hidden


def assert_equal_blocks(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=NEAR)


@pytest.mark.parametrize("name", ["vanilla", "rnn"])
@pytest.mark.parametrize("chunks", [[40], [1] * 40, [7, 20, 13], [39, 1]])
def test_features_may_come_in_any_chunks(name, chunks, tiny_target, tiny_drafter, monkeypatch):
    path, prompt = tiny_drafter(name)[1], prompt_of(0, 40)
    with opened(tiny_target, path) as (target, drafter):
        features = feed(target, prompt)
        drafter.absorb(features)
        expected = copied(drafter.propose(70))
    monkeypatch.setattr(drafter_module, "INJECT_ROWS", 16)
    with opened(tiny_target, path) as (target, drafter):
        feed(target, prompt)
        at = 0
        for n in chunks:
            drafter.absorb(features[at : at + n])
            at += n
            assert drafter.n_past == at
            if n == 7:  # proposals in between make no difference
                drafter.propose(99)
                assert drafter.n_past == at
        assert_equal_blocks(copied(drafter.propose(70)), expected)


def test_a_proposal_leaves_nothing_behind(tiny_target, tiny_drafter):
    with opened(tiny_target, tiny_drafter("gated")[1]) as (target, drafter):
        features = feed(target, prompt_of(1, 30))
        drafter.absorb(features[:20])
        first = copied(drafter.propose(70))
        assert drafter.context.seq_end(0) == 19
        size = drafter.context._api.llama_state_seq_get_size(drafter.context.handle, 0)
        other = copied(drafter.propose(71))
        assert np.abs(other[0] - first[0]).max() > 0.01
        assert_equal_blocks(copied(drafter.propose(70)), first)
        assert drafter.context._api.llama_state_seq_get_size(drafter.context.handle, 0) == size
        drafter.absorb(features[20:])
        grown = copied(drafter.propose(70))
    with opened(tiny_target, tiny_drafter("gated")[1]) as (target, drafter):
        feed(target, prompt_of(1, 30))
        drafter.absorb(features)
        assert_equal_blocks(copied(drafter.propose(70)), grown)


def test_a_window_keeps_the_most_recent_features_only(tiny_target, tiny_drafter, monkeypatch):
    monkeypatch.setattr(drafter_module, "INJECT_ROWS", 4)
    path, prompt = tiny_drafter("vanilla")[1], prompt_of(0, 40)
    sizes = []
    for window in (20, 100):
        with opened(tiny_target, path) as (target, drafter):
            drafter.window = window
            features = feed(target, prompt)
            for n in range(0, 40, 8):
                drafter.absorb(features[n : n + 8])
            blocks = [copied(drafter.propose(70))]
            sizes.append(drafter.context._api.llama_state_seq_get_size(drafter.context.handle, 0))
            assert drafter.n_past == 40 and drafter.context.seq_end(0) == 39
            # What is cut off the end comes back; what left the window does not.
            assert drafter.cut_point(38) == 38 and drafter.cut_point(99) == 40
            assert drafter.cut_point(25) == (0 if window == 20 else 25)
            drafter.cut(38)
            drafter.absorb(features[38:])
            assert_equal_blocks(copied(drafter.propose(70)), blocks[0])
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.parametrize("waiting", [0, 4, 15])
def test_cut_forgets(waiting, tiny_target, tiny_drafter):
    path = tiny_drafter("vanilla")[1]
    with opened(tiny_target, path) as (target, drafter):
        features = feed(target, prompt_of(2, 40))
        drafter.absorb(features[:25])
        expected = copied(drafter.propose(70))
        drafter.absorb(features[25 : 40 - waiting])
        drafter.propose(70)
        if waiting:
            drafter.absorb(features[40 - waiting :])
        assert drafter.n_past == 40
        drafter.cut(25)
        assert drafter.n_past == 25
        assert_equal_blocks(copied(drafter.propose(70)), expected)
        drafter.cut(30)
        assert drafter.n_past == 25


def test_cut_inside_what_waits(tiny_target, tiny_drafter):
    with opened(tiny_target, tiny_drafter("vanilla")[1]) as (target, drafter):
        features = feed(target, prompt_of(2, 40))
        drafter.absorb(features[:25])
        expected = copied(drafter.propose(70))
        drafter.cut(10)
        drafter.absorb(features[10:])
        drafter.cut(25)
        assert_equal_blocks(copied(drafter.propose(70)), expected)


def test_a_pass_that_was_interrupted_leaves_nothing_behind(tiny_target, tiny_drafter, monkeypatch):
    real = Context.decode_features

    def interrupted(self, *args):
        real(self, *args)
        raise KeyboardInterrupt  # as the signal comes, when the C function has returned

    with opened(tiny_target, tiny_drafter("vanilla")[1]) as (target, drafter):
        features = feed(target, prompt_of(3, 30))
        drafter.absorb(features[:12])
        drafter.propose(70)
        drafter.absorb(features[12:])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Context, "decode_features", interrupted)
            drafter.propose(70)
        drafter.cut(drafter.n_past)
        assert drafter.n_past == 12 and drafter.context.seq_end(0) == 11


@pytest.mark.parametrize("depth", [1, 3, 7, 50, None])
def test_fewer_depths_are_a_part_of_the_whole_block(depth, tiny_target, tiny_drafter):
    with opened(tiny_target, tiny_drafter("vanilla")[1]) as (target, drafter):
        drafter.absorb(feed(target, prompt_of(0)))
        whole = drafter.propose(70)
        logits, baked = whole.logits.copy(), whole.baked.copy()
        block = drafter.propose(70, depth)
        n = min(depth or 7, 7)
        assert block.depth == len(block.hidden) == len(block.baked) == n
        np.testing.assert_allclose(block.logits, logits[:n], atol=NEAR)
        assert block.baked.tolist() == baked[:n].tolist() and baked[0] == 70


def test_hidden_states_are_left_out_when_no_head_reads_them(load):
    engine = load("no-conf")
    assert engine._drafter.propose(70).hidden is None


# ---- parity

# Here the heads count for more than the base logits, by which a shortlist is made.
whole_tree = functools.partial(build_tree, shortlist=320)


def drafters(tiny_drafter, name):
    pytest.importorskip("torch").set_num_threads(1)  # llama.cpp has threads of its own
    from localspec.models import load_drafter

    checkpoint, path = tiny_drafter(name)
    return load_drafter(checkpoint.path), path


@pytest.mark.parametrize("name", [*KINDS, "plain", "dflash"])
def test_blocks_equal_those_of_the_torch_reference(name, tiny_target, tiny_drafter):
    reference, path = drafters(tiny_drafter, name)
    import torch

    from localspec.models import TinyTarget

    torch_target = TinyTarget.load(tiny_target.path)
    prompt = prompt_of(7, 50)
    _, hidden = torch_target(torch.tensor(prompt), torch_target.new_cache())
    features = torch_target.features(hidden, reference.config.target_layer_ids)
    cache = reference.new_cache()
    with opened(tiny_target, path) as (target, drafter):
        ours = feed(target, prompt)
        np.testing.assert_allclose(ours, features.numpy(), atol=2e-2)
        for start, stop in ((0, 1), (1, 20), (20, 50)):
            reference.absorb(features[start:stop], cache)
            drafter.absorb(ours[start:stop])
            for anchor in (70, 200):
                theirs = reference.propose(anchor, stop, cache)
                block = drafter.propose(anchor)
                assert block.depth == drafter.info.max_depth == len(theirs.tokens)
                base = base_logits(drafter, block)
                np.testing.assert_allclose(base, theirs.base.numpy(), atol=2e-2)
                hidden = drafter.context.hidden()[-block.depth :]
                np.testing.assert_allclose(hidden, theirs.hidden.numpy(), atol=2e-2)
                chain = whole_tree(block, drafter.heads, budget=block.depth, children=1, frontier=1)
                assert chain.token.tolist() == theirs.tokens.tolist()
                assert drafter.heads.has_confidence == (theirs.confidence is not None)
                if theirs.confidence is None:
                    continue
                parents = [anchor, *theirs.tokens.tolist()]
                sure = [
                    float(drafter.heads.confidence(np.array([parents[d]]), block.hidden[d])[0])
                    for d in range(block.depth)
                ]
                np.testing.assert_allclose(sure, theirs.confidence.numpy(), atol=5e-3)


@pytest.mark.parametrize("name", [*KINDS, "no-conf", "plain", "dflash"])
def test_whole_runs_equal_those_of_the_reference_evaluator(
    name, tiny_target, tiny_drafter, load, monkeypatch
):
    monkeypatch.setattr(drafting, "build_tree", whole_tree)
    reference, _ = drafters(tiny_drafter, name)
    from localspec.models import TinyTarget, speculative_decode

    torch_target = TinyTarget.load(tiny_target.path)
    engine = load(name)
    accepted = []
    for seed in range(5):
        prompt = prompt_of(seed)
        ids, rounds = speculative_decode(torch_target, reference, prompt, 60, {2})
        result = engine.complete(prompt, max_tokens=60, draft=DraftOptions(tokens=16))
        assert prompt + result.token_ids == ids
        ours = [r.accepted for r in result.rounds]
        theirs = [r.accepted for r in rounds]
        if result.finish_reason == "length":
            # The last round is cut at the limit; the evaluator may run one more for nothing.
            assert len(theirs) - len(ours) in (0, 1)
            del theirs[len(ours) :]
            assert ours.pop() <= theirs.pop()
        assert ours == theirs
        accepted += ours
    if engine._drafter.heads.kind != "none":  # a drafter without a head knows nothing here
        assert 0 in accepted and max(accepted) >= 3
