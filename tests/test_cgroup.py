"""Control groups: what they leave is found wherever the limit is, and whatever the files hold."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec import cgroup, llama, memory
from localspec.llama import threads as threads_module

NO_LIMIT = "9223372036854771712"  # what version 1 shows, with pages of 4 KiB
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def v1(top: str, *controllers: str, at: str = "") -> str:
    """A line of mountinfo."""
    point = at or "/sys/fs/cgroup/" + ",".join(controllers)
    return f"32 31 0:29 {top} {point} rw - cgroup cgroup rw,{','.join(controllers)}\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cpus", "limit"),
    [
        pytest.param({}, None, None, id="no groups: not Linux"),
        pytest.param({"proc/self/cgroup": "0::/\n"}, None, None, id="none in sight"),
        pytest.param(
            {"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/memory.max": "max\n"},
            None, None, id="no limit, v2",
        ),
        pytest.param(
            {"sys/fs/cgroup/cpu.max": "150000 100000\n", "sys/fs/cgroup/memory.max": "1000\n"},
            1.5, 1000, id="a container, v2",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "1:cpu:/x\n0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000",
                "sys/fs/cgroup/a/b/memory.max": "7",
                "sys/fs/cgroup/a/b/c/memory.max": "1",
                "sys/fs/cgroup/other/memory.max": "1",
            },
            2.0, 7, id="nested, v2: not groups below, nor others",
        ),
        pytest.param(
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
            },
            0.5, None, id="v1",
        ),
        pytest.param(
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
             "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            None, None, id="no limit, v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:memory:/jobs/me\n4:cpu,cpuacct:/slice\n1:name=systemd:/z\n",
                "proc/self/mountinfo": v1("/", "memory") + v1("/", "cpu", "cpuacct"),
                "sys/fs/cgroup/cpu,cpuacct/slice/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/slice/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": "5000",
                "sys/fs/cgroup/memory/jobs/me/memory.limit_in_bytes": NO_LIMIT,
                "sys/fs/cgroup/memory/slice/memory.limit_in_bytes": "1",
                "sys/fs/cgroup/memory/z/memory.limit_in_bytes": "1",
            },
            3.0, 5000, id="nested, v1: a tree for each controller",
        ),
        pytest.param(
            {
                # What Docker shows without a namespace for groups. A folder of the same name below
                # is of containers inside this one.
                "proc/self/cgroup": "3:cpu:/docker/abc\n2:memory:/docker/abc/in\n",
                "proc/self/mountinfo": v1("/docker/abc", "memory") + v1("/docker/abc", "cpu"),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9000",
                "sys/fs/cgroup/memory/in/memory.limit_in_bytes": "8000",
                "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "1",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "25000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "50000",
                "sys/fs/cgroup/cpu/docker/cpu.cfs_quota_us": "1",
                "sys/fs/cgroup/cpu/docker/cpu.cfs_period_us": "50000",
            },
            0.5, 8000, id="a container's own group is mounted as the root",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/garden/bad/7\n",
                "proc/self/mountinfo": V2.replace(" / ", " /garden/good/7 ", 1),
                "sys/fs/cgroup/memory.max": "6",
                "sys/fs/cgroup/garden/memory.max": "1",
            },
            None, 6, id="the two are written from different points of view",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../outside\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/memory.max": "6",
                "sys/fs/cgroup/outside/memory.max": "1",
            },
            None, None, id="outside the groups that are mounted",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../mine\n",
                "proc/self/mountinfo": V2.replace(" / ", " /.. ", 1),
                "sys/fs/cgroup/memory.max": "6",
                "sys/fs/cgroup/mine/memory.max": "5",
            },
            None, 5, id="mounted from one group higher",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/a\n0::/b\n",
                "proc/self/mountinfo": v1("/", "memory")
                + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "),
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "70",
                "sys/fs/cgroup/unified/b/cpu.max": "100000 50000",
            },
            2.0, 70, id="both versions at a time",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a:b c\n",
                "proc/self/mountinfo": v1("/", "memory", at="/my\\040groups")
                + V2.replace("/sys/fs/cgroup ", "/my\\040groups "),
                "my groups/a:b c/memory.max": "11",
                "sys/fs/cgroup/memory.max": "1",
            },
            None, 11, id="mounted elsewhere, over another",
        ),
        pytest.param(
            {"proc/self/cgroup": "2:memory:/docker/abc\n",
             "proc/self/mountinfo": v1("/docker/abc", "memory"),
             "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
             "sys/fs/cgroup/memory/memory.stat": "cache 0\nhierarchical_memory_limit 4000\n"},
            None, 4000, id="a limit of a group out of sight, v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "2:memory:/here\n1:pids:/\n",
                "proc/self/mountinfo": v1("/there", "memory") + v1("/", "pids"),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "6",
            },
            None, 6, id="different points of view, v1: for each tree by itself",
        ),
        pytest.param(
            {
                "proc/self/mountinfo": V2 + V2.replace("/sys/fs/cgroup ", "/new ")
                + "40 23 0:30 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n",
                "sys/fs/cgroup/memory.max": "1",
                "new/memory.max": "9",
            },
            None, 9, id="hidden by another mount",
        ),
        pytest.param(
            {"sys/fs/cgroup/cpu.max": "100000 0", "sys/fs/cgroup/memory.max": "0"},
            None, 0, id="nothing at all",
        ),
    ],
)  # fmt: skip
def test_limits(files, cpus, limit, tmp_path):
    root = tree(tmp_path, files)
    assert cgroup.cpu_quota(root) == cpus
    assert cgroup.memory_limit(root) == limit


def test_free_memory_v2(tmp_path):
    """The group that is nearest to its limit counts, whatever their order; caches give way."""
    root = tree(tmp_path, {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "1000000\n",
        "sys/fs/cgroup/a/memory.current": "900000\n",
        # 300000 of files: 60000 in a tmpfs and 40000 locked stay.
        "sys/fs/cgroup/a/memory.stat":
            "anon 500000\nfile 300000\nshmem 60000\nactive_file 150000\ninactive_file 50000\n",
        "sys/fs/cgroup/a/b/memory.max": "500000\n",
        "sys/fs/cgroup/a/b/memory.current": "100000\n",
    })  # fmt: skip
    assert cgroup.memory_limit(root) == 500_000
    assert cgroup.memory_free(root) == 1_000_000 - 900_000 + 200_000
    (root / "sys/fs/cgroup/a/b/memory.current").write_text("600000")  # a lowered limit
    assert cgroup.memory_free(root) == 0
    (root / "sys/fs/cgroup/a/b/memory.current").unlink()
    (root / "sys/fs/cgroup/a/memory.stat").unlink()
    assert cgroup.memory_free(root) == 100_000
    (root / "sys/fs/cgroup/a/memory.max").write_text("max")
    assert cgroup.memory_free(root) == 500_000


def test_free_memory_v1(tmp_path):
    root = tree(tmp_path, {
        "proc/self/cgroup": "4:memory:/a\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "900000",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1000000",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "700000",
        "sys/fs/cgroup/memory/a/memory.stat":
            "active_file 1\ninactive_file 1\ntotal_active_file 30000\ntotal_inactive_file 20000\n",
    })  # fmt: skip
    assert cgroup.memory_free(root) == 300_000 + 50_000
    (root / "sys/fs/cgroup/memory/a/memory.stat").write_text("total_active_file 800000\n")
    assert cgroup.memory_free(root) == 1_000_000  # counts are not taken at the same moment


_AMOUNTS = st.none() | st.just("max") | st.integers(0, 10**12)


@settings(max_examples=60, deadline=None)
@given(limits=st.lists(_AMOUNTS, max_size=6), top=st.integers(0, 6), old=st.booleans())
def test_the_tightest_of_all_groups_in_sight(limits, top, old):
    """Groups one in another, the first `top` out of sight."""
    names = [f"g{i}" for i in range(len(limits))]
    hidden, seen = names[:top], names[top:]
    with tempfile.TemporaryDirectory() as folder:
        mount = v1("/" + "/".join(hidden), "memory")
        if not old:
            mount = mount.replace("cgroup cgroup rw,memory", "cgroup2 cgroup2 rw")
        path, file = "/" + "/".join(names), "memory.limit_in_bytes" if old else "memory.max"
        files = {
            "proc/self/cgroup": f"7:cpu:/no\n{'3:memory' if old else '0:'}:{path}\n",
            "proc/self/mountinfo": mount,
        }
        for depth, limit in enumerate(limits[top:], 1):
            if limit is not None:
                text = NO_LIMIT if old and limit == "max" else str(limit)
                files["/".join(["sys/fs/cgroup/memory", *seen[:depth], file])] = text
        root = tree(Path(folder), files)
        counted = [limit for limit in limits[top:] if isinstance(limit, int)]
        assert cgroup.memory_limit(root) == min(counted, default=None)
        assert cgroup.memory_free(root) == min(counted, default=None)


_FILES = [
    "proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us",
    "sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes",
]  # fmt: skip
_PIECES = st.text(max_size=4) | st.sampled_from([
    "0", "1", "4096", "-1", "²", "٣", "1_0", "1e3", "max", "99999999999999999999", "\0", "\n",
    "\\777", "0::/", "4:memory:/a", "1:cpu:/..", "/", "/..", "::", "-", "cgroup2", "cgroup",
    "rw,cpu", "active_file", "inactive_file", "hierarchical_memory_limit",
])  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(_FILES),
        st.lists(_PIECES, max_size=12).map(lambda parts: " ".join(parts).encode())
        | st.binary(max_size=20)
        | st.integers(1, 5000).map(lambda n: b"9" * n),
    )
)
def test_whatever_the_files_hold(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        quota, limit = cgroup.cpu_quota(Path(folder)), cgroup.memory_limit(Path(folder))
        free = cgroup.memory_free(Path(folder))
        assert quota is None or quota > 0
        assert (limit is None) == (free is None)
        assert limit is None or 0 <= free <= limit


def test_a_folder_in_place_of_a_file(tmp_path):
    for name in _FILES:
        (tmp_path / name).mkdir(parents=True)
    assert cgroup.cpu_quota(tmp_path) is cgroup.memory_free(tmp_path) is None


def test_loading_heeds_it(monkeypatch):
    """The container's memory, when that is less than the machine's."""
    monkeypatch.setattr(cgroup, "memory_free", lambda: 12345)
    assert memory.free_memory().host == 12345
    monkeypatch.setattr(cgroup, "memory_free", lambda: 1 << 59)
    assert 12345 < memory.free_memory().host < 1 << 59


# ---- threads


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has control groups")
@pytest.mark.parametrize(
    ("quota", "threads"),
    [
        ("max 100000", 16),
        ("1600000 100000", 16),
        ("6400000 100000", 16),  # more than there are cores
        ("1000 100000", 1),
        ("99000 100000", 1),
        ("100000 100000", 1),
        ("120000 100000", 1),  # a second thread would bring a fifth
        ("150000 100000", 2),
        ("15000 10000", 2),
        ("199000 100000", 2),
        ("200000 100000", 2),
        ("240000 100000", 2),
        ("250000 100000", 3),
        ("360000 100000", 3),
        ("400000 100000", 4),
        ("765000 100000", 7),
        ("1590000 100000", 15),
    ],
)
def test_threads_under_a_quota(quota, threads, tmp_path, monkeypatch):
    """Never more than the quota rounded up, nor fewer than the whole CPUs in it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    root = tree(tmp_path, {"sys/fs/cgroup/cpu.max": quota})
    assert llama.default_threads(root) == threads


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_threads_on_the_cores_of_the_affinity_mask(tmp_path, monkeypatch):
    for cpu in range(32):  # two hyperthreads each
        name = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        tree(tmp_path, {name: f"{cpu % 16},{cpu % 16 + 16}\n"})
    for mask, threads in (
        (range(32), 16),
        (range(16), 16),
        ({0, 16}, 1),
        ({0, 16, 1}, 2),
        ({31}, 1),
    ):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, mask=mask: set(mask))
        assert llama.default_threads(tmp_path) == threads
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(32)))
    tree(tmp_path, {"sys/fs/cgroup/cpu.max": "300000 100000"})
    assert llama.default_threads(tmp_path) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 16})
    assert llama.default_threads(tmp_path) == 1


def test_not_more_threads_than_llama_cpp_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(threads_module, "_cores", lambda root: 1024)
    assert llama.default_threads(tmp_path) == llama.MAX_THREADS


@pytest.mark.parametrize(("cores", "mask", "threads"), [(8, 16, 8), (8, 2, 2), (None, 16, 8)])
def test_threads_on_windows(cores, mask, threads, tmp_path, monkeypatch):
    import psutil

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: cores)
    monkeypatch.setattr(psutil.Process, "cpu_affinity", lambda self: list(range(mask)))
    assert llama.default_threads(tmp_path) == threads


def test_a_context_starts_that_many(tiny_target, monkeypatch):
    """What llama.cpp is given when the user says nothing."""
    monkeypatch.setattr(threads_module, "_cores", lambda root: 16)
    for quota, threads in ((1.5, 2), (1.0, 1)):
        monkeypatch.setattr(cgroup, "cpu_quota", lambda root, quota=quota: quota)
        model = llama.Model(tiny_target.gguf)
        context = llama.Context(model, llama.ContextOptions(n_ctx=64, n_batch=32))
        assert context._api.llama_n_threads(context._handle) == threads
        context.close()
        model.close()
