"""The tokens of answers given lately."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tiny
from localspec.engine import Engine
from localspec.server.answers import Answers
from localspec.steps import Result


def spelled_out(text: str) -> list[int]:
    """One token per byte: not how a tokenizer would write it."""
    return [tiny.FIRST_BYTE + b for b in text.encode()]


def answer(text: str, *, end: bool = False) -> Result:
    ids = spelled_out(text) + ([tiny.EOS_ID] if end else [])
    return Result(text=text, token_ids=ids)


@pytest.fixture
def engine(load: Callable[..., Engine]) -> Engine:
    return load(None)


def test_the_tokens_that_were_generated_are_kept(engine: Engine):
    answers = Answers(engine)
    ids = answers.tokens("<|im_start|>ask")
    assert ids == engine.tokenize("<|im_start|>ask")
    said = answer("the thing", end=True)
    assert engine.tokenize("the thing") != spelled_out("the thing")
    answers.add("<|im_start|>ask", ids, said)
    more = "<|im_start|>askthe thing<|im_end|>and the rest"
    known = [*ids, *said.token_ids]
    assert answers.tokens(more) == [*known, *engine.tokenize("and the rest")]
    # Cut off before its end: the end token is the template's.
    assert answers.tokens("<|im_start|>askthe thing.") == [*known[:-1], *engine.tokenize(".")]
    assert answers.tokens("<|im_start|>askthe thin") == engine.tokenize("<|im_start|>askthe thin")
    # The same question is tokenized as ever.
    assert answers.tokens("<|im_start|>ask") == ids


def test_the_longest_known_beginning_counts(engine: Engine):
    answers = Answers(engine)
    answers.add("a", answers.tokens("a"), answer("the"))
    second = answers.tokens("athe|")
    assert second == [*engine.tokenize("a"), *spelled_out("the"), *engine.tokenize("|")]
    answers.add("athe|", second, answer("and"))
    assert len(answers._known) == 1  # the second has taken the first in
    whole = [*second, *spelled_out("and")]
    assert answers.tokens("athe|and") == whole
    # Another answer to the second question goes on from the first all the same.
    assert answers.tokens("athe|other") == [*second[:-1], *engine.tokenize("|other")]
    answers.add("athe|", answers.tokens("athe|"), answer("is"))
    assert len(answers._known) == 2
    assert answers.tokens("athe|and") == whole
    assert answers.tokens("athe|is") == [*second, *spelled_out("is")]


def test_answers_that_were_cut_are_not_kept(engine: Engine):
    """A stop string or half a character: the tokens say more than the text."""
    answers = Answers(engine)
    for result in (Result(), Result("th", spelled_out("the")),
                   Result("\ufffd", spelled_out("\u65e5")[:2])):  # fmt: skip
        answers.add("a", engine.tokenize("a"), result)
    kept = [k.text for k in answers._known.values()]
    assert kept == ["a\ufffd"]  # as text it comes back like that
    assert answers.tokens("athe") == engine.tokenize("athe")


def test_the_oldest_are_forgotten(engine: Engine):
    answers = Answers(engine, most=3, most_characters=100)
    for i in range(5):
        answers.add(f"{i}:", answers.tokens(f"{i}:"), answer("the"))
    assert list(answers._known) == ["2:the", "3:the", "4:the"]
    assert answers.tokens("2:the")[-3:] == spelled_out("the")  # used: the newest now
    answers.add("5:", answers.tokens("5:"), answer("the"))
    assert list(answers._known) == ["4:the", "2:the", "5:the"]
    answers.add("6" * 200, answers.tokens("6" * 200), answer("the"))
    assert list(answers._known) == ["6" * 200 + "the"]
