"""Tool calls under the templates that families publish: no turn is lost, and each trains what the model has to write.

The expected texts are literal: they are the formats of the families' documentation.
"""

import json
from functools import cache

import pytest
from support.data.published_templates import CALLING, PARALLEL, TOOLS, WITH_TOOLS, add_special_tokens, published
from transformers import AutoTokenizer

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.formats import recognise_format
from ligertune.data.rows.sources import Record
from ligertune.data.templates.prompt_templates import ChatTemplate

MESSAGES = recognise_format("auto", ["messages"], "")
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n</parameter>\n</function>\n"
    "</tool_call><|im_end|>"
)
DEEPSEEK = {
    name: f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"
    for name in (
        "tool calls begin",
        "tool call begin",
        "tool sep",
        "tool call end",
        "tool calls end",
        "end of sentence",
    )
}
DEEPSEEK_CALL = (
    DEEPSEEK["tool calls begin"] + DEEPSEEK["tool call begin"] + "function" + DEEPSEEK["tool sep"]
    + 'add\n```json\n{"a": 2, "b": 3}\n```' + DEEPSEEK["tool call end"] + DEEPSEEK["tool calls end"]
    + DEEPSEEK["end of sentence"]
)  # fmt: skip
GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n"
    "</tool_call><|observation|>"
)
HARMONY = "<|start|>assistant", "<|channel|>final<|message|>"
# template: the trained texts of CALLING, and those with data.mask_reasoning
TRAINED = {
    "qwen2_5": (
        ("Hello.<|im_end|>", "<think>\nI add.\n</think>\n\n\n" + QWEN_CALL, "Five.<|im_end|>",
         "<think>\nIt is.\n</think>\n\nYes.<|im_end|>"),
        ("Hello.<|im_end|>", QWEN_CALL, "Five.<|im_end|>", "Yes.<|im_end|>")),
    "qwen3": (  # the reasoning of earlier turns is dropped
        ("Hello.<|im_end|>", QWEN_CALL, "Five.<|im_end|>", "<think>\nIt is.\n</think>\n\nYes.<|im_end|>"),
        ("Hello.<|im_end|>", QWEN_CALL, "Five.<|im_end|>", "Yes.<|im_end|>")),
    "qwen3_5_think": (  # the prompt begins the reasoning
        ("Hello.<|im_end|>", XML_CALL, "Five.<|im_end|>", "It is.\n</think>\n\nYes.<|im_end|>"),
        ("Hello.<|im_end|>", XML_CALL, "Five.<|im_end|>", "Yes.<|im_end|>")),
    "deepseekv3": (  # arguments as JSON text
        ("Hello." + DEEPSEEK["end of sentence"], "<think>\nI add.\n</think>\n\n" + DEEPSEEK_CALL,
         "Five." + DEEPSEEK["end of sentence"], "\n\nYes." + DEEPSEEK["end of sentence"]),
        ("Hello." + DEEPSEEK["end of sentence"], DEEPSEEK_CALL, "Five." + DEEPSEEK["end of sentence"],
         "\n\nYes." + DEEPSEEK["end of sentence"])),
    "llama3_1": (
        ("Hello.<|eot_id|>", '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>', "Five.<|eot_id|>",
         "<think>\nIt is.\n</think>\n\nYes.<|eot_id|>"),
        ("Hello.<|eot_id|>", '{"name": "add", "parameters": {"a": 2, "b": 3}}<|eot_id|>', "Five.<|eot_id|>",
         "Yes.<|eot_id|>")),
    "glm4moe": (  # the next role ends an answer
        ("\n<think></think>\nHello.<|user|>", "\n<think></think>\n" + GLM_CALL, "\n<think></think>\nFive.<|user|>",
         "\n<think>It is.</think>\nYes."),
        ("Hello.<|user|>", GLM_CALL, "Five.<|user|>", "Yes.")),
    "gptoss": (  # an answer in the history ends with <|end|>, which is not what the model has to write: <|return|>
        (HARMONY[1] + "Hello.",
         ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>', HARMONY[1] + "Five.",
         "<|channel|>analysis<|message|>It is.<|end|>" + "".join(HARMONY) + "Yes.<|return|>"),
        (HARMONY[1] + "Hello.",
         ' to=functions.add<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>', HARMONY[1] + "Five.",
         "".join(HARMONY) + "Yes.<|return|>")),
    "lfm2_v2": (
        ("Hello.<|im_end|>",
         "<think>\nI add.\n</think>\n\n<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|><|im_end|>",
         "Five.<|im_end|>", "<think>\nIt is.\n</think>\n\nYes.<|im_end|>"),
        ("Hello.<|im_end|>", "<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|><|im_end|>", "Five.<|im_end|>",
         "Yes.<|im_end|>")),
}  # fmt: skip
TRAINED["qwen3_5_nothink"] = TRAINED["qwen3_5_think"]


@pytest.fixture(scope="session")
def calling_tokenizer(quickstart):
    return add_special_tokens(AutoTokenizer.from_pretrained(quickstart / "stories260K"), *WITH_TOOLS)


@pytest.fixture
def trained_texts(calling_tokenizer):
    """Call as trained_texts(turns, template or its name, **options of ChatTemplate): (trained texts, rendered)."""

    def of(turns, source, **options):
        options = {"train_on": "assistant", **options}
        template = ChatTemplate(calling_tokenizer, source, "test", None, **options)
        rendered = template.render(MESSAGES.convert(Record({"messages": turns, "tools": TOOLS}, "d:1")))
        return tuple(rendered.text[start:end] for start, end in rendered.trained), rendered

    return of


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_each_answer_and_call_trains_what_the_model_has_to_write(trained_texts, name):
    found, rendered = trained_texts(CALLING, published(name))
    assert found == TRAINED[name][0] and rendered.unplaced == ()
    assert trained_texts(CALLING, published(name), mask_reasoning=True)[0] == TRAINED[name][1]
    assert trained_texts(CALLING, published(name), train_on="last")[0] == TRAINED[name][0][-1:]


def test_the_role_of_the_next_turn_ends_the_last_answer_too(trained_texts, calling_tokenizer):
    """GLM writes no token at the end of a turn, and stops at the token of the next role."""
    ids = [trained_texts(turns, published("glm4moe"))[1].eos for turns in (CALLING, CALLING[:4])]
    assert calling_tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "<|observation|>"]
    assert trained_texts(CALLING, published("qwen3"))[1].eos is None


def test_parallel_calls_of_a_template_with_one_call_in_a_turn_come_one_after_the_other(trained_texts):
    found, rendered = trained_texts(PARALLEL, published("llama3_1"))
    calls = [
        f'{{"name": "add", "parameters": {numbers}}}<|eot_id|>' for numbers in ('{"a": 2, "b": 3}', '{"a": 4, "b": 5}')
    ]
    assert found == (*calls, "Five and nine.<|eot_id|>")
    places = [rendered.text.index(part) for part in (calls[0], '"5"', calls[1], '"9"')]
    assert places == sorted(places)
    for name in WITH_TOOLS:
        assert all(number in "".join(trained_texts(PARALLEL, published(name))[0]) for number in "2345")


CALL = "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ BODY }}{% endfor %}{% endif %}"
TURN = "{% for m in messages %}{{ m.role }}: {{ m.content if m.content is not none else '' }}CALL</s>{% endfor %}"


def template_with(body: str) -> str:
    return TURN.replace("CALL", CALL.replace("BODY", body))


IDS = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "oslo", "arguments": {}}},
        {"id": "c2", "type": "function", "function": {"name": "rome", "arguments": {}}},
    ]},
    {"role": "tool", "tool_call_id": "c2", "name": "rome", "content": "20C"},
    {"role": "tool", "tool_call_id": "c1", "name": "oslo", "content": "3C"},
    {"role": "assistant", "content": "Oslo 3C."},
]  # fmt: skip


def test_a_result_belongs_to_the_call_with_its_id(trained_texts):
    """A template gets the ids and names. If it has one call in a turn, the result with the same id follows the call."""
    matched = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} "
        "{{ c.id }} {% endfor %}{% if m.role == 'tool' %} of {{ m.tool_call_id }} {{ m.name }}{% endif %}</s>"
        "{% endfor %}"
    )
    found, rendered = trained_texts(IDS, matched)
    assert found == ("assistant: oslo c1 rome c2 </s>", "assistant: Oslo 3C.</s>")
    assert "tool: 20C of c2 rome</s>tool: 3C of c1 oslo</s>" in rendered.text
    text = trained_texts(IDS, published("llama3_1"))[1].text
    places = [text.index(part) for part in ('"oslo"', '"3C"', '"rome"', '"20C"')]
    assert places == sorted(places)


def test_a_result_within_an_answer_is_not_trained(trained_texts):
    """As Gemma 4: the text of a turn stands behind its calls and their results."""
    late = (
        "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{% for r in messages if r.role == 'tool' %}={{ r.content }}{% endfor %} {% endfor %}"
        "{{ m.content }}</s>{% endfor %}"
    )
    turns = [IDS[0], {**IDS[1], "content": "I look.", "tool_calls": IDS[1]["tool_calls"][:1]}, *IDS[3:]]
    found, rendered = trained_texts(turns, late)
    assert "oslo=3C I look.</s>" in rendered.text
    assert found == ("assistant: Oslo 3C.</s>",)
    assert rendered.unplaced == ("the template writes results of tools into 'I look.'",)


@pytest.mark.parametrize(
    "content, placed", [("<think>plan</think> Yes", True), ("Sure! <think>plan</think> Yes", False)]
)
def test_a_template_may_leave_out_reasoning_and_no_other_text(trained_texts, content, placed):
    turns = [IDS[0], {"role": "assistant", "content": content}, IDS[0], {"role": "assistant", "content": "No."}]
    found, rendered = trained_texts(turns, published("qwen3"))
    assert [text.strip() for text in found[:-1]] == (["Yes<|im_end|>"] if placed else [])
    assert rendered.unplaced == (() if placed else (f"the template rewrites {content[:40]!r}",))


FORMS = {
    "an object is written as Python writes it": ("c.function.name ~ c.function.arguments", 'add{"a": 2, "b": 3}'),
    "text is needed": ("'[' + c.function.arguments + ']' + c.function.name", '[{"a": 2, "b": 3}]add'),
    "only without content": (
        "c.function.name ~ c.function.arguments|tojson if m.content is none else ''", 'add{"a": 2, "b": 3}'),
    "calls are not written at all": ("''", '{"name": "add", "arguments": {"a": 2, "b": 3}}'),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_passed_in_the_form_that_the_template_writes(trained_texts, form):
    body, expected = FORMS[form]
    turns = [{name: turn[name] for name in turn if name != "reasoning_content"} for turn in CALLING[2:6]]
    assert trained_texts(turns, template_with(body))[0] == (f"assistant: {expected}</s>", "assistant: Five.</s>")


def test_arguments_in_a_text_are_not_those_of_the_call(trained_texts):
    """This row of the corpus quotes the call as Python writes it, in its reasoning."""
    turns = [{**turn, "content": turn["content"] + " {'a': 2, 'b': 3}"} for turn in CALLING[2:6]]
    found, _ = trained_texts(turns, published("glm4moe"))
    assert "<arg_value>3</arg_value>\n</tool_call><|observation|>" in found[0] and "{'a': 2, 'b': 3}" in found[0]


REWRITES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content | upper if m.role == 'assistant' and LOST else m.content }}</s>"
    "{% endfor %}"
)
PLAIN = [turn for turn in CALLING if turn["content"] in ("Hi", "Hello.", "2 + 3?", "Five.")]


def test_a_turn_that_the_template_rewrites_is_context_and_its_row_stays(trained_texts):
    found, rendered = trained_texts(PLAIN, REWRITES.replace("LOST", "not loop.last"))
    assert found == ("assistant: Five.</s>",) and "assistant: HELLO.</s>" in rendered.text
    assert rendered.unplaced == ("the template rewrites 'Hello.'",)
    with pytest.raises(BadRow, match=r"the answer cannot be placed: the template rewrites 'Hello\.'"):
        trained_texts(PLAIN, REWRITES.replace("LOST", "true"))
    with pytest.raises(BadRow, match="the answer cannot be placed"):
        trained_texts(PLAIN, REWRITES.replace("LOST", "loop.last"), train_on="last")


def test_the_report_counts_turns_that_are_not_trained(prepared, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(REWRITES.replace("LOST", "not loop.last"))
    for options in ({}, {"cache": False}):
        report = prepared([{"messages": PLAIN}] * 3, prompt_template=str(template), **options).report
        assert (report.rows_read, report.examples, report.dropped, report.unplaced) == (3, 3, {}, 3)
        (note,) = report.notes
        assert note.startswith("3 answers without labels: the text of the template does not hold the answer exactly")
        assert note.endswith("d.jsonl:1 (the template rewrites 'Hello.').")


ROWS = {"sharegpt/glaive_toolcall_en_demo.json": "conversations", "messages/reason_tool_use_demo_50.jsonl": "messages"}


@cache
def corpus_rows(path) -> list[dict]:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.split("\n") if line]


@pytest.mark.corpus
@pytest.mark.parametrize(
    "name", [*WITH_TOOLS, "deepseek_r1_distill", "qwen3_6", "qwen3_instruct_2507", "nemotron_3_nano"]
)
@pytest.mark.parametrize("every", [40, pytest.param(1, marks=pytest.mark.slow)])
def test_no_row_is_dropped_for_its_template(corpus, calling_tokenizer, name, every):
    """Nor a turn: each trained text has the content, or the name of a call, of its turn in the raw row."""
    tokenizer = add_special_tokens(calling_tokenizer, name)
    template = ChatTemplate(tokenizer, published(name), name, None, "assistant")
    for file, column in ROWS.items():
        format = recognise_format("auto", [column], "")
        for number, row in enumerate(corpus_rows(corpus / file)[::every]):
            conversation = format.convert(Record(row, f"{file}:{number}"))
            rendered = template.render(conversation)
            assert not rendered.unplaced
            trained = [rendered.text[start:end] for start, end in rendered.trained]
            answers = [turn for turn in conversation.messages if turn.role == "assistant"]
            assert len(trained) >= len(answers)  # parallel calls may be turns of their own
            written = "".join(trained)
            for turn in answers:
                names = [call.name for call in turn.calls]
                # DeepSeek's templates write what follows the last </think>, and one row has two of them
                content = turn.content.rpartition("</think>")[2].strip()
                assert all(name in written for name in names) and (names or content in written)
