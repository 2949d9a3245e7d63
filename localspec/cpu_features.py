"""Vector instructions: those that llama.cpp was compiled for, and those that the CPU has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# ggml's name -> the flag in Linux's /proc/cpuinfo, and the name in macOS's sysctl.
_LINUX = {
    "SSE3": "pni", "SSSE3": "ssse3", "AVX": "avx", "AVX_VNNI": "avx_vnni", "AVX2": "avx2",
    "F16C": "f16c", "FMA": "fma", "BMI2": "bmi2", "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16",
    "NEON": "asimd", "FP16_VA": "asimdhp", "DOTPROD": "asimddp", "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}  # fmt: skip
_MACOS = {
    "NEON": "hw.optional.neon", "FP16_VA": "hw.optional.arm.FEAT_FP16",
    "DOTPROD": "hw.optional.arm.FEAT_DotProd", "MATMUL_INT8": "hw.optional.arm.FEAT_I8MM",
    "AVX": "hw.optional.avx1_0", "AVX2": "hw.optional.avx2_0", "FMA": "hw.optional.fma",
    "F16C": "hw.optional.f16c", "AVX512": "hw.optional.avx512f",
}  # fmt: skip
# Without these matrix products take clearly longer.
WORTH_IT = frozenset(
    ("AVX", "AVX2", "F16C", "FMA", "AVX_VNNI", "AVX512", "AVX512_VNNI", "DOTPROD", "MATMUL_INT8")
)


def knowable() -> frozenset[str]:
    """Those that `of_machine` would see on this system."""
    return frozenset(_MACOS if sys.platform == "darwin" else _LINUX)


def of_build(described: str) -> frozenset[str]:
    """Those in llama.cpp's description of itself, e.g. "CPU : AVX = 1 | FMA = 1 | CUDA : ..."."""
    found, section = set(), ""
    for part in described.split("|"):
        match = re.fullmatch(r"\s*(?:(\w+)\s*:\s*)?(\w+)\s*=\s*(\S+)\s*", part)
        if match is None:
            continue
        section = match[1] or section
        if section == "CPU" and match[2] in _LINUX and match[3] == "1":
            found.add(match[2])
    return frozenset(found)


def of_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str] | None:
    """Those that this CPU has; None where the system does not tell."""
    if sys.platform == "darwin":
        return _macos()
    try:
        text = cpuinfo.read_text("utf-8", "replace")
    except OSError:
        return None
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.M)
    if line is None:
        return None
    flags = set(line[1].split())
    return frozenset(name for name, flag in _LINUX.items() if flag in flags)


def _macos() -> frozenset[str] | None:
    try:
        done = subprocess.run(
            ["sysctl", *_MACOS.values()], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    values = dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)
    found = frozenset(name for name, key in _MACOS.items() if values.get(key, "").strip() == "1")
    return found or None
