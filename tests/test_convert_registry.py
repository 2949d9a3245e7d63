"""docs/checkpoints.md is what the registry says, and the tests it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from localspec.convert import registry

ROOT = Path(__file__).resolve().parents[1]


def test_the_page_is_up_to_date():
    assert (ROOT / "docs/checkpoints.md").read_text("utf-8") == registry.page(), (
        "run: python -m localspec.convert.registry docs/checkpoints.md"
    )


@pytest.mark.parametrize("row", registry.ROWS, ids=lambda row: row.proof.split("::")[1])
def test_every_proof_exists(row):
    file, name = row.proof.split("::")
    text = (ROOT / "tests" / file).read_text("utf-8")
    assert re.search(rf"^ *def {name}\(", text, re.M)
    assert "|" not in row.family + row.packaging + row.converts + row.runs


def test_the_command_writes_the_page(tmp_path, capsys):
    registry.main([str(tmp_path / "p.md")])
    registry.main([])
    assert (tmp_path / "p.md").read_text("utf-8") == capsys.readouterr().out == registry.page()
