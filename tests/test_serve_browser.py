"""What a web page can do to the server, in a real browser: nothing unless it is allowed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from conftest import PLAIN

from localspec.engine import Engine
from localspec.server.limits import Limits
from localspec.server.run import server_for
from localspec.server.security import Access
from localspec.server.service import Service
from serving import Running, running

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)  # fmt: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]

# Tries everything a page has: fetches with and without preflight, an image.
PAGE = """<pre id=out></pre><script>
const base = "http://127.0.0.1:" + location.search.slice(1);
const say = (line) => { document.getElementById("out").textContent += line + ";"; };
const chat = JSON.stringify({messages: [{role: "user", content: "hi"}], max_tokens: 2});
const json = {"Content-Type": "application/json", "Authorization": "Bearer any"};
async function attempt(name, work) {
    try { say(name + "=" + await work()); } catch (e) { say(name + "=failed"); }
}
(async () => {
    await attempt("read", async () => (await (await fetch(base + "/v1/models")).json()).object);
    await attempt("chat", async () => (await (await fetch(base + "/v1/chat/completions",
        {method: "POST", headers: json, body: chat})).json()).object);
    await attempt("blind", async () => (await fetch(base + "/v1/chat/completions",
        {method: "POST", mode: "no-cors", body: chat})).type);
    await attempt("image", () => new Promise((done, failed) => {
        const image = new Image();
        image.onload = done; image.onerror = failed; image.src = base + "/v1/models";
    }));
    say("done");
})();
</script>"""


@contextlib.contextmanager
def pages(folder: Path) -> Iterator[int]:
    """The page on a port of this machine."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_args: object) -> None:
            return

    (folder / "page.html").write_text(PAGE)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()


def shown(url: str, profile: Path, *options: str) -> str:
    """What Chromium makes of a page."""
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
        *(f"--user-data-dir={profile}", "--virtual-time-budget=20000", *options, url),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    return done.stdout


@contextlib.contextmanager
def serve(engine: Engine, *origins: str) -> Iterator[Running]:
    service = Service(engine, "tiny", draft=PLAIN)
    access = Access("127.0.0.1", allow_origins=origins)
    with running(lambda: server_for(service, access, Limits()), service) as server:
        yield server


def test_pages_of_other_origins(load: Callable[..., Engine], tmp_path: Path):
    with pages(tmp_path) as port, serve(load(None), f"http://localhost:{port}") as server:
        foreign = shown(f"http://127.0.0.1:{port}/page.html?{server.port}", tmp_path / "profile")
        assert "read=failed;chat=failed;blind=opaque;image=failed;done;" in foreign
        metrics = server.service.metrics
        assert {status for _, status in metrics.requests} == {403}
        assert metrics.prompt_tokens == 0
        allowed = shown(f"http://localhost:{port}/page.html?{server.port}", tmp_path / "profile")
        assert "read=list;chat=chat.completion;blind=opaque;" in allowed
        assert metrics.prompt_tokens > 0


def test_a_name_that_is_rebound_to_this_machine(load: Callable[..., Engine], tmp_path: Path):
    with serve(load(None)) as server:
        rebound = "--host-resolver-rules=MAP evil.example 127.0.0.1"
        seen = shown(f"http://evil.example:{server.port}/v1/models", tmp_path / "profile", rebound)
        assert "host_not_allowed" in seen
        seen = shown(f"http://localhost:{server.port}/v1/models", tmp_path / "profile")
        assert '"object":"list"' in seen
