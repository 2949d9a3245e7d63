"""Tool calls that are not JSON alone: marks around arguments, Gemma's notation, Python's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_calling import ADD, NOW, answer_with, read_all

from localspec.server import tools as tools_module
from localspec.server.messages import for_template
from localspec.server.tool_arguments import as_python, from_gemma, from_python
from localspec.server.tool_format import ToolFormat
from localspec.server.tool_parser import CallParser, Parsed
from localspec.server.tool_sample import format_of, uses_tools
from localspec.server.tool_scan import Steps
from localspec.server.tools import CallReader
from localspec.template import ChatTemplate

HEAD = (
    "{% macro value(v) %}{{ v if v is string else v | tojson }}{% endmacro %}"
    '{% macro gemma(v) %}{% if v is string %}<|"|>{{ v }}<|"|>'
    "{% elif v is boolean %}{{ v | tojson }}"
    "{% elif v is mapping %}{% raw %}{{% endraw %}{% for k, x in v | dictsort %}"
    "{{ k }}:{{ gemma(x) }}{{ ',' if not loop.last }}{% endfor %}{% raw %}}{% endraw %}"
    "{% elif v is sequence %}[{% for x in v %}{{ gemma(x) }}{{ ',' if not loop.last }}"
    "{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
    "{% macro python(v) %}{{ v | tojson if v is string or v is mapping else v }}{% endmacro %}"
    "{% if tools %}{{ told }}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
)
TAIL = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
ARGS = "{% for k, v in f.arguments.items() %}"
IN_ONE = "{% if m.tool_calls %}"  # all calls of a message between one start and one end
# Name -> how the template writes the calls of a message.
TEMPLATES = {
    "keys": CALLS + "<call>{{ f.name + '\n' }}" + ARGS + "<key>{{ k }}</key>{{ '\n' }}"
    "<value>{{ value(v) }}</value>{{ '\n' }}{% endfor %}</call>{{ '\n' }}{% endfor %}",
    "close keys": CALLS + "<call>{{ f.name }}" + ARGS + "<key>{{ k }}</key>"
    "<value>{{ value(v) }}</value>{% endfor %}</call>{% endfor %}",
    "sections": IN_ONE + "<calls:x>{{ '\n' }}" + CALLS + "<call:x>{{ f.name }}<sep:x>{{ '\n' }}"
    + ARGS + "<key:x>{{ k }}</key:x>{{ '\n' }}<value:x>{{ value(v) }}</value:x>{{ '\n' }}"
    "{% endfor %}</call:x>{{ '\n' }}{% endfor %}</calls:x><|eos:x|>{% endif %}",
    "invoke": IN_ONE + "<a:calls>{{ '\n' }}" + CALLS + "<invoke name=\"{{ f.name }}\">{{ '\n' }}"
    + ARGS + "<parameter name=\"{{ k }}\">{{ value(v) }}</parameter>{{ '\n' }}{% endfor %}"
    "</invoke>{{ '\n' }}{% endfor %}</a:calls>{% endif %}",
    "one tag": CALLS + '<function name="{{ f.name }}">' + ARGS + '<param name="{{ k }}">'
    "{{ value(v) }}</param>{% endfor %}</function>{% endfor %}",
    "typed": IN_ONE + "{{ '\n\n' }}<¦calls>{{ '\n' }}" + CALLS + "<¦invoke name=\"{{ f.name }}\">"
    "{{ '\n' }}" + ARGS + "<¦parameter name=\"{{ k }}\" string=\"{{ (v is string) | tojson }}\">"
    "{{ value(v) }}</¦parameter>{{ '\n' }}{% endfor %}</¦invoke>{{ '\n' }}{% endfor %}"
    "</¦calls>{% endif %}",
    "numbered": IN_ONE + "<|open|>tools<|sep|>" + CALLS + "<|open|>call tool=\"{{ f.name }}\" "
    'index="{{ loop.index }}"<|sep|>' + ARGS + "<|open|>argument key=\"{{ k }}\" "
    "type=\"{{ 'string' if v is string else 'number' if v is number else 'other' }}\"<|sep|>"
    "{{ value(v) }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}"
    "<|close|>tools<|sep|>{% endif %}",
    "gemma": CALLS + "<|tool_call>call:{{ f.name }}{{ gemma(f.arguments) }}<tool_call|>"
    "{% endfor %}{{ '<|tool_response>' if m.tool_calls }}",
    "python": IN_ONE + "<|calls|>[" + CALLS + "{{ f.name }}(" + ARGS + "{{ k }}={{ python(v) }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
    "<|calls_end|>{% endif %}",
    "identified": IN_ONE + "<|calls|>" + CALLS + "<|begin|>{{ c.id }}<|name|>{{ f.name }}<|args|>"
    "{{ f.arguments | tojson }}<|close|>{% endfor %}<|done|>{% endif %}",
    "lines": IN_ONE + "<calls>{{ '\n' }}" + CALLS + "{{ {'name': f.name, 'arguments': f.arguments} "
    "| tojson }}{{ '\n' }}{% endfor %}</calls>{% endif %}",
}  # fmt: skip
KINDS = {"gemma": "gemma", "python": "python", "identified": "named", "lines": "json"}
# How an answer begins that has to call one function, or one of several.
FORCED = {
    "keys": ("<call>add_up\n", "<call>"),
    "close keys": ("<call>add_up", "<call>"),
    "sections": ("<calls:x>\n<call:x>add_up<sep:x>\n", "<calls:x>\n<call:x>"),
    "invoke": ('<a:calls>\n<invoke name="add_up">\n', '<a:calls>\n<invoke name="'),
    "one tag": ('<function name="add_up">', '<function name="'),
    "typed": ('<¦calls>\n<¦invoke name="add_up">\n', '<¦calls>\n<¦invoke name="'),
    "numbered": (
        '<|open|>tools<|sep|><|open|>call tool="add_up" index="1"<|sep|>',
        '<|open|>tools<|sep|><|open|>call tool="',
    ),
    "gemma": ("<|tool_call>call:add_up{", "<|tool_call>call:"),
    "python": ("<|calls|>[add_up(", "<|calls|>["),
}
TOOLS = [NOW, ADD]
SHORT: dict[str, Any] = {"a": 3, "note": 'say "<hi>" {\n} 日'}
LONG: dict[str, Any] = {
    "a": -2.5, "b": True, "list": [1, "x]", {"y": "}"}], "note": "a'b\\n </> 🙂\n", "o": {"k": "v"}
}  # fmt: skip
Calls = list[tuple[str, Any]]


@cache
def template_of(name: str) -> ChatTemplate:
    return ChatTemplate(HEAD + TEMPLATES[name] + TAIL)


@cache
def form_of(name: str) -> ToolFormat:
    form = format_of(template_of(name).render)
    assert form is not None
    return form


def written(name: str, calls: Calls, content: str = "") -> str:
    """An answer with calls as the template writes it down."""
    text = template_of(name).render([answer_with(calls, content)], add_generation_prompt=False)
    return text.removeprefix("<|assistant|>").removesuffix("<|end|>\n")


def read(form: ToolFormat, pieces: list[str], begun: str = "") -> tuple[str, Calls]:
    """What is made of a text that comes in pieces."""
    return read_all(CallReader(form, TOOLS, begun), pieces)


def cut(text: str) -> Iterator[list[str]]:
    """A text in one piece, in all pairs of pieces, and character by character."""
    yield list(text)
    for i in range(len(text)):
        yield [text[:i], text[i:]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_as_they_are_written(name: str):
    assert uses_tools(template_of(name).render)
    form = form_of(name)
    assert form.kind == KINDS.get(name, "tags")
    calls: Calls = [("add_up", SHORT), ("now", {})]
    text = written(name, calls, "Let me <see>:")
    for pieces in cut(text):
        assert read(form, pieces) == ("Let me <see>:", calls)
    calls = [("now", {}), ("add_up", LONG), ("add_up", {"note": ""})]
    text = written(name, calls)
    for pieces in (list(text), [text]):
        assert read(form, pieces) == ("", calls)
    if form.kind == "tags":  # white space between the marks is up to the model
        text = written(name, calls[:2])
        for loose in (text.replace("><", ">\n <"), text.replace(">\n<", "><")):
            assert read(form, list(loose)) == ("", calls[:2])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_is_given_out_when_it_is_complete(name: str):
    """Also where another one may follow between the same marks."""
    form = form_of(name)
    text = written(name, [("now", {}), ("add_up", SHORT)])
    reader = CallReader(form, TOOLS)
    had = [len(reader.calls) for sign in text if reader.feed(sign) and True]
    if name != "python":  # a list of calls
        second = text.index("add_up")
        assert had[second] == 1
    assert had[-1] + len(reader.finish()[1]) == 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_no_call_is_text(name: str):
    form = form_of(name)
    call = written(name, [("add_up", SHORT)]).strip()
    for text in (
        "just text, with <tags> and {braces} [of] all kinds\n\n",
        " leading and trailing \n",
        f" so: \n\n {written(name, [('unknown', SHORT)]).strip()} \n",
        call[: call.index("add_up") + 9],  # cut off
        f"{form.start}nothing of the kind{form.end}\n",
        f" {form.start}",
        f"{form.start} ({form.start}) [{form.start}] \n{form.start}x",
        call.replace("add_up", "add_up>{"),
    ):
        for pieces in cut(text):
            assert read(form, pieces) == (text, [])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_after_something_that_is_none(name: str):
    form = form_of(name)
    broken = written(name, [("unknown", {"a": 1})]).strip()
    unfinished = written(name, [("add_up", {"note": "x"})]).strip()
    unfinished = unfinished[: unfinished.index("add_up") + 8]
    call = written(name, [("now", {})])
    for text in (f"{broken} then", f"{unfinished} then", f"{form.start.strip()} and"):
        for pieces in cut(text + call):
            assert read(form, pieces) == (text, [("now", {})])


def _marks(form: ToolFormat) -> list[str]:
    tags = form.tags
    around = [form.start, form.middle, form.end, form.again or ""]
    around += [tags.key, tags.value, tags.typed, tags.close] if tags else []
    return [m for mark in around for m in (mark, mark.strip(), mark[:-1]) if m]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_pieces_make_no_difference_and_nothing_is_lost(name: str, data: st.DataObject):
    form = form_of(name)
    own = [*_marks(form), *"{}[]()<>\"'\\,:= \n", "add_up", "now", "other", "note", "日",
           written(name, [("now", {})]), written(name, [("add_up", SHORT)])]  # fmt: skip
    text = "".join(data.draw(st.lists(st.sampled_from(own), max_size=14)))
    content, calls = read(form, [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == read(form, list(text)) == (content, calls)
    if calls:  # what is left out is calls
        rest = iter(text)
        assert all(sign in rest for sign in content)
    else:
        assert content == text


@pytest.mark.parametrize("name", FORCED)
def test_forced_calls(name: str):
    form = form_of(name)
    begun, several = FORCED[name]
    assert form.forced([ADD]) == (begun, None)
    assert form.forced(TOOLS) == (several, None)
    text = written(name, [("add_up", SHORT)]).lstrip()
    for start in (begun, several):
        assert text.startswith(start)
        assert read(form, list(text[len(start) :]), start) == ("", [("add_up", SHORT)])
    assert read(form, [" no"], begun) == (f"{begun} no", [])


def test_a_forced_call_with_an_id():
    form = form_of("identified")
    begun, schema = form.forced([ADD])
    assert schema == ADD["function"]["parameters"]
    assert read(form, ['{"a": 1}', "<|close|>"], begun) == ("", [("add_up", {"a": 1})])


def test_values_are_what_the_schema_or_the_marks_say():
    for name, a, other in (("keys", 7, 7), ("typed", 7, "7")):
        form = form_of(name)
        text = written(name, [("add_up", {"a": 7, "note": "7", "other": "7", "z": [None]})])
        wanted = {"a": a, "note": "7", "other": other, "z": [None]}
        assert read(form, [text]) == ("", [("add_up", wanted)])
    # Several templates write Python.
    text = written("keys", [("add_up", {"a": 7, "list": 8, "other": 9})])
    for python, value in (("True", True), ("{'x': [None]}", {"x": [None]}), ("x), g(a=1", None)):
        given_ = text.replace("7", python).replace("8", python).replace("9", python)
        wanted = {"a": python if value is None else value, "list": python, "other": python}
        assert read(form_of("keys"), [given_]) == ("", [("add_up", wanted)])
    # Gemma's template writes null as Python does.
    text = '<|tool_call>call:add_up{<|"|>a<|"|>: None, note:<|"|>None, x:1<|"|>,z:[ True,null]}'
    assert read(form_of("gemma"), [text]) == (
        "", [("add_up", {"a": None, "note": "None, x:1", "z": [True, None]})]
    )  # fmt: skip


def test_marks_behind_a_name():
    """GPT-OSS writes one that its template does not; ids are left out."""
    source = (
        CALLS + "to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
        "{{ f.arguments | tojson }}<|call|>{% endfor %}"
    )
    form = format_of(ChatTemplate(HEAD + source + TAIL).render)
    assert form is not None and form.kind == "named"
    for marks in ("<|channel|>commentary json", " <|constrain|>json", "", "\n<|x|> "):
        text = f'to=functions.add_up{marks}<|message|>{{"a": 1}}<|call|>'
        assert read(form, list(text)) == ("", [("add_up", {"a": 1})])
    for marks in (" and <|message|>", "<|constrain|>", "_2<|message|>"):
        text = f'to=functions.add_up{marks}{{"a": 1}}<|call|>'
        assert read(form, list(text)) == (text, [])


def test_python_calls_as_a_whole_answer():
    source = (
        IN_ONE + "[" + CALLS + "{{ f.name }}(" + ARGS + "{{ k }}={{ python(v) }}"
        "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
        "{% endif %}"
    )  # fmt: skip
    form = format_of(ChatTemplate(HEAD + source + TAIL).render)
    assert form is not None and (form.kind, form.start, form.end) == ("python", "", "")
    for pieces in cut("\n[add_up(a=1, note='x'), now()] "):
        assert read(form, pieces) == ("", [("add_up", {"a": 1, "note": "x"}), ("now", {})])
    for text in (" [1, 2] are ", "{}", "so: [now()]", "[unknown()]", "[now()", " \n"):
        for pieces in cut(text):
            assert read(form, pieces) == (text, [])


def test_text_in_cdata():
    source = TEMPLATES["one tag"].replace(
        "{{ value(v) }}", "{{ '<![CDATA[' + v + ']]>' if v is string and '<' in v else value(v) }}"
    )
    form = format_of(ChatTemplate(HEAD + source + TAIL).render)
    assert form is not None and form.tags is not None and form.tags.cdata
    assert not form_of("one tag").tags.cdata  # type: ignore[union-attr]
    for note in ("<", "</param></param>", "</param>]]", "]]<", "<![CDATA[", "1<2", "x"):
        value = f"<![CDATA[{note}]]>" if "<" in note else note
        text = f'<function name="add_up"><param name="note">{value}</param></function>'
        assert read(form, list(text)) == ("", [("add_up", {"note": note})])
        assert read(form_of("one tag"), [text])[1] != [("add_up", {"note": note})] or value == note


def test_calls_that_a_template_does_not_write():
    source = HEAD + TAIL
    calls = [
        {"id": "1", "function": {"name": "add_up", "arguments": '{"a": "it\'s", "b": [1, null]}'}},
        {"id": "2", "function": {"name": "now", "arguments": "{}"}},
    ]
    message = {"role": "assistant", "content": "So:", "tool_calls": calls}
    for told, wanted in (
        ("List of tools: [", None),
        ("<|tool_list_start|>[",
         '<|tool_call_start|>[add_up(a="it\'s", b=[1, null]), now()]<|tool_call_end|>'),
        ("respond only with <|tool_call|> followed by a JSON list of tools used",
         '<|tool_call|>[{"name": "add_up", "arguments": {"a": "it\'s", "b": [1, null]}}, '
         '{"name": "now", "arguments": {}}]'),
    ):  # fmt: skip
        template = ChatTemplate(source.replace("{{ told }}", told))
        form = format_of(template.render)
        assert form is not None and not form.written
        (made,) = for_template([message], form)
        assert made.keys() == {"role", "content"}
        assert wanted is None or made["content"] == "So:" + wanted
        called = [("add_up", {"a": "it's", "b": [1, None]}), ("now", {})]
        assert read(form, [made["content"]]) == ("So:", called)
    assert format_of(ChatTemplate(source).render) is None
    assert for_template([message], form_of("keys")) == for_template([message])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(value=JSON, more=JSON)
def test_python_literals(value: Any, more: Any):
    wanted = [
        {"name": "f.g", "arguments": {"a": value, "b_2": more}},
        {"name": "h", "arguments": {}},
    ]
    assert from_python(f"[f.g(a={value!r}, b_2 = {more!r},), h( )]") == wanted
    assert from_python(as_python([{"function": w} for w in wanted])) == wanted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"'a\'b\"\x41\u00e9\101\0\q\\'", "a'b\"Aé" + "A\0\\q\\"),
        ("'two\nlines\\\n'", "two\nlines"),
        ("-.5e1", -5.0),
        ("1_000", 1000),
        ("+7", 7),
        ("[true, False, null,]", [True, False, None]),
    ],
)
def test_python_as_models_write_it(text: str, value: Any):
    assert from_python(f"[f(a={text})]") == [{"name": "f", "arguments": {"a": value}}]


@pytest.mark.parametrize(
    "text",
    ["f('x')", "f(a=g())", "f(a=b)", "f(a=1 2)", "f(a=(1, 2))", "f(a=1e999)", "f(a=f'x')",
     "f(a=1)(b=2)", "f(a=__import__('os'))", "f(a='x' 'y')", "f(*a)", "f(a=[1)]", "f(a={1: 2})"],
)  # fmt: skip
def test_other_python_is_no_call(text: str):
    with pytest.raises(ValueError):
        from_python(f"[{text}]")


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{gemma(k)}:{gemma(v)}" for k, v in value.items()) + "}"
    return f"[{','.join(map(gemma, value))}]" if isinstance(value, list) else repr(value)


@given(value=JSON)
def test_gemmas_notation(value: Any):
    assert from_gemma(f"{{key: {gemma(value)},k-2:{gemma(value)}}}") == {"key": value, "k-2": value}


@pytest.mark.parametrize("name", TEMPLATES)
def test_nesting_without_end(name: str):
    """What is nested too deeply is text."""
    form = form_of(name)
    deep = "[" * 100_000 + "]" * 100_000
    if form.kind == "tags":  # JSON that is none is text for any parameter
        text = written(name, [("add_up", {"note": "", "a": 31415})]).replace("31415", deep)
        assert read(form, [text]) == ("", [("add_up", {"note": "", "a": deep})])
    else:
        text = written(name, [("add_up", {"a": 31415})]).replace("31415", deep)
        assert read(form, [text]) == (text, [])


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the characters that parsers are sent."""
    sent = [0]
    parse = CallParser.parse

    def counted(self: CallParser, *, again: bool) -> Steps[Parsed]:
        inner = parse(self, again=again)
        next(inner)
        while True:
            try:
                sign = yield
            except BaseException as e:
                try:
                    inner.throw(e)
                except StopIteration as done:
                    return done.value  # type: ignore[no-any-return]
                raise AssertionError("a parser goes on after the end of the text") from e
            sent[0] += 1
            try:
                inner.send(sign)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]

    monkeypatch.setattr(CallParser, "parse", counted)
    return sent


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_character_is_looked_at_too_often(
    name: str, work: list[int], monkeypatch: pytest.MonkeyPatch
):
    form = form_of(name)
    call = written(name, [("add_up", {"note": "word"})])
    begun = call[: call.rindex("word")]
    # One call that never ends, in pieces.
    text = begun + "word, " * 5_000
    assert read(form, [text[i : i + 6] for i in range(0, len(text), 6)]) == (text, [])
    assert work[0] <= len(text)
    # Nothing but beginnings: a bound on what is looked at in vain.
    monkeypatch.setattr(tools_module, "_MOST_IN_VAIN", 20_000)
    for text in (begun * 2_000, form.start * 2_000):
        work[0] = 0
        assert read(form, [text]) == (text, [])
        assert work[0] <= len(text) + 20_000


class Vocabulary:
    """A model whose tokens are characters and some marks, which its text does not show."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks

    def tokenize(self, text: str) -> list[int]:
        return [i for i, mark in enumerate(self._marks) if mark in text] + [99]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"x" if token == 99 else self._marks[token].encode() if special else b""

    def is_end(self, token: int) -> bool:
        return token < 99 and self._marks[token] == "<|tool_response>"


@pytest.mark.parametrize(
    ("name", "mark", "special"),
    [
        ("gemma", '<|"|>', True),
        ("gemma", "<tool_call|>", True),
        ("gemma", "<|tool_response>", False),
        ("keys", "<value>", True),
        ("sections", "</call:x>", True),
        ("python", '<|"|>', False),
    ],
)
def test_marks_that_text_does_not_show(name: str, mark: str, special: bool):
    model: Any = Vocabulary(mark)
    assert CallReader(form_of(name), TOOLS).marked_by(model) == special
