"""Who gets in: hosts, origins, preflights, keys; refusals are one line of OpenAI's JSON."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from localspec.errors import LocalspecError
from localspec.server.limits import BodyLimit
from localspec.server.security import Access, Gate, client_of, host_name, is_loopback


async def page(request: Request) -> JSONResponse:
    return JSONResponse({"body": len(await request.body())})


ROUTES = [Route(path, page, methods=["GET", "POST"]) for path in ("/v1/models", "/health")]


def ask(
    access: Access,
    method: str = "GET",
    path: str = "/v1/models",
    *,
    max_body: int = 1000,
    content: Any = None,
    **headers: str,
) -> httpx.Response:
    """One request; header names with _ for -."""

    async def run() -> httpx.Response:
        app = Gate(BodyLimit(Starlette(routes=ROUTES), max_body), access)
        transport = httpx.ASGITransport(app)
        given = {"Host": "localhost:8080"} | {k.replace("_", "-"): v for k, v in headers.items()}
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, headers=given, content=content)

    return asyncio.run(run())


def refused(response: httpx.Response, status: int, code: str) -> str:
    """Check the layout of a refusal; its message."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.text.count("\n") == 1
    assert response.text.endswith("\n")
    error = json.loads(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert "\n" not in error["message"]
    return str(error["message"])


HOSTS = {
    "localhost": True,
    "localhost:8080": True,
    "LOCALHOST.": True,
    "127.0.0.1:99": True,
    "[::1]:8080": True,
    "[0:0:0:0:0:0:0:1]": True,
    "evil.example": False,
    "evil.example:8080": False,
    "localhost.evil.example": False,
    "127.0.0.1.nip.io": False,
    "192.168.1.7": False,
    "localhost@evil.example": False,
    "localhost:8080:90": False,
    "": False,
    "[::1": False,
    "[1.2.3.4]": False,
}


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_on_this_machine(host: str):
    response = ask(Access(), Host=host)
    if HOSTS[host]:
        assert response.status_code == 200
    else:
        assert "--allow-host" in refused(response, 403, "host_not_allowed")


def test_further_hosts():
    access = Access(allow_hosts=("Box.lan", "[fe80::1]"))
    for host in ("box.lan:80", "BOX.LAN", "[FE80:0::1]:80", "localhost"):
        assert ask(access, Host=host).status_code == 200
    refused(ask(access, Host="other.lan"), 403, "host_not_allowed")
    assert ask(Access(allow_hosts=("*",)), Host="any.example").status_code == 200


def test_hosts_on_the_network():
    """Addresses cannot be rebound; other people's names can."""
    access = Access("0.0.0.0", api_key="k")
    key = {"Authorization": "Bearer k"}
    for host in ("192.168.1.7:8080", "[fe80::1]", "localhost", socket.gethostname()):
        assert ask(access, Host=host, **key).status_code == 200
    refused(ask(access, Host="evil.example", **key), 403, "host_not_allowed")


ORIGINS = {
    "http://localhost:8080": True,  # its own
    "HTTP://LOCALHOST:8080": True,
    "http://app.example": True,
    "tauri://localhost": True,
    "http://evil.example": False,
    "http://localhost:3000": False,
    "http://app.example:81": False,
    "http://app.example.evil.example": False,
    "null": False,
}


@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_origins(origin: str, method: str):
    access = Access(allow_origins=("http://App.example", "tauri://localhost"))
    response = ask(access, method, Origin=origin)
    if not ORIGINS[origin]:
        assert "--allow-origin" in refused(response, 403, "origin_not_allowed")
        assert "access-control-allow-origin" not in response.headers
    else:
        assert response.status_code == 200
        if "localhost:8080" not in origin.lower():
            assert response.headers["access-control-allow-origin"] == origin
            assert "Origin" in response.headers["vary"]


def test_preflights():
    access = Access(api_key="k", allow_origins=("http://app.example",))
    asks = {
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization,content-type,x-stainless-os",
        "Access_Control_Request_Private_Network": "true",
    }
    allowed = ask(access, "OPTIONS", Origin="http://app.example", **asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "http://app.example"
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    assert allowed.headers["access-control-allow-private-network"] == "true"
    foreign = ask(access, "OPTIONS", Origin="http://evil.example", **asks)
    refused(foreign, 403, "origin_not_allowed")
    assert not [h for h in foreign.headers if h.startswith("access-control")]
    nobody = ask(Access(), "OPTIONS", Origin="http://evil.example", **asks)
    refused(nobody, 403, "origin_not_allowed")


def test_errors_can_be_read_by_allowed_pages():
    access = Access(api_key="k", allow_origins=("http://app.example",))
    response = ask(access, Origin="http://app.example")
    refused(response, 401, "invalid_api_key")
    assert response.headers["access-control-allow-origin"] == "http://app.example"


def test_all_origins_need_a_key():
    with pytest.raises(LocalspecError, match="--api-key"):
        Access(allow_origins=("*",))
    access = Access(api_key="k", allow_origins=("*",))
    response = ask(access, Origin="http://any.example", Authorization="Bearer k")
    assert response.headers["access-control-allow-origin"] == "*"


def test_a_foreign_page_cannot_even_load_an_image_from_here():
    """<img> and <script> send no Origin, but browsers say where they come from."""
    fetch = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"}
    refused(ask(Access(), **fetch), 403, "origin_not_allowed")
    fetch["Sec_Fetch_Mode"] = "navigate"  # a link, or the address bar
    assert ask(Access(), **fetch).status_code == 200
    fetch = {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Mode": "cors"}
    assert ask(Access(), **fetch).status_code == 200


def test_keys():
    access = Access(api_key="right-key")
    for headers in ({"Authorization": "Bearer right-key"}, {"Authorization": "bearer right-key"},
                    {"X_API_Key": "right-key"}):  # fmt: skip
        assert ask(access, **headers).status_code == 200
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "Bearer right-key2"},
                    {"Authorization": "Bearer right-ke"}, {"X_API_Key": "wrong"}):  # fmt: skip
        response = ask(access, **headers)
        assert "wrong" in refused(response, 401, "invalid_api_key")
        assert "right-key" not in response.text
    for headers in ({}, {"Authorization": "right-key"}, {"Authorization": "Basic right-key"},
                    {"Authorization": "Bearer "}):  # fmt: skip
        response = ask(access, **headers)
        assert "Bearer KEY" in refused(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert ask(access, path="/health").status_code == 200
    assert ask(Access(), Authorization="Bearer whatever").status_code == 200


def test_keys_are_not_shown():
    assert "hidden" not in repr(Access("0.0.0.0", "hidden"))


def test_keys_that_are_no_text_are_wrong_keys():
    async def never(_scope: Any, _receive: Any, _send: Any) -> None:
        raise AssertionError("let in")

    answers: list[Any] = []

    async def send(message: Any) -> None:
        answers.append(message)

    headers = [(b"host", b"localhost"), (b"authorization", b"Bearer \xff\xfe\x80")]
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers}
    asyncio.run(Gate(never, Access(api_key="k"))(scope, None, send))  # type: ignore[arg-type]
    assert answers[0]["status"] == 401


def test_the_comparison_takes_equal_lengths_whatever_is_given(monkeypatch: pytest.MonkeyPatch):
    compared: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def watch(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watch)
    for key in ("r", "right", "right" * 1000):
        ask(Access(api_key="right"), Authorization=f"Bearer {key}")
    assert len(compared) == 3
    assert len(set(compared)) == 1
    assert compared[0][0] == compared[0][1]


def test_a_foreign_page_learns_nothing_about_the_key():
    """Host and Origin come before the key."""
    access = Access(api_key="k")
    for key in ("k", "wrong"):
        response = ask(access, Origin="http://evil.example", Authorization=f"Bearer {key}")
        refused(response, 403, "origin_not_allowed")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "box.lan", "", "8.8.8.8"])
def test_others_need_a_key(host: str):
    with pytest.raises(LocalspecError, match="--api-key") as e:
        Access(host)
    assert "\n" not in str(e.value)
    assert Access(host, api_key="k").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_this_machine_needs_none(host: str):
    assert is_loopback(host)
    Access(host)


@pytest.mark.parametrize(
    "wrong",
    [
        {"api_key": ""},
        {"api_key": "a b"},
        {"api_key": "schlüssel"},
        {"api_key": "a\n"},
        {"allow_origins": ("app.example",)},
        {"allow_origins": ("http://app.example/",)},
        {"allow_origins": ("",)},
        {"allow_hosts": ("http://box",)},
        {"allow_hosts": ("",)},
    ],
    ids=str,
)
def test_what_can_never_match_is_said_at_once(wrong: dict[str, Any]):
    with pytest.raises(LocalspecError) as e:
        Access(**wrong)
    assert "\n" not in str(e.value)


def test_messages_carry_nothing_that_could_hurt_a_terminal():
    response = ask(Access(), Origin="http://evil\x1b[2J" + "x" * 500)
    message = refused(response, 403, "origin_not_allowed")
    assert "\x1b" not in message
    assert len(message) < 300


def test_host_names():
    assert host_name("Example.COM:80") == "example.com"
    assert host_name("[::1]:80") == "::1"
    for nothing in ("", "a b", "a/b", "http://a", "a:b", "[x]", ":80", "."):
        assert host_name(nothing) is None


def test_clients_are_told_apart():
    def scope(address: str, agent: str) -> dict[str, Any]:
        return {
            "type": "http",
            "client": (address, 1),
            "headers": [(b"user-agent", agent.encode())],
        }

    assert client_of(scope("::1", "a")) == client_of(scope("::1", "a"))
    assert client_of(scope("::1", "a")) != client_of(scope("::1", "b"))
    assert client_of(scope("::1", "a")) != client_of(scope("::2", "a"))
    assert client_of(scope("::1", "a"), "me") == client_of(scope("::2", "b"), "me")
    assert client_of({"type": "http", "client": None, "headers": []}) is not None


def test_long_bodies():
    assert ask(Access(), "POST", content=b"x" * 1000).json() == {"body": 1000}
    message = refused(ask(Access(), "POST", content=b"x" * 1001), 413, "body_too_large")
    assert "1000 bytes" in message
    # The key comes first: nobody without it gets a body read.
    refused(ask(Access(api_key="k"), "POST", content=b"x" * 1001), 401, "invalid_api_key")


def test_long_bodies_of_unknown_length_are_not_collected():
    read = 0

    async def pieces() -> Any:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b"x" * 100

    refused(ask(Access(), "POST", content=pieces()), 413, "body_too_large")
    assert read <= 12
