"""`localspec generate`: one answer."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.options import (
    draft_options,
    drafting,
    loaded_engine,
    model_argument,
    model_options,
    prepare,
    sampling_options,
    sampling_params,
)

if TYPE_CHECKING:
    from localspec.engine import Engine, Result
    from localspec.grammar import Grammar


@click.command()
@model_argument
@model_options
@click.option("-p", "--prompt", help="The prompt; standard input if left out.")
@click.option("-n", "--max-tokens", type=click.IntRange(min=1), metavar="N",
              help="Most tokens to generate (until the end if left out).")  # fmt: skip
@click.option("--system", help="System message.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End at this text (repeatable).")
@click.option("--grammar", metavar="FILE", help="Answer in this grammar (llama.cpp's GBNF).")
@click.option("--json-schema", metavar="FILE", help="Answer in JSON that follows this schema.")
@sampling_options
@draft_options
@click.option("--raw", is_flag=True, help="Feed the prompt as it is, without the chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
@click.option("--show-trees", is_flag=True, help="Print every round's draft tree to stderr.")
def generate(
    prompt: str | None,
    max_tokens: int | None,
    system: str | None,
    stop: tuple[str, ...],
    grammar: str | None,
    json_schema: str | None,
    raw: bool,
    as_json: bool,
    show_trees: bool,
    **options: Any,
) -> None:
    """Answer a prompt, or continue it with --raw.

    \b
    localspec generate -p "Why is the sky blue?" -n 200
    localspec generate -m target.gguf -d drafter.gguf -p "Write a haiku" --temp 0.7 --seed 1
    localspec generate -p "Invent a person" --json-schema person.json
    """
    from localspec.cli.chatui.clean import printable
    from localspec.engine import Result
    from localspec.errors import LocalspecError
    from localspec.reasoning import closed

    # A file gets what the model wrote; a terminal nothing that could steer it.
    piped = sys.stdout is None or not sys.stdout.isatty()
    if prompt is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise click.UsageError("no prompt; give one with -p, or pipe it in")
        prompt = sys.stdin.read()
    params, draft = sampling_params(options), drafting(options)
    allowed = _grammar(grammar, json_schema)
    with loaded_engine(options) as engine:
        prepare(engine, draft)
        if show_trees:
            _print_trees(engine)
        text = prompt if raw else _templated(engine, prompt, system)
        if allowed is not None and not raw:
            text = closed(text)
        result = Result()
        try:
            for step in engine.generate(
                text, params, max_tokens=max_tokens, draft=draft, stop=stop, grammar=allowed
            ):
                result.add(step)
                if not as_json:
                    click.echo(step.text if piped else printable(step.text), nl=False)
        except LocalspecError:
            if result.text and not as_json:
                click.echo()  # the error gets a line of its own
            raise
        click.echo(json.dumps(as_dict(result)) if as_json else "")


def _grammar(gbnf: str | None, json_schema: str | None) -> Grammar | None:
    """The grammar in one of two files, if any."""
    from localspec.errors import LocalspecError
    from localspec.grammar import Grammar

    if gbnf is not None and json_schema is not None:
        raise click.UsageError("give one of --grammar and --json-schema, not both")
    name = gbnf if gbnf is not None else json_schema
    if name is None:
        return None
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is no UTF-8 text"
        raise LocalspecError(f"{name} cannot be read: {why}") from e
    return Grammar.from_gbnf(text) if gbnf is not None else Grammar.from_json_schema(text)


def as_dict(result: Result) -> dict[str, Any]:
    """A result as `--json` prints it."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "prompt_tokens": result.prompt_tokens,
        "processed_tokens": result.processed_tokens,
        "prefill_seconds": result.prefill_seconds,
        "finish_reason": result.finish_reason,
        "tau": result.tau,
        "tokens_per_second": result.tokens_per_second,
        "rounds": [asdict(r) for r in result.rounds],
    }


def _templated(engine: Engine, prompt: str, system: str | None) -> str:
    from localspec.chat import chat_template
    from localspec.errors import LocalspecError

    if not prompt.strip():
        raise LocalspecError("the prompt is empty; give at least one token of text")
    messages = [{"role": "system", "content": system}] if system is not None else []
    return chat_template(engine).render([*messages, {"role": "user", "content": prompt}])


def _print_trees(engine: Engine) -> None:
    from localspec.tree import DraftTree

    def show(tree: DraftTree, accepted: tuple[int, ...]) -> None:
        click.echo(tree.render(lambda t: engine.model.text([t], special=True), accepted), err=True)
        click.echo("-" * 40, err=True)

    engine.on_verified = show
