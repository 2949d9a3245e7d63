"""Who may import what (docs/architecture.md)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def imported(file: Path) -> set[str]:
    """Top-level packages that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def files(*rooms: str) -> list[Path]:
    return [file for room in rooms for file in (ROOT / room).rglob("*.py")]


def test_one_package_knows_llama_cpp():
    knows = {
        file.relative_to(ROOT).parent.as_posix()
        for file in files("localspec", "convert", "models")
        if imported(file) & {"ctypes", "llama_cpp"}
    }
    assert knows == {"localspec/llama"}


def test_the_runtime_knows_no_torch():
    assert not [file for file in files("localspec") if imported(file) & {"torch", "transformers"}]
    assert [file for file in files("models") if "torch" in imported(file)]


# A decision is tested with arrays of ten lines; whoever gives it a model takes that away.
PURE = (
    "accept", "calibration", "cost_curve", "heads", "odds", "pacing", "policy", "reasoning",
    "sampled", "sampling", "suffix", "thread_choice", "topk", "tree",
)  # fmt: skip


@pytest.mark.parametrize("name", PURE)
def test_decisions_know_no_model(name: str):
    source = (ROOT / "localspec" / f"{name}.py").read_text("utf-8")
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.ImportFrom)]
    models = {"llama", "target", "drafter", "eagle", "engine"}
    assert not {n.module.removeprefix("localspec.") for n in nodes if n.module} & models
