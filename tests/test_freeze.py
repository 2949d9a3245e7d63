"""The PyInstaller recipe: a frozen program starts and answers. Takes minutes: only on request."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "pyinstaller"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("LOCALSPEC_TEST_FREEZE"), reason="set LOCALSPEC_TEST_FREEZE=1 to run it"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("PyInstaller") is None, reason="PyInstaller is not installed"
    ),
]


def test_a_frozen_program_answers(tiny_target: tiny.TinyModel, tmp_path: Path):
    settings = {
        "LOCALSPEC_APP": str(RECIPE / "ask.py"),
        "LOCALSPEC_APP_NAME": "ask",
        "LOCALSPEC_APP_CONSOLE": "1",
    }
    subprocess.run(
        [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN",
         "--distpath", str(tmp_path / "dist"), "--workpath", str(tmp_path / "build"),
         str(RECIPE / "localspec_app.spec")],
        env=os.environ | settings, check=True, cwd=tmp_path,
    )  # fmt: skip
    program = tmp_path / "dist" / "ask" / "ask"
    # Nothing of this Python may be needed.
    bare = {"PATH": os.defpath, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [str(program), "hello", str(tiny_target.gguf)]
    out = subprocess.run(command, env=bare, capture_output=True, check=False, timeout=300)
    assert out.returncode == 0, out.stderr
    assert b"tokens/s" in out.stderr
    assert out.stdout.strip()
    out = subprocess.run(
        [str(program), "hello", str(tmp_path / "no.gguf")], env=bare, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert out.returncode == 1 and "does not exist" in out.stderr
