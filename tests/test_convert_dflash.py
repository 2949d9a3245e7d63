"""DFlash and DFlash 2 in z-lab's packaging: conversion, llama.cpp, whole runs."""

from __future__ import annotations

import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_archs
from conftest import prompt_of
from safetensors.numpy import save_file

import tiny
from localspec import drafting
from localspec.convert import convert
from localspec.drafter import Drafter
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.heads import Heads
from localspec.llama import Context, ContextOptions, Model
from localspec.pairs import read_drafter
from localspec.sampling import SamplingParams
from localspec.tree import build_tree

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from localspec.convert.source import Checkpoint  # noqa: E402
from localspec.convert.verify import verify  # noqa: E402
from localspec.models import DrafterConfig, TinyTarget, load_drafter, speculative_decode  # noqa: E402

BLOCK, LAYERS, RANK, TOP_K, KERNEL, GROUP = 16, 3, 16, 5, 4, 8
SLIDING = {
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
    "sliding_window": 12,
    "use_sliding_window": True,
}
DFLASH_2 = {
    "conv_kernel_size": KERNEL,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": TOP_K,
}
# Changes at the top of config.json, and inside dflash_config.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "sliding": (SLIDING, {"causal": False}),
    "all sliding": ({"sliding_window": 9}, {"use_swa": True, "swa_window_size": 11}),
    "causal": ({}, {"causal": True}),
    "causal and sliding": ({**SLIDING, "is_causal": True}, {}),
    "for a Gemma target": (
        {},
        {
            "input_embedding_scale": 9.5,
            "final_logit_softcapping": 8.0,
            "output_multiplier": 1.5,
            "attention_value_scale": 0.7,
        },
    ),
    "2": ({"is_causal": False}, DFLASH_2),
    "2, sliding, soft-capped": (
        {**SLIDING, "is_causal": False},
        {**DFLASH_2, "final_logit_softcapping": 8.0, "output_multiplier": 1.5},
    ),
}


def config_of(target: tiny.TinyModel, name: str) -> dict[str, Any]:
    top, nested = VARIANTS[name]
    c = target.config
    return {
        "architectures": ["DFlash2DraftModel" if "selector_rank" in nested else "DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": tiny.MASK_ID, "target_layer_ids": [0, 1, 2], **nested},
        "dtype": "bfloat16",
        "head_dim": c["head_dim"],
        "hidden_act": "silu",
        "hidden_size": c["hidden_size"],
        "intermediate_size": c["intermediate_size"],
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": 2048,
        "max_window_layers": LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": c["num_attention_heads"],
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": c["num_key_value_heads"],
        "num_target_layers": c["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": c["vocab_size"],
        **top,
    }


def tensors_of(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Random weights; z-lab's checkpoints hold neither embeddings nor an output matrix."""
    rng = np.random.default_rng(5)
    d, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return gain / np.sqrt(columns) * rng.standard_normal((rows, columns))

    def norm(size: int) -> np.ndarray:
        return rng.uniform(0.6, 1.4, size)

    out = {
        "fc.weight": matrix(d, 3 * d),
        "hidden_norm.weight": norm(d),
        "norm.weight": norm(d),
    }
    selector = "selector_rank" in config["dflash_config"]
    if selector:
        out |= {
            "candidate_selector.predecessor_codebook": rng.standard_normal((320, RANK)),
            "candidate_selector.successor_codebook": rng.standard_normal((320, RANK)),
            "candidate_selector.hidden_projection.weight": matrix(RANK, d),
        }
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj.weight": matrix(q, d),
            "self_attn.k_proj.weight": matrix(kv, d),
            "self_attn.v_proj.weight": matrix(kv, d),
            "self_attn.o_proj.weight": matrix(d, q, 2.0),
            "self_attn.q_norm.weight": norm(head),
            "self_attn.k_norm.weight": norm(head),
            "mlp.gate_proj.weight": matrix(ffn, d),
            "mlp.up_proj.weight": matrix(ffn, d),
            "mlp.down_proj.weight": matrix(d, ffn),
            "input_layernorm.weight": norm(d),
            "post_attention_layernorm.weight": norm(d),
        }
        for part in ("attention_conv", "mlp_conv") if selector else ():
            base = 0.5 * rng.standard_normal((2, KERNEL, d))
            base[:, 0] += 1
            layer[f"{part}.base_kernel"] = base
            layer[f"{part}.kernel_projection.weight"] = matrix(2 * KERNEL * d // GROUP, d, 0.3)
        out |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return {name: np.ascontiguousarray(value, np.float32) for name, value in out.items()}


@pytest.fixture(scope="module")
def made(tiny_target, tmp_path_factory):
    """Name -> (checkpoint, F32 GGUF), each built once."""
    done: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in done:
            path = tmp_path_factory.mktemp("dflash")
            config = config_of(tiny_target, name)
            (path / "config.json").write_text(json.dumps(config))
            save_file(tensors_of(config), path / "model.safetensors", {"format": "pt"})
            convert(path, tiny_target.gguf, path / "d.gguf", outtype="f32")
            done[name] = path, path / "d.gguf"
        return done[name]

    return get


@pytest.mark.parametrize("name", VARIANTS)
def test_llama_cpp_computes_what_the_reference_does(name, tiny_target, made):
    source, path = made(name)
    report = verify(Checkpoint(source), tiny_target.gguf, path, "f32")
    assert report.fine, report.worst()
    compared = {d.what: d.relative for d in report.differences}
    assert set(compared) == {"hidden states", "base logits", "logits", "chain"}
    assert compared["hidden states"] < 1e-3 and compared["logits"] < 1e-3


def test_the_variants_are_different_models(tiny_target, made):
    """What would be compared in vain if a setting had no effect."""
    features = torch.from_numpy(np.random.default_rng(0).standard_normal((40, 288), np.float32))
    found = {}
    target = TinyTarget.load(tiny_target.path)
    for name in VARIANTS:
        reference = load_drafter(made(name)[0])
        reference.tie_target(target.embed_tokens.weight, target.output_matrix)
        cache = reference.new_cache()
        with torch.no_grad():
            reference.absorb(features, cache)
            found[name] = reference.forward_block(70, 40, cache)
    names = list(found)
    for i, a in enumerate(names):
        for b in names[:i]:
            assert (found[a] - found[b]).abs().max() > 0.05, (a, b)


def test_what_the_files_say(tiny_target, made):
    with GgufFile(made("causal and sliding")[1]) as file:
        assert file.get("dflash.attention.causal") is True
        assert file.get("dflash.attention.sliding_window") == 12
        assert file.get("dflash.attention.sliding_window_pattern") == [True, True, False]
        assert file.get("dflash.sample_from_anchor") is False
        info = read_drafter(file)
        assert info.causal and info.max_depth == BLOCK - 1 and info.head_type == "none"
    with GgufFile(made("2")[1]) as file:
        info = read_drafter(file)
        assert info.head_type == "selector" and info.top_k == TOP_K and info.heads_path is None
        assert file.tensors["blk.0.attn_conv_base"].shape == (2, KERNEL, 96)
    with GgufFile(made("for a Gemma target")[1]) as file:
        info = read_drafter(file)
        assert info.softcap == 8 and info.logit_scale == 1.5
        assert file.get("dflash.embedding_scale") == 9.5


def test_files_that_do_not_say_where_they_predict(made, tmp_path):
    """llama.cpp's converter writes the key for DSpark only; DFlash predicts at the masks."""
    for name in ("plain", "2"):
        data = made(name)[1].read_bytes()
        old = tmp_path / "d.gguf"
        old.write_bytes(data.replace(b"dflash.sample_from_anchor", b"dflash.Sample_from_anchor"))
        with GgufFile(old) as file:
            assert not read_drafter(file).sample_from_anchor


@pytest.mark.parametrize("name", ["plain", "all sliding", "causal", "for a Gemma target", "2"])
def test_whole_runs_equal_those_of_the_reference(name, tiny_target, made, monkeypatch):
    chains: list[list[int]] = []

    def whole(block, heads, **options):
        tree = build_tree(block, heads, **{**options, "shortlist": 320})
        chains.append(tree.token.tolist())
        return tree

    monkeypatch.setattr(drafting, "build_tree", whole)
    source, path = made(name)
    reference, target = load_drafter(source), TinyTarget.load(tiny_target.path)
    reference.tie_target(target.embed_tokens.weight, target.output_matrix)
    engine = Engine.load(
        tiny_target.gguf, path, n_ctx=256, n_threads=1, kv_type="f32", flash_attn=False
    )
    try:
        prompt = prompt_of(1)
        ids, rounds = speculative_decode(target, reference, prompt, 20, {2})
        result = engine.complete(prompt, max_tokens=20, draft=DraftOptions(tokens=16))
        assert prompt + result.token_ids == ids
        assert len(chains) > 8
        for ours, theirs in zip(chains, rounds, strict=False):
            assert ours == theirs.draft[: len(ours)]
        plain = engine.complete(prompt, max_tokens=20, draft=DraftOptions(tokens=0))
        tree = engine.complete(prompt, max_tokens=20, draft=DraftOptions(tokens=15, width=3))
        assert plain.token_ids == result.token_ids == tree.token_ids
        drawn = engine.complete(
            prompt, SamplingParams(temperature=0.8, seed=1), max_tokens=12,
            draft=DraftOptions(tokens=15, width=3), stop_token_ids=(),
        )  # fmt: skip
        assert len(drawn.token_ids) == 12
    finally:
        engine.close()


@pytest.mark.parametrize("name", ["2", "2, sliding, soft-capped"])
def test_our_scores_are_llama_cpp_s_lattice(name, tiny_target, made):
    """Its graph packs candidates and pair scores of each position into one row."""
    _, path = made(name)
    exact = {"kv_type": "f32", "flash_attn": False, "n_threads": 1}
    with ExitStack() as stack:
        file = stack.enter_context(GgufFile(path))
        info = read_drafter(file)
        models = Model(tiny_target.gguf), Model(path)
        context = Context(models[0], ContextOptions(256, layer_inputs=info.target_layers, **exact))
        other = Context(
            models[1],
            ContextOptions(256, causal=False, hidden_states=True, next_states="all", **exact),
            other=context,
        )
        for thing in (*models, context, other):
            stack.callback(thing.close)
        heads = Heads.from_gguf(file, info)
        drafter = Drafter(other, info, heads)
        drafter.absorb(np.random.default_rng(2).standard_normal((20, 288), np.float32))
        block = drafter.propose(70)
        lattice = other.next_states()[1:].copy()
        assert len(lattice) == block.depth == BLOCK - 1
        before = np.array([70] * TOP_K)
        for d, row in enumerate(lattice):
            tokens = row[:TOP_K].astype(np.int64)
            scores = row[TOP_K : TOP_K * (TOP_K + 1)].reshape(TOP_K, TOP_K)  # [parent, child]
            assert set(np.flatnonzero(block.logits[d] > -1e8)) == set(tokens)
            latent, _ = heads.latent(before, block.hidden[d], heads.root_state())
            ours = block.logits[d, tokens] + heads.bias(latent, tokens)
            np.testing.assert_allclose(ours, scores, atol=1e-3)
            before = tokens
        tree = build_tree(block, heads, budget=40, children=3, frontier=8)
        assert len(tree) == 40
        for token, depth in zip(tree.token.tolist(), tree.depth.tolist(), strict=True):
            assert token in lattice[depth - 1, :TOP_K]


def test_a_drafter_with_qwen3_layers_for_a_gemma4_target(tmp_path):
    """z-lab trains these on the target's scaled embeddings and soft-capped logits."""
    target = tiny_archs.build_gemma4(tmp_path / "target.gguf")
    base = tiny.TinyModel(
        tmp_path,
        {
            "head_dim": 16, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 320,
            "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4,
        },
        {}, np.zeros(0),
    )  # fmt: skip
    config = config_of(base, "plain")
    config["dflash_config"] |= {"input_embedding_scale": 8.0, "final_logit_softcapping": 30.0}
    source = tmp_path / "c"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config), source / "model.safetensors")
    convert(source, target, tmp_path / "d.gguf", outtype="f32")
    report = verify(Checkpoint(source), target, tmp_path / "d.gguf", "f32")
    assert report.fine, report.worst()


def test_features_default_to_an_even_spread(tiny_target):
    config = config_of(tiny_target, "plain") | {"num_target_layers": 36, "num_hidden_layers": 5}
    config["layer_types"] = ["full_attention"] * 5
    del config["dflash_config"]["target_layer_ids"]
    # As z-lab's Qwen3-8B drafter has them.
    assert DrafterConfig.from_dict(config).target_layer_ids == (1, 9, 17, 25, 33)


def test_undeclared_directions(tiny_target, tmp_path):
    """As vLLM and SGLang take them: sliding layers look back, the others both ways."""
    config = config_of(tiny_target, "sliding")
    del config["dflash_config"]["causal"]
    mixed = DrafterConfig.from_dict(config)
    assert (mixed.causal, mixed.causal_sliding) == (False, True)
    assert DrafterConfig.from_dict(mixed.to_dict()) == mixed
    every = DrafterConfig.from_dict(config | {"layer_types": ["sliding_attention"] * LAYERS})
    assert (every.causal, every.causal_sliding) == (True, False)
    both = DrafterConfig.from_dict(config_of(tiny_target, "all sliding"))
    assert (both.causal, both.causal_sliding) == (False, False)
    # llama.cpp has one direction for all layers: what it cannot do is said.
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors_of(config), tmp_path / "model.safetensors")
    result = convert(tmp_path, tiny_target.gguf, tmp_path / "d.gguf", outtype="f32")
    assert any("look back only" in note for note in result.notes)
    report = verify(Checkpoint(tmp_path), tiny_target.gguf, tmp_path / "d.gguf", "f32")
    assert report.fine, report.worst()


@torch.no_grad()
def test_the_reference_has_a_direction_per_layer(tiny_target, made):
    """What a checkpoint was trained with, also where llama.cpp cannot follow."""
    config = config_of(tiny_target, "sliding") | {"is_causal": None}
    config |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config["dflash_config"] = {**config["dflash_config"], "causal": None}
    mixed = DrafterConfig.from_dict(config)
    assert mixed.causal_sliding
    reference = load_drafter(made("sliding")[0])
    target = TinyTarget.load(tiny_target.path)
    reference.tie_target(target.embed_tokens.weight, target.output_matrix)
    features = torch.from_numpy(np.random.default_rng(0).standard_normal((9, 288), np.float32))
    seen = {}
    for kind in ("both", "sliding", "all"):
        reference.config = dataclasses.replace(
            reference.config, causal=kind == "all", causal_sliding=kind == "sliding"
        )
        cache = reference.new_cache()
        reference.absorb(features, cache)
        seen[kind] = reference.forward_block(70, 9, cache)
    for a, b in (("both", "sliding"), ("sliding", "all"), ("both", "all")):
        assert (seen[a] - seen[b]).abs().max() > 0.05


def test_windows_need_the_switch(tiny_target):
    """transformers drops the window of a Qwen3 config whose use_sliding_window is false."""
    config = config_of(tiny_target, "sliding") | {"use_sliding_window": False}
    read = DrafterConfig.from_dict(config)
    assert [read.window(i) for i in range(LAYERS)] == [None] * LAYERS


def test_configs_survive_saving(tiny_target):
    for name in VARIANTS:
        config = DrafterConfig.from_dict(config_of(tiny_target, name))
        assert DrafterConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("name", "nested", "words"),
    [
        ("2", {"selector_top_k": 12}, "selector_top_k"),
        ("2", {"conv_group_size": 7}, "conv_group_size"),
        ("2", {"conv_kernel_size": None}, "conv_kernel_size"),
        ("2", {"selector_rank": 24}, "candidate_selector"),
        ("plain", {"causal": "yes"}, "causal"),
        ("plain", {"final_logit_softcapping": -2}, "final_logit_softcapping"),
        ("plain", {"input_embedding_scale": 0}, "input_embedding_scale"),
        ("plain", DFLASH_2, "is missing"),
    ],
)
def test_what_does_not_fit_is_refused(name, nested, words, tiny_target, tmp_path):
    config = config_of(tiny_target, name)
    tensors = tensors_of(config)
    config["dflash_config"] |= nested
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(LocalspecError, match=words) as raised:
        convert(tmp_path, tiny_target.gguf, tmp_path / "d.gguf")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("selector_top_k", 0),
        ("selector_top_k", 400),
        ("selector_rank", -1),
        ("conv_group_size", 7),
        ("conv_kernel_size", 0),
    ],
)
def test_settings_that_would_end_llama_cpp_are_refused(key, value, made, tmp_path):
    data = bytearray(made("2")[1].read_bytes())
    at = data.index(f"dflash.{key}".encode()) + len(f"dflash.{key}") + 4  # past the type
    data[at : at + 4] = int(value).to_bytes(4, "little", signed=True)
    (tmp_path / "d.gguf").write_bytes(data)
    with GgufFile(tmp_path / "d.gguf") as file, pytest.raises(LocalspecError, match="selector"):
        read_drafter(file)


def test_a_mask_embedding_of_its_own_is_refused(tiny_target, made, tmp_path):
    source, _ = made("plain")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((source / file).read_bytes())
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(LocalspecError, match=r"mask_embedding\.pt"):
        convert(tmp_path, tiny_target.gguf, tmp_path / "d.gguf")
