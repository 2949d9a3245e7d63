"""`localspec chat`: its commands as functions, its parts, and the whole through a pipe."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from click.testing import Result as Ran
from conftest import CHAIN, PLAIN, first_difference
from rich.console import Console

import tiny
from localspec.cli import cli
from localspec.cli.chatui import commands, settings
from localspec.cli.chatui.blocks import finished
from localspec.cli.chatui.clean import printable
from localspec.cli.chatui.commands import Outcome
from localspec.cli.chatui.compare import Comparison, compare
from localspec.cli.chatui.lines import is_open, messages, unquoted
from localspec.cli.chatui.prompt import history_file
from localspec.cli.chatui.region import Region, rows_on_screen
from localspec.cli.chatui.session import Session
from localspec.cli.chatui.shades import ACCEPTED, CORRECTED, OWN, Shader, shades
from localspec.cli.chatui.talk import answer
from localspec.cli.chatui.view import PlainView, Show, TerminalView
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.interrupts import wish_to_stop
from localspec.sampling import SamplingParams
from localspec.steps import Result, Round, Seconds, Step

Drafters = Callable[[str], tuple[tiny.TinyModel, Path]]
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\x08\x7fend"


@pytest.fixture
def session(tiny_target: tiny.TinyModel, tiny_drafter: Drafters) -> Iterator[Session]:
    def load(target: str | Path, drafter: str | Path | None) -> Engine:
        return Engine.load(target, drafter, n_ctx=1024, n_threads=1)

    files = (tiny_target.gguf, tiny_drafter("vanilla")[1])
    made = Session(load, files, draft=CHAIN, max_tokens=12)
    yield made
    made.close()


def say(session: Session, text: str) -> str:
    return "".join(step.text for step in session.send(text))


def do(session: Session, line: str) -> Outcome:
    return commands.run(session, line)


def follow(outcome: Outcome) -> str:
    assert outcome.answer is not None, outcome
    return "".join(step.text for step in outcome.answer)


def refused(session: Session, line: str, text: str) -> None:
    outcome = do(session, line)
    assert outcome.error and text in outcome.text, outcome
    assert "\n" not in outcome.text


# Commands.


def test_help_lists_every_command_and_aliases_work(session: Session):
    text = do(session, "/help").text
    for name in commands.COMMANDS:
        assert f"/{name}" in text
    assert do(session, "/quit").leave and do(session, "/bye").leave
    assert "/nonsense is no command" in do(session, "/nonsense x").text


def test_regen_answers_the_last_message_again(session: Session):
    with pytest.raises(LocalspecError, match="no user message"):
        follow(do(session, "/regen"))
    first = say(session, "hello")
    assert follow(do(session, "/regen")) == first
    assert [m["role"] for m in session.chat.messages] == ["user", "assistant"]


def test_edit_changes_a_message_and_drops_what_followed(session: Session):
    refused(session, "/edit new", "nothing was said")
    say(session, "one")
    say(session, "two")
    follow(do(session, "/edit three words here"))
    said = [m["content"] for m in session.chat.messages if m["role"] == "user"]
    assert said == ["one", "three words here"]
    follow(do(session, "/edit #1 uno"))
    assert session.chat.messages[0]["content"] == "uno"
    assert len(session.chat.messages) == 2
    assert do(session, "/edit").editing == 0
    refused(session, "/edit #9 x", "1..1")
    refused(session, "/edit #x x", "1..1")


def test_save_and_load_bring_a_conversation_back(session: Session, tmp_path: Path):
    do(session, "/system be brief")
    say(session, "hello")
    before = [dict(m) for m in session.chat.messages]
    path = tmp_path / "my talk.json"
    assert str(path) in do(session, f"/save '{path}'").text
    assert json.loads(path.read_text())
    do(session, "/clear")
    assert [m["role"] for m in session.chat.messages] == ["system"]
    assert "loaded 1 turn " in do(session, f'/load "{path}"').text
    assert session.chat.messages == before
    assert session.draft == CHAIN
    refused(session, "/save", "one file name")
    refused(session, "/save a b", "one file name")
    refused(session, "/load 'half", "quotation")
    refused(session, f"/load {tmp_path / 'no.json'}", "no.json")
    assert session.chat.messages == before


def test_system_messages_are_set_shown_and_removed(session: Session):
    assert do(session, "/system").text == "no system message"
    do(session, "/system speak like a pirate")
    assert do(session, "/system").text == "speak like a pirate"
    say(session, "hello")
    assert session.chat.messages[0] == {"role": "system", "content": "speak like a pirate"}
    do(session, "/system none")
    assert session.chat.messages[0]["role"] == "user"


def test_settings_take_effect_and_bad_ones_are_refused(session: Session):
    assert do(session, "/set temp 0.7").text == "temp is 0.7 now"
    do(session, "/set top-k=5")
    do(session, "/set seed 3")
    assert session.params == SamplingParams(temperature=0.7, top_k=5, seed=3)
    do(session, "/set max-tokens 3")
    say(session, "hello")
    assert session.chat.last is not None and len(session.chat.last.token_ids) <= 3
    do(session, "/set draft-tokens 9")
    assert session.draft.tokens == 9 and session.draft.policy == "fixed"
    do(session, "/set speculation off")
    assert session.draft.tokens == 0
    do(session, "/set policy auto")
    assert session.draft.policy == "auto"
    do(session, "/set seed random")
    assert session.params.seed is None
    listed = do(session, "/set").text
    for name in settings.NAMES:
        assert f"\n{name} " in "\n" + listed
    kept = session.params, session.draft
    refused(session, "/set temp", "name and a value")
    refused(session, "/set temp warm", "a number")
    refused(session, "/set temp -1", "temperature must be")
    refused(session, "/set top-k 1.5", "whole number")
    refused(session, "/set nonsense 1", "no setting")
    refused(session, "/set max-tokens 0", "at least 1")
    refused(session, "/set draft-tokens 9999", "draft tokens")
    refused(session, "/set speculation maybe", "on or off")
    assert (session.params, session.draft) == kept


def test_another_model_goes_on_with_the_conversation(
    session: Session, tiny_drafter: Drafters, tmp_path: Path
):
    say(session, "hello")
    before = list(session.chat.messages)
    target, drafter = session.files
    gated = tiny_drafter("gated")[1]
    assert str(drafter) in do(session, "/model").text
    assert "goes on" in do(session, f"/model {target} {gated}").text
    assert session.files == (target, gated)
    assert session.chat.messages == before
    assert say(session, "more") is not None
    refused(session, f"/model {tmp_path / 'no.gguf'}", "does not exist")
    refused(session, f"/model {gated}", "not a target")
    refused(session, "/model a b c", "a target and perhaps a drafter")
    assert say(session, "the old model is still there") is not None


def test_the_old_model_comes_back_when_the_new_one_fails(session: Session, tmp_path: Path):
    """A file whose header is fine, refused later."""
    say(session, "hello")
    load, files = session._load, session.files

    def fails(target: str | Path, drafter: str | Path | None) -> Engine:
        if drafter is None:
            raise LocalspecError("out of memory")
        return load(target, drafter)

    session._load = fails
    refused(session, f"/model {files[0]}", "out of memory")
    assert session.files == files
    say(session, "again")
    assert len(session.chat.messages) == 4


def test_show_switches_and_shows_past_reasoning(session: Session):
    assert "green" in do(session, "/show drafts").text and session.show.drafts
    assert not do(session, "/show drafts").error and not session.show.drafts
    session.chat.messages += [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "<think>\nfirst this\n</think>\n\nthat"},
    ]
    assert do(session, "/show reasoning").text == "first this"
    assert session.show.reasoning
    refused(session, "/show everything", "drafts or reasoning")


def test_stats_name_speed_and_drafts(session: Session):
    assert do(session, "/stats").text == "no answer yet"
    say(session, "hello")
    text = do(session, "/stats").text
    assert "tokens/s" in text and "drafted tokens accepted" in text and "of them new" in text
    assert "busy" not in text
    assert session.chat.last is not None
    rounds = session.chat.last.rounds
    rounds[:] = [replace(r, threads=3 if i == 1 else 4) for i, r in enumerate(rounds)]
    assert "as few as 3 of 4 threads: the machine was busy" in do(session, "/stats").text


# Comparing.


def test_compare_leaves_the_conversation_and_gives_the_same_text(session: Session):
    refused(session, "/compare", "takes a prompt")
    text = do(session, "/compare tell me something").text
    assert "plain" in text and "speculative" in text and "times as fast" in text
    assert "same text" in text or "logits are" in text
    assert session.chat.messages == []
    say(session, "hello")
    before = list(session.chat.messages)
    lines: list[str] = []
    commands.run(session, "/compare", lines.append)
    assert session.chat.messages == before
    assert any(line.startswith("plain: ") for line in lines)
    assert any(line.startswith("speculative: ") for line in lines)


def test_compare_speculates_even_when_the_chat_does_not(session: Session):
    prompt = session.engine.tokenize("abc abc abc")
    params = SamplingParams(temperature=1.0)
    found = compare(session.engine, prompt, params, CHAIN, max_tokens=16)
    assert any(r.verified for r in found.fast.rounds)
    assert not any(r.verified for r in found.plain.rounds)
    # With the match rule and one seed, sampled texts are the same too.
    assert found.parts_at == first_difference(found.plain.token_ids, found.fast.token_ids)
    session.chat.draft = PLAIN
    assert "speculative" in do(session, "/compare x").text


def test_a_comparison_says_where_texts_part():
    round_ = Round(7, 7, 1, Seconds(0.1, 0.1, 0.0))
    plain = Result("ab", [1, 2, 3], [round_])
    fast = Result("ac", [1, 4, 3], [round_])
    text = str(Comparison(plain, fast, 1, ("b", "c"), 0.002))
    assert "part at token 2: 'b' and 'c'" in text and "0.002" in text
    assert "same text, token for token (3 tokens)" in str(Comparison(plain, plain))


# Parts.


def test_escapes_of_a_model_never_reach_the_terminal():
    assert printable(ESCAPES) == "[31mred]0;title2Jend"
    assert printable("tab\tline\nümläut 🙂\u200d") == "tab\tline\nümläut 🙂\u200d"
    assert printable("\ud800x").encode() == b"x"


def steps_of(*texts: str) -> list[Step]:
    return [Step(text, ()) for text in texts]


def drawn(view: TerminalView | PlainView, *texts: str) -> None:
    for step in steps_of(*texts):
        view.add(step)
    view.finish()


def console_of(width: int = 60, height: int = 20) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=width, height=height, highlight=False), out


@pytest.mark.parametrize("reasoning", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_hostile_markdown_is_harmless(drafts: bool, reasoning: bool):
    console, out = console_of()
    hostile = (
        f"{ESCAPES} &#27;[31m &#x9b;2J [x](http://a/\x1b]8;;evil) `{ESCAPES}`\n\n```\n\x1b[2J\n"
    )
    pieces = {1: hostile.encode("utf-8", "replace")}
    view = TerminalView(console, Show(drafts, reasoning), pieces.__getitem__)
    view.add(Step("<think>" + hostile + "</think>" + hostile, (1,)))
    view.finish()
    text = out.getvalue()
    for bad in ("\x1b]", "\x07", "\x9b", "\x1b[31m", "2J\x08", "\x7f"):
        assert bad not in text
    # What is left are colours, and the moves and erasures of our own.
    assert set(re.findall(r"\x1b\[[0-9;]*([A-Za-z])", text)) <= {"m", "K", "A"}
    assert "\x1b[2J" not in text


def test_the_plain_view_writes_what_comes_and_nothing_else():
    out: list[str] = []
    drawn(PlainView(out.append), "one **two**", " \x1b[1mthree")
    assert "".join(out) == "one **two** [1mthree\n"


def screen_after(text: str, width: int) -> list[str]:
    """Rows on a terminal that understands what a region writes (no colours)."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.|\n", text, re.S):
        if token == "\n":
            row, column = row + 1, 0
        elif token == "\r":
            column = 0
        elif token.endswith("A") and token[0] == "\x1b":
            row -= int(token[2:-1] or 1)
        elif token.endswith("K") and token[0] == "\x1b":
            rows[row] = ""
        elif token[0] != "\x1b":
            rows[row] = rows[row][:column].ljust(column) + token + rows[row][column + 1 :]
            column += 1
        while row >= len(rows):
            rows.append("")
        assert row >= 0 and column <= width
    return [r.rstrip() for r in rows]


@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_markdown_ends_up_the_same_however_it_arrives(chunk: int, monkeypatch: pytest.MonkeyPatch):
    from localspec.cli.chatui import view as view_module

    monkeypatch.setattr(view_module, "REDRAW_SECONDS", 0.0)
    text = (
        "# Title\n\nA paragraph that is long enough to be wrapped over several lines here.\n\n"
        "* one\n* two\n\n```python\nprint(1)\n\nprint(2)\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
        "\nThe *end*.\n"
    )
    console, out = console_of(40)
    view = TerminalView(console, Show(), bytes)
    drawn(view, *(text[i : i + chunk] for i in range(0, len(text), chunk)))
    rows = screen_after(out.getvalue(), 40)
    shown = "\n".join(rows)
    for word in (
        "Title",
        "several lines here",
        " • one",
        " • two",
        "print(1)",
        "print(2)",
        "The end.",
    ):
        assert shown.count(word) == 1, shown
    whole, whole_out = console_of(40)
    drawn(TerminalView(whole, Show(), bytes), text)
    assert [r for r in rows if r] == [r for r in screen_after(whole_out.getvalue(), 40) if r]


def test_an_answer_taller_than_the_screen_is_written_once():
    console, out = console_of(30, 10)
    region = Region(console)
    text = "\n".join(f"line {i}" for i in range(100))
    for n in (50, 80, 100):
        region.draw([], ["\n".join(text.splitlines()[:n])])
    region.draw([text], [])
    rows = screen_after(out.getvalue(), 30)
    assert [r for r in rows if r][-100:] == text.splitlines()


def test_lines_wrapped_by_a_resize_are_counted():
    assert rows_on_screen([0, 10, 80], 80) == 3
    assert rows_on_screen([0, 10, 80], 40) == 4
    assert rows_on_screen([79, 79], 30) == 6
    assert rows_on_screen([], 30) == 0


def test_finished_blocks_do_not_change_when_more_text_comes():
    assert finished("one paragraph") == 0
    text = "one\n\ntwo"
    assert text[: finished(text)] == "one\n\n"
    fence = "intro\n\n```\ncode\n\nmore"
    assert fence[: finished(fence)] == "intro\n\n"
    items = "intro\n\n* a\n* b\n\n* c"
    assert items[: finished(items)] == "intro\n\n"
    assert finished("") == 0


def test_reasoning_is_folded_unless_asked_for():
    for unfolded in (False, True):
        console, out = console_of()
        view = TerminalView(console, Show(reasoning=unfolded), bytes)
        drawn(view, "<think>secret ", "thoughts</think>", "\n\nAnswer.")
        assert ("secret thoughts" in out.getvalue()) is unfolded
        assert ("thought for" in out.getvalue()) is not unfolded
        assert "Answer." in out.getvalue()
        assert "think>" not in out.getvalue()


def test_tokens_are_shaded_by_where_they_came_from():
    spent = Seconds(0, 0, 0)
    assert shades(Step("", (1,))) == [OWN]
    assert shades(Step("", (1, 2, 3), Round(7, 7, 2, spent))) == [ACCEPTED, ACCEPTED, CORRECTED]
    assert shades(Step("", (1, 2, 3), Round(2, 2, 2, spent))) == [ACCEPTED, ACCEPTED, OWN]
    assert shades(Step("", (1,), Round(0, 0, 0, spent))) == [OWN]
    assert shades(Step("", (1,), Round(7, 7, 3, spent))) == [ACCEPTED]  # cut at an end token
    euro = "€".encode()
    pieces = {1: b"a", 2: euro[:1], 3: euro[1:]}
    shaded = Shader(pieces.__getitem__).feed(Step("", (1, 2, 3), Round(7, 7, 2, spent)))
    assert shaded == [("a", ACCEPTED), ("€", CORRECTED)]


def test_drafts_are_coloured(session: Session):
    console, out = console_of()
    session.show.drafts = True
    view = TerminalView(console, session.show, session.engine.model.piece)
    for step in session.send("hello hello hello"):
        view.add(step)
    view.finish()
    assert session.chat.last is not None
    drafted = [r for r in session.chat.last.rounds if r.accepted < r.verified]
    assert ("\x1b[33m" in out.getvalue()) is bool(drafted)


def test_messages_span_lines_between_triple_quotes():
    lines = ["one\n", "\n", '"""two\n', "\n", '  three"""\n', '"""four"""\n', '"""open\n', "end"]
    assert list(messages(lines)) == ["one", "two\n\n  three", "four", "open\nend"]
    assert is_open('"""a') and not is_open('"""a"""') and not is_open('a """')
    assert unquoted('say """x"""') == 'say """x"""'


def test_history_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from localspec.cli.chatui.prompt import _history

    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "new"))
    _history().append_string("my secret")
    assert "my secret" in history_file().read_text()
    if sys.platform != "win32":
        assert history_file().stat().st_mode & 0o077 == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_stops_the_answer_and_nothing_else(session: Session):
    before = signal.getsignal(signal.SIGINT)
    session.max_tokens = 500
    session.chat.draft = PLAIN
    with wish_to_stop(session.engine.cancel) as stopped:
        steps = session.send("hello")
        got = [next(steps), next(steps)]
        signal.raise_signal(signal.SIGINT)
        assert stopped()
        got += steps
        assert got[-1].finish_reason == "cancelled" and len(got) < 6
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert [m["role"] for m in session.chat.messages] == ["user", "assistant"]


def test_an_answer_that_cannot_be_given_is_said(session: Session):
    complaints: list[str] = []

    class Screen:
        def complain(self, error: str) -> None:
            complaints.append(error)

        def view(self, _session: Session) -> PlainView:
            return PlainView(lambda _: pytest.fail("nothing to show"))

    assert not answer(session, Screen(), lambda: session.send("y" * 5000))  # type: ignore[arg-type]
    assert len(complaints) == 1 and "context holds" in complaints[0]
    assert session.chat.messages == []


# The whole, through a pipe.


def piped(target: Path, *lines: str, args: tuple[str, ...] = ()) -> Ran:
    return CliRunner().invoke(
        cli,
        ["chat", "-m", str(target), "--threads", "1", "--n-ctx", "512", "-n", "6",
         "--draft-tokens", "0", *args],
        input="\n".join(lines) + "\n",
    )  # fmt: skip


def test_a_pipe_gets_answers_without_escapes(tiny_target: tiny.TinyModel, tmp_path: Path):
    path = tmp_path / "talk.json"
    out = piped(
        tiny_target.gguf,
        "hello", '"""', "two", "lines", '"""', "/regen", f"/save {path}", "/stats", "/quit", "no",
    )  # fmt: skip
    assert out.exit_code == 0, out.output
    assert "\x1b" not in out.output
    saved = json.loads(path.read_text())
    said = [m["content"] for m in saved["messages"] if m["role"] == "user"]
    assert said == ["hello", "two\nlines"]
    for message in saved["messages"]:
        if message["role"] == "assistant":
            assert printable(message["content"]) in out.output


def test_a_failed_command_in_a_pipe_fails_the_program(tiny_target: tiny.TinyModel):
    out = piped(tiny_target.gguf, "/load /no/such/file.json", "hello")
    assert out.exit_code == 1
    assert out.stderr.startswith("error: ") and out.stderr.count("\n") == 1
    assert out.stdout.strip()  # the line after it is answered


def test_edit_in_a_pipe_needs_its_text(tiny_target: tiny.TinyModel):
    out = piped(tiny_target.gguf, "hello", "/edit")
    assert out.exit_code == 1 and "needs the new text" in out.stderr


def test_the_program_starts_without_what_only_terminals_need(tiny_target: tiny.TinyModel):
    code = (
        "import sys; from localspec.cli import cli; "
        "cli(sys.argv[1:], standalone_mode=False); "
        "print([m for m in ('prompt_toolkit', 'markdown_it', 'torch') if m in sys.modules])"
    )
    args = ["chat", "-m", str(tiny_target.gguf), "--threads", "1", "--draft-tokens", "0", "-n", "2"]
    out = subprocess.run(
        [sys.executable, "-c", code, *args],
        input="hi\n", capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert out.stdout.rstrip().endswith("[]"), out
