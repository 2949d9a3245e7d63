"""DSpark drafters with the Gemma 4 backbone: reference, conversion, llama.cpp, whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_archs
from conftest import prompt_of, same_text
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from test_models_config import JSON

from localspec.convert import convert
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.pairs import heads_path, read_drafter

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from localspec.convert.source import Checkpoint  # noqa: E402
from localspec.convert.verify import verify  # noqa: E402
from localspec.models import DrafterConfig, load_drafter  # noqa: E402

D, FFN, V = tiny_archs.D, tiny_archs.FFN, tiny_archs.V
HEADS, KV, HEAD, LAYERS, RANK, TAPS = 4, 1, 32, 2, 16, (0, 1, 2)
# As the release saves it: the target's text config with the drafter's fields put in.
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "dtype": "float32",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "block_size": 7,
    "bos_token_id": 2,
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": HEAD,
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": D,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": FFN,
    "layer_types": ["full_attention"] * LAYERS,
    "markov_head_type": "vanilla",
    "markov_rank": RANK,
    "mask_token_id": 4,
    "max_position_embeddings": 2048,
    "num_anchors": 512,
    "num_attention_heads": HEADS,
    "num_global_key_value_heads": KV,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional",
        },
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "target_layer_ids": list(TAPS),
    "target_model_type": "gemma4_unified",
    "tie_word_embeddings": False,
    "use_double_wide_mlp": False,
    "vocab_size": V,
}  # fmt: skip


def tensors(target: Path, *, k_eq_v: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under the release's names, with full copies of the target's embeddings."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return gain / np.sqrt(columns) * rng.standard_normal((rows, columns))

    def norm(size: int) -> np.ndarray:
        return rng.uniform(0.6, 1.4, size)

    with GgufFile(target) as file:
        embedding = file.tensor("token_embd.weight")
    out = {
        "embed_tokens.weight": embedding,
        "lm_head.weight": embedding,
        "fc.weight": matrix(D, len(TAPS) * D),
        "hidden_norm.weight": norm(D),
        "norm.weight": 2 * norm(D),
        "markov_head.markov_w1.weight": matrix(V, RANK, 4.0),
        "markov_head.markov_w2.weight": matrix(V, RANK, 12.0),
        "confidence_head.proj.weight": matrix(1, D + RANK),
        "confidence_head.proj.bias": rng.standard_normal(1),
    }
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj.weight": matrix(HEADS * HEAD, D),
            "self_attn.k_proj.weight": matrix(KV * HEAD, D),
            "self_attn.o_proj.weight": matrix(D, HEADS * HEAD),
            "self_attn.q_norm.weight": 0.5 * norm(HEAD),
            "self_attn.k_norm.weight": 0.5 * norm(HEAD),
            "mlp.gate_proj.weight": matrix(FFN, D, 2.0),
            "mlp.up_proj.weight": matrix(FFN, D),
            "mlp.down_proj.weight": matrix(D, FFN),
            "input_layernorm.weight": norm(D),
            "post_attention_layernorm.weight": 4 * norm(D),
            "pre_feedforward_layernorm.weight": norm(D),
            "post_feedforward_layernorm.weight": 4 * norm(D),
            "layer_scalar": rng.uniform(0.4, 1.6, 1),
        }
        if not k_eq_v:
            layer["self_attn.v_proj.weight"] = matrix(2 * HEAD, D)
            layer["self_attn.k_proj.weight"] = matrix(2 * HEAD, D)
        out |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return {name: np.ascontiguousarray(value, np.float32) for name, value in out.items()}


def write(path: Path, target: Path, **changes: Any) -> Path:
    path.mkdir()
    config = {**CONFIG, **changes}
    (path / "config.json").write_text(json.dumps(config))
    made = tensors(target, k_eq_v=config["attention_k_eq_v"])
    if not config["markov_rank"]:
        made = {k: v for k, v in made.items() if "markov" not in k and "confidence" not in k}
    save_file(made, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return tiny_archs.build_gemma4(tmp_path_factory.mktemp("gemma4") / "target.gguf")


VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "without soft-cap": {"final_logit_softcapping": None},
    "without heads": {"markov_rank": 0, "enable_confidence_head": False},
    "whole rope": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "hard soft-cap": {"final_logit_softcapping": 3.0, "confidence_head_with_markov": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_llama_cpp_computes_what_the_reference_does(name, target, tmp_path):
    source = write(tmp_path / "c", target, **VARIANTS[name])
    result = convert(source, target, tmp_path / "d.gguf", outtype="f32")
    report = verify(Checkpoint(source), target, tmp_path / "d.gguf", "f32")
    assert report.fine, report.worst()
    assert {d.what: d.relative < 5e-3 for d in report.differences if d.what != "chain"} == {
        d.what: True for d in report.differences if d.what != "chain"
    }
    named = {d.what for d in report.differences}
    assert ("confidence" in named) == ("heads" not in name)
    # The soft-cap comes between output matrix and Markov bias, which the graph cannot do.
    beside = CONFIG | VARIANTS[name]
    assert (result.heads_path is not None) == bool(
        beside["final_logit_softcapping"] and beside["markov_rank"]
    )


def test_what_the_file_says(target, tmp_path):
    source = write(tmp_path / "c", target)
    convert(source, target, tmp_path / "d.gguf")
    with GgufFile(tmp_path / "d.gguf") as file:
        said = {
            key: file.get(f"dflash.{key}")
            for key in (
                "embedding_scale", "attention.scale", "hidden_activation", "rope.freq_base",
                "rope.dimension_count", "attention.key_length", "attention.head_count_kv",
                "final_logit_softcapping", "attention.sliding_window",
            )
        }  # fmt: skip
        assert said == {
            "embedding_scale": D**0.5,
            "attention.scale": 1.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope.freq_base": 1e6,
            "rope.dimension_count": HEAD,
            "attention.key_length": HEAD,
            "attention.head_count_kv": KV,
            "final_logit_softcapping": 30.0,
            "attention.sliding_window": None,
        }
        assert file.tensor("rope_freqs.weight").tolist() == [1.0] * 4 + [np.float32(1e30)] * 12
        assert not {"token_embd.weight", "output.weight", "blk.0.attn_v.weight"} & set(file.tensors)
        info = read_drafter(file)
        assert info.softcap == 30 and info.head_type == "vanilla"
        assert info.heads_path == heads_path(tmp_path / "d.gguf") and info.has_confidence


def test_q8_0_stays_near(target, tmp_path):
    source = write(tmp_path / "c", target)
    convert(source, target, tmp_path / "d.gguf", outtype="q8_0")
    report = verify(Checkpoint(source), target, tmp_path / "d.gguf", "q8_0")
    assert report.fine, report.worst()


@pytest.mark.parametrize("name", ["released", "without soft-cap"])
def test_drafting_changes_no_text(name, target, tmp_path):
    convert(write(tmp_path / "c", target, **VARIANTS[name]), target, tmp_path / "d.gguf",
            outtype="f32")  # fmt: skip
    engine = Engine.load(target, tmp_path / "d.gguf", n_ctx=256, n_threads=1)
    try:
        prompt = prompt_of(3, 40)
        plain = engine.complete(prompt, max_tokens=24, draft=DraftOptions(tokens=0)).token_ids
        for draft in (DraftOptions(tokens=7), DraftOptions(tokens=15, width=3)):
            found = engine.complete(prompt, max_tokens=24, draft=draft)
            same_text(engine, prompt, plain, found.token_ids)
            assert len(found.rounds) > 1 and all(r.drafted for r in found.rounds[:-1])
    finally:
        engine.close()


def oracle(p: dict[str, np.ndarray], features: np.ndarray, anchor: int) -> np.ndarray:
    """Hidden states of a block in float64 loops, written from the release's modelling file."""

    def rms(x: np.ndarray, weight: np.ndarray | float) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight

    def rope(x: np.ndarray, position: int) -> np.ndarray:
        out = x.copy()
        for i in range(int(0.25 * HEAD / 2)):  # the others stay
            turn = np.exp(1j * position * 1e6 ** (-2 * i / HEAD))
            turned = turn * (x[..., i] + 1j * x[..., i + HEAD // 2])
            out[..., i], out[..., i + HEAD // 2] = turned.real, turned.imag
        return out

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    injected = [rms(p["fc.weight"] @ f, p["hidden_norm.weight"]) for f in features]
    x = np.array([p["embed_tokens.weight"][t] for t in [anchor] + [4] * 6]) * np.sqrt(D)
    for layer in range(LAYERS):
        w = {k.split(".", 2)[2]: v for k, v in p.items() if k.startswith(f"layers.{layer}.")}
        normed = rms(x, w["input_layernorm.weight"])
        made = [w["self_attn.k_proj.weight"] @ row for row in [*injected, *normed]]
        keys = [rope(rms(k, w["self_attn.k_norm.weight"]), i) for i, k in enumerate(made)]
        values = np.array([rms(k, 1.0) for k in made])
        attended = []
        for i, row in enumerate(normed):
            q = (w["self_attn.q_proj.weight"] @ row).reshape(HEADS, HEAD)
            q = rope(rms(q, w["self_attn.q_norm.weight"]), len(features) + i)
            scores = np.exp(q @ np.array(keys).T)
            attended.append(((scores / scores.sum(-1, keepdims=True)) @ values).reshape(-1))
        out = np.array(attended) @ w["self_attn.o_proj.weight"].T
        x = x + rms(out, w["post_attention_layernorm.weight"])
        normed = rms(x, w["pre_feedforward_layernorm.weight"])
        fed = gelu(normed @ w["mlp.gate_proj.weight"].T) * (normed @ w["mlp.up_proj.weight"].T)
        fed = fed @ w["mlp.down_proj.weight"].T
        x = (x + rms(fed, w["post_feedforward_layernorm.weight"])) * w["layer_scalar"]
    return rms(x, p["norm.weight"])


@torch.no_grad()
def test_the_reference_against_plain_loops(target, tmp_path):
    drafter = load_drafter(write(tmp_path / "c", target))
    features = np.random.default_rng(1).standard_normal((6, len(TAPS) * D), np.float32)
    cache = drafter.new_cache()
    drafter.absorb(torch.from_numpy(features), cache)
    hidden = drafter.forward_block(9, 6, cache)
    wide = {k: v.astype(np.float64) for k, v in tensors(target).items()}
    expected = oracle(wide, features.astype(np.float64), 9)
    np.testing.assert_allclose(hidden.numpy(), expected, atol=2e-4)
    logits = expected @ wide["lm_head.weight"].T
    capped = 30 * np.tanh(logits / 30)
    assert np.abs(logits - capped).max() > 1
    np.testing.assert_allclose(drafter.base_logits(hidden).numpy(), capped, atol=2e-3)


@torch.no_grad()
def test_values_of_their_own_are_normalised_too(target, tmp_path):
    drafter = load_drafter(write(tmp_path / "c", target, attention_k_eq_v=False))
    attention = drafter.layers[0].self_attn
    rope = drafter._rope(torch.arange(3))
    _, v = attention.keys_values(torch.randn(3, D), rope)
    torch.testing.assert_close(v.pow(2).mean(-1), torch.ones(3, 2), atol=1e-3, rtol=0)


def test_config_survives_saving(target):
    for changes in VARIANTS.values():
        config = DrafterConfig.from_dict({**CONFIG, **changes})
        assert config.backbone == "gemma4" and config.embedding_scale == D**0.5
        again = DrafterConfig.from_dict(config.to_dict())
        assert again == config


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(CONFIG)), JSON, min_size=1))
def test_any_config_is_read_or_refused_in_one_line(changes):
    try:
        config = DrafterConfig.from_dict({**CONFIG, **changes})
    except LocalspecError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert DrafterConfig.from_dict(config.to_dict()) == config


def test_rotary_divisors_must_be_exact(target, tmp_path):
    """llama.cpp ends the process on others."""
    convert(write(tmp_path / "c", target), target, tmp_path / "d.gguf", outtype="f32")
    data = (tmp_path / "d.gguf").read_bytes()
    at = data.index(b"rope_freqs.weight") + len("rope_freqs.weight") + 4 + 8  # dims, then the type
    assert data[at : at + 4] == bytes(4)
    (tmp_path / "d.gguf").write_bytes(data[:at] + b"\x01\0\0\0" + data[at + 4 :])
    with GgufFile(tmp_path / "d.gguf") as file, pytest.raises(LocalspecError, match="rope_freqs"):
        read_drafter(file)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_k_eq_v": False}, "attention_k_eq_v is false"),
        ({"enable_moe_block": True}, "enable_moe_block"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ({"use_double_wide_mlp": True, "num_kv_shared_layers": 1}, "use_double_wide_mlp"),
        ({"hidden_activation": "relu"}, "hidden_activation"),
        ({"num_global_key_value_heads": None}, "num_global_key_value_heads"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_parameters"),
        (
            {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6}},
            "partial_rotary_factor",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "proportional",
                    "rope_theta": 1e6,
                    "partial_rotary_factor": 0.3,
                }
            },
            "partial_rotary_factor",
        ),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_name(changes, words, target, tmp_path):
    source = write(tmp_path / "c", target, **changes)
    with pytest.raises(LocalspecError, match=words) as raised:
        convert(source, target, tmp_path / "d.gguf")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "d.gguf").exists()
