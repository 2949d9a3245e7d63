"""Workers on other machines: llama.cpp's `ggml-rpc-server`, asked before llama.cpp itself connects.

llama.cpp ends the process when a worker cannot be reached, so a worker has to answer the first
message of the protocol here first. The bindings are in `localspec/llama/backends.py`.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable, Sequence

from localspec.errors import LocalspecError

MAX_WORKERS = 16  # GGML_RPC_MAX_SERVERS
# What llama.cpp speaks, by the version of llama-cpp-python: RPC_PROTO_MAJOR_VERSION and the
# newest minor version it accepts. Others are left to llama.cpp.
PROTOCOLS = {"0.3.36": (7, 0)}
_HELLO = 14  # RPC_CMD_HELLO, which never changes
_CAPS = 24  # RPC_CONN_CAPS_SIZE; zeros ask for plain TCP
_LINGER = "hh" if sys.platform == "win32" else "ii"
_NO_LINGER, _RESET_ON_CLOSE = struct.pack(_LINGER, 0, 0), struct.pack(_LINGER, 1, 0)


def parse(workers: str | Iterable[str]) -> tuple[str, ...]:
    """The workers in "HOST:PORT,HOST:PORT" or a sequence of "HOST:PORT".

    Raises:
        LocalspecError: one of them is no HOST:PORT, is named twice, or there are too many.
    """
    given = workers.split(",") if isinstance(workers, str) else list(workers)
    found = tuple(w.strip() for w in given)
    if found == ("",):
        return ()
    for worker in found:
        host, colon, port = worker.partition(":")
        # llama.cpp splits at the first colon and knows IPv4 only.
        # Digits that are not too many, as Python cannot read thousands of them.
        number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
        if not (host and colon and 0 < number < 65536):
            raise LocalspecError(
                f"{worker!r} is no worker; give HOST:PORT, several separated by commas, "
                "e.g. 192.168.1.5:50052 (IPv6 addresses are not supported by llama.cpp)"
            )
        if not (host.isascii() and host.isprintable() and " " not in host):
            raise LocalspecError(f"{worker!r} has a host name with characters that none can have")
    if len(set(found)) < len(found):
        raise LocalspecError("a worker is named twice; name each HOST:PORT once")
    if len(found) > MAX_WORKERS:
        raise LocalspecError(f"{len(found)} workers are more than llama.cpp's {MAX_WORKERS}")
    return found


def hello(worker: str, timeout: float = 5.0) -> tuple[int, int, int]:
    """The protocol version a worker answers with.

    Args:
        worker: a result of `parse`.
        timeout: seconds for the connection, and again for the answer.

    Raises:
        LocalspecError: it cannot be reached, does not answer, or answers something else.
    """
    host, _, port = worker.partition(":")
    try:
        address = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except (OSError, UnicodeError) as e:
        raise LocalspecError(
            f"worker {worker}: the host name is unknown; check the name or give an IPv4 address"
        ) from e
    request = struct.pack("<BQ", _HELLO, _CAPS) + bytes(_CAPS)
    try:
        with socket.create_connection((str(address[0]), int(port)), timeout) as connection:
            # A busy worker finds this message when it is free again. Answering into a connection
            # that was closed in order would kill it (SIGPIPE); into one that was reset, not.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            connection.sendall(request)
            size = struct.unpack("<Q", _receive(connection, 8))[0]
            if size != 4 + _CAPS:
                raise _NotAWorker
            major, minor, patch = struct.unpack_from("<BBB", _receive(connection, size))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    except TimeoutError as e:
        raise LocalspecError(
            f"worker {worker} does not answer within {timeout:g} s; check that ggml-rpc-server "
            "runs there, listens on this address and serves nobody else (it takes one at a time)"
        ) from e
    except (_NotAWorker, ConnectionResetError, BrokenPipeError) as e:
        raise LocalspecError(
            f"what answers at {worker} is no ggml-rpc-server of this llama.cpp; check host and "
            "port, and build both sides from the same version"
        ) from e
    except OSError as e:
        raise LocalspecError(
            f"worker {worker} cannot be reached ({e.strerror or e}); start ggml-rpc-server there "
            f"with --host and --port {port}, and check the firewall"
        ) from e
    return major, minor, patch


def check(workers: Sequence[str], version: str, timeout: float = 5.0) -> None:
    """Refuse workers that llama.cpp could not use.

    Args:
        workers: results of `parse`.
        version: llama-cpp-python's.
        timeout: as for `hello`.

    Raises:
        LocalspecError: as for `hello`, or a worker speaks another version of the protocol.
    """
    for worker in workers:
        major, minor, patch = hello(worker, timeout)
        ours = PROTOCOLS.get(version)
        if ours is not None and (major != ours[0] or minor > ours[1]):
            raise LocalspecError(
                f"worker {worker} speaks version {major}.{minor}.{patch} of the protocol, "
                f"llama-cpp-python {version} speaks {ours[0]}.{ours[1]}; build ggml-rpc-server "
                "from the llama.cpp inside llama-cpp-python"
            )


class _NotAWorker(Exception):
    """Something else answered."""


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise _NotAWorker
        data += more
    return data
