"""What Linux control groups leave this process: memory, and time of the CPUs.

Containers, systemd and batch systems limit processes by putting them into groups (version 2: one
tree of groups; version 1: a tree for each controller). A limit holds for a group with all groups
below it, so the tightest of the process's own and of those above it counts. In a container those
outside are often out of sight; then the topmost that can be seen is the container's own.

Files and formats: the kernel's admin-guide/cgroup-v2, admin-guide/cgroup-v1/memory and
scheduler/sched-bwc, cgroups(7), and proc_pid_mountinfo(5). Whatever is missing or not in its
format sets no limit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NO_LIMIT = 1 << 60  # version 1 without a limit shows a little less than 2^63


def memory_limit(root: Path = Path("/")) -> int | None:
    """Bytes of main memory that this process and those it shares a group with may take together.

    Args:
        root: of the file system, for tests; so in all functions here.

    Returns:
        None without a limit, and where there are no control groups.
    """
    return min((limit for limit, _ in _memory(root)), default=None)


def memory_free(root: Path = Path("/")) -> int | None:
    """Bytes that may still be taken before a group reaches its limit; None without a limit."""
    return min((free for _, free in _memory(root)), default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPU seconds per second that this process may use, e.g. 1.5; None without a limit."""
    found = []
    for group in _groups(root, "cpu"):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if not quota:
            quota, period = _text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")
        allowed, of = _number(quota), _number(period)
        if allowed and of:  # "max" and -1 are no numbers
            found.append(allowed / of)
    return min(found, default=None)


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, what is free of it) of each group that has a limit."""
    for group in _groups(root, "memory"):
        lines = (line.partition(" ") for line in _text(group / "memory.stat").splitlines())
        stat = {key: _number(value) for key, _, value in lines}
        limits = [
            _number(_text(group / "memory.max")),
            _number(_text(group / "memory.limit_in_bytes")),
            stat.get("hierarchical_memory_limit"),  # version 1: of groups out of sight, too
        ]
        limit = min((each for each in limits if each is not None), default=None)
        if limit is None:
            continue
        used = _text(group / "memory.current") or _text(group / "memory.usage_in_bytes")
        # Cached files give way; what is in a tmpfs or locked is not on these lists. The totals of
        # version 1 are with the groups below, which are always counted in version 2.
        cached = sum(
            stat.get(f"total_{name}", stat.get(name)) or 0
            for name in ("active_file", "inactive_file")
        )
        yield limit, max(0, limit - max(0, (_number(used) or 0) - cached))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's groups with limits of a controller, from the top down."""
    own: dict[str, list[str]] = {}  # of each tree: names from its top down to the process's group
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers or controller in controllers.split(","):
            own["cgroup" if controllers else "cgroup2"] = _names(path)
    mounts = _mounts(root, controller) or {
        "sys/fs/cgroup": ("cgroup2", []),
        f"sys/fs/cgroup/{controller}": ("cgroup", []),
    }
    for kind in ("cgroup2", "cgroup"):
        here = own.get(kind, [])
        tops = {point: top for point, (each, top) in mounts.items() if each == kind}
        below = {
            point: here[len(top) :]
            for point, top in tops.items()
            if here[: len(top)] == top and ".." not in here[len(top) :]
        }
        if not below and ".." not in here:
            # The paths were written from different points of view; what is mounted in a container
            # is its own group. (With "..", the process is in none of the groups that are.)
            below = {point: [] for point in tops}
        for point, names in below.items():
            for depth in range(len(names) + 1):
                yield root.joinpath(point, *names[:depth])


def _mounts(root: Path, controller: str) -> dict[str, tuple[str, list[str]]]:
    """Mount point -> (cgroup2, or cgroup if with the controller; the group at its top)."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, *more) = before.split(" "), after.split(" ")
        if len(fields) < 5:
            continue
        top, point = (_unescaped(field) for field in fields[3:5])
        # A later mount at the same point hides an earlier one, of whatever kind.
        found.pop(point.lstrip("/"), None)
        if kind == "cgroup2" or (kind == "cgroup" and controller in more[-1].split(",")):
            found[point.lstrip("/")] = (kind, _names(top))
    return found


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8").strip()
    except (OSError, ValueError):
        return ""


def _number(text: str) -> int | None:
    """A limit or a size; None for what is neither, or as good as no limit."""
    if not re.fullmatch(r"[0-9]{1,19}", text):
        return None
    value = int(text)
    return value if value < _NO_LIMIT else None
