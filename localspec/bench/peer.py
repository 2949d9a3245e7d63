"""llama.cpp's own programs: `llama-speculative-simple`, and `llama-completion` for its plain speed.

They are built from the llama.cpp that llama-cpp-python carries; docs/benchmarks.md says how.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localspec.bench.settings import PeerOptions, Setting
from localspec.bench.stats import Sample
from localspec.errors import LocalspecError

SPECULATIVE, PLAIN = "llama-speculative-simple", "llama-completion"


@dataclass(frozen=True)
class Peer:
    """llama.cpp's programs and what they are started with.

    Attributes:
        programs: name -> path.
        target: GGUF of the target.
        drafter: GGUF of the drafter, for speculative settings.
        n_ctx: context length.
        n_threads: CPU threads; 0 is their own choice.
        n_gpu_layers: layers on the GPU; -1 means all.
        flash_attn: True, False, or None for their own choice.
        kv_type: element type of the KV cache.
    """

    programs: dict[str, str]
    target: Path
    drafter: Path | None
    n_ctx: int = 4096
    n_threads: int = 0
    n_gpu_layers: int = -1
    flash_attn: bool | None = None
    kv_type: str = "f16"

    def run(
        self, options: PeerOptions, prompt: str, *, max_tokens: int, temperature: float, seed: int
    ) -> Sample:
        """Answer a prompt, its template applied already.

        Raises:
            LocalspecError: the program fails, or prints something else than expected.
        """
        with tempfile.TemporaryDirectory(prefix="localspec-") as folder:
            file = Path(folder) / "prompt.txt"
            # The programs take one line break off a file's end.
            file.write_bytes((prompt + "\n").encode("utf-8", "replace"))
            command = self._command(options, file, max_tokens, temperature, seed)
            try:
                done = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    encoding="utf-8",
                    errors="replace",
                    check=False,
                )
            except OSError as e:
                raise LocalspecError(f"cannot run {command[0]}: {e.strerror}") from e
        log = f"{done.stdout}\n{done.stderr}"
        if done.returncode != 0:
            raise LocalspecError(
                f"{command[0]} failed with status {done.returncode}: {_last_line(done.stderr)}"
            )
        sample = parse_plain(log) if options.plain else parse_speculative(log)
        if sample is None:
            raise LocalspecError(
                f"{command[0]} printed no timings that are known here; build it from the "
                "llama.cpp that llama-cpp-python carries"
            )
        return sample

    def _command(
        self, options: PeerOptions, file: Path, max_tokens: int, temperature: float, seed: int
    ) -> list[str]:
        name = PLAIN if options.plain else SPECULATIVE
        command: list[object] = [
            self.programs[name], "-m", self.target, "-f", file, "-n", max_tokens, "--no-escape",
            "-c", self.n_ctx, "-b", self.n_ctx, "-ctk", self.kv_type, "-ctv", self.kv_type,
            "-ngl", "all" if self.n_gpu_layers < 0 else self.n_gpu_layers,
            "--temp", temperature, "--seed", seed, "--top-k", 0, "--top-p", 1, "--min-p", 0,
        ]  # fmt: skip
        if self.n_threads:
            command += ["-t", self.n_threads]
        if self.flash_attn is not None:
            command += ["-fa", "on" if self.flash_attn else "off"]
        if options.n_max:
            command += [
                "-md", self.drafter, "--spec-type", "draft-dspark",
                "--spec-draft-n-max", options.n_max, "--spec-draft-p-min", options.p_min,
            ]  # fmt: skip
        if options.ngram:
            command += ["--spec-type", options.ngram]
        if options.plain:
            command += ["-no-cnv", "--no-display-prompt"]
        return [str(part) for part in command]


def find_programs(settings: Sequence[Setting], folder: str | Path | None) -> dict[str, str]:
    """The programs that the settings need, name -> path; empty when none does.

    Args:
        settings: what will be run.
        folder: where to look; None looks in PATH.

    Raises:
        LocalspecError: one is missing.
    """
    names = {(PLAIN if s.peer.plain else SPECULATIVE) for s in settings if s.peer is not None}
    found = {n: shutil.which(n, path=None if folder is None else str(folder)) for n in names}
    missing = sorted(name for name, path in found.items() if path is None)
    if missing:
        where = "PATH" if folder is None else str(folder)
        raise LocalspecError(
            f"{' and '.join(missing)} not found in {where}; build llama.cpp as docs/benchmarks.md "
            "says and name its folder with --llama-bin, or leave llama.cpp out of --against"
        )
    return {name: path for name, path in found.items() if path is not None}


def parse_speculative(log: str) -> Sample | None:
    """What `llama-speculative-simple` logged; None when it is something else.

    A round commits the accepted tokens and one more, so rounds = tokens - accepted.
    """
    decoded = re.search(r"decoded\s+\d+ tokens in\s+([\d.]+) seconds", log)
    counts = {
        k: re.search(rf"\b{k}\s*= (\d+)", log) for k in ("n_predict", "n_drafted", "n_accept")
    }
    numbers = {k: int(m[1]) for k, m in counts.items() if m is not None}
    if decoded is None or len(numbers) < len(counts):
        return None
    tokens = numbers["n_predict"]
    return Sample(
        tokens=tokens,
        rounds=tokens - numbers["n_accept"],
        seconds=float(decoded[1]),
        verified=numbers["n_drafted"],
    )


def parse_plain(log: str) -> Sample | None:
    """What `llama-completion` logged; None when it is something else.

    The time is all that is not the prompt's, so sampling and text are in it as they are in ours.
    """
    number = r"\s*=\s*([\d.]+) ms"
    total = re.search(rf"\btotal time{number}", log)
    prompt = re.search(rf"prompt eval time{number}", log)
    runs = re.search(rf"(?<!prompt )\beval time{number} /\s*(\d+) runs", log)
    if total is None or prompt is None or runs is None:
        return None
    if not float(runs[1]):  # the prompt's pass gave the only token; "1 runs" is a lower limit
        return Sample(tokens=0, rounds=0, seconds=0.0)
    seconds = 1e-3 * (float(total[1]) - float(prompt[1]))
    return Sample(tokens=int(runs[2]), rounds=int(runs[2]), seconds=max(seconds, 0.0))


def _last_line(text: str) -> str:
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no reason"
