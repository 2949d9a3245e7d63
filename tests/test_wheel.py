"""The wheel: pure Python, every package in it, the default drafter too, nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Folders of the repository and the packages they are installed as.
SOURCES = {"localspec": "localspec", "convert": "localspec/convert", "models": "localspec/models"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves folders behind."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation",
               "--disable-pip-version-check", "-w", str(folder), str(source)]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named pip" in built.stderr:
        pytest.skip("pip is not installed")
    assert built.returncode == 0, built.stdout + built.stderr
    (file,) = folder.glob("*.whl")
    return file


def test_it_is_pure_python(wheel: Path):
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as content:
        (name,) = [n for n in content.namelist() if n.endswith(".dist-info/WHEEL")]
        assert b"Root-Is-Purelib: true" in content.read(name)
        binaries = (".so", ".dylib", ".dll", ".pyd", ".a", ".o")
        assert not [n for n in content.namelist() if n.endswith(binaries)]


def test_every_file_is_in_it_and_nothing_else(wheel: Path):
    """pyproject.toml lists packages and kinds of data: what is missing there would be lost."""
    expected = {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, package in SOURCES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as content:
        files = {n for n in content.namelist() if ".dist-info/" not in n}
    assert files == expected


def test_it_carries_the_default_drafter_and_the_types(wheel: Path):
    with zipfile.ZipFile(wheel) as content:
        for name in ("localspec/data/smollm2-135m-dspark.gguf", "localspec/py.typed"):
            assert content.read(name) == (ROOT / name).read_bytes()
        (scripts,) = [n for n in content.namelist() if n.endswith("entry_points.txt")]
        assert "localspec = localspec._entry:main" in content.read(scripts).decode()


def test_packages_are_those_that_exist():
    tomllib = pytest.importorskip("tomllib")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    packages = {
        ".".join([package.replace("/", "."), *path.parent.relative_to(ROOT / folder).parts])
        for folder, package in SOURCES.items()
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert set(listed["packages"]) == packages
