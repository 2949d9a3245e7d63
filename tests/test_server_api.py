"""The API as its clients use it: the real `openai` package, and curl, against a real server."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from conftest import CHAIN, PLAIN, TREE

import tiny
from localspec.chat import Chat, chat_template
from localspec.engine import DraftOptions, Engine, Result
from localspec.grammar import Grammar
from localspec.sampling import SamplingParams
from localspec.server.limits import Limits
from localspec.server.openapi import description
from localspec.server.run import server_for
from localspec.server.security import Access
from localspec.server.service import Service
from localspec.steps import Step
from localspec.template import ChatTemplate
from serving import Running, running, until

# How Hermes and Qwen tell a model about tools, on top of the tiny models' format.
TOOL_TEMPLATE = (
    "{% if tools %}{{'<|im_start|>system\n'}}{% for t in tools %}{{ t.function.name + '\n' }}"
    "{% endfor %}{{'<|im_end|>\n'}}{% endif %}"
    "{% for m in messages %}{{'<|im_start|>'+m['role']+'\n'+m['content']}}"
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\n{"name": "\' + c.function.name + '
    "'\", \"arguments\": ' + (c.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
    "{{'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n'}}"
    "{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "kind": {"enum": ["cat", "dog"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "kind", "legs"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock", "parameters": {
    "type": "object", "properties": {"zone": {"enum": ["utc"]}}, "required": ["zone"],
    "additionalProperties": False}}}  # fmt: skip


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@contextlib.contextmanager
def serve(engine: Engine, *, draft: DraftOptions = TREE, tools: bool = False) -> Iterator[Running]:
    service = Service(engine, "tiny", draft=draft)
    if tools:
        service.template = ChatTemplate(TOOL_TEMPLATE)
    access = Access("127.0.0.1")
    with running(lambda: server_for(service, access, Limits()), service) as server:
        yield server


@pytest.fixture(scope="module")
def engines(tiny_target: tiny.TinyModel, tiny_drafter: Any) -> Iterator[list[Engine]]:
    """Four engines of the tiny pair: for the server, for comparisons, for tools, a small one."""
    drafter = tiny_drafter("vanilla")[1]
    made = [
        Engine.load(tiny_target.gguf, drafter, n_ctx=n_ctx, n_threads=1, prefix_cache=cache)
        for n_ctx, cache in ((1024, "64M"), (1024, 0), (1024, 0), (96, 0))
    ]
    yield made
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def server(engines: list[Engine]) -> Iterator[Running]:
    with serve(engines[0]) as running:
        yield running


@pytest.fixture(scope="module")
def tool_server(engines: list[Engine]) -> Iterator[Running]:
    with serve(engines[2], tools=True) as running:
        yield running


@pytest.fixture
def reference(engines: list[Engine]) -> Engine:
    return engines[1]


@contextlib.contextmanager
def connected(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with connected(server) as client:
        yield client


@pytest.fixture
def tool_client(tool_server: Running) -> Iterator[openai.OpenAI]:
    with connected(tool_server) as client:
        yield client


def chat(client: openai.OpenAI, text: str = "hello", **options: Any) -> Any:
    options.setdefault("messages", user(text))
    return client.chat.completions.create(model="any", **options)


def expected(reference: Engine, text: str, **options: Any) -> Result:
    prompt = chat_template(reference).render(user(text))
    return reference.complete(prompt, draft=TREE, **options)


# ---- answers


def test_models(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("tiny", "model")
    assert model.meta["n_ctx"] == 1024  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("some/other")
    assert e.value.code == "model_not_found"


def test_greedy_answers_are_those_of_generate(client: openai.OpenAI, reference: Engine):
    for i in range(2):
        text = f"question {i}"
        result = expected(reference, text, max_tokens=30)
        whole = chat(client, text, max_tokens=30, temperature=0)
        (choice,) = whole.choices
        assert choice.message.role == "assistant"
        assert choice.message.content == result.text
        assert choice.message.tool_calls is None
        assert choice.finish_reason == result.finish_reason
        assert whole.model == "tiny"
        chunks = list(chat(client, text, max_tokens=30, stream=True))
        assert all(len(c.choices) == 1 and c.id == chunks[0].id for c in chunks)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == result.text
        reasons = [c.choices[0].finish_reason for c in chunks]
        assert reasons[-1] == result.finish_reason and not any(reasons[:-1])
        assert not any(c.usage for c in chunks)


def test_usage_counts_what_the_engine_counts(client: openai.OpenAI, reference: Engine):
    result = expected(reference, "count this", max_tokens=40)
    whole = chat(client, "count this", max_tokens=40)
    (*_, last) = chat(
        client, "count this", max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    for usage in (whole.usage, last.usage):
        assert usage.prompt_tokens == result.prompt_tokens
        assert usage.completion_tokens == len(result.token_ids)
        assert usage.total_tokens == result.prompt_tokens + len(result.token_ids)
        details = usage.completion_tokens_details
        accepted = sum(r.accepted for r in result.rounds)
        assert accepted > 0
        assert details.accepted_prediction_tokens == accepted
        verified = sum(r.verified for r in result.rounds)
        assert details.rejected_prediction_tokens == verified - accepted
        assert details.drafted_tokens == sum(r.drafted for r in result.rounds)
        assert details.rounds == len(result.rounds)
    # The same request again: one token of the prompt is evaluated, for its logits.
    assert last.usage.prompt_tokens_details.cached_tokens == result.prompt_tokens - 1
    timings = whole.timings
    assert timings["predicted_n"] == len(result.token_ids)
    assert timings["draft_n_accepted"] == accepted


def test_a_conversation_is_that_of_chat(engines: list[Engine], client: openai.OpenAI):
    """Also where another one comes between; only what is new is evaluated."""
    here = Chat(engines[1], system="be brief", draft=TREE)
    messages: list[Any] = [{"role": "system", "content": "be brief"}]
    before = 0
    for i in range(4):
        text = f"turn {i} of the conversation"
        answer = "".join(s.text for s in here.send(text, max_tokens=25))
        messages += user(text)
        whole = chat(client, messages=messages, max_tokens=25)
        assert whole.choices[0].message.content == answer
        assert here.last is not None
        assert whole.usage.prompt_tokens == here.last.prompt_tokens
        assert whole.usage.prompt_tokens_details.cached_tokens >= before
        # All but the last token: nobody has looked at what follows it yet.
        before = whole.usage.total_tokens - 1
        messages.append({"role": "assistant", "content": answer})
        if i == 1:
            chat(client, f"somebody else {i}", max_tokens=25)
    again = chat(client, messages=messages[:-1], max_tokens=25)
    assert again.choices[0].message.content == messages[-1]["content"]
    prompt = again.usage.prompt_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == prompt - 1


def test_contents_in_parts_and_the_developers_message(client: openai.OpenAI):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    plain = [{"role": "system", "content": "brief"}, {"role": "user", "content": "one\ntwo"}]
    given = [{"role": "developer", "content": "brief"}, {"role": "user", "content": parts}]
    answers = [chat(client, messages=m, max_tokens=9) for m in (plain, given)]
    assert answers[0].choices[0].message == answers[1].choices[0].message
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens


def test_sampling(client: openai.OpenAI, reference: Engine):
    asked = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    more = {"top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1}
    seeds = (7, -3, 2**64 - 1)
    texts = []
    for seed in seeds:
        params = SamplingParams(**asked, **more, seed=seed % 2**64)  # type: ignore[arg-type]
        result = expected(reference, "sample", params=params, max_tokens=25)
        whole = chat(client, "sample", max_tokens=25, seed=seed, extra_body=more, **asked)
        assert whole.choices[0].message.content == result.text
        texts.append(result.text)
    assert len(set(texts)) == len(seeds)
    # null is as good as nothing
    nulls = dict.fromkeys(["temperature", "top_p", "stop", "seed", "tools", "logit_bias"])
    with_nulls = chat(client, "sample", max_tokens=25, extra_body=nulls)
    assert with_nulls.choices == chat(client, "sample", max_tokens=25).choices


def test_a_fresh_seed_gives_another_text(client: openai.OpenAI):
    texts = {
        chat(client, temperature=1.5, max_tokens=30, seed=seed).choices[0].message.content
        for seed in (None, None, -1, -1)
    }
    assert len(texts) == 4


def test_a_logit_bias(client: openai.OpenAI, reference: Engine):
    free = chat(client, "biased", max_tokens=25)
    ids = reference.tokenize(free.choices[0].message.content)
    bias: dict[str, Any] = {str(max(set(ids), key=ids.count)): -100, "90": 2.5}
    given = {int(t): float(v) for t, v in bias.items()}
    for options in ({}, {"temperature": 1.1, "seed": 5}):
        result = expected(
            reference, "biased", params=SamplingParams(logit_bias=given, **options), max_tokens=25
        )  # type: ignore[arg-type]
        found = chat(client, "biased", logit_bias=bias, max_tokens=25, **options)
        assert found.choices[0].message.content == result.text
        chunks = chat(client, "biased", logit_bias=bias, max_tokens=25, stream=True, **options)
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == result.text
        assert found.choices[0] != chat(client, "biased", max_tokens=25, **options).choices[0]
        text = client.completions.create(
            model="x", prompt="so: ", logit_bias=bias, max_tokens=20, **options
        )
        params = SamplingParams(logit_bias=given, **options)  # type: ignore[arg-type]
        plain = reference.complete("so: ", params, max_tokens=20, draft=TREE)
        assert text.choices[0].text == plain.text
    assert chat(client, "biased", logit_bias={}, max_tokens=25).choices == free.choices


def test_where_an_answer_ends(client: openai.OpenAI):
    whole = chat(client, max_tokens=40).choices[0].message.content
    stop = whole[10:13]
    for asked in (stop, [stop], ["\u2603 never", stop, ""]):
        choice = chat(client, max_tokens=40, stop=asked).choices[0]
        assert choice.message.content == whole[: whole.index(stop)]
        assert choice.finish_reason == "stop"
        chunks = list(chat(client, max_tokens=40, stop=asked, stream=True))
        text = "".join(c.choices[0].delta.content or "" for c in chunks)
        assert text == choice.message.content
    for name in ("max_tokens", "max_completion_tokens"):
        short = chat(client, **{name: 3})
        assert short.usage.completion_tokens == 3
        assert short.choices[0].finish_reason == "length"
    full = chat(client, extra_body={"max_tokens": -1}, stop=None)
    assert full.usage.completion_tokens > 40


def test_completions(client: openai.OpenAI, reference: Engine):
    prompt = "the thing is "
    result = reference.complete(prompt, max_tokens=30, draft=TREE)
    ids = reference.tokenize(prompt)
    for asked in (prompt, [prompt], ids, [ids]):
        whole = client.completions.create(model="x", prompt=asked, max_tokens=30)
        assert whole.choices[0].text == result.text
        assert whole.choices[0].finish_reason == result.finish_reason
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == len(ids)
    chunks = list(
        client.completions.create(
            model="x", prompt=prompt, max_tokens=30, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(c.choices[0].text for c in chunks[:-1]) == result.text
    assert chunks[-2].choices[0].finish_reason == result.finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(result.token_ids)
    short = client.completions.create(model="x", prompt=prompt)
    assert short.usage is not None
    assert short.usage.completion_tokens == 16
    sampled = client.completions.create(
        model="x", prompt=prompt, max_tokens=20, temperature=1.2, seed=4, stop="e"
    )
    params = SamplingParams(temperature=1.2, seed=4)
    wanted = reference.complete(prompt, params, max_tokens=20, draft=TREE, stop=["e"])
    assert sampled.choices[0].text == wanted.text


def test_logprobs(client: openai.OpenAI, reference: Engine):
    result = expected(reference, "how sure", max_tokens=20, logprobs=3)
    whole = chat(client, "how sure", max_tokens=20, logprobs=True, top_logprobs=3)
    content = whole.choices[0].logprobs.content
    assert bytes(b for t in content for b in t.bytes).decode() == whole.choices[0].message.content
    given = [t for t in result.logprobs if not reference.model.is_end(t.token_id)]
    assert [t.logprob for t in content] == pytest.approx([t.logprob for t in given], abs=0.05)
    for token in content:
        assert len(token.top_logprobs) == 3
        assert (token.token, token.logprob) == (
            token.top_logprobs[0].token, token.top_logprobs[0].logprob,
        )  # fmt: skip  # greedy
    chunks = list(chat(client, "how sure", max_tokens=20, logprobs=True, stream=True))
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in content]
    assert all(t.top_logprobs == [] for t in streamed)
    assert chat(client, max_tokens=3).choices[0].logprobs is None


def test_logprobs_of_completions(client: openai.OpenAI):
    def ask(**options: Any) -> Any:
        return client.completions.create(model="x", prompt="hm ", max_tokens=15, **options)

    whole = ask(logprobs=2).choices[0]
    assert "".join(whole.logprobs.tokens) == whole.text
    assert all(len(top) == 2 for top in whole.logprobs.top_logprobs)
    for token, offset in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        assert whole.text.startswith(token, offset)
    parts = [c.choices[0].logprobs for c in ask(logprobs=2, stream=True)]
    for name in ("tokens", "text_offset", "top_logprobs"):
        joined = [x for p in parts for x in getattr(p, name)]
        if name != "top_logprobs":
            assert joined == getattr(whole.logprobs, name)
    assert ask(logprobs=0).choices[0].logprobs.top_logprobs == [{}] * 15


# ---- answers that follow a grammar


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_answers_that_follow_a_schema(client: openai.OpenAI, reference: Engine, temperature: float):
    form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
    for i in range(2):
        whole = chat(
            client, f"animal {i}", response_format=form, temperature=temperature, seed=i,
            max_tokens=200,
        )  # fmt: skip
        text = whole.choices[0].message.content
        jsonschema.validate(json.loads(text), SCHEMA)
        assert whole.choices[0].finish_reason == "stop"
        if temperature == 0:
            plain = reference.complete(
                chat_template(reference).render(user(f"animal {i}")),
                max_tokens=200, draft=PLAIN, grammar=Grammar.from_json_schema(SCHEMA),
            )  # fmt: skip
            assert text == plain.text
            chunks = list(
                chat(client, f"animal {i}", response_format=form, max_tokens=200, stream=True)
            )
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == text


def test_any_json_object_and_grammars(client: openai.OpenAI):
    whole = chat(client, response_format={"type": "json_object"}, max_tokens=40)
    assert whole.choices[0].message.content.lstrip().startswith("{")
    body = {"grammar": 'root ::= ("yes" | "no") " " [0-9]'}
    for temperature in (0, 2):
        text = chat(client, temperature=temperature, extra_body=body).choices[0].message.content
        assert text[:-1] in ("yes ", "no ") and text[-1].isdigit()
    text = client.completions.create(model="x", prompt="so: ", extra_body=body).choices[0].text
    assert text[:-1] in ("yes ", "no ")
    assert chat(client, response_format={"type": "text"}, max_tokens=5).choices


NOTHING = '"\\x00"'  # llama.cpp takes no token that says it


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_no_answer_can_begin_with(client: openai.OpenAI, stream: bool):
    asked = {"stream": stream, "extra_body": {"grammar": f"root ::= {NOTHING}"}}
    for ask in (
        lambda: chat(client, **asked),
        lambda: client.completions.create(model="x", prompt="so", **asked),
    ):
        with pytest.raises(openai.BadRequestError) as e:
            ask()
        assert (e.value.param, e.value.code) == ("grammar", "invalid_grammar")
        assert "change what must come first" in e.value.message


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_grammar_that_leads_nowhere(
    server: Running, client: openai.OpenAI, caplog: pytest.LogCaptureFixture, temperature: float
):
    """Known when the answer gets there: status 400, or the last event of a stream."""
    grammar = f'root ::= "yes " [a-z]{{5}} {NOTHING}'
    asked = {"temperature": temperature, "seed": 1, "extra_body": {"grammar": grammar}}
    for ask in (
        lambda: chat(client, **asked),
        lambda: client.completions.create(model="x", prompt="so", **asked),
    ):
        with pytest.raises(openai.BadRequestError) as e:
            ask()
        assert (e.value.param, e.value.code) == ("grammar", "invalid_grammar")
        assert "after what was said" in e.value.message
    for chunks in (
        chat(client, stream=True, **asked),
        client.completions.create(model="x", prompt="so", stream=True, **asked),
    ):
        text = ""
        with pytest.raises(openai.APIError, match="after what was said") as error:
            for chunk in chunks:
                choice = chunk.choices[0]
                text += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
        assert re.fullmatch("yes [a-z]{5}", text)
        assert error.value.type == "invalid_request_error"
        assert (error.value.param, error.value.code) == ("grammar", "invalid_grammar")
    body = {"messages": user("x"), "grammar": grammar, "stream": True}
    raw = httpx.post(f"{server.url}/v1/chat/completions", json=body, trust_env=False)
    assert raw.status_code == 200 and raw.text.endswith("data: [DONE]\n\n")
    assert not caplog.records  # nothing for the server's log
    assert chat(client, max_tokens=3).choices[0].finish_reason == "length"


def test_a_schema_that_the_vocabulary_cannot_spell(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
):
    """As for a tokenizer that lacks characters: tokens with these have no text here."""
    model = server.service.engine.model
    known = model.silent_tokens
    for missing, problem in (("{", "first"), (":", "after what was said")):
        silent = known.copy()
        for token in range(model.n_vocab):
            silent[token] |= missing in model.text([token])
        monkeypatch.setitem(vars(model), "silent_tokens", silent)
        form: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
        with pytest.raises(openai.BadRequestError, match=problem) as e:
            chat(client, response_format=form)
        assert e.value.code == "invalid_grammar"
        assert e.value.param.split(".")[0] == "response_format"


# ---- tools


def test_a_tool_that_must_be_called(tool_client: openai.OpenAI):
    for tools, choice in (
        ([WEATHER], "required"),
        ([WEATHER, CLOCK], {"type": "function", "function": {"name": "weather"}}),
        ([CLOCK, WEATHER], "required"),
    ):
        options: dict[str, Any] = {"tools": tools, "tool_choice": choice, "max_tokens": 100}
        whole = chat(tool_client, "what is it like?", **options)
        (choice_,) = whole.choices
        assert choice_.finish_reason == "tool_calls"
        assert choice_.message.content is None
        (call,) = choice_.message.tool_calls
        named = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
        jsonschema.validate(json.loads(call.function.arguments), named[call.function.name])
        if choice != "required":
            assert call.function.name == "weather"
        chunks = list(chat(tool_client, "what is it like?", stream=True, **options))
        deltas = [c.choices[0].delta for c in chunks]
        (streamed,) = [t for d in deltas for t in d.tool_calls or []]
        assert streamed.index == 0 and streamed.id != call.id
        assert streamed.function.name == call.function.name
        assert streamed.function.arguments == call.function.arguments
        assert not any(d.content for d in deltas)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        # And on with what the tool said.
        messages = [
            *user("what is it like?"),
            choice_.message.model_dump(),
            {"role": "tool", "tool_call_id": call.id, "content": "it rains"},
        ]
        answer = chat(tool_client, messages=messages, tools=tools, max_tokens=10)
        assert answer.choices[0].message.content


def test_tools_that_may_be_called(tool_server: Running, tool_client: openai.OpenAI):
    """The tiny model calls none: its answer comes through as it is, whole and streamed."""
    service, engine = tool_server.service, tool_server.service.engine
    prompt = service.template.render(user("hello"), tools=[WEATHER])
    assert "weather" in prompt
    whole = chat(tool_client, tools=[WEATHER], max_tokens=30)
    chunks = list(chat(tool_client, tools=[WEATHER], max_tokens=30, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert whole.choices[0].message.content == text
    assert text == engine.complete(prompt, max_tokens=30, draft=TREE).text
    assert whole.choices[0].message.tool_calls is None
    # "none": the model is not even told.
    untold = chat(tool_client, tools=[WEATHER], tool_choice="none", max_tokens=30)
    assert untold.choices == chat(tool_client, max_tokens=30).choices
    assert untold.usage.prompt_tokens < whole.usage.prompt_tokens


@pytest.mark.parametrize("marker", ["<tool_call>", "<|mask|>"])
def test_calls_in_an_answer(
    tool_server: Running, tool_client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, marker: str
):
    """What the tiny model would never say: its words are put into its mouth, token by token.

    The second marker is a special token, which the text of an answer does not show.
    """
    service, model = tool_server.service, tool_server.service.engine.model
    source = TOOL_TEMPLATE.replace("<tool_call>", marker).replace("</tool_call>", marker)
    service.__dict__.pop("tool_format", None)
    monkeypatch.setattr(service, "template", ChatTemplate(source))
    call = f'{marker}\n{{"name": "weather", "arguments": {{"city": "Paris", "days": 2}}}}\n{marker}'
    ids = [*model.tokenize(f"Let me see.\n\n{call}{call}"), tiny.EOS_ID]
    asked = []

    async def steps(job: Any, client: Any) -> Any:
        asked.append(0)
        yield None
        for token in ids:
            asked[-1] += 1
            reason = "stop" if token == tiny.EOS_ID else None
            yield Step(model.text([token]), (token,), finish_reason=reason)

    monkeypatch.setattr(service, "steps", steps)
    (choice,) = chat(tool_client, tools=[WEATHER]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [c.function.name for c in choice.message.tool_calls] == ["weather"] * 2
    assert len({c.id for c in choice.message.tool_calls}) == 2
    arguments = json.loads(choice.message.tool_calls[1].function.arguments)
    assert arguments == {"city": "Paris", "days": 2}
    deltas = [c.choices[0].delta for c in chat(tool_client, tools=[WEATHER], stream=True)]
    assert "".join(d.content or "" for d in deltas) == "Let me see."
    assert [c.index for d in deltas for c in d.tool_calls or []] == [0, 1]
    one = chat(tool_client, tools=[WEATHER], parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"
    assert asked[0] == asked[1] == len(ids) > asked[2]  # it is not even asked for the second
    service.__dict__.pop("tool_format", None)


# ---- reasoning


def saying(service: Service, text: str) -> Callable[[Any, Any], Any]:
    """A `Service.steps` that says a text and ends, token by token."""
    model = service.engine.model

    async def steps(job: Any, client: Any) -> Any:
        yield None
        for token in [*model.tokenize(text), tiny.EOS_ID]:
            reason = "stop" if token == tiny.EOS_ID else None
            yield Step(model.text([token]), (token,), finish_reason=reason)

    return steps


def reasoning_and_content(client: openai.OpenAI, **options: Any) -> tuple[Any, Any]:
    """Of a whole answer; a streamed one must come to the same."""
    (choice,) = chat(client, **options).choices
    message = choice.message
    deltas = [c.choices[0].delta for c in chat(client, stream=True, **options)]
    thought = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert thought == (getattr(message, "reasoning_content", None) or "")
    assert "".join(d.content or "" for d in deltas) == (message.content or "")
    return thought, message.content


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_told_from_the_answer(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, opened: bool
):
    service = server.service
    if opened:  # by the template, as DeepSeek's and Qwen's thinking models have it
        source = tiny.CHAT_TEMPLATE.replace("assistant\n'", "assistant\n<think>\n'")
        assert source != tiny.CHAT_TEMPLATE
        monkeypatch.setattr(service, "template", ChatTemplate(source))
    text = ("" if opened else "<think>\n") + "Hm. [x]\n</think>\n\nFour < five. <think>"
    monkeypatch.setattr(service, "steps", saying(service, text))
    assert reasoning_and_content(client) == ("Hm. [x]", "Four < five. <think>")
    for raw in ("auto", "deepseek"):
        body = {"reasoning_format": raw}
        assert reasoning_and_content(client, extra_body=body)[0] == "Hm. [x]"
    assert reasoning_and_content(client, extra_body={"reasoning_format": "none"}) == ("", text)


def test_answers_without_reasoning_have_no_field_for_it(client: openai.OpenAI):
    assert "reasoning_content" not in chat(client, max_tokens=5).choices[0].message.model_dump()


def test_calls_in_reasoning_are_none(
    tool_server: Running, tool_client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
):
    """A thinking model weighs what it might call; only what comes after counts."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "%s"}}\n</tool_call>'
    text = f"<think>Perhaps {call % 'Rome'}?</think>\n\n{call % 'Paris'}"
    service = tool_server.service
    monkeypatch.setattr(service, "steps", saying(service, text))
    (choice,) = chat(tool_client, tools=[WEATHER]).choices
    (made,) = choice.message.tool_calls
    assert json.loads(made.function.arguments) == {"city": "Paris"}
    assert choice.message.reasoning_content == f"Perhaps {call % 'Rome'}?"
    deltas = [c.choices[0].delta for c in chat(tool_client, tools=[WEATHER], stream=True)]
    (made,) = [c for d in deltas for c in d.tool_calls or []]
    assert json.loads(made.function.arguments) == {"city": "Paris"}


def test_answers_with_a_form_do_not_begin_in_reasoning(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
):
    service = server.service
    source = tiny.CHAT_TEMPLATE.replace("assistant\n'", "assistant\n<think>\n'")
    monkeypatch.setattr(service, "template", ChatTemplate(source))
    prompts = []
    check = service.check_room
    monkeypatch.setattr(
        service, "check_room", lambda ids, param: (prompts.append(ids), check(ids, param))
    )
    answer = chat(client, extra_body={"grammar": 'root ::= "yes"'})
    assert answer.choices[0].message.content == "yes"
    text = service.engine.model.text(prompts[0], special=True)
    assert text.endswith("<think>\n\n</think>\n\n")


def test_reasoning_of_earlier_answers_goes_to_the_template(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
):
    source = "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }}{% endfor %}"
    monkeypatch.setattr(server.service, "template", ChatTemplate(source))
    messages = [{"role": "assistant", "content": "b", "reasoning_content": "a"}, *user("c")]
    short = chat(client, messages=user("c"), max_tokens=1).usage.prompt_tokens
    tokens = len(server.service.engine.tokenize("a|b|c")) - len(
        server.service.engine.tokenize("|c")
    )
    assert chat(client, messages=messages, max_tokens=1).usage.prompt_tokens == short + tokens


def test_earlier_calls_that_a_template_does_not_write(
    tool_server: Running, tool_client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
):
    """They become a part of the answer that they belong to, written as the model writes them."""
    service = tool_server.service
    service.__dict__.pop("tool_format", None)
    source = (
        "{% if tools %}List of tools: [{{ tools | tojson }}]{% endif %}{% for m in messages %}"
        "{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
    )
    monkeypatch.setattr(service, "template", ChatTemplate(source))
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    written = 'So:<|tool_call_start|>[weather(city="Rome")]<|tool_call_end|>'
    answers = [
        chat(tool_client, messages=[*user("hello"), answer], max_tokens=8)
        for answer in (
            {"role": "assistant", "content": "So:", "tool_calls": calls},
            {"role": "assistant", "content": written},
        )
    ]
    assert answers[0].choices == answers[1].choices
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens
    service.__dict__.pop("tool_format", None)


# ---- what is refused

OK: dict[str, Any] = {"messages": user("x"), "max_tokens": 3}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [
        {"function": {"name": "f", "arguments": "{}"}}]}]}, "messages[0].tool_calls"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -2}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": ["x"] * 33}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"logit_bias": {"1": 100.5}}, "logit_bias.1"),
    ({"logit_bias": {"1": "5"}}, "logit_bias.1"),
    ({"logit_bias": {"1": None}}, "logit_bias.1"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"320": 5}}, "logit_bias"),  # the vocabulary ends before
    ({"logit_bias": {"hello": 5}}, "logit_bias"),
    ({"logit_bias": [[1, 5]]}, "logit_bias"),
    ({"logit_bias": {str(t): 1 for t in range(1025)}}, "logit_bias"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"functions": [{}]}, "functions"),
    ({"modalities": ["audio"]}, "modalities[0]"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]},
     "tools[0].function.name"),
    ({"tools": [WEATHER]}, "tools"),  # this template knows none
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
     "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'}, "grammar"),
    ({"grammar": "root = x"}, "grammar"),
    ({"grammar": "root ::= <[99999]>", "stream": True}, "grammar"),  # no such token
    ({"reasoning_format": "loud"}, "reasoning_format"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning_content": 1}]},
     "messages[0].reasoning_content"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"messages": user("word " * 1000)}, "messages"),
]  # fmt: skip


def test_refusals_name_the_field(server: Running):
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for change, param in REFUSED:
            # httpx writes no integers that long itself
            response = client.post("/v1/chat/completions", content=json.dumps(OK | change))
            assert response.status_code == 400, (change, response.text)
            assert response.text.count("\n") == 1 and len(response.text) < 1000
            error = response.json()["error"]
            assert error["param"] == param, (change, error)
            assert error["type"] == "invalid_request_error"
        for change, param in (
            ({}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"),
            ({"prompt": ["a", "b"]}, "prompt"), ({"prompt": [10**6]}, "prompt"),
            ({"prompt": [-1]}, "prompt[0]"), ({"prompt": "a", "echo": True}, "echo"),
            ({"prompt": [1] * 40_000 + [-1]}, "prompt[40000]"),
            ({"prompt": "a", "best_of": 2}, "best_of"), ({"prompt": "a", "suffix": "b"}, "suffix"),
            ({"prompt": "a" * 9999}, "prompt"), ({"prompt": "a", "logprobs": True}, "logprobs"),
        ):  # fmt: skip
            response = client.post("/v1/completions", json=change)
            assert response.status_code == 400, (change, response.text)
            assert response.json()["error"]["param"] == param, (change, response.text)
        assert client.post("/v1/chat/completions", json=OK).status_code == 200
        for text in ("\ud800 alone", "\x00", "\u202e", "<|im_end|>"):
            body = json.dumps(OK | {"messages": user(text)})
            assert client.post("/v1/chat/completions", content=body).status_code == 200
        unknown = OK | {"some_other_servers": {"option": 1}, "store": True, "metadata": {"a": "b"}}
        assert client.post("/v1/chat/completions", json=unknown).status_code == 200


def test_refusals_say_what_to_do_instead(server: Running):
    """What OpenAI has and this server has not."""
    with httpx.Client(base_url=f"{server.url}/v1", trust_env=False) as client:
        for path, change, message in (
            ("chat/completions", {"n": 2}, "n must be 1, not 2; ask again for every further"),
            ("completions", {"n": 3}, "n must be 1, not 3; ask again for every further"),
            ("completions", {"best_of": 2}, "best_of must be 1, not 2; ask again for every"),
            ("completions", {"echo": True}, "echo must be false, not true; put the prompt in"),
            ("completions", {"suffix": "b"}, "suffix has 1 characters; at most 0 are allowed; w"),
            ("chat/completions", {"functions": [{}]},
                "functions has 1 items; at most 0 are allowed; use tools"),
            ("chat/completions", {"logit_bias": {"5": -101}}, "logit_bias.5 must be at least -100"),
            ("completions", {"logit_bias": {"x": 1}}, "logit_bias: 'x' is no token of this model; "
                "name tokens by their ids, 0 to 319"),
        ):  # fmt: skip
            response = client.post(f"/{path}", json=OK | {"prompt": "a"} | change)
            error = response.json()["error"]
            assert (response.status_code, error["type"]) == (400, "invalid_request_error")
            assert error["message"].startswith(message), error
            assert error["param"].split(".")[0] == next(iter(change))
        # As clients send them that write every field down.
        plain = {"n": 1, "best_of": 1, "echo": False, "suffix": None, "logit_bias": None}
        body = {"prompt": "a", "max_tokens": 2, **plain}
        assert client.post("/completions", json=body).status_code == 200


def test_refusals_come_as_the_packages_exceptions(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as e:
        chat(client, "word " * 1000)
    assert e.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as e:
        chat(client, temperature=-1, stream=True)
    assert e.value.param == "temperature"


def test_a_target_without_a_template(server: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server.service, "template", None)
    monkeypatch.setattr(server.service, "_no_template", "x.gguf has no chat template")
    with connected(server) as client:
        with pytest.raises(openai.BadRequestError) as e:
            chat(client)
        assert e.value.code == "no_chat_template"
        assert client.completions.create(model="x", prompt="still ", max_tokens=3).choices


def test_what_breaks_in_a_stream_is_its_last_event(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
):
    engine, rounds = server.service.engine, []

    def verified(*_args: Any) -> None:
        rounds.append(1)
        if len(rounds) == 2:
            from localspec.errors import LocalspecError

            raise LocalspecError("the cable was pulled")

    monkeypatch.setattr(engine, "on_verified", verified)
    with pytest.raises(openai.APIError, match="the cable was pulled"):
        list(chat(client, "something new", max_tokens=50, stream=True))
    rounds.clear()
    with pytest.raises(openai.InternalServerError, match="the cable was pulled"):
        chat(client, "something newer", max_tokens=50)
    monkeypatch.undo()
    assert chat(client, "something new", max_tokens=5).usage.completion_tokens == 5


# ---- clients that go


@pytest.mark.parametrize("kind", ["chat", "chat stream", "completion", "completion stream"])
def test_a_client_that_goes_stops_its_answer_within_a_round(
    server: Running, monkeypatch: pytest.MonkeyPatch, kind: str
):
    """The third round does not end before the client has gone; there is no fourth."""
    engine, begun, gone = server.service.engine, threading.Event(), threading.Event()
    rounds: list[int] = []

    def verified(*_args: Any) -> None:
        rounds.append(1)
        if len(rounds) == 3:
            begun.set()
            assert gone.wait(20)
            time.sleep(0.3)  # for the server to hear of it

    monkeypatch.setattr(engine, "on_verified", verified)
    body: dict[str, Any] = {"max_tokens": 400, "stream": "stream" in kind}
    body |= OK | {"max_tokens": 400} if "chat" in kind else {"prompt": "on and on "}
    path = "/v1/chat/completions" if "chat" in kind else "/v1/completions"
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    raw = server.connect(head.encode() + data)
    assert begun.wait(20)
    raw.shutdown(socket.SHUT_RDWR)
    raw.close()
    gone.set()
    until(lambda: not server.service.queue.busy)
    assert len(rounds) == 3
    with connected(server) as client:
        monkeypatch.undo()
        assert chat(client, max_tokens=5).usage.completion_tokens == 5


# ---- curl


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(server: Running, reference: Engine):
    def curl(*args: str) -> str:
        command = ["curl", "-sS", "--noproxy", "*", "--max-time", "30", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    url = f"{server.url}/v1/chat/completions"
    body = {"messages": user("curl asks"), "max_tokens": 20}
    right = expected(reference, "curl asks", max_tokens=20).text
    answer = json.loads(curl(url, "-d", json.dumps(body)))
    assert answer["choices"][0]["message"]["content"] == right
    lines = curl(url, "-N", "-d", json.dumps(body | {"stream": True})).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == right
    shown = curl("-i", url, "-d", "{")
    assert shown.startswith("HTTP/1.1 400 ") and shown.endswith("}\n")
    assert json.loads(curl(f"{server.url}/v1/models"))["data"][0]["id"] == "tiny"


# ---- the description


def resolved(schema: Any, document: Any) -> Any:
    """A schema with everything it refers to put in."""
    if isinstance(schema, list):
        return [resolved(s, document) for s in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        at = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            at = at[part]
        return resolved(at, document)
    return {key: resolved(value, document) for key, value in schema.items()}


def test_answers_are_as_described(server: Running):
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        document = client.get("/openapi.json").json()
        assert document == json.loads(json.dumps(description()))

        def check(method: str, path: str, body: Any = None, status: str = "200") -> None:
            response = client.request(method, path, json=body)
            assert str(response.status_code) == status, response.text
            operation = document["paths"][path][method.lower()]
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            schema = resolved(schema, document)
            jsonschema.Draft202012Validator.check_schema(schema)
            jsonschema.validate(response.json(), schema)

        def check_stream(path: str, body: Any, name: str) -> None:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            text = client.post(path, json=body | options).text
            schema = resolved(document["components"]["schemas"][name], document)
            for line in text.split("\n\n")[:-2]:
                jsonschema.validate(json.loads(line.removeprefix("data: ")), schema)

        logprobs = {"logprobs": True, "top_logprobs": 2}
        check_stream("/v1/chat/completions", OK | logprobs, "ChatCompletionChunk")
        check_stream("/v1/completions", {"prompt": "x", "logprobs": 2}, "CompletionChunk")
        check("POST", "/v1/chat/completions", OK)
        check("POST", "/v1/chat/completions", OK | logprobs)
        check("POST", "/v1/chat/completions", {}, "400")
        check("POST", "/v1/completions", {"prompt": "x", "logprobs": 2})
        check("POST", "/v1/completions", {"prompt": 1}, "400")
        check("GET", "/v1/models")
        check("GET", "/health")
        assert "localspec_" in client.get("/metrics").text


def test_what_is_checked_is_what_is_described(server: Running):
    """Every refused request of above that a schema can refuse, its schema refuses too."""
    document = description()
    schema = resolved(document["components"]["schemas"]["ChatRequest"], document)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(OK)
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        for change, _ in REFUSED:
            answer = client.post("/v1/chat/completions", content=json.dumps(OK | change)).json()
            by_schema = answer["error"]["code"] == "invalid_value"
            assert validator.is_valid(OK | change) != by_schema, change


# What a schema cannot say about requests is mostly in these: valid ones by it are refused often.
INVOLVED = (
    "grammar", "response_format", "tools", "tool_choice", "stream_options", "top_logprobs",
    "chat_template_kwargs",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_whatever_comes_the_answer_is_as_described(engines: list[Engine], mode: str):
    """No 5xx, no status or body that the description does not have; wrong requests are refused."""
    import hypothesis
    import schemathesis
    from hypothesis import strategies as st
    from schemathesis import checks

    rules = [
        checks.not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
        checks.negative_data_rejection,
    ]
    kind = schemathesis.GenerationMode(mode)
    positive = mode == "positive"
    seen: set[tuple[str, int]] = set()
    # A short context makes short answers.
    with serve(engines[3], draft=CHAIN) as server:
        api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        operations = [operation.ok() for operation in api.get_all_operations()]
        for operation in operations if positive else operations[:2]:

            @hypothesis.settings(
                max_examples=8,
                deadline=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=[hypothesis.Phase.generate],
            )
            @hypothesis.given(operation.as_strategy(generation_mode=kind), st.booleans())
            def attempt(case: Any, simple: bool) -> None:
                if positive and simple and isinstance(case.body, dict):
                    for name in INVOLVED:
                        case.body.pop(name, None)
                    if "messages" in case.body:
                        case.body["messages"] = user("x")
                response = case.call_and_validate(checks=rules, timeout=60)
                seen.add((case.path, response.status_code))

            attempt()
    wanted = 200 if positive else 400
    assert {("/v1/chat/completions", wanted), ("/v1/completions", wanted)} <= seen


# ---- the docs


def snippets(language: str) -> list[str]:
    text = (Path(__file__).resolve().parents[1] / "docs" / "serve.md").read_text("utf-8")
    found = re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [s for s in found if "127.0.0.1:8080" in s]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_snippets_of_the_docs(server: Running, capsys: pytest.CaptureFixture[str]):
    streaming, structured = snippets("python")
    here = f"127.0.0.1:{server.port}"
    exec(streaming.replace("127.0.0.1:8080", here), {})
    assert len(capsys.readouterr().out) > 50
    structured = structured.replace("max_tokens=100", "max_tokens=20")
    exec(structured.replace("127.0.0.1:8080", here), {})
    assert capsys.readouterr().out.startswith("{")
    (command,) = snippets("sh")
    assert command.count("\n") == 1
    words = shlex.split(command.replace("127.0.0.1:8080", here))
    done = subprocess.run([*words, "-sS"], check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]
