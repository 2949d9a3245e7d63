"""The machine: processors and memory, what a container leaves of them, environment variables."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from localspec import cgroup
from localspec.diagnosis import Section

_VARIABLES = re.compile(
    r"LOCALSPEC_.*|HF_.*|HUGGING_FACE_HUB_TOKEN|GGML_.*|LLAMA_.*|CUDA_.*|HIP_.*|ROCR_.*|VK_.*|"
    r"OMP_.*|GOMP_.*|KMP_.*|OPENBLAS_NUM_THREADS|XDG_CACHE_HOME|(HTTPS?|ALL|NO)_PROXY|"
    r"(https?|all|no)_proxy|REQUESTS_CA_BUNDLE|SSL_CERT_FILE"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.I)


def machine(root: Path = Path("/")) -> Section:
    """The section about processors and memory.

    Args:
        root: of the file system, for tests.
    """
    import psutil

    from localspec.llama import default_threads

    section = Section("machine")
    threads = default_threads(root)
    section.facts["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    section.facts["physical cores"] = psutil.cpu_count(logical=False)
    section.facts["logical cores"] = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        section.facts["cores this process may use"] = len(os.sched_getaffinity(0))
    quota = cgroup.cpu_quota(root)
    section.facts["CPU limit of the container"] = quota
    section.facts["threads used"] = threads
    if quota is not None and threads > quota:
        whole, kind = int(quota), "thread" if threads == 1 else "threads"
        section.warn(
            f"this container may use {quota:g} CPUs, so {threads} {kind} (the default) must stand "
            f"still {1 - quota / threads:.0%} of the time",
            f"give the container {threads} CPUs, or --threads {whole} to have no pauses"
            if whole
            else "give the container a whole CPU",
        )
    memory = psutil.virtual_memory()
    section.facts["memory"] = int(memory.total)
    section.facts["memory free"] = int(memory.available)
    section.facts["memory limit of the container"] = cgroup.memory_limit(root)
    section.facts["memory free in the container"] = cgroup.memory_free(root)
    return section


def environment(variables: Mapping[str, str] | None = None) -> Section:
    """The section about environment variables that matter here; secrets are not shown."""
    variables = os.environ if variables is None else variables
    section = Section("environment")
    for name in sorted(variables):
        if _VARIABLES.fullmatch(name):
            section.facts[name] = _shown(name, variables[name])
    endpoint = variables.get("HF_ENDPOINT")
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            section.broken(
                "HF_ENDPOINT is no web address, so nothing can be downloaded",
                "unset HF_ENDPOINT, or set it to the address of a mirror (https://...)",
            )
    cache = variables.get("LOCALSPEC_CACHE")
    if cache and not os.path.isabs(os.path.expanduser(cache)):
        section.warn(
            "LOCALSPEC_CACHE is relative: there is another cache in every folder",
            "set LOCALSPEC_CACHE to an absolute path",
        )
    elif cache and cache.startswith("~"):
        section.warn(
            "LOCALSPEC_CACHE begins with ~, which the shell has not replaced",
            'set it without quotes round it, or with "$HOME"',
        )
    if variables.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        section.warn(
            "HF_HUB_OFFLINE is set: only models that are here already can be used",
            "unset HF_HUB_OFFLINE to download others",
        )
    return section


def _shown(name: str, value: str) -> str:
    if _SECRET.search(name):
        return "(set, not shown)" if value else ""
    # A password of a proxy, which may stand there without "http://".
    return re.sub(r"^(\w+://)?[^/]*@", r"\1(not shown)@", value)


def python() -> dict[str, str]:
    """The Python that runs."""
    return {"version": platform.python_version(), "executable": sys.executable}
