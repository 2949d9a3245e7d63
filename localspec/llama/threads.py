"""How many threads llama.cpp gets."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from localspec import cgroup

MAX_THREADS = 512  # GGML_MAX_N_THREADS


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
