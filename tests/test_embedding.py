"""Conversations an application edits, branches and keeps; engines that come and go."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CHAIN, PLAIN, prompt_of

import localspec
from localspec.chat import Chat
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.sampling import SamplingParams

Load = Callable[..., Engine]


def say(chat: Chat, text: str, **options: object) -> str:
    return "".join(s.text for s in chat.send(text, **options))  # type: ignore[arg-type]


def again(chat: Chat, **options: object) -> str:
    return "".join(s.text for s in chat.regenerate(**options))  # type: ignore[arg-type]


def processed(chat: Chat) -> tuple[int, int]:
    assert chat.last is not None
    return chat.last.processed_tokens, chat.last.prompt_tokens


# ---- edit, regenerate, branch


@pytest.mark.parametrize("drafter", [None, "vanilla"])
def test_regenerating_evaluates_one_token(load, drafter):
    chat = Chat(load(drafter, n_ctx=1024), draft=CHAIN if drafter else PLAIN)
    say(chat, "tell me something " * 10, max_tokens=20)
    first = say(chat, "and more", max_tokens=20)
    shown = list(chat.messages)
    assert again(chat, max_tokens=20) == first
    assert processed(chat)[0] == 1  # the last token of the prompt: its logits are needed
    assert chat.messages == shown


def test_regenerating_after_other_settings_gives_another_answer(load):
    chat = Chat(load("vanilla"), draft=CHAIN)
    greedy = say(chat, "hello", max_tokens=20)
    chat.params, chat.draft = SamplingParams(temperature=1.5, seed=1), PLAIN
    sampled = again(chat, max_tokens=20)
    assert sampled != greedy
    assert chat.last is not None and all(r.verified == 0 for r in chat.last.rounds)
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    chat.params, chat.draft = None, CHAIN
    assert again(chat, max_tokens=20) == greedy


@pytest.mark.parametrize("drafter", [None, "vanilla"])
def test_an_edit_cuts_the_cache_back_to_where_it_begins(load, drafter):
    engine = load(drafter, n_ctx=2048)
    chat = Chat(engine, draft=CHAIN if drafter else PLAIN)
    say(chat, "a long beginning " * 20, max_tokens=20)
    kept = list(engine.cached_tokens)
    say(chat, "the second question", max_tokens=30)
    say(chat, "the third question", max_tokens=30)
    chat.edit(2, "something else")
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "user"]
    answer = again(chat, max_tokens=20)
    done, whole = processed(chat)
    assert whole - done >= len(kept) - 1 and done < 60
    # The same as a conversation that went there directly, on a fresh engine.
    other = Chat(load(drafter, n_ctx=2048), draft=chat.draft)
    other.messages[:] = chat.messages[:3]
    tokens = list(chat.engine.cached_tokens)[:whole]
    fresh = other.engine.complete(tokens, max_tokens=20, draft=chat.draft)
    assert fresh.text == answer


def test_edits_are_checked(load):
    chat = Chat(load(None), system="be brief", draft=PLAIN)
    with pytest.raises(LocalspecError, match="no user message"):
        again(chat)
    say(chat, "hello", max_tokens=3)
    before = [dict(m) for m in chat.messages]
    for turn, message in ((0, "the system's"), (2, "the assistant's"), (3, "no message 3"),
                          (-4, "no message -4")):  # fmt: skip
        with pytest.raises(LocalspecError, match=message):
            chat.edit(turn, "x")
    assert chat.messages == before
    chat.edit(-2, "x")
    assert chat.messages == [before[0], {"role": "user", "content": "x"}]


def test_an_answer_that_cannot_be_given_leaves_the_old_one(load):
    chat = Chat(load(None, n_ctx=64), draft=PLAIN)
    say(chat, "hi", max_tokens=3)
    before = [dict(m) for m in chat.messages]
    with pytest.raises(LocalspecError, match="context holds 64"):
        say(chat, "word " * 100)
    assert chat.messages == before
    chat.messages[0]["content"] = "word " * 100
    with pytest.raises(LocalspecError, match="context holds 64"):
        again(chat)
    assert len(chat.messages) == 2


def test_branches_go_their_own_ways_and_share_what_they_have_in_common(load):
    chat = Chat(load("vanilla", n_ctx=1024), system="be brief", draft=CHAIN)
    say(chat, "the beginning " * 20, max_tokens=20)
    branch = chat.branch()
    assert branch.messages == chat.messages and branch.engine is chat.engine
    say(branch, "this way", max_tokens=10)
    assert len(chat.messages) == 3 and len(branch.messages) == 5
    say(chat, "or that way", max_tokens=10)
    done, whole = processed(chat)
    assert whole > 100 and done < 50
    branch.messages[1]["content"] = "changed"
    assert chat.messages[1]["content"].startswith("the beginning")
    branch.reset()
    assert branch.messages == chat.messages[:1]


def test_a_system_message_set_later_changes_the_beginning(load):
    chat = Chat(load(None), draft=PLAIN)
    say(chat, "hello", max_tokens=3)
    chat.system = "be brief"
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant"]
    say(chat, "more", max_tokens=3)
    chat.system = None
    assert chat.messages[0]["role"] == "user" and chat.system is None
    chat.reset()
    assert chat.messages == []


# ---- files


def test_a_saved_conversation_goes_on_elsewhere(load, tmp_path):
    params = SamplingParams(temperature=0.5, top_p=0.9, seed=3)
    chat = Chat(load("vanilla"), system="be brief", params=params, draft=CHAIN)
    say(chat, "caf\u00e9 \U0001f642 \udcff", max_tokens=5)
    path = tmp_path / "chat.json"
    chat.save(path)
    chat.save(path)
    assert os.listdir(tmp_path) == ["chat.json"]
    other = Chat.load(load(None), path, draft=PLAIN)
    assert other.messages == chat.messages
    assert (other.params, other.system) == (params, "be brief")
    say(other, "go on", max_tokens=3)
    assert len(other.messages) == 5 and len(chat.messages) == 3


def test_saving_is_all_or_nothing(load, tmp_path):
    chat = Chat(load(None), draft=PLAIN)
    path = tmp_path / "chat.json"
    chat.save(path)
    before = path.read_bytes()
    chat.messages.append({"role": "user", "content": object()})  # type: ignore[dict-item]
    with pytest.raises(LocalspecError, match="cannot be saved"):
        chat.save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["chat.json"]
    chat.messages.clear()
    with pytest.raises(LocalspecError, match=r"cannot be saved to .*no_such_folder"):
        chat.save(tmp_path / "no_such_folder" / "chat.json")


GOOD = {"format": "localspec-chat", "version": 1, "model": "m", "params": None, "messages": []}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "no saved conversation"),
        ({"version": 2}, "update localspec"),
        ({"messages": {}}, "no list of messages"),
        ({"messages": [{"role": "user"}]}, "message 0"),
        ({"messages": [{"role": "root", "content": "x"}]}, "message 0"),
        ({"messages": [{"role": "user", "content": 1}]}, "message 0"),
        ({"messages": [{"role": "user", "content": "x", "more": 1}]}, "message 0"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "message 0"),
        ({"params": {"temperature": "hot"}}, "temperature"),
        ({"params": {"temperature": -1}}, "temperature"),
        ({"params": {"top_k": True}}, "top_k"),
        ({"params": {"unknown": 1}}, "settings"),
        ({"params": [1]}, "settings"),
    ],
)
def test_damaged_files_are_refused(load, tmp_path, change, message):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(LocalspecError, match=message):
        Chat.load(load(None), path)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff\xfe", b"[" * 100_000, b"NaN"])
def test_files_that_are_something_else_are_refused(load, tmp_path, data):
    path = tmp_path / "chat.json"
    path.write_bytes(data)
    with pytest.raises(LocalspecError, match="no saved conversation"):
        Chat.load(load(None), path)
    with pytest.raises(LocalspecError, match="cannot be read"):
        Chat.load(load(None), tmp_path)


# ---- engines come and go


def test_closing_twice_and_using_it_afterwards(load):
    engine = load("vanilla")
    chat = Chat(engine, draft=CHAIN)
    steps = engine.generate(prompt_of(0), max_tokens=20, draft=CHAIN)
    next(steps)
    engine.close()
    engine.close()
    for call in (
        lambda: next(steps), lambda: engine.generate(prompt_of(0)), lambda: engine.tokenize("x"),
        lambda: engine.last_logits, engine.tune, lambda: say(chat, "hello"),
    ):  # fmt: skip
        with pytest.raises(LocalspecError, match=r"closed"):
            call()
    engine.cancel()
    assert chat.messages == []


def test_engines_that_are_dropped_free_everything(tiny_target, tiny_drafter):
    """50 rounds of load, use, drop or close, with loading stopped now and then."""
    import psutil

    process = psutil.Process()

    def one(i: int) -> None:
        engine = Engine.load(tiny_target.gguf, tiny_drafter("vanilla")[1], n_ctx=256, n_threads=1)
        steps = engine.generate(prompt_of(0), max_tokens=9, draft=CHAIN)
        next(steps)
        if i % 3 == 0:
            engine.close()
        elif i % 3 == 1:
            engine.loop = steps  # type: ignore[attr-defined]  # a cycle: only the collector frees it
        with pytest.raises(LocalspecError, match="cancelled"):
            Engine.load(tiny_target.gguf, n_ctx=256, n_threads=1, progress=lambda f: False)

    def now() -> tuple[int, int, int]:
        gc.collect()
        files = process.num_fds() if os.name == "posix" else process.num_handles()
        return process.memory_info().rss, files, process.num_threads()

    for i in range(10):
        one(i)
    before = now()
    for i in range(40):
        one(i)
    after = now()
    assert after[1:] == before[1:]
    assert after[0] < 1.02 * before[0]


def test_many_short_conversations_take_no_memory(load):
    import psutil

    engine, process = load("vanilla"), psutil.Process()

    def one(i: int) -> None:
        chat = Chat(engine, params=SamplingParams(temperature=float(i % 2), seed=i), draft=CHAIN)
        say(chat, f"number {i}", max_tokens=4)
        say(chat, "again", max_tokens=4)
        assert len(chat.messages) == 4

    for i in range(20):
        one(i)
    gc.collect()
    before = process.memory_info().rss
    for i in range(80):
        one(i)
    gc.collect()
    assert process.memory_info().rss < 1.02 * before


def test_nothing_is_printed_and_no_signal_is_taken(capfd, tiny_target, tiny_drafter):
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger().handlers[:]
    with Engine.load(tiny_target.gguf, tiny_drafter("vanilla")[1], n_ctx=256, n_threads=1) as e:
        chat = Chat(e)
        say(chat, "hello", max_tokens=10)
        with pytest.raises(LocalspecError):
            e.complete("x " * 999)
    assert capfd.readouterr() == ("", "")
    assert {s: signal.getsignal(s) for s in handlers} == handlers
    assert logging.getLogger().handlers == root
    assert Path(localspec.__file__).with_name("py.typed").exists()
    assert sys.excepthook is sys.__excepthook__
