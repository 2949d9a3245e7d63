"""Interleaved runs: every prompt under every setting before the next prompt.

Machines are noisy and their clocks drift. What is compared has therefore been run one right after
the other, in an order that is reversed every other time, on one engine, and only ratios of such
neighbours are trusted.

A prompt of several turns is a conversation: message, answer, next message. All settings get the
same prompts: the answers that the conversation goes on with are those of the first setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from localspec import __version__
from localspec.bench import memory
from localspec.bench.peer import Peer
from localspec.bench.prompts import PromptFile
from localspec.bench.settings import PLAIN, Setting
from localspec.bench.stats import Figures, Sample, figures
from localspec.chat import chat_template
from localspec.engine import Engine, Result
from localspec.errors import LocalspecError
from localspec.sampling import SamplingParams
from localspec.tree import DraftTree

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """All settings on one prompt file at one temperature.

    Attributes:
        prompts: name of the prompt file.
        temperature: the temperature.
        answers: prompts (turns) that were answered.
        skipped: turns that did not fit the context.
        peak_memory: bytes this process held at most meanwhile; None where the system hides it.
        settings: name -> figures, in the order of the settings.
    """

    prompts: str
    temperature: float
    answers: int
    skipped: int
    peak_memory: int | None
    settings: dict[str, Figures]


@dataclass(frozen=True)
class Report:
    """What `run` measured; `as_json` is what `localspec bench --json` prints.

    Attributes:
        version: localspec's.
        target: what llama.cpp calls it.
        target_file: its file name.
        drafter: the drafter's file name; None without one.
        system: build and device.
        max_tokens: most tokens per answer.
        repeats: times every prompt was answered under every setting.
        runs: file by file, temperature by temperature.
    """

    version: str
    target: str
    target_file: str
    drafter: str | None
    system: str
    max_tokens: int
    repeats: int
    runs: list[Run]

    def as_json(self) -> dict[str, Any]:
        """JSON-compatible values."""
        return asdict(self)


def run(
    engine: Engine,
    files: Sequence[PromptFile],
    settings: Sequence[Setting],
    *,
    temperatures: Sequence[float] = (0.0,),
    max_tokens: int = 128,
    repeats: int = 1,
    peer: Peer | None = None,
    template_variables: Mapping[str, Any] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    on_run: Callable[[Run], None] | None = None,
) -> Report:
    """Measure.

    Args:
        engine: target and drafter.
        files: the prompts.
        settings: what to compare; the answers of the first go into conversations.
        temperatures: run after the other; 0 is greedy.
        max_tokens: most tokens per answer.
        repeats: times every prompt is answered under every setting (with other seeds).
        peer: llama.cpp's programs, for settings that need them.
        template_variables: for the chat template, e.g. {"enable_thinking": False}.
        progress: called with answers done, answers in all, and the file's name.
        on_run: called with every finished run.

    Raises:
        LocalspecError: a setting needs a drafter, or programs, that are not there.
    """
    _check(engine, settings, peer)
    todo = len(temperatures) * sum(len(t) for f in files for t in f.conversations)
    done = 0

    def advance(turns: int, name: str) -> None:
        nonlocal done
        done += turns
        if progress is not None:
            progress(done, todo, name)

    bench = _Bench(engine, settings, max_tokens, repeats, peer, template_variables or {})
    runs = []
    for temperature in temperatures:
        for file in files:
            runs.append(bench.file(file, temperature, advance))
            if on_run is not None:
                on_run(runs[-1])
    drafter = engine._drafter
    return Report(
        version=__version__,
        target=engine.model.description,
        target_file=engine.model.path.name,
        drafter=None if drafter is None else drafter.context.model.path.name,
        system=engine.model.system_info(),
        max_tokens=max_tokens,
        repeats=repeats,
        runs=runs,
    )


def _check(engine: Engine, settings: Sequence[Setting], peer: Peer | None) -> None:
    if not settings:
        raise LocalspecError("there is nothing to compare; name settings with --against")
    for setting in settings:
        if setting.needs_drafter and not engine.has_drafter:
            raise LocalspecError(f"{setting.name!r} needs a drafter; name one with -d")
        if setting.peer is None:
            continue
        if peer is None:
            raise LocalspecError(f"{setting.name!r} needs llama.cpp's programs; see --llama-bin")
        drafter = engine._drafter
        if setting.peer.n_max and drafter is not None and drafter.info.head_type != "vanilla":
            raise LocalspecError(
                f"llama.cpp's draft-dspark runs vanilla heads only, and this drafter's is "
                f"{drafter.info.head_type}; leave {setting.name!r} out of --against"
            )


class _Bench:
    def __init__(
        self,
        engine: Engine,
        settings: Sequence[Setting],
        max_tokens: int,
        repeats: int,
        peer: Peer | None,
        template_variables: Mapping[str, Any],
    ) -> None:
        self.engine, self.settings, self.peer = engine, settings, peer
        self.max_tokens, self.repeats = max_tokens, repeats
        self.template = chat_template(engine)
        self.variables = template_variables
        self.warm = False
        self.cycles = 0

    def file(
        self, file: PromptFile, temperature: float, advance: Callable[[int, str], None]
    ) -> Run:
        """Everything on one prompt file."""
        memory.reset_peak()
        samples: dict[str, list[list[Sample]]] = {s.name: [] for s in self.settings}
        answers = skipped = 0
        advance(0, file.name)
        for number, turns in enumerate(file.conversations):
            messages: list[dict[str, str]] = []
            for i, content in enumerate(turns):
                messages.append({"role": "user", "content": content})
                text = self.template.render(messages, **self.variables)
                prompt = self.engine.tokenize(text)
                if len(prompt) + 2 > self.engine.n_ctx:
                    skipped += len(turns) - i
                    advance(len(turns) - i, file.name)
                    break
                found, answer = self._prompt(text, prompt, temperature, number)
                messages.append({"role": "assistant", "content": answer})
                for name, repeats in found.items():
                    samples[name].append(repeats)
                answers += 1
                advance(1, file.name)
        if not answers:
            raise LocalspecError(
                f"no prompt of {file.name} fits a context of {self.engine.n_ctx} tokens; use a "
                "larger --n-ctx"
            )
        plain = None
        if PLAIN.name in samples:
            plain = figures(samples[PLAIN.name], None).speeds
        return Run(
            prompts=file.name,
            temperature=temperature,
            answers=answers,
            skipped=skipped,
            peak_memory=memory.peak(),
            settings={name: figures(found, plain) for name, found in samples.items()},
        )

    def _prompt(
        self, text: str, prompt: list[int], temperature: float, number: int
    ) -> tuple[dict[str, list[Sample]], str]:
        """Samples of every setting on one prompt, and the answer of the first setting."""
        if not self.warm:
            for setting in self.settings:
                if setting.draft is not None:
                    self._ours(setting, prompt, SamplingParams(), WARM_UP_TOKENS)
            self.warm = True
        samples: dict[str, list[Sample]] = {s.name: [] for s in self.settings}
        answer: str | None = None
        for repeat in range(self.repeats):
            seed = 1000 * repeat + number
            params = SamplingParams(temperature=temperature, seed=seed)
            order = list(self.settings)
            if self.cycles % 2:
                order.reverse()
            self.cycles += 1
            for setting in order:
                if setting.peer is not None:
                    assert self.peer is not None
                    sample = self.peer.run(
                        setting.peer,
                        self._without_bos(text),
                        max_tokens=self.max_tokens,
                        temperature=temperature,
                        seed=seed,
                    )
                else:
                    sample, result = self._ours(setting, prompt, params, self.max_tokens)
                    if answer is None or (setting is self.settings[0] and repeat == 0):
                        answer = result.text
                samples[setting.name].append(sample)
        return samples, answer or ""

    def _without_bos(self, text: str) -> str:
        """llama.cpp's programs put the BOS in front of everything, as `Engine.tokenize` may not."""
        model = self.engine.model
        if model.add_bos and model.bos >= 0:
            return text.removeprefix(model.piece(model.bos, special=True).decode())
        return text

    def _ours(
        self, setting: Setting, prompt: list[int], params: SamplingParams, max_tokens: int
    ) -> tuple[Sample, Result]:
        with count_depths(self.engine) as depths:
            result = self.engine.complete(
                prompt, params, max_tokens=max_tokens, draft=setting.draft
            )
        return sample_of(result, depths), result


@dataclass
class DepthCounts:
    """Per depth (from 1): rounds whose draft was right up to there and went on; right there."""

    reached: list[int]
    accepted: list[int]

    def add(self, deepest: int, accepted: int) -> None:
        """Take in a round: how deep its draft was and how many nodes were accepted."""
        while len(self.reached) < deepest:
            self.reached.append(0)
            self.accepted.append(0)
        for d in range(min(deepest, accepted + 1)):
            self.reached[d] += 1
            self.accepted[d] += d < accepted


@contextmanager
def count_depths(engine: Engine) -> Iterator[DepthCounts]:
    """Count acceptance by depth of what the engine verifies meanwhile."""
    counts, before = DepthCounts([], []), engine.on_verified

    def see(tree: DraftTree, path: tuple[int, ...]) -> None:
        counts.add(int(tree.depth.max()) if len(tree) else 0, len(path))
        if before is not None:
            before(tree, path)

    engine.on_verified = see
    try:
        yield counts
    finally:
        engine.on_verified = before


def sample_of(result: Result, depths: DepthCounts | None = None) -> Sample:
    """The figures of one answer."""
    rounds = result.rounds
    return Sample(
        tokens=max(0, len(result.token_ids) - 1) if rounds else 0,
        rounds=len(rounds),
        seconds=sum(r.seconds.total for r in rounds),
        draft=sum(r.seconds.draft for r in rounds),
        verify=sum(r.seconds.verify for r in rounds),
        host=sum(r.seconds.host for r in rounds),
        verified=sum(r.verified for r in rounds),
        reached=() if depths is None else tuple(depths.reached),
        accepted=() if depths is None else tuple(depths.accepted),
    )
