"""The shared library: loaded on first use, the symbols llama-cpp-python leaves out, the log."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections import deque
from pathlib import Path
from typing import Any

from localspec.errors import LocalspecError

logger = logging.getLogger("localspec.llama")
logger.addHandler(logging.NullHandler())  # silent until the application configures logging

NEEDED_VERSION = "0.3.36"
# Functions with C++ linkage that llama-cpp-python does not bind: C, Itanium and MSVC names.
EXTRA_SYMBOLS: dict[str, tuple[str, str, list[Any], Any]] = {
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
# ggml_log_level; 5 continues the line before.
_LOG_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}


def bindings() -> tuple[Any, str]:
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
        api, self.version = bindings()
        self.api: Any = api
        self.pid = os.getpid()
        self._threads = threading.local()
        for name, (itanium, msvc, argtypes, restype) in EXTRA_SYMBOLS.items():
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


_abort_callbacks: list[Any] = []


def explain_aborts() -> None:
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
