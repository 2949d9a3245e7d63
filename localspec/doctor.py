"""What is installed here, what is wrong with it, and how to mend it: `localspec doctor`."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

from localspec import doctor_build, doctor_files, doctor_machine
from localspec._version import __version__
from localspec.diagnosis import Report, Section

# Extras whose packages are for those who use localspec, not for those who develop it.
_NOT_SHOWN = frozenset({"dev", "docs"})
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def examine() -> Report:
    """Look at everything. Nothing found makes it fail: what cannot be looked at is a problem."""
    checks: tuple[tuple[str, Callable[[], Section]], ...] = (
        ("versions", versions),
        ("llama.cpp", doctor_build.build),
        ("machine", doctor_machine.machine),
        ("caches", doctor_files.caches),
        ("default pair", doctor_files.default_pair),
        ("environment", doctor_machine.environment),
    )
    return Report([_guarded(title, check) for title, check in checks])


def _guarded(title: str, check: Callable[[], Section]) -> Section:
    try:
        return check()
    except Exception as e:  # a broken installation can raise anything, anywhere
        section = Section(title)
        why = " ".join(str(e).split())[:200]
        section.broken(
            f"{title} cannot be looked at: {type(e).__name__}{f': {why}' if why else ''}",
            "pip install --force-reinstall localspec",
        )
        return section


def versions(requires: list[str] | None = None) -> Section:
    """The section about Python packages.

    Args:
        requires: what localspec asks for ("name>=1; marker"); its own metadata when left out.
    """
    section = Section("versions")
    section.facts["localspec"] = __version__
    section.facts["python"] = doctor_machine.python()["version"]
    section.facts["python executable"] = doctor_machine.python()["executable"]
    if requires is None:
        try:
            requires = metadata.requires("localspec") or []
        except metadata.PackageNotFoundError:  # an app that was frozen without it
            requires = []
    optional: dict[str, list[str]] = {}
    for line in requires:
        name, specifier, extra, applies = _requirement(line)
        if not applies or extra in _NOT_SHOWN:
            continue
        version = _installed(name)
        if extra:
            optional.setdefault(extra, []).append(f"{name} {version or 'missing'}")
            if version is not None and not _satisfies(version, specifier):
                section.warn(
                    f"{name} {version} is not {specifier}, which localspec[{extra}] needs",
                    f"pip install 'localspec[{extra}]'",
                )
            continue
        section.facts[name] = version
        if version is None:
            section.broken(f"{name} is not installed", f"pip install '{name}{specifier}'")
        elif not _satisfies(version, specifier):
            section.broken(
                f"{name} {version} is not {specifier}, which localspec needs",
                f"pip install '{name}{specifier}'",
            )
    for extra, found in optional.items():
        missing = any(line.endswith(" missing") for line in found)
        hint = f" (pip install 'localspec[{extra}]')" if missing else ""
        section.facts[f"extra {extra}"] = ", ".join(found) + hint
    return section


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _requirement(line: str) -> tuple[str, str, str, bool]:
    """Name, version specifier, extra ("" for none), and whether it applies to this Python."""
    text, _, marker = line.partition(";")
    match = _NAME.match(text.strip())
    name = match[0] if match else text.strip()
    extra = re.search(r"extra\s*==\s*[\"']([\w-]+)[\"']", marker)
    applies = True
    packaging = _packaging()
    if marker.strip() and packaging is not None:
        applies = packaging[0](marker.strip()).evaluate({"extra": extra[1] if extra else ""})
    return name, text.strip()[len(name) :].strip(" ()"), extra[1] if extra else "", applies


def _satisfies(version: str, specifier: str) -> bool:
    packaging = _packaging()
    if not specifier or packaging is None:
        return True
    return bool(packaging[1](specifier).contains(version, prereleases=True))


def _packaging() -> tuple[Any, Any] | None:
    """What reads markers and specifiers; huggingface_hub brings it along."""
    try:
        from packaging.markers import Marker
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return None
    return Marker, SpecifierSet
