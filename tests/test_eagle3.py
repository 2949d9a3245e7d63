"""Eagle3 drafters: converted, run by llama.cpp, compared with the torch reference, drafting."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny_eagle
from conftest import PLAIN, prompt_of, same_text
from safetensors.numpy import load_file, save_file

import tiny
from localspec import pairs
from localspec.cli.inspect import describe, in_words, misfit
from localspec.convert import convert, eagle3
from localspec.eagle import EagleDrafter
from localspec.engine import DraftOptions, Engine
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile
from localspec.models.eagle_config import EagleConfig
from localspec.sampling import SamplingParams

CHAIN, TREE = DraftOptions(tokens=7), DraftOptions(tokens=15, width=3)
GOLDEN = Path(
    os.environ.get("LOCALSPEC_GOLDEN", Path(__file__).resolve().parents[1] / "../shared/golden")
)
# Options of tiny_eagle.build for what SpecForge exports.
EXPORTS: dict[str, dict[str, Any]] = {
    "reduced": {},
    "whole vocabulary": {"draft_vocab": None},
    "target's output": {"draft_vocab": None, "own_output": False},
    "default layers": {"layers": None},
    "norm before residual": {"norm_before_residual": True},
    "speculators": {"packaging": "speculators"},
    "deepspec's release": {"packaging": "deepspec", "layers": (0, 1, 2, 3, 4)},
    "layers counted from inputs": {
        "layers": None,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    },
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyModel:
    """Six layers, so that SpecForge's default choice of layers exists."""
    return tiny.build_target(tmp_path_factory.mktemp("target"), layers=6)


@pytest.fixture(scope="module")
def drafter(
    target: tiny.TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    """Name from EXPORTS -> (checkpoint, F32 GGUF)."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("eagle")
            checkpoint = tiny_eagle.build(folder / "checkpoint", target, **EXPORTS[name])
            convert(checkpoint, target.gguf, folder / "d.gguf", outtype="f32")
            made[name] = checkpoint, folder / "d.gguf"
        return made[name]

    return get


@pytest.fixture
def load(
    target: tiny.TinyModel, drafter: Callable[[str], tuple[Path, Path]]
) -> Iterator[Callable[..., Engine]]:
    loaded: list[Engine] = []

    def get(name: str = "reduced", **options: Any) -> Engine:
        options = {"n_ctx": 256, "n_threads": 1} | options
        loaded.append(Engine.load(target.gguf, drafter(name)[1], **options))
        return loaded[-1]

    yield get
    for engine in loaded:
        engine.close()


def eagle_of(engine: Engine) -> EagleDrafter:
    assert isinstance(engine._drafter, EagleDrafter)
    return engine._drafter


def feed(engine: Engine, tokens: list[int]) -> np.ndarray:
    return np.concatenate([engine._target.features(n) for _, n in engine._target.prefill(tokens)])


@pytest.mark.parametrize("name", EXPORTS)
def test_hidden_states_logits_and_chain_are_the_references(
    name: str, target: tiny.TinyModel, drafter: Any, load: Callable[..., Engine]
) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    from localspec.models.eagle import load_eagle

    engine = load(name)
    embed = torch.from_numpy(target.tensors["model.embed_tokens.weight"])
    checkpoint = drafter(name)[0]
    reference = load_eagle(checkpoint, embed, target.tensors["lm_head.weight"])
    prompt, anchor = prompt_of(3, 45), 60
    features = feed(engine, prompt)
    eagle = eagle_of(engine)
    eagle.absorb(features[:20], prompt[:20])
    eagle.propose(int(prompt[20]))  # a draft in between leaves nothing behind
    eagle.absorb(features[20:], prompt[20:])
    known = torch.from_numpy(np.array([*prompt, anchor]))
    chain, logits, states = reference.propose(torch.from_numpy(features), known, 6)
    rollout = eagle.propose(anchor)
    row, ours = rollout.root()[0].copy(), []
    scale = float(states.abs().max())
    for d in range(6):
        expected = logits[d].numpy()
        there = np.isfinite(expected)
        assert (np.isfinite(row) == there).all()
        # The KV cache holds half-precision numbers.
        assert np.abs(row[there] - expected[there]).max() < 0.02
        assert np.abs(rollout._states[0] - states[d].numpy()).max() < 2e-3 * scale
        ours.append(int(row.argmax()))
        if d < 5:
            row = rollout.expand([0], ours[-1:])[0].copy()
    assert ours == chain.tolist()


@pytest.mark.parametrize("name", ["reduced", "deepspec's release"])
def test_every_node_of_a_tree_equals_its_path_drafted_alone(
    name: str, load: Callable[..., Engine]
) -> None:
    engine = load(name)
    prompt, anchor = prompt_of(1, 30), 70
    features = feed(engine, prompt)
    eagle = eagle_of(engine)
    eagle.absorb(features, prompt)
    rng = np.random.default_rng(0)
    tokens = rng.integers(40, 300, 40).tolist()
    # Rows: children of rows of the level before, with a path that dies and branches late.
    origins = [[0, 0, 0], [0, 0, 2, 1], [3, 1, 1, 1, 0], [2, 4, 4]]
    paths: list[tuple[int, ...]] = [()]
    rollout = eagle.propose(anchor)
    rollout.root()
    together = []
    for origin in origins:
        new = [tokens.pop() for _ in origin]
        rows = rollout.expand(origin, new).copy()
        paths = [(*paths[o], t) for o, t in zip(origin, new, strict=True)]
        together += list(zip(paths, rows, strict=True))
    for path, row in together:
        alone = eagle.propose(anchor)
        alone.root()
        for token in path:
            last = alone.expand([0], [token])[0]
        there = np.isfinite(row)
        assert np.abs(last[there] - row[there]).max() < 0.02


@pytest.mark.parametrize("options", [CHAIN, TREE, DraftOptions(tokens=30, width=4)])
@pytest.mark.parametrize("name", ["reduced", "deepspec's release"])
def test_greedy_text_is_the_targets(
    name: str, options: DraftOptions, load: Callable[..., Engine]
) -> None:
    engine = load(name)
    accepted = 0
    for seed in range(4):
        prompt = prompt_of(seed)
        plain = engine.complete(prompt, max_tokens=50, draft=PLAIN)
        result = engine.complete(prompt, max_tokens=50, draft=options)
        accepted += sum(r.accepted for r in result.rounds)
        same_text(engine, prompt, plain.token_ids, result.token_ids)
    assert accepted > 30


def test_auto_policy_with_an_eagle_drafter(load: Callable[..., Engine]) -> None:
    engine = load()
    engine.tune()
    assert engine._auto is not None
    prompt = prompt_of(2)
    plain = engine.complete(prompt, max_tokens=60, draft=PLAIN)
    for params in (None, SamplingParams(temperature=0.8, seed=1)):
        result = engine.complete(prompt, params, max_tokens=60)
        assert result.token_ids
        if params is None:
            same_text(engine, prompt, plain.token_ids, result.token_ids)


@pytest.mark.parametrize("name", ["reduced", "deepspec's release"])
def test_a_shortened_and_continued_conversation_drafts_as_a_fresh_one(
    name: str, load: Callable[..., Engine]
) -> None:
    engine, fresh = load(name), load(name)
    prompt = prompt_of(5, 60)
    engine.complete(prompt, max_tokens=30, draft=TREE)
    longer = [*prompt[:41], *prompt_of(6, 20)]
    engine.complete(longer, max_tokens=20, draft=CHAIN)  # cut at 41, inside the prompt
    again = engine.complete(prompt[:50], max_tokens=20, draft=CHAIN)
    expected = fresh.complete(prompt[:50], max_tokens=20, draft=CHAIN)
    assert again.token_ids == expected.token_ids
    assert [r.accepted for r in again.rounds] == [r.accepted for r in expected.rounds]


def test_a_window_forgets_and_still_drafts(load: Callable[..., Engine]) -> None:
    engine = load(n_ctx=900, drafter_window=64)
    prompt = prompt_of(7, 700)
    plain = engine.complete(prompt, max_tokens=20, draft=PLAIN)
    result = engine.complete([*prompt[:-1], prompt[-1]], max_tokens=20, draft=TREE)
    same_text(engine, prompt, plain.token_ids, result.token_ids)
    assert eagle_of(engine)._first > 500


@pytest.mark.parametrize("acceptance", ["match", "rejection"])
def test_sampled_text_follows_the_target(acceptance: str, load: Callable[..., Engine]) -> None:
    """The second token's distribution, with and without drafts (300 seeds each)."""
    engine = load()
    prompt = prompt_of(4)
    counts = []
    for options in (PLAIN, TREE):
        tokens = np.zeros(320)
        for seed in range(300):
            params = SamplingParams(temperature=1.0, top_k=4, seed=seed, acceptance=acceptance)
            result = engine.complete(prompt, params, max_tokens=2, draft=options, stop_token_ids=[])
            tokens[result.token_ids[-1]] += 1
        counts.append(tokens)
    together = counts[0] + counts[1]
    seen = together > 10
    chi2 = float((((counts[0] - counts[1]) ** 2)[seen] / together[seen]).sum())
    assert chi2 < seen.sum() + 4 * np.sqrt(2 * seen.sum()) + 4


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no golden data (set LOCALSPEC_GOLDEN)")
def test_on_the_golden_target(tmp_path: Path) -> None:
    folder = GOLDEN / "tiny-qwen3"
    model = tiny.TinyModel(
        folder,
        json.loads((folder / "config.json").read_text()),
        golden_tensors(folder),
        np.zeros((0, 0)),
        folder / "tiny-qwen3-f32.gguf",
    )
    n = model.config["num_hidden_layers"]
    checkpoint = tiny_eagle.build(tmp_path / "c", model, layers=(0, n // 2, n - 2))
    convert(checkpoint, model.gguf, tmp_path / "d.gguf", outtype="f32")
    with Engine.load(model.gguf, tmp_path / "d.gguf", n_ctx=256, n_threads=1) as engine:
        for text in ("The ", "def add(a, b):"):
            prompt = engine.tokenize(text)
            plain = engine.complete(prompt, max_tokens=40, draft=PLAIN)
            for options in (CHAIN, TREE):
                result = engine.complete(prompt, max_tokens=40, draft=options)
                same_text(engine, prompt, plain.token_ids, result.token_ids)


def golden_tensors(folder: Path) -> dict[str, np.ndarray]:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    found = load_torch(str(folder / "model.safetensors"))
    assert torch is not None
    tensors = {name: value.float().numpy() for name, value in found.items()}
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    return tensors


def test_quantised_with_embeddings_of_its_own(target: tiny.TinyModel, tmp_path: Path) -> None:
    checkpoint = tiny_eagle.build(tmp_path / "c", target)
    result = convert(checkpoint, target.gguf, tmp_path / "d.gguf", outtype="q8_0", standalone=True)
    assert result.outtype == "q8_0"
    with GgufFile(tmp_path / "d.gguf") as file:
        assert file.tensors["blk.0.attn_q.weight"].type_name == "Q8_0"
        assert file.tensors["blk.0.attn_norm_2.weight"].type_name == "F32"
        assert file.tensors["d2t"].type_name == "I64"
        assert "token_embd.weight" in file.tensors
    with Engine.load(target.gguf, tmp_path / "d.gguf", n_ctx=128, n_threads=1) as engine:
        prompt = prompt_of(0)
        plain = engine.complete(prompt, max_tokens=30, draft=PLAIN)
        fast = engine.complete(prompt, max_tokens=30, draft=TREE)
        same_text(engine, prompt, plain.token_ids, fast.token_ids)


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0", "q4_0"])
def test_verified_in_every_type(outtype: str, target: tiny.TinyModel, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    for name, options in EXPORTS.items():
        checkpoint = tiny_eagle.build(tmp_path / name, target, **options)
        out = tmp_path / "d.gguf"
        result = convert(checkpoint, target.gguf, out, outtype=outtype, verify=True)
        assert result.report is not None and result.report.fine
        assert {d.what for d in result.report.differences} == {
            "hidden states", "base logits", "logits", "chain",
        }  # fmt: skip


def test_a_wrong_file_does_not_verify(
    target: tiny.TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    checkpoint = tiny_eagle.build(tmp_path / "c", target)
    monkeypatch.setattr(eagle3, "to_neighbours", lambda values, head: values)
    with pytest.raises(LocalspecError, match="is not what its checkpoint is"):
        convert(checkpoint, target.gguf, tmp_path / "d.gguf", verify=True)


def test_inspect(target: tiny.TinyModel, drafter: Any) -> None:
    with GgufFile(drafter("reduced")[1]) as file, GgufFile(target.gguf) as tgt:
        found = describe(file)
        assert (found["family"], found["depths"], found["drafts_tokens"]) == ("Eagle3", 7, 200)
        assert found["standalone"] is False and found["reads_target_layers"] == [1, 2, 3]
        assert "Eagle3" in in_words(found)
        assert misfit(file, tgt) is None and misfit(tgt, file) is None


def test_config_of_both_packagings(target: tiny.TinyModel, tmp_path: Path) -> None:
    ours = EagleConfig.from_file(tiny_eagle.build(tmp_path / "s", target))
    assert (ours.packaging, ours.draft_vocab_size, ours.qk_norm) == ("specforge", 200, False)
    assert ours.layers_of(36) == (0, 1, 2) and ours.depth == 7
    default = EagleConfig.from_file(tiny_eagle.build(tmp_path / "n", target, layers=None))
    assert default.layers_of(36) == (1, 17, 32)
    release = tiny_eagle.build(
        tmp_path / "r", target, packaging="deepspec", layers=(0, 1, 2, 3, 4), ttt_length=5
    )
    theirs = EagleConfig.from_file(release)
    assert (theirs.packaging, theirs.num_features, theirs.qk_norm, theirs.depth) == (
        "deepspec", 5, True, 5,
    )  # fmt: skip


def test_files_of_deepspecs_release_belong_together(
    target: tiny.TinyModel, drafter: Any, tmp_path: Path
) -> None:
    _, made = drafter("deepspec's release")
    out = Path(shutil.copy(made, tmp_path / "d.gguf"))
    with pytest.raises(LocalspecError, match=r"its layer in d.heads.gguf, which is missing"):
        Engine.load(target.gguf, out, n_ctx=128, n_threads=1)
    other = tiny_eagle.build(tmp_path / "c", target, seed=5, **EXPORTS["deepspec's release"])
    convert(other, target.gguf, tmp_path / "o.gguf", outtype="f32")
    shutil.copy(tmp_path / "o.heads.gguf", tmp_path / "d.heads.gguf")
    with pytest.raises(LocalspecError, match="belongs to another drafter"):
        Engine.load(target.gguf, out, n_ctx=128, n_threads=1)
    with pytest.raises(LocalspecError, match="cannot be made standalone"):
        convert(other, target.gguf, tmp_path / "s.gguf", standalone=True)


def test_the_reference_runs_deepspecs_release(target: tiny.TinyModel, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from localspec.models.eagle import load_eagle

    release = tiny_eagle.build(tmp_path / "r", target, packaging="deepspec", layers=(0, 1, 2, 3, 4))
    model = load_eagle(release)
    features = torch.randn(9, 5 * 96, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(20, 30)
    chain, logits, _ = model.propose(features, tokens, 4)
    # Drafting step by step equals one causal pass over the same rows.
    cache = model.new_cache()
    states = model(tokens[1:], model.fuse(features), cache, 0)
    assert int(model.logits(states)[-1].argmax()) == int(chain[0])
    assert logits.shape == (4, 320) and torch.isfinite(logits).all()


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "fc_norm": ({"fc_norm": True}, "fc_norm is true"),
    "norm_output": ({"norm_output": False}, "norm_output is false"),
    "two layers": ({"num_hidden_layers": 2}, "one layer"),
    "gelu": ({"hidden_act": "gelu"}, "only 'silu'"),
    "yarn": ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "'yarn'"),
    "other vocabulary": ({"vocab_size": 400}, "vocabulary"),
    "other width": ({"target_hidden_size": 128}, "feature width"),
    "deep": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, "usable: 0 to 4"),
    "two features": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "reads 2"),
    "no map": ({"draft_vocab_size": 150}, "d2t does not name 150"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_converted_is_refused(
    name: str, target: tiny.TinyModel, tmp_path: Path
) -> None:
    changes, message = BROKEN[name]
    checkpoint = tiny_eagle.build(tmp_path / "c", target, **changes)
    with pytest.raises(LocalspecError, match=message) as caught:
        convert(checkpoint, target.gguf, tmp_path / "d.gguf")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*d.gguf*"))


def test_tensors_that_do_not_belong_are_refused(target: tiny.TinyModel, tmp_path: Path) -> None:
    checkpoint = tiny_eagle.build(tmp_path / "c", target)
    file = checkpoint / "model.safetensors"
    tensors = load_file(str(file))
    for change, message in (
        ({"fc_norm.0.weight": np.ones(96, np.float32)}, "fc_norm.0.weight is unknown"),
        ({"fc.weight": None}, "fc.weight is missing"),
        ({"fc.weight": np.ones((96, 96), np.float32)}, "fc.weight has shape"),
        ({"d2t": np.zeros(200, np.int64) + 200}, "d2t does not name 200"),
        ({"d2t": None}, "there is no d2t table"),
    ):
        changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        save_file(changed, str(file))
        with pytest.raises(LocalspecError, match=message):
            convert(checkpoint, target.gguf, tmp_path / "d.gguf")


def rewritten(
    source: Path, out: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray | None]
) -> Path:
    """A GGUF with some metadata and tensors replaced; None leaves a tensor out."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "eagle3")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = keys.get(field.name, field.contents())
        writer.add_key_value(field.name, value, kind, sub)
    for tensor in reader.tensors:
        value = tensors.get(tensor.name, tensor.data)
        if value is not None:
            writer.add_tensor(tensor.name, np.array(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def damaged(d2t: np.ndarray) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    far, twice = d2t.copy(), d2t.copy()
    far[3], twice[3] = 320, twice[4]
    ones = np.ones
    return [
        ({"eagle3.block_count": 2}, {}, "of one layer only"),
        ({"eagle3.target_layers": [1, 2]}, {}, "eagle3.target_layers"),
        ({"eagle3.target_layers": [1, 2, 6]}, {}, "reads target layer 6"),
        ({"eagle3.target_hidden_size": 48}, {}, "features of width 48"),
        ({"eagle3.attention.head_count_kv": 3}, {}, "head_count_kv"),
        ({"eagle3.attention.value_length": 8}, {}, "do not fit together"),
        ({"eagle3.rope.dimension_count": 18}, {}, "do not fit together"),
        ({"eagle3.attention.layer_norm_rms_epsilon": -1.0}, {}, "epsilon"),
        ({"localspec.draft_depth": 0}, {}, "draft_depth"),
        ({}, {"d2t": far}, "outside the vocabulary"),
        ({}, {"d2t": twice}, "or one twice"),
        ({}, {"d2t": None}, "d2t is missing"),
        ({}, {"d2t": d2t[:150]}, "for 200 rows"),
        ({}, {"d2t": d2t.astype(np.int32)}, "d2t is I32"),
        ({}, {"blk.0.attn_norm.weight": ones(96, np.float16)}, "attn_norm"),
        ({}, {"token_embd.weight": ones((8, 96), np.float32)}, "token_embd.weight is"),
    ]


def test_what_llama_cpp_would_abort_on_is_refused_first(
    target: tiny.TinyModel, drafter: Any, tmp_path: Path
) -> None:
    good = drafter("reduced")[1]
    with GgufFile(good) as file:
        cases = damaged(file.integers("d2t"))
    assert not pairs.read_drafter(GgufFile(good)).has_confidence
    for keys, tensors, message in cases:
        extra = {k: v for k, v in tensors.items() if k == "token_embd.weight"}
        bad = tmp_path / "bad.gguf"
        if extra:
            checkpoint = tiny_eagle.build(tmp_path / "c", target)
            convert(checkpoint, target.gguf, tmp_path / "own.gguf", standalone=True)
            rewritten(tmp_path / "own.gguf", bad, keys, tensors)
        else:
            rewritten(good, bad, keys, tensors)
        with pytest.raises(LocalspecError, match=message) as caught:
            Engine.load(target.gguf, bad, n_ctx=128, n_threads=1)
        assert "\n" not in str(caught.value)


def test_a_copy_rewritten_unchanged_still_loads(
    target: tiny.TinyModel, drafter: Any, tmp_path: Path
) -> None:
    """So that the cases above are refused for their change alone."""
    same = rewritten(drafter("reduced")[1], tmp_path / "same.gguf", {}, {})
    Engine.load(target.gguf, same, n_ctx=128, n_threads=1).close()
    shutil.copy(target.gguf, tmp_path / "t.gguf")
    with pytest.raises(LocalspecError, match="is an Eagle3 drafter, not a target"):
        Engine.load(same, n_ctx=128, n_threads=1)
