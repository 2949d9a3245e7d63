"""The server as a process: its socket, what stands in front of the application, its end."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
from collections.abc import Callable, Sequence
from types import FrameType

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from localspec.errors import LocalspecError
from localspec.server.app import build_app
from localspec.server.limits import BodyLimit, Limits, guarded_protocol
from localspec.server.metrics import CountRequests, Metrics
from localspec.server.security import Access, Gate
from localspec.server.service import Service

# Connections the kernel keeps until they are accepted.
_BACKLOG = 128
# How long answers may take to end when the server stops. A round is done long before.
_GRACE_SECONDS = 10


def protect(
    app: ASGIApp, access: Access, limits: Limits, metrics: Metrics, routes: Sequence[BaseRoute]
) -> ASGIApp:
    """An application behind everything that a request must pass: counting, `Gate`, `BodyLimit`."""
    return CountRequests(Gate(BodyLimit(app, limits.max_body), access), metrics, routes)


class Server(uvicorn.Server):
    """uvicorn, with deadlines for clients, and an end that does not wait for whole answers.

    Args:
        app: the application, protected.
        limits: what a client may take.
        metrics: counts what the protocol itself refuses.
        stop: ends the generation under way and sends those who wait away; called again and again
            until nobody is left.
        ready: called when the server listens.
        verbose: log requests to the logger "uvicorn".
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        metrics: Metrics,
        *,
        stop: Callable[[], None] = lambda: None,
        ready: Callable[[], None] = lambda: None,
        verbose: bool = False,
    ) -> None:
        protocol = guarded_protocol(limits, lambda status: metrics.request("none", status))
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                loop="asyncio",
                lifespan="auto",
                log_config=None,
                log_level="info" if verbose else "error",
                access_log=verbose,
                # Nobody in front is known: headers must not say who a client is.
                proxy_headers=False,
                server_header=False,
                # How many are accepted at once: the first of them must be read before they are
                # so many that the oldest have to go.
                backlog=max(1, limits.max_connections // 4),
                timeout_keep_alive=limits.idle_seconds,
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )
        metrics.connections = lambda: len(self.server_state.connections)
        self._stop, self._ready = stop, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_BACKLOG)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop listening, end what is under way, close the connections."""
        stopping = asyncio.create_task(self._keep_stopping())
        try:
            await super().shutdown(sockets)
        finally:
            stopping.cancel()

    async def _keep_stopping(self) -> None:
        # Again and again: a request may be between its turn and its first round.
        while True:
            self._stop()
            await asyncio.sleep(0.05)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ctrl-C and SIGTERM end the server, not the process; a second Ctrl-C does not wait."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def server_for(
    service: Service,
    access: Access,
    limits: Limits,
    *,
    ready: Callable[[], None] = lambda: None,
    verbose: bool = False,
) -> Server:
    """The whole server of a service. Its `run` takes a list with the socket of `bind`."""
    metrics, queue = service.metrics, service.queue
    metrics.queue_depth, metrics.generating = lambda: queue.waiting, lambda: queue.busy

    def stop() -> None:
        queue.close()
        service.engine.cancel()

    app = build_app(service)
    outside = protect(app, access, limits, metrics, app.routes)
    return Server(outside, limits, metrics, stop=stop, ready=ready, verbose=verbose)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens: connections wait in it until the server runs.

    Args:
        host: address or name of this machine.
        port: 0 for any free one.

    Raises:
        LocalspecError: it is taken, needs more rights, or is not an address of this machine.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            problem = f"port {port} is taken; choose another with --port (0: any free one)"
        elif e.errno == errno.EACCES:
            problem = f"port {port} needs more rights; choose one from 1024 with --port"
        else:
            problem = f"cannot listen on {host}: {e.strerror or e}"
        raise LocalspecError(problem) from e


def base_url(listening: socket.socket, host: str) -> str:
    """What OpenAI clients call `base_url`.

    Args:
        listening: the server's socket.
        host: what the user called its address.
    """
    port = listening.getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{name}]:{port}/v1" if ":" in name else f"http://{name}:{port}/v1"
