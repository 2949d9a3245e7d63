"""Chat templates nobody has vetted: what real ones need works, what harms is stopped."""

# Templates are easier to read whole.
# ruff: noqa: E501

from __future__ import annotations

import threading

import pytest

from localspec import sandbox
from localspec.errors import LocalspecError
from localspec.template import ChatTemplate

USER = [{"role": "user", "content": "hi"}]
DOUBLING = (
    "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}"
)


def doubling(start: str, step: str) -> str:
    return DOUBLING.replace("START", start).replace("STEP", step)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for a in range(9) recursive %}{{ loop(range(9)) if loop.depth < 90 }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% set x = range(99999)|map('string')|list %}{% for a in x %}{{ x|sort|length }}{% endfor %}",
    ],
)
def test_a_template_without_end_is_stopped(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_STEPS", 50_000)
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 2.0)
    with pytest.raises(LocalspecError, match=r"was stopped: it runs for too long"):
        ChatTemplate(source).render(USER)


def test_time_is_bounded_too_and_in_any_thread(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(sandbox, "MAX_STEPS", 10**12)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    said: list[str] = []

    def render() -> None:
        try:
            ChatTemplate(loops).render(USER)
        except LocalspecError as e:
            said.append(str(e))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(60)
    assert said and "runs for too long" in said[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ ([0] * 10**9)|length }}",
        doubling("'ab'", "ns.x + ns.x"),
        doubling("'ab'", "ns.x ~ ns.x"),
        doubling("[1]", "ns.x + ns.x"),
        doubling("[1]", "[ns.x, ns.x]") + "{{ ns.x }}",
        doubling("(1,)", "(ns.x, ns.x)") + "{{ ns.x == 1 }}",
        doubling("1", "{'a': ns.x, 'b': ns.x}") + "{{ ns.x|tojson }}",
        doubling("1", "dict(a=ns.x, b=ns.x)") + "{{ ns.x|string }}",
        doubling("'a'", "ns.x|replace('a', 'aa')"),
        doubling("'a'", "ns.x.replace('a', 'aa')"),
        doubling("'a'", "'%s%s' % (ns.x, ns.x)"),
        doubling("'a'", "'{0}{0}'.format(ns.x)"),
        doubling("'a'", "[ns.x, ns.x]|join"),
        doubling("'a'", "ns.x.join([ns.x, ns.x, ns.x])"),
        "{% set ns = namespace(x='ab') %}{% for i in range(60) %}"
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
        "{{ 'a'|center(10**9) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ ('a\n' * 1000)|indent(10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (10**9, 1) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '{:>1000000000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 10**9) }}",
        "{{ range(99999)|map('center', 99999)|join }}",
        "{{ 9**(9**9) }}",
        "{{ 1|round(-10**9) }}",
        "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
        "{% set y %}{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endset %}{{ y }}",
    ],
)
def test_a_template_that_fills_the_memory_is_stopped(source, monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SIZE", 1_000_000)
    monkeypatch.setattr(sandbox, "MAX_TOTAL", 20_000_000)
    with pytest.raises(LocalspecError, match=r"was stopped: it (makes too|adds|runs)"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__class__.__base__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['x'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ range(10**8) }}",
    ],
)
def test_reaching_out_is_stopped(source):
    with pytest.raises(LocalspecError, match=r"chat template (was stopped|failed): "):
        ChatTemplate(source).render(USER)


def test_unsafe_attributes_are_named():
    with pytest.raises(LocalspecError, match=r"was stopped: .*__class__.* unsafe.* you trust"):
        ChatTemplate("{{ ''.__class__.__mro__[1] }}").render(USER)


@pytest.mark.parametrize("source", ["{% for %}", "{{ " + "(" * 400 + "1" + ")" * 400 + " }}",
                                    "{% for a in b %}" * 30 + "{% endfor %}" * 30])  # fmt: skip
def test_what_cannot_be_compiled_is_no_valid_template(source):
    with pytest.raises(LocalspecError, match=r"chat template (is not valid|failed|was stopped)"):
        print(ChatTemplate(source).render(USER))


def test_a_refusal_is_reported_as_that():
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
    )
    ChatTemplate(source).render(USER)
    with pytest.raises(LocalspecError, match=r"refuses these messages: roles must alternate"):
        ChatTemplate(source).render(USER + USER)


def test_what_real_templates_do_gives_the_same_text_as_plain_jinja():
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = """
    {%- set ns = namespace(found=false, text='') -%}
    {%- macro show(m, open='<') -%}{{ open ~ m['role'] + '>' }}{{ m.content | trim }}{%- endmacro -%}
    {% for m in messages -%}
    {%- set ns.text = ns.text + m.content[:2] -%}
    {%- if loop.first and m.role == 'system' %}S{% elif not ns.found %}{% set ns.found = true %}F{% endif -%}
    {{ show(m) }}{{ show(m, open='[') }}
    {%- for word in m.content.split(' ') if word %} {{ loop.index }}/{{ loop.length }}:{{ word|upper }}
    {%- else %}none{% endfor %}
    {%- if not loop.last %}, {% endif %}{{ loop.previtem is defined }}{% if loop.index > 3 %}{% break %}{% endif %}
    {% endfor -%}
    {{ messages | map(attribute='role') | unique | join('|') }} {{ ns.text }} {{ [1, 2] + [3] }}
    {{ {'a': (1, 'é'), 'b': none} }} {{ messages[::-1][0].content }} {{ 7 // 2 * 3 % 4 ** 2 }}
    {{ '%s-%05.1f' % ('x', 2.5) }} {{ '%s' % 'y' }} {{ "{}:{:>4}".format('z', 5) }} {{ undefined_thing }}
    {%- for key, value in {'k': 1, 'l': [2]}.items() %}{{ key }}={{ value }};{% endfor %}
    {{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ 'a' in ['a', 'b'] }}
    {%- set block %}  kept {{ 1 + 1 }}{% endset %}{{ block }} {{ true and not false }} {{ 3 is odd }}
    {%- filter upper %}shout{% endfilter %}{{ 'abc' is string }}{{ 1700000000 | string }} {{ 'x' * 3 }}
    """
    messages = [
        {"role": role, "content": text}
        for role, text in (("system", " be brief "), ("user", "what is it"), ("assistant", ""),
                           ("user", "one <two> & three"), ("user", "unreached"))
    ]  # fmt: skip
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    expected = plain.from_string(source).render(messages=messages, add_generation_prompt=True)
    assert ChatTemplate(source).render(messages) == expected


def test_the_tag_around_answers_changes_nothing():
    """As LFM2.5 and others have it; transformers' extension for it renders as if it was not there."""
    marked = (
        "{% for m in messages %}\n"
        "{{ '<' + m.role + '>' }}\n"
        "{% if m.role == 'assistant' %}\n"
        "  {%- generation -%}\n"
        "  {{ m.content + '<end>' }}{% set inside = 'kept' %}{{ loop.index }}\n"
        "  {% endgeneration %}\n"
        "{% else %}{{ m.content }}\n{% endif %}\n"
        "{% endfor %}[{{ inside }}]"
    )
    messages = [*USER, {"role": "assistant", "content": "hello"}, *USER]
    bare = marked.replace("{%- generation -%}", "{#- -#}").replace("{% endgeneration %}", "{# #}")
    text = ChatTemplate(marked).render(messages)
    assert "hello<end>2" in text
    assert text == ChatTemplate(bare).render(messages)
    with pytest.raises(LocalspecError, match="is not valid"):
        ChatTemplate("{% generation %}no end")
    with pytest.raises(LocalspecError, match="was stopped"):
        ChatTemplate(
            "{% generation %}"
            + DOUBLING.replace("START", "'xx'").replace("STEP", "ns.x ~ ns.x")
            + "{% endgeneration %}"
        ).render(USER)


def test_long_conversations_stay_within_the_bounds():
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'"
        " }}{% for c in m.tool_calls|default([]) %}{{ c|tojson }}{% endfor %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 400}] * 5000
    assert len(ChatTemplate(source).render(messages)) > 10_000_000
