"""What an answer cost: OpenAI's `usage` and llama.cpp's `timings`."""

from __future__ import annotations

from typing import Any

from localspec.steps import Result


def usage(result: Result) -> dict[str, Any]:
    """Tokens of the prompt and the answer.

    Drafted tokens are counted as OpenAI counts predicted ones: accepted ones are part of the
    answer, rejected ones were verified by the target and are not. Unlike OpenAI's, rejected tokens
    are not part of `completion_tokens`. Fields that OpenAI does not have: `drafted_tokens`, all
    that the drafter proposed (some are never verified), and `rounds`.
    """
    accepted = sum(r.accepted for r in result.rounds)
    verified = sum(r.verified for r in result.rounds)
    answer = len(result.token_ids)
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": answer,
        "total_tokens": result.prompt_tokens + answer,
        "prompt_tokens_details": {
            "cached_tokens": result.prompt_tokens - result.processed_tokens,
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": verified - accepted,
            "drafted_tokens": sum(r.drafted for r in result.rounds),
            "rounds": len(result.rounds),
        },
    }


def timings(result: Result) -> dict[str, Any]:
    """Milliseconds and speeds, under llama.cpp's names."""
    seconds = sum(r.seconds.total for r in result.rounds)
    processed, answer = result.processed_tokens, len(result.token_ids)
    return {
        "cache_n": result.prompt_tokens - processed,
        "prompt_n": processed,
        "prompt_ms": round(1000 * result.prefill_seconds, 3),
        "prompt_per_second": _rate(processed, result.prefill_seconds),
        "predicted_n": answer,
        "predicted_ms": round(1000 * seconds, 3),
        "predicted_per_second": _rate(max(answer - 1, 0), seconds),
        "draft_n": sum(r.verified for r in result.rounds),
        "draft_n_accepted": sum(r.accepted for r in result.rounds),
    }


def _rate(n: int, seconds: float) -> float:
    return round(n / seconds, 3) if seconds > 0 else 0.0
