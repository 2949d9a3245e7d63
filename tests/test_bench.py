"""`localspec bench`: figures, settings, llama.cpp's programs, reports."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import PLAIN as PLAIN_DRAFT
from conftest import command, fails, prompt_of, same_text

import tiny
from localspec.bench import html, peer, report, run, suite
from localspec.bench.prompts import PromptFile, prompt_files, read_prompts
from localspec.bench.settings import AUTO, PLAIN, PeerOptions, parse_settings
from localspec.bench.stats import (
    Sample,
    acceptance_by_depth,
    accepted_length,
    figures,
    geometric_mean,
    median,
    paired_ratios,
)
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError

Load = Callable[..., Engine]
Drafters = Callable[[str], tuple[tiny.TinyModel, Path]]

run_cli = functools.partial(command, "bench")

SPECULATIVE_LOG = """
0.00.980.168 I encoded   15 tokens in    0.098 seconds, speed:  153.571 t/s
0.00.980.170 I decoded   17 tokens in    0.500 seconds, speed:   34.000 t/s
0.00.980.170 I 
0.00.980.170 I n_draft   = 3
0.00.980.170 I n_predict = 17
0.00.980.170 I n_drafted = 33
0.00.980.171 I n_accept  = 6
0.00.980.171 I accept    = 18.182%
0.00.980.222 I common_perf_print: prompt eval time =     351.83 ms /    60 tokens (    5.86 ms)
0.00.980.223 I common_perf_print:        eval time =       0.00 ms /     1 runs   (    0.00 ms)
0.00.980.224 I common_perf_print:       total time =     706.04 ms /    61 tokens
"""
PLAIN_LOG = """
0.00.449.247 I common_perf_print:        load time =      95.25 ms
0.00.449.249 I common_perf_print: prompt eval time =      85.00 ms /    15 tokens (    5.69 ms)
0.00.449.250 I common_perf_print:        eval time =     164.31 ms /    16 runs   (   10.27 ms)
0.00.449.250 I common_perf_print:       total time =     285.00 ms /    31 tokens
"""


def write_prompts(path: Path, *conversations: list[str]) -> Path:
    path.write_text("".join(json.dumps({"turns": c}) + "\n" for c in conversations), "utf-8")
    return path


def sample(tokens: int, seconds: float, rounds: int = 1, **more: Any) -> Sample:
    return Sample(tokens=tokens, rounds=rounds, seconds=seconds, **more)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that log like llama.cpp's and keep what they were called with."""
    if os.name == "nt":
        pytest.skip("scripts are no programs here")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, log in ((peer.SPECULATIVE, SPECULATIVE_LOG), (peer.PLAIN, PLAIN_LOG)):
        program = folder / name
        program.write_text(
            f"#!{sys.executable}\n"
            "import json, pathlib, sys\n"
            "prompt = pathlib.Path(sys.argv[sys.argv.index('-f') + 1]).read_text('utf-8')\n"
            f"with open({str(folder / 'calls')!r}, 'a') as f:\n"
            "    f.write(json.dumps([sys.argv, prompt]) + '\\n')\n"
            f"print('an answer'); print({log!r}, file=sys.stderr)\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return folder


# Figures


def test_medians_and_means():
    assert median([3.0, 1.0, 10.0]) == 3.0
    assert median([]) == 0.0
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([]) == geometric_mean([1.0, 0.0]) == 0.0
    assert paired_ratios([10.0, 0.0, 3.0], [5.0, 1.0, 0.0]) == [2.0]


def test_figures_of_hand_made_samples():
    # Prompt 1: 10 and 30 tokens/s (median 20), plain 10. Prompt 2: 5, plain 10. Prompt 3: no round.
    samples = [
        [sample(10, 1.0, 5, draft=0.2, verify=0.7, host=0.1, verified=20),
         sample(30, 1.0, 10, draft=0.3, verify=0.6, host=0.1, verified=40)],
        [sample(5, 1.0, 5, draft=0.5, verify=0.4, host=0.1, verified=20)],
        [sample(0, 0.0, 0)],
    ]  # fmt: skip
    f = figures(samples, [10.0, 10.0, 0.0])
    assert f.speeds == [20.0, 5.0, 0.0]
    assert f.tokens_per_second == 12.5
    assert f.overall_speed == pytest.approx(45 / 3)
    assert f.ratio == pytest.approx((2.0 + 0.5) / 2)
    assert f.ratio_range == (0.5, 2.0)
    assert f.accepted_length == pytest.approx(45 / 20)
    assert f.verified_per_round == pytest.approx(80 / 20)
    assert f.milliseconds_per_round == pytest.approx({"draft": 50.0, "verify": 85.0, "host": 15.0})
    assert f.tokens == 45
    alone = figures(samples, None)
    assert alone.ratio is None
    assert alone.ratio_range is None


def test_acceptance_by_depth():
    counts = run.DepthCounts([], [])
    counts.add(3, 3)  # all of a chain of 3
    counts.add(3, 1)  # wrong at depth 2
    counts.add(2, 0)  # wrong at depth 1
    counts.add(0, 0)  # nothing drafted
    assert counts.reached == [3, 2, 1]
    assert counts.accepted == [2, 1, 1]
    a = sample(1, 1.0, reached=counts.reached, accepted=counts.accepted)
    b = sample(1, 1.0, reached=(1,), accepted=(1,))
    assert acceptance_by_depth([a, b]) == [0.75, 0.5, 1.0]
    assert acceptance_by_depth([]) == []
    assert accepted_length([]) == 0.0


def test_auto_against_the_best_of_every_group():
    def of(*speeds: float) -> Any:
        return figures([[sample(round(1000 * s), 1000.0)] for s in speeds], [10.0, 10.0])

    one = run.Run("x", 0.0, 2, 0, None, {
        "plain": of(10, 10), "auto": of(12, 12), "chain": of(6, 6), "fixed:2x1": of(12, 15),
        "llama.cpp:0": of(8, 8), "llama.cpp:1": of(4, 4), "llama.cpp:3@0.5": of(6, 6),
        "llama.cpp:ngram-mod": of(8, 10), "llama.cpp:ngram-cache": of(7, 7),
    })  # fmt: skip
    found = report.auto_against(one)
    assert found["plain"].ratio == pytest.approx(1.2)
    assert found["best fixed"] == report.Against("fixed:2x1", pytest.approx(0.9))
    assert found["llama.cpp's best draft"] == report.Against("llama.cpp:3@0.5", pytest.approx(2))
    assert found["llama.cpp's best n-gram"].name == "llama.cpp:ngram-mod"
    assert found["llama.cpp's best n-gram"].ratio == pytest.approx((1.5 + 1.2) / 2)
    assert found["llama.cpp plain"].ratio == pytest.approx(1.5)
    assert report.geometric_means([one, one])["auto"] == pytest.approx(1.2)


# Settings and prompts


def test_settings_have_names():
    found = parse_settings("plain, chain,tree,fixed:5,fixed:7x4,fixed:7x4,llama.cpp:3@.5", depths=7)
    assert [s.name for s in found] == [
        "plain", "chain", "tree", "fixed:5", "fixed:7x4", "llama.cpp:3@.5"
    ]  # fmt: skip
    assert found[1].draft == DraftOptions(tokens=7)
    assert found[4].draft == DraftOptions(tokens=7, width=4)
    assert found[5].peer == PeerOptions(3, 0.5)
    assert [s.peer.n_max for s in parse_settings("llama.cpp", depths=7) if s.peer] == [0, 1, 3, 7]
    (ngram,) = parse_settings("llama.cpp:ngram-mod", depths=7)
    assert ngram.peer == PeerOptions(0, ngram="ngram-mod")
    assert not ngram.peer.plain
    assert not ngram.needs_drafter
    assert parse_settings("", depths=7) == []
    assert not PLAIN.needs_drafter
    assert not AUTO.needs_drafter
    assert found[1].needs_drafter


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "fixed:0",
        "fixed:99",
        "fixed:7x99",
        "fixed:x",
        "llama.cpp:3@2",
        "plain:1",
        "llama.cpp:ngram-x",
    ],
)
def test_unknown_settings_are_refused(name: str):
    with pytest.raises(LocalspecError, match=r"out of range|nothing to compare"):
        parse_settings(name, depths=7)


def test_prompt_files(tmp_path: Path):
    path = write_prompts(tmp_path / "a.jsonl", ["one", "two"], ["three"], ["four"])
    path.write_text(path.read_text() + "\n\n")
    assert read_prompts(path) == PromptFile("a", [["one", "two"], ["three"], ["four"]])
    assert read_prompts(path, 1).conversations == [["one", "two"]]
    write_prompts(tmp_path / "0.jsonl", ["x"])
    assert [p.name for p in prompt_files(tmp_path)] == ["0.jsonl", "a.jsonl"]


@pytest.mark.parametrize(
    "text",
    ["", "\n", "no json", '{"turns": []}', '{"turns": "x"}', '{"turns": [1]}', "[]", "3",
     '{"prompt": "x"}'],
)  # fmt: skip
def test_bad_prompt_files_are_refused(tmp_path: Path, text: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(LocalspecError, match=r"turns"):
        read_prompts(path)


def test_unreadable_prompt_files_are_refused(tmp_path: Path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(LocalspecError, match="cannot read the prompt file"):
            read_prompts(path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"turns": ["\xff"]}')
    with pytest.raises(LocalspecError, match="no UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
    with pytest.raises(LocalspecError, match="is no folder"):
        prompt_files(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(LocalspecError, match=r"holds no \.jsonl files"):
        prompt_files(empty)


# llama.cpp's programs


def test_logs_of_llama_cpp_are_read():
    drafted = peer.parse_speculative(SPECULATIVE_LOG)
    assert drafted == Sample(tokens=17, rounds=11, seconds=0.5, verified=33)
    plain = peer.parse_plain(PLAIN_LOG)
    assert plain is not None
    assert (plain.tokens, plain.rounds) == (16, 16)
    assert plain.seconds == pytest.approx(0.2)
    one_token = PLAIN_LOG.replace("164.31 ms /    16 runs", "0.00 ms /     1 runs")
    assert peer.parse_plain(one_token) == Sample(tokens=0, rounds=0, seconds=0.0)
    assert peer.parse_speculative("something else") is None
    assert peer.parse_plain("something else") is None


def test_the_peer_is_called_with_the_same_prompt_and_settings(programs: Path):
    settings = parse_settings("llama.cpp:0,llama.cpp:3@0.25,llama.cpp:ngram-mod", depths=7)
    found = peer.find_programs(settings, programs)
    a_peer = peer.Peer(found, Path("t.gguf"), Path("d.gguf"), n_ctx=512, n_threads=1)
    for setting in settings:
        assert setting.peer is not None
        done = a_peer.run(setting.peer, "a prompt\n", max_tokens=9, temperature=0.0, seed=4)
        assert done.tokens in (16, 17)
    calls = [json.loads(line) for line in (programs / "calls").read_text().splitlines()]
    assert [prompt for _, prompt in calls] == ["a prompt\n\n"] * 3
    plain, drafted, ngram = (" ".join(args) for args, _ in calls)
    assert "-c 512 " in plain
    assert " -t 1" in plain
    assert "draft" not in plain
    assert "--spec-type" not in plain
    assert ngram.endswith("--spec-type ngram-mod")
    assert "-md" not in ngram
    assert "-md d.gguf --spec-type draft-dspark" in drafted
    assert "--spec-draft-n-max 3 --spec-draft-p-min 0.25" in drafted


def test_missing_and_failing_programs_give_one_line(programs: Path, tmp_path: Path):
    settings = parse_settings("llama.cpp:0", depths=7)
    assert peer.find_programs([PLAIN, AUTO], tmp_path) == {}
    with pytest.raises(LocalspecError, match="llama-completion not found in"):
        peer.find_programs(settings, tmp_path)
    found = peer.find_programs(settings, programs)
    for body, why in (("echo whatever", "printed no timings"), ("echo oops >&2; exit 3", "oops")):
        (programs / peer.PLAIN).write_text(f"#!/bin/sh\n{body}\n")
        with pytest.raises(LocalspecError, match=why):
            peer.Peer(found, Path("t.gguf"), None).run(
                PeerOptions(0), "x", max_tokens=4, temperature=0.0, seed=0
            )


# Runs


def test_a_run_measures_every_setting_on_the_same_prompts(load: Load):
    engine = load("vanilla")
    files = [PromptFile("a", [["one", "two"], ["three"]]), PromptFile("b", [["four"]])]
    settings = parse_settings("plain,chain,fixed:9x3", depths=7)
    prompts: list[tuple[int, ...]] = []
    complete = engine.complete

    def spy(prompt: list[int], *args: Any, **more: Any) -> Any:
        prompts.append(tuple(prompt))
        return complete(prompt, *args, **more)

    engine.complete = spy  # type: ignore[method-assign, assignment]
    seen: list[tuple[int, int, str]] = []
    found = run.run(
        engine, files, settings, max_tokens=24, repeats=2, progress=lambda *a: seen.append(a)
    )
    assert [(r.prompts, r.answers, r.skipped) for r in found.runs] == [("a", 3, 0), ("b", 1, 0)]
    assert seen[-1] == (4, 4, "b")
    # Four prompts, each under three settings twice, and a warm-up.
    assert len(set(prompts)) == 4
    assert len(prompts) == 4 * 3 * 2 + 3
    for r in found.runs:
        assert r.settings["plain"].accepted_length == 1.0
        assert r.settings["plain"].ratio == 1.0
        chain = r.settings["chain"]
        assert chain.accepted_length > 1.0
        assert chain.ratio is not None
        assert len(chain.speeds) == r.answers
        assert 0 < len(chain.acceptance_by_depth) <= 7
        assert r.settings["plain"].acceptance_by_depth == []
        assert r.settings["plain"].tokens == chain.tokens
    assert engine.on_verified is None


def test_accepted_length_and_depths_agree(load: Load):
    engine = load("vanilla")
    prompt = engine.tokenize("hello there")
    with run.count_depths(engine) as counts:
        result = engine.complete(prompt, max_tokens=41, draft=DraftOptions(tokens=7))
    one = run.sample_of(result, counts)
    assert one.tokens == len(result.token_ids) - 1
    assert accepted_length([one]) == pytest.approx(result.tau)
    assert one.seconds == pytest.approx(one.draft + one.verify + one.host)
    assert one.reached[0] == sum(r.verified > 0 for r in result.rounds)
    if result.finish_reason == "length":  # an end token cuts the last round short
        assert sum(one.accepted) == sum(r.accepted for r in result.rounds)


def test_conversations_go_on_with_the_plain_answer(load: Load):
    engine = load("vanilla")
    plain = engine.complete(
        engine.tokenize(f"{tiny.SPECIALS[1]}user\none{tiny.SPECIALS[2]}\n"
                        f"{tiny.SPECIALS[1]}assistant\n"),
        max_tokens=12, draft=PLAIN_DRAFT,
    ).text  # fmt: skip
    texts: list[str] = []
    tokenize = engine.tokenize

    def spy(text: str) -> list[int]:
        texts.append(text)
        return tokenize(text)

    engine.tokenize = spy  # type: ignore[method-assign]
    settings = parse_settings("plain,chain", depths=7)
    run.run(engine, [PromptFile("a", [["one", "two"]])], settings, max_tokens=12)
    assert len(texts) == 2
    assert f"assistant\n{plain}{tiny.SPECIALS[2]}\n{tiny.SPECIALS[1]}user\ntwo" in texts[1]


def test_what_does_not_fit_the_context_is_left_out_and_counted(load: Load):
    engine = load(None, n_ctx=128)
    files = [PromptFile("a", [["x" * 400, "more"], ["short"]])]
    found = run.run(engine, files, [PLAIN], max_tokens=4)
    assert (found.runs[0].answers, found.runs[0].skipped) == (1, 2)
    with pytest.raises(LocalspecError, match="no prompt of b fits"):
        run.run(engine, [PromptFile("b", [["x" * 400]])], [PLAIN], max_tokens=4)


def test_settings_that_cannot_run_are_refused(load: Load):
    files = [PromptFile("a", [["x"]])]
    with pytest.raises(LocalspecError, match="needs a drafter"):
        run.run(load(None), files, parse_settings("chain", depths=1))
    with pytest.raises(LocalspecError, match="--llama-bin"):
        run.run(load("vanilla"), files, parse_settings("llama.cpp:3", depths=7))
    with pytest.raises(LocalspecError, match="vanilla heads only"):
        run.run(
            load("gated"), files, parse_settings("llama.cpp:3", depths=7),
            peer=peer.Peer({}, Path("t"), Path("d")),
        )  # fmt: skip
    with pytest.raises(LocalspecError, match="nothing to compare"):
        run.run(load("vanilla"), files, [])


# Published figures


def test_published_figures_are_found_by_name():
    qwen = suite.published_for("Qwen3 4B", "dspark")
    assert qwen is not None
    assert qwen.model == "Qwen3-4B"
    assert qwen.accepted_length("gsm8k", "chain", 1.0) == 6.11
    assert qwen.accepted_length("mt_bench", "chain", 1.0) == 3.64
    assert qwen.accepted_length("gsm8k", "tree", 1.0) is None
    assert qwen.accepted_length("gsm8k", "chain", 0.0) == 6.31
    assert qwen.accepted_length("gsm8k", "tree", 0.0) == 7.24
    assert qwen.accepted_length("other", "chain", 1.0) is None
    assert len(qwen.sources([0.0, 1.0])) == 2
    gemma = suite.published_for("Gemma 4 12B It", "dflash")
    assert gemma is not None
    assert gemma.accepted_length("gsm8k", "chain", 1.0) == 5.45
    assert gemma.accepted_length("gsm8k", "tree", 0.0) is None
    assert len(gemma.sources([0.0, 1.0])) == 1
    # Other models that begin alike.
    for other in ("Qwen3 4B Instruct 2507", "Qwen3 40B", ""):
        assert suite.published_for(other, "dspark") is None


def test_the_pair_tells_which_figures_are_its_own(load: Load):
    meta = {"general.name": "Qwen3 8B", "general.architecture": "dflash"}
    engine, dflash = load("vanilla"), load("dflash")
    assert suite.published_of(load(None)) is None
    assert suite.published_of(engine) is None  # a tiny model of no name
    for one in (engine, dflash):
        one.model.meta = meta.get  # type: ignore[method-assign, assignment]
    found = [suite.published_of(one) for one in (engine, dflash)]
    assert [(f.model, f.family) for f in found if f] == [
        ("Qwen3-8B", "dspark"), ("Qwen3-8B", "dflash"),
    ]  # fmt: skip


def test_published_data_is_whole():
    data = suite.published_data()
    table = data["accepted_length"]
    for rows in table["tau"].values():
        assert set(rows) == {"eagle3", "dflash", "dspark"}
        assert all(len(row) == len(table["datasets"]) for row in rows.values())
    assert all(data[part]["source"] for part in data if part != "about")


def test_the_suite_has_the_papers_layout(load: Load):
    engine = load("vanilla")
    files = [PromptFile("gsm8k", [["one"]]), PromptFile("mbpp", [["two"]])]
    found = run.run(
        engine, files, parse_settings("chain,tree", depths=7), temperatures=(0.0, 1.0),
        max_tokens=12, template_variables=suite.TEMPLATE_VARIABLES,
    )  # fmt: skip
    head, rows = suite.suite_rows(found, suite.published_for("Qwen3 4B", "dspark"))
    assert head == ["temperature", "setting", "gsm8k", "mbpp", "mean"]
    assert [row[:2] for row in rows] == [
        ["0", "chain"], ["0", "chain, published"], ["0", "tree"], ["0", "tree, published"],
        ["1", "chain"], ["1", "chain, published"], ["1", "tree"],
    ]  # fmt: skip
    assert rows[1][2:] == ["6.31", "", ""]
    assert rows[5][2:] == ["6.11", "5.13", "5.62"]
    measured = found.runs[0].settings["chain"].accepted_length
    assert rows[0][2] == f"{measured:.2f}"


# The command


@pytest.fixture(scope="module")
def pair(tiny_target: tiny.TinyModel, tiny_drafter: Drafters) -> list[object]:
    drafter = tiny_drafter("vanilla")[1]
    return ["-m", tiny_target.gguf, "-d", drafter, "--threads", 1, "--n-ctx", 256]


def test_json_and_html_of_a_run_with_a_peer(pair: list[object], programs: Path, tmp_path: Path):
    pytest.importorskip("matplotlib")
    one = write_prompts(tmp_path / "one <b>.jsonl", ["hello"], ["there"])
    two = write_prompts(tmp_path / "two.jsonl", ["again", "more"])
    out = run_cli(
        *pair, "--prompts", one, two, "-n", 16, "--repeats", 2, "--against", "chain,llama.cpp",
        "--against", "fixed:4x2", "--llama-bin", programs, "--json", "--html", tmp_path / "r.html",
    )  # fmt: skip
    assert out.returncode == 0, out
    found = json.loads(out.stdout)
    assert set(found) == {
        "version", "target", "target_file", "drafter", "system", "max_tokens", "repeats", "runs",
    }  # fmt: skip
    assert (found["max_tokens"], found["repeats"]) == (16, 2)
    names = ["plain", "auto", "chain", *(f"llama.cpp:{n}" for n in (0, 1, 3, 7)), "fixed:4x2"]
    for one_run, answers in zip(found["runs"], (2, 2), strict=True):
        assert set(one_run) == {
            "prompts", "temperature", "answers", "skipped", "peak_memory", "settings",
        }  # fmt: skip
        assert one_run["answers"] == answers
        assert list(one_run["settings"]) == names
        for name, f in one_run["settings"].items():
            assert set(f) == {
                "tokens_per_second",
                "overall_speed", "ratio", "ratio_range", "accepted_length",
                "acceptance_by_depth", "verified_per_round", "milliseconds_per_round", "tokens",
                "speeds",
            }  # fmt: skip
            assert (f["milliseconds_per_round"] is None) == name.startswith("llama.cpp")
        assert one_run["settings"]["llama.cpp:3"]["tokens_per_second"] == pytest.approx(34.0)
        assert one_run["settings"]["llama.cpp:3"]["accepted_length"] == pytest.approx(17 / 11)
        assert one_run["settings"]["llama.cpp:0"]["tokens_per_second"] == pytest.approx(80.0)
    page = (tmp_path / "r.html").read_text("utf-8")
    assert "http" not in page
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\((?!#)", page)
    assert page.count("<svg") == page.count("</svg>") >= 5
    assert "one &lt;b&gt;" in page
    assert "one <b>" not in page


def test_tables_in_the_terminal(pair: list[object], programs: Path, tmp_path: Path):
    file = write_prompts(tmp_path / "one.jsonl", ["hello"])
    out = run_cli(*pair, "--prompts", file, "-n", 12, "--against", "chain,llama.cpp:3",
                  "--llama-bin", programs)  # fmt: skip
    assert out.returncode == 0, out
    for text in ("one, temperature 0, 1 answers", "x plain", "accepted length", "auto against",
                 "llama.cpp's best draft"):  # fmt: skip
        assert text in out.stdout
    assert out.stderr == ""


def test_the_suite_command(pair: list[object], tmp_path: Path):
    write_prompts(tmp_path / "b.jsonl", ["hello"])
    write_prompts(tmp_path / "a.jsonl", ["hello", "you"])
    out = run_cli(*pair, "--suite", tmp_path, "-n", 12)
    assert out.returncode == 0, out
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in out.stdout.splitlines()]
    assert [r[:2] for r in rows if r] == [
        ["0", "chain"],
        ["0", "tree"],
        ["1", "chain"],
        ["1", "tree"],
    ]
    assert "no published figures are known for this pair" in out.stdout


def test_errors_are_one_line(pair: list[object], tmp_path: Path):
    file = write_prompts(tmp_path / "one.jsonl", ["hello"])
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no json\n")
    fails(run_cli(*pair), 2, "--prompts")
    fails(run_cli(*pair, "--prompts", file, "--suite", tmp_path), 2, "--suite")
    fails(run_cli(*pair, "--prompts", bad), 1, "line 1")
    fails(run_cli(*pair, "--prompts", file, "--against", "nothing"), 1, "nothing to compare")
    fails(run_cli(*pair, "--prompts", file, "--against", "llama.cpp", "--llama-bin", tmp_path),
          1, "not found in")  # fmt: skip
    nowhere = tmp_path / "no" / "report.html"
    fails(run_cli(*pair, "--prompts", file, "--html", nowhere), 1, "cannot write the report")


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(LocalspecError, match=r"pip install 'localspec\[bench\]'"):
        html.check_html(tmp_path / "r.html")


def test_checking_the_place_of_a_report_leaves_no_file(tmp_path: Path):
    pytest.importorskip("matplotlib")
    html.check_html(tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LocalspecError, match="cannot write the report"):
        html.check_html(tmp_path)


def test_the_command_imports_matplotlib_only_for_reports():
    code = (
        "import sys; import localspec.cli.bench, localspec.bench.run, localspec.bench.html; "
        "print(sorted({'torch', 'matplotlib'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# A drafter of random weights


@pytest.mark.parametrize("name", ["vanilla", "gated"])
def test_a_useless_drafter_loads_and_changes_no_text(
    name: str, tiny_target: tiny.TinyModel, tiny_drafter: Drafters, tmp_path: Path
):
    place = Path(__file__).parents[1] / "benchmarks" / "useless_drafter.py"
    spec = importlib.util.spec_from_file_location("useless_drafter", place)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    source, out = tiny_drafter(name)[1], tmp_path / "useless.gguf"
    script.randomise(source, out)
    assert out.stat().st_size == source.stat().st_size
    prompt = prompt_of(1)
    lengths = {}
    for path in (source, out):
        with Engine.load(tiny_target.gguf, path, n_ctx=256, n_threads=1) as engine:
            plain = engine.complete(prompt, max_tokens=40, draft=PLAIN_DRAFT)
            drafted = engine.complete(prompt, max_tokens=40, draft=DraftOptions(tokens=7))
            same_text(engine, prompt, plain.token_ids, drafted.token_ids)
            lengths[path] = drafted.tau
    assert lengths[out] < lengths[source]
