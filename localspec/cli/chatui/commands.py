"""Slash commands: each is a function of the session and its argument, and prints nothing."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localspec.chat import Chat
from localspec.cli.chatui import settings
from localspec.cli.chatui.compare import compare
from localspec.cli.chatui.session import Session, Steps
from localspec.cli.chatui.stats import details
from localspec.cli.options import finder
from localspec.errors import LocalspecError

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What a command came to.

    Attributes:
        text: lines to show.
        dim: they are a remark rather than what was asked for.
        error: they say what is wrong.
        answer: an answer to stream.
        editing: index of a message that the user is to edit.
        leave: the program ends.
    """

    text: str = ""
    dim: bool = False
    error: bool = False
    answer: Steps | None = None
    editing: int | None = None
    leave: bool = False


@dataclass(frozen=True)
class Command:
    """A name, what it takes, what it does, and the function behind it."""

    run: Callable[[Session, str, Progress], Outcome]
    takes: str
    does: str


def is_command(line: str) -> bool:
    """Whether a line is a command rather than something to say."""
    return line.startswith("/")


def run(session: Session, line: str, progress: Progress = lambda _: None) -> Outcome:
    """Run a command line; errors become an outcome.

    Args:
        session: what it works on.
        line: it begins with a slash.
        progress: called with a line to show while something takes time.
    """
    word, _, argument = line.partition(" ")
    name = _ALIASES.get(word[1:], word[1:])
    command = COMMANDS.get(name)
    if command is None:
        return Outcome(f"{word} is no command; /help lists them")
    try:
        return command.run(session, argument.strip(), progress)
    except LocalspecError as e:
        return Outcome(str(e), error=True)


def _help(_session: Session, _argument: str, _progress: Progress) -> Outcome:
    rows = [(f"/{name} {c.takes}".rstrip(), c.does) for name, c in COMMANDS.items()]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left:{width}}  {does}" for left, does in rows]
    return Outcome("\n".join([*lines, "", *KEYS]))


def _model(session: Session, argument: str, _progress: Progress) -> Outcome:
    if not argument:
        target, drafter = session.files
        return Outcome(f"target   {target}\ndrafter  {drafter or 'none'}")
    files = _words(argument)
    if len(files) > 2:
        raise LocalspecError("/model takes a target and perhaps a drafter; quote names with spaces")
    target, drafter = finder().files(*(os.path.expanduser(f) for f in files))
    session.switch(target, drafter)
    return Outcome(f"{target.name} goes on with this conversation", dim=True)


def _system(session: Session, argument: str, _progress: Progress) -> Outcome:
    if not argument:
        return Outcome(session.chat.system or "no system message")
    session.chat.system = None if argument in ('""', "''", "none") else argument
    return Outcome("system message " + ("removed" if session.chat.system is None else "set"), True)


def _regen(session: Session, _argument: str, _progress: Progress) -> Outcome:
    return Outcome(answer=session.regenerate())


def _edit(session: Session, argument: str, _progress: Progress) -> Outcome:
    users = [i for i, m in enumerate(session.chat.messages) if m["role"] == "user"]
    if not users:
        raise LocalspecError("nothing was said yet that could be edited")
    number, _, text = argument.partition(" ")
    turn = len(users)
    if number.startswith("#"):
        turn = int(number[1:]) if number[1:].isdecimal() else 0
        argument = text.strip()
        if not 1 <= turn <= len(users):
            raise LocalspecError(f"/edit #N takes your message 1..{len(users)}, not {number}")
    if not argument:
        return Outcome(editing=users[turn - 1])
    session.chat.edit(users[turn - 1], argument)
    return Outcome(answer=session.regenerate())


def _save(session: Session, argument: str, _progress: Progress) -> Outcome:
    path = _path("/save", argument)
    session.chat.save(path)
    return Outcome(f"saved in {path}", dim=True)


def _load(session: Session, argument: str, _progress: Progress) -> Outcome:
    path = _path("/load", argument)
    chat = Chat.load(session.engine, path, draft=session.chat.draft)
    session.use(chat)
    n = sum(m["role"] == "user" for m in chat.messages)
    last = [m["content"] for m in chat.messages if m["role"] != "system"][-1:]
    start = "\n".join([*last, ""]) if last else ""
    return Outcome(f"{start}loaded {n} {'turn' if n == 1 else 'turns'} from {path}", dim=True)


def _set(session: Session, argument: str, _progress: Progress) -> Outcome:
    if not argument:
        return Outcome(settings.listed(session))
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    if not value.strip():
        raise LocalspecError("/set takes a name and a value, e.g. /set temp 0.7; /set lists them")
    return Outcome(settings.change(session, name.strip(), value.strip()), dim=True)


def _stats(session: Session, _argument: str, _progress: Progress) -> Outcome:
    return Outcome(details(session.chat.last))


def _compare(session: Session, argument: str, progress: Progress) -> Outcome:
    messages = list(session.chat.messages)
    if argument:
        messages.append({"role": "user", "content": argument})
    else:
        while messages and messages[-1]["role"] != "user":
            messages.pop()
    if not messages:
        raise LocalspecError("/compare takes a prompt as long as nothing was said")
    prompt = session.engine.tokenize(session.chat.template.render(messages))
    found = compare(
        session.engine,
        prompt,
        session.params,
        session.draft,
        max_tokens=session.max_tokens,
        progress=progress,
    )
    return Outcome(str(found))


def _show(session: Session, argument: str, _progress: Progress) -> Outcome:
    if argument not in ("drafts", "reasoning"):
        raise LocalspecError("/show takes drafts or reasoning")
    now = not getattr(session.show, argument)
    setattr(session.show, argument, now)
    if argument == "drafts":
        what = "accepted tokens are green, corrected ones yellow" if now else "markdown again"
        return Outcome(what, dim=True)
    if not now:
        return Outcome("reasoning is folded", dim=True)
    return Outcome(session.reasoning() or "reasoning is unfolded from now on", dim=True)


def _clear(session: Session, _argument: str, _progress: Progress) -> Outcome:
    session.chat.reset()
    return Outcome("new conversation", dim=True)


def _quit(_session: Session, _argument: str, _progress: Progress) -> Outcome:
    return Outcome(leave=True)


def _words(argument: str) -> list[str]:
    # Backslashes separate folders on Windows; quotes are enough for spaces.
    lexer = shlex.shlex(argument, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    try:
        return list(lexer)
    except ValueError:
        raise LocalspecError("a quotation mark is not closed") from None


def _path(command: str, argument: str) -> Path:
    words = _words(argument)
    if len(words) != 1:
        raise LocalspecError(f"{command} takes one file name; quote it if it has spaces")
    return Path(words[0]).expanduser()


COMMANDS = {
    "help": Command(_help, "", "this list"),
    "model": Command(_model, "[TARGET [DRAFTER]]", "go on with another model; or say which it is"),
    "system": Command(_system, "[TEXT|none]", "set, remove or show the system message"),
    "regen": Command(_regen, "", "answer the last message again"),
    "edit": Command(_edit, "[#N] [TEXT]", "change your last (or Nth) message and answer it"),
    "save": Command(_save, "FILE", "write the conversation as JSON"),
    "load": Command(_load, "FILE", "go on with a saved conversation"),
    "set": Command(_set, "[NAME VALUE]", "change a setting, e.g. /set temp 0.7; or list them"),
    "stats": Command(_stats, "", "numbers of the last answer"),
    "compare": Command(_compare, "[TEXT]", "decode plainly and speculatively: speeds, same text?"),
    "show": Command(_show, "drafts|reasoning", "colour accepted tokens; unfold reasoning"),
    "clear": Command(_clear, "", "start a new conversation"),
    "quit": Command(_quit, "", "leave (or Ctrl-D)"),
}
_ALIASES = {"reset": "clear", "exit": "quit", "bye": "quit", "?": "help", "regenerate": "regen"}
KEYS = (
    'Enter sends; Alt-Enter or Ctrl-J starts a new line, and so does Enter after """.',
    "Ctrl-C stops an answer; the conversation goes on.",
)
