"""Who may ask: the Host and Origin of a request, and the API key.

A server on this machine can be reached by every web page that its user opens, through the
browser. A page that rebinds its own name to 127.0.0.1 (DNS rebinding) still sends that name as
Host. A page that asks across origins (a drive-by) sends its Origin, also with requests that
browsers make without a preflight. Programs that are no browsers send no Origin, and the Host they
were given.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from localspec.errors import LocalspecError
from localspec.server.replies import refuse

# Answered without a key: what a supervisor asks to see whether the server lives.
OPEN_PATHS = frozenset({"/health", "/v1/health"})

_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/\s?#@]+", re.IGNORECASE)


@dataclass(frozen=True)
class Access:
    """Who may ask.

    Attributes:
        host: the address the server is bound to.
        api_key: the key a request must carry; None: no key is asked for.
        allow_origins: origins of web pages that may ask ("http://localhost:3000"), "*" for all.
            A page from the server itself always may.
        allow_hosts: further names by which the server may be addressed, "*" for all.

    Raises:
        LocalspecError: an address beyond this machine, or all origins, without a key; a value that
            can never match.
    """

    host: str = "127.0.0.1"
    api_key: str | None = field(default=None, repr=False)  # tracebacks and logs show reprs
    allow_origins: Sequence[str] = ()
    allow_hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise LocalspecError("the API key is empty or has spaces or special characters in it")
        if self.api_key is None and not is_loopback(self.host):
            raise LocalspecError(
                f"{self.host} can be reached by others: give --api-key (or set LOCALSPEC_API_KEY), "
                "or keep to 127.0.0.1"
            )
        if self.api_key is None and "*" in self.allow_origins:
            raise LocalspecError(
                "--allow-origin '*' lets every web page in: give --api-key, or name the origins"
            )
        for origin in self.allow_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise LocalspecError(
                    f"'{origin}' is not an origin; write it like http://localhost:3000"
                )
        for host in self.allow_hosts:
            if host != "*" and host_name(host) is None:
                raise LocalspecError(f"'{host}' is not a host name")

    def host_allowed(self, header: str) -> bool:
        """Whether a Host header names this server.

        On a loopback address only loopback names do. Elsewhere also every literal IP address, which
        no DNS answer can rebind, and this machine's own name.
        """
        name = host_name(header)
        if name is None:
            return False
        allowed = {host_name(h) for h in self.allow_hosts}
        if "*" in self.allow_hosts or name in allowed or name in _LOOPBACK_NAMES:
            return True
        if is_loopback(self.host):
            return name == host_name(_bracketed(self.host))
        own = socket.gethostname().lower()
        return _is_ip(name) or name in {own, own.partition(".")[0], f"{own}.local"}

    def origin_allowed(self, origin: str, host: str) -> bool:
        """Whether pages of an origin may ask a server addressed as `host` (its Host header)."""
        if "*" in self.allow_origins:
            return True
        same = origin.lower() in {f"http://{host.lower()}", f"https://{host.lower()}"}
        return same or origin.lower() in {o.lower() for o in self.allow_origins}

    def key_allowed(self, given: str) -> bool:
        """Whether it is the key, in a time that does not depend on what is given."""
        wanted = self.api_key or ""
        # Digests are equally long: the time does not tell the key's length either.
        return hmac.compare_digest(_digest(given), _digest(wanted))


class Gate:
    """ASGI middleware that lets in whom `Access` allows; refusals are one line of JSON.

    Preflights and CORS headers for allowed origins are Starlette's `CORSMiddleware`.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._access = access
        keyed = app if access.api_key is None else _KeyCheck(app, access)
        self._app: ASGIApp = keyed
        if access.allow_origins:
            # "*" with credentials off: nothing here lives on cookies.
            self._app = CORSMiddleware(
                keyed,
                allow_origins=[*access.allow_origins, *map(str.lower, access.allow_origins)],
                allow_methods=["GET", "HEAD", "POST", "OPTIONS"],
                allow_headers=["*"],
                allow_private_network=True,
                expose_headers=["Retry-After"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._access.host_allowed(host):
            problem = f"host '{_shown(host)}' is not allowed; --allow-host adds a name"
            await refuse(scope, receive, send, 403, problem, "host_not_allowed")
            return
        origin = headers.get("origin")
        if origin is None and _foreign_subresource(headers):
            origin = "of another site"  # an <img> or a <script>: they send no Origin
        if origin is not None and not self._access.origin_allowed(origin, host):
            problem = f"origin '{_shown(origin)}' is not allowed; --allow-origin adds one"
            await refuse(scope, receive, send, 403, problem, "origin_not_allowed")
            return
        await self._app(scope, receive, send)


class _KeyCheck:
    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = _key_in(Headers(scope=scope))
        if given is not None and self._access.key_allowed(given):
            await self._app(scope, receive, send)
            return
        problem = (
            "no API key; send it as 'Authorization: Bearer KEY'"
            if given is None
            else "wrong API key"
        )
        await refuse(
            scope, receive, send, 401, problem, "invalid_api_key", {"WWW-Authenticate": "Bearer"}
        )


def host_name(header: str) -> str | None:
    """The name in a Host header, lower case, without port, brackets and final dot.

    None when it is no host at all. IPv6 addresses come back in their shortest spelling.
    """
    match = re.fullmatch(
        r"\[([0-9a-fA-F:.]+)\](?::\d{1,5})?|([^\s/?#@:\[\]]+)(?::\d{1,5})?", header
    )
    if match is None:
        return None
    if match[1] is not None:
        try:
            return str(ipaddress.IPv6Address(match[1]))
        except ValueError:
            return None
    return match[2].lower().removesuffix(".") or None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to bind to."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def client_of(scope: Scope, user: str | None = None) -> tuple[str, ...]:
    """Who a request is from, for taking turns: its `user` field, else its address and program.

    Programs on one machine share its address; what they call themselves tells them apart.
    """
    if user:
        return ("user", user)
    headers = Headers(scope=scope)
    address = scope.get("client") or ("",)
    return ("address", address[0], headers.get("user-agent", ""), headers.get("origin", ""))


def _key_in(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def _foreign_subresource(headers: Headers) -> bool:
    """Whether a browser says that a page of another site asked, other than by a link."""
    site, mode = headers.get("sec-fetch-site"), headers.get("sec-fetch-mode")
    return site in ("cross-site", "same-site") and mode != "navigate"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _shown(header: str) -> str:
    """A header's value fit for a message: printable, not long, without quotes."""
    shown = "".join(c if c.isprintable() and c not in "'\"\\" else "?" for c in header)
    return shown if len(shown) <= 100 else shown[:97] + "..."
