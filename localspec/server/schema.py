"""The requests of the API as JSON Schemas: what is validated is what the OpenAPI document shows.

Fields of OpenAI's API that are not here are let through unread (`user`-like bookkeeping, or what
other servers know), unless they ask for something that would change the answer: those are here and
refused with their reason.
"""

from __future__ import annotations

from typing import Any

from localspec.sampling import MOST_BIAS, MOST_BIASED

Schema = dict[str, Any]

INSTEAD = "x-instead"

_LARGE = 2**31 - 1
_MAX_TEXT = 16 * 2**20


def _number(low: float, high: float, about: str, **more: Any) -> Schema:
    return {
        "type": ["number", "null"], "minimum": low, "maximum": high, "description": about, **more
    }  # fmt: skip


def _whole(low: int, high: int, about: str, **more: Any) -> Schema:
    return {
        "type": ["integer", "null"], "minimum": low, "maximum": high, "description": about, **more
    }  # fmt: skip


def _flag(about: str, **more: Any) -> Schema:
    return {"type": ["boolean", "null"], "description": about, **more}


def _instead(what: str) -> Schema:
    """What those can do who ask for something that is refused; `requests.read` says it to them."""
    return {INSTEAD: what}


_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 64, "pattern": "^[a-zA-Z0-9_-]+$"}
_ANY_OBJECT: Schema = {"type": "object"}

_TEXT_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text"]}, "text": {"type": "string", "maxLength": _MAX_TEXT}},
}
_CONTENT: list[Schema] = [
    {"type": "string", "maxLength": _MAX_TEXT},
    {"type": "array", "items": _TEXT_PART, "minItems": 1, "maxItems": 4096},
]
_TOOL_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}


# One schema for all roles; what only some of them may leave out is checked in `messages.py`.
MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [*_CONTENT, {"type": "null"}]},
        "name": {"type": ["string", "null"]},
        "tool_calls": {
            "anyOf": [{"type": "array", "items": _TOOL_CALL, "maxItems": 256}, {"type": "null"}]
        },
        "tool_call_id": {"type": ["string", "null"]},
        "reasoning_content": {
            "description": "What the assistant thought before this answer, for templates that "
            "show it to the model again.",
            "type": ["string", "null"],
            "maxLength": _MAX_TEXT,
        },
    },
}

TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"type": "string", "enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": _NAME,
                "description": {"type": ["string", "null"]},
                "parameters": {
                    "type": ["object", "null"],
                    "description": "A JSON Schema of the arguments.",
                },
                "strict": {"type": ["boolean", "null"]},
            },
        },
    },
}

TOOL_CHOICE: Schema = {
    "description": "Whether tools may ('auto'), must ('required', or one by its name) or must not "
    "('none') be called.",
    "anyOf": [
        {"type": "string", "enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"type": "string", "enum": ["function"]},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}},
                },
            },
        },
        {"type": "null"},
    ],
}

RESPONSE_FORMAT: Schema = {
    "description": "'json_object': any JSON object; 'json_schema': JSON that follows a schema. "
    "Enforced by a grammar: the answer follows it unless max_tokens cuts it off.",
    "type": ["object", "null"],
    "required": ["type"],
    "properties": {
        "type": {"type": "string", "enum": ["text", "json_object", "json_schema"]},
        "json_schema": {
            "type": "object",
            "required": ["schema"],
            "properties": {
                "name": {"type": ["string", "null"]},
                "description": {"type": ["string", "null"]},
                "schema": _ANY_OBJECT,
                "strict": {"type": ["boolean", "null"]},
            },
        },
        "schema": {
            "type": ["object", "null"],
            "description": "As llama.cpp has it: a schema for 'json_object'.",
        },
    },
}

_STOP: Schema = {
    "description": "Text that ends the answer; not part of it.",
    "anyOf": [
        {"type": "string", "maxLength": 1000},
        {"type": "array", "items": {"type": "string", "maxLength": 1000}, "maxItems": 32},
        {"type": "null"},
    ],
}

# What both endpoints take.
_COMMON: dict[str, Schema] = {
    "model": {
        "type": ["string", "null"],
        "description": "Any name: there is one model, and the answer says which.",
    },
    "temperature": _number(0, 1000, "0 takes the most likely token."),
    "top_p": _number(0, 1, "Keep the smallest set of tokens with this much probability."),
    "top_k": _whole(-1, _LARGE, "Keep the k most likely tokens; 0 or -1 keeps all."),
    "min_p": _number(0, 1, "Drop tokens less likely than this fraction of the most likely."),
    "repetition_penalty": _number(0, 1000, "Above 1: repeat less. 1 is neutral."),
    "repeat_penalty": _number(0, 1000, "llama.cpp's name for repetition_penalty."),
    "presence_penalty": _number(-1000, 1000, "Subtracted once from what was said lately."),
    "frequency_penalty": _number(-1000, 1000, "Subtracted for every time it was said lately."),
    "seed": _whole(-(2**63), 2**64 - 1, "Same seed, same text; -1 draws a fresh one."),
    "stop": _STOP,
    "max_tokens": _whole(
        -1,
        _LARGE,
        "Most tokens of the answer; -1: until it or the context ends.",
    ),
    "n": _whole(
        1,
        1,
        "Answers per request: one.",
        **_instead("ask again for every further answer, with another seed"),
    ),
    "stream": _flag("Send the answer while it is being written, as server-sent events."),
    "stream_options": {
        "type": ["object", "null"],
        "properties": {
            "include_usage": _flag("One more event at the end, with `usage`."),
            "include_obfuscation": _flag("Read, and without effect."),
        },
    },
    "response_format": RESPONSE_FORMAT,
    "grammar": {
        "type": ["string", "null"],
        "maxLength": 2**20,
        "description": "A grammar in llama.cpp's GBNF that the answer must follow.",
    },
    "logit_bias": {
        "type": ["object", "null"],
        "maxProperties": MOST_BIASED,
        "additionalProperties": {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS},
        "description": "Token ids, and what to add to their logits before anything else: -100 "
        "bans a token, 100 leaves no other one a chance.",
    },
    "user": {"type": ["string", "null"], "description": "Whose turn it is: users take turns."},
}

CHAT_REQUEST: Schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {
        "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 65536},
        **_COMMON,
        "max_completion_tokens": _whole(-1, _LARGE, "The newer name of max_tokens."),
        "logprobs": _flag("Give the logarithm of each token's probability."),
        "top_logprobs": _whole(0, 20, "And of so many of the most likely ones; needs logprobs."),
        "tools": {
            "anyOf": [{"type": "array", "items": TOOL, "maxItems": 128}, {"type": "null"}],
            "description": "Functions the model may call, for templates that define tools.",
        },
        "tool_choice": TOOL_CHOICE,
        "parallel_tool_calls": _flag("false: at most one call in an answer."),
        "modalities": {
            "anyOf": [
                {"type": "array", "items": {"type": "string", "enum": ["text"]}},
                {"type": "null"},
            ]
        },
        "functions": {
            "anyOf": [{"type": "array", "maxItems": 0}, {"type": "null"}],
            "description": "The old name of tools; not supported.",
            **_instead("use tools"),
        },
        "reasoning_format": {
            "description": "Where the reasoning of thinking models goes: 'auto' (the default) and "
            "'deepseek' into `reasoning_content`, 'none' leaves it in `content`.",
            "type": ["string", "null"],
            "enum": ["auto", "deepseek", "none", None],
        },
        "chat_template_kwargs": {
            "type": ["object", "null"],
            "maxProperties": 64,
            "description": 'More variables for the chat template, e.g. {"enable_thinking": false}.',
        },
    },
}

_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": _LARGE}
COMPLETION_REQUEST: Schema = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "prompt": {
            "description": "Text, or token ids. One prompt a request.",
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": _MAX_TEXT},
                {"type": "array", "items": _TOKEN, "minItems": 1, "maxItems": _MAX_TEXT},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": _MAX_TEXT},
                    "minItems": 1,
                    "maxItems": 1,
                },
                {
                    "type": "array",
                    "items": {"type": "array", "items": _TOKEN, "minItems": 1},
                    "minItems": 1,
                    "maxItems": 1,
                },
            ],
        },
        **_COMMON,
        "max_tokens": _whole(
            -1,
            _LARGE,
            "Most tokens of the answer; -1: until it or the context "
            "ends. 16 when left out, as OpenAI has it.",
        ),
        "logprobs": _whole(0, 20, "Log probabilities of the tokens and of so many others."),
        "echo": {
            "type": ["boolean", "null"],
            "enum": [False, None],
            "description": "Not supported: false or null.",
            **_instead("put the prompt in front of the answer yourself"),
        },
        "best_of": _whole(
            1, 1, "One.", **_instead("ask again for every further answer, with another seed")
        ),
        "suffix": {
            "type": ["string", "null"],
            "maxLength": 0,
            "description": "Not supported: empty or null.",
            **_instead("write what comes before and after into the prompt, as the model knows it"),
        },
    },
}
