"""Where the prompts of a training come from: files, chat logs, or the target itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localspec.calibrating import user_headers
from localspec.chat import template_of
from localspec.errors import LocalspecError
from localspec.llama import Model
from localspec.models.synthesis import Conversation, Prompt
from localspec.template import ChatTemplate

Messages = list[dict[str, str]]

# Greedy answers are what greedy decoding drafts for; the others show what else the target says.
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
# A second answer to a prompt is another one only when it is sampled.
LATER_TEMPERATURES = (0.7, 1.0)
MOST_PASSES = 4
# User messages are written at this temperature, and have these lengths.
_ASKING = 0.9
MESSAGE_TOKENS = 96
_SHORTEST = 12  # characters
_SUFFIXES = (".jsonl", ".json", ".txt")
_EXAMPLE = '{"turns": ["a question"]}'


def read(path: Path) -> list[Messages]:
    """Prompts from a file, or from the .jsonl, .json and .txt files of a folder.

    A line is `{"turns": [...]}` (its first turn), `{"messages": [...]}` (every user message with
    what went before it), a JSON string, or plain text. A file that is one JSON object is a
    conversation saved by localspec, or any other with "messages".

    Returns:
        Conversations that end with a user message, without repeats.

    Raises:
        LocalspecError: it cannot be read, a line is no prompt, or there is none.
    """
    files = [path]
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.suffix in _SUFFIXES and f.is_file())
    found: dict[str, Messages] = {}
    for file in files:
        for messages in _read_file(file):
            found.setdefault(json.dumps(messages), messages)
    if not found:
        raise LocalspecError(f"{path} holds no prompts; write one a line: {_EXAMPLE}")
    return list(found.values())


def _read_file(file: Path) -> Iterator[Messages]:
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = getattr(e, "strerror", None) or "it is no UTF-8 text"
        raise LocalspecError(f"cannot read the prompts in {file}: {reason}") from e
    if text.lstrip().startswith("{"):
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            whole = None
        if isinstance(whole, dict):
            yield from _of(whole, f"{file}")
            return
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        if line.lstrip()[0] in '{["':
            try:
                yield from _of(json.loads(line), where)
                continue
            except (ValueError, RecursionError) as e:
                if line.lstrip()[0] == "{":
                    raise LocalspecError(f"{where}: is not JSON; a line is {_EXAMPLE}") from e
        yield [{"role": "user", "content": line.strip()}]


def _of(value: Any, where: str) -> Iterator[Messages]:
    """The prompts in one JSON value."""
    if isinstance(value, str) and value.strip():
        yield [{"role": "user", "content": value}]
        return
    turns = value.get("turns") if isinstance(value, dict) else None
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        yield [{"role": "user", "content": turns[0]}]
        return
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list):
        raise LocalspecError(f"{where}: is no prompt; a line is {_EXAMPLE}")
    said: Messages = []
    for message in messages:
        role, content = (
            (message.get("role"), message.get("content"))
            if isinstance(message, dict)
            else (None, None)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise LocalspecError(f"{where}: a message needs a role and a text as content")
        said.append({"role": role, "content": content})
        if role == "user":
            yield list(said)


def template(model: Model) -> ChatTemplate | None:
    """The target's chat template; None when it has none."""
    return None if model.chat_template is None else template_of(model)


def tokens_of(model: Model, chat: ChatTemplate | None, messages: Messages) -> list[int]:
    """A prompt in the target's chat template; the last message as it is without one."""
    text = messages[-1]["content"] if chat is None else chat.render(messages)
    return tokenize(model, text)


def tokenize(model: Model, text: str) -> list[int]:
    """Tokens of a rendered conversation; the beginning token is not put in front twice."""
    begins = model.add_bos and model.bos >= 0
    if begins and text.startswith(model.piece(model.bos, special=True).decode("utf-8", "replace")):
        begins = False
    return model.tokenize(text, add_special=begins)


def openings(model: Model) -> list[list[int]]:
    """Tokens of conversations up to where the user's message begins.

    An instruct model has seen so many user messages that it goes on with one of its own.

    Raises:
        LocalspecError: the target has no chat template, or one without such a place.
    """
    chat = template(model)
    if chat is None:
        raise no_template(model.path.name)
    return [tokenize(model, header) for header in user_headers(chat)]


def no_template(name: str) -> LocalspecError:
    """What to say of a target that cannot be made to write user messages."""
    return LocalspecError(
        f"{name} has no chat template, so it cannot write its own prompts; give some with "
        "--prompts FILE"
    )


def asking(headers: Sequence[Sequence[int]], done: set[int]) -> Iterator[Prompt]:
    """Endless prompts that make the target write user messages; those in `done` are left out."""
    index = 0
    while True:
        if index not in done:
            yield Prompt(index, headers[index % len(headers)], _ASKING)
        index += 1


def message_of(model: Model, conversation: Conversation) -> str | None:
    """The user message that the target wrote; None when it is too short to be one."""
    tokens = conversation.tokens[conversation.n_prompt :].tolist()
    text = model.text(tokens).strip()
    return text if len(text) > _SHORTEST and "\ufffd" not in text else None


def schedule(prompts: Sequence[Messages], seed: int) -> Iterator[tuple[int, Messages, float]]:
    """(index, messages, temperature) of every answer to write, in a fixed order.

    Every prompt is answered once before any is answered again.
    """
    for round_ in range(MOST_PASSES):
        for i, at in enumerate(order(len(prompts), seed)):
            kinds = TEMPERATURES if round_ == 0 else LATER_TEMPERATURES
            yield round_ * len(prompts) + i, prompts[at], kinds[(i + round_) % len(kinds)]


def order(count: int, seed: int) -> list[int]:
    """In which order prompts are answered: files have their like side by side."""
    return [int(i) for i in np.random.default_rng([seed, 3]).permutation(count)]
