"""The only file that touches ctypes or llama_cpp: models, contexts, batches, the KV cache.

llama.cpp ends the process when an assertion fails, so every input that could reach one is
checked here first. Arrays handed out by a `Context` are views of llama.cpp's own buffers: they
hold until the next `decode` of that context.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import re
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec import cgroup, rpc
from localspec.errors import LocalspecError
from localspec.pairs import FEATURE_ARCHS, LAST_OUTPUT_ARCHS, NO_TREE_ARCHS

logger = logging.getLogger("localspec.llama")
logger.addHandler(logging.NullHandler())  # silent until the application configures logging

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]

NEEDED_VERSION = "0.3.36"
MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MIN_N_CTX, MAX_N_CTX = 8, 1 << 24
MAX_THREADS = 512  # GGML_MAX_N_THREADS
_MAX_VIEWS = 256  # one per layer input and size of a pass
# ggml_type numbers usable for the KV cache.
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}

# What matrices can be stored as: name -> (ggml_type, scalars per block, bytes per block).
TENSOR_TYPES = {
    "f32": (0, 1, 4), "f16": (1, 1, 2), "bf16": (30, 1, 2), "q8_0": (8, 32, 34),
    "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22), "q5_1": (7, 32, 24),
    "q2_k": (10, 256, 84), "q3_k": (11, 256, 110), "q4_k": (12, 256, 144), "q5_k": (13, 256, 176),
    "q6_k": (14, 256, 210),
}  # fmt: skip
# What whole files can be quantised to: llama-quantize's names -> llama_ftype.
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16,
    "q5_k_m": 17, "q6_k": 18, "bf16": 32, "q3_k": 12, "q4_k": 15, "q5_k": 17,
}  # fmt: skip

# Functions with C++ linkage that llama-cpp-python does not bind: C, Itanium and MSVC names.
_EXTRA_SYMBOLS: dict[str, tuple[str, str, list[Any], Any]] = {
    "llama_set_embeddings_layer_inp": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        "?llama_set_embeddings_layer_inp@@YAXPEAUllama_context@@I_N@Z",
        [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool],
        None,
    ),
    "llama_get_embeddings_layer_inp": (
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        "?llama_get_embeddings_layer_inp@@YAPEAMPEAUllama_context@@I@Z",
        [ctypes.c_void_p, ctypes.c_uint32],
        ctypes.c_void_p,
    ),
    "llama_set_embeddings_nextn": (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z",
        [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool],
        None,
    ),
    "llama_get_embeddings_nextn": (
        "_Z26llama_get_embeddings_nextnP13llama_context",
        "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z",
        [ctypes.c_void_p],
        ctypes.c_void_p,
    ),
}


class _BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override: where tensors whose names match a pattern go."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


# llama_token_attr: UNKNOWN and CONTROL, whose tokens llama.cpp turns into no text.
_NO_TEXT = 1 | 8
_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
# ggml_backend_dev_type
_DEVICE_KINDS = {0: "cpu", 1: "gpu", 2: "igpu"}
# ggml_log_level; 5 continues the line before.
_LOG_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


def _import() -> tuple[Any, str]:
    """llama-cpp-python's bindings, and its version."""
    try:
        import llama_cpp
        from llama_cpp import llama_cpp as api
    # Its loader raises the last two when the library is not there, or lacks what it links to.
    except (ImportError, OSError, RuntimeError) as e:
        why = " ".join(str(e).split())
        raise LocalspecError(
            f"llama-cpp-python cannot be imported ({why}); install it with: "
            f"pip install --force-reinstall --no-cache-dir 'llama-cpp-python>={NEEDED_VERSION}'"
        ) from e
    return api, str(llama_cpp.__version__)


class _Library:
    """llama_cpp, imported when first needed, with our own symbols bound and its log captured."""

    def __init__(self) -> None:
        api, self.version = _import()
        self.api: Any = api
        self.pid = os.getpid()
        self._threads = threading.local()
        for name, (itanium, msvc, argtypes, restype) in _EXTRA_SYMBOLS.items():
            setattr(self, name, self._bind(name, itanium, msvc, argtypes, restype))
        # Kept for the life of the process: llama.cpp holds the pointer.
        self._log_callback = api.llama_log_callback(self._log)
        api.llama_log_set(self._log_callback, ctypes.c_void_p(0))
        api.llama_backend_init()

    def _bind(self, name: str, itanium: str, msvc: str, argtypes: list[Any], restype: Any) -> Any:
        for candidate in (name, itanium, msvc):
            function = getattr(self.api._lib, candidate, None)
            if function is not None:
                function.argtypes, function.restype = argtypes, restype
                return function
        raise LocalspecError(
            f"llama-cpp-python {self.version} has no {name}, which localspec needs; install a "
            f"version that has it: pip install 'llama-cpp-python=={NEEDED_VERSION}'"
        )

    def ggml_function(self, name: str, restype: Any, *argtypes: Any) -> Any:
        """A function of ggml, which llama-cpp-python does not bind."""
        library = self.api._lib
        if not hasattr(library, name):  # Windows looks into no dependencies
            found = [
                ctypes.CDLL(str(Path(library._name).with_name(file)))
                for file in ("ggml-base.dll", "ggml.dll")
            ]
            library = next((f for f in found if hasattr(f, name)), library)
        function = getattr(library, name)
        function.restype, function.argtypes = restype, list(argtypes)
        return function

    @property
    def recent(self) -> deque[str]:
        """The errors llama.cpp logged in this thread."""
        if not hasattr(self._threads, "recent"):
            self._threads.recent = deque[str](maxlen=50)
        recent: deque[str] = self._threads.recent
        return recent

    def _log(self, level: int, text: bytes, _user_data: Any) -> None:
        # llama.cpp writes lines in pieces; level 5 continues the last piece.
        mine = self._threads
        mine.level = _LOG_LEVELS.get(level, getattr(mine, "level", logging.DEBUG))
        mine.line = getattr(mine, "line", "") + text.decode("utf-8", "replace")
        if not mine.line.endswith("\n"):
            return
        line, mine.line = mine.line.rstrip(), ""
        if mine.level >= logging.ERROR:
            self.recent.append(line)
        logger.log(mine.level, "%s", line)

    def why(self) -> str:
        """The last errors llama.cpp logged, for the end of a message."""
        # The first complaint is the specific one; callers up the stack add general ones.
        # Some go on over several lines; messages here have one.
        if not self.recent:
            return "no reason given"
        return self.recent[0].split(": ", 1)[-1].splitlines()[0].rstrip(" :")


_library_lock = threading.Lock()
_loaded: list[_Library] = []


def library() -> Any:
    """The llama.cpp library, loaded on first use.

    Raises:
        LocalspecError: llama-cpp-python is missing or too old, or this process was forked from one
            that uses it.
    """
    if not _loaded:
        with _library_lock:
            if not _loaded:
                _loaded.append(_Library())
    if _loaded[0].pid != os.getpid():
        # Its threads were not forked along: waiting for them would hang.
        raise LocalspecError(
            "llama.cpp was in use already when this process was forked; start processes with the "
            '"spawn" method, or load models only in the forked ones'
        )
    return _loaded[0]


def quantize_rows(values: Floats, kind: str) -> npt.NDArray[np.uint8]:
    """Rows of a matrix in one of ggml's types, by ggml's own quantiser.

    Args:
        values: [rows, columns], finite; columns a multiple of the type's block.
        kind: a key of `TENSOR_TYPES`.

    Returns:
        [rows, bytes per row].

    Raises:
        ValueError: an unknown type, or columns that are no whole number of blocks.
    """
    if kind not in TENSOR_TYPES:
        raise ValueError(f"{kind!r} is none of {', '.join(TENSOR_TYPES)}")
    number, per_block, block_bytes = TENSOR_TYPES[kind]
    rows, columns = values.shape
    if columns < 1 or columns % per_block:
        raise ValueError(f"rows of {columns} are no whole number of {per_block}-blocks")
    source = np.ascontiguousarray(values, np.float32)
    out = np.empty((rows, columns // per_block * block_bytes), np.uint8)
    if rows:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        quantise = library().ggml_function(
            "ggml_quantize_chunk", ctypes.c_size_t,
            ctypes.c_int, pointer, pointer, size, size, size, pointer,
        )  # fmt: skip
        quantise(number, source.ctypes.data, out.ctypes.data, 0, rows, columns, None)
    return out


def quantize(
    path_in: str | os.PathLike[str],
    path_out: str | os.PathLike[str],
    kind: str,
    *,
    n_threads: int = 0,
) -> None:
    """Quantise a whole GGUF, as llama-quantize does; `path_out` appears when it is complete.

    Args:
        path_in: a GGUF in any type (from a quantised one, errors add up).
        path_out: the GGUF to write; replaced if it exists.
        kind: a key of `FILE_TYPES`, e.g. "q4_0" or "q4_k_m".
        n_threads: CPU threads; 0 means `default_threads()`.

    Raises:
        LocalspecError: llama.cpp cannot read, quantise or write it; the message carries its reason.
        ValueError: an unknown `kind`.
    """
    if kind not in FILE_TYPES:
        raise ValueError(f"{kind!r} is none of {', '.join(FILE_TYPES)}")
    source, out = Path(path_in), Path(path_out)
    if not source.is_file():
        raise LocalspecError(f"{source} does not exist or is not a file; name a GGUF")
    if out.is_dir() or not out.parent.is_dir():
        raise LocalspecError(f"{out} cannot be written; name a file in an existing directory")
    if os.path.realpath(source) == os.path.realpath(out):
        raise LocalspecError(f"{out} is the file to quantise; choose another output")
    lib = library()
    params = lib.api.llama_model_quantize_default_params()
    params.nthread = n_threads or default_threads()
    params.ftype = FILE_TYPES[kind]
    params.allow_requantize = True
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    lib.recent.clear()
    try:
        failed = lib.api.llama_model_quantize(
            os.fsencode(source), os.fsencode(aside), ctypes.byref(params)
        )
        if failed or not aside.is_file():
            raise LocalspecError(f"llama.cpp cannot quantise {source} to {kind}: {lib.why()}")
        os.replace(aside, out)
    except OSError as e:
        raise LocalspecError(f"{out} cannot be written: {e.strerror or e}") from e
    finally:
        aside.unlink(missing_ok=True)


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
    api, version = _import()
    symbols = {
        name: any(hasattr(api._lib, candidate) for candidate in (name, *names[:2]))
        for name, names in _EXTRA_SYMBOLS.items()
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
_connected: Counter[str] = Counter()
_abort_callbacks: list[Any] = []


def _spread(workers: Sequence[str]) -> tuple[list[int], int | None]:
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
    rpc.check([w for w in workers if not _connected[w]], lib.version)
    _explain_aborts()
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


def _explain_aborts() -> None:
    """Say one line when a worker is gone, instead of a backtrace: llama.cpp ends the process."""
    if _abort_callbacks:
        return

    def explain(message: bytes) -> None:
        text = message.decode("utf-8", "replace")
        if "rpc" in text.lower():
            line = "a worker is gone, and llama.cpp ends the process when that happens"
        else:
            line = "llama.cpp ends the process"
        os.write(2, f"localspec: {line} ({text})\n".encode())

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(explain)
    _abort_callbacks.append(callback)  # llama.cpp holds the pointer
    library().ggml_function("ggml_set_abort_callback", ctypes.c_void_p, type(callback))(callback)


def default_threads(root: Path = Path("/")) -> int:
    """Threads worth starting for matrix products.

    One per physical core (Apple silicon: fast core) that this process may use; fewer where control
    groups allow less CPU time, as containers' do.

    Args:
        root: of the file system, for tests.
    """
    cores = _cores(root)
    quota = cgroup.cpu_quota(root)
    if quota is not None:
        # Threads spin while they wait for each other, and the quota counts that too: n threads
        # have used it up after quota / n of each period (100 ms), then all stand still until the
        # next. Thus they never do more than `quota` threads' work, and the more there are, the
        # more of it is spinning while one of them works alone. A thread for the fraction of a CPU
        # makes up for that and for the pauses only where it brings a lot, at least a quarter: 2
        # threads for 1.5 CPUs, but 7 for 7.65.
        whole = max(1, int(quota))
        cores = min(cores, whole + (quota >= 1.25 * whole))
    return max(1, min(cores, MAX_THREADS))


def _cores(root: Path) -> int:
    """Physical cores that the affinity mask leaves this process."""
    if sys.platform == "darwin":
        return _sysctl("hw.perflevel0.physicalcpu") or _sysctl("hw.physicalcpu") or 4
    if sys.platform != "linux":
        import psutil

        physical = psutil.cpu_count(logical=False) or (os.cpu_count() or 2) // 2
        process = psutil.Process()
        usable = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else physical
        return min(physical, usable)
    cores = set()
    for cpu in os.sched_getaffinity(0):  # what a cpuset leaves, too
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)


def _sysctl(name: str) -> int:
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    libc = ctypes.CDLL(None)
    libc.sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return value.value


class _Owned:
    """A C object that is freed when its owner and all that was made from it are closed.

    At the end of the interpreter, and in reference cycles, Python closes things in any order.
    """

    # Reentrant: the garbage collector may close something while something else is closed.
    _lock = threading.RLock()

    def __init__(self, handle: Any, free: Callable[[Any], None], *needs: _Owned) -> None:
        self._handle, self._free, self._needs, self._users = handle, free, needs, 1
        self._pid = os.getpid()
        with self._lock:
            for needed in needs:
                needed._users += 1

    def release(self) -> None:
        if self._pid != os.getpid():
            return  # a forked child: the threads that freeing would wait for are not here
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._free(self._handle)
            for needed in self._needs:
                needed.release()


@dataclass(frozen=True)
class ModelOptions:
    """How to load a model.

    Attributes:
        n_gpu_layers: layers on the GPU; -1 means all of them (ignored without a GPU).
        use_mmap: map the file instead of reading it.
        use_mlock: keep the model in memory.
        mtp: load multi-token prediction layers too.
        workers: "HOST:PORT" of RPC workers that hold its layers together with local GPUs.
    """

    n_gpu_layers: int = -1
    use_mmap: bool = True
    use_mlock: bool = False
    mtp: bool = False
    workers: tuple[str, ...] = ()


# Pre-tokenizers (`tokenizer.ggml.pre`) for which llama.cpp has code of its own.
_OWN_SPLITTERS = frozenset(
    ["gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "lfm2", "qwen2", "qwen35"]
)
_MAX_RUN = 4000


def cut_long_runs(text: str, most: int = _MAX_RUN) -> list[str]:
    """A text in parts without endless words or gaps.

    C++'s regular expressions take a few hundred bytes of stack for every character of a match: a
    word of 40,000 letters ends the process.
    """
    # White space beyond ASCII counts for both: expressions differ in what they take it for.
    long = re.finditer(rf"[^ \t\n\r\v\f]{{{most}}}|\s{{{most}}}", text)
    ends = [0, *(m.end() for m in long), len(text)]
    parts = [text[a:b] for a, b in pairwise(ends) if a < b]
    return parts or [text]


class Model:
    """A model that llama.cpp has loaded.

    Args:
        path: a GGUF file.
        options: where and how to load it.
        progress: called with 0..1 while loading; returning False stops it.

    Raises:
        LocalspecError: the file cannot be loaded; the message carries llama.cpp's reason.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: ModelOptions | None = None,
        progress: Callable[[float], bool | None] | None = None,
    ) -> None:
        options = options or ModelOptions()
        self._lib = library()
        self._api = self._lib.api
        self.path = Path(path)
        self._handle: Any = None
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = options.n_gpu_layers
        params.load_mode = _load_mode(self._api, options)
        params.load_mtp = options.mtp
        if options.workers:
            self._place(params, options.workers)
        stopped = []

        def report(fraction: float, _user_data: Any) -> bool:
            try:
                keep_going = progress is None or progress(fraction) is not False
            except BaseException as e:  # must not cross the C frames below
                stopped.append(e)
                return False
            if not keep_going:
                stopped.append(LocalspecError(f"loading {self.path} was cancelled"))
            return keep_going

        callback = self._api.llama_progress_callback(report)
        params.progress_callback = callback
        self._lib.recent.clear()
        self._handle = self._api.llama_model_load_from_file(os.fsencode(self.path), params)
        if stopped:
            if self._handle:
                self._api.llama_model_free(self._handle)
                self._handle = None
            raise stopped[0]
        if not self._handle:
            raise LocalspecError(f"llama.cpp cannot load {self.path}: {self._lib.why()}")
        api, h = self._api, self._handle
        _connected.update(options.workers)
        self._owned: _Owned = _Owned(h, lambda h: _free_model(api, h, options.workers))
        self._vocab = api.llama_model_get_vocab(h)
        self.n_layer: int = api.llama_model_n_layer(h)
        self.n_embd: int = api.llama_model_n_embd(h)
        self.n_vocab: int = api.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: int = api.llama_model_n_ctx_train(h)
        self.n_bytes: int = api.llama_model_size(h)
        self.recurrent: bool = (
            api.llama_model_is_recurrent(h)
            or api.llama_model_is_hybrid(h)
            or self.meta("general.architecture") in NO_TREE_ARCHS
        )
        self.n_swa: int = api.llama_model_n_swa(h)  # sliding window; 0 without
        self.bos: int = api.llama_vocab_bos(self._vocab)
        self.eos: int = api.llama_vocab_eos(self._vocab)
        self.add_bos: bool = api.llama_vocab_get_add_bos(self._vocab)
        self._pieces: dict[tuple[int, bool], bytes] = {}

    def _place(self, params: Any, workers: Sequence[str]) -> None:
        """Spread the model over workers and local GPUs."""
        chosen, ends = _spread(workers)
        self._devices = (ctypes.c_void_p * (len(chosen) + 1))(*chosen, None)
        params.devices = ctypes.cast(self._devices, ctypes.c_void_p)
        if ends is not None:
            self._overrides = (_BufferOverride * 2)()
            self._overrides[0].pattern = rb"^(token_embd|output)\."
            self._overrides[0].buft = ends
            params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer.

        Raises:
            LocalspecError: the model is closed.
        """
        if not self._handle:
            raise LocalspecError(f"{self.path.name} is closed; load it again")
        return self._handle

    def meta(self, key: str) -> str | None:
        """A metadata value as text; None when the key is absent."""
        buf = ctypes.create_string_buffer(1 << 10)
        size = self._api.llama_model_meta_val_str(self.handle, key.encode(), buf, len(buf))
        if size < 0:
            return None
        if size >= len(buf):
            buf = ctypes.create_string_buffer(size + 1)
            self._api.llama_model_meta_val_str(self.handle, key.encode(), buf, len(buf))
        return buf.value.decode("utf-8", "replace")

    @property
    def description(self) -> str:
        """e.g. "llama 135M Q4_1"."""
        buf = ctypes.create_string_buffer(256)
        self._api.llama_model_desc(self.handle, buf, len(buf))
        return buf.value.decode("utf-8", "replace")

    def system_info(self) -> str:
        """Build and devices of llama.cpp, as it describes them."""
        info = self._api.llama_print_system_info()
        return f"{self._lib.version} {info.decode('utf-8', 'replace')}"

    @property
    def chat_template(self) -> str | None:
        """The jinja template in the file; None when it has none."""
        text = self._api.llama_model_chat_template(self.handle, None)
        return text.decode("utf-8", "replace") if text else None

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Token ids of `text`.

        Args:
            add_special: add the beginning-of-text token where the model wants one.
            parse_special: read "<|im_start|>" and the like as special tokens.
        """
        parts = cut_long_runs(text) if self._splits_by_regex else [text]
        ids = self._tokenized(parts[0], add_special, parse_special)
        if len(parts) > 1:
            ends = add_special and self._api.llama_vocab_get_add_eos(self._live_vocab)
            last = [ids.pop()] if ends else []
            for part in parts[1:]:
                ids += self._tokenized(part, False, parse_special)
            ids += last
        return ids

    @cached_property
    def _splits_by_regex(self) -> bool:
        """Whether llama.cpp splits texts into words by C++'s regular expressions."""
        bpe = self._api.llama_vocab_type(self._live_vocab) == self._api.LLAMA_VOCAB_TYPE_BPE
        return bpe and self.meta("tokenizer.ggml.pre") not in _OWN_SPLITTERS

    def _tokenized(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        # Lone surrogates (from broken terminals) have no UTF-8 form.
        data = text.encode("utf-8", "replace")
        size = len(data) + 2
        buf = (ctypes.c_int32 * size)()
        n = self._api.llama_tokenize(
            self._live_vocab, data, len(data), buf, size, add_special, parse_special
        )
        if n < 0:  # the buffer was too small; -n fits
            buf = (ctypes.c_int32 * -n)()
            n = self._api.llama_tokenize(
                self._live_vocab, data, len(data), buf, -n, add_special, parse_special
            )
        return list(buf[:n])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes a token stands for; special tokens are empty unless asked for."""
        key = (token, special)
        if key not in self._pieces:
            if not 0 <= token < self.n_vocab:
                raise LocalspecError(f"token {token} is outside the vocabulary of {self.n_vocab}")
            buf = ctypes.create_string_buffer(64)
            n = self._api.llama_token_to_piece(self._live_vocab, token, buf, 64, 0, special)
            if n < 0:
                buf = ctypes.create_string_buffer(-n)
                n = self._api.llama_token_to_piece(self._live_vocab, token, buf, -n, 0, special)
            self._pieces[key] = buf.raw[:n]
        return self._pieces[key]

    def text(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """The text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.piece(t, special=special) for t in tokens).decode("utf-8", "replace")

    def is_end(self, token: int) -> bool:
        """Whether a token ends a generation (end of text, end of turn)."""
        return bool(self._api.llama_vocab_is_eog(self._live_vocab, token))

    @cached_property
    def silent_tokens(self) -> npt.NDArray[np.bool_]:
        """[V] tokens without a text of their own (control tokens), end tokens excepted."""
        vocab, attributes = self._live_vocab, self._api.llama_vocab_get_attr
        kinds = np.array([attributes(vocab, t) for t in range(self.n_vocab)])
        silent: npt.NDArray[np.bool_] = (kinds & _NO_TEXT) != 0
        for token in np.flatnonzero(silent).tolist():
            silent[token] = not self.is_end(token)
        return silent

    @property
    def can_end(self) -> bool:
        """Whether it has a token to end a generation with."""
        ends = (self.eos, self._api.llama_vocab_eot(self._live_vocab))
        return any(t >= 0 and self.is_end(t) for t in ends)

    @property
    def _live_vocab(self) -> Any:
        _ = self.handle
        return self._vocab

    def close(self) -> None:
        """Free the model, at once or with the last of its contexts. A second call does nothing."""
        handle, self._handle = self._handle, None
        if handle:
            self._owned.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


class GrammarSampler:
    """A state of llama.cpp's grammar sampler; never changes once it is made.

    Args:
        model: whose tokens are constrained.
        text: GBNF that `gbnf.check` accepts, with a rule `root`.

    Raises:
        LocalspecError: llama.cpp refuses the grammar, or the model has no end token.
    """

    def __init__(self, model: Model, text: str) -> None:
        self._api, self.model = model._api, model
        vocab = model._live_vocab
        if not model.can_end:
            raise LocalspecError(
                f"{model.path.name} has no token to end an answer with; use it without a grammar"
            )
        handle = self._api.llama_sampler_init_grammar(vocab, text.encode(), b"root")
        if not handle:
            raise LocalspecError("llama.cpp refuses the grammar; check it with its own tools")
        self._own(handle)
        # Control tokens have no text; llama.cpp would take their names for it.
        self._silent = model.silent_tokens

    def _own(self, handle: Any) -> None:
        self._handle = handle
        self._owned: _Owned = _Owned(handle, self._api.llama_sampler_free, self.model._owned)

    def allowed(self, tokens: Ints) -> npt.NDArray[np.bool_]:
        """[n] whether each of some tokens may come next (end tokens: whether it may end here).

        Raises:
            LocalspecError: an id is out of range.
        """
        data = np.zeros(len(tokens), _TOKEN_DATA)
        if len(tokens):
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.model.n_vocab:
                raise LocalspecError(f"token ids must be 0..{self.model.n_vocab - 1}")
            data["id"] = tokens
            kind = self._api.llama_token_data_array
            pointer = ctypes.cast(data.ctypes.data, dict(kind._fields_)["data"])
            array = kind(data=pointer, size=len(tokens), selected=-1, sorted=False)
            _ = self.model.handle
            self._api.llama_sampler_apply(self._handle, ctypes.byref(array))
        allowed: npt.NDArray[np.bool_] = data["logit"] == 0
        allowed &= ~self._silent[tokens]
        return allowed

    def after(self, token: int) -> GrammarSampler:
        """The state after one more token.

        Raises:
            LocalspecError: the grammar does not allow it (llama.cpp would end the process).
        """
        if not self.allowed(np.array([token]))[0]:
            raise LocalspecError(f"the grammar does not allow token {token} here")
        other = object.__new__(GrammarSampler)
        other._api, other.model, other._silent = self._api, self.model, self._silent
        other._own(self._api.llama_sampler_clone(self._handle))
        self._api.llama_sampler_accept(other._handle, token)
        return other

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._owned.release()


@dataclass(frozen=True)
class ContextOptions:
    """How to evaluate a model.

    Attributes:
        n_ctx: cells of the KV cache.
        n_batch: most tokens in one `decode`.
        n_outputs: most rows of logits in one `decode`.
        n_seq_max: sequence ids available (paths of a tree).
        rollback: tokens a recurrent model should be able to forget again; what it really can is
            `Context.rollback`.
        n_threads: CPU threads; 0 means `default_threads()`.
        flash_attn: True, False, or None for llama.cpp's choice.
        kv_type: element type of the KV cache, a key of `KV_TYPES`.
        causal: False for drafters, whose blocks see themselves whole.
        hidden_states: also hand out final hidden states (`Context.hidden`).
        layer_inputs: layers whose inputs to capture (`Context.layer_input`).
        next_states: also hand out the hidden states before the final norm, which autoregressive
            drafters go on from (`Context.next_states`): of the outputs ("outputs"), or of every
            token of a batch ("all").
        mtp: evaluate the model's multi-token prediction layers instead of the model.
        streams: give every sequence id cells of its own, `n_ctx / n_seq_max` each, so that
            independent texts evaluated side by side do not walk over each other's cells.
    """

    n_ctx: int
    n_batch: int = 512
    n_outputs: int = 64
    n_seq_max: int = 1
    rollback: int = 0
    n_threads: int = 0
    flash_attn: bool | None = None
    kv_type: str = "f16"
    causal: bool = True
    hidden_states: bool = False
    layer_inputs: tuple[int, ...] = ()
    next_states: str | None = None
    mtp: bool = False
    streams: bool = False


class Context:
    """One evaluation state of a model: its KV cache and output buffers.

    Args:
        model: the model.
        options: sizes and types.
        other: for drafters, the target's context, whose token embeddings and output matrix are
            used (llama.cpp's `ctx_other`). It must outlive this context.

    Raises:
        LocalspecError: a setting is out of range, or llama.cpp cannot allocate the context.
    """

    def __init__(self, model: Model, options: ContextOptions, other: Context | None = None) -> None:
        self._lib, self._api = model._lib, model._api
        self.model, self.options, self.other = model, options, other
        self._handle: Any = None
        _check_context(model, options)
        params = self._api.llama_context_default_params()
        params.n_ctx = options.n_ctx
        params.n_batch = params.n_ubatch = options.n_batch
        params.n_outputs_max = max(options.n_outputs, options.n_seq_max)
        params.n_seq_max = options.n_seq_max
        params.n_rs_seq = options.rollback
        params.n_threads = params.n_threads_batch = options.n_threads or default_threads()
        params.flash_attn_type = {None: -1, False: 0, True: 1}[options.flash_attn]
        params.type_k = params.type_v = KV_TYPES[options.kv_type]
        params.embeddings = options.hidden_states
        params.kv_unified = not options.streams  # tree paths share the prefix's cells
        params.swa_full = True  # rejected nodes must be removable from sliding windows too
        params.no_perf = True
        params.ctx_type = int(options.mtp)
        if other is not None:
            params.ctx_other = other.handle
        self._lib.recent.clear()
        self._handle = self._api.llama_init_from_model(model.handle, params)
        if not self._handle:
            raise LocalspecError(
                f"llama.cpp cannot create a context of {options.n_ctx} tokens for "
                f"{model.path.name}: {self._lib.why()}"
            )
        needs = [model._owned] if other is None else [model._owned, other._owned]
        self._owned: _Owned = _Owned(self._handle, self._api.llama_free, *needs)
        self._memory = self._api.llama_get_memory(self._handle)
        self.n_ctx: int = self._api.llama_n_ctx(self._handle)
        # llama.cpp cuts this to n_ctx and asserts on larger batches.
        self._n_batch = min(options.n_batch, int(self._api.llama_n_batch(self._handle)))
        self.rollback: int = self._api.llama_n_rs_seq(self._handle)
        self._api.llama_set_causal_attn(self._handle, options.causal)
        for layer in options.layer_inputs:
            self._lib.llama_set_embeddings_layer_inp(self._handle, layer, True)
        if options.next_states is not None:
            masked = options.next_states == "outputs"
            self._lib.llama_set_embeddings_nextn(self._handle, True, masked)
        self._hidden_on = options.hidden_states
        self._views: dict[tuple[int | None, int, int], Floats] = {}
        self._allocate(options.n_batch, options.n_seq_max)
        self._n_tokens = self._n_outputs = 0

    def _allocate(self, n_batch: int, n_seq_max: int) -> None:
        self._token = np.zeros(n_batch, np.int32)
        self._pos = np.zeros(n_batch, np.int32)
        self._n_seq = np.ones(n_batch, np.int32)
        self._seq = np.zeros((n_batch, n_seq_max), np.int32)
        self._output = np.zeros(n_batch, np.int8)
        rows = self._seq.ctypes.data + np.arange(n_batch, dtype=np.uint64) * self._seq.strides[0]
        self._seq_rows = rows.astype(np.uint64)
        batch = self._api.llama_batch()
        fields = dict(type(batch)._fields_)
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._n_seq),
            ("seq_id", self._seq_rows),
            ("logits", self._output),
        ):
            setattr(batch, name, ctypes.cast(array.ctypes.data, fields[name]))
        self._batch, self._embd_type = batch, fields["embd"]
        # Reading `batch.token` would give a view of the field, not a copy of the pointer.
        self._token_pointer = ctypes.cast(self._token.ctypes.data, fields["token"])

    @property
    def handle(self) -> Any:
        """llama.cpp's pointer.

        Raises:
            LocalspecError: the context is closed.
        """
        if not self._handle:
            raise LocalspecError("this context is closed; load the model again")
        return self._handle

    def decode(
        self,
        tokens: Sequence[int] | Ints,
        positions: Sequence[int] | Ints,
        *,
        outputs: Sequence[bool] | bool | npt.NDArray[np.bool_] = True,
        sequences: Sequence[Sequence[int]] | None = None,
        states: Floats | None = None,
    ) -> None:
        """Evaluate a batch of tokens and wait for the results.

        Args:
            tokens: [n] token ids.
            positions: [n] positions, each one past the last of its sequences or later.
            outputs: which tokens give logits; one bool for all, or [n].
            sequences: per token the ids it belongs to (first = the one it attends by); all in
                sequence 0 when left out.
            states: [n, n_embd] float32 for drafters that take a hidden state with every token.

        Raises:
            LocalspecError: an id is out of range, the batch is too large, the cache is full.
        """
        n = len(tokens)
        self._check_size(n)
        self._token[:n] = tokens
        if n and not (
            0 <= int(self._token[:n].min()) <= int(self._token[:n].max()) < self.model.n_vocab
        ):
            raise LocalspecError(
                f"token ids must be 0..{self.model.n_vocab - 1}; check what made the prompt"
            )
        self._batch.token, self._batch.embd = self._token_pointer, None
        if states is not None:
            states = np.ascontiguousarray(states, np.float32)
            if states.shape != (n, self.model.n_embd):  # llama.cpp would read past their end
                raise LocalspecError(
                    f"states must be [{n}, {self.model.n_embd}], not {list(states.shape)}"
                )
            self._batch.embd = ctypes.cast(states.ctypes.data, self._embd_type)
        if self.options.hidden_states and not self._hidden_on:
            self._set_hidden(True)
        self._run(n, positions, outputs, sequences)

    def decode_features(self, features: Floats, positions: Sequence[int] | Ints) -> None:
        """Drafters: put target features into the KV cache.

        Args:
            features: [n, n_features] float32, the captured layer inputs side by side.
            positions: [n] positions of those target tokens.
        """
        n = len(features)
        self._check_size(n)
        rows = np.ascontiguousarray(features, np.float32)
        other = self.other
        width = 0 if other is None else len(other.options.layer_inputs) * other.model.n_embd
        if rows.shape != (n, width):  # llama.cpp would read past their end
            raise LocalspecError(f"features must be [{n}, {width}], not {list(rows.shape)}")
        self._batch.token = None
        self._batch.embd = ctypes.cast(rows.ctypes.data, self._embd_type)
        # Injection has no outputs; llama.cpp would warn that hidden states were asked for.
        if self._hidden_on:
            self._set_hidden(False)
        self._run(n, positions, False, None)

    def decode_states(
        self,
        states: Floats,
        positions: Sequence[int] | Ints,
        *,
        outputs: Sequence[bool] | bool | npt.NDArray[np.bool_] = True,
        sequences: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`decode` for vectors in the place of token embeddings.

        Args:
            states: [n, n_embd] float32.
            positions, outputs, sequences: as for `decode`.
        """
        n = len(states)
        self._check_size(n)
        rows = np.ascontiguousarray(states, np.float32)
        if rows.shape != (n, self.model.n_embd):
            raise LocalspecError(
                f"states must be [{n}, {self.model.n_embd}], not {list(rows.shape)}"
            )
        self._batch.token = None
        self._batch.embd = ctypes.cast(rows.ctypes.data, self._embd_type)
        # llama.cpp makes every row an output where hidden states are on.
        wanted = bool(np.any(outputs))
        if self.options.hidden_states and self._hidden_on != wanted:
            self._set_hidden(wanted)
        self._run(n, positions, outputs, sequences)

    def encode_features(self, features: Floats) -> Floats:
        """Eagle3 drafters: fuse target features into the drafter's own hidden states.

        Args:
            features: [n, n_features] float32; n at most the context's outputs.

        Returns:
            [n, n_embd] (a copy).
        """
        n = len(features)
        if not 0 < n <= min(self._n_batch, self.options.n_outputs):
            raise LocalspecError(f"{n} rows of features in one pass are too many or none")
        rows = np.ascontiguousarray(features, np.float32)
        width = 3 * int(self.model.meta("eagle3.target_hidden_size") or 0)
        if rows.shape != (n, width):
            raise LocalspecError(f"features must be [{n}, {width}], not {list(rows.shape)}")
        self._batch.token = None
        self._batch.embd = ctypes.cast(rows.ctypes.data, self._embd_type)
        # A row is fused by itself, but llama.cpp wants positions that go on from the cache.
        self._pos[:n] = np.arange(n) + self.seq_end(0) + 1
        self._output[:n], self._n_seq[:n], self._seq[:n, 0] = True, 1, 0
        self._batch.n_tokens = n
        self._lib.recent.clear()
        self._n_tokens = self._n_outputs = 0
        if self._api.llama_encode(self.handle, self._batch):
            raise LocalspecError(f"llama.cpp refused {n} rows of features: {self._lib.why()}")
        self._api.llama_synchronize(self.handle)
        pointer = ctypes.c_void_p(self._lib.llama_get_embeddings_nextn(self.handle))
        return _view(pointer, (n, self.model.n_embd)).copy()

    def _set_hidden(self, on: bool) -> None:
        self._api.llama_set_embeddings(self.handle, on)
        self._hidden_on = on

    def _check_size(self, n: int) -> None:
        if not 0 < n <= self._n_batch:
            raise LocalspecError(f"a batch must hold 1 to {self._n_batch} tokens, not {n}")

    def _run(
        self,
        n: int,
        positions: Sequence[int] | Ints,
        outputs: Sequence[bool] | bool | npt.NDArray[np.bool_],
        sequences: Sequence[Sequence[int]] | None,
    ) -> None:
        self._pos[:n] = positions
        self._output[:n] = outputs
        n_outputs = int(self._output[:n].sum())
        limit = max(self.options.n_outputs, self.options.n_seq_max)
        if n_outputs > limit:
            raise LocalspecError(f"{n_outputs} outputs asked of a context made for {limit}")
        if sequences is None:
            self._n_seq[:n] = 1
            self._seq[:n, 0] = 0
        else:
            for i, ids in enumerate(sequences):
                if not ids or not 0 <= min(ids) <= max(ids) < self.options.n_seq_max:
                    raise LocalspecError(
                        f"sequence ids must be 0..{self.options.n_seq_max - 1}, not {list(ids)}"
                    )
                self._n_seq[i] = len(ids)
                self._seq[i, : len(ids)] = ids
        self._batch.n_tokens = n
        self._lib.recent.clear()
        status = self._api.llama_decode(self.handle, self._batch)
        if status == 0:
            # Backends work asynchronously; waiting here lets callers time the pass.
            self._api.llama_synchronize(self.handle)
            self._n_tokens, self._n_outputs = n, n_outputs
            return
        self._n_tokens = self._n_outputs = 0
        if status == 1:
            raise LocalspecError(
                f"the context of {self.n_ctx} tokens is full; load the model with a larger n_ctx"
            )
        raise LocalspecError(f"llama.cpp refused a batch of {n} tokens: {self._lib.why()}")

    def logits(self) -> Floats:
        """[n_outputs, n_vocab] logits of the last batch, in batch order (a view)."""
        pointer = self._api.llama_get_logits(self.handle)
        return self._view(pointer, (self._n_outputs, self.model.n_vocab))

    def hidden(self) -> Floats:
        """[n_outputs, n_embd] final-norm hidden states of the last batch (a view)."""
        if not self._hidden_on:
            raise LocalspecError("this context was made without hidden states")
        pointer = self._api.llama_get_embeddings(self.handle)
        return self._view(pointer, (self._n_outputs, self.model.n_embd))

    def next_states(self) -> Floats:
        """[n_outputs or n_tokens, n_embd] states before the final norm (a view)."""
        if self.options.next_states is None or not self._n_tokens:
            raise LocalspecError("this context was made without next states")
        rows = self._n_outputs if self.options.next_states == "outputs" else self._n_tokens
        pointer = self._lib.llama_get_embeddings_nextn(self.handle)
        return self._view(pointer, (rows, self.model.n_embd))

    def layer_input(self, layer: int) -> Floats:
        """[n_tokens, n_embd] inputs of a layer for the whole last batch (a view)."""
        if layer not in self.options.layer_inputs or not self._n_tokens:
            raise LocalspecError(f"the inputs of layer {layer} were not captured")
        pointer = self._lib.llama_get_embeddings_layer_inp(self.handle, layer)
        return self._view(pointer, (self._n_tokens, self.model.n_embd))

    def _view(self, pointer: Any, shape: tuple[int, int]) -> Floats:
        """`_view` of a buffer; the views are kept, for llama.cpp hands out the same few."""
        if not isinstance(pointer, int):
            pointer = ctypes.cast(pointer, ctypes.c_void_p).value
        key = (pointer, *shape)
        view = self._views.get(key)
        if view is None:
            view = _view(ctypes.c_void_p(pointer), shape)
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            self._views[key] = view
        return view

    def seq_copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """Let sequence `target` own `source`'s cells at positions [start, end) too."""
        self._check_ids(source, target)
        self._api.llama_memory_seq_cp(self._memory_of_handle, source, target, start, end)

    def seq_remove(self, sequence: int, start: int = -1, end: int = -1) -> bool:
        """Take cells at positions [start, end) from a sequence; -1 means from or to the end.

        Returns:
            False when the memory cannot forget a part (recurrent models).
        """
        self._check_ids(sequence)
        return bool(self._api.llama_memory_seq_rm(self._memory_of_handle, sequence, start, end))

    def seq_keep(self, sequence: int) -> None:
        """Forget every other sequence."""
        self._check_ids(sequence)
        self._api.llama_memory_seq_keep(self._memory_of_handle, sequence)

    def seq_end(self, sequence: int) -> int:
        """The largest position of a sequence in the cache; -1 when it is empty."""
        self._check_ids(sequence)
        return int(self._api.llama_memory_seq_pos_max(self._memory_of_handle, sequence))

    def clear(self) -> None:
        """Forget everything."""
        self._api.llama_memory_clear(self._memory_of_handle, False)

    @property
    def _whole_states(self) -> bool:
        # The state of a single sequence leaves out what its window has passed, so that it could
        # not be shortened afterwards. Recurrent ones never can, and cannot be saved whole.
        return self.model.n_swa > 0 and not self.model.recurrent

    def state_size(self) -> int:
        """Bytes that `save_state` takes."""
        if self._whole_states:
            return int(self._api.llama_state_get_size(self.handle))
        return int(self._api.llama_state_seq_get_size(self.handle, 0))

    def save_state(self) -> npt.NDArray[np.uint8]:
        """The cells of sequence 0, the only one in use, as a copy in main memory.

        Raises:
            LocalspecError: llama.cpp cannot copy them.
            MemoryError: there is no room for the copy.
        """
        state = _pages(self.state_size())
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        self._lib.recent.clear()
        if self._whole_states:
            n = self._api.llama_state_get_data(self.handle, pointer, len(state))
        else:
            n = self._api.llama_state_seq_get_data(self.handle, pointer, len(state), 0)
        if not n or n != len(state):
            raise LocalspecError(f"llama.cpp cannot copy the KV cache: {self._lib.why()}")
        return state

    def load_state(self, state: npt.NDArray[np.uint8]) -> None:
        """Replace everything by what this context's `save_state` gave.

        Raises:
            LocalspecError: llama.cpp cannot bring it back; the context is empty then.
        """
        self.clear()
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        self._lib.recent.clear()
        if self._whole_states:
            n = self._api.llama_state_set_data(self.handle, pointer, len(state))
        else:
            n = self._api.llama_state_seq_set_data(self.handle, pointer, len(state), 0)
        if n != len(state):
            self.clear()
            raise LocalspecError(f"llama.cpp cannot bring a KV cache back: {self._lib.why()}")

    @property
    def _memory_of_handle(self) -> Any:
        _ = self.handle
        return self._memory

    def _check_ids(self, *ids: int) -> None:
        for i in ids:
            if not 0 <= i < self.options.n_seq_max:
                raise LocalspecError(f"sequence {i} is outside 0..{self.options.n_seq_max - 1}")

    def close(self) -> None:
        """Free the context. A second call does nothing."""
        handle, self._handle = self._handle, None
        self._views = {}
        if handle:
            self._owned.release()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self.close()


def _free_model(api: Any, handle: Any, workers: Sequence[str]) -> None:
    api.llama_model_free(handle)
    _connected.subtract(workers)


def _pages(size: int) -> npt.NDArray[np.uint8]:
    """[size] bytes that go back to the system when they are dropped, as the heap's need not."""
    try:
        if sys.platform == "win32":
            pages = mmap.mmap(-1, size)
        else:
            pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise MemoryError(str(e)) from e
    return np.frombuffer(pages, np.uint8)


def _view(pointer: Any, shape: tuple[int, int]) -> Floats:
    address = ctypes.cast(pointer, ctypes.c_void_p).value
    if not address:
        raise LocalspecError("llama.cpp has no outputs for the last batch")
    buffer: Any = (ctypes.c_float * (shape[0] * shape[1])).from_address(address)
    view: Floats = np.frombuffer(buffer, np.float32).reshape(shape)
    return view


def _load_mode(api: Any, options: ModelOptions) -> int:
    name = {
        (False, False): "LLAMA_LOAD_MODE_NONE",
        (True, False): "LLAMA_LOAD_MODE_MMAP",
        (False, True): "LLAMA_LOAD_MODE_MLOCK",
        (True, True): "LLAMA_LOAD_MODE_MMAP_MLOCK",
    }[options.use_mmap, options.use_mlock]
    return int(getattr(api, name))


def valid_context(n_ctx: int, kv_type: str) -> bool:
    """Whether a context of this size and type can be asked for."""
    return MIN_N_CTX <= n_ctx <= MAX_N_CTX and kv_type in KV_TYPES


def _check_context(model: Model, o: ContextOptions) -> None:
    if not MIN_N_CTX <= o.n_ctx <= MAX_N_CTX:
        raise LocalspecError(f"n_ctx must be between {MIN_N_CTX} and {MAX_N_CTX}, not {o.n_ctx}")
    if o.n_batch < 1 or o.n_outputs < 1 or not 0 <= o.n_threads <= MAX_THREADS:
        raise LocalspecError(
            "n_batch and n_outputs must be at least 1, n_threads at least 0 and at most "
            f"{MAX_THREADS}"
        )
    if not 1 <= o.n_seq_max <= MAX_SEQUENCES:
        raise LocalspecError(f"n_seq_max must be 1..{MAX_SEQUENCES}, not {o.n_seq_max}")
    if o.kv_type not in KV_TYPES:
        raise LocalspecError(f"KV type {o.kv_type!r} is unknown; one of {', '.join(KV_TYPES)}")
    arch = model.meta("general.architecture")
    if o.layer_inputs and arch not in FEATURE_ARCHS:
        raise LocalspecError(f"llama.cpp gives no layer features for {arch} models")
    if o.next_states not in (None, "outputs", "all"):
        raise LocalspecError(f"next_states must be 'outputs' or 'all', not {o.next_states!r}")
    for layer in o.layer_inputs:
        # llama.cpp asserts on this; n_layer itself (the last layer's output) is not filled by
        # most architectures.
        most = model.n_layer if arch in LAST_OUTPUT_ARCHS else model.n_layer - 1
        if not 0 <= layer <= most:
            raise LocalspecError(f"layer {layer} is outside 0..{most}")
