"""Every packaging of a Qwen3-like drafter: written out, converted, run, compared."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import tiny
from localspec.convert import convert, packaging
from localspec.convert.source import Checkpoint
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

TRANSFORMER = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rope_parameters", "max_position_embeddings", "layer_types",
    "tie_word_embeddings", "pad_token_id", "eos_token_id",
)  # fmt: skip
DRAFTED = 200  # rows of a reduced vocabulary


@pytest.fixture(scope="module")
def drafter(tiny_target: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory):
    """A published DSpark drafter of the tiny target."""
    return tiny.build_drafter(tmp_path_factory.mktemp("published"), tiny_target)


def save(path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, path / "model.safetensors")
    return path


def speculators(
    model: tiny.TinyModel, path: Path, kind: str = "dspark", reduced: bool = False, **more: Any
) -> Path:
    """The layout of the speculators library: what its config classes save."""
    c, tensors = model.config, dict(model.tensors)
    transformer = {k: c[k] for k in TRANSFORMER} | {"model_type": "qwen3"}
    config = {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "x"}},
        "transformer_layer_config": transformer,
        "draft_vocab_size": c["vocab_size"],
        "block_size": c["block_size"],
        "target_hidden_size": None,
        # Counted as hidden states: 0 is the embedding output.
        "aux_hidden_state_layer_ids": [i + 1 for i in c["target_layer_ids"]],
        "mask_token_id": c["mask_token_id"],
        "sliding_window_non_causal": False,
    }
    if kind == "dspark":
        names = ("markov_rank", "markov_head_type", "enable_confidence_head")
        config |= {k: c[k] for k in (*names, "confidence_head_with_markov") if k in c}
    if reduced:
        ids = np.sort(np.random.default_rng(3).permutation(c["vocab_size"])[:DRAFTED])
        tensors["lm_head.weight"] = tensors["lm_head.weight"][ids]
        w2 = "markov_head.markov_w2.weight"
        if w2 in tensors:
            tensors[w2] = tensors[w2][ids]
        tensors["d2t"] = ids - np.arange(DRAFTED)
        tensors["t2d"] = np.isin(np.arange(c["vocab_size"]), ids)
        config["draft_vocab_size"] = DRAFTED
    return save(path, config | more, tensors)


def neighbours(model: tiny.TinyModel) -> dict[str, np.ndarray]:
    """Its tensors with rotary pairs stored as neighbours, as rope_is_neox_style false has them."""
    head, out = model.config["head_dim"], {}
    for name, value in model.tensors.items():
        if "self_attn.q_" in name or "self_attn.k_" in name:
            shape = value.shape
            value = value.reshape(-1, 2, head // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        out[name] = value
    return out


def proven(source: Path, target: tiny.TinyModel, out: Path, **options: Any):
    """Convert with the comparison on; the F32 file computes what the reference does."""
    result = convert(source, target.gguf, out, outtype="f32", verify=True, **options)
    assert result.report is not None and result.report.fine
    assert all(d.relative < 1e-3 for d in result.report.differences)
    return result


def same_bytes(a: Path, b: Path) -> bool:
    return a.read_bytes() == b.read_bytes()


def run(target: tiny.TinyModel, path: Path, **options: Any) -> float:
    """Accepted length of a few rounds in the engine; the text is the target's own."""
    prompt = [tiny.START_ID, *range(70, 80), tiny.EOS_ID]
    with Engine.load(target.gguf, n_ctx=256, n_threads=1) as plain:
        expected = [t for step in plain.generate(prompt, max_tokens=40) for t in step.token_ids]
    with Engine.load(target.gguf, path, n_ctx=256, n_threads=1) as engine:
        steps = list(engine.generate(prompt, max_tokens=40, draft=DraftOptions(tokens=15, width=3)))
        tokens = [t for step in steps for t in step.token_ids]
    at = next((i for i, (x, y) in enumerate(zip(tokens, expected, strict=False)) if x != y), None)
    assert at is None or at > 10
    return len(tokens) / len(steps)


@pytest.fixture(scope="module")
def published(drafter, tiny_target, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("published-out") / "drafter.gguf"
    proven(drafter.path, tiny_target, out)
    return out


def test_speculators_dspark(drafter, tiny_target, published, tmp_path):
    source = speculators(drafter, tmp_path / "s", sample_from_anchor=True)
    out = proven(source, tiny_target, tmp_path / "d.gguf").path
    assert Checkpoint(source).packaging == "speculators"
    assert same_bytes(out, published)


@pytest.mark.parametrize("said", [False, None])
def test_speculators_bonus_anchor(said, drafter, tiny_target, tmp_path):
    """Without the field an export is older than it, and those have bonus-anchor blocks."""
    more = {} if said is None else {"sample_from_anchor": said}
    out = proven(
        speculators(drafter, tmp_path / "s", **more), tiny_target, tmp_path / "d.gguf"
    ).path
    with GgufFile(out) as file:
        assert file.arch_get("sample_from_anchor") is False
        layers = [i + 1 for i in drafter.config["target_layer_ids"]]
        assert file.arch_get("target_layers") == layers
    assert run(tiny_target, out) > 1


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_speculators_reduced_vocabulary(head, tiny_target, tmp_path):
    model = tiny.build_drafter(tmp_path / "p", tiny_target, head=head)
    source = speculators(model, tmp_path / "s", reduced=True, sample_from_anchor=True)
    result = proven(source, tiny_target, tmp_path / "d.gguf")
    with GgufFile(result.path) as file:
        ids = file.integers("d2t")
        assert len(ids) == DRAFTED and len(set(ids.tolist())) == DRAFTED
        assert file.tensors["output.weight"].shape[0] == DRAFTED
    assert run(tiny_target, result.path) > 1


@pytest.mark.parametrize("reduced", [False, True])
def test_speculators_dflash(reduced, tiny_target, tmp_path):
    model = tiny.build_drafter(
        tmp_path / "p", tiny_target, head="none", confidence=False, block_size=16
    )
    source = speculators(model, tmp_path / "s", "dflash", reduced=reduced)
    result = proven(source, tiny_target, tmp_path / "d.gguf")
    assert result.head_type == "none"
    assert run(tiny_target, result.path) >= 1


def test_defaults_that_transformers_leaves_out(drafter, tiny_target, tmp_path):
    """`to_diff_dict` drops what equals Qwen3Config's default; rms_norm_eps 1e-6 and silu do."""
    source = speculators(drafter, tmp_path / "s", sample_from_anchor=True)
    config = json.loads((source / "config.json").read_text())
    assert "rms_norm_eps" not in config["transformer_layer_config"]
    assert Checkpoint(source).config.rms_norm_eps == 1e-6
    del config["transformer_layer_config"]["rope_parameters"]
    (source / "config.json").write_text(json.dumps(config))
    assert Checkpoint(source).config.rope_theta == 10000.0


@pytest.mark.parametrize("architecture", ["Lfm2DSparkDraftModel", "LingDSparkModel"])
def test_interleaved_rope_and_nested_taps(architecture, drafter, tiny_target, published, tmp_path):
    config = {k: v for k, v in drafter.config.items() if k not in ("mask_token_id",
              "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head",
              "confidence_head_with_markov")}  # fmt: skip
    config |= {
        "architectures": [architecture],
        "rope_is_neox_style": False,
        "dflash_config": {k: drafter.config[k] for k in ("mask_token_id", "target_layer_ids")},
    }
    source = save(tmp_path / "s", config, neighbours(drafter))
    result = proven(source, tiny_target, tmp_path / "d.gguf")
    assert same_bytes(result.path, published)


def test_forgetting_the_order_of_rotary_pairs_is_noticed(drafter, tiny_target, tmp_path):
    """The comparison is no formality: neighbours read as halves fail it, and leave no file."""
    source = save(tmp_path / "s", drafter.config, neighbours(drafter))
    right = Checkpoint(drafter.path)
    from localspec.convert import verify

    convert(source, tiny_target.gguf, tmp_path / "d.gguf", outtype="f32")
    report = verify.verify(right, tiny_target.gguf, tmp_path / "d.gguf", "f32")
    assert not report.fine and "hidden states" in report.worst()


def test_partial_rotation_is_refused_for_packagings_that_mean_it(drafter, tmp_path):
    rope = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    config = drafter.config | {"architectures": ["LingDSparkModel"], "rope_parameters": rope}
    source = save(tmp_path / "s", config, drafter.tensors)
    with pytest.raises(LocalspecError, match=r"partial_rotary_factor is 0\.5"):
        Checkpoint(source)
    # DeepSpec's own backbone carries the field along from the target and rotates everything.
    save(source, config | {"architectures": ["Qwen3DSparkModel"]}, drafter.tensors)
    assert Checkpoint(source).config.head_dim == drafter.config["head_dim"]


def test_names_with_training_prefixes(drafter, tiny_target, published, tmp_path):
    for i, prefix in enumerate(("model.", "_orig_mod.", "module.model.")):
        tensors = {prefix + name: value for name, value in drafter.tensors.items()}
        source = save(tmp_path / f"s{i}", drafter.config, tensors)
        convert(source, tiny_target.gguf, tmp_path / "d.gguf", outtype="f32")
        assert same_bytes(tmp_path / "d.gguf", published)


def test_names_that_collide(drafter, tmp_path):
    norm = drafter.tensors["norm.weight"]
    source = save(tmp_path / "s", drafter.config, drafter.tensors | {"model.norm.weight": norm})
    with pytest.raises(LocalspecError, match="same part of a drafter"):
        Checkpoint(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_size": 7}, "target_hidden_size"),
        ({"transformer_layer_config": 3}, "must be an object"),
        ({"aux_hidden_state_layer_ids": "all"}, "aux_hidden_state_layer_ids"),
        ({"draft_vocab_size": 100}, "d2t"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size"),
    ],
)
def test_speculators_refused_by_name(change, message, drafter, tmp_path):
    with pytest.raises(LocalspecError, match=message) as caught:
        Checkpoint(speculators(drafter, tmp_path / "s", **change))
    assert "\n" not in str(caught.value)


def test_sliding_layers_that_look_only_backwards_are_refused(drafter, tmp_path):
    source = speculators(drafter, tmp_path / "s")
    config = json.loads((source / "config.json").read_text())
    layers = config["transformer_layer_config"]
    layers |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(LocalspecError, match="sliding_window_non_causal"):
        Checkpoint(source)
    config["sliding_window_non_causal"] = True
    (source / "config.json").write_text(json.dumps(config))
    assert Checkpoint(source).config.window(1) == 16


@pytest.mark.parametrize("bad", [[0, 0, 0], [-5, 0, 0], [10_000_000, 0, 0], [2**62, 0, 0]])
def test_broken_vocabulary_maps(bad):
    with pytest.raises(LocalspecError, match="d2t"):
        packaging.vocabulary_map(np.array([*bad, -1]), 320, "here")


# --- the output of a training ------------------------------------------------------------------


def test_deepspec_steps(drafter, tiny_target, published, tmp_path):
    root = tmp_path / "run"
    for step in (9, 100):
        shutil.copytree(drafter.path, root / f"step_{step}")
        # Optimiser state is a pickle of anything; it is never opened.
        (root / f"step_{step}" / "training_state.rank0.pt").write_bytes(pickle.dumps(object))
    assert packaging.locate(root) == root / "step_100"
    (root / "step_latest").symlink_to(root / "step_9")
    assert packaging.locate(root).resolve() == (root / "step_9").resolve()
    convert(root, tiny_target.gguf, tmp_path / "d.gguf", outtype="f32")
    assert same_bytes(tmp_path / "d.gguf", published)


def test_a_link_out_of_the_training_directory_is_not_followed(drafter, tmp_path):
    elsewhere = shutil.copytree(drafter.path, tmp_path / "other" / "step_5")
    root = tmp_path / "run"
    shutil.copytree(drafter.path, root / "step_1")
    (root / "step_latest").symlink_to(elsewhere)
    (root / "step_7").symlink_to(elsewhere)
    assert packaging.locate(root) == root / "step_1"


def test_speculators_epochs(drafter, tmp_path):
    for epoch in (0, 2, 10):
        shutil.copytree(drafter.path, tmp_path / str(epoch))
    assert packaging.locate(tmp_path) == tmp_path / "10"


def test_nemo_automodel(drafter, tiny_target, published, tmp_path):
    for name in ("epoch_0_step_20", "epoch_1_step_5"):
        inside = tmp_path / "run" / name / "model" / "consolidated"
        shutil.copytree(drafter.path, inside)
        (tmp_path / "run" / name / "optim").mkdir()
        (tmp_path / "run" / name / "optim" / "__0_0.distcp").write_bytes(b"state")
    (tmp_path / "run" / "LATEST").symlink_to("epoch_1_step_5")
    convert(tmp_path / "run", tiny_target.gguf, tmp_path / "d.gguf", outtype="f32")
    assert same_bytes(tmp_path / "d.gguf", published)


@pytest.mark.parametrize("name", ["__0_0.distcp", "shard-00001-model-00001-of-00001.safetensors"])
def test_split_weights_ask_to_be_consolidated(name, tmp_path):
    (tmp_path / "epoch_0_step_1" / "model").mkdir(parents=True)
    (tmp_path / "epoch_0_step_1" / "model" / name).write_bytes(b"")
    with pytest.raises(LocalspecError, match="consolidate"):
        packaging.locate(tmp_path)


# --- weights in torch's format ------------------------------------------------------------------


def torch_state(model: tiny.TinyModel) -> dict[str, Any]:
    return {name: torch.from_numpy(value) for name, value in model.tensors.items()}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_torch_weights(name, wrapped, drafter, tiny_target, published, tmp_path):
    source = tmp_path / "s"
    source.mkdir()
    shutil.copy(drafter.path / "config.json", source)
    state = torch_state(drafter)
    torch.save({"state_dict": state, "step": 3} if wrapped else state, source / name)
    for given in (source, source / name):
        convert(given, tiny_target.gguf, tmp_path / "d.gguf", outtype="f32")
        assert same_bytes(tmp_path / "d.gguf", published)


def test_torch_weights_in_two_files(drafter, tiny_target, published, tmp_path):
    source = tmp_path / "s"
    source.mkdir()
    shutil.copy(drafter.path / "config.json", source)
    state, where = torch_state(drafter), {}
    for i, part in enumerate((list(state)[::2], list(state)[1::2])):
        torch.save({name: state[name] for name in part}, source / f"part{i}.bin")
        where |= dict.fromkeys(part, f"part{i}.bin")
    index = source / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    convert(source, tiny_target.gguf, tmp_path / "d.gguf", outtype="f32")
    assert same_bytes(tmp_path / "d.gguf", published)
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../s/part0.bin"}}))
    with pytest.raises(LocalspecError, match="shard"):
        Checkpoint(source)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("/tmp/localspec-was-executed"),))


def test_nothing_in_a_checkpoint_is_executed(drafter, tmp_path):
    marker = Path("/tmp/localspec-was-executed")
    marker.unlink(missing_ok=True)
    shutil.copy(drafter.path / "config.json", tmp_path)
    torch.save({"fc.weight": torch.zeros(2), "x": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LocalspecError, match="weights only") as caught:
        Checkpoint(tmp_path)
    assert not marker.exists() and "\n" not in str(caught.value)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(LocalspecError, match="weights only"):
        Checkpoint(tmp_path)
    assert not marker.exists()


def test_a_damaged_list_of_drafted_tokens_never_reaches_llama_cpp(drafter, tiny_target, tmp_path):
    """It writes logits to the places the list names, wherever they are."""
    source = speculators(drafter, tmp_path / "s", reduced=True)
    out = convert(source, tiny_target.gguf, tmp_path / "d.gguf", outtype="f32").path
    with GgufFile(out) as file:
        at = file.tensors["d2t"].offset
    for bad in (320, -1, 2**40):
        data = bytearray(out.read_bytes())
        data[at : at + 8] = bad.to_bytes(8, "little", signed=True)
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(LocalspecError, match="d2t"):
            Engine.load(tiny_target.gguf, tmp_path / "bad.gguf", n_ctx=64, n_threads=1)
