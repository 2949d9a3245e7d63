"""How templates write tool calls, and answers that contain them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from tool_calling import ADD, NOW, answer_with, read_all

from localspec.grammar import Grammar
from localspec.server.tool_format import ToolFormat, moved
from localspec.server.tool_sample import format_of, uses_tools
from localspec.server.tools import CallReader
from localspec.template import ChatTemplate

HEAD = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}"
)
TAIL = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
# Name -> how the template writes the calls of a message.
TEMPLATES = {
    "hermes": CALLS + '{{ \'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' + '
    "(f.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}",
    "llama 3": CALLS + '{{ \'{"name": "\' + f.name + \'", "parameters": \' + '
    "(f.arguments | tojson) + '}' }}{% endfor %}",
    "mistral": "{% if m.tool_calls %}[TOOL_CALLS][" + CALLS + "{{ {'name': f.name, 'arguments': "
    "f.arguments, 'id': c.id} | tojson }}{% endfor %}]{% endif %}",
    "mistral 3": CALLS + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "mistral small": CALLS + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ f.arguments | tojson }}{% endfor %}",
    "kimi": CALLS + "<|call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|args|>"
    "{{ f.arguments | tojson }}<|call_end|>{% endfor %}",
    "nested": CALLS + "<|a_call|>{{ {'type': 'function', 'function': {'name': f.name, 'arguments': "
    "f.arguments}} | tojson }}<|a_calls_end|>{% endfor %}",
    "tags": CALLS + "{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}"
    "{% for k, v in f.arguments.items() %}{{ '<parameter=' + k + '>\\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}{% endfor %}",
}
FORMATS = {
    "hermes": ("json", "<tool_call>\n", "\n</tool_call>"),
    "llama 3": ("json", "", ""),
    "mistral": ("json", "[TOOL_CALLS]", ""),
    "mistral 3": ("named", "[TOOL_CALLS]", ""),
    "mistral small": ("named", "[TOOL_CALLS]", ""),
    "kimi": ("named", "<|call_begin|>functions.", "<|call_end|>"),
    "nested": ("json", "<|a_call|>", "<|a_calls_end|>"),
    "tags": ("tags", "<tool_call>\n<function=", "\n</function>\n</tool_call>"),
}
ARGUMENTS: dict[str, Any] = {"a": 3, "note": 'say "<hi>" {\n} 日🙂'}


def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(HEAD + TEMPLATES[name] + TAIL)


def form_of(name: str) -> ToolFormat:
    form = format_of(template_of(name).render)
    assert form is not None
    return form


def written(name: str, *calls: tuple[str, dict[str, Any]], content: str = "") -> str:
    """An answer with calls as the template writes it down."""
    message = answer_with(calls, content)
    text = template_of(name).render([message], add_generation_prompt=False)
    return text.removeprefix("<|assistant|>").removesuffix("\n").removesuffix("<|end|>")


def read(reader: CallReader, text: str, size: int) -> tuple[str, list[tuple[str, Any]]]:
    """What a reader makes of a text that comes in pieces of one size."""
    return read_all(reader, [text[i : i + size] for i in range(0, len(text), size)])


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_is_read_off_the_template(name: str):
    assert uses_tools(template_of(name).render)
    form = form_of(name)
    assert (form.kind, form.start, form.end) == FORMATS[name]
    assert form.listed == (name == "mistral")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_as_they_are_written(name: str, size: int):
    form = form_of(name)
    for content in ("", "Let me see: {1} <tool "):
        if content and not form.start:
            continue  # an answer is a call or it is not
        text = written(name, ("add_up", ARGUMENTS), content=content)
        found = read(CallReader(form, [NOW, ADD]), text, size)
        assert found == (content.rstrip(), [("add_up", ARGUMENTS)])
    two = written(name, ("add_up", ARGUMENTS), ("now", {}))
    if name == "mistral":
        two = two.replace("}{", "}, {")
    assert read(CallReader(form, [NOW, ADD]), two, size) == (
        "",
        [("add_up", ARGUMENTS), ("now", {})],
    )


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_no_call_is_text(name: str, size: int):
    form = form_of(name)
    call = written(name, ("add_up", ARGUMENTS))
    for text in (
        "just text, with <tags> and {braces}\n\n",
        " leading and trailing \n",
        written(name, ("unknown_function", ARGUMENTS)),
        call[: len(form.start) + 9],  # cut off
        form.start + "no JSON" + form.end,
        form.start,
    ):
        content, calls = read(CallReader(form, [NOW, ADD]), text, size)
        assert calls == []
        assert content.split() == text.split()
        if not text.startswith(form.start.strip() or "{"):
            assert content == text


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "llama 3"])
def test_a_call_after_something_that_is_none(name: str):
    form = form_of(name)
    broken = written(name, ("unknown_function", {"a": 1}))
    text = f"{broken} then {written(name, ('now', {}))}"
    content, calls = read(CallReader(form, [NOW, ADD]), text, 4)
    assert calls == [("now", {})]
    assert "unknown_function" in content


@pytest.mark.parametrize("name", [n for n in TEMPLATES if n != "tags"])
def test_forced_calls(name: str):
    """The beginning and the schema of the rest together are what the template would write."""
    form = form_of(name)
    begun, schema = form.forced([ADD])
    assert schema is not None
    text = written(name, ("add_up", {"a": 1, "note": "x"}))
    if name not in ("mistral", "mistral small"):  # the call's id is not asked for
        assert text.startswith(begun)
        rest = text[len(begun) :].removesuffix(form.end)
        jsonschema.validate(json.loads(rest), schema)
        reader = CallReader(form, [ADD], begun)
        assert read(reader, rest, 3) == ("", [("add_up", {"a": 1, "note": "x"})])
    validator = jsonschema.Draft202012Validator(schema)
    for wrong in ([], {"name": "now", "arguments": {}}, {"a": "x"}, {"name": "add_up"}):
        assert not validator.is_valid(wrong)


def test_references_in_parameters_stay_in_them():
    """Pydantic writes nested types so; for calls of several tools the schemas are put together."""
    both = [
        {"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {"at": {"$ref": "#/$defs/Place"}}, "required": ["at"],
            "$defs": {"Place": {"enum": [place]}}}}}
        for name, place in (("go", "north"), ("look", "south"))
    ]  # fmt: skip
    form = form_of("nested")
    for tools in (both, both[1:]):
        _, schema = form.forced(tools)
        assert schema is not None
        validator = jsonschema.Draft202012Validator(schema)
        Grammar.from_json_schema(schema)
        for place in ("north", "south"):
            function = {"name": "look", "arguments": {"at": place}}
            call = {"type": "function", "function": function}
            assert validator.is_valid(call) == (place == "south")
    assert moved({"$ref": "#", "properties": {"$ref": {"$ref": "#/x"}}}, "#/p") == {
        "$ref": "#/p", "properties": {"$ref": {"$ref": "#/p/x"}}
    }  # fmt: skip


def test_arguments_that_are_written_as_text():
    source = TEMPLATES["nested"].replace("f.arguments}", "f.arguments | tojson}")
    form = format_of(ChatTemplate(HEAD + source + TAIL).render)
    assert form is not None
    call = {"type": "function", "function": {"name": "add_up", "arguments": '{"a": 1}'}}
    text = f"<|a_call|>{json.dumps(call)}<|a_calls_end|>"
    assert read(CallReader(form, [ADD]), text, 4) == ("", [("add_up", {"a": 1})])
    _, schema = form.forced([ADD])
    assert schema is not None
    call["function"]["arguments"] = {"a": 1}  # type: ignore[index]
    jsonschema.validate(call, schema)


def test_forced_tags_begin_with_the_function():
    form = form_of("tags")
    assert form.forced([ADD]) == ("<tool_call>\n<function=add_up>\n", None)
    assert form.forced([ADD, NOW]) == ("<tool_call>\n<function=", None)
    reader = CallReader(form, [ADD], "<tool_call>\n<function=add_up>\n")
    rest = "<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
    assert read(reader, rest, 2) == ("", [("add_up", {"a": 7})])


def test_templates_without_tools():
    plain = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert not uses_tools(plain.render)
    assert format_of(plain.render) is None
    refusing = ChatTemplate("{{ raise_exception('no') }}")
    assert not uses_tools(refusing.render)
    assert format_of(refusing.render) is None
