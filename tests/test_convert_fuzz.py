"""Damaged and hostile inputs: 2,000 mutated configs, safetensors headers and GGUF headers.

Each either works or ends in one line. A signal after 5 s of processor time stands for a hang, a
limit of 1 GB more address space for an allocation that no small file may cause.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from localspec import pairs
from localspec.convert import convert
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.heads import Heads

CONFIGS, SAFETENSORS, GGUFS = 1000, 500, 500
EXTREMES = (0, 1, -1, 2, 3, 7, 2**16, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 10**30)
WORDS = (
    "", "silu", "gelu", "vanilla", "gated", "rnn", "none", "full_attention", "sliding_attention",
    "yarn", "default", "dspark", "dflash", "eagle3", "LlamaForCausalLMEagle3", "Gemma4DSparkModel",
    "DFlashDraftModel", "DFlash2DraftModel", "DeepseekV4DSparkModel", "LingDSparkModel", "a\nb",
    "\x00", "../x",
)  # fmt: skip
FIELDS = (
    "sample_from_anchor", "rope_is_neox_style", "draft_vocab_size", "target_hidden_size",
    "transformer_layer_config", "dflash_config", "aux_hidden_state_layer_ids", "layer_types",
    "speculators_model_type", "sliding_window", "use_sliding_window", "dspark_block_size",
    "partial_rotary_factor", "model_type", "is_causal",
)  # fmt: skip

quick = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def values() -> st.SearchStrategy[Any]:
    scalars = st.one_of(
        st.none(),
        st.booleans(),
        st.sampled_from(EXTREMES),
        st.integers(-4, 400),
        st.sampled_from((0.0, -0.5, 0.5, 1e-300, 1e308, math.inf, -math.inf, math.nan)),
        st.sampled_from(WORDS),
    )
    return st.recursive(
        scalars,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.sampled_from((*FIELDS, "block_size", "x")), inner, max_size=3),
        ),
        max_leaves=6,
    )


def places(config: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, as keys to follow."""
    items = config.items() if isinstance(config, dict) else ()
    items = enumerate(config) if isinstance(config, list) else items
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def changed(config: dict[str, Any], draw: Callable[[Any], Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    for _ in range(draw(st.integers(1, 3))):
        known = list(places(config))
        path = draw(st.sampled_from([*known, *((field,) for field in FIELDS)]))
        holder: Any = config
        for key in path[:-1]:
            holder = holder[key]
        if draw(st.booleans()) and draw(st.booleans()) and path in known:
            del holder[path[-1]]
        else:
            holder[path[-1]] = draw(values())
    return config


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Fail on a hang, on a large allocation, and on anything but a one-line refusal."""
    if sys.platform != "linux":  # elsewhere the address space cannot be limited like this
        limits: tuple[int, int] | None = None
    else:
        limits = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 30), limits[1])
        )

    def hang(*_: object) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGVTALRM, hang)
    signal.setitimer(signal.ITIMER_VIRTUAL, 5)
    try:
        yield
    except LocalspecError as e:
        assert "\n" not in str(e) and str(e)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_AS, limits)


class Small:
    """The smallest target and drafter, and directories to damage."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.target = tiny.build_target(
            folder / "target", width=32, heads=2, kv_heads=1, head_dim=16, ffn=32, layers=3
        )
        built = tiny.build_drafter(folder / "drafter", self.target, layers=1, rank=8)
        self.config, self.weights = built.config, (built.path / "model.safetensors").read_bytes()
        self.out = folder / "out" / "d.gguf"
        self.out.parent.mkdir()
        convert(built.path, self.target.gguf, self.out, outtype="f32")
        self.drafter = self.out.read_bytes()
        self.broken = folder / "broken"
        self.broken.mkdir()
        c = self.config
        nested = ("mask_token_id", "target_layer_ids")
        transformer = {k: v for k, v in c.items() if k not in (*nested, "block_size")}
        self.configs = [
            c,
            {k: v for k, v in c.items() if k not in nested}
            | {"dflash_config": {k: c[k] for k in nested}},
            {
                "architectures": ["DSparkSpeculator"],
                "speculators_model_type": "dspark",
                "transformer_layer_config": transformer | {"model_type": "qwen3"},
                "aux_hidden_state_layer_ids": [i + 1 for i in c["target_layer_ids"]],
                "mask_token_id": c["mask_token_id"],
                "block_size": c["block_size"],
                "draft_vocab_size": c["vocab_size"],
                "markov_rank": c["markov_rank"],
                "markov_head_type": "vanilla",
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
        ]

    def write(self, config: Any, weights: bytes) -> Path:
        (self.broken / "config.json").write_text(json.dumps(config))
        (self.broken / "model.safetensors").write_bytes(weights)
        return self.broken

    def left_nothing(self) -> bool:
        return not [p for p in self.out.parent.iterdir() if not p.name.startswith("d.")]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[Small]:
    made = Small(tmp_path_factory.mktemp("fuzz"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda fd: None)  # 2,000 waits for a disk prove nothing
        yield made
    shutil.rmtree(made.folder)


def test_the_undamaged_ones_convert(small):
    for config in small.configs:
        convert(small.write(config, small.weights), small.target.gguf, small.out, outtype="f32")
    with bounded(), pytest.raises(MemoryError):
        np.ones(2 << 30, np.uint8)


@pytest.mark.slow
@settings(quick, max_examples=CONFIGS)
@given(data=st.data())
def test_configs(small, data):
    config = changed(data.draw(st.sampled_from(small.configs)), data.draw)
    source = small.write(config, small.weights)
    with bounded():
        convert(source, small.target.gguf, small.out, outtype="f32")
    assert small.left_nothing()


@pytest.mark.slow
@settings(quick, max_examples=SAFETENSORS)
@given(data=st.data())
def test_safetensors_headers(small, data):
    (length,) = struct.unpack("<Q", small.weights[:8])
    header = json.loads(small.weights[8 : 8 + length])
    if data.draw(st.booleans()):
        text = json.dumps(changed(header, data.draw)).encode()
        size = data.draw(st.sampled_from([len(text)] * 6 + [0, 2, len(text) * 2, 2**40, 2**63]))
        damaged = struct.pack("<Q", size) + text + small.weights[8 + length :]
    else:
        damaged = flipped(small.weights, 8 + length, data.draw)
    source = small.write(small.config, damaged)
    with bounded():
        convert(source, small.target.gguf, small.out, outtype="f32")
    assert small.left_nothing()


def flipped(stored: bytes, header: int, draw: Callable[[Any], Any]) -> bytes:
    """Some bytes of a header overwritten, and now and then the end cut off."""
    damaged = bytearray(stored)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, header - 1))
        size = draw(st.sampled_from((1, 4, 8)))
        number = draw(st.sampled_from((*EXTREMES[:-1], 0xFF, 0x80, 0x20)))
        piece = (number % 2 ** (8 * size)).to_bytes(size, "little")
        damaged[at : at + size] = piece
    if draw(st.integers(0, 4)) == 0:
        del damaged[draw(st.integers(0, len(damaged))) :]
    return bytes(damaged)


def gguf_header_size(path: Path) -> int:
    with GgufFile(path) as file:
        return min(tensor.offset for tensor in file.tensors.values())


@pytest.mark.slow
@settings(quick, max_examples=GGUFS)
@given(data=st.data())
def test_gguf_headers(small, data):
    """As a drafter: read, checked, described. As a target: a conversion checks against it."""
    as_target = data.draw(st.booleans())
    whole = small.target.gguf.read_bytes() if as_target else small.drafter
    path = small.folder / "damaged.gguf"
    path.write_bytes(whole)
    # Most of a header are tokens; the numbers around them are what matters.
    size = gguf_header_size(path)
    edge = data.draw(st.sampled_from((64, 1500, size)))
    damaged = (
        flipped(whole, min(edge, size), data.draw)
        if data.draw(st.booleans())
        else whole[: size - 2500] + flipped(whole[size - 2500 :], 2500, data.draw)
    )
    path.write_bytes(damaged)
    with bounded():
        if as_target:
            source = small.write(small.config, small.weights)
            convert(source, path, small.out, outtype="f32")
        else:
            from localspec.cli.inspect import describe

            with GgufFile(path) as drafter, GgufFile(small.target.gguf) as target:
                describe(drafter)
                info = pairs.check_pair(target, drafter)
                Heads.from_gguf(drafter, info)
    assert small.left_nothing()
