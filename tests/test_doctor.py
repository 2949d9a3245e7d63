"""`localspec doctor`: each thing that can be wrong is found, and said with how to mend it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from localspec import cpu_features, doctor, doctor_build, doctor_files, doctor_machine
from localspec.cli import cli
from localspec.cli.doctor import in_words
from localspec.diagnosis import Report, Section

FEATURES = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | CUDA : ARCHS = 890 | "
PROBED: dict[str, Any] = {
    "version": "0.3.36", "library": "/x/libllama.so",
    "symbols": {"llama_set_embeddings_layer_inp": True, "llama_get_embeddings_nextn": True},
    "commit": "abc", "ggml": "1", "features": FEATURES, "backends": ["CPU"],
    "devices": [{"name": "CPU", "kind": "cpu", "free": 10**9, "total": 2 * 10**9}],
}  # fmt: skip
GPU = {"name": "CUDA0", "kind": "gpu", "free": 10**9, "total": 2 * 10**9}
HOUR = 3600


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Empty caches, and none of this machine's settings."""
    from huggingface_hub import constants

    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def only(section: Section, *, broken: bool) -> str:
    """The one problem of a section: what is wrong, and how to mend it."""
    assert len(section.problems) == 1, section.problems
    (problem,) = section.problems
    assert problem.broken == broken and problem.mend
    assert "\n" not in problem.what + problem.mend
    return f"{problem.what}; {problem.mend}"


def fake_llama_cpp(folder: Path, init: str, inner: str = "") -> str:
    """A package llama_cpp that comes first on Python's path; returns that path."""
    package = folder / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "llama_cpp.py").write_text(inner)
    return str(folder)


def test_this_machine(tmp_path):
    """The real thing, in a process of its own, as words and as JSON."""
    env = os.environ | {"HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "localspec", "doctor"]
    done = subprocess.run([*command, "--json"], env=env, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["fine"], report["problems"]
    assert report["llama.cpp"]["usable"] and all(report["llama.cpp"]["symbols"].values())
    assert "CPU" in report["llama.cpp"]["compiled for"]
    assert report["llama.cpp"]["devices"]
    assert report["versions"]["numpy"] and report["machine"]["threads used"] >= 1
    assert report["caches"]["localspec"]["path"] == env["LOCALSPEC_CACHE"]
    words = subprocess.run(command, env=env, capture_output=True, text=True)
    assert words.returncode == 0 and "llama-cpp-python" in words.stdout
    for problem in report["problems"]:
        assert problem["what"] in words.stdout and problem["mend"] in words.stdout


def test_without_llama_cpp(tmp_path, monkeypatch):
    (tmp_path / "fake").mkdir()
    path = fake_llama_cpp(tmp_path / "fake", "raise ImportError('no such thing')")
    monkeypatch.setenv("PYTHONPATH", path)
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 1
    assert "broken: llama-cpp-python cannot be imported (no such thing)" in result.output
    assert "mend: pip install" in result.output
    for title in ("versions", "machine", "caches", "default pair", "environment"):
        assert f"\n{title}\n" in "\n" + result.output
    assert "cannot be looked at" not in result.output


def test_without_numpy_and_others(tmp_path):
    """What is missing is said; it is not what the doctor fails of."""
    for name in ("numpy", "rich", "huggingface_hub", "psutil", "gguf"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name}')")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "localspec", "doctor", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    said = " ".join(p["what"] for p in report["problems"])
    assert "no numpy" in said and "no psutil" in said
    assert report["versions"]["python"] and "environment" in report


def test_the_version_it_names():
    from localspec.llama import NEEDED_VERSION

    assert NEEDED_VERSION in doctor_build._INSTALL


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ("raise RuntimeError('Failed to load\\nlibllama.so')", "Failed to load libllama.so"),
        ("raise FileNotFoundError('libcudart.so.12')", "libcudart.so.12"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "compiled for another CPU"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import os, sys; print('bad driver', file=sys.stderr); os._exit(3)", "bad driver"),
        ("print('{not json'); raise SystemExit(0)", "exit status 0"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_broken_build(init, said, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", fake_llama_cpp(tmp_path, init))
    section = doctor_build.build()
    assert said in only(section, broken=True) and section.facts["usable"] is False


def test_a_build_without_our_symbols(tmp_path, monkeypatch):
    inner = "import ctypes\n_lib = ctypes.CDLL(None)\n"
    path = fake_llama_cpp(tmp_path, "__version__ = '0.2.1'\nfrom . import llama_cpp", inner)
    monkeypatch.setenv("PYTHONPATH", path)
    section = doctor_build.build()
    said = only(section, broken=True)
    assert "0.2.1 lacks llama_set_embeddings_layer_inp" in said and "pip install" in said
    assert not any(section.facts["symbols"].values())


def test_a_build_that_hangs():
    def hang(*args: Any, timeout: float, **options: Any) -> None:
        raise subprocess.TimeoutExpired("python", timeout)

    said = only(doctor_build.build(doctor_build.probe(hang)), broken=True)
    assert "has not started within" in said


def cpu(monkeypatch: pytest.MonkeyPatch, *features: str) -> None:
    known = frozenset(features or ("SSE3", "AVX", "AVX2", "F16C", "FMA"))
    monkeypatch.setattr(cpu_features, "of_machine", lambda: known)
    monkeypatch.setattr(cpu_features, "knowable", lambda: frozenset(cpu_features._LINUX))


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PC with an NVIDIA GPU, whatever this machine is."""
    monkeypatch.setattr(doctor_build.sys, "platform", "linux")
    monkeypatch.setattr(doctor_build, "nvidia", lambda: True)
    cpu(monkeypatch)


def test_gpus_that_are_not_used(linux, monkeypatch):
    assert "DGGML_CUDA=ON" in only(doctor_build.build(PROBED), broken=False)
    cuda = PROBED | {"backends": ["CUDA", "CPU"]}
    assert "nvidia-smi" in only(doctor_build.build(cuda), broken=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "unset CUDA_VISIBLE_DEVICES" in only(doctor_build.build(cuda), broken=False)
    section = doctor_build.build(cuda | {"devices": [GPU]})
    assert not section.problems
    assert section.facts["CUDA"] and not section.facts["RPC"]
    monkeypatch.setattr(doctor_build, "nvidia", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if not Path("/dev/kfd").exists():
        assert not doctor_build.build(PROBED).problems


def test_a_mac_without_metal(monkeypatch):
    monkeypatch.setattr(doctor_build.sys, "platform", "darwin")
    monkeypatch.setattr(doctor_build.platform, "machine", lambda: "arm64")
    cpu(monkeypatch)
    assert "DGGML_METAL=ON" in only(doctor_build.build(PROBED), broken=False)
    metal = PROBED | {"backends": ["MTL", "CPU"]}
    section = doctor_build.build(metal)
    assert not section.problems and section.facts["Metal"]


def test_a_build_for_another_cpu(linux, monkeypatch):
    monkeypatch.setattr(doctor_build, "nvidia", lambda: False)
    cpu(monkeypatch, "SSE3", "AVX")
    said = only(doctor_build.build(PROBED), broken=True)
    assert "compiled for AVX2, F16C, FMA, which this CPU does not have" in said
    cpu(monkeypatch, "SSE3", "AVX", "AVX2", "F16C", "FMA", "AVX512", "AVX512_VBMI")
    said = only(doctor_build.build(PROBED), broken=False)
    assert "this CPU has AVX512, which" in said and "DGGML_NATIVE=ON" in said


def test_cpu_features(tmp_path, monkeypatch):
    assert cpu_features.of_build(FEATURES + "AVX512 = 0 | ") == {
        "SSE3", "AVX", "AVX2", "F16C", "FMA",
    }  # fmt: skip
    assert cpu_features.of_build("CUDA : AVX = 1 | CPU : FMA = 1") == {"FMA"}
    assert cpu_features.of_build("") == frozenset()
    monkeypatch.setattr(cpu_features.sys, "platform", "linux")
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags\t\t: fpu pni avx avx512f avx512vbmi\nbugs : x\n")
    assert cpu_features.of_machine(info) == {"SSE3", "AVX", "AVX512", "AVX512_VBMI"}
    info.write_text("Features\t: fp asimd asimddp i8mm\n")
    assert cpu_features.of_machine(info) == {"NEON", "DOTPROD", "MATMUL_INT8"}
    info.write_text("nothing")
    assert cpu_features.of_machine(info) is None
    assert cpu_features.of_machine(tmp_path / "no") is None


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_what_a_container_leaves(tmp_path):
    """Limits are shown, and the default follows them; none: nothing is said."""
    top = "sys/fs/cgroup"
    root = tree(tmp_path, {
        f"{top}/cpu.max": "100000 100000", f"{top}/memory.max": "4000000000",
        f"{top}/memory.current": "1000000000",
    })  # fmt: skip
    section = doctor_machine.machine(root)
    assert section.facts["CPU limit of the container"] == 1.0
    assert section.facts["threads used"] == 1 and not section.problems
    assert section.facts["memory limit of the container"] == 4 * 10**9
    assert section.facts["memory free in the container"] == 3 * 10**9
    words = in_words(Report([section]))
    assert re.search(r"CPU limit of the container +1\.0\n +threads used +1\n", words)
    assert re.search(r"memory free in the container +3\.0 GB", words)
    section = doctor_machine.machine(tmp_path / "no")
    assert section.facts["CPU limit of the container"] is None and not section.problems


@pytest.mark.parametrize(
    ("cpu_max", "threads", "what", "mend"),
    [
        ("150000 100000", 2, "may use 1.5 CPUs, so 2 threads", "2 CPUs, or --threads 1"),
        ("250000 100000", 3, "may use 2.5 CPUs, so 3 threads", "3 CPUs, or --threads 2"),
        ("50000 100000", 1, "may use 0.5 CPUs, so 1 thread ", "a whole CPU"),
    ],
)
def test_a_container_with_a_fraction_of_a_cpu(cpu_max, threads, what, mend, tmp_path, monkeypatch):
    monkeypatch.setattr("localspec.llama.threads._cores", lambda root: 16)
    root = tree(tmp_path, {"sys/fs/cgroup/cpu.max": cpu_max})
    section = doctor_machine.machine(root)
    said = only(section, broken=False)
    assert section.facts["threads used"] == threads
    assert what in said and mend in said
    stands_still = int(re.search(r"(\d+)% of the time", said)[1]) / 100
    assert stands_still == pytest.approx(1 - float(said.split()[4]) / threads, abs=0.006)


def write(file: Path, text: str | bytes, age: float = 0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(file, (time.time() - age,) * 2)
    return file


def test_damaged_measurements(tmp_path):
    root = tmp_path / "cache"
    good = {"sizes": [1, 2], "depths": [32], "seconds": [[1.0, 1.5]], "block_seconds": 0.1,
            "host_seconds": 0.1, "switch_seconds": 0.0}  # fmt: skip
    write(root / "tuning" / "good.json", json.dumps(good))
    write(root / "calibration" / "good.json", '{"format": "localspec-calibration", "depths": [1]}')
    section = doctor_files.caches()
    assert not section.problems
    assert section.facts["tuning files"] == section.facts["calibration files"] == 1
    bad = write(root / "tuning" / "bad.json", json.dumps(good | {"seconds": [[1.0, -1.0]]}))
    said = only(doctor_files.caches(), broken=False)
    assert said.endswith(f"rm {bad}") and "good.json" not in said
    write(root / "tuning" / "worse.json", "{")
    assert "1 others there" in only(doctor_files.caches(), broken=False)
    write(root / "calibration" / "worse.json", "[]")
    assert len(doctor_files.caches().problems) == 2


def test_leftovers(tmp_path):
    root = tmp_path / "cache"
    write(root / "tuning" / "a.123.tmp", "x")
    write(root / "drafters" / "o--r" / ".d.gguf.9.part", "x")
    assert not doctor_files.caches().problems  # somebody may be writing them
    found = doctor_files.caches(time.time() + 2 * HOUR).problems
    assert len(found) == 2 and all(not p.broken and "rm " in p.mend for p in found)
    blobs = tmp_path / "hub" / "models--org--name" / "blobs"
    for file in root.rglob("*.*"):
        if file.is_file():
            file.unlink()
    unfinished = write(blobs / ("a" * 64 + ".incomplete"), "xy", age=2 * HOUR)
    said = only(doctor_files.caches(), broken=False)
    assert "a download of org/name is not finished" in said and "localspec pull" in said
    unfinished.unlink()
    write(blobs / ("a" * 64 + ".0123abcd.incomplete"), "xy", age=2 * HOUR)
    said = only(doctor_files.caches(), broken=False)
    assert "left over from a download of org/name" in said and "pull" not in said


def test_a_model_whose_file_is_gone(tmp_path):
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "c"
    snapshot.mkdir(parents=True)
    (snapshot / "x.gguf").symlink_to("../../blobs/none")
    assert "leads nowhere" in only(doctor_files.caches(), broken=True)


def test_converted_drafters(tmp_path, tiny_drafter):
    folder = tmp_path / "cache" / "drafters" / "org--name"
    data = tiny_drafter("vanilla")[1].read_bytes()
    write(folder / "aaaaaaaaaaaa-01234567.gguf", data, age=60)
    section = doctor_files.caches()
    assert not section.problems and len(section.facts["converted drafters"]) == 1
    write(folder / "bbbbbbbbbbbb-76543210.gguf", data)  # for another tokenizer
    assert not doctor_files.caches().problems
    write(folder / "cccccccccccc-01234567.gguf", data)
    said = only(doctor_files.caches(), broken=False)
    assert "aaaaaaaaaaaa-01234567.gguf is an older version" in said
    (folder / "aaaaaaaaaaaa-01234567.gguf").unlink()
    write(folder / "bbbbbbbbbbbb-76543210.gguf", data[: len(data) // 2])
    said = only(doctor_files.caches(), broken=True)
    assert "bbbbbbbbbbbb" in said and "localspec pull" in said


def test_places_that_cannot_be_written(tmp_path, monkeypatch):
    from huggingface_hub import constants

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "file" / "cache"))
    assert "set LOCALSPEC_CACHE" in only(doctor_files.caches(), broken=True)
    monkeypatch.setenv("LOCALSPEC_CACHE", str(tmp_path / "not" / "there" / "yet"))
    assert not doctor_files.caches().problems
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert "set HF_HOME" in only(doctor_files.caches(), broken=True)
    assert not (tmp_path / "not").exists()  # looking makes nothing


def test_the_default_pair(tmp_path, monkeypatch, tiny_target, tiny_drafter):
    from localspec import default_pair
    from localspec.errors import LocalspecError

    drafter = tiny_drafter("vanilla")[1]
    monkeypatch.setattr(default_pair, "default_target", lambda: tiny_target.gguf)
    monkeypatch.setattr(default_pair, "default_drafter", lambda: drafter)
    assert not doctor_files.default_pair().problems
    cut = write(tmp_path / "cut.gguf", drafter.read_bytes()[:5000])
    monkeypatch.setattr(default_pair, "default_drafter", lambda: cut)
    assert "the default pair cannot be used" in only(doctor_files.default_pair(), broken=True)

    def missing() -> Path:
        raise LocalspecError("not installed")

    monkeypatch.setattr(default_pair, "default_drafter", lambda: drafter)
    monkeypatch.setattr(default_pair, "default_target", missing)
    assert "localspec[default]" in only(doctor_files.default_pair(), broken=False)


def test_environment_variables():
    section = doctor_machine.environment(
        {
            "HOME": "/home/x",
            "HF_TOKEN": "hf_secret",
            "LOCALSPEC_API_KEY": "sesame",
            "HTTPS_PROXY": "http://me:word@proxy:8080",
            "ALL_PROXY": "me:word@proxy:8080",
            "HF_HOME": "/models/a@b",
            "OMP_NUM_THREADS": "4",
        }
    )
    assert not section.problems
    assert section.facts == {
        "HF_TOKEN": "(set, not shown)",
        "LOCALSPEC_API_KEY": "(set, not shown)",
        "HTTPS_PROXY": "http://(not shown)@proxy:8080",
        "ALL_PROXY": "(not shown)@proxy:8080",
        "HF_HOME": "/models/a@b",
        "OMP_NUM_THREADS": "4",
    }


@pytest.mark.parametrize(
    ("name", "value", "broken", "said"),
    [
        ("HF_ENDPOINT", "mirror.example", True, "unset HF_ENDPOINT"),
        ("HF_ENDPOINT", "ftp://mirror.example", True, "no web address"),
        ("HF_HUB_OFFLINE", "1", False, "unset HF_HUB_OFFLINE"),
        ("LOCALSPEC_CACHE", "cache", False, "absolute path"),
        ("LOCALSPEC_CACHE", "~/cache", False, "$HOME"),
    ],
)
def test_variables_that_do_harm(name, value, broken, said):
    assert said in only(doctor_machine.environment({name: value}), broken=broken)


def test_packages():
    section = doctor.versions(
        [
            "numpy>=1",
            "localspec-no-such-thing>=2",
            "click>=999",
            "rich (>=1)",
            "tomli-no-such-thing>=2; python_version < '3.0'",
            "torch>=2.4; extra == 'convert'",
            "no-such-extra>=1; extra == 'bench'",
            "pytest>=8; extra == 'dev'",
        ]
    )
    assert section.facts["numpy"] and section.facts["rich"]
    assert section.facts["localspec-no-such-thing"] is None
    assert "tomli-no-such-thing" not in section.facts
    assert "no-such-extra missing (pip install 'localspec[bench]')" in str(
        section.facts["extra bench"]
    )
    assert "extra dev" not in section.facts
    said = [f"{p.broken} {p.what}; {p.mend}" for p in section.problems]
    assert len(said) == 2
    assert said[0].startswith("True localspec-no-such-thing is not installed; pip install")
    assert "is not >=999, which localspec needs" in said[1]


def test_what_cannot_be_looked_at_is_a_problem_too(monkeypatch):
    def fails(*_: object) -> Section:
        raise ZeroDivisionError("odd\nthing")

    monkeypatch.setattr(doctor_machine, "machine", fails)
    monkeypatch.setattr(doctor_build, "build", lambda: Section("llama.cpp"))
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and not report["fine"]
    assert (
        "machine cannot be looked at: ZeroDivisionError: odd thing" in report["problems"][0]["what"]
    )
    assert report["versions"]["localspec"] and report["machine"] == {}


def test_words_are_safe_to_print_and_broken_things_come_first():
    from localspec.cli.doctor import in_words

    section = Section("environment", {"HF_HOME": "/x\x1b[2J\n"})
    section.warn("slow", "faster")
    section.broken("gone", "get it")
    report = Report([section])
    text = in_words(report)
    assert "\x1b" not in text and not report.fine
    assert text.index("broken: gone") < text.index("warning: slow")
    assert "no problems found" in in_words(Report([Section("x")]))
