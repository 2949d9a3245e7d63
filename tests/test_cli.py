"""The command line: output, exit codes, one-line errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import command as run
from conftest import fails

import tiny

Drafters = Callable[[str], tuple[tiny.TinyModel, Path]]


@pytest.fixture(scope="module")
def pair(tiny_target: tiny.TinyModel, tiny_drafter: Drafters) -> tuple[Path, Path]:
    return tiny_target.gguf, tiny_drafter("vanilla")[1]


def test_generate_prints_the_answer_and_nothing_else(pair: tuple[Path, Path]):
    plain = run("generate", "-m", pair[0], "-p", "hello", "-n", 12, "--draft-tokens", 0)
    fast = run("generate", "-m", pair[0], "-d", pair[1], "-p", "hello", "-n", 12)
    assert plain.returncode == fast.returncode == 0
    assert plain.stdout == fast.stdout
    assert plain.stderr == fast.stderr == ""


def test_json_has_the_documented_fields(pair: tuple[Path, Path]):
    out = run("generate", "-m", pair[0], "-d", pair[1], "-p", "hello", "-n", 12, "--json")
    result = json.loads(out.stdout)
    assert {
        "text",
        "token_ids",
        "prompt_tokens",
        "finish_reason",
        "tau",
        "tokens_per_second",
    } < set(result)
    assert 0 < len(result["token_ids"]) <= 12
    for a_round in result["rounds"]:
        assert {
            "drafted",
            "verified",
            "accepted",
            "seconds",
            "chosen",
            "paused",
            "threads",
            "probing",
        } == set(a_round)
        assert {"draft", "verify", "host"} == set(a_round["seconds"])
        assert a_round["accepted"] <= a_round["verified"] <= a_round["drafted"]


def test_raw_prompts_skip_the_template_and_pipes_are_read(pair: tuple[Path, Path]):
    templated = run("generate", "-m", pair[0], "-n", 1, "--json", stdin="hello")
    raw = run("generate", "-m", pair[0], "-n", 1, "--json", "--raw", stdin="hello")
    more = json.loads(templated.stdout)["prompt_tokens"]
    assert more > json.loads(raw.stdout)["prompt_tokens"]


def test_seeds_repeat_and_differ(pair: tuple[Path, Path]):
    def sample(seed: int) -> str:
        args = ("-p", "hi", "-n", 24, "--temp", 1.5, "--seed", seed)
        return run("generate", "-m", pair[0], "-d", pair[1], *args).stdout

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_biased_tokens(pair: tuple[Path, Path]):
    def first(*bias: str) -> int:
        args = [a for b in bias for a in ("--logit-bias", b)]
        out = run("generate", "-m", pair[0], "-p", "hello", "-n", 1, "--json", *args)
        return int(json.loads(out.stdout)["token_ids"][0])

    usual = first()
    assert first(f"{usual}-100") != usual
    assert first("70+100") == 70
    assert first("70+100", "71+100", "70-100.0") == 71  # the last one counts


def test_show_trees_marks_what_was_accepted(pair: tuple[Path, Path]):
    args = ("-p", "hello", "-n", 16, "--tree-width", 3, "--draft-tokens", 9, "--show-trees")
    out = run("generate", "-m", pair[0], "-d", pair[1], *args)
    assert "\n* " in "\n" + out.stderr


def test_verbose_shows_llama_cpp_s_log_and_the_default_does_not(pair: tuple[Path, Path]):
    assert "llama_model_loader" in run("generate", "-m", pair[0], "-p", "x", "-n", 1, "-v").stderr


def test_chat_reads_piped_lines_and_remembers(pair: tuple[Path, Path]):
    out = run("chat", "-m", pair[0], "-d", pair[1], "-n", 6, stdin="hello\n/stats\nmore\n/stats\n")
    assert out.returncode == 0, out
    news = [line for line in out.stdout.splitlines() if " of them new" in line]
    assert len(news) == 2
    total, new = (int(w) for w in news[1].split() if w.isdigit())
    assert new < total


def test_chat_commands(pair: tuple[Path, Path]):
    out = run("chat", "-m", pair[0], stdin="/help\n/nonsense\n/reset\n/quit\nnever\n")
    assert "/stats" in out.stdout
    assert "/nonsense is no command" in out.stdout
    assert out.returncode == 0


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_interrupted_generation_ends_with_130_and_no_traceback(pair: tuple[Path, Path]):
    process = subprocess.Popen(
        [sys.executable, "-m", "localspec", "generate", "-m", str(pair[0]), "-p", "go",
         "--n-ctx", "100000", "--draft-tokens", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130)  # 0: the answer had ended already
    assert "Traceback" not in err


@pytest.mark.skipif(os.name == "nt", reason="signals")
@pytest.mark.parametrize("delay", [0.08, 0.15, 0.3, 0.6, 1.0])
def test_an_interrupt_at_any_time_gives_no_traceback(pair: tuple[Path, Path], delay: float):
    process = subprocess.Popen(
        [sys.executable, "-m", "localspec", "generate", "-m", str(pair[0]), "-d", str(pair[1]),
         "-p", "go", "-n", "200"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    # Only the interpreter's start may show one, up to the import of the package itself: on a busy
    # machine that is where the first signals land.
    starting = "Traceback" in err and "localspec/_entry.py" not in err
    assert starting or process.returncode in (0, 130, -signal.SIGINT), err
    assert starting or "Traceback" not in err


def test_usage_errors_exit_with_2(pair: tuple[Path, Path]):
    fails(run("generate", "--no-such-option"), 2, "No such option")
    fails(run("nonsense"), 2, "No such command")
    fails(run("generate", "-m", pair[0], "-p", "x", "-n", 0), 2, "-n")
    for bias in ("70", "70+", "+5", "70=5", "70+1e3"):
        fails(run("generate", "-p", "x", "--logit-bias", bias), 2, "no ID+X or ID-X")


def test_bad_input_is_one_line_and_exit_1(
    pair: tuple[Path, Path], tiny_drafter: Drafters, tmp_path: Path
):
    target, drafter = pair
    other = tmp_path / "other"
    wider = tiny.build_target(other / "wide", width=128, heads=4, layers=4)
    shallow = tiny.build_target(other / "shallow", layers=3)
    qwen2 = tiny.build_target(other / "qwen2", arch="qwen2")
    half = tmp_path / "half.gguf"
    half.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    text = tmp_path / "text.gguf"
    text.write_text("this is no model, but it is long enough")
    fails(run("generate", "-m", tmp_path / "no.gguf", "-p", "x"), 1, "does not exist")
    fails(run("generate", "-m", text, "-p", "x"), 1, "is not a GGUF file")
    fails(run("generate", "-m", half, "-p", "x"), 1, "damaged or incomplete")
    fails(run("generate", "-m", tmp_path, "-p", "x"), 1, "is a directory")
    fails(run("generate", "-m", drafter, "-p", "x"), 1, "not a target")
    fails(
        run("generate", "-m", target, "-d", target, "-p", "x"), 1, "not a DSpark, DFlash or Eagle3"
    )
    fails(run("generate", "-m", wider.gguf, "-d", drafter, "-p", "x"), 1, "its width is")
    fails(run("generate", "-m", shallow.gguf, "-d", drafter, "-p", "x"), 1, "target layers")
    fails(run("generate", "-m", qwen2.gguf, "-d", drafter, "-p", "x"), 1, "no layer features")
    assert run("generate", "-m", qwen2.gguf, "-p", "x", "-n", 3).returncode == 0
    gated = tiny_drafter("gated")[1]
    lonely = tmp_path / "lonely.gguf"
    lonely.write_bytes(gated.read_bytes())
    fails(run("generate", "-m", target, "-d", lonely, "-p", "x"), 1, "is missing")
    fails(run("generate", "-m", target, "-p", ""), 1, "the prompt is empty")
    fails(run("generate", "-m", target, "-p", "x" * 3000, "--n-ctx", 256), 1, "context holds 256")
    fails(run("generate", "-m", target, "-p", "x", "--temp", -1), 1, "temperature must be")
    fails(run("generate", "-m", target, "-p", "x", "--draft-tokens", 999), 1, "draft tokens")


def test_a_full_context_ends_with_length(pair: tuple[Path, Path]):
    out = run("generate", "-m", pair[0], "-d", pair[1], "-p", "hello", "--n-ctx", 64, "--json")
    result = json.loads(out.stdout)
    assert result["finish_reason"] in ("length", "stop")
    if result["finish_reason"] == "length":
        assert result["prompt_tokens"] + len(result["token_ids"]) == 64


def test_help_and_import_stay_light():
    code = (
        "import sys; import localspec, localspec.cli; "
        "heavy = {'torch', 'llama_cpp', 'numpy', 'gguf', 'jinja2', 'rich', 'huggingface_hub'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    runtime = (
        "import sys; import localspec.chat, localspec.engine, localspec.cli.chat; "
        "print('torch' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", runtime], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False"


def test_version_and_help():
    assert run("--version").stdout.startswith("localspec, version ")
    out = run("--help").stdout
    for command in ("chat", "convert", "generate", "inspect"):
        assert command in out
        assert run(command, "--help").returncode == 0
