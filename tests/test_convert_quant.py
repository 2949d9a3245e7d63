"""Quantisation by llama.cpp's own code: which type goes where, and what it costs."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

import tiny
from localspec import llama
from localspec.convert import OUTTYPES, convert, layout, metadata
from localspec.convert.plan import stored_type
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

QUANTS = [t for t in OUTTYPES if t not in ("auto", "f32", "f16", "bf16")]
ATTENTION = "blk.0.attn_q.weight"


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A target and a drafter whose rows are whole super-blocks of 256."""
    folder = tmp_path_factory.mktemp("wide")
    target = tiny.build_target(
        folder / "t", width=256, heads=4, kv_heads=2, head_dim=64, ffn=512, layers=3
    )
    drafter = tiny.build_drafter(folder / "d", target, layers=1, head="vanilla")
    return target, drafter


@pytest.mark.parametrize("kind", list(llama.TENSOR_TYPES))
def test_rows_are_those_of_the_format(kind):
    """Block sizes as the gguf package has them; decoded again, the values are near."""
    number, per_block, block_bytes = llama.TENSOR_TYPES[kind]
    known = gguf.GGMLQuantizationType(number)
    assert known.name.lower() == kind
    assert tuple(map(int, gguf.GGML_QUANT_SIZES[known])) == (per_block, block_bytes)
    values = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    stored = llama.quantize_rows(values, kind)
    assert stored.shape == (6, 512 // per_block * block_bytes)
    back = stored.view("<f4") if kind == "f32" else gguf.quants.dequantize(stored, known)
    allowed = {"f32": 0, "f16": 1e-3, "bf16": 5e-3, "q8_0": 0.01}.get(kind, 0.4)
    assert np.sqrt(((back - values) ** 2).mean()) <= allowed


@pytest.mark.parametrize("kind", ["q8_0", "f16", "bf16"])
def test_same_bytes_as_the_gguf_package(kind):
    values = np.random.default_rng(1).standard_normal((3, 96)).astype(np.float32)
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(llama.quantize_rows(values, kind), expected.view(np.uint8))


def test_rows_that_are_no_whole_blocks_and_unknown_types():
    with pytest.raises(ValueError, match="whole number"):
        llama.quantize_rows(np.zeros((2, 48), np.float32), "q8_0")
    with pytest.raises(ValueError, match="none of"):
        llama.quantize_rows(np.zeros((2, 64), np.float32), "q9")
    assert llama.quantize_rows(np.zeros((0, 64), np.float32), "q4_0").shape == (0, 36)


@pytest.mark.parametrize("outtype", QUANTS)
def test_each_type(outtype, wide, tmp_path):
    target, drafter = wide
    out = tmp_path / "d.gguf"
    result = convert(drafter.path, target.gguf, out, outtype=outtype)
    assert result.notes == ()
    with GgufFile(out) as file:
        assert file.tensors[ATTENTION].type_name == outtype.upper()
        for name, tensor in file.tensors.items():
            if len(tensor.shape) == 1 or name.startswith("conf_"):
                assert tensor.type_name == "F32"
            if name.startswith("markov_"):
                assert tensor.type_name == "F16"
        assert file.get("general.file_type") == metadata.FILE_TYPES[outtype]
    model = llama.Model(out)
    model.close()


def test_smaller_types_make_smaller_files_and_larger_differences(wide, tmp_path):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    target, drafter = wide
    sizes, errors = [], []
    for outtype in ("f32", "q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k"):
        out = tmp_path / f"{outtype}.gguf"
        result = convert(drafter.path, target.gguf, out, outtype=outtype, verify=True)
        assert result.report is not None and result.report.fine
        sizes.append(result.nbytes)
        errors.append(result.report.differences[0].relative)
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == len(sizes)
    assert errors == sorted(errors)


@pytest.mark.parametrize(
    ("outtype", "columns", "kind"),
    [
        ("q4_k", 512, "Q4_K"), ("q4_k", 96, "Q5_0"), ("q5_k", 96, "Q5_1"), ("q6_k", 96, "Q8_0"),
        ("q2_k", 96, "Q4_0"), ("q3_k", 96, "Q4_0"), ("q4_k", 40, "F16"), ("q8_0", 40, "F16"),
        ("q4_0", 40, "F16"), ("f32", 40, "F32"), ("bf16", 40, "BF16"),
    ],
)  # fmt: skip
def test_fallbacks(outtype, columns, kind):
    assert stored_type(layout.MATRIX, columns, outtype).name == kind
    assert stored_type(layout.VECTOR, columns, outtype).name == "F32"
    table = stored_type(layout.TABLE, columns, outtype).name
    assert table == (outtype.upper() if outtype in ("f32", "bf16") else "F16")


def test_a_fallback_is_said(tiny_target, tmp_path):
    drafter = tiny.build_drafter(tmp_path / "d", tiny_target)
    result = convert(drafter.path, tiny_target.gguf, tmp_path / "d.gguf", outtype="q4_k")
    (note,) = result.notes
    assert "stored as q5_0" in note and "256" in note
    model = llama.Model(tmp_path / "d.gguf")
    model.close()


@pytest.mark.parametrize("outtype", ["q4_0", "q4_k"])
def test_values_beyond_the_range_of_a_type(outtype, wide, tmp_path):
    from safetensors.numpy import save_file

    target, drafter = wide
    huge = dict(drafter.tensors)
    huge["fc.weight"] = huge["fc.weight"] * np.float32(1e7)
    (tmp_path / "config.json").write_bytes((drafter.path / "config.json").read_bytes())
    save_file(huge, tmp_path / "model.safetensors")
    with pytest.raises(LocalspecError, match="beyond the range"):
        convert(tmp_path, target.gguf, tmp_path / "d.gguf", outtype=outtype)


class TestWholeFiles:
    def test_a_target_in_q4_0(self, tiny_target, tmp_path):
        out = tmp_path / "t.gguf"
        llama.quantize(tiny_target.gguf, out, "q4_0", n_threads=1)
        with GgufFile(out) as file:
            assert file.tensors[ATTENTION].type_name == "Q4_0"
            assert file.get("general.file_type") == llama.FILE_TYPES["q4_0"]
        model = llama.Model(out)
        assert model.n_vocab == tiny_target.config["vocab_size"]
        model.close()
        assert list(tmp_path.iterdir()) == [out]

    def test_refused_in_one_line(self, tiny_target, tmp_path):
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(b"GGUF" + b"x" * 100)
        out = tmp_path / "o.gguf"
        for source, to in ((bad, out), (tmp_path / "none", out), (tiny_target.gguf, tmp_path),
                           (tiny_target.gguf, tiny_target.gguf)):  # fmt: skip
            with pytest.raises(LocalspecError) as caught:
                llama.quantize(source, to, "q4_0", n_threads=1)
            assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == [bad]
        with pytest.raises(ValueError, match="none of"):
            llama.quantize(tiny_target.gguf, out, "q9")
