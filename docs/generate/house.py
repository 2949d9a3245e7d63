"""Writes the list of modules into the architecture page, from the first line of each docstring:
`python docs/generate/house.py docs/architecture.md`.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- house: written by docs/generate/house.py -->", "<!-- /house -->"
ROOMS = {
    "localspec": "The runtime. Imports numpy and llama_cpp, never torch.",
    "localspec/llama": "All that touches ctypes or llama_cpp. Aborts end a process: inputs are "
    "checked here first.",
    "localspec/cli": "The commands, one file each; thin layers over functions you can import.",
    "localspec/cli/chatui": "The chat in the terminal.",
    "localspec/server": "`localspec serve` (extra `serve`).",
    "localspec/bench": "`localspec bench`.",
    "convert": "Checkpoint to GGUF; installed as `localspec.convert`.",
    "models": "The torch reference of the drafters, and training; installed as `localspec.models`.",
}


def house() -> str:
    """Tables of all modules, room by room."""
    parts = []
    for room, what in ROOMS.items():
        files = sorted((ROOT / room).glob("*.py"))
        if not files:
            continue
        parts.append(f"### {room}/\n\n{what}\n\n| file | |\n|---|---|")
        for file in files:
            first = _first_sentence(file)
            if not file.stem.startswith("_") and first:
                parts.append(f"| `{file.name}` | {first} |")
        parts.append("")
    return "\n".join(parts)


def _first_sentence(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.replace("|", r"\|").replace("<", r"\<")


def written(page: str) -> str:
    """The page with the list of today's modules in it."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{house()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(written(path.read_text("utf-8")), "utf-8")
