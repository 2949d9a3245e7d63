"""Conversions: what ends up in the files, and that llama.cpp computes with it what torch does."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import tiny
from localspec import pairs
from localspec.convert import convert
from localspec.convert import layout as published
from localspec.ggufio import GgufFile
from localspec.models.config import DrafterConfig

HEADS = ("vanilla", "gated", "rnn")
MATRICES = ("fc.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.build_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafters(target, tmp_path_factory):
    where = tmp_path_factory.mktemp("drafters")
    built = {head: tiny.build_drafter(where / head, target, head=head) for head in HEADS}
    built["plain"] = tiny.build_drafter(where / "plain", target, head="none")
    built["no-markov-conf"] = tiny.build_drafter(where / "nmc", target, conf_markov=False)
    built["no-conf"] = tiny.build_drafter(where / "nc", target, head="rnn", confidence=False)
    return built


def run(drafter, target, out: Path, **options):
    return convert(drafter.path, target.gguf, out, **options)


def rewrite(drafter, to: Path, config=(), tensors=()) -> Path:
    """A copy of a drafter with other config fields and tensors (None leaves one out)."""
    to.mkdir()
    (to / "config.json").write_text(json.dumps({**drafter.config, **dict(config)}))
    kept = {k: v for k, v in {**drafter.tensors, **dict(tensors)}.items() if v is not None}
    save_file({k: np.ascontiguousarray(v) for k, v in kept.items()}, to / "model.safetensors")
    return to


def to_bf16(array: np.ndarray) -> np.ndarray:
    """Float32 cut to bfloat16 and widened again."""
    return (array.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def save_bf16(tensors: dict[str, np.ndarray], path: Path) -> None:
    """A safetensors file in bfloat16, which numpy has no type for."""
    header, data = {}, b""
    for name, value in tensors.items():
        raw = (np.ascontiguousarray(value).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": value.shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


# ---- what the files hold


@pytest.mark.parametrize("head", [*HEADS, "plain", "no-markov-conf", "no-conf"])
def test_every_tensor_arrives_unchanged_in_f32(head, target, drafters, tmp_path):
    drafter = drafters[head]
    result = run(drafter, target, tmp_path / "d.gguf", outtype="f32")
    config = DrafterConfig.from_file(drafter.path)
    written = {}
    for path in filter(None, (result.path, result.heads_path)):
        with GgufFile(path) as file:
            written |= {name: file.tensor(name) for name in file.tensors}
    rules = [*published.backbone_rules(config), *published.head_rules(config)]
    if head == "plain":
        rules = [rule for rule in rules if not rule.published.startswith("confidence")]
        assert "confidence" in result.notes[0]
    assert {rule.name for rule in rules} == set(written)
    assert result.n_tensors == len(written)
    for rule in rules:
        source, got = drafter.tensors[rule.published], written[rule.name]
        if rule.name == "conf_proj.weight":
            assert got.shape == (config.hidden_size + config.markov_rank,)
            assert not got[source.size :].any()
            source, got = source[0], got[: source.size]
        np.testing.assert_array_equal(got, source, err_msg=rule.name)


def test_metadata_is_what_llama_cpp_reads(target, drafters, tmp_path):
    run(drafters["vanilla"], target, tmp_path / "d.gguf")
    reader = gguf.GGUFReader(tmp_path / "d.gguf")  # an independent reader
    value = {key: field.contents() for key, field in reader.fields.items()}
    config = drafters["vanilla"].config
    assert value["general.architecture"] == "dflash"
    assert value["dflash.block_size"] == config["block_size"]
    assert value["dflash.target_layers"] == [i + 1 for i in config["target_layer_ids"]]
    assert value["dflash.sample_from_anchor"] is True
    assert value["dflash.has_confidence_head"] is True
    assert value["dflash.vocab_size"] == config["vocab_size"]
    assert value["dflash.rope.freq_base"] == config["rope_parameters"]["rope_theta"]
    assert value["localspec.target.block_count"] == target.config["num_hidden_layers"]
    assert value["localspec.heads.type"] == "vanilla"
    assert value["tokenizer.ggml.mask_token_id"] == config["mask_token_id"]
    assert "dflash.attention.sliding_window" not in value
    theirs = gguf.GGUFReader(target.gguf)
    copied = [key for key in theirs.fields if key.startswith("tokenizer.")]
    assert "tokenizer.chat_template" in copied and "tokenizer.ggml.merges" in copied
    for key in copied:
        assert value[key] == theirs.fields[key].contents()
        assert reader.fields[key].types == theirs.fields[key].types


def test_tokens_that_are_no_utf8_survive(target, drafters, tmp_path):
    damaged = tmp_path / "t.gguf"
    data = target.gguf.read_bytes()
    token = "é".encode()
    damaged.write_bytes(
        data.replace(b"\x02\0\0\0\0\0\0\0th", b"\x02\0\0\0\0\0\0\0" + token[:1] * 2)
    )
    convert(drafters["vanilla"].path, damaged, tmp_path / "d.gguf")
    key = "tokenizer.ggml.tokens"
    with GgufFile(damaged) as a, GgufFile(tmp_path / "d.gguf") as b:
        assert a.stored_value(key) == b.stored_value(key) and token[:1] * 2 in a.stored_value(key)


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_heads_go_into_a_companion(head, target, drafters, tmp_path):
    result = run(drafters[head], target, tmp_path / "d.gguf", outtype="q8_0")
    assert result.heads_path == tmp_path / "d.heads.gguf" and result.head_type == head
    config = drafters[head].config
    with GgufFile(result.heads_path) as heads, GgufFile(result.path) as drafter:
        assert heads.architecture == pairs.HEADS_ARCH
        assert heads.get("localspec.heads.version") == 1
        assert heads.get("localspec.heads.type") == head
        assert heads.get("localspec.heads.rank") == config["markov_rank"]
        assert heads.get("localspec.heads.embedding_length") == config["hidden_size"]
        assert heads.get("localspec.heads.vocab_size") == config["vocab_size"]
        pair_id = heads.get("localspec.pair_id")
        assert len(pair_id) == 32 and int(pair_id, 16) >= 0
        assert drafter.get("localspec.pair_id") == pair_id
        info = pairs.read_drafter(drafter)
        assert info.head_type == head and info.has_confidence
        assert heads.tensors["markov_w1.weight"].type_name == "F16"
        assert not any("markov" in name or "conf" in name for name in drafter.tensors)


@pytest.mark.parametrize(
    ("outtype", "matrix", "table"),
    [("f32", "F32", "F32"), ("f16", "F16", "F16"), ("bf16", "BF16", "BF16"),
     ("q8_0", "Q8_0", "F16")],
)  # fmt: skip
def test_output_types(outtype, matrix, table, target, drafters, tmp_path):
    run(drafters["vanilla"], target, tmp_path / "d.gguf", outtype=outtype)
    tolerance = {"f32": 0, "f16": 1e-3, "bf16": 8e-3, "q8_0": 1e-2}[outtype]
    names = {rule.name.format(0): rule.published.format(0) for rule in published.LAYER}
    with GgufFile(tmp_path / "d.gguf") as file:
        kinds = {t.name: t.type_name for t in file.tensors.values()}
        for name, source in names.items():
            expected = drafters["vanilla"].tensors[source]
            scale = np.abs(expected).max()
            np.testing.assert_allclose(file.tensor(name), expected, atol=tolerance * scale)
    assert {kinds[name] for name in MATRICES} == {matrix}
    assert {kinds["markov_w1.weight"], kinds["markov_w2.weight"]} == {table}
    assert {kinds[n] for n in kinds if "norm" in n or "conf" in n} == {"F32"}


def test_rows_that_do_not_fill_blocks_fall_back_to_f16(tmp_path):
    target = tiny.build_target(tmp_path / "t", width=48, ffn=96, tied=True)
    drafter = tiny.build_drafter(tmp_path / "c", target)
    run(drafter, target, tmp_path / "d.gguf", outtype="q8_0")
    with GgufFile(tmp_path / "d.gguf") as file:
        assert file.tensors["blk.0.attn_q.weight"].type_name == "F16"  # rows of 48
        assert file.tensors["blk.0.ffn_down.weight"].type_name == "Q8_0"  # rows of 96


def test_auto_outtype_follows_the_checkpoint(target, drafters, tmp_path):
    drafter = drafters["vanilla"]
    assert run(drafter, target, tmp_path / "a.gguf").outtype == "f32"
    half = rewrite(drafter, tmp_path / "half")
    save_bf16(drafter.tensors, half / "model.safetensors")
    assert convert(half, target.gguf, tmp_path / "b.gguf").outtype == "q8_0"
    with pytest.raises(ValueError, match="outtype"):
        run(drafter, target, tmp_path / "c.gguf", outtype="q4")


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_half_precision_checkpoints(dtype, target, drafters, tmp_path):
    drafter = drafters["vanilla"]
    half = rewrite(drafter, tmp_path / "half")
    if dtype == "BF16":
        save_bf16(drafter.tensors, half / "model.safetensors")
        expected = to_bf16(drafter.tensors["fc.weight"])
    else:
        save_file(
            {k: v.astype(np.float16) for k, v in drafter.tensors.items()},
            half / "model.safetensors",
        )
        expected = drafter.tensors["fc.weight"].astype(np.float16).astype(np.float32)
    convert(half, target.gguf, tmp_path / "d.gguf", outtype="f32")
    with GgufFile(tmp_path / "d.gguf") as file:
        np.testing.assert_array_equal(file.tensor("fc.weight"), expected)


def test_sliding_windows(target, drafters, tmp_path):
    config = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
    path = rewrite(drafters["vanilla"], tmp_path / "c", config)
    convert(path, target.gguf, tmp_path / "d.gguf")
    with GgufFile(tmp_path / "d.gguf") as file:
        assert file.get("dflash.attention.sliding_window") == 512
        assert file.get("dflash.attention.sliding_window_pattern") == [True, False]


def test_rope_settings(target, drafters, tmp_path):
    # This backbone turns whole heads, whatever its config has copied from the target's.
    config = {
        "rope_parameters": {"partial_rotary_factor": 0.25},
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
    }
    path = rewrite(drafters["vanilla"], tmp_path / "c", config)
    convert(path, target.gguf, tmp_path / "d.gguf")
    with GgufFile(tmp_path / "d.gguf") as file:
        assert file.get("dflash.rope.freq_base") == 5e5
        assert file.get("dflash.rope.dimension_count") == drafters["vanilla"].config["head_dim"]
        assert not any("partial" in key for key in file.metadata)
        assert "rope_freqs.weight" not in file.tensors


def test_embedding_output_as_a_feature(target, drafters, tmp_path):
    path = rewrite(drafters["vanilla"], tmp_path / "c", {"target_layer_ids": [-1, 0, 2]})
    convert(path, target.gguf, tmp_path / "d.gguf")
    with GgufFile(tmp_path / "d.gguf") as file:
        assert file.get("dflash.target_layers") == [0, 1, 3]


def test_shards_give_the_same_bytes(target, drafters, tmp_path):
    sharded = tiny.build_drafter(tmp_path / "c", target, head="rnn", shard=True)
    assert (sharded.path / "model.safetensors.index.json").exists()
    run(sharded, target, tmp_path / "a.gguf")
    run(drafters["rnn"], target, tmp_path / "b.gguf")
    for end in (".gguf", ".heads.gguf"):
        assert (tmp_path / f"a{end}").read_bytes() == (tmp_path / f"b{end}").read_bytes()


@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
@pytest.mark.parametrize("head", ["vanilla", "gated"])
def test_conversion_is_reproducible(head, outtype, target, drafters, tmp_path):
    results = [
        run(drafters[head], target, tmp_path / f"{name}.gguf", outtype=outtype) for name in "ab"
    ]
    first, second = results
    assert first.path.read_bytes() == second.path.read_bytes()
    if first.heads_path:
        assert first.heads_path.read_bytes() == second.heads_path.read_bytes()


def test_pair_id_depends_on_the_content(target, drafters, tmp_path):
    changed = {"norm.weight": drafters["rnn"].tensors["norm.weight"] + 1}
    other = rewrite(drafters["rnn"], tmp_path / "c", tensors=changed)
    a = run(drafters["rnn"], target, tmp_path / "a.gguf")
    b = convert(other, target.gguf, tmp_path / "b.gguf")
    a.heads_path.replace(b.heads_path)
    with GgufFile(b.path) as file, pytest.raises(Exception, match="another drafter"):
        pairs.read_drafter(file)


def test_standalone_takes_what_the_checkpoint_has(target, drafters, tmp_path):
    run(drafters["vanilla"], target, tmp_path / "d.gguf", standalone=True)
    with GgufFile(tmp_path / "d.gguf") as file:
        for name, source in (("token_embd", "embed_tokens"), ("output", "lm_head")):
            expected = drafters["vanilla"].tensors[f"{source}.weight"]
            np.testing.assert_array_equal(file.tensor(f"{name}.weight"), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_standalone_copies_from_the_target(tied, target, tmp_path):
    if tied:
        target = tiny.build_target(tmp_path / "t", tied=True)
    drafter = tiny.build_drafter(tmp_path / "c", target, own_embeddings=False)
    run(drafter, target, tmp_path / "d.gguf", standalone=True, outtype="q8_0")
    with GgufFile(tmp_path / "d.gguf") as file, GgufFile(target.gguf) as theirs:
        assert ("output.weight" in file.tensors) == (not tied)
        for name in {"token_embd.weight", "output.weight"} & set(file.tensors):
            assert file.tensors[name].type_name == "F32"  # as stored in the target
            np.testing.assert_array_equal(file.tensor(name), theirs.tensor(name))


def test_embeddings_of_another_target_are_noted(target, drafters, tmp_path):
    assert not run(drafters["vanilla"], target, tmp_path / "a.gguf").notes
    other = tiny.build_target(tmp_path / "t", seed=9, tied=True)
    notes = run(drafters["vanilla"], other, tmp_path / "b.gguf").notes
    assert "not the target's" in notes[0]


def test_progress_counts_tensors_and_bytes(target, drafters, tmp_path):
    calls = []
    result = run(drafters["rnn"], target, tmp_path / "d.gguf", progress=lambda *a: calls.append(a))
    # The checkpoint's own embeddings are checked but not written.
    assert {count for _, _, count, _, _ in calls} == {result.n_tensors + 2}
    assert sorted({index for _, index, _, _, _ in calls}) == list(range(result.n_tensors + 2))
    done = [d for *_, d, _ in calls]
    assert done == sorted(done) and done[-1] == calls[-1][-1]
    assert done[-1] == sum(t.nbytes for t in drafters["rnn"].tensors.values())


# ---- llama.cpp


class Llama:
    """Just enough of llama.cpp to run one block of a drafter on an empty context."""

    def __init__(self, path: Path, other: Llama | None = None) -> None:
        import llama_cpp as lib

        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self.lib = lib
        self.model = lib.llama_model_load_from_file(str(path).encode(), params)
        assert self.model, f"llama.cpp does not load {path}"
        self.vocab = lib.llama_model_get_vocab(self.model)
        self.n_vocab = lib.llama_vocab_n_tokens(self.vocab)
        context = lib.llama_context_default_params()
        context.n_ctx, context.n_threads, context.n_threads_batch = 64, 1, 1
        context.flash_attn_type = 0
        if other is not None:
            context.ctx_other = other.context
        self.context = lib.llama_init_from_model(self.model, context)
        assert self.context

    def block(self, tokens: list[int]) -> np.ndarray:
        """Logits [B, V] of one non-causal pass."""
        lib = self.lib
        lib.llama_set_causal_attn(self.context, False)
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        assert lib.llama_decode(self.context, batch) == 0
        lib.llama_batch_free(batch)
        logits = lib.llama_get_logits(self.context)
        size = len(tokens) * self.n_vocab
        return np.ctypeslib.as_array(
            ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (size,)
        ).reshape(len(tokens), -1).copy()  # fmt: skip

    def close(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


@pytest.fixture(scope="module")
def loaded_target(target):
    model = Llama(target.gguf)
    yield model
    model.close()


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("head", [*HEADS, "plain", "no-markov-conf"])
def test_llama_cpp_computes_what_torch_does(
    head, outtype, target, loaded_target, drafters, tmp_path
):
    torch = pytest.importorskip("torch")
    from localspec.models import load_drafter

    result = run(drafters[head], target, tmp_path / "d.gguf", outtype=outtype)
    model = Llama(result.path, loaded_target)
    assert model.n_vocab == loaded_target.n_vocab
    config, anchor = drafters[head].config, 70
    got = model.block([anchor] + [config["mask_token_id"]] * (config["block_size"] - 1))
    model.close()
    reference = load_drafter(drafters[head].path)
    with torch.no_grad():
        proposal = reference.propose(anchor, 0, reference.new_cache())
    # A vanilla head runs inside llama.cpp's graph, along its own greedy chain.
    in_graph = head in ("vanilla", "no-markov-conf")
    expected = (proposal.logits if in_graph else proposal.base).numpy()
    scale = np.abs(expected).max()
    if outtype == "f32":
        np.testing.assert_allclose(got, expected, atol=2e-3 * scale)
        if in_graph:
            assert got.argmax(-1).tolist() == proposal.tokens.tolist()
    else:
        assert np.abs(got[0] - expected[0]).max() < 0.05 * scale


@pytest.mark.parametrize("head", HEADS)
def test_standalone_files_need_no_target(head, target, drafters, tmp_path):
    result = run(drafters[head], target, tmp_path / "d.gguf", standalone=True)
    model = Llama(result.path)
    assert np.isfinite(model.block([5, 3, 3])).all()
    model.close()


def test_sliding_window_files_load(target, loaded_target, drafters, tmp_path):
    config = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    path = rewrite(drafters["vanilla"], tmp_path / "c", config)
    model = Llama(convert(path, target.gguf, tmp_path / "d.gguf").path, loaded_target)
    assert np.isfinite(model.block([5, 3, 3])).all()
    model.close()


# ---- memory


def test_memory_stays_below_the_largest_tensor(tmp_path):
    """Peak of a fresh process. The promise is 1.2x the largest tensor + 300 MB; it is far lower."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    vocab, width = 40_000, 64
    config = {
        "vocab_size": vocab, "hidden_size": width, "intermediate_size": 128,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "block_size": 7, "mask_token_id": 3, "target_layer_ids": [0],
        "num_target_layers": 2, "rope_theta": 1e4, "markov_rank": 1024,
        "markov_head_type": "vanilla", "enable_confidence_head": False,
    }  # fmt: skip
    largest = write_zero_checkpoint(tmp_path / "c", config)
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(width)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(vocab)])
    writer.add_tensor("token_embd.weight", np.zeros((vocab, width), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # Not getrusage: its figure survives exec, so it would be at least that of the test process.
    code = (
        "import sys; from localspec.convert import convert; "
        "convert(*sys.argv[1:], outtype='q8_0'); "
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "c", "t.gguf", "d.gguf"],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    peak = int(done.stdout) * 1024
    assert largest > 160e6
    assert peak < largest, f"peak {peak / 1e6:.0f} MB with a tensor of {largest / 1e6:.0f} MB"


def write_zero_checkpoint(path: Path, config: dict) -> int:
    """A float32 checkpoint of zeros, as a sparse file; the largest tensor's size in bytes."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    shape = DrafterConfig.from_dict(config)
    header, end, largest = {}, 0, 0
    for rule in [*published.backbone_rules(shape), *published.head_rules(shape)]:
        dims = published.shape(rule, shape)
        size = 4 * int(np.prod(dims))
        header[rule.published] = {
            "dtype": "F32", "shape": dims, "data_offsets": [end, end + size]
        }  # fmt: skip
        end, largest = end + size, max(largest, size)
    text = json.dumps(header).encode()
    with open(path / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(f.tell() + end)
    return largest


@pytest.mark.golden
def test_golden_checkpoints_convert(tmp_path):
    golden = Path(__file__).parents[2] / "shared" / "golden"
    if not golden.is_dir():
        pytest.skip("no golden data here")
    target = golden / "tiny-qwen3" / "tiny-qwen3-f32.gguf"
    for path in sorted(golden.glob("dspark-*")):
        result = convert(path, target, tmp_path / f"{path.name}.gguf")
        tensors = load_file(path / "model.safetensors")
        with GgufFile(target) as t, GgufFile(result.path) as d:
            info = pairs.check_pair(t, d)
            assert info.head_type == result.head_type
            np.testing.assert_array_equal(d.tensor("fc.weight"), tensors["fc.weight"])
