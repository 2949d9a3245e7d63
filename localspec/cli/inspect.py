"""`localspec inspect`: what a GGUF file is, and whether a target and a drafter fit together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.errors import LocalspecError

if TYPE_CHECKING:
    from localspec.ggufio import GgufFile


@click.command()
@click.argument("file")
@click.argument("other", metavar="[FILE2]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of words.")
def inspect(file: str, other: str | None, as_json: bool) -> None:
    """Say what a GGUF FILE is: a target, a drafter, or a drafter's heads.

    With two files, a target and a drafter in either order, also say whether they fit together:
    exit status 0 when they do, 1 with the reason when they do not. A name of `localspec models`,
    or a model on the hub, stands for its GGUF.
    """
    from localspec.cli.options import finder
    from localspec.ggufio import GgufFile

    with GgufFile(finder().target(file)) as first:
        if other is None:
            description = describe(first)
            click.echo(json.dumps(description, indent=2) if as_json else in_words(description))
            return
        with GgufFile(finder().target(other)) as second:
            descriptions = [describe(first), describe(second)]
            reason = misfit(first, second)
    if as_json:
        answer = {"files": descriptions, "fits": reason is None, "reason": reason}
        click.echo(json.dumps(answer, indent=2))
        if reason is not None:
            raise SystemExit(1)
        return
    click.echo("\n\n".join(in_words(d) for d in descriptions) + "\n")
    if reason is not None:
        raise LocalspecError(reason)
    click.echo("These two fit together.")


def misfit(first: GgufFile, second: GgufFile) -> str | None:
    """Why the two files are no pair, in one line; None when they are. Either order."""
    from localspec import pairs

    target, drafter = first, second
    if first.architecture in pairs.DRAFTER_ARCHS:
        target, drafter = second, first
    try:
        pairs.check_pair(target, drafter)
    except LocalspecError as e:
        return str(e)
    return None


def describe(gguf_file: GgufFile) -> dict[str, Any]:
    """What a GGUF is, as JSON-compatible values.

    Raises:
        LocalspecError: it is no model, or a drafter that lacks something it needs.
    """
    from localspec import pairs

    if gguf_file.architecture in pairs.DRAFTER_ARCHS:
        found = _describe_drafter(gguf_file)
    elif gguf_file.architecture == pairs.HEADS_ARCH:
        found = _describe_heads(gguf_file)
    else:
        found = _describe_target(gguf_file)
    return {"file": str(gguf_file.path), **found}


def in_words(description: dict[str, Any]) -> str:
    """A description for people, several lines."""
    title = {
        "target": "a target (the model whose output you get)",
        "drafter": "a drafter (proposes tokens to a target)",
        "heads": "the heads of a drafter (keep it beside its drafter)",
    }[description["kind"]]
    lines = [f"{Path(description['file']).name}: {title}"]
    width = max(len(_label(key)) for key in description)
    for key, value in description.items():
        if key not in ("file", "kind"):
            lines.append(f"  {_label(key):<{width}}  {_in_words(key, value)}")
    return "\n".join(lines)


def _describe_target(target: GgufFile) -> dict[str, Any]:
    from localspec import mtp, pairs

    pairs.check_target(target)
    layers = mtp.n_mtp_layers(target)
    inside = {"mtp_layers": layers, "drafts_with_mtp": mtp.can_draft(target)} if layers else {}
    return {
        "kind": "target",
        "name": _text(target, "general.name"),
        "architecture": target.architecture,
        "layers": target.arch_get("block_count"),
        "width": target.arch_get("embedding_length"),
        "vocabulary": pairs.vocab_size(target),
        "context": _number(target.arch_get("context_length")),
        **_storage(target),
        "chat_template": "tokenizer.chat_template" in target.metadata,
        "layer_features": pairs.features_available(target),
        **inside,
    }


def _describe_drafter(drafter: GgufFile) -> dict[str, Any]:
    from localspec import pairs
    from localspec.ggufio import GgufFile

    info = pairs.read_drafter(drafter)
    shared = {
        "layers": _number(drafter.arch_get("block_count")),
        "width": info.n_embd,
        "vocabulary": info.n_vocab,
        "made_for": _text(drafter, "localspec.target.name"),
        "reads_target_layers": list(info.target_layers),
        "of_target_layers": _number(drafter.get("localspec.target.block_count")),
        **_storage(drafter),
        "standalone": "token_embd.weight" in drafter.tensors,
    }
    if info.family == "eagle3":
        d2t = drafter.tensors.get("d2t")
        return {
            "kind": "drafter",
            "name": _text(drafter, "general.name"),
            "family": "Eagle3",
            "depths": info.max_depth,
            "drafts_tokens": info.n_vocab if d2t is None else d2t.shape[0],
            **({} if info.heads_path is None else {"layer_file": str(info.heads_path)}),
            **shared,
            "standalone": {"token_embd.weight", "output.weight"} <= drafter.tensors.keys(),
        }
    rank = 0
    if "markov_w1.weight" in drafter.tensors:
        rank = drafter.tensors["markov_w1.weight"].shape[-1]
    elif info.top_k:
        rank = drafter.tensors["selector_hidden.weight"].shape[0]
    elif info.heads_path is not None:
        with GgufFile(info.heads_path) as heads:
            rank = _number(heads.get("localspec.heads.rank")) or 0
    return {
        "kind": "drafter",
        "name": _text(drafter, "general.name"),
        "family": "DFlash 2" if info.top_k else "DSpark" if info.sample_from_anchor else "DFlash",
        "head": info.head_type,
        "rank": rank,
        "heads_file": None if info.heads_path is None else str(info.heads_path),
        "confidence_head": info.has_confidence,
        "block_size": info.block_size,
        "depths": info.max_depth,
        "mask_token": info.mask_token,
        **shared,
    }


def _describe_heads(heads: GgufFile) -> dict[str, Any]:
    return {
        "kind": "heads",
        "head": _text(heads, "localspec.heads.type"),
        "rank": _number(heads.get("localspec.heads.rank")),
        "width": _number(heads.get("localspec.heads.embedding_length")),
        "vocabulary": _number(heads.get("localspec.heads.vocab_size")),
        "confidence_head": "conf_proj.weight" in heads.tensors,
        "pair_id": _text(heads, "localspec.pair_id"),
        **_storage(heads),
    }


def _storage(gguf_file: GgufFile) -> dict[str, Any]:
    """Parameters, bytes of tensors, and the share of parameters stored as each type."""
    counts: dict[str, int] = {}
    for tensor in gguf_file.tensors.values():
        counts[tensor.type_name] = counts.get(tensor.type_name, 0) + math.prod(tensor.shape)
    total = sum(counts.values())
    shares = {kind: n / max(1, total) for kind, n in counts.items()}
    return {
        "parameters": total,
        "bytes": sum(t.nbytes for t in gguf_file.tensors.values()),
        "stored_as": {k: round(v, 4) for k, v in sorted(shares.items(), key=lambda x: -x[1])},
    }


def _text(gguf_file: GgufFile, key: str) -> str | None:
    value = gguf_file.get(key)
    if not isinstance(value, str) or not value:
        return None
    # Files come from anywhere: control characters must not reach the terminal.
    return "".join(c if c.isprintable() else "?" for c in value)


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _label(key: str) -> str:
    return key.replace("_", " ")


def _in_words(key: str, value: Any) -> str:
    if value is None:
        return "none" if key == "heads_file" else "not said"
    if key == "layer_features":
        return "yes: drafters can be used" if value else "no: plain decoding only"
    if key == "drafts_with_mtp":
        return "yes: -d mtp drafts with its own layers" if value else "no"
    if key == "standalone":
        return "yes" if value else "no: embeddings and output matrix are the target's"
    if key == "stored_as":
        return ", ".join(f"{kind} {share:.0%}" for kind, share in value.items())
    if key == "bytes":
        return f"{value / 1e6:,.1f} MB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(str(x) for x in value)
    return f"{value:,}" if isinstance(value, int) else str(value)
