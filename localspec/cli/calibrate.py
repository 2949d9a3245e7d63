"""`localspec calibrate`: make a drafter's odds mean what they say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from localspec.cli.options import loaded_engine, model_argument, model_options

if TYPE_CHECKING:
    from localspec.calibration import Records, Report
    from localspec.engine import Engine


@click.command()
@model_argument
@model_options
@click.option(
    "--prompts",
    "file",
    metavar="FILE",
    help='JSON lines {"turns": ["..."]} (left out: the target writes its own).',
)
@click.option(
    "--count",
    type=click.IntRange(min=5),
    default=150,
    show_default=True,
    metavar="N",
    help="Prompts to answer.",
)
@click.option(
    "-n",
    "--max-tokens",
    type=click.IntRange(min=16),
    default=128,
    show_default=True,
    metavar="N",
    help="Most tokens per answer.",
)
@click.option(
    "--temp",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="T",
    help="Temperature of the answers; 0 takes the most likely token.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Same seed, same prompts.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def calibrate(
    file: str | None,
    count: int,
    max_tokens: int,
    temp: float,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Calibrate a drafter on text that the target writes itself.

    Compares the drafter's guesses with what the target says, fits odds that come true as often as
    they say, and keeps them beside the drafter (or in the cache directory, when that cannot be
    written), where every command finds them. Takes some minutes on a CPU.

    \b
    localspec calibrate
    localspec calibrate -m target.gguf -d drafter.gguf --prompts questions.jsonl
    """
    import json
    from dataclasses import asdict

    from localspec import calibration, calibration_file
    from localspec.calibrating import checked_drafter, own_messages
    from localspec.errors import LocalspecError

    messages: Iterable[str] | None = None
    if file is not None:
        from localspec.bench.prompts import first_turns, read_prompts

        messages = first_turns([read_prompts(file, count)])
    with loaded_engine(options) as engine:
        depths = checked_drafter(engine).info.max_depth
        if messages is None:
            messages = own_messages(engine, count, seed=seed)
        answers = _answers(engine, messages, count, max_tokens, temp, seed)
        if len(answers) < 5:
            raise LocalspecError(
                f"only {len(answers)} answers were long enough to learn from and it takes 5; give "
                "more prompts with --prompts FILE, or raise --max-tokens"
            )
        table, report = calibration.calibrate(answers, depths)
        about = {
            "target": engine.model.description,
            "temperature": temp,
            "report": asdict(report),
        }
        path = calibration_file.save(engine._files[1], table, about)
    if as_json:
        click.echo(json.dumps({"file": str(path), **asdict(report)}))
    else:
        _print(report, depths)
        click.echo(f"saved to {path}")


def _answers(
    engine: Engine,
    messages: Iterable[str],
    count: int,
    max_tokens: int,
    temp: float,
    seed: int,
) -> list[Records]:
    """What was drafted along the answers, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    from localspec.calibrating import record, rendered
    from localspec.sampling import SamplingParams

    answers = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("the target answers", total=count)
        for i, message in enumerate(islice(messages, count)):
            prompt = rendered(engine, message)
            if len(prompt) + 16 < engine.n_ctx:
                params = SamplingParams(temperature=temp, seed=seed + i)
                answer = record(engine, prompt, max_tokens=max_tokens, params=params)
                if len(answer.chain):
                    answers.append(answer)
            bar.update(task, completed=i + 1)
    return answers


def _print(report: Report, depths: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="expected calibration error of path survival, held-out prompts")
    table.add_column("depth", justify="right")
    columns: dict[str, Sequence[float]] = {
        "confidence head": report.confidence_alone,
        "before": report.before,
        "after": report.after,
        "tree before": report.tree_before,
        "tree after": report.tree_after,
    }
    columns = {name: values for name, values in columns.items() if values}
    for name in columns:
        table.add_column(name, justify="right")
    for d in range(depths):
        table.add_row(str(d + 1), *(f"{v[d]:.2%}" for v in columns.values()))
    console = Console()
    console.print(table)
    console.print(
        f"{report.prompts} answers, {report.positions} positions; log loss per node "
        f"{report.loss_before:.4f} before, {report.loss_probability:.4f} from the probability, "
        f"{report.loss_both:.4f} with the confidence head"
        f" ({'used' if report.uses_confidence else 'not used'})"
    )
