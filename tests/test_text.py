"""Text as it streams: whole characters, stop strings, whatever the tokens' boundaries."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from localspec.text import TextStream


def stream_of(pieces: list[bytes], stop=()) -> tuple[list[str], TextStream]:
    """What each piece released (the end last), up to a stop string."""
    stream = TextStream(pieces.__getitem__, stop)
    out = []
    for token in range(len(pieces)):
        out.append(stream.feed(token))
        if stream.stopped:
            return out, stream
    return [*out, stream.finish()], stream


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    marks = [0, *sorted(c for c in cuts if c <= len(data)), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(marks)]


def up_to_stop(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first."""
    ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s and s in text]
    return text[: min(ends)[1]] if ends else text


cuts = st.lists(st.integers(0, 40), max_size=20)


def test_characters_leave_whole():
    out, _ = stream_of([b"a\xe6", b"\x97", b"\xa5\xf0\x9f", b"\x99\x82b"])
    assert out == ["a", "", "日", "🙂b", ""]


def test_broken_bytes_become_replacement_characters():
    assert stream_of([b"a\xff", b"b\xe6"])[0] == ["a\ufffd", "b", "\ufffd"]
    assert "".join(stream_of([b"\xe6\x97", b"x"])[0]) == "\ufffdx"


def test_a_stop_string_ends_the_text_across_tokens():
    out, stream = stream_of([b"one <", b"/s", b">two"], ["</s>"])
    assert out == ["one ", "", ""] and stream.stopped
    assert stream.feed(0) == "" and stream.finish() == ""


def test_what_only_began_like_a_stop_string_comes_back():
    out, stream = stream_of([b"one <", b"/x", b" <"], ["</s>"])
    assert out == ["one ", "</x", " ", "<"]
    assert not stream.stopped


def test_nothing_is_held_back_without_need():
    assert stream_of([b"ab", b"cd"], ["xyz"])[0] == ["ab", "cd", ""]
    assert stream_of([b"ax", b"cd"], ["xyz"])[0] == ["a", "xcd", ""]


@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize(
    ("text", "stops", "left"),
    [
        ("xaab", ["ab", "aab"], "x"),
        ("xaab", ["aab", "ab"], "x"),
        ("aaab", ["aab"], "a"),
        ("abab", ["abab"], ""),
        ("abac", ["abab", "ac"], "ab"),
        ("abcd", ["abcd", "bc"], "a"),  # "bc" is complete first
        ("ab", ["", "zz"], "ab"),
    ],
)
def test_overlapping_stop_strings(text, stops, left, cut):
    assert "".join(stream_of(split(text.encode(), [cut]), stops)[0]) == left


@given(st.text("abé🙂", max_size=14), st.lists(st.text("abé", max_size=4), max_size=3), cuts)
@example("abcd", ["abcd", "bc"], [])
def test_any_split_gives_the_same_text(text, stops, marks):
    out, stream = stream_of(split(text.encode(), marks), stops)
    assert "".join(out) == up_to_stop(text, stops)
    assert stream.stopped == any(s and s in text for s in stops)


@given(
    st.text("ab🙂", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), cuts
)
def test_only_the_start_of_a_stop_string_is_ever_held(text, stops, marks):
    pieces = split(text.encode(), marks)
    stream = TextStream(pieces.__getitem__, stops)
    seen, released = b"", ""
    for token, piece in enumerate(pieces):
        seen += piece
        released += stream.feed(token)
        if stream.stopped:
            return
        held = seen.decode("utf-8", "ignore")[len(released) :]
        assert not held or any(s.startswith(held) for s in stops)


@given(st.binary(max_size=20), cuts)
def test_any_bytes_in_any_split_decode_as_a_whole(data, marks):
    assert "".join(stream_of(split(data, marks))[0]) == data.decode("utf-8", "replace")
