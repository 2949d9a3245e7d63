"""Workers on other machines: what is refused, and that they compute the same."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import tiny
from localspec import Engine, LocalspecError, rpc
from localspec.llama import library

TESTS = Path(__file__).parent
RPC_LIB = os.environ.get("LOCALSPEC_RPC_LIB")
HELLO_REQUEST = 1 + 8 + 24


@contextlib.contextmanager
def fake_worker(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on loopback that gives its first client to `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                client, _ = server.accept()
                with client:
                    answer(client)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
    thread.join(5)


def speaks(*version: int) -> Callable[[socket.socket], None]:
    def answer(client: socket.socket) -> None:
        request = client.recv(HELLO_REQUEST, socket.MSG_WAITALL)
        assert request[0] == 14 and struct.unpack_from("<Q", request, 1) == (24,)
        client.sendall(struct.pack("<QBBBB", 28, *version, 0) + bytes(24))
        client.recv(1)  # until the other side closes

    return answer


def test_workers_are_parsed():
    assert rpc.parse("") == ()
    assert rpc.parse(()) == ()
    assert rpc.parse("a:1, b.example:65535") == ("a:1", "b.example:65535")
    assert rpc.parse(["10.0.0.1:50052"]) == ("10.0.0.1:50052",)


@pytest.mark.parametrize(
    "text",
    ["host", ":1", "host:", "host:0", "host:65536", "host:000001" + "9" * 9,
     "host:" + "9" * 5000, "host:1x", "host:-1",
     "[::1]:50052", "a:1,,b:2", "a:1,", "a b:1", "a\n:1", "hö:1", "a:1,a:1", "a:²",
     ",".join(f"h:{i}" for i in range(1, 18))],
)  # fmt: skip
def test_malformed_workers_are_refused_in_one_line(text: str):
    with pytest.raises(LocalspecError) as e:
        rpc.parse(text)
    assert "\n" not in str(e.value)


def test_a_worker_says_hello():
    with fake_worker(speaks(7, 0, 1)) as worker:
        assert rpc.hello(worker) == (7, 0, 1)


def test_a_worker_of_another_version_is_refused():
    for version in ((6, 0, 0), (8, 0, 0), (7, 1, 0)):
        with (
            fake_worker(speaks(*version)) as worker,
            pytest.raises(LocalspecError, match=r"speaks version"),
        ):
            rpc.check([worker], "0.3.36")
    with fake_worker(speaks(9, 0, 0)) as worker:
        rpc.check([worker], "99.0")  # unknown: llama.cpp's business


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda c: c.recv(1000) and c.recv(1), "does not answer within"),
        (lambda c: c.recv(1000), "is no ggml-rpc-server"),
        (lambda c: c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "is no ggml-rpc-server"),
        (lambda c: c.recv(1000) and c.sendall(struct.pack("<Q", 1 << 60)), "is no ggml-rpc-server"),
        (lambda c: c.recv(1000) and c.sendall(struct.pack("<QB", 28, 7)), "is no ggml-rpc-server"),
    ],
    ids=["silent", "closes", "http", "large", "short"],
)
def test_what_is_no_worker_is_refused(answer: Callable[[socket.socket], None], words: str):
    with fake_worker(answer) as worker, pytest.raises(LocalspecError, match=words) as e:
        rpc.hello(worker, timeout=0.3)
    assert worker in str(e.value)
    assert "\n" not in str(e.value)


def test_nobody_there():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LocalspecError, match="cannot be reached"):
        rpc.hello(f"127.0.0.1:{port}", timeout=2)


def test_a_build_without_rpc_says_so(tiny_target: tiny.TinyModel):
    if library().api.llama_supports_rpc():
        pytest.skip("this build has RPC")
    with pytest.raises(LocalspecError, match="GGML_RPC=ON") as e:
        Engine.load(tiny_target.gguf, n_ctx=256, n_threads=1, rpc="127.0.0.1:50052")
    assert "\n" not in str(e.value)
    command = [sys.executable, "-m", "localspec", "generate", "-m", str(tiny_target.gguf)]
    done = subprocess.run(
        [*command, "-p", "x", "--rpc", "127.0.0.1:50052"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "GGML_RPC=ON" in done.stderr


def test_no_layers_for_workers_is_refused(tiny_target: tiny.TinyModel):
    with pytest.raises(LocalspecError, match="n_gpu_layers=0"):
        Engine.load(tiny_target.gguf, n_ctx=256, n_gpu_layers=0, rpc=["127.0.0.1:50052"])


# With a build that has RPC: LOCALSPEC_RPC_LIB names the folder of libllama and ggml-rpc-server.
needs_workers = pytest.mark.skipif(
    RPC_LIB is None, reason="LOCALSPEC_RPC_LIB names no build of llama.cpp with RPC"
)


@pytest.fixture
def workers() -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Two workers on loopback: "HOST:PORT,HOST:PORT" and their processes."""
    assert RPC_LIB is not None
    program = next(
        p for p in (Path(RPC_LIB) / n for n in ("ggml-rpc-server", "rpc-server")) if p.exists()
    )
    processes, names = [], []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        processes.append(
            subprocess.Popen(
                [program, "-H", "127.0.0.1", "-p", str(port), "-t", "1"],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip
        names.append(f"127.0.0.1:{port}")
    for name in names:
        for _ in range(100):
            try:
                rpc.hello(name)
                break
            except LocalspecError:
                threading.Event().wait(0.05)
    yield ",".join(names), processes
    for process in processes:
        process.kill()
        process.wait()


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process that loads the build with RPC."""
    assert RPC_LIB is not None
    environment = os.environ | {
        "LLAMA_CPP_LIB_PATH": str(RPC_LIB), "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@needs_workers
def test_workers_compute_what_this_machine_computes(
    tiny_target: tiny.TinyModel,
    tiny_drafter: Callable[[str], tuple[tiny.TinyModel, Path]],
    workers: tuple[str, list[subprocess.Popen[bytes]]],
):
    code = """
        import json, sys
        from conftest import CHAIN, PLAIN, TREE, prompt_of, same_text
        from localspec import Engine
        target, drafter, workers = sys.argv[1:]
        options = dict(n_ctx=256, n_threads=1)
        equal, drafted = 0, 0
        # Two engines on the same workers: they share the connections of this process.
        with (Engine.load(target, drafter, **options) as here,
              Engine.load(target, drafter, rpc=workers, **options) as there,
              Engine.load(target, rpc=workers, **options)):
            for seed in range(3):
                prompt = prompt_of(seed)
                plain = here.complete(prompt, max_tokens=40, draft=PLAIN).token_ids
                for draft in (PLAIN, CHAIN, TREE):
                    result = there.complete(prompt, max_tokens=40, draft=draft)
                    equal += same_text(here, prompt, plain, result.token_ids)
                    drafted += result.tau > 1
        with Engine.load(target, drafter, rpc=workers, prefix_cache="64M", **options) as again:
            first = again.complete(prompt_of(0), max_tokens=8)
            again.complete(prompt_of(1), max_tokens=8)
            once_more = again.complete(prompt_of(0), max_tokens=8)
            assert once_more.token_ids == first.token_ids
            assert once_more.processed_tokens == 1 and once_more.restored_tokens > 0
        print(json.dumps([equal, drafted]))
    """
    done = python(code, tiny_target.gguf, tiny_drafter("vanilla")[1], workers[0])
    assert done.returncode == 0, done.stderr
    equal, drafted = json.loads(done.stdout)
    assert equal >= 6  # the others part at a tie of the two best logits, which same_text checks
    assert drafted > 0


@needs_workers
def test_a_busy_or_missing_worker_is_an_error_and_a_lost_one_the_end(
    tiny_target: tiny.TinyModel, workers: tuple[str, list[subprocess.Popen[bytes]]]
):
    names, processes = workers
    code = """
        import os, signal, sys
        from localspec import DraftOptions, Engine, LocalspecError
        target, workers, pid = sys.argv[1:]
        with Engine.load(target, n_ctx=256, n_threads=1, rpc=workers) as engine:
            for i, step in enumerate(engine.generate([5, 6, 7], draft=DraftOptions(tokens=0),
                                                     max_tokens=200)):
                if i == 3:
                    os.kill(int(pid), signal.SIGKILL)
        print("survived")
    """
    with socket.create_connection(("127.0.0.1", int(names.split(":")[-1]))):  # a client
        busy = python(code, tiny_target.gguf, names, processes[0].pid)
    assert busy.returncode == 1 and "serves nobody else" in busy.stderr
    lost = python(code, tiny_target.gguf, names, processes[0].pid)
    assert lost.returncode < 0  # SIGABRT
    assert "a worker is gone" in lost.stderr and "survived" not in lost.stdout
    missing = python(code, tiny_target.gguf, names, processes[0].pid)
    assert missing.returncode == 1 and "cannot be reached" in missing.stderr
