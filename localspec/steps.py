"""What a generation hands out: rounds, steps, results."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Seconds:
    """Where a round's time went.

    Attributes:
        draft: the drafter's passes in llama.cpp.
        verify: the target's pass in llama.cpp.
        host: everything else (heads, tree, acceptance, text).
    """

    draft: float
    verify: float
    host: float

    @property
    def total(self) -> float:
        """The whole round."""
        return self.draft + self.verify + self.host


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        drafted: nodes the drafter's tree had.
        verified: nodes given to the target.
        accepted: nodes the target agreed with and that were kept.
        seconds: where the time went.
        chosen: nodes that the policy, or the user, wanted verified; `verified` is less where the
            tree had too many leaves, and one where deterministic mode pads a single row.
        paused: the drafter was left alone because it has not been paying.
        probing: the drafter was asked only to see whether it pays again.
        threads: CPU threads of its passes.
    """

    drafted: int
    verified: int
    accepted: int
    seconds: Seconds
    chosen: int = 0
    paused: bool = False
    probing: bool = False
    threads: int = 0


@dataclass(frozen=True)
class Prefill:
    """What happened to the prompt.

    Attributes:
        tokens: its length.
        processed: tokens that had to be evaluated; the others were in the KV cache already.
        seconds: how long that took.
        reused: tokens that did not have to be evaluated.
        restored: how many of those came out of the prefix cache.
    """

    tokens: int
    processed: int
    seconds: float
    reused: int = 0
    restored: int = 0


@dataclass(frozen=True)
class TokenLogprobs:
    """How likely a generated token was, and what else was.

    Natural logarithms of the target's own distribution: softmax of its logits, before logit bias,
    penalties, truncation, temperature and grammar.

    Attributes:
        token_id: the token.
        logprob: its own.
        top: (token id, logprob) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Step:
    """What one round committed.

    Attributes:
        text: new text (may be empty while a character or a stop string is incomplete).
        token_ids: new tokens, an end token included.
        round: the round behind it; None for the first token, which comes from the prefill.
        prefill: the prefill, with the first step only.
        finish_reason: "stop", "length" or "cancelled" with the last step; None before.
        logprobs: one per token of `token_ids`, when asked for; else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    round: Round | None = None
    prefill: Prefill | None = None
    finish_reason: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass
class Result:
    """A whole answer.

    Attributes:
        text: the text.
        token_ids: the tokens, an end token included.
        rounds: every round.
        prompt_tokens: length of the prompt.
        processed_tokens: prompt tokens that were evaluated (not found in the KV cache).
        reused_tokens: prompt tokens that did not have to be evaluated.
        restored_tokens: how many of those came out of the prefix cache.
        prefill_seconds: time to the first token.
        finish_reason: "stop" (end token or stop string), "length" or "cancelled" (also when the
            generator was closed before its last step).
        logprobs: one per token, when asked for; else empty.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prompt_tokens: int = 0
    processed_tokens: int = 0
    prefill_seconds: float = 0.0
    finish_reason: str = "cancelled"
    reused_tokens: int = 0
    restored_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def add(self, step: Step) -> None:
        """Take in the next step."""
        self.text += step.text
        self.token_ids.extend(step.token_ids)
        self.logprobs.extend(step.logprobs)
        if step.round is not None:
            self.rounds.append(step.round)
        if step.prefill is not None:
            self.prompt_tokens = step.prefill.tokens
            self.processed_tokens = step.prefill.processed
            self.prefill_seconds = step.prefill.seconds
            self.reused_tokens = step.prefill.reused
            self.restored_tokens = step.prefill.restored
        if step.finish_reason is not None:
            self.finish_reason = step.finish_reason

    @property
    def tau(self) -> float:
        """Accepted length: tokens committed per round, the bonus token included."""
        n = len(self.rounds)
        return (len(self.token_ids) - 1) / n if n else 0.0

    @property
    def paused(self) -> int:
        """Rounds in which the policy left the drafter alone."""
        return sum(r.paused for r in self.rounds)

    @property
    def probes(self) -> int:
        """Rounds that asked a drafter which was not paying whether it pays again."""
        return sum(r.probing for r in self.rounds)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens of all rounds over their time, the prefill left out."""
        seconds = sum(r.seconds.total for r in self.rounds)
        return (len(self.token_ids) - 1) / seconds if seconds > 0 else 0.0
