"""What this build of llama.cpp is and computes on: its devices, and those of RPC workers."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from localspec import rpc
from localspec.errors import LocalspecError
from localspec.llama.library import EXTRA_SYMBOLS, NEEDED_VERSION, bindings, explain_aborts, library

# ggml_backend_dev_type
_DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "igpu"}


@dataclass(frozen=True)
class Device:
    """Something that llama.cpp computes on.

    Attributes:
        name: e.g. "CUDA0".
        kind: "cpu", "gpu", "igpu" (uses main memory) or "accelerator" (helps the CPU).
        free: bytes free.
        total: bytes in all.
    """

    name: str
    kind: str
    free: int
    total: int

    @property
    def unified(self) -> bool:
        """Whether it uses main memory."""
        apple = sys.platform == "darwin" and platform.machine() == "arm64"
        return self.kind != "gpu" or apple


def devices() -> list[Device]:
    """The devices of this llama.cpp build that are there, with their memory at this moment."""
    lib, size = library(), ctypes.c_size_t
    count = lib.ggml_function("ggml_backend_dev_count", size)
    get = lib.ggml_function("ggml_backend_dev_get", ctypes.c_void_p, size)
    kind = lib.ggml_function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    name = lib.ggml_function("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
    memory = lib.ggml_function(
        "ggml_backend_dev_memory", None, ctypes.c_void_p, ctypes.POINTER(size), ctypes.POINTER(size)
    )
    found = []
    for i in range(count()):
        device, free, total = get(i), size(0), size(0)
        memory(device, ctypes.byref(free), ctypes.byref(total))
        what = _DEVICE_KINDS.get(kind(device), "accelerator")
        found.append(Device(name(device).decode("utf-8", "replace"), what, free.value, total.value))
    return found


def build_report() -> dict[str, Any]:
    """What the installed llama.cpp build is, as JSON-compatible values, for `localspec doctor`.

    Unlike everything else here it works on builds, too, that lack what localspec needs: then only
    the first three are there.

    Returns:
        version: of llama-cpp-python; library: its file; symbols: name -> whether it is there;
        commit and ggml: of llama.cpp, None where it does not say; features: its description of
        itself; backends: what it was compiled for; devices: fields of `Device`.

    Raises:
        LocalspecError: llama-cpp-python cannot be imported.
    """
    api, version = bindings()
    symbols = {
        name: any(hasattr(api._lib, candidate) for candidate in (name, *names[:2]))
        for name, names in EXTRA_SYMBOLS.items()
    }
    report = {"version": version, "library": str(api._lib._name), "symbols": symbols}
    if not all(symbols.values()):
        return report
    lib, size = library(), ctypes.c_size_t

    def text(name: str) -> str | None:
        try:
            return str(lib.ggml_function(name, ctypes.c_char_p)().decode("utf-8", "replace"))
        except AttributeError:
            return None

    count = lib.ggml_function("ggml_backend_reg_count", size)
    get = lib.ggml_function("ggml_backend_reg_get", ctypes.c_void_p, size)
    name_of = lib.ggml_function("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    return {
        **report,
        "commit": text("ggml_commit"),
        "ggml": text("ggml_version"),
        "features": api.llama_print_system_info().decode("utf-8", "replace"),
        "backends": [name_of(get(i)).decode("utf-8", "replace") for i in range(count())],
        "devices": [asdict(device) for device in devices()],
    }


def has_gpu() -> bool:
    """Whether llama.cpp was built for a GPU that is there."""
    return any(d.kind in ("gpu", "igpu") for d in devices())


# Connections of this process to workers, by their HOST:PORT: they serve one client at a time.
connected: Counter[str] = Counter()


def spread(workers: Sequence[str]) -> tuple[list[int], int | None]:
    """The devices for a model spread over workers, and where its ends go.

    Returns:
        Pointers of the workers' devices, then of local GPUs; and the buffer type of the CPU when
        there is no local GPU. The ends (token embeddings and output matrix) stay on this machine:
        the drafter uses them too, and hidden states are smaller than logits.
    """
    lib = library()
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    registry = lib.ggml_function("ggml_backend_reg_by_name", pointer, ctypes.c_char_p)(b"RPC")
    if not registry:
        raise LocalspecError(
            "this build of llama.cpp has no RPC; rebuild it: CMAKE_ARGS=-DGGML_RPC=ON pip install "
            "--force-reinstall --no-cache-dir --no-deps llama-cpp-python"
        )
    address = lib.ggml_function(
        "ggml_backend_reg_get_proc_address", pointer, pointer, ctypes.c_char_p
    )(registry, b"ggml_backend_rpc_add_server")
    if not address:
        raise LocalspecError(
            "this build of llama.cpp cannot add workers; install another version of it: "
            f"pip install 'llama-cpp-python=={NEEDED_VERSION}'"
        )
    add_server = ctypes.CFUNCTYPE(pointer, ctypes.c_char_p)(address)
    rpc.check([w for w in workers if not connected[w]], lib.version)
    explain_aborts()
    count = lib.ggml_function("ggml_backend_reg_dev_count", size, pointer)
    get = lib.ggml_function("ggml_backend_reg_dev_get", pointer, pointer, size)
    found: list[int] = []
    for worker in workers:
        # Not registered as a device of every model: the drafter stays here.
        server = add_server(worker.encode())
        if not server:
            raise LocalspecError(
                f"worker {worker} offers no device; see what ggml-rpc-server printed there"
            )
        found += [get(server, i) for i in range(count(server))]
    gpus = _local_gpus()
    by_type = lib.ggml_function("ggml_backend_dev_by_type", pointer, ctypes.c_int)
    buffers = lib.ggml_function("ggml_backend_dev_buffer_type", pointer, pointer)
    return found + gpus, None if gpus else buffers(by_type(0))


def _local_gpus() -> list[int]:
    """The GPUs llama.cpp would choose by itself: integrated ones only where there are no others."""
    lib, size = library(), ctypes.c_size_t
    count = lib.ggml_function("ggml_backend_dev_count", size)
    get = lib.ggml_function("ggml_backend_dev_get", ctypes.c_void_p, size)
    kind = lib.ggml_function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    all_of: dict[str | None, list[int]] = {"gpu": [], "igpu": []}
    for device in map(get, range(count())):
        all_of.setdefault(_DEVICE_KINDS.get(kind(device)), []).append(device)
    return all_of["gpu"] or all_of["igpu"][:1]
