"""The first half of a run: prompts, and the text that the target answers them with."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from localspec.errors import LocalspecError
from localspec.llama import Model
from localspec.models import prompting
from localspec.models.progress import Progress, Run
from localspec.models.prompting import Messages
from localspec.models.store import Store
from localspec.models.synthesis import Conversation, Prompt, Writer

PROMPTS = "prompts.jsonl"
SHARD = 32  # conversations a kill can lose, beside those being written
_KV_BYTES = 1 << 30  # of the KV cache of all streams together
_MOST_STREAMS = 64
_USUAL_LENGTH = 120  # tokens of a conversation, to guess how many prompts a run needs
_FEWEST_PROMPTS, _MOST_PROMPTS = 64, 200_000


def streams(model: Model, longest: int) -> int:
    """How many texts to write side by side: their KV caches take a gigabyte at most."""
    heads = int(model.meta(f"{model.meta('general.architecture')}.attention.head_count_kv") or 8)
    per_head = int(model.meta(f"{model.meta('general.architecture')}.attention.key_length") or 128)
    per_text = 4 * model.n_layer * heads * per_head * (-(-longest // 256) * 256)
    return max(4, min(_MOST_STREAMS, _KV_BYTES // max(1, per_text)))


def make_prompts(run: Run, model: Model) -> list[Messages]:
    """The prompts of a run: from its file, or written by the target; kept in prompts.jsonl.

    Raises:
        LocalspecError: there are none, or they cannot be read or written.
    """
    file = run.out / PROMPTS
    run.enter("prompts")
    if file.is_file():
        return [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]
    if run.settings.prompts is not None:
        found = prompting.read(Path(run.settings.prompts))
        _write_lines(file, found)
    else:
        found = _own_prompts(run, model, file)
    run.save()
    return found


def _own_prompts(run: Run, model: Model, file: Path) -> list[Messages]:
    """Messages that the target writes; those of an earlier start are kept."""
    headers = prompting.openings(model)
    part = file.with_suffix(".part")
    found, done = _earlier(part)
    wanted = _MOST_PROMPTS
    if run.settings.tokens is not None:
        wanted = max(_FEWEST_PROMPTS, run.settings.tokens // _USUAL_LENGTH)
    attempts = 3 * wanted  # a target that repeats itself ends, too

    def source() -> Iterator[Prompt]:
        for prompt in prompting.asking(headers, done):
            enough = len(found) >= wanted or prompt.index >= attempts
            if enough or (run.share() >= 1 and len(found) >= _FEWEST_PROMPTS):
                return
            yield prompt

    longest = max(map(len, headers)) + prompting.MESSAGE_TOKENS
    writer = Writer(model, (), streams=streams(model, longest), longest=longest,
                    n_threads=run.settings.threads, seed=run.settings.seed)  # fmt: skip
    try:
        with open(part, "a", encoding="utf-8") as out:
            for conversation in writer.write(source(), prompting.MESSAGE_TOKENS):
                text = prompting.message_of(model, conversation)
                known = None if text is None or text in found else text
                out.write(json.dumps({"index": conversation.index, "text": known}) + "\n")
                out.flush()
                if known is not None:
                    found[known] = conversation.index
                far = len(found) / wanted if run.settings.hours is None else run.share()
                run.report(Progress("prompts", min(1.0, far), f"{len(found)} written"))
    except OSError as e:
        raise LocalspecError(f"{part} cannot be written: {e.strerror or e}") from e
    finally:
        writer.close()
        run.save()
    if len(found) < 2:
        raise LocalspecError(
            f"{model.path.name} writes no user messages of its own; give some with --prompts FILE"
        )
    prompts = [[{"role": "user", "content": t}] for t in sorted(found, key=lambda t: found[t])]
    _write_lines(file, prompts)
    part.unlink(missing_ok=True)
    return prompts


def _earlier(part: Path) -> tuple[dict[str, int], set[int]]:
    """(message -> its number, numbers done) of an earlier start; a torn last line is dropped."""
    found: dict[str, int] = {}
    done: set[int] = set()
    text = part.read_text("utf-8", errors="replace") if part.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    for line in whole.splitlines():
        row = json.loads(line)
        done.add(row["index"])
        if row["text"] is not None:
            found[row["text"]] = row["index"]
    if whole != text:
        part.write_text(whole, "utf-8")
    return found, done


def _write_lines(file: Path, prompts: list[Messages]) -> None:
    aside = file.with_name(f".{file.name}.part")
    try:
        aside.write_text("".join(json.dumps({"messages": p}) + "\n" for p in prompts), "utf-8")
        os.replace(aside, file)
    except OSError as e:
        raise LocalspecError(f"{file} cannot be written: {e.strerror or e}") from e


def write_text(
    run: Run,
    model: Model,
    prompts: list[Messages],
    store: Store,
    target_layer_ids: tuple[int, ...],
    depths: int,
) -> None:
    """Have the target answer prompts until there is enough text; what is in the store is kept.

    Raises:
        LocalspecError: no prompt fits, or the disk is full.
    """
    run.enter("text")
    if run.facts.get("text"):
        return
    settings, chat = run.settings, prompting.template(model)
    done = {entry.index for entry in store.entries}
    under_way = {"tokens": 0}  # of prompts being answered

    def enough() -> bool:
        if settings.tokens is not None:
            return store.n_tokens + under_way["tokens"] >= settings.tokens
        return run.share() >= 1

    def source() -> Iterator[Prompt]:
        for index, messages, temperature in prompting.schedule(prompts, settings.seed):
            if index in done:
                continue
            if enough():
                return
            tokens = prompting.tokens_of(model, chat, messages)
            if len(tokens) + 16 <= settings.longest:
                under_way["tokens"] += len(tokens)
                yield Prompt(index, tokens, temperature)

    writer = Writer(model, target_layer_ids, streams=streams(model, settings.longest),
                    longest=settings.longest, n_threads=settings.threads,
                    seed=settings.seed + 1)  # fmt: skip
    fresh: list[Conversation] = []
    flushed = time.monotonic()
    try:
        for conversation in writer.write(source(), settings.answer, depths):
            fresh.append(conversation)
            under_way["tokens"] += len(conversation.tokens) - conversation.n_prompt
            late = time.monotonic() - flushed > 60 * settings.checkpoint_minutes
            if len(fresh) >= SHARD or late:
                under_way["tokens"] -= sum(len(c.tokens) for c in fresh)
                _flush(run, store, fresh)
                flushed = time.monotonic()
            far = run.share()
            if settings.tokens is not None:
                far = min(1.0, store.n_tokens / settings.tokens)
            run.report(Progress("text", far, f"{store.n_tokens + sum(map(_length, fresh))} tokens"))
    finally:
        _flush(run, store, fresh)
        writer.close()
    if len(store.entries) < 4:
        raise LocalspecError(
            "there are too few answers to learn from; give more prompts, or longer ones room with "
            "--longest"
        )
    run.facts["text"] = True
    run.save()


def _length(conversation: Conversation) -> int:
    return len(conversation.tokens)


def _flush(run: Run, store: Store, fresh: list[Conversation]) -> None:
    rows, fresh[:] = list(fresh), []
    store.add(rows)
    run.save()
