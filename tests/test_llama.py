"""Inputs that llama.cpp would answer with an abort of the process, and the life of its objects."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from localspec.errors import LocalspecError
from localspec.llama import KV_TYPES, Context, ContextOptions, Model, ModelOptions, cut_long_runs


@pytest.fixture(scope="module")
def model(tiny_target) -> Iterator[Model]:
    model = Model(tiny_target.gguf)
    yield model
    model.close()


def make(model: Model, **options: Any) -> Context:
    return Context(model, ContextOptions(**({"n_ctx": 256, "n_threads": 1} | options)))


@pytest.fixture
def context(model) -> Iterator[Context]:
    context = make(model, n_batch=16, n_outputs=8, n_seq_max=4, layer_inputs=(1,))
    yield context
    context.close()


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, which may crash."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        cwd=Path(__file__).parent,  # `-c` puts the current folder first
        capture_output=True,
        text=True,
        timeout=120,
    )


def one_line(caught: pytest.ExceptionInfo[BaseException]) -> str:
    message = str(caught.value)
    assert message and "\n" not in message and "Traceback" not in message
    return message


# ---- batches


@pytest.mark.parametrize(
    ("tokens", "positions", "options", "message"),
    [
        ([], [], {}, "a batch must hold 1 to 16 tokens, not 0"),
        ([5] * 17, range(17), {}, "a batch must hold 1 to 16 tokens, not 17"),
        ([5] * 9, range(9), {}, "9 outputs asked of a context made for 8"),
        ([5, 320], [0, 1], {}, "token ids must be 0..319"),
        ([-1, 5], [0, 1], {}, "token ids must be 0..319"),
        ([5], [0], {"sequences": [[4]]}, r"sequence ids must be 0..3, not \[4\]"),
        ([5], [0], {"sequences": [[-1]]}, r"sequence ids must be 0..3, not \[-1\]"),
        ([5], [0], {"sequences": [[]]}, r"sequence ids must be 0..3, not \[\]"),
        ([5, 6], [0, 1], {"sequences": [[0], range(5)]}, "sequence ids must be 0..3"),
        ([5, 6], [1, 0], {}, "llama.cpp refused a batch of 2 tokens"),
        ([5, 6], [-2, -1], {}, "llama.cpp refused a batch of 2 tokens"),
        ([5], [7], {}, "llama.cpp refused a batch of 1 tokens"),
    ],
)
def test_bad_batches_are_errors_and_leave_the_context_usable(
    tokens, positions, options, message, context, model
):
    context.decode([9, 8, 7], [0, 1, 2])
    with pytest.raises(LocalspecError, match=message) as caught:
        context.decode(tokens, [p + 3 * ("refused" in message) for p in positions], **options)
    one_line(caught)
    context.decode([10], [3])
    found = context.logits()[0].copy()
    fresh = make(model)
    fresh.decode([9, 8, 7, 10], [0, 1, 2, 3])
    np.testing.assert_allclose(found, fresh.logits()[-1], atol=1e-2)
    fresh.close()


def test_a_full_context_is_an_error(model):
    context = make(model, n_batch=256)
    context.decode([5] * 256, range(256), outputs=False)
    with pytest.raises(LocalspecError, match="the context of 256 tokens is full") as caught:
        context.decode([5], [256])
    one_line(caught)
    context.seq_remove(0, 200)
    context.decode([5], [200])
    context.close()


def test_outputs_are_those_asked_for_in_batch_order(context, model):
    context.decode([5, 6, 7], [0, 1, 2], outputs=[True, False, True])
    picked = context.logits().copy()
    assert picked.shape == (2, 320)
    fresh = make(model)
    fresh.decode([5, 6, 7], [0, 1, 2])
    np.testing.assert_allclose(picked, fresh.logits()[[0, 2]], atol=1e-2)
    fresh.close()
    context.decode([5], [3], outputs=False)
    assert context.layer_input(1).shape == (1, 96)
    assert len(context.logits()) == 0


def test_more_tokens_than_the_context_holds_do_not_abort(tiny_target):
    # llama.cpp cuts n_batch to the size of the context and asserts on larger batches.
    done = python(
        "import sys\n"
        "from localspec.errors import LocalspecError\n"
        "from localspec.llama import *\n"
        "context = Context(Model(sys.argv[1]), ContextOptions(n_ctx=64, n_batch=512))\n"
        "try:\n"
        "    context.decode([5] * 400, range(400), outputs=False)\n"
        "except LocalspecError as e:\n"
        "    print('refused')\n",
        tiny_target.gguf,
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-300:]


# ---- contexts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_ctx": 7}, "n_ctx must be between 8 and"),
        ({"n_ctx": 1 << 25}, "n_ctx must be between 8 and"),
        ({"n_batch": 0}, "n_batch and n_outputs must be at least 1"),
        ({"n_outputs": 0}, "n_batch and n_outputs must be at least 1"),
        ({"n_threads": -1}, "n_threads at least 0"),
        ({"n_seq_max": 0}, "n_seq_max must be 1..256, not 0"),
        ({"n_seq_max": 257}, "n_seq_max must be 1..256, not 257"),
        ({"kv_type": "f8"}, "KV type 'f8' is unknown; one of f32, f16"),
        ({"layer_inputs": (4,)}, "layer 4 is outside 0..3"),
        ({"layer_inputs": (1, -1)}, "layer -1 is outside 0..3"),
    ],
)
def test_settings_out_of_range(options, message, model):
    with pytest.raises(LocalspecError, match=message) as caught:
        make(model, **options)
    one_line(caught)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "bf16"])
def test_cache_types(kv_type, model):
    context = make(model, kv_type=kv_type)
    context.decode([5, 6], [0, 1])
    assert np.isfinite(context.logits()).all() and kv_type in KV_TYPES
    context.close()


def test_reading_what_was_not_asked_for(context):
    context.decode([5], [0])
    with pytest.raises(LocalspecError, match="without hidden states"):
        context.hidden()
    with pytest.raises(LocalspecError, match="inputs of layer 2 were not captured"):
        context.layer_input(2)


def test_layer_inputs_of_an_architecture_without_them_do_not_abort(tmp_path):
    built = tiny.build_target(tmp_path, arch="qwen2", tied=True)
    done = python(
        "import sys\n"
        "from localspec.errors import LocalspecError\n"
        "from localspec.llama import *\n"
        "try:\n"
        "    options = ContextOptions(n_ctx=64, layer_inputs=(1,))\n"
        "    Context(Model(sys.argv[1]), options).decode([5], [0])\n"
        "except LocalspecError as e:\n"
        "    print('refused')\n",
        built.gguf,
    )
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-300:]


@pytest.mark.parametrize("columns", [1, 287, 289, 400])
def test_features_of_another_width_are_refused(columns, tiny_target, tiny_drafter):
    target = make(Model(tiny_target.gguf), layer_inputs=(1, 2, 3))
    drafter = Context(
        Model(tiny_drafter("vanilla")[1]), ContextOptions(256, causal=False), other=target
    )
    drafter.decode_features(np.zeros((2, 3 * 96), np.float32), [0, 1])
    with pytest.raises(LocalspecError, match=r"features must be \[2, 288\]"):
        drafter.decode_features(np.zeros((2, columns), np.float32), [2, 3])


def test_a_drafter_without_a_target_is_an_error(tiny_drafter):
    with pytest.raises(LocalspecError, match="cannot create a context") as caught:
        Context(Model(tiny_drafter("vanilla")[1]), ContextOptions(256, causal=False))
    one_line(caught)


def test_sequences_out_of_range(context):
    for call in (
        lambda: context.seq_copy(0, 4),
        lambda: context.seq_copy(-1, 0),
        lambda: context.seq_remove(4),
        lambda: context.seq_keep(-1),
        lambda: context.seq_end(4),
    ):
        with pytest.raises(LocalspecError, match=r"outside 0\.\.3"):
            call()


def test_sequences_share_and_forget_cells(context):
    context.decode([5, 6, 7], [0, 1, 2])
    context.seq_copy(0, 1, 0, 2)
    assert [context.seq_end(s) for s in range(3)] == [2, 1, -1]
    assert context.seq_remove(0, 1, 2) and context.seq_end(0) == 2
    context.seq_keep(1)
    assert [context.seq_end(s) for s in range(3)] == [-1, 1, -1]
    context.clear()
    assert context.seq_end(1) == -1


# ---- models


def test_loading_what_is_no_model(tmp_path):
    for name, data in (("missing.gguf", None), ("text.gguf", b"hello"), ("empty.gguf", b"")):
        if data is not None:
            (tmp_path / name).write_bytes(data)
        with pytest.raises(LocalspecError, match=f"llama.cpp cannot load .*{name}") as caught:
            Model(tmp_path / name)
        one_line(caught)


def test_progress_reports_and_stops(tiny_target):
    seen: list[float] = []
    Model(tiny_target.gguf, progress=seen.append).close()
    assert seen and seen == sorted(seen) and seen[-1] == 1.0
    with pytest.raises(LocalspecError, match="was cancelled"):
        Model(tiny_target.gguf, progress=lambda fraction: False)

    def interrupt(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model(tiny_target.gguf, progress=interrupt)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("mlock", [True, False])
def test_every_way_to_load(mmap, mlock, tiny_target):
    model = Model(tiny_target.gguf, ModelOptions(use_mmap=mmap, use_mlock=mlock))
    assert (model.n_layer, model.n_embd, model.n_vocab) == (4, 96, 320)
    assert not model.recurrent and model.n_ctx_train == 2048
    model.close()


def test_vocabulary(model):
    for text in ("héllo the 日本 🙂\n\x00x", "<|im_start|>user\n", " " * 300):
        tokens = model.tokenize(text)
        assert model.text(tokens, special=True) == text
    assert model.tokenize("<|im_end|>") == [tiny.EOS_ID]
    assert model.tokenize("<|im_end|>", parse_special=False) != [tiny.EOS_ID]
    assert model.piece(tiny.EOS_ID) == b"" and model.piece(tiny.EOS_ID, special=True)
    assert model.is_end(tiny.EOS_ID) and not model.is_end(70)
    assert model.tokenize("") == [] and model.tokenize("\udc80") == model.tokenize("?")
    for token in (-1, 320):
        with pytest.raises(LocalspecError, match="outside the vocabulary of 320"):
            model.piece(token)
    assert model.chat_template == tiny.CHAT_TEMPLATE
    assert model.meta("general.name") == "tiny-qwen3" and model.meta("no.such.key") is None
    assert "qwen3" in model.description


def test_endless_words_do_not_end_the_process(tiny_target, model, tmp_path):
    """Most pre-tokenizers are regular expressions of C++, which recurse once per character."""
    data = tiny_target.gguf.read_bytes()
    at = data.index(b"gpt-2", data.index(b"tokenizer.ggml.pre"))
    path = tmp_path / "bloom.gguf"
    path.write_bytes(data[:at] + b"bloom" + data[at + 5 :])
    code = """
    import sys
    from localspec.llama import Model
    model = Model(sys.argv[1])
    for unit in "a", " ", "!", "\\u00a0 ", "a\\u00a0", "\\n":
        text = f"b {unit * 200_000} c"
        assert model.text(model.tokenize(text)) == text
    text = "two words, and\\n" * 300
    assert model.tokenize(text) == model._tokenized(text, False, True)
    """
    done = python(textwrap.dedent(code), path)
    assert done.returncode == 0, done.stderr
    long = "x" * 20_000  # llama.cpp has code of its own for GPT-2's words
    assert model.tokenize(long) == model._tokenized(long, False, True)


@given(st.text("ab \u00a0\n!", max_size=60), st.integers(1, 12))
def test_texts_are_cut_where_runs_are_long(text: str, most: int):
    parts = cut_long_runs(text, most)
    assert "".join(parts) == text
    assert not any(re.search(rf"[^ \n]{{{most + 1}}}|\s{{{most + 1}}}", p) for p in parts)
    assert len(parts) <= 1 + len(text) // most


# ---- closing


def test_closed_handles_are_errors(tiny_target):
    model = Model(tiny_target.gguf)
    context = make(model)
    context.decode([5], [0])
    context.close()
    context.close()
    for call in (
        lambda: context.decode([5], [1]),
        context.logits,
        context.clear,
        lambda: context.seq_end(0),
        lambda: context.seq_remove(0),
    ):
        with pytest.raises(LocalspecError, match="this context is closed"):
            call()
    model.close()
    model.close()
    for call in (
        lambda: model.tokenize("x"),
        lambda: model.piece(70),
        lambda: model.is_end(2),
        lambda: model.description,
        lambda: make(model),
    ):
        with pytest.raises(LocalspecError, match=r"target\.gguf is closed"):
            call()


def test_a_model_that_is_closed_too_early_does_not_crash(tiny_target):
    done = python(
        "import sys\n"
        "from localspec.errors import LocalspecError\n"
        "from localspec.llama import *\n"
        "model = Model(sys.argv[1])\n"
        "context = Context(model, ContextOptions(n_ctx=64))\n"
        "model.close()\n"
        "try:\n"
        "    context.decode([5], [0])\n"
        "except LocalspecError as e:\n"
        "    pass\n"
        "context.close()\n"
        "print('fine')\n",
        tiny_target.gguf,
    )
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr[-300:]


WATCHED = """
import gc, sys
from localspec.engine import Engine
from localspec.llama import library
api, live = library().api, {}  # handle -> handles it was made from
def watch(make, free, made_from):
    real_make, real_free = getattr(api, make), getattr(api, free)
    def making(*args):
        handle = real_make(*args)
        live[handle] = made_from(*args)
        return handle
    def freeing(handle):
        del live[handle]
        if any(handle in needs for needs in live.values()):
            print("too early:", free)
        real_free(handle)
    setattr(api, make, making); setattr(api, free, freeing)
watch("llama_model_load_from_file", "llama_model_free", lambda path, params: ())
watch("llama_init_from_model", "llama_free", lambda model, params: (model, params.ctx_other))
engine = Engine.load(sys.argv[1], sys.argv[2], n_ctx=64, n_threads=1)
assert sorted(len([h for h in needs if h]) for needs in live.values()) == [0, 0, 1, 2]
running = engine.generate([70, 71, 72], max_tokens=9)
next(running), next(running)
"""


@pytest.mark.parametrize(
    ("end", "left"),
    [
        ("del running, engine", 0),
        ("running.close(); engine.me = engine; del running, engine; gc.collect()", 0),
        ("engine.close()", 0),
        ("", 4),  # whatever is left goes when the interpreter ends
    ],
)
def test_objects_are_freed_before_what_they_were_made_from(end, left, tiny_target, tiny_drafter):
    done = python(
        WATCHED + end + "\nprint(len(live))", tiny_target.gguf, tiny_drafter("vanilla")[1]
    )
    assert (done.returncode, done.stdout) == (0, f"{left}\n"), done.stderr[-300:]


# ---- the log


def test_the_log_goes_to_logging_only(tiny_target, tmp_path, capfd, caplog):
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with caplog.at_level(logging.DEBUG, logger="localspec.llama"):
        model = Model(tiny_target.gguf)
        context = make(model)
        context.decode([5, 6], [0, 1])
        with pytest.raises(LocalspecError):
            context.decode([5], [9])
        context.close()
        model.close()
        with pytest.raises(LocalspecError):
            Model(tmp_path / "bad.gguf")
    gc.collect()
    assert capfd.readouterr() == ("", "")
    assert any("qwen3" in r.message for r in caplog.records)
    assert any(r.levelno == logging.ERROR for r in caplog.records)
    assert not any(r.message.endswith("\n") for r in caplog.records)


def test_without_logging_nothing_is_printed(tiny_target):
    done = python(
        "import sys\n"
        "from localspec.llama import *\n"
        "context = Context(Model(sys.argv[1]), ContextOptions(n_ctx=64))\n"
        "context.decode([5], [0])\n",
        tiny_target.gguf,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
