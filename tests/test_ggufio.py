"""Reading GGUF files, whole and damaged."""

from __future__ import annotations

import os
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny
from localspec.errors import LocalspecError
from localspec.ggufio import GgufFile

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_1")


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """(path, expected tensors): every value type, every stored type we read."""
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "test")
    scalars = {
        "uint8": 200, "int8": -7, "uint16": 60_000, "int16": -300, "uint32": 1 << 31,
        "int32": -(1 << 30), "uint64": 1 << 40, "int64": -(1 << 40), "float32": 0.5,
        "float64": 0.1, "bool": True, "string": "grüße",
    }  # fmt: skip
    for kind, value in scalars.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.strings", ["a", "", "日本"])
    writer.add_array("test.ints", [1, -2, 3])
    writer.add_array("test.floats", [0.5, 1.5])
    writer.add_array("test.bools", [True, False])
    expected = {}
    for kind in KINDS:
        values = rng.standard_normal((6, 64)).astype(np.float32)
        quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        expected[kind] = gguf.quants.dequantize(quantised, gguf.GGMLQuantizationType[kind])
        writer.add_tensor(f"{kind}.weight", quantised, raw_dtype=gguf.GGMLQuantizationType[kind])
    vector = rng.standard_normal(5).astype(np.float32)
    writer.add_tensor("vector", vector)
    cube = rng.standard_normal((2, 3, 4)).astype(np.float32)
    writer.add_tensor("cube", cube)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, {**expected, "vector": vector, "cube": cube}, scalars


def test_metadata(sample):
    path, _, scalars = sample
    with GgufFile(path) as file:
        assert file.architecture == "test"
        for kind, value in scalars.items():
            assert file.get(f"test.{kind}") == value == file.arch_get(kind)
        assert file.get("test.strings") == ["a", "", "日本"]
        assert file.get("test.ints") == [1, -2, 3]
        assert file.get("test.floats") == [0.5, 1.5]
        assert file.get("test.bools") == [True, False]
        assert len(file.metadata["test.strings"]) == 3
        assert file.get("test.none") is None and file.arch_get("none", 4) == 4


def test_stored_values_are_the_bytes_in_the_file(sample):
    path, _, _ = sample
    with GgufFile(path) as file:
        assert file.stored_value("test.uint32") == struct.pack("<II", 4, 1 << 31)
        text = "grüße".encode()
        assert file.stored_value("test.string") == struct.pack("<IQ", 8, len(text)) + text
        start, end = file.value_span("test.ints")
        assert path.read_bytes()[start:end] == file.stored_value("test.ints")
        with pytest.raises(KeyError):
            file.stored_value("test.none")


def test_tensors(sample):
    path, expected, _ = sample
    with GgufFile(path) as file:
        for kind in KINDS:
            info = file.tensors[f"{kind}.weight"]
            assert info.shape == (6, 64) and info.type_name == kind
            whole = file.tensor(info.name)
            assert whole.dtype == np.float32
            np.testing.assert_array_equal(whole, expected[kind])
            np.testing.assert_array_equal(file.tensor(info.name, 2, 5), expected[kind][2:5])
            np.testing.assert_array_equal(file.rows(info.name)(np.array([5, 0])),
                                          expected[kind][[5, 0]])  # fmt: skip
        np.testing.assert_array_equal(file.tensor("vector"), expected["vector"])
        np.testing.assert_array_equal(file.tensor("cube"), expected["cube"])
        np.testing.assert_array_equal(file.tensor("cube", 1), expected["cube"][1:])
        with pytest.raises(ValueError, match="no rows"):
            file.tensor("vector", 1, 2)
        with pytest.raises(KeyError):
            file.tensor("nothing")


def test_arrays_outlive_the_file(sample):
    path, expected, _ = sample
    with GgufFile(path) as file:
        array = file.tensor("F32.weight")
    array += 1  # a writable copy
    np.testing.assert_array_equal(array, expected["F32"] + 1)


def test_types_that_cannot_be_decoded_are_named(sample, tmp_path, monkeypatch):
    def refuse(*_):
        raise NotImplementedError

    monkeypatch.setattr(gguf.quants, "dequantize", refuse)
    with GgufFile(sample[0]) as file, pytest.raises(LocalspecError, match=r"Q4_1\.weight"):
        file.tensor("Q4_1.weight")


def test_paths_that_are_no_files(tmp_path):
    for path, words in ((tmp_path / "no", "does not exist"), (tmp_path, "is a directory")):
        with pytest.raises(LocalspecError, match=words):
            GgufFile(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(19), b"hello, world " * 9])
def test_files_that_are_no_gguf(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(LocalspecError, match="not a GGUF"):
        GgufFile(tmp_path / "x")


def test_other_versions(sample, tmp_path):
    data = bytearray(sample[0].read_bytes())
    for version in (0, 1, 4, 3 << 24):
        data[4:8] = struct.pack("<I", version)
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(LocalspecError, match="version"):
            GgufFile(tmp_path / "x")


def test_every_cut_is_noticed(tmp_path):
    """No truncated file opens, wherever it is cut."""
    path = tiny.build_target(tmp_path, tied=True, layers=1).gguf
    size = path.stat().st_size
    with GgufFile(path) as file:
        first = min(t.offset for t in file.tensors.values())
        last = max(file.tensors.values(), key=lambda t: t.offset)
    header = [*range(24, 700), *range(700, first, 97)]
    cuts = [*header, first, last.offset, last.offset + last.nbytes - 1]
    for cut in sorted(cuts, reverse=True):
        assert cut < size
        os.truncate(path, cut)
        with pytest.raises(LocalspecError, match="damaged or incomplete") as e:
            GgufFile(path)
        assert "\n" not in str(e.value)


def open_damaged(path, data: bytes) -> None:
    """Either it opens and every value can be read, or it is refused; memory stays small."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with GgufFile(path) as file:
            for key in file.metadata:
                file.get(key)
            for info in file.tensors.values():
                assert info.offset + info.nbytes <= len(data)
    except LocalspecError as e:
        assert "\n" not in str(e)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 64 * len(data) + 20_000_000


relaxed = settings(
    max_examples=150, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@relaxed
@given(st.data())
def test_mutated_headers(sample, tmp_path, data):
    content = bytearray(sample[0].read_bytes())
    end = 1800  # the header of the sample, a little more
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, end))
        content[at] = data.draw(st.integers(0, 255))
    open_damaged(tmp_path / "x", bytes(content))


@relaxed
@given(st.data())
def test_absurd_numbers_in_headers(sample, tmp_path, data):
    content = bytearray(sample[0].read_bytes())
    at = data.draw(st.integers(8, 1800))
    huge = data.draw(st.sampled_from([1 << 63, (1 << 64) - 1, 1 << 32, 1 << 20, (1 << 31) - 1, 0]))
    content[at : at + 8] = struct.pack("<Q", huge)
    open_damaged(tmp_path / "x", bytes(content))


@relaxed
@given(st.binary(max_size=400))
def test_noise_after_the_magic(tmp_path, noise):
    open_damaged(tmp_path / "x", b"GGUF" + struct.pack("<I", 3) + noise)
    counts = struct.pack("<QQ", 3, 5)
    open_damaged(tmp_path / "x", b"GGUF" + struct.pack("<I", 3) + counts + noise)
