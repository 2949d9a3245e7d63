"""Conversations: what is evaluated again, what is remembered, what templates may do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import CHAIN, PLAIN

from localspec.chat import Chat
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.template import ChatTemplate

Load = Callable[..., Engine]


def say(chat: Chat, text: str, **options: object) -> None:
    for _ in chat.send(text, **options):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize("drafter", [None, "vanilla"])
def test_a_turn_evaluates_only_what_is_new(load: Load, drafter: str | None):
    engine = load(drafter, n_ctx=2048)
    chat = Chat(engine, draft=CHAIN if drafter else PLAIN)
    say(chat, "tell me something " * 60, max_tokens=900)
    assert chat.last is not None
    before = chat.last.prompt_tokens + len(chat.last.token_ids)
    assert before > 600
    say(chat, "and more", max_tokens=8)
    new = chat.last.prompt_tokens - before
    # The bonus token of the last round was never evaluated; everything else is in the cache.
    assert chat.last.processed_tokens <= new + 1
    assert chat.last.processed_tokens < 40


def test_reuse_gives_the_same_answer_as_a_fresh_engine(load: Load):
    chat = Chat(load("vanilla"), draft=CHAIN)
    say(chat, "hello", max_tokens=12)
    say(chat, "again", max_tokens=12)
    assert chat.last is not None
    ids = list(chat.engine.cached_tokens)
    prompt = ids[: chat.last.prompt_tokens]
    fresh = load(None).complete(prompt, max_tokens=12, draft=PLAIN)
    assert fresh.token_ids == chat.last.token_ids


def test_a_closed_answer_stays_in_the_conversation(load: Load):
    chat = Chat(load("vanilla"))
    steps = chat.send("hello", max_tokens=50)
    got = next(steps).text + next(steps).text
    steps.close()
    assert [m["role"] for m in chat.messages] == ["user", "assistant"]
    assert chat.messages[1]["content"] == got
    say(chat, "go on", max_tokens=4)
    assert len(chat.messages) == 4


def test_a_stop_string_does_not_corrupt_the_next_turn(load: Load):
    chat = Chat(load("vanilla"))
    say(chat, "hello", max_tokens=30)
    answer = chat.messages[-1]["content"]
    assert len(answer) > 6
    again = Chat(load("vanilla"))
    say(again, "hello", max_tokens=30, stop=[answer[4:6]])
    assert again.messages[-1]["content"] == answer[: answer.index(answer[4:6])]
    say(again, "next", max_tokens=4)
    expected = again.engine.tokenize(again.template.render(again.messages[:-1]))
    assert list(again.engine.cached_tokens)[: len(expected)] == expected


def test_a_message_that_does_not_fit_is_taken_back(load: Load):
    chat = Chat(load(None, n_ctx=64))
    with pytest.raises(LocalspecError, match="context holds 64"):
        say(chat, "word " * 200)
    assert chat.messages == []
    say(chat, "ok", max_tokens=2)


def test_reset_keeps_the_system_message(load: Load):
    chat = Chat(load(None), system="be brief")
    say(chat, "hello", max_tokens=2)
    chat.reset()
    assert chat.messages == [{"role": "system", "content": "be brief"}]


def test_templates_are_sandboxed_and_their_refusals_are_reported():
    assert (
        ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": "x"}]) == "x"
    )
    with pytest.raises(LocalspecError, match="refuses these messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([])
    with pytest.raises(LocalspecError, match="not valid"):
        ChatTemplate("{% for %}")
    with pytest.raises(LocalspecError, match=r"template was stopped: .* unsafe"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render([])
    with pytest.raises(LocalspecError, match="template failed"):
        ChatTemplate("{{ 1 // 0 }}").render([])


def test_template_helpers():
    template = ChatTemplate(
        "{{ bos_token }}{{ {'a': '<é>'} | tojson }}{% if add_generation_prompt %}>{% endif %}",
        bos="<s>",
    )
    assert template.render([]) == '<s>{"a": "<é>"}>'
    assert template.render([], add_generation_prompt=False) == '<s>{"a": "<é>"}'
