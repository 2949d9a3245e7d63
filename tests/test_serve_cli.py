"""`localspec serve` as a command: what it prints, refuses in one line, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import tiny
from localspec.cli import cli
from localspec.errors import LocalspecError
from localspec.server.run import base_url, bind
from serving import ENDLESS


def refused(*args: str, env: dict[str, str] | None = None) -> str:
    """The one line with which a command fails before it loads anything."""
    result = CliRunner().invoke(cli, ["serve", *args], env=env)
    assert isinstance(result.exception, LocalspecError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch):
    import importlib.util

    real = importlib.util.find_spec
    for missing in ("starlette", "uvicorn"):

        def without(name: str, package: str | None = None, missing: str = missing) -> Any:
            return None if name == missing else real(name, package)

        monkeypatch.setattr("localspec.cli.serve.find_spec", without)
        assert "pip install 'localspec[serve]'" in refused("no-such.gguf")


def test_the_network_needs_a_key():
    assert "--api-key" in refused("--host", "0.0.0.0")
    assert "API key" in refused("--host", "0.0.0.0", "--api-key", "")
    # With one, from the environment, the next thing is complained about.
    key = {"LOCALSPEC_API_KEY": "k"}
    assert "no-such" in refused("no-such.gguf", "--host", "0.0.0.0", "--port", "0", env=key)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--allow-origin", "*"], "--allow-origin"),
        (["--allow-origin", "app.example"], "app.example"),
        (["--max-body", "much"], "--max-body"),
        (["--max-body", "0"], "max_body"),
        (["--host", "203.0.113.77", "--api-key", "k"], "203.0.113.77"),
    ],
)
def test_wrong_options(args: list[str], named: str):
    assert named in refused(*args)


def test_a_port_that_is_taken():
    with bind("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        message = refused("no-such.gguf", "--port", port)
        assert f"port {port} is taken" in message
        assert "--port" in message


def test_what_clients_need_to_know():
    with bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        assert base_url(listening, "127.0.0.1") == f"http://127.0.0.1:{port}/v1"
        assert base_url(listening, "0.0.0.0") == f"http://127.0.0.1:{port}/v1"
        assert base_url(listening, "::") == f"http://[::1]:{port}/v1"
        assert base_url(listening, "box.lan") == f"http://box.lan:{port}/v1"


def test_the_commands_help_imports_no_server():
    code = (
        "import sys; from localspec.cli import cli\n"
        "cli(['serve', '--help'], standalone_mode=False)\n"
        "print([m for m in ('starlette', 'uvicorn', 'numpy', 'llama_cpp') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@contextlib.contextmanager
def command(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`localspec serve` in a process of its own, and the base URL it printed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "localspec", "serve", *args, "--port", "0", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.name != "posix", reason="sends POSIX signals")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_and_ends(
    sent: int, tiny_target: tiny.TinyModel, tiny_drafter: Callable[[str], tuple[Any, Path]]
):
    """Ctrl-C in the middle of an answer: the answer ends, the process too, and says no more."""
    drafter = str(tiny_drafter("vanilla")[1])
    options = ["-d", drafter, "--n-ctx", "50000", "--policy", "fixed", "--alias", "mine"]
    with command(str(tiny_target.gguf), *options) as (process, url):
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        assert host == "127.0.0.1"
        request = {"prompt": "hello", "max_tokens": 40_000, "stream": True, "grammar": ENDLESS}
        body = json.dumps(request).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection((host, int(port)), timeout=60) as raw:
            raw.sendall(head.encode() + b"\r\n" + body)
            answer = b""
            while answer.count(b"data: ") < 3:
                answer += raw.recv(65536)
            process.send_signal(sent)
            while part := raw.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b'"model":"mine"' in answer
        assert b'"code":"stopping"' in answer or b'"code": "stopping"' in answer
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert err == "serving mine; Ctrl-C ends it\n"
