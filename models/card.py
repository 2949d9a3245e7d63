"""The training card: a README.md beside the checkpoint that says where it comes from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from localspec._version import __version__
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.models.config import DrafterConfig
from localspec.models.learning import FIRST_SHARE, FIRST_WEIGHTS, Trained
from localspec.models.progress import PHASES, Run

FILE = "README.md"


def write(
    checkpoint: Path,
    run: Run,
    target: Path,
    config: DrafterConfig,
    trained: Trained,
    length: float | None,
) -> None:
    """Write the card into a checkpoint's directory.

    Args:
        checkpoint: the directory.
        run: the run.
        target: the target's GGUF.
        config: the drafter's shape.
        trained: what training gave.
        length: accepted length in the runtime, where it was measured.

    Raises:
        LocalspecError: it cannot be written.
    """
    with GgufFile(target) as file:
        name = str(file.get("general.name") or target.stem)
    text = "\n".join(_lines(run, name, target, config, trained, length)) + "\n"
    try:
        (checkpoint / FILE).write_text(text, "utf-8")
    except OSError as e:
        raise LocalspecError(f"{checkpoint / FILE} cannot be written: {e.strerror or e}") from e


def _lines(
    run: Run,
    name: str,
    target: Path,
    config: DrafterConfig,
    trained: Trained,
    length: float | None,
) -> Iterator[str]:
    c, s = config, run.settings
    parameters = sum(p.numel() for p in trained.trainer.drafter.parameters() if p.requires_grad)
    yield f"# DSpark drafter for {name}"
    yield ""
    yield f"Trained by localspec {__version__} for `{target.name}`, on text this very file wrote."
    yield "It only proposes: what is generated with it is the target's own text."
    yield ""
    yield "## Data"
    yield ""
    source = "given by the user" if s.prompts else "written by the target itself"
    yield f"- prompts: {source}; seed {s.seed}"
    yield f"- {trained.n_tokens:,} tokens of text; {trained.n_conversations:,} answers trained on"
    yield "- answers sampled by the target at temperatures 0, 0.7, 0, 1.0"
    if run.facts.get("fastest", "target") != "target":
        yield "- evaluated in BF16 (the target's own weights), which is faster here"
    yield ""
    yield "## Shape"
    yield ""
    heads = f"{c.num_attention_heads} heads of {c.head_dim}"
    layers = f"{c.num_hidden_layers} layer{'s' * (c.num_hidden_layers > 1)}"
    yield f"- {layers} of width {c.hidden_size}, {heads}, MLP of {c.intermediate_size}"
    yield f"- block of {c.block_size}, target layers {', '.join(map(str, c.target_layer_ids))}"
    head = f"{c.markov_head_type} Markov head of rank {c.markov_rank}"
    yield f"- {head if c.markov_rank else 'no Markov head'}"
    yield f"- {'a' if c.enable_confidence_head else 'no'} confidence head"
    if c.reduced_vocab:
        covered = run.facts.get("covered")
        what = f" ({covered:.1%} of the text)" if covered else ""
        yield f"- drafts {c.reduced_vocab} of {c.vocab_size} tokens{what}"
    yield f"- {parameters / 1e6:.1f} M trained parameters"
    yield ""
    yield "## Training"
    yield ""
    if s.init:
        yield f"- started from `{Path(s.init).name}`"
    how = "Muon and AdamW" if trained.trainer.recipe.muon else "AdamW"
    precision = "bfloat16" if trained.trainer.recipe.bfloat16 else "float32"
    yield f"- {trained.steps:,} steps of {s.sequences} x {s.anchors} blocks, {how}, {precision}"
    yield "- loss: 0.1 cross-entropy + 0.9 total variation + 1.0 confidence, weighed exp(-k/4)"
    if not s.init:
        first = f"for the first {FIRST_SHARE:.0%} of the run"
        yield f"- cross-entropy weighed {FIRST_WEIGHTS.ce} {first}"
    minutes = ", ".join(f"{p} {run.spent(p) / 60:.1f}" for p in PHASES if run.spent(p) >= 1)
    if minutes:
        yield f"- minutes: {minutes}"
    yield ""
    if trained.held is not None:
        yield "## Held-out text"
        yield ""
        yield "| depth | " + " | ".join(str(d + 1) for d in range(c.num_depths)) + " |"
        yield "|---" * (c.num_depths + 1) + "|"
        yield "| right | " + " | ".join(f"{v:.2f}" for v in trained.held.agreed) + " |"
        yield "| accepted | " + " | ".join(f"{v:.2f}" for v in trained.held.accepted) + " |"
        yield ""
        yield (
            f"Expected accepted length of a greedy chain: {trained.held.length:.2f} tokens a round"
            + (f"; measured in the runtime: {length:.2f}." if length is not None else ".")
        )
        yield (
            "`right`: the drafted token is the text's. `accepted`: chance that speculative "
            "sampling accepts it."
        )
        yield ""
    yield "## Commands"
    yield ""
    yield "```sh"
    yield f"localspec train {' '.join(_options(run, target))}"
    yield f"localspec chat -m {shlex.quote(target.name)} -d drafter.gguf"
    yield "```"


def _options(run: Run, target: Path) -> Iterator[str]:
    s = run.settings
    yield f"--target {shlex.quote(target.name)} -o {shlex.quote(run.out.name)}"
    for name in ("hours", "tokens", "steps", "layers", "block_size", "rank", "head", "vocab"):
        value = getattr(s, name)
        if value is not None:
            yield f"--{name.replace('_', '-')} {value}"
    for name in ("prompts", "init"):
        value = getattr(s, name)
        if value is not None:
            yield f"--{name} {shlex.quote(Path(value).name)}"
    if s.seed:
        yield f"--seed {s.seed}"
