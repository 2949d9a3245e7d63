"""A server on this machine that speaks the hub's protocol, for tests of downloads."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "fedcba9876543210fedcba9876543210fedcba98"


class Hub(ThreadingHTTPServer):
    """The hub.

    Attributes:
        repos: id -> {file name: bytes}.
        listed: id -> the names that its listing gives.
        commit: what "main" leads to.
        gated: ids of repositories that ask for a login.
        got: (file, Range header) of every download.
        requests: how many there were, of any kind.
        cut: file -> bytes after which its next download breaks off.
        etags: file -> a checksum to give instead of the right one.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.listed: dict[str, list[str]] = {}
        self.commit = COMMIT
        self.gated: set[str] = set()
        self.got: list[tuple[str, str | None]] = []
        self.requests = 0
        self.cut: dict[str, int] = {}
        self.etags: dict[str, str] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def publish(self, name: str, folder: Path, *more: str) -> None:
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}
        self.repos[name] = files
        self.listed[name] = [*files, *more]


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests += 1
        parts = self.path.split("?")[0].strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        name = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        if name not in self.server.repos:
            return self.refuse(404, "RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        main = self.server.commit
        commit = {"main": main, main: main, COMMIT: COMMIT, "v1": OLDER, OLDER: OLDER}.get(revision)
        if commit is None:
            return self.refuse(404, "RevisionNotFound")
        if api:
            files = self.server.repos[name]
            siblings = [
                {"rfilename": n, "size": len(files[n]) if n in files else None}
                for n in self.server.listed[name]
            ]
            answer = {"id": name, "sha": commit, "siblings": siblings}
            return self.answer(json.dumps(answer).encode(), commit, "application/json")
        if name in self.server.gated:
            return self.refuse(403, "GatedRepo")
        file = "/".join(rest[2:])
        if file not in self.server.repos[name]:
            return self.refuse(404, "EntryNotFound")
        return self.answer(self.server.repos[name][file], commit, "application/octet-stream", file)

    def answer(self, data: bytes, commit: str, kind: str, file: str = "") -> None:
        etag = self.server.etags.get(file) or hashlib.sha256(data).hexdigest()
        wanted = self.headers.get("Range")
        start = int(wanted.split("=")[1].split("-")[0]) if wanted else 0
        body = data[start:]
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file:
            self.server.got.append((file, wanted))
        cut = self.server.cut.pop(file, None)
        self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)


def running_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub that huggingface_hub in this process talks to, with a cache in `tmp_path`.

    For a fixture: `yield from running_hub(monkeypatch, tmp_path)`.
    """
    from huggingface_hub import constants

    running = Hub()
    point_to(running.url, monkeypatch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    yield running
    running.shutdown()
    running.server_close()


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub in this process talk to another address."""
    from huggingface_hub import constants, file_download

    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    for module in (constants, file_download):  # older versions look into the second
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
