"""Numbers of an answer, in words."""

from __future__ import annotations

from localspec.steps import Result


def status(result: Result | None) -> str:
    """One line: length, speed, accepted length, and why it ended early."""
    if result is None or not result.token_ids:
        return "no answer yet"
    parts = [f"{len(result.token_ids)} tokens", f"{result.tokens_per_second:.1f} tokens/s"]
    if any(r.verified for r in result.rounds):
        parts.append(f"accepted length {result.tau:.2f}")
    else:
        parts.append("nothing drafted")
    why = {"length": "cut at the limit", "cancelled": "stopped"}.get(result.finish_reason)
    return " · ".join([*parts, why] if why else parts)


def details(result: Result | None) -> str:
    """Several lines: where tokens came from and where the time went."""
    if result is None or not result.rounds:
        return status(result)
    rounds, n = result.rounds, len(result.rounds)
    times = [
        f"{what} {1e3 * sum(getattr(r.seconds, what) for r in rounds) / n:.1f} ms"
        for what in ("draft", "verify", "host")
    ]
    verified = sum(r.verified for r in rounds)
    accepted = sum(r.accepted for r in rounds)
    share = f"{accepted / verified:.0%}" if verified else "none"
    fewest, most = min(r.threads for r in rounds), max(r.threads for r in rounds)
    busy = [f"as few as {fewest} of {most} threads: the machine was busy"] if fewest < most else []
    return "\n".join(
        [
            status(result),
            f"prompt {result.prompt_tokens} tokens, {result.processed_tokens} of them new, "
            f"{result.prefill_seconds:.2f} s to the first token",
            f"{n} rounds, {accepted} of {verified} drafted tokens accepted ({share})",
            "per round: " + ", ".join(times),
            *busy,
        ]
    )
