"""Reasoning and answers, told apart as they come."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import PLAIN
from hypothesis import given
from hypothesis import strategies as st

import tiny
from localspec.chat import Chat
from localspec.engine import Engine
from localspec.grammar import Grammar
from localspec.llama import Model
from localspec.reasoning import KNOWN, Parts, ReasoningReader, closed, left_open, take_apart


def read(pieces: list[str], **options: Any) -> tuple[str, str]:
    reader = ReasoningReader(**options)
    parts = [reader.feed(piece) for piece in pieces] + [reader.finish()]
    assert reader.finish() == ("", "")
    return "".join(r for r, _ in parts), "".join(a for _, a in parts)


@pytest.mark.parametrize("marks", KNOWN)
def test_reasoning_is_taken_apart_at_every_length(marks):
    inside = f"\nhm, so\n{marks.close}\n\nThe answer."
    text = marks.open + inside
    for n in range(len(text) + 1):
        parts = take_apart(text[:n])
        assert "The answer.".startswith(parts.answer)
        assert "hm, so".startswith(parts.reasoning)
        assert read([text[:n], text[n:]]) == ("hm, so", "The answer.")
    assert read(list(text)) == ("hm, so", "The answer.")
    assert take_apart(text) == take_apart(inside, opened=marks)


def test_whether_it_goes_on():
    assert take_apart("<think>hm").thinking
    assert not take_apart("<think>hm</think>").thinking
    assert not take_apart("hm").thinking
    assert take_apart("hm", opened=KNOWN[0]).thinking
    assert take_apart("", opened=KNOWN[0]).thinking


def test_texts_without_reasoning_stay_as_they_are():
    for text in ("", " \n", "a <think> b", " a", "<thin", "<", "\n\n[TH", "</think>a"):
        assert read([text]) == ("", text)
        assert read(list(text)) == ("", text)
    assert take_apart("<thin").answer == ""  # may become a mark


def test_reasoning_that_never_ends_is_reasoning():
    assert read(["<think>a </thi"]) == ("a </thi", "")
    assert read(list("<think>\n a\n b </thi")) == ("a\n b </thi", "")


PIECES = st.sampled_from(
    ["<think>", "</think>", "<", "</", "think>", "a", " ", "\n", "[THINK]", "[/THINK]"]
)


@given(st.lists(PIECES, max_size=12), st.booleans())
def test_pieces_make_no_difference(pieces: list[str], opened: bool):
    text = "".join(pieces)
    options = {"opened": KNOWN[0]} if opened else {}
    expected = taken_apart(text, opened)
    assert read([text], **options) == read(pieces, **options) == expected
    assert read(list(text), **options) == expected


def taken_apart(text: str, opened: bool) -> tuple[str, str]:
    """The same for a whole text."""
    begin = re.match("" if opened else r"\s*(<think>|\[THINK\])", text)
    if begin is None:
        return "", text
    close = "[/THINK]" if "[THINK]" in begin[0] else "</think>"
    inside, found, after = text[begin.end() :].partition(close)
    return inside.strip(), after.lstrip("\n") if found else ""


def test_what_a_prompt_leaves_open():
    for marks in KNOWN:
        assert left_open(f"<|assistant|>\n{marks.open}\n") == marks
        assert left_open(f"<|assistant|>\n{marks.open}\n{marks.close}\n") is None
        assert left_open(closed(f"<|assistant|>{marks.open}\n")) is None
    assert left_open("<|assistant|>\n") is None
    assert closed("<|assistant|>\n") == "<|assistant|>\n"


def test_an_answer_with_a_form_does_not_begin_in_reasoning(load: Callable[..., Engine]):
    chat = Chat(load(None), draft=PLAIN)
    render = chat.template.render
    chat.template.render = lambda m, **kw: render(m, **kw) + "<think>\n"  # type: ignore[method-assign]
    list(chat.send("a", max_tokens=2, grammar=Grammar.from_gbnf('root ::= "a"')))
    assert chat._text.startswith(render(chat.messages[:1]) + "<think>\n\n</think>\n\n")
    chat.reset()
    list(chat.send("a", max_tokens=2))
    assert chat._text.startswith(render(chat.messages[:1]) + "<think>\n")
    assert "</think>" not in chat._text.removeprefix(render(chat.messages[:1]))[:12]


def test_control_tokens_around_reasoning_are_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """As in Gemma 4, whose marks are control tokens; without them reasoning looks like answers."""
    specials = ("<|endoftext|>", "<|channel>", "<|im_end|>", "<channel|>")
    monkeypatch.setattr(tiny, "SPECIALS", specials)
    model = Model(tiny.build_target(tmp_path).gguf)
    text = "<|channel>thought\nhm<channel|>Yes."
    ids = model.tokenize(text)
    assert {1, 3} <= set(ids)
    assert model.text(ids) == text
    assert model.piece(1) == b"<|channel>"
    assert model.piece(0) == b"" and model.piece(0, special=True) == b"<|endoftext|>"
    assert take_apart(model.text(ids)) == Parts("hm", "Yes.", False)
    # What a grammar allows is still decided without them.
    assert model.silent_tokens[[1, 3]].all()
    model.close()
