"""What loading takes, told before loading: against llama.cpp's own numbers and the process's."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_archs
import tiny_eagle
from conftest import CHAIN, PLAIN, prompt_of

from localspec import estimate, llama, memory, pairs
from localspec.convert import convert
from localspec.drafter import INJECT_ROWS, context_cells
from localspec.engine import Engine
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.memory import Free

LOTS = Free(host=1 << 40)
MB = 1_000_000


def reported(caplog: pytest.LogCaptureFixture, what: str) -> float:
    """MiB that llama.cpp says it gave to its buffers of one kind."""
    found = re.findall(rf"{what} buffer size *= *([\d.]+) MiB", caplog.text)
    assert found
    return sum(map(float, found))


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("n_ctx", [300, 2048])
def test_the_cache_is_what_llama_cpp_allocates(tiny_target, caplog, kv_type, n_ctx):
    found = estimate(tiny_target.gguf, n_ctx=n_ctx, kv_type=kv_type, free=LOTS)
    with caplog.at_level(logging.DEBUG, "localspec.llama"):
        Engine.load(tiny_target.gguf, n_ctx=n_ctx, kv_type=kv_type, n_threads=1).close()
    assert found.kv / 2**20 == pytest.approx(reported(caplog, "KV"), abs=0.01)
    with GgufFile(tiny_target.gguf) as header:
        assert found.weights == sum(t.nbytes for t in header.tensors.values())
    assert found.total == found.weights + found.kv + found.drafter + found.buffers
    assert found.on_device == 0 and found.on_host == found.total


@pytest.mark.parametrize("arch", ["gemma3", "gemma4", "lfm2", "mamba", "qwen35"])
def test_windows_and_recurrent_states_are_what_llama_cpp_allocates(arch, tmp_path, caplog):
    path = tmp_path / f"{arch}.gguf"
    getattr(tiny_archs, f"build_{arch}")(path)
    found = estimate(path, n_ctx=1024, kv_type="f32", free=LOTS)
    with caplog.at_level(logging.DEBUG, "localspec.llama"):
        Engine.load(path, n_ctx=1024, kv_type="f32", n_threads=1).close()
    allocated = reported(caplog, "(?:KV|RS)")
    assert found.kv / 2**20 == pytest.approx(allocated, rel=0.01, abs=0.02)


def test_a_drafter_is_counted(tiny_target, tiny_drafter, caplog):
    drafter = tiny_drafter("vanilla")[1]
    alone = estimate(tiny_target.gguf, n_ctx=1024, free=LOTS)
    pair = estimate(tiny_target.gguf, drafter, n_ctx=1024, free=LOTS)
    narrow = estimate(tiny_target.gguf, drafter, n_ctx=1024, drafter_window=64, free=LOTS)
    assert alone.drafter == 0 and pair.weights == alone.weights and pair.kv == alone.kv
    assert narrow.drafter < pair.drafter and pair.buffers > alone.buffers
    with GgufFile(drafter) as header:
        assert pair.drafter > sum(t.nbytes for t in header.tensors.values())


def allocated(caplog: pytest.LogCaptureFixture, *pair: Path | str | None, n_ctx: int) -> float:
    """Bytes of caches and working buffers that llama.cpp allocates for a pair."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "localspec.llama"):
        Engine.load(*pair, n_ctx=n_ctx, n_threads=1).close()
    return 2**20 * reported(caplog, "(?:KV|compute)")


@pytest.mark.parametrize("kind", ["mtp", "specforge", "deepspec"])
def test_drafters_that_go_token_by_token_are_counted(kind, tiny_target, tmp_path, caplog):
    target, drafter, weights = tiny_target.gguf, tmp_path / "drafter.gguf", 0
    if kind == "mtp":
        target, drafter = tiny_archs.build_qwen35(tmp_path / "t.gguf"), "mtp"
    else:
        layers = (0, 1, 2, 0, 1) if kind == "deepspec" else (0, 1, 2)
        checkpoint = tiny_eagle.build(tmp_path / kind, tiny_target, packaging=kind, layers=layers)
        convert(checkpoint, target, drafter, outtype="f32", verify=False)
        weights = sum(f.stat().st_size for f in tmp_path.glob("drafter*.gguf"))
    for n_ctx in (512, 4096):
        least = allocated(caplog, target, drafter, n_ctx=n_ctx)
        least -= allocated(caplog, target, None, n_ctx=n_ctx)
        found = estimate(target, drafter, n_ctx=n_ctx, free=LOTS).drafter - weights
        assert 0.95 * least < found < 1.15 * least + MB
        assert estimate(target, drafter, n_ctx=n_ctx, drafter_window=16, free=LOTS).drafter <= found


def test_a_drafter_keeps_no_more_than_it_was_trained_to_see(tiny_target, tiny_drafter):
    with GgufFile(tiny_target.gguf) as target, GgufFile(tiny_drafter("vanilla")[1]) as drafter:
        info = pairs.check_pair(target, drafter)
        narrow = dataclasses.replace(info, window=128)
        found = [
            memory.Needs(target, drafter, i, 512, True, "f16", 4096).at(8192, 0, LOTS).drafter
            for i in (info, narrow)
        ]
    assert context_cells(info, 8192, 4096) - context_cells(narrow, 8192, 4096) == 4096 - 128
    assert context_cells(narrow, 8192, 64) == 64 + INJECT_ROWS + info.block_size
    assert found[1] < found[0]


def test_the_process_grows_by_what_was_said(tmp_path):
    """The default pair, in a process of its own: within 15%."""
    try:
        target, drafter = pairs.default_pair()
    except LocalspecError:
        pytest.skip("the default pair is not installed")
    script = (
        "import sys, psutil, numpy\n"
        "from localspec import DraftOptions, Engine\n"
        "from localspec.llama import library\n"
        "library(); rss = lambda: psutil.Process().memory_info().rss; before = rss()\n"
        "engine = Engine.load(sys.argv[1], sys.argv[2], n_ctx=2048, n_threads=1)\n"
        "draft = DraftOptions(tokens=15, width=4)\n"
        "engine.complete(list(range(100, 700)), max_tokens=4, draft=draft)\n"
        "print(rss() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(target), str(drafter)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = estimate(target, drafter, n_ctx=2048)
    assert found.total == pytest.approx(int(done.stdout), rel=0.15)


# ---- choosing what fits


@pytest.fixture
def needs(tiny_target, tiny_drafter):
    target, drafter = GgufFile(tiny_target.gguf), GgufFile(tiny_drafter("vanilla")[1])
    with target, drafter:
        info = pairs.check_pair(target, drafter)
        yield memory.Needs(target, drafter, info, 512, True, "f16", 4096)


def test_layers_on_the_gpu_move_memory_there(needs):
    free = Free(1 << 40, 1 << 40)
    found = [needs.at(4096, n, free) for n in range(needs.n_layer + 2)]
    assert len({f.total for f in found}) == 1
    assert found[0].on_device == 0
    assert all(a.on_device < b.on_device for a, b in itertools.pairwise(found))
    everything = needs.at(4096, -1, free)
    assert everything.on_device == found[-1].on_device
    assert needs.at(4096, 99, free).on_device == everything.on_device
    assert 0 < everything.on_host < everything.total
    assert needs.at(4096, -1, Free(1 << 40)).on_device == 0  # no GPU


def test_layers_leave_the_gpu_before_the_context_shrinks(needs):
    roomy = Free(1 << 40, 1 << 40)
    two = needs.at(4096, 2, roomy).on_device
    found = memory._choose(needs, 4096, 9999, -1, Free(1 << 40, two), True)
    assert (found.n_gpu_layers, found.n_ctx, found.fits) == (2, 4096, True)
    assert found.offloaded_less and not found.shortened
    assert "2 layers are on the GPU" in memory.changes(found)[0]
    none = memory._choose(needs, 4096, 9999, -1, Free(1 << 40, 1), True)
    assert (none.n_gpu_layers, none.fits) == (0, True)


def test_the_context_shrinks_to_what_fits_and_no_further(needs):
    whole, half = needs.at(8192, -1, LOTS).total, needs.at(4096, -1, LOTS).total
    found = memory._choose(needs, 8192, 9999, -1, Free((whole + half) // 2), True)
    assert found.fits and 4096 < found.n_ctx < 8192 and found.shortened
    assert not needs.at(found.n_ctx + 256, -1, Free((whole + half) // 2)).fits
    least = memory._choose(needs, 8192, 9999, -1, Free(1000), True)
    assert (least.n_ctx, least.fits) == (memory.MIN_CTX, False)
    asked = memory._choose(needs, 8192, 9999, -1, Free(1000), False)
    assert asked.n_ctx == 8192 and not asked.shortened


def test_a_context_nobody_asked_for_goes_before_the_layers(needs):
    everything = needs.at(8192, -1, Free(1 << 40, 1 << 40)).on_device
    found = memory._choose(needs, 0, 1 << 17, -1, Free(1 << 40, everything), True)
    assert found.fits and found.n_gpu_layers == -1 and 4096 <= found.n_ctx <= 8192 + 256


def test_unified_memory_is_counted_once(needs):
    total = needs.at(4096, -1, LOTS).total
    assert needs.at(4096, -1, Free(total, total, unified=True)).fits
    assert not needs.at(4096, -1, Free(total - 1, total, unified=True)).fits


# ---- loading


def test_loading_refuses_what_does_not_fit_with_numbers(tiny_target, tiny_drafter, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: Free(30 * MB))
    drafter = tiny_drafter("vanilla")[1]
    expected = (
        r"^target.gguf with a context of 65536 tokens needs \d+ MB of memory, and 30 MB are free: "
        r"\d+ MB \(weights \d+ MB, KV cache \d+ MB, drafter \d+ MB, buffers \d+ MB\); lower n_ctx"
        r".*fit=True.*check_memory=False[^\n]*$"
    )
    with pytest.raises(LocalspecError, match=expected):
        Engine.load(tiny_target.gguf, drafter, n_ctx=65536, n_threads=1)
    with Engine.load(tiny_target.gguf, drafter, n_ctx=65536, n_threads=1, fit=True) as engine:
        assert 512 <= engine.n_ctx < 65536
        assert engine.notes == (
            f"the context is {engine.n_ctx} tokens; more do not fit into 30 MB of free memory",
        )
        assert len(engine.complete(prompt_of(0), max_tokens=5, draft=CHAIN).token_ids) == 5
    with Engine.load(tiny_target.gguf, n_ctx=20000, n_threads=1, check_memory=False) as engine:
        assert engine.n_ctx == 20000 and engine.notes == ()


def test_loading_refuses_when_nothing_helps(tiny_target, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: Free(1 * MB))
    with pytest.raises(LocalspecError, match="context of 512 tokens needs"):
        Engine.load(tiny_target.gguf, n_ctx=4096, n_threads=1, fit=True)


def test_a_full_gpu_is_named(tiny_target, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: Free(1 << 40, 1 * MB))
    with pytest.raises(LocalspecError, match=r"on the GPU, where 1 MB are free.*n_gpu_layers"):
        Engine.load(tiny_target.gguf, n_ctx=4096, n_threads=1)
    with Engine.load(tiny_target.gguf, n_ctx=4096, n_threads=1, fit=True) as engine:
        assert "0 layers are on the GPU" in engine.notes[0]
        assert len(engine.complete(prompt_of(0), max_tokens=3, draft=PLAIN).token_ids) == 3


def test_a_fitting_pair_is_left_alone(load):
    assert load("vanilla", fit=True).notes == ()


def test_bad_settings_are_told_as_such(tiny_target):
    for options, message in (
        ({"n_ctx": 3}, "n_ctx must be"), ({"n_ctx": 1 << 30}, "n_ctx must be"),
        ({"kv_type": "f8"}, "KV type 'f8'"), ({"n_batch": 0, "n_ctx": -1}, "must be"),
    ):  # fmt: skip
        with pytest.raises(LocalspecError, match=message):
            Engine.load(tiny_target.gguf, n_threads=1, **options)
    with pytest.raises(LocalspecError, match="KV type 'f8'"):
        estimate(tiny_target.gguf, kv_type="f8")
    with pytest.raises(LocalspecError, match="no_such"):
        estimate(Path("no_such.gguf"))


# ---- this machine


def test_devices_and_free_memory_are_found():
    import psutil

    devices = llama.devices()
    assert any(d.kind == "cpu" for d in devices)
    assert all(0 <= d.free <= d.total for d in devices)
    free = memory.free_memory()
    assert 0 < free.host <= psutil.virtual_memory().total
    assert dataclasses.replace(free, host=1).host == 1
