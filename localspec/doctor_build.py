"""The build of llama.cpp: what it has, what it lacks, and whether it fits this machine."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from localspec import cpu_features
from localspec.diagnosis import Section

# Long enough for a GPU driver that wakes up slowly.
_PATIENCE = 120
_REBUILD = "pip install --force-reinstall --no-cache-dir --no-deps llama-cpp-python"
_INSTALL = "pip install --force-reinstall --no-cache-dir 'llama-cpp-python>=0.3.36,<0.4'"
# How ggml calls the backends that people ask about.
_BACKENDS = {
    "CUDA": ("CUDA",),
    "Metal": ("Metal", "MTL"),
    "Vulkan": ("Vulkan",),
    "ROCm": ("ROCm", "HIP"),
    "RPC": ("RPC",),
}


def build(probed: Mapping[str, Any] | None = None) -> Section:
    """The section about llama.cpp.

    Args:
        probed: what `probe` gave; it is asked when left out.
    """
    section = Section("llama.cpp")
    found = probe() if probed is None else probed
    if "error" in found:
        section.facts["usable"] = False
        section.broken(str(found["error"]), str(found.get("mend", _INSTALL)))
        return section
    section.facts["llama-cpp-python"] = found["version"]
    section.facts["library"] = found["library"]
    missing = [name for name, there in found["symbols"].items() if not there]
    section.facts["usable"] = not missing
    section.facts["symbols"] = dict(found["symbols"])
    if missing:
        section.broken(f"llama-cpp-python {found['version']} lacks {', '.join(missing)}", _INSTALL)
        return section
    section.facts["llama.cpp commit"] = found.get("commit")
    section.facts["ggml"] = found.get("ggml")
    names = [str(name) for name in found["backends"]]
    section.facts["compiled for"] = names
    for backend, called in _BACKENDS.items():
        section.facts[backend] = _has(names, called)
    section.facts["devices"] = [dict(device) for device in found["devices"]]
    gpus = [d for d in found["devices"] if d["kind"] in ("gpu", "igpu")]
    _gpus(section, names, bool(gpus))
    _cpu(section, str(found["features"]), cpu_features.of_machine())
    return section


def probe(run: Callable[..., Any] = subprocess.run) -> dict[str, Any]:
    """`llama.build_report` of a process of its own, or {"error": ..., "mend": ...}."""
    if getattr(sys, "frozen", False):  # the executable is the app, not Python
        from localspec import llama
        from localspec.errors import LocalspecError

        try:
            return llama.build_report()
        except LocalspecError as e:
            return {"error": str(e)}
    command = [sys.executable, "-m", "localspec.probe"]
    try:
        done = run(command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return {
            "error": f"llama.cpp has not started within {_PATIENCE} seconds",
            "mend": "restart the machine or its GPU driver; try CUDA_VISIBLE_DEVICES= before it",
        }
    except OSError as e:
        return {"error": f"Python cannot be started: {e.strerror or e}", "mend": "reinstall Python"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        try:
            answer: dict[str, Any] = json.loads(lines[-1])
            return answer
        except ValueError:
            pass
    return _crash(done.returncode, done.stderr)


def _crash(code: int, stderr: str) -> dict[str, Any]:
    last = next((line.strip() for line in reversed(stderr.splitlines()) if line.strip()), "")
    illegal = {-getattr(signal, "SIGILL", 4), 0xC000001D, -1073741795}
    if code in illegal:
        return {
            "error": "llama.cpp ends with an illegal instruction: it was compiled for another CPU",
            "mend": f"CMAKE_ARGS=-DGGML_NATIVE=ON {_REBUILD}",
        }
    name = f"exit status {code}"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
    why = f": {last[:200]}" if last else ""
    return {"error": f"loading llama.cpp ends the process ({name}{why})", "mend": _INSTALL}


def _has(names: list[str], called: tuple[str, ...]) -> bool:
    return any(name.upper().startswith(c.upper()) for name in names for c in called)


def _gpus(section: Section, names: list[str], there: bool) -> None:
    """GPUs of the machine that this build does not use."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        if not _has(names, _BACKENDS["Metal"]):
            section.warn(
                "this build does not use the Mac's GPU (no Metal)",
                f"CMAKE_ARGS=-DGGML_METAL=ON {_REBUILD}",
            )
        return
    if there:
        return
    if nvidia():
        if not _has(names, _BACKENDS["CUDA"]) and not _has(names, _BACKENDS["Vulkan"]):
            section.warn(
                "there is an NVIDIA GPU, and this build does not use it (no CUDA)",
                f"CMAKE_ARGS=-DGGML_CUDA=ON {_REBUILD} (needs the CUDA toolkit)",
            )
        elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            section.warn("CUDA_VISIBLE_DEVICES hides the NVIDIA GPU", "unset CUDA_VISIBLE_DEVICES")
        else:
            section.warn(
                "the build is for GPUs, and there is an NVIDIA GPU, but llama.cpp finds none",
                "see whether nvidia-smi works; update or reload the driver",
            )
    elif Path("/dev/kfd").exists() and not any(
        _has(names, _BACKENDS[b]) for b in ("ROCm", "Vulkan")
    ):
        section.warn(
            "there is an AMD GPU, and this build does not use it",
            f"CMAKE_ARGS=-DGGML_VULKAN=ON {_REBUILD}",
        )


def nvidia() -> bool:
    """Whether the machine has an NVIDIA GPU, as far as its driver shows."""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def _cpu(section: Section, described: str, machine: frozenset[str] | None) -> None:
    built = cpu_features.of_build(described)
    section.facts["CPU features of the build"] = sorted(built)
    if machine is None:
        section.facts["CPU features"] = None
        return
    section.facts["CPU features"] = sorted(machine)
    impossible = sorted((built & cpu_features.knowable()) - machine)
    if impossible:
        section.broken(
            f"llama.cpp was compiled for {', '.join(impossible)}, which this CPU does not have: "
            "it may end with an illegal instruction",
            f"CMAKE_ARGS=-DGGML_NATIVE=ON {_REBUILD}",
        )
    unused = sorted((machine & cpu_features.WORTH_IT) - built)
    if unused:
        section.warn(
            f"this CPU has {', '.join(unused)}, which llama.cpp was compiled without: it is slower "
            "than need be",
            f"CMAKE_ARGS=-DGGML_NATIVE=ON {_REBUILD}",
        )
