"""Chat templates: limits on time, size and recursion, and otherwise the same text as transformers."""

import json
import threading
import time

import pytest
from support.data.family_templates import FAMILIES
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from ligertune.data.templates import template_limits
from ligertune.data.templates.bounded_jinja import TemplateRefusalError, render_chat_template
from ligertune.errors import UserError

TURNS = [
    {"role": "user", "content": "How much?"},
    {"role": "assistant", "content": "Two.", "reasoning_content": "One and one."},
    {"role": "user", "content": "Two?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"é": [1, 2]}}}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}BODY{% endfor %}{% endfor %}"
GROW = "{% set ns = namespace(x=FIRST) %}{% for i in range(64) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"


def grow(first: str, following: str) -> str:
    return GROW.replace("FIRST", first).replace("NEXT", following)


TOO_SLOW, TOO_LONG, TOO_MANY = ("runs for more than 0.1 s", "makes a text of more than 33,554,432", "makes a ")
TOO_DEEP, TOO_LARGE = "calls itself too often", "computes too large a number"
OF_LITTLE = "characters of text from 159 of messages and tools"
HOSTILE = {
    LOOPS.replace("BODY", "x"): OF_LITTLE,
    LOOPS.replace("BODY", "{{ 'x' * 300 }}"): OF_LITTLE,
    "{% for i in range(99999) %}{{ 10**10**10 }}{% endfor %}": OF_LITTLE,
    LOOPS.replace("%}BODY", "if false %}"): TOO_SLOW,
    "{% for i in range(10**9) %}x{% endfor %}": TOO_LARGE,
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": TOO_DEEP,
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}": TOO_SLOW,
    "{% for i in messages recursive %}{{ loop(messages) }}{% endfor %}": TOO_DEEP,
    "{{ 10.0 ** 1000 }}": TOO_LARGE,
    "{{ 10 ** (10 ** 10) }}": "makes a number of more than 100,000 bits",
    "{{ " + "(" * 5000 + " }}": "is nested too deeply",
    "{% if messages %}" * 50 + "{% for i in messages %}" * 30 + "{% endfor %}" * 30 + "{% endif %}" * 50: "compiled",
    "x" * 200_000: "has 200,000 characters",
    "{{ 'x' * 10**9 }}": TOO_LONG,
    grow("'ab'", "ns.x ~ ns.x"): TOO_LONG,
    grow("'ab'", "ns.x + ns.x"): TOO_LONG,
    grow("'ab'", "'%s%s' % (ns.x, ns.x)"): TOO_MANY,
    grow("'ab'", "[ns.x, ns.x] | join"): TOO_MANY,
    grow("['a' * 99]", "[ns.x, ns.x]"): TOO_MANY,
    grow("['a' * 99]", "ns.x + ns.x"): TOO_MANY,
    grow("['a' * 99]", "{'a': ns.x, 'b': ns.x}"): TOO_MANY,
    grow("'a' * 99", "namespace(a=ns.x, b=ns.x)"): TOO_MANY,
    "{{ 'x' | center(10**9) }}": TOO_LONG,
    "{{ 'x'.center(1000000000) }}": TOO_LONG,
    "{{ '%1000000000d' % 1 }}": TOO_LONG,
    "{{ '%*d' % (1000000000, 1) }}": TOO_LONG,
    "{{ '{:1000000000}'.format(1) }}": TOO_LONG,
    "{{ '{:{n}}'.format(1, n=1000000000) }}": TOO_LONG,
    "{{ ('a' * 999999).replace('', 'b' * 999999) }}": TOO_LONG,
    "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}": TOO_LONG,
    "{{ ('b' * 999999).join(range(99999) | map('string')) }}": TOO_LONG,
    "{{ messages | tojson(indent=1000000000) }}": TOO_LONG,
    "{{ ('\\n' * 999999) | indent(99999) }}": TOO_LONG,
    "{% set x %}{% for i in range(99999) %}{{ messages[0].content * 99 }}{% endfor %}{% endset %}": TOO_LONG,
}


@pytest.mark.parametrize("template", HOSTILE, ids=lambda template: template[:60])
def test_a_template_without_bounds_is_refused_in_one_sentence(template, monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1 if HOSTILE[template] == TOO_SLOW else 5)
    monkeypatch.setattr(template_limits, "_MAX_ITEMS", 10**5)
    began = time.process_time()  # other tests may hold the cores
    with pytest.raises(UserError) as error:
        render_chat_template(template, TURNS, name="folder/t.jinja")
    assert time.process_time() - began < 3
    assert str(error.value).startswith("folder/t.jinja: the chat template ") and HOSTILE[template] in str(error.value)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


def test_a_text_may_have_many_times_the_length_of_long_messages():
    turns = [{"role": "user", "content": "é" * 100_000}]
    template = "{% for i in range(9) %}{{ messages[0].content }}{% endfor %}"
    text, _ = render_chat_template(template, turns, name="t.jinja")
    assert text == "é" * 900_000


def test_limits_hold_in_other_threads(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    found = []

    def render() -> None:
        try:
            render_chat_template(LOOPS.replace("%}BODY", "if false %}"), TURNS, name="t.jinja")
        except UserError as error:
            found.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    thread.join(timeout=10)
    assert len(found) == 1 and TOO_SLOW in found[0]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "t.jinja: division by zero"),
        ("{{ messages[0].content + 1 }}", "t.jinja: can only concatenate str"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader for this environment"),
        ("{{ open('/etc/passwd') }}", "'open' is undefined"),
    ],
)
def test_a_template_that_raises_an_error_refuses_the_messages(template, says):
    with pytest.raises(TemplateRefusalError, match=says):
        render_chat_template(template, TURNS, name="t.jinja")


FEATURES = """
{%- macro show(value, level=0) %}{{ ' ' * level }}{% if value is mapping %}{% for k, v in value|dictsort %}{{ k }}:
{{- show(v, level + 1) }}{% endfor %}{% else %}{{ value }}{% endif %}{% endmacro %}
{%- set ns = namespace(n=0, names=[]) %}{% for m in messages if m.role != 'none' %}
{%- if loop.index > 5 %}{% break %}{% endif %}{% set ns.n = ns.n + m.content|length %}
{%- set ns.names = ns.names + [m.role] %}
{{- loop.index0 }}/{{ loop.length }}{{ loop.previtem.role if not loop.first }} {{ m.role.upper().center(12) }}
{{- m.thinking or m.reasoning_content or '' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}
{{- eos_token }}{%- endgeneration %}{% else %}{{ m.content|trim ~ '!' ~ 3 }}{% endif %}{% endfor %}
{{ ns.n }} {{ ns.names }} {{ ns.names|join(', ') }} {{ '%5.1f|%s' % (2.5, 'x') }} {{ '{:>8}|{}'.format('é', 10**12) }}
{% for tool in tools or [] %}{{ tool|tojson(indent=2) }}{{ show(tool) }}{% endfor %}{{ strftime_now('%Y') }}
{{ messages|map(attribute='role')|unique|list }} {{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{{ (1, 'a', {'b': [2, none]}) }} {{ 'a' * 3 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ [1, 2] + [3] }} {{ range(3)|sum }}
{{ dict(a=1) }}
{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}{{ messages[-1:]|tojson }}{{ bos_token|default('none') }}
"""


@pytest.fixture(scope="module")
def tokenizer(quickstart):
    return AutoTokenizer.from_pretrained(quickstart / "stories260K")


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["", "tools"])
@pytest.mark.parametrize("name", [*FAMILIES, "features"])
def test_the_text_is_that_of_transformers(name, tools, tokenizer):
    template = FEATURES if name == "features" else FAMILIES[name].template
    written = TURNS
    if name == "features" and not hasattr(chat_template_utils, "_REASONING_FIELDS"):
        # this template shows all fields, and transformers 5.17 does not pass the reasoning as `thinking` yet
        written = [{key: turn[key] for key in ("role", "content")} for turn in TURNS]
    for turns in (written, written[:2], written[:1]):
        for prompt in (True, False):
            options = {"tools": tools, "add_generation_prompt": prompt}
            theirs = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, **options)
            ours, _ = render_chat_template(template, turns, name="t", **options, **tokenizer.special_tokens_map)
            assert ours == theirs


def test_generation_blocks_have_the_spans_that_transformers_finds(tokenizer):
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %} {% endfor %}"
    text, spans = render_chat_template(template, TURNS, name="t", spans=True)
    assert [text[start:end] for start, end in spans] == ["How much?", "Two.", "Two?"]


def test_a_long_conversation_is_rendered():
    turns = [{"role": "user", "content": json.dumps(list(range(3000)))}] * 1000  # 17 million characters
    text, _ = render_chat_template(FAMILIES["Llama-3"].template, turns, name="t", bos_token="<s>")
    assert len(text) > 1000 * len(turns[0]["content"])
