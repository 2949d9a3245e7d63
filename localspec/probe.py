"""`python -m localspec.probe` prints `llama.build_report` as JSON.

For `localspec doctor`: a build of llama.cpp that does not fit the machine ends the process that
loads it, so a process of its own does.
"""

from __future__ import annotations

import json

from localspec.errors import LocalspecError


def main() -> None:
    """One line: the report, or {"error": why there is none}."""
    try:
        from localspec import llama

        report = llama.build_report()
    except LocalspecError as e:
        report = {"error": str(e)}
    print("\n" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
