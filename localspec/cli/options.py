"""Options that several commands share, and what they make of them."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from localspec.drafting import DraftOptions
    from localspec.engine import Engine
    from localspec.finding import Finder
    from localspec.sampling import SamplingParams
    from localspec.tuning import Tuning

F = TypeVar("F", bound=Callable[..., Any])

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def _stack(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


model_options = _stack(
    click.option("-m", "--model", metavar="MODEL",
                 help="The target: a GGUF file, a name of `localspec models`, or a model on the "
                 "hub, e.g. owner/name:Q4_K_M (left out: the default pair)."),
    click.option("-d", "--drafter", metavar="DRAFTER",
                 help="A drafter for it: a GGUF file, owner/name on the hub, or what `localspec "
                 "models` lists; 'mtp': the target's own multi-token prediction layers; 'none'."),
    click.option("--n-ctx", default=4096, show_default=True, metavar="N",
                 help="Context length in tokens; 0 takes the model's own."),
    click.option("--threads", default=0, metavar="N",
                 help="CPU threads (left out: one per physical core it may use)."),
    click.option("--gpu-layers", default=-1, show_default=True, metavar="N",
                 help="Layers on the GPU; -1 means all."),
    click.option("--flash-attn", type=click.Choice(["auto", "on", "off"]), default="auto",
                 show_default=True, help="Flash attention."),
    click.option("--kv-type", type=click.Choice(KV_TYPES), default="f16", show_default=True,
                 help="Element type of the KV cache."),
    click.option("--no-mmap", is_flag=True, help="Read the files instead of mapping them."),
    click.option("--rpc", default="", metavar="HOST:PORT,...",
                 help="Spread the target over llama.cpp's RPC workers."),
    click.option("-v", "--verbose", is_flag=True, help="Show llama.cpp's log."),
)  # fmt: skip

cache_options = _stack(
    click.option("--prefix-cache", default="auto", show_default=True, metavar="SIZE",
                 help="Most memory for earlier conversations, e.g. 256M; 0: none; auto: up to 1G."),
)  # fmt: skip

# The same as -m, for commands that take nothing else by position.
model_argument = click.argument("name", required=False, metavar="[MODEL]")


def _biases(_ctx: click.Context, _param: click.Parameter, given: Sequence[str]) -> dict[int, float]:
    """llama.cpp's `--logit-bias`: TOKEN_ID+X or TOKEN_ID-X."""
    found = {}
    for text in given:
        match = re.fullmatch(r"(\d+)([+-]\d+(?:\.\d*)?)", text)
        if match is None:
            raise click.BadParameter(f"{text!r} is no ID+X or ID-X, like 284-100")
        found[int(match[1])] = float(match[2])
    return found


sampling_options = _stack(
    click.option("--temp", default=0.0, show_default=True, metavar="T",
                 help="Temperature; 0 takes the most likely token."),
    click.option("--top-k", default=0, metavar="K", help="Keep the K most likely tokens (0: all)."),
    click.option("--top-p", default=1.0, metavar="P", help="Keep the likeliest tokens up to P."),
    click.option("--min-p", default=0.0, metavar="P",
                 help="Drop tokens below P times the most likely."),
    click.option("--repetition-penalty", default=1.0, metavar="X",
                 help="Penalise repeated tokens."),
    click.option("--presence-penalty", default=0.0, metavar="X", help="Once per repeated token."),
    click.option("--frequency-penalty", default=0.0, metavar="X", help="Per repetition."),
    click.option("--penalty-window", default=64, show_default=True, metavar="N",
                 help="Recent tokens that count as repeated; -1 for all."),
    click.option("--logit-bias", multiple=True, callback=_biases, metavar="ID+X",
                 help="Add X to a token's logit (284-100 bans it); repeatable."),
    click.option("--seed", type=int, metavar="N", help="Same seed, same text."),
    click.option("--acceptance", type=click.Choice(["auto", "match", "rejection"]), default="auto",
                 show_default=True, help="How sampled drafts are accepted; all are exact."),
)  # fmt: skip

draft_options = _stack(
    click.option("--policy", type=click.Choice(["auto", "fixed"]),
                 help="auto: what pays on this machine (default); fixed: what the next two say."),
    click.option("--draft-tokens", type=int, metavar="N",
                 help="Tokens drafted per round (fixed policy; 7)."),
    click.option("--tree-width", type=int, metavar="K",
                 help="Children per drafted token (fixed policy; 1, a chain)."),
    click.option("--context-drafts/--no-context-drafts", default=True, show_default=True,
                 help="Also draft from repeats in the text so far."),
    click.option("--no-speculation", is_flag=True, help="Decode plainly."),
    click.option("--deterministic", is_flag=True,
                 help="Same prompt and seed, same text on this machine, every time."),
)  # fmt: skip


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """`SamplingParams` from the options of `sampling_options` (which are taken out)."""
    from localspec.sampling import SamplingParams

    return SamplingParams(
        temperature=options.pop("temp"),
        **{
            name: options.pop(name)
            for name in (
                "top_k",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
                "penalty_window",
                "logit_bias",
                "seed",
                "acceptance",
            )
        },
    )


def drafting(options: dict[str, Any]) -> DraftOptions:
    """`DraftOptions` from the options of `draft_options` (which are taken out)."""
    from localspec.drafting import DraftOptions

    policy, tokens = options.pop("policy"), options.pop("draft_tokens")
    width, context = options.pop("tree_width"), options.pop("context_drafts")
    deterministic = options.pop("deterministic")
    if options.pop("no_speculation"):
        return DraftOptions(tokens=0, deterministic=deterministic)
    if policy is None:
        policy = "auto" if tokens is None and width is None else "fixed"
    default = DraftOptions.auto() if policy == "auto" else DraftOptions()
    return DraftOptions(
        policy=policy,
        tokens=default.tokens if tokens is None else tokens,
        width=default.width if width is None else width,
        context=context,
        deterministic=deterministic,
    )


def prepare(engine: Engine, draft: DraftOptions) -> None:
    """Measure this machine if the policy needs it and nobody has, with a progress bar."""
    if draft.policy != "auto" or draft.tokens == 0 or engine.tuned:
        return
    measure(engine)


def measure(engine: Engine) -> Tuning:
    """Measure this machine, with a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (TextColumn("measuring this machine (once)"), BarColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=1.0)
        return engine.tune(force=True, progress=lambda f: bar.update(task, completed=f))


@contextmanager
def loaded_engine(options: dict[str, Any]) -> Iterator[Engine]:
    """The engine of the options of `model_options` (which are taken out), closed at the end."""
    target, drafter = target_and_drafter(options)
    with load_engine(target, drafter, options) as engine:
        yield engine


def target_and_drafter(options: dict[str, Any]) -> tuple[Path, str | Path | None]:
    """The files that `model_options` name (taken out), or the default pair.

    They are downloaded, and drafters converted, where they are not here yet.
    """
    name, target = options.pop("name", None), options.pop("model")
    if name is not None and target is not None:
        raise click.UsageError("the model is named twice, by position and with -m; leave one out")
    return finder().files(name if name is not None else target, options.pop("drafter"))


def finder(*, update: bool = False, verify: bool = False) -> Finder:
    """What finds files by names, telling on stderr what takes a while."""
    from localspec.cli.convert import progress_bar
    from localspec.finding import Finder

    def say(line: str) -> None:
        quiet_downloads()
        click.echo(line, err=True)

    return Finder(say, progress_bar, update=update, verify=verify)


def quiet_downloads() -> None:
    """No progress bars in logs."""
    if sys.stderr is None or not sys.stderr.isatty():
        from huggingface_hub import utils

        utils.disable_progress_bars()  # type: ignore[attr-defined]


def load_engine(target: str | Path, drafter: str | Path | None, options: dict[str, Any]) -> Engine:
    """An engine with the other options of `model_options`, and those of `cache_options` where a
    command has them (all taken out)."""
    from localspec.engine import Engine

    if options.pop("verbose"):
        show_log()
    flash = {"auto": None, "on": True, "off": False}[options.pop("flash_attn")]
    return Engine.load(
        target,
        drafter,
        n_ctx=options.pop("n_ctx"),
        n_threads=options.pop("threads"),
        n_gpu_layers=options.pop("gpu_layers"),
        flash_attn=flash,
        kv_type=options.pop("kv_type"),
        use_mmap=not options.pop("no_mmap"),
        prefix_cache=options.pop("prefix_cache", 0),
        rpc=options.pop("rpc"),
    )


def show_log() -> None:
    """Send llama.cpp's log to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("localspec")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
