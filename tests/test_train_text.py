"""Prompts, the text on disk, and what a training step makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from localspec.errors import LocalspecError  # noqa: E402
from localspec.models import prompting  # noqa: E402
from localspec.models.batches import anchors_of, chosen, load, split  # noqa: E402
from localspec.models.shape import vocabulary_size  # noqa: E402
from localspec.models.store import Store  # noqa: E402
from localspec.models.synthesis import Conversation  # noqa: E402
from localspec.transcript import save as save_transcript  # noqa: E402


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": c} for c in contents]


# --- prompts -----------------------------------------------------------------------------------


def test_every_way_to_write_prompts(tmp_path: Path):
    lines = tmp_path / "p.jsonl"
    lines.write_text(
        '{"turns": ["first", "second"]}\n\n"third"\nplain text, not JSON\n[not JSON either\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
        '"third"\n'
    )
    found = prompting.read(lines)
    assert found == [
        said("first"),
        said("third"),
        said("plain text, not JSON"),
        said("[not JSON either"),
        [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    ]


def test_chat_logs_give_every_user_message_with_what_went_before(tmp_path: Path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    save_transcript(tmp_path / "chat.json", messages)
    (tmp_path / "more.txt").write_text("another prompt\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert prompting.read(tmp_path) == [messages[:1], messages[:3], said("another prompt")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ('{"turns": []}\n{"x": 1}\n', "line 1: is no prompt"),
        ('{"turns": ["a"]}\n{"turns": \n', "line 2: is not JSON"),
        ('{"messages": [{"role": "user"}]}', "needs a role and a text"),
        ('{"messages": 3}', "is no prompt"),
    ],
)
def test_prompts_that_are_none(text: str, message: str, tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text(text)
    with pytest.raises(LocalspecError, match=message) as caught:
        prompting.read(file)
    assert "\n" not in str(caught.value)


def test_prompts_that_cannot_be_read(tmp_path: Path):
    with pytest.raises(LocalspecError, match="cannot read"):
        prompting.read(tmp_path / "none.jsonl")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(LocalspecError, match="no UTF-8"):
        prompting.read(tmp_path / "b.txt")


def test_the_schedule_is_fixed_and_mixes_temperatures():
    prompts = [said(str(i)) for i in range(8)]
    plan = list(prompting.schedule(prompts, 3))
    assert plan == list(prompting.schedule(prompts, 3)) != list(prompting.schedule(prompts, 4))
    assert [index for index, _, _ in plan] == list(range(8 * prompting.MOST_PASSES))
    first = plan[:8]
    assert sorted(m[0]["content"] for _, m, _ in first) == [str(i) for i in range(8)]
    assert sum(t == 0 for _, _, t in first) == 4
    # Nobody is answered greedily twice: the second answer would be the first.
    assert all(t > 0 for _, _, t in plan[8:])
    by_prompt = {index: m for index, m, _ in plan}
    assert all(by_prompt[i] == by_prompt[i + 8] for i in range(8))


# --- the store -----------------------------------------------------------------------------------


def conversation(index: int, length: int = 30, prompt: int = 6, width: int = 8) -> Conversation:
    rng = np.random.default_rng(index)
    return Conversation(
        index,
        rng.integers(0, 99, length).astype(np.int32),
        prompt,
        (0.0, 0.7)[index % 2],
        rng.standard_normal((length, 3 * width)).astype(np.float16),
        rng.standard_normal((length, width)).astype(np.float16),
        rng.standard_normal(length).astype(np.float32),
    )


def no_target(tokens):
    raise AssertionError("everything is on disk")


def test_features_stay_inside_the_budget_and_the_rest_is_evaluated_again(tmp_path: Path):
    shards = [[conversation(4 * s + i) for i in range(4)] for s in range(5)]
    size = sum(c.features.nbytes + c.hidden.nbytes + c.log_norm.nbytes for c in shards[0])
    budget = 2 * size + 9000  # headers included, two shards fit
    store = Store(tmp_path, budget)
    for shard in shards:
        store.add(shard)
    assert 0 < store.bytes_of_features <= budget
    on_disk = sum(f.stat().st_size for f in (tmp_path / "features").iterdir())
    assert on_disk == store.bytes_of_features
    asked = []
    everything = {tuple(c.tokens.tolist()): c for shard in shards for c in shard}

    def evaluate(tokens):
        asked.append(tokens)
        c = everything[tuple(tokens.tolist())]
        return c.features, c.hidden, c.log_norm

    again = Store(tmp_path, budget)  # as after a kill
    assert again.entries == store.entries and again.n_tokens == 20 * 30
    for entry, rows in zip(again.entries, again.rows(again.entries, evaluate), strict=True):
        c = conversation(entry.index)
        for found, right in zip(rows, (c.features, c.hidden, c.log_norm), strict=True):
            np.testing.assert_array_equal(found, right)
    assert len(asked) == 3 * 4


def test_a_shard_that_a_kill_left_behind_is_none(tmp_path: Path):
    store = Store(tmp_path, 1 << 30)
    store.add([conversation(0)])
    # Features are written before the text; a torn file has another name.
    features = tmp_path / "features" / "000000.safetensors"
    stale = tmp_path / "features" / "000001.safetensors"
    stale.write_bytes(features.read_bytes())
    (tmp_path / "text" / "000001.part").write_bytes(b"half")
    for budget in (0, 1 << 30):
        again = Store(tmp_path, budget)
        again.add([conversation(again.entries[-1].index + 1)])
        assert not stale.exists()
    rows = again.rows(again.entries[2:], no_target)
    np.testing.assert_array_equal(rows[0][0], conversation(2).features)


def test_a_damaged_shard_is_named(tmp_path: Path):
    store = Store(tmp_path, 1 << 30)
    store.add([conversation(0)])
    file = tmp_path / "text" / "000000.safetensors"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(LocalspecError, match=r"000000.safetensors: is damaged"):
        Store(tmp_path, 1 << 30)


# --- batches -------------------------------------------------------------------------------------


@pytest.fixture
def entries(tmp_path: Path):
    store = Store(tmp_path, 1 << 30)
    store.add([conversation(i, 20 + i % 7) for i in range(60)])
    return store, store.entries


def test_batches_follow_from_seed_and_step(entries):
    store, all_of = entries
    train, held = split(all_of, 6, 0)
    assert not {e.index for e in train} & {e.index for e in held} and len(train + held) == 60
    assert (train, held) == split(all_of[::-1], 6, 0)  # whatever order they came in

    def batch(step: int, seed: int = 0):
        some = chosen(train, step, 2, seed)
        rng = np.random.default_rng([seed, step])
        anchors = [anchors_of(e, 4, 5, rng) for e in some]
        return [
            (e.index, x.anchors.tolist(), x.tokens.sum().item())
            for e, x in zip(some, load(store, some, no_target, anchors), strict=True)
        ]

    assert [batch(s) for s in range(40)] == [batch(s) for s in range(40)]
    assert batch(3) != batch(4) and batch(3) != batch(3, seed=1)
    # Every conversation once per epoch.
    n = len(train) // 2
    seen = [index for step in range(n) for index, _, _ in batch(step)]
    assert len(set(seen)) == len(seen)


def test_anchors_have_their_future(entries):
    _, all_of = entries
    for entry in all_of[:8]:
        every = anchors_of(entry, 4, 10**9, None)
        assert every[0] == entry.n_prompt and every[-1] + 4 == entry.n_tokens - 1
        some = anchors_of(entry, 4, 3, np.random.default_rng(1))
        assert len(some) == 3 and set(some) <= set(every) and (np.diff(some) > 0).all()
    assert not len(anchors_of(all_of[0], 25, 5, None))


def test_the_size_of_a_reduced_vocabulary():
    counts = np.zeros(50_000, np.int64)
    counts[::10] = 1000  # 5,000 tokens in all
    assert vocabulary_size(counts, None) == 8192
    counts[:] = 1
    assert vocabulary_size(counts, None) is None  # nothing that saves half covers 98%
    assert vocabulary_size(counts, 0) is None and vocabulary_size(counts, 77) == 77
    assert vocabulary_size(counts[:512], None) is None
    with pytest.raises(LocalspecError, match="512 tokens"):
        vocabulary_size(counts[:512], 513)
    assert json.dumps(vocabulary_size(counts, 77)) == "77"
