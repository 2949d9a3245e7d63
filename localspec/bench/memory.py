"""The most memory this process has held."""

from __future__ import annotations

import contextlib
import re
import sys
from pathlib import Path

_SELF = Path("/proc/self")


def reset_peak() -> None:
    """Start over where the system allows it (Linux); elsewhere the peak is of the whole life."""
    with contextlib.suppress(OSError):
        (_SELF / "clear_refs").write_text("5")


def peak() -> int | None:
    """Bytes at the highest since `reset_peak`; None where the system does not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", (_SELF / "status").read_text())
        if found is not None:
            return 1024 * int(found[1])
    if sys.platform == "win32":
        return None
    import resource

    value = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return value if sys.platform == "darwin" else 1024 * value
