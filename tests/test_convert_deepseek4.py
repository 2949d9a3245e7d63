"""The DSpark drafter inside a full DeepSeek-V4 checkpoint: extracted, loaded, compared, run."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch")

import tiny_deepseek4 as v4  # noqa: E402

import tiny  # noqa: E402
from localspec.convert import convert, deepseek4, deepseek4_source  # noqa: E402
from localspec.convert.deepseek4 import Deepseek4Checkpoint  # noqa: E402
from localspec.drafter import Drafter  # noqa: E402
from localspec.engine import DraftOptions, Engine  # noqa: E402
from localspec.errors import LocalspecError  # noqa: E402
from localspec.ggufio import GgufFile  # noqa: E402
from localspec.heads import Heads  # noqa: E402
from localspec.llama import Context, ContextOptions, Model  # noqa: E402
from localspec.models.deepseek4 import Deepseek4Drafter  # noqa: E402
from localspec.models.deepseek4_config import Deepseek4Config  # noqa: E402
from localspec.pairs import check_pair  # noqa: E402
from localspec.target import Target  # noqa: E402

EXACT = {"kv_type": "f32", "flash_attn": False, "n_threads": 1}
NEAR = 5e-5
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def releases(tmp_path_factory) -> dict[str, v4.Tiny]:
    where = tmp_path_factory.mktemp("deepseek4")
    return {
        "f32": v4.build(where / "plain"),
        "released": v4.build(where / "released", released=True, seed=1),
    }


@pytest.fixture(scope="module")
def gguf_of(releases, tmp_path_factory):
    where, made = tmp_path_factory.mktemp("drafters"), {}

    def get(name: str, outtype: str) -> Path:
        if (name, outtype) not in made:
            out = where / f"{name}-{outtype}.gguf"
            convert(releases[name].path, releases[name].gguf, out, outtype=outtype)
            made[name, outtype] = out
        return made[name, outtype]

    return get


@pytest.fixture
def copy(releases, tmp_path) -> Path:
    """A checkpoint to damage."""
    return Path(shutil.copytree(releases["released"].path, tmp_path / "copy"))


@contextmanager
def opened(target: Path, drafter: Path) -> Iterator[tuple[Target, Drafter]]:
    with ExitStack() as stack:
        file, header = GgufFile(drafter), GgufFile(target)
        info = check_pair(header, file)
        models = [Model(target), Model(drafter)]
        options = ContextOptions(512, layer_inputs=info.target_layers, rollback=16, **EXACT)
        context = Context(models[0], options)
        options = ContextOptions(512, n_batch=256, causal=False, hidden_states=True, **EXACT)
        other = Context(models[1], options, other=context)
        for thing in (file, header, *models, context, other):
            stack.callback(thing.close)
        yield Target(context), Drafter(other, info, Heads.from_gguf(file, info))


def prompt(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(36, v4.V, n).tolist()


def edit(path: Path, **fields: object) -> None:
    """Change fields of config.json; None takes one out."""
    config = json.loads((path / "config.json").read_text()) | fields
    kept = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))


def refused(path: Path, target: Path, tmp_path: Path) -> str:
    """The one line with which a conversion ends; nothing is left behind."""
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(LocalspecError) as error:
        convert(path, target, tmp_path / "x.gguf")
    assert sorted(os.listdir(tmp_path)) == before
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- what llama.cpp computes


@pytest.mark.parametrize("name", ["f32", "released"])
def test_llama_cpp_computes_what_the_reference_computes(name, releases, gguf_of):
    """From nothing in the window to far beyond it, fed at once and in pieces."""
    release = releases[name]
    config = Deepseek4Config.from_file(release.path)
    reference = Deepseek4Drafter(config, release.values, release.embedding, release.output)
    chains = set()
    with opened(release.gguf, gguf_of(name, "f32")) as (target, drafter):
        assert drafter.info.target_layers == (1, 2, 3)  # the last layer's output among them
        for n, pieces in ((3, 1), (v4.WINDOW, 1), (v4.WINDOW + 1, 5), (60, 3), (400, 1)):
            target.cut(0)
            drafter.cut(0)
            rows = [target.features(k) for _, k in target.prefill(prompt(n, n))]
            features = np.concatenate(rows)
            for part in np.array_split(features, pieces):
                drafter.absorb(part)
                found = drafter.propose(70)
            expected = reference.propose(torch.from_numpy(features), 70)
            assert expected.hidden.abs().mean() > 0.5 and expected.logits.std() > 0.5
            np.testing.assert_allclose(found.hidden, expected.hidden, atol=NEAR)
            np.testing.assert_allclose(found.logits, expected.logits, atol=NEAR)
            chain = expected.tokens.tolist()
            assert found.logits.argmax(axis=1).tolist() == chain
            parents = np.array([70, *chain[:-1]])
            every = np.arange(v4.V)
            bias = drafter.heads.bias(drafter.heads.embed(parents), every)
            np.testing.assert_allclose(found.logits - bias, expected.base_logits, atol=NEAR)
            for i, parent in enumerate(parents):
                confidence = drafter.heads.confidence(parents[i : i + 1], found.hidden[i])
                np.testing.assert_allclose(confidence, expected.confidence[i], atol=NEAR)
                assert parent == found.baked[i]
            chains.add(tuple(chain))
    assert len(chains) > 2


def test_features_are_what_the_target_hands_out(releases, gguf_of):
    """The reference sees no features of its own: a drafter fed others proposes otherwise."""
    release = releases["f32"]
    with opened(release.gguf, gguf_of("f32", "f32")) as (target, drafter):
        features = np.concatenate([target.features(k) for _, k in target.prefill(prompt(0, 20))])
        assert features.shape == (20, 3 * v4.D)
        drafter.absorb(features)
        right = drafter.propose(70).hidden.copy()
        drafter.cut(0)
        drafter.absorb(np.roll(features, v4.D, axis=1))  # the layers in another order
        assert np.abs(drafter.propose(70).hidden - right).max() > 0.1


def test_the_default_type_keeps_the_bits_of_the_experts(releases, gguf_of):
    release, path = releases["released"], gguf_of("released", "auto")
    with GgufFile(path) as file:
        kinds = {name: t.type_name for name, t in file.tensors.items()}
        for stage, (part, name, _, _) in itertools.product(range(v4.STAGES), v4.EXPERT):
            assert kinds[f"blk.{stage}.{name}"] == "MXFP4"
            found = file.tensor(f"blk.{stage}.{name}")
            for expert in range(v4.EXPERTS):
                source = f"mtp.{stage}.ffn.experts.{expert}.{part}.weight"
                np.testing.assert_array_equal(found[expert], release.values[source])
        for name in ("fc.weight", "blk.0.attn_q_a.weight", "blk.1.ffn_up_shexp.weight"):
            assert kinds[name] == "Q8_0"
        assert kinds["markov_w1.weight"] == "F16"
        assert {kinds[n] for n in kinds if "hc_" in n or "norm" in n or "gate_inp" in n} == {"F32"}
        assert not any("token_embd" in n or n == "output.weight" for n in kinds)
    blocks = []
    for outtype in ("auto", "f32"):
        with opened(release.gguf, gguf_of("released", outtype)) as (target, drafter):
            for _, k in target.prefill(prompt(5, 40)):
                drafter.absorb(target.features(k))
            blocks.append(drafter.propose(70).hidden.copy())
    difference = np.abs(blocks[0] - blocks[1]).mean() / np.abs(blocks[1]).mean()
    assert 0 < difference < 0.05


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
def test_other_types_hold_the_same_values(outtype, releases, gguf_of):
    with GgufFile(gguf_of("f32", outtype)) as file:
        for name, source in (
            ("fc.weight", "mtp.0.main_proj.weight"),
            ("blk.1.attn_output_a.weight", "mtp.1.attn.wo_a.weight"),
            ("markov_w2.weight", "mtp.1.markov_head.markov_w2.weight"),
        ):
            expected = releases["f32"].values[source].numpy()
            scale = np.abs(expected).max()
            np.testing.assert_allclose(file.tensor(name), expected, atol=1e-2 * scale)
        found = file.tensor("blk.0.ffn_down_exps.weight", 3, 4)[0]
        expected = releases["f32"].values["mtp.0.ffn.experts.3.w2.weight"].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-2 * np.abs(expected).max())


def test_a_generation_with_it_gives_the_targets_own_text(releases, gguf_of):
    """The target's memory can forget 16 tokens and no more: chains, not trees.

    Long enough for every kind of compression, with rounds that accept a part of the chain.
    """
    release, texts, accepted = releases["f32"], [], 0
    for drafter in (None, gguf_of("f32", "f32")):
        with Engine.load(
            release.gguf, drafter, n_ctx=512, n_threads=1, kv_type="f32", flash_attn=False
        ) as engine:
            for ids, tokens in (
                ([*prompt(1, 60), *prompt(1, 60), *prompt(1, 5)], 5),
                ([*prompt(1, 60), *prompt(1, 60), *prompt(1, 5), *prompt(2, 4)], 64),
                (prompt(1, 30), 5),
            ):
                options = DraftOptions(tokens=tokens if drafter else 0, width=4, context=tokens > 5)
                result = engine.complete(ids, max_tokens=60, draft=options, stop_token_ids=())
                texts.append(result.token_ids)
                if drafter is not None:
                    assert 5 <= max(r.verified for r in result.rounds) <= 16
                    accepted += sum(r.accepted for r in result.rounds)
    assert texts[:3] == texts[3:]
    assert all(len(text) == 60 for text in texts)
    assert accepted > 3


@pytest.mark.parametrize("name", ["f32", "released"])
@pytest.mark.parametrize("outtype", ["auto", "f32", "bf16", "q6_k", "q4_k", "q4_0", "q2_k"])
def test_verification_passes_for_every_kind_of_type(name, outtype, releases, tmp_path):
    release = releases[name]
    result = convert(release.path, release.gguf, tmp_path / "d.gguf", outtype=outtype, verify=True)
    assert result.report is not None and result.report.fine
    found = {d.what: d.relative for d in result.report.differences}
    assert set(found) == {"hidden states", "base logits", "logits", "chain", "confidence"}
    if result.outtype == "f32":
        assert max(found.values()) < 1e-4
    with GgufFile(result.path) as file:
        kind = file.tensors["blk.0.ffn_up_exps.weight"].type_name
        packed = name == "released" and outtype not in ("f32", "bf16", "q2_k")
        assert (kind == "MXFP4") == packed


@pytest.mark.parametrize(
    ("table", "a", "b"),
    [("STAGE", "ffn_gate_shexp", "ffn_up_shexp"), ("EXPERTS", "ffn_gate_exps", "ffn_up_exps"),
     ("STAGE", "hc_attn_fn", "hc_ffn_fn"), ("STAGE", "attn_norm", "ffn_norm")],
)  # fmt: skip
def test_verification_fails_when_tensors_are_mixed_up(table, a, b, releases, tmp_path, monkeypatch):
    swap = {f"{a}.weight": f"{b}.weight", f"{b}.weight": f"{a}.weight"}
    rules = [replace(r, name=swap.get(r.name, r.name)) for r in getattr(deepseek4, table)]
    monkeypatch.setattr(deepseek4, table, tuple(rules))
    release = releases["f32"]
    with pytest.raises(LocalspecError, match="is not what its checkpoint is"):
        convert(release.path, release.gguf, tmp_path / "d.gguf", verify=True)
    assert not (tmp_path / "d.gguf").exists()


# ---- how it is read


def test_only_shards_that_hold_the_drafter_are_read(releases, gguf_of, copy, tmp_path):
    """The target's own shards may be damaged or missing."""
    release = releases["released"]
    ours = {file for name, file in release.shards.items() if name.startswith("mtp.")}
    others = set(release.shards.values()) - ours
    assert len(ours) == 2 and len(others) == 2
    first, second = sorted(others)
    (copy / first).unlink()
    (copy / second).write_bytes(b"garbage")
    convert(copy, release.gguf, tmp_path / "d.gguf")
    assert (tmp_path / "d.gguf").read_bytes() == gguf_of("released", "auto").read_bytes()


def test_one_file_without_an_index(releases, gguf_of, tmp_path):
    release = releases["released"]
    path = tmp_path / "one"
    path.mkdir()
    shutil.copy(release.path / "config.json", path)
    v4.save(path / "model.safetensors", release.stored)
    convert(path, release.gguf, tmp_path / "d.gguf")
    assert (tmp_path / "d.gguf").read_bytes() == gguf_of("released", "auto").read_bytes()


def test_memory_stays_that_of_a_chunk(releases, copy, tmp_path, monkeypatch):
    """A huge target beside it, and a drafter many chunks long."""
    release = releases["released"]
    for shard in set(release.shards.values()):
        if not any(n.startswith("mtp.") for n, file in release.shards.items() if file == shard):
            os.truncate(copy / shard, 1 << 36)  # sparse
    for module in (deepseek4_source, deepseek4):
        monkeypatch.setattr(module, "CHUNK_VALUES", 1 << 11)
    for outtype in ("f32", "auto"):
        convert(copy, release.gguf, tmp_path / "warm.gguf", outtype=outtype)
        tracemalloc.start()
        convert(copy, release.gguf, tmp_path / "d.gguf", outtype=outtype)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert (
            peak < 600_000 < (release.path / "model-00003-of-00004.safetensors").stat().st_size * 4
        )
    assert (tmp_path / "d.gguf").read_bytes() == (tmp_path / "warm.gguf").read_bytes()


@pytest.mark.parametrize("outtype", ["auto", "f32"])
def test_progress_counts_every_stored_byte_once(outtype, releases, tmp_path):
    calls = []
    convert(
        releases["released"].path, releases["released"].gguf, tmp_path / "d.gguf",
        outtype=outtype, progress=lambda *call: calls.append(call),
    )  # fmt: skip
    source = Deepseek4Checkpoint(releases["released"].path)
    total = sum(source.cost(name) for name in source.tensors)
    assert {call[4] for call in calls} == {total} and calls[-1][3] == total
    done = [call[3] for call in calls]
    assert done == sorted(done)
    assert [call[1] for call in calls][-1] == calls[0][2] - 1


def test_an_interrupted_conversion_leaves_nothing(releases, tmp_path):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(
            releases["f32"].path, releases["f32"].gguf, tmp_path / "d.gguf", progress=stop
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_8_and_4_bit_floats_have_the_values_of_torch(tmp_path):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(deepseek4_source._E4M3, expected)
    scales = codes.view(torch.float8_e8m0fnu).float().numpy()
    raw = ("F8_E8M0", (8, 32), codes.numpy().tobytes())
    checkpoint = Deepseek4Checkpoint.__new__(Deepseek4Checkpoint)
    v4.save(tmp_path / "s.safetensors", {"s": raw})
    (stored,) = deepseek4_source._read_header(tmp_path / "s.safetensors")
    checkpoint._scales = {"x": stored}
    np.testing.assert_array_equal(checkpoint._scale_values("x").reshape(-1), scales)


def test_rope_parameters_of_newer_configs():
    config = dict(v4.CONFIG)
    del config["rope_theta"]
    assert Deepseek4Config.from_dict(config).rope_theta == 10000
    main = {"main": {"rope_theta": 50000.0}, "compress": {"rope_theta": 160000.0}}
    assert Deepseek4Config.from_dict(config | {"rope_parameters": main}).rope_theta == 50000
    flat = {"rope_parameters": {"rope_theta": 70000.0, "rope_type": "yarn"}}
    assert Deepseek4Config.from_dict(config | flat).rope_theta == 70000


def test_standalone_files_hold_the_targets_matrices(releases, tmp_path):
    release = releases["f32"]
    convert(release.path, release.gguf, tmp_path / "d.gguf", standalone=True)
    with GgufFile(tmp_path / "d.gguf") as file:
        np.testing.assert_array_equal(file.tensor("token_embd.weight"), release.embedding)
        np.testing.assert_array_equal(file.tensor("output.weight"), release.output)
    Model(tmp_path / "d.gguf").close()


def test_routing_of_images_is_left_out(copy, releases, gguf_of, tmp_path):
    change(
        copy,
        releases["released"],
        {"mtp.0.ffn.gate.bias_vl": ("F32", (v4.EXPERTS,), bytes(4 * v4.EXPERTS))},
    )
    convert(copy, releases["released"].gguf, tmp_path / "d.gguf")
    assert (tmp_path / "d.gguf").read_bytes() == gguf_of("released", "auto").read_bytes()


def test_the_command_line(releases, tmp_path, monkeypatch):
    from localspec.cli.convert import convert as command
    from localspec.cli.inspect import inspect

    monkeypatch.chdir(tmp_path)
    release = releases["released"]
    arguments = [str(release.path), "--target", str(release.gguf)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    words = "released-q8_0.gguf: vanilla drafter, q8_0, 57 tensors"
    assert words in result.output.replace("\n", "")
    result = CliRunner().invoke(inspect, ["released-q8_0.gguf"])
    assert result.exit_code == 0, result.output
    assert "DSpark" in result.output, result.output


# ---- what is refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dspark_noise_token_id": None}, "dspark_noise_token_id is missing"),
        ({"dspark_target_layer_ids": None}, "dspark_target_layer_ids is missing"),
        ({"dspark_markov_rank": None}, "dspark_markov_rank is missing"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"dspark_block_size": "5"}, "dspark_block_size must be an integer"),
        ({"dspark_block_size": 1}, "dspark_block_size is 1"),
        ({"dspark_noise_token_id": v4.V}, "dspark_noise_token_id is 320, outside"),
        ({"dspark_target_layer_ids": [0, 3]}, "has 3; the model has layers 0 to 2"),
        ({"dspark_target_layer_ids": [1, 0]}, "strictly increasing"),
        ({"dspark_target_layer_ids": [True]}, "dspark_target_layer_ids has"),
        ({"dspark_markov_rank": 32}, "markov_w1.weight has shape [320, 16], config.json asks"),
        ({"model_type": "deepseek_v41_text"}, "model_type is 'deepseek_v41_text'"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ({"hc_mult": 2}, "hc_mult is 2"),
        ({"o_groups": 3}, "o_groups is 3, which does not divide 4"),
        ({"n_routed_experts": 9}, "ffn.experts.8.w1.weight is missing (and 5 more)"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"hidden_size": 160}, "its width (hidden_size) is 160, the target's is 192"),
        ({"num_hidden_layers": 4}, "its layer count (num_hidden_layers) is 4, the target's is 3"),
        ({"vocab_size": 640}, "its vocabulary (vocab_size) is 640"),
    ],
)
def test_settings_that_are_missing_or_wrong(fields, words, copy, releases, tmp_path):
    edit(copy, **fields)
    assert words in refused(copy, releases["released"].gguf, tmp_path)


def change(
    path: Path, release: v4.Tiny, added: dict[str, v4.Stored], without: tuple[str, ...] = ()
) -> None:
    """Write a checkpoint again with other tensors; new ones go into a shard of the drafter."""
    tensors = {
        n: t for n, t in (release.stored | added).items() if not n.startswith(without or "?")
    }
    shards = dict.fromkeys(added, "model-00003-of-00004.safetensors") | release.shards
    v4.write(path, tensors, {name: shards[name] for name in tensors})


def test_missing_shards_and_tensors(copy, releases, tmp_path):
    target = releases["released"].gguf
    change(copy, releases["released"], {}, without=("mtp.1.attn.wkv.",))
    assert "tensor mtp.1.attn.wkv.weight is missing" in refused(copy, target, tmp_path)
    (copy / "model-00003-of-00004.safetensors").unlink()
    words = refused(copy, target, tmp_path)
    assert "names the shard 'model-00003-of-00004.safetensors'" in words and "download it" in words
    (copy / INDEX).unlink()
    assert "has neither model.safetensors nor" in refused(copy, target, tmp_path)


def test_a_whole_stage_is_missing(copy, releases, tmp_path):
    release = releases["released"]
    change(copy, release, {}, without=("mtp.0.",))
    assert "layer 0 (mtp.0.*) is missing" in refused(copy, release.gguf, tmp_path)


def test_an_index_that_lies(copy, releases, tmp_path):
    release, name = releases["released"], "mtp.1.attn.attn_sink"
    index = json.loads((copy / INDEX).read_text())
    (other,) = {f"model-0000{i}-of-00004.safetensors" for i in (2, 3)} - {release.shards[name]}
    for listed in (other, None):
        entries = index["weight_map"] | {name: listed}
        entries = {key: file for key, file in entries.items() if file is not None}
        (copy / INDEX).write_text(json.dumps({"weight_map": entries}))
        words = refused(copy, release.gguf, tmp_path)
        assert name in words and "download both again" in words
    for text in ("[]", "{", '{"weight_map": 3}'):
        (copy / INDEX).write_text(text)
        assert "it holds no weight_map" in refused(copy, release.gguf, tmp_path)


def test_a_checkpoint_without_the_drafter(copy, releases, tmp_path):
    change(copy, releases["released"], {}, without=("mtp.",))
    assert "but no tensors of one (mtp.N.*)" in refused(copy, releases["f32"].gguf, tmp_path)


@pytest.mark.parametrize(
    ("added", "words"),
    [
        ({"mtp.1.attn.wq_a.scale": ("F32", (1, 1), bytes(4))}, "wq_a.scale (F32 [1, 1]) is no"),
        ({"mtp.1.attn.wq_a.scale": ("I64", (2, 2), bytes(32))}, "wq_a.scale (I64 [2, 2]) is no"),
        ({"mtp.1.norm.weight": ("I64", (v4.D,), bytes(8 * v4.D))}, "norm.weight is stored as I64"),
        ({"mtp.1.e_proj.weight": ("F32", (1, 1), bytes(4))}, "mtp.1.e_proj.weight is unknown"),
        ({"mtp.1.norm.weight": ("F32", (3,), bytes(12))}, "norm.weight has shape [3]"),
        (
            {"mtp.1.norm.weight": ("F32", (v4.D,), np.full(v4.D, np.nan, "f4").tobytes())},
            "norm.weight has NaN values",
        ),
        (
            {"mtp.1.attn.wq_a.scale": ("F8_E8M0", (2, 2), b"\xff" * 4)},
            "wq_a.weight has NaN values",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(added, words, copy, releases, tmp_path):
    change(copy, releases["released"], added)
    assert words in refused(copy, releases["released"].gguf, tmp_path)


def test_scales_of_experts_that_are_no_numbers(copy, releases, tmp_path):
    name = "mtp.1.ffn.experts.2.w2.scale"
    change(
        copy,
        releases["released"],
        {name: ("F8_E8M0", (v4.D, v4.FFN // 32), b"\xff" * (v4.D * v4.FFN // 32))},
    )
    for outtype in ("auto", "f32"):
        with pytest.raises(LocalspecError, match=r"experts.2.w2.weight has NaN values"):
            convert(copy, releases["released"].gguf, tmp_path / "x.gguf", outtype=outtype)


@pytest.mark.parametrize("shard", ["../elsewhere.safetensors", "/etc/hostname"])
def test_shards_outside_the_checkpoint(shard, copy, releases, tmp_path):
    shutil.copy(copy / "model-00003-of-00004.safetensors", tmp_path / "elsewhere.safetensors")
    index = json.loads((copy / INDEX).read_text())
    for name, where in index["weight_map"].items():
        if where == "model-00003-of-00004.safetensors":
            index["weight_map"][name] = shard
    (copy / INDEX).write_text(json.dumps(index))
    assert f"names the shard {shard!r}" in refused(copy, releases["released"].gguf, tmp_path)


def test_another_target(releases, tmp_path_factory, tmp_path):
    other = tiny.build_target(tmp_path_factory.mktemp("qwen3"))
    words = refused(releases["f32"].path, other.gguf, tmp_path)
    assert "holds the drafter of a DeepSeek-V4 model" in words and "a qwen3 model" in words


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dflash.attention.output_group_count", 3),
        ("dflash.attention.output_group_count", 0),
        ("dflash.hyper_connection.count", 2),
        ("dflash.attention.sliding_window", 0),
        ("dflash.expert_used_count", 9),
        ("dflash.rope.dimension_count", 65),
    ],
)
def test_headers_on_which_llama_cpp_would_end_the_process(key, value, releases, gguf_of, tmp_path):
    path = Path(shutil.copy(gguf_of("f32", "f32"), tmp_path / "d.gguf"))
    with GgufFile(path) as file:
        _, end = file.value_span(key)
    data = bytearray(path.read_bytes())
    data[end - 4 : end] = value.to_bytes(4, "little")
    path.write_bytes(data)
    with (
        GgufFile(releases["f32"].gguf) as target,
        GgufFile(path) as drafter,
        pytest.raises(LocalspecError, match=key.split(".", 1)[1]),
    ):
        check_pair(target, drafter)


def test_a_drafter_of_its_own_is_not_mistaken_for_one(tmp_path):
    assert not deepseek4.recognised(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 5, "dspark_block_size": 5}))
    assert not deepseek4.recognised(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"dspark_block_size": 5}))
    assert deepseek4.recognised(tmp_path)


NOT_READ = (
    "architectures num_key_value_heads topk_method num_hash_layers compress_ratios rope_scaling "
    "compress_rope_theta index_n_heads index_head_dim index_topk num_nextn_predict_layers "
    "tie_word_embeddings quantization_config"
).split()


@pytest.mark.parametrize("field", sorted(v4.CONFIG.keys() - NOT_READ))
def test_no_value_of_a_setting_ends_in_anything_but_a_line(field, copy, releases, tmp_path):
    values = (None, "x", [], [1], {}, True, -1, 0, 1, 2**31, 2**70, 1.5, 1e308)
    for value in values:
        config = v4.CONFIG | {field: value}
        (copy / "config.json").write_text(json.dumps(config))
        out = tmp_path / "x.gguf"
        try:
            if field in ("dspark_block_size", "model_type"):  # may be taken for another drafter
                Deepseek4Checkpoint(copy)
            convert(copy, releases["released"].gguf, out)
        except LocalspecError as error:
            assert "\n" not in str(error) and not out.exists()
        else:
            with GgufFile(releases["released"].gguf) as target, GgufFile(out) as drafter:
                check_pair(target, drafter)
            out.unlink()
