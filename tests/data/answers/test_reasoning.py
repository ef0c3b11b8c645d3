"""Reasoning: masked in what is trained, removed from earlier turns; and variables of the chat template."""

import json

import pytest
from support.data.published_templates import add_special_tokens, published
from transformers import AutoTokenizer

from ligertune.data.bad_rows import BadRow
from ligertune.data.cache import data_key
from ligertune.data.examples import Preparation
from ligertune.data.rows.formats import recognise_format
from ligertune.data.rows.sources import Record
from ligertune.data.rows.turns import RESERVED_VARIABLES
from ligertune.data.stream import ExampleStream
from ligertune.data.templates.prompt_templates import ChatTemplate
from ligertune.errors import UserError
from ligertune.planning.options import DataOptions, DatasetOptions
from ligertune.recipe import section

MESSAGES = recognise_format("auto", ["messages"], "")
CHATML = (
    "{% for m in messages %}{{ m.role }}> "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}assistant> {% endif %}"
)
PLAIN = CHATML.replace("{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}", "")
MARKED = (
    "{% for m in messages %}{{ m.role }}> {% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}"
    "<think>{{ m.reasoning_content }}</think>{{ m.content }}</s>{% endgeneration %}{% endif %}{% endfor %}"
)


def turns(*answers: str | dict) -> list[dict]:
    """Return a conversation of these answers to "q"."""
    dicts = (answer if isinstance(answer, dict) else {"content": answer} for answer in answers)
    return [turn for answer in dicts for turn in ({"role": "user", "content": "q"}, {"role": "assistant", **answer})]


def rendered(tokenizer, messages, source=CHATML, row=(), **options):
    template = ChatTemplate(tokenizer, source, "test", None, options.pop("train_on", "assistant"), **options)
    return template.render(MESSAGES.convert(Record({"messages": messages, **dict(row)}, "d:1")))


def trained(tokenizer, *given, **options) -> list[str]:
    found = rendered(tokenizer, *given, **options)
    return [found.text[start:end] for start, end in found.trained]


THOUGHT = {"content": "Two.", "reasoning_content": "1, 2"}
MASKED = {
    "a field": (turns(THOUGHT, "No."), CHATML, ["Two.</s>", "No.</s>"]),
    "a field that the template does not read": (turns(THOUGHT, "No."), PLAIN, ["Two.</s>", "No.</s>"]),
    "a block in the content": (turns("<think>\n1, 2\n</think>\n\nTwo."), PLAIN, ["Two.</s>"]),
    "a block under a template that writes blocks": (turns("<think>1</think> Two."), CHATML, [" Two.</s>"]),
    "an empty block": (turns("<think>\n\n</think>\n\nTwo."), PLAIN, ["Two.</s>"]),
    "a block later in the content is text": (turns("Use <think>x</think>."), PLAIN, ["Use <think>x</think>.</s>"]),
    "a block that is not closed is text": (turns("<think>Two."), PLAIN, ["<think>Two.</s>"]),
    "reasoning that repeats the answer": (turns({"content": "a", "reasoning": "a a"}), CHATML, ["a</s>"]),
    "only reasoning": (turns("No.", {"content": "", "thinking": "hm"}), CHATML, ["No.</s>", "</s>"]),
    "generation blocks": (turns(THOUGHT), MARKED, ["Two.</s>"]),
}


@pytest.mark.parametrize("case", MASKED)
def test_masked_reasoning_has_no_labels(stories, case):
    messages, source, expected = MASKED[case]
    plain, masked = (rendered(stories, messages, source, mask_reasoning=mask) for mask in (False, True))
    assert masked.text == plain.text
    assert [masked.text[start:end] for start, end in masked.trained] == expected
    shown = [plain.text[start:end] for start, end in plain.trained]
    assert all(text.endswith(part) for text, part in zip(shown, expected, strict=True))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["m.reasoning_content", "m['thinking']", "m.get('reasoning')"])
def test_each_name_of_the_field_reaches_each_template(stories, field, read):
    source = CHATML.replace("m.reasoning_content", read)
    assert trained(stories, turns({"content": "Two.", field: "1, 2"}), source) == ["<think>1, 2</think>Two.</s>"]


def test_reasoning_before_the_last_question_is_removed(stories):
    messages = turns(THOUGHT, "<think>hm</think>No.", THOUGHT)
    expected = ["Two.</s>", "No.</s>", "<think>1, 2</think>Two.</s>"]
    assert trained(stories, messages, drop_history_reasoning=True) == expected
    # the steps after the last question keep theirs
    call = {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}], "reasoning": "now"}
    steps = [*turns(THOUGHT, call), {"role": "tool", "content": "7"}, {"role": "assistant", **THOUGHT}]
    text = rendered(stories, steps, drop_history_reasoning=True).text
    assert text.count("1, 2") == text.count("now") == 1
    with pytest.raises(BadRow, match=r"empty answer: turn 2 is only reasoning.*drop_history_reasoning"):
        rendered(stories, turns({"content": "", "reasoning": "hm"}, "No."), drop_history_reasoning=True)


def test_turns_with_weight_zero_and_train_on_last_mask_whole_answers(stories):
    messages = turns({"content": "a", "weight": 0}, "b", {"content": "c", "weight": 1})
    assert trained(stories, messages) == ["b</s>", "c</s>"]
    assert trained(stories, messages, train_on="last") == ["c</s>"]
    assert trained(stories, [*messages[:-1], {**messages[-1], "weight": 0}], train_on="last") == []


def test_a_completion_without_a_template_is_masked_too(prepared, stories):
    rows = [{"prompt": "q:", "completion": "<think>1, 2</think> Two."}]
    for template in ("auto", "alpaca"):
        (example,) = prepared(rows, prompt_template=template, mask_reasoning=True).train
        assert stories.decode(example.labels[example.labels != -100]) == "Two.</s>"
        assert "1, 2" in stories.decode(example.input_ids)


# ---- variables


def test_variables_of_the_recipe_and_of_the_row_reach_the_template_and_the_row_wins(stories):
    source = "{{ 'deep ' if think else '' }}{{ style }}" + CHATML
    row = {"chat_template_kwargs": {"think": False, "style": None}}
    assert rendered(stories, turns("a"), source).text.startswith("user> ")
    options = {"chat_template_kwargs": {"think": True, "style": "calm "}}
    assert rendered(stories, turns("a"), source, **options).text.startswith("deep calm user> ")
    assert rendered(stories, turns("a"), source, row, **options).text.startswith("calm user> ")
    text = {"chat_template_kwargs": json.dumps({"think": True})}
    assert rendered(stories, turns("a"), source, text).text.startswith("deep user> ")


def test_a_published_switch_changes_the_prompt_and_what_is_trained(quickstart):
    """With enable_thinking: false the prompt of Qwen3 contains the empty block; else the model has to write it."""
    tokenizer = add_special_tokens(AutoTokenizer.from_pretrained(quickstart / "stories260K"), "qwen3")
    source, block = published("qwen3"), "<think>\n\n</think>\n\n"
    assert trained(tokenizer, turns("a"), source) == [f"{block}a<|im_end|>"]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert trained(tokenizer, turns("a"), source, **off) == ["a<|im_end|>"]
    assert rendered(tokenizer, turns("a"), source, **off).text == rendered(tokenizer, turns("a"), source).text
    assert trained(tokenizer, turns("a"), source, mask_reasoning=True) == ["a<|im_end|>"]


@pytest.mark.parametrize("given", [["a"], "text", "[1]", {"tools": []}, {"add_generation_prompt": True}])
def test_variables_that_cannot_be_used_drop_the_row(stories, given):
    with pytest.raises(BadRow, match="chat_template_kwargs are wrong"):
        rendered(stories, turns("a"), row={"chat_template_kwargs": given})
    assert RESERVED_VARIABLES == section.RESERVED_VARIABLES


def test_settings_without_an_effect_are_errors(prepared):
    for rows, options, says in (
        ([{"text": "a b"}], {"mask_reasoning": True}, r"data\.mask_reasoning has no effect on rows of format text"),
        ([{"text": "a b"}], {"chat_template_kwargs": {"a": 1}}, r"data\.chat_template_kwargs has no effect"),
        (
            [{"instruction": "q", "output": "a"}],
            {"chat_template_kwargs": {"a": 1}},
            r"no effect on rows of format alpaca",
        ),
    ):
        with pytest.raises(UserError, match=says):
            prepared(rows, **options)


def test_each_option_changes_the_cache_key_and_the_fingerprint_of_a_stream(tmp_path, stories):
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"messages": turns(THOUGHT)}) + "\n" for _ in range(3)))
    keys, prints = [], []
    changes = {"mask_reasoning": True}, {"drop_history_reasoning": True}, {"chat_template_kwargs": {"a": 1}}
    for change in ({}, *changes):
        data = DataOptions(datasets=[DatasetOptions(path=str(file))], **change)
        preparation = Preparation(data, stories)
        keys.append(data_key(data.datasets[0], preparation))
        prints.append(ExampleStream(preparation, seed=0).fingerprint)
    assert len(set(keys)) == len(set(prints)) == 4
