"""Where the `localspec` command starts."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line.

    Until it is imported there is nobody to catch a Ctrl-C: it just ends the process, without a
    traceback.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from localspec.cli import main as run

    signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
