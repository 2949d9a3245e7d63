"""What a clumsy or hostile user does: one line and the right exit status, never an abort."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHAIN, PLAIN
from test_cli import fails

import tiny
from localspec import tuning
from localspec.chat import ChatTemplate
from localspec.convert import convert
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

Drafters = Callable[[str], tuple[tiny.TinyModel, Path]]
QUICK = ("--threads", "1", "--draft-tokens", "0", "-n", "3")


def run(*args: object, stdin: bytes = b"", **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a strict UTF-8 locale, as desktops have it."""
    out = subprocess.run(
        [sys.executable, "-m", "localspec", *map(str, args)],
        input=stdin,
        cwd=Path(__file__).parent,  # in the repository's root, its folders would be imported
        env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
        **options,
    )
    text = [(part or b"").decode("utf-8", "replace") for part in (out.stdout, out.stderr)]
    return subprocess.CompletedProcess(out.args, out.returncode, *text)


def damaged(source: Path, to: Path, key: str, value: int | float) -> Path:
    """A copy of a GGUF with one number of its metadata replaced."""
    data = bytearray(source.read_bytes())
    with GgufFile(source) as file:
        start, end = file.value_span(key)
    code = "<f" if isinstance(value, float) else "<I"
    assert end - start == 8
    data[start + 4 : end] = struct.pack(code, value)
    to.write_bytes(data)
    return to


# llama.cpp ends the process (or, where a head is rotated by nothing, hangs) on each of these.
@pytest.mark.parametrize(
    ("which", "key", "value"),
    [
        ("target", "qwen3.block_count", 1000),
        ("target", "qwen3.rope.dimension_count", 0),
        ("target", "qwen3.rope.dimension_count", 2),
        ("target", "qwen3.attention.layer_norm_rms_epsilon", -1.0),
        ("target", "qwen3.attention.layer_norm_rms_epsilon", float("nan")),
        ("drafter", "dflash.block_count", 0),
        ("drafter", "dflash.block_count", 1 << 31),
        ("drafter", "dflash.rope.dimension_count", 0),
        ("drafter", "dflash.rope.dimension_count", 3),
        ("drafter", "dflash.block_size", 1000),
        ("drafter", "dflash.attention.layer_norm_rms_epsilon", float("nan")),
    ],
)
def test_numbers_that_would_end_the_process(
    which: str,
    key: str,
    value: int | float,
    tiny_target: tiny.TinyModel,
    tiny_drafter: Drafters,
    tmp_path: Path,
):
    pair = {"target": tiny_target.gguf, "drafter": tiny_drafter("vanilla")[1]}
    assert pair[which] is not None
    pair[which] = damaged(pair[which], tmp_path / "x.gguf", key, value)
    with pytest.raises(LocalspecError, match=r"damaged|missing or invalid"):
        Engine.load(pair["target"], pair["drafter"], n_ctx=64, n_threads=1)


@pytest.mark.parametrize("name", ["output_norm.weight", "blk.0.attn_q.weight"])
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_weights_stored_as_integers(
    which: str, name: str, tiny_target: tiny.TinyModel, tiny_drafter: Drafters, tmp_path: Path
):
    pair = {"target": tiny_target.gguf, "drafter": tiny_drafter("vanilla")[1]}
    data = bytearray(pair[which].read_bytes())
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (dims,) = struct.unpack_from("<I", data, at)
    data[at + 4 + 8 * dims : at + 8 + 8 * dims] = struct.pack("<I", 26)  # I32
    pair[which] = tmp_path / "x.gguf"
    pair[which].write_bytes(data)
    with pytest.raises(LocalspecError, match="holds integers"):
        Engine.load(pair["target"], pair["drafter"], n_ctx=64, n_threads=1)


def test_a_token_listed_twice(tiny_target: tiny.TinyModel, tiny_drafter: Drafters, tmp_path: Path):
    twice = tmp_path / "x.gguf"
    a, b = (struct.pack("<Q", 1) + letter for letter in (b"a", b"b"))
    twice.write_bytes(tiny_target.gguf.read_bytes().replace(a, b, 1))
    with pytest.raises(LocalspecError, match="lists a token twice"):
        Engine.load(twice, n_ctx=64, n_threads=1)
    twice.write_bytes(tiny_drafter("vanilla")[1].read_bytes().replace(a, b, 1))
    with pytest.raises(LocalspecError, match="lists a token twice"):
        Engine.load(tiny_target.gguf, twice, n_ctx=64, n_threads=1)


def spoiled(source: Path, to: Path, tensor: str) -> Path:
    """A copy of a GGUF with a NaN in an F32 tensor."""
    data = bytearray(source.read_bytes())
    with GgufFile(source) as file:
        at = file.tensors[tensor].offset
    data[at : at + 4] = np.float32(np.nan).tobytes()
    to.write_bytes(data)
    return to


@pytest.mark.parametrize("head", ["vanilla", "gated"])
def test_outputs_that_are_no_numbers(
    head: str, tiny_target: tiny.TinyModel, tiny_drafter: Drafters, tmp_path: Path
):
    target, drafter = tiny_target.gguf, tiny_drafter(head)[1]
    bad = spoiled(target, tmp_path / "t.gguf", "output_norm.weight")
    with (
        Engine.load(bad, drafter, n_ctx=64, n_threads=1) as engine,
        pytest.raises(LocalspecError, match=r"t\.gguf is not a number"),
    ):
        engine.complete("hello", max_tokens=4, draft=CHAIN)
    bad = spoiled(drafter, tmp_path / "d.gguf", "output_norm.weight")
    if head == "gated":
        (tmp_path / "d.heads.gguf").write_bytes(
            drafter.with_name(drafter.stem + ".heads.gguf").read_bytes()
        )
    with Engine.load(target, bad, n_ctx=64, n_threads=1) as engine:
        with pytest.raises(LocalspecError, match=r"d\.gguf is not a number"):
            engine.complete("hello", max_tokens=4, draft=CHAIN)
        assert engine.complete("hello", max_tokens=4, draft=PLAIN).token_ids


@pytest.mark.parametrize("threads", [-1, 513, 10**6, 2**32 + 1])
def test_absurd_thread_counts(threads: int, load: Callable[..., Engine]):
    with pytest.raises(LocalspecError, match="n_threads"):
        load(n_threads=threads)


def test_absurd_batches_are_cut(load: Callable[..., Engine]):
    assert load(n_batch=10**9).complete("hello", max_tokens=2, draft=PLAIN).token_ids


def test_names_that_no_file_can_have():
    for name in ("a\0b", "\ud800"):
        with pytest.raises(LocalspecError, match="cannot be read"):
            Engine.load(name)


def test_token_arrays_are_prompts(load: Callable[..., Engine]):
    engine = load()
    expected = engine.complete([5, 6, 270], max_tokens=3, draft=PLAIN).token_ids
    assert engine.complete(np.array([5, 6, 270]), max_tokens=3, draft=PLAIN).token_ids == expected
    with pytest.raises(LocalspecError, match="prompt is empty"):
        engine.complete(np.array([], np.int64))


def test_no_measuring_in_the_middle_of_an_answer(load: Callable[..., Engine]):
    engine = load("vanilla")
    expected = engine.complete("hello", max_tokens=20, draft=CHAIN).token_ids
    steps = engine.generate("hello", max_tokens=20, draft=CHAIN)
    tokens = [*next(steps).token_ids]
    with pytest.raises(LocalspecError, match="is generating"):
        engine.tune(force=True)
    assert [*tokens, *(t for step in steps for t in step.token_ids)] == expected
    with pytest.raises(LocalspecError, match="too short to measure"):
        load(n_ctx=40).tune(force=True)
    with pytest.raises(LocalspecError, match="no logits yet"):
        _ = load().last_logits


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": [[float("nan"), 1.0]]},
        {"seconds": [[1.0, 0.0]]},
        {"block_seconds": "x", "host_seconds": None},
        {"host_seconds": -1.0},
        {"sizes": [1, "a"]},
        {"sizes": [1, 1]},
        {"sizes": {"0": 1, "1": 2}},
        {"depths": ["q"]},
    ],
)
def test_damaged_tunings_are_measured_again(change: dict[str, Any], tmp_path: Path):
    good = {
        "sizes": [1, 2], "depths": [32], "seconds": [[1.0, 1.5]], "block_seconds": 0.0,
        "host_seconds": 0.0,
        "switch_seconds": 0.0,
    }  # fmt: skip
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps(good))
    assert tuning.load(path) is not None
    path.write_text(json.dumps(good | change))
    assert tuning.load(path) is None


def test_a_tuning_that_cannot_be_saved_leaves_nothing(tmp_path: Path):
    (tmp_path / "t" / "x.json").mkdir(parents=True)
    tuning.save(tmp_path / "t" / "x.json", tuning.Tuning([1], [32], [[1.0]], 0.0, 0.0, 0.0))
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["x.json"]


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('a\\nb') }}", "{{ 'x' * 99999999999999 }}", "{{" + "(" * 5000]
)
def test_templates_that_fail_do_so_in_one_line(source: str):
    with pytest.raises(LocalspecError) as e:
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])
    assert "\n" not in str(e.value)
    assert not str(e.value).endswith(": ")


def test_outputs_of_a_conversion_that_are_no_files(
    tiny_target: tiny.TinyModel, tiny_drafter: Drafters, tmp_path: Path
):
    checkpoint = tiny_drafter("vanilla")[0].path
    fifo, loop = tmp_path / "fifo", tmp_path / "loop"
    os.mkfifo(fifo)
    with pytest.raises(LocalspecError, match="not a regular file"):
        convert(checkpoint, tiny_target.gguf, fifo)
    assert fifo.is_fifo()
    loop.symlink_to(loop)
    convert(checkpoint, tiny_target.gguf, loop)  # a link is replaced, not followed
    assert loop.is_file()
    for out in ("", "/", tmp_path):
        fails(run("convert", checkpoint, "--target", tiny_target.gguf, "-o", out), 1, "directory")
    long = tmp_path / ("z" * 300)
    fails(run("convert", checkpoint, "--target", tiny_target.gguf, "-o", long), 1, "too long")


def test_hostile_lines_in_a_chat(tiny_target: tiny.TinyModel):
    lines = b"/[/dim]\n[/x] [bold\n\xff\xfe\n" + b"y" * 3000 + b"\nhello\n"
    out = run("chat", "-m", tiny_target.gguf, "--n-ctx", 256, *QUICK, stdin=lines)
    fails(out, 1, "context holds 256")
    assert "/[/dim] is no command" in out.stdout
    assert "error" not in out.stdout
    assert out.stdout.rstrip("\n").count("\n") >= 3  # the line after the failed one is answered


def test_bytes_that_are_no_text(tiny_target: tiny.TinyModel):
    out = run("generate", "-m", tiny_target.gguf, *QUICK, stdin=b"\xff\xfe\x80 a\0b")
    assert out.returncode == 0, out.stderr
    fails(run("generate", "-m", "new\nline\x1b[31m", "-p", "x"), 1, "'new\\nline\\x1b[31m'")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_to_a_full_disk(tiny_target: tiny.TinyModel):
    with open("/dev/full", "wb") as full:
        out = run("generate", "-m", tiny_target.gguf, *QUICK, "-p", "x", stdout=full)
    fails(out, 1, "No space left")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_closed_standard_streams(tiny_target: tiny.TinyModel):
    command = f"{sys.executable} -m localspec generate -m {tiny_target.gguf} {' '.join(QUICK)}"
    for redirected, status in (("<&-", 2), ("-p x >&-", 0)):
        out = subprocess.run(
            f"{command} {redirected}", shell=True, capture_output=True, text=True, check=False
        )
        assert out.returncode == status, out.stderr
        assert "Traceback" not in out.stderr
