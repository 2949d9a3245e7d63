"""Where localspec keeps what it makes: measurements, calibrations, converted drafters."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$LOCALSPEC_CACHE, or the user's cache directory."""
    import platformdirs

    chosen = os.environ.get("LOCALSPEC_CACHE")
    return Path(chosen or platformdirs.user_cache_dir("localspec", appauthor=False))


def drafters_dir() -> Path:
    """Drafters converted from checkpoints of the hub, a folder per repository."""
    return cache_dir() / "drafters"
