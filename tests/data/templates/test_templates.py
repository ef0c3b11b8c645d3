"""What is trained is the answer and the token that ends it: for every template, tokenizer and awkward text."""

from __future__ import annotations

import numpy as np
import pytest

from ligertune.data.rows.conversation import BadRow, Conversation, Message
from ligertune.data.rows.formats import recognise_format
from ligertune.data.rows.sources import Record
from ligertune.data.templates.chat_template import ChatTemplate, choose_template
from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.label_masking import Encoder
from ligertune.data.templates.prompts import alpaca_prompt
from ligertune.errors import UserError
from ligertune.planning.options import DataOptions, DatasetOptions

EXCHANGE = Conversation((Message("user", "How much?"), Message("assistant", "Two.")))
LONGER = Conversation((*EXCHANGE.messages, Message("user", "Two?"), Message("assistant", "Two. ")))


def data_section(**given) -> DataOptions:
    return DataOptions(datasets=[DatasetOptions(path="unused")], **given)


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["qwen2.5", "mistral-7b-v0.1", "phi-3-mini", "gpt2", "stories260K"])
def test_alpaca_prompts_begin_as_the_tokenizer_begins(corpus, tokenizer_named, name):
    """BOS included where the tokenizer writes it."""
    tokenizer = tokenizer_named(name)
    template = choose_template(data_section(), recognise_format("alpaca", ["instruction", "output"], ""), tokenizer)
    rendered = template.render(EXCHANGE)
    (encoded,) = Encoder(tokenizer).encode([rendered])
    prompt = tokenizer(rendered.text[: rendered.trained[0][0]]).input_ids
    assert encoded.input_ids[: len(prompt)].tolist() == prompt


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "gpt2", "stories260K", "phi-3-mini"])
@pytest.mark.parametrize("prompts", ["chat", "alpaca"])
def test_there_is_never_a_second_bos(tokenizer_named, name, prompts):
    tokenizer = tokenizer_named(name)
    format = recognise_format("messages", ["messages"], "")
    rendered = choose_template(data_section(prompt_template=prompts), format, tokenizer).render(EXCHANGE)
    (encoded,) = Encoder(tokenizer).encode([rendered])
    # the chat template decides for itself; elsewhere the tokenizer's own habit does
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    expected = text.startswith(tokenizer.bos_token) if prompts == "chat" else tokenizer("a").input_ids[0] == 1
    assert int((encoded.input_ids[:3] == tokenizer.bos_token_id).sum()) == int(expected)


def test_alpaca_prompts_with_and_without_input_hold_braces_as_they_are():
    assert alpaca_prompt("{x} {input}") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{x} {input}\n\n### Response:\n"
    )
    assert alpaca_prompt("i", "{n}", "Be brief.") == (
        "Be brief.\n\nBelow is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request."
        "\n\n### Instruction:\ni\n\n### Input:\n{n}\n\n### Response:\n"
    )


def test_alpacas_input_stands_below_the_instruction_in_a_chat_template(stories):
    """Of three Stanford rows: with an input, and with one that is empty or white space."""
    template = chat_template(stories, each("{{ m.role }}> {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"))
    for given, shown in (("A text.", "Sum up.\n\nA text."), ("", "Sum up."), (" \n", "Sum up.")):
        rendered = template.render(
            Conversation((Message("user", "Sum up.", input=given), Message("assistant", "Two.")))
        )
        assert rendered.text == f"user> {shown}\nassistant> Two.</s>\n"
        assert [rendered.text[start:end] for start, end in rendered.trained] == ["assistant> Two.</s>"]


def each(turn: str) -> str:
    return "{% for m in messages %}" + turn + "{% endfor %}"


def chat_template(stories, source: str, **given) -> ChatTemplate:
    return ChatTemplate(stories, source, "test", given.get("system_prompt"), given.get("train_on", "assistant"))


def trained_by(stories, source: str, conversation: Conversation = LONGER, **given) -> list[str]:
    rendered = chat_template(stories, source, **given).render(conversation)
    return [rendered.text[start:end] for start, end in rendered.trained]


SHAPES = {
    "header written with the answer": (
        each("{{ m.role }}> {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"),
        ["assistant> Two.</s>", "assistant> Two. </s>"],
    ),
    "generation prompt, content trimmed": (
        each("[{{ m.role }}]{{ m.content | trim }}</s>\n") + "{% if add_generation_prompt %}[assistant]{% endif %}",
        ["Two.</s>", "Two.</s>"],
    ),
    "no special token at the end": (
        each("{{ m.role }}: {{ m.content }}\n") + "{% if add_generation_prompt %}assistant:{% endif %}",
        [" Two.", " Two. "],
    ),
    "a word for an end": (
        each("{{ m.role }}: {{ m.content }} END\n") + "{% if add_generation_prompt %}assistant: {% endif %}",
        ["Two. END", "Two.  END"],
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_templates_of_other_shapes(stories, shape):
    source, expected = SHAPES[shape]
    assert trained_by(stories, source) == expected


ONLY_ANSWERS_MARKED = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)


def test_a_template_that_marks_its_answers_is_taken_at_its_word(stories):
    assert trained_by(stories, ONLY_ANSWERS_MARKED) == ["Two.!", "Two. !"]


def test_marks_that_do_not_match_the_answers_are_refused(stories):
    with pytest.raises(BadRow, match="4 marked spans for 2 answers"):
        trained_by(stories, each("{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n"))


# as DeepSeek-R1's: the generation prompt opens a thought that a finished conversation does not show
THINKS_FIRST = (
    each("<{{ m.role }}> {{ m.content }}{{ eos_token if m.role == 'assistant' }}")
    + "{% if add_generation_prompt %}<assistant> <think>{% endif %}"
)


def test_an_answer_is_found_where_the_turns_before_it_are_no_prefix(stories):
    """Though the same words stand there twice."""
    assert trained_by(stories, THINKS_FIRST, LONGER) == [" Two.</s>", " Two. </s>"]


def test_a_template_that_rewrites_answers_is_refused_with_the_reason(stories):
    with pytest.raises(BadRow, match=r"the answer cannot be placed: the template rewrites 'Two\.'"):
        trained_by(stories, THINKS_FIRST.replace("m.content }}", "m.content | upper | reverse }}"), LONGER)


def test_a_special_token_inside_an_answer_does_not_end_it(stories):
    conversation = Conversation((Message("user", "q"), Message("assistant", "a </s> b")))
    source = each("{{ m.role }}: {{ m.content }}\n") + "{% if add_generation_prompt %}assistant: {% endif %}"
    assert trained_by(stories, source, conversation) == ["a </s> b"]


@pytest.mark.parametrize(
    ("train_on", "expected"), [("assistant", ["Two.</s>", "Two. </s>"]), ("last", ["Two. </s>"]), ("all", None)]
)
def test_train_on(stories, train_on, expected):
    rendered = chat_template(stories, stories.chat_template, train_on=train_on).render(LONGER)
    spans = [rendered.text[start:end] for start, end in rendered.trained]
    assert spans == (expected or [rendered.text])


def test_train_on_all_trains_every_token_but_the_first(stories):
    for template in ("chat", "alpaca"):
        section = data_section(prompt_template=template, train_on="all")
        rendered = choose_template(section, recognise_format("messages", ["messages"], ""), stories).render(EXCHANGE)
        (encoded,) = Encoder(stories).encode([rendered])
        assert encoded.labels[0] == -100
        assert np.array_equal(encoded.labels[1:], encoded.input_ids[1:])


def test_an_untrained_answer_is_context_only(stories):
    turns = (Message("user", "q"), Message("assistant", "a", trained=False), *EXCHANGE.messages)
    assert trained_by(stories, stories.chat_template, Conversation(turns)) == ["Two.</s>"]


def test_the_system_prompt_stands_where_there_is_none(stories):
    own = Conversation((Message("system", "Mine."), *EXCHANGE.messages))
    template = chat_template(stories, stories.chat_template, system_prompt="Be brief.")
    assert template.render(EXCHANGE).text.startswith("<s>### system:\nBe brief.\n\n### user")
    assert template.render(own).text.startswith("<s>### system:\nMine.\n\n### user")


def test_calls_and_reasoning_go_into_the_text_unless_the_template_knows_them(stories):
    format = recognise_format("messages", ["messages"], "")
    parts = [
        {"type": "reasoning", "value": "hm"},
        {"type": "text", "value": "Look:"},
        {"type": "tool_call", "value": '{"name": "f"}'},
    ]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]
    conversation = format.convert(Record({"messages": turns}, "d:1"))
    assert trained_by(stories, stories.chat_template, conversation) == [
        '<think>\nhm\n</think>\n\nLook:\n{"name": "f"}</s>'
    ]
    call = "{{ m.tool_calls and m.tool_calls[0].function.name }}"
    knows = each("{{ m.role }}: {{ m.content }}|{{ m.reasoning_content }}|" + call + "</s>")
    assert trained_by(stories, knows, conversation) == ["assistant: Look:|hm|f</s>"]


def test_a_token_that_begins_in_the_prompt_is_not_trained(stories):
    rendered = Rendered("### user", ((5, 8),))  # " us" or "u", "s", ...: whatever begins before 5 is prompt
    for start in range(len(rendered.text)):
        (encoded,) = Encoder(stories).encode([Rendered(rendered.text, ((start, 8),))])
        offsets = stories(rendered.text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
        assert [label != -100 for label in encoded.labels[1:]] == [begin >= start for begin, _ in offsets[1:]]
        assert encoded.straddling == sum(begin < start < end for begin, end in offsets)


def test_a_template_that_leaves_out_tools_is_not_learnt_from(stories):
    turns = (Message("user", "q"), Message("assistant", "wait"), Message("tool", "49"), Message("assistant", "49!"))
    deaf = "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    with pytest.raises(BadRow) as caught:
        trained_by(stories, deaf, Conversation(turns))
    assert (caught.value.reason, caught.value.detail) == ("the template leaves a turn out", "tool")


def test_a_template_that_refuses_a_row_says_why(stories):
    for source in ("{{ raise_exception('no system') }}", "{{ messages[0].content + 1 }}", "{{ nothing.at.all }}"):
        with pytest.raises(BadRow) as caught:
            trained_by(stories, source)
        assert caught.value.reason == "the template refuses it" and caught.value.detail


def test_a_template_that_is_not_jinja_is_an_error(stories):
    with pytest.raises(UserError, match=r"^test:2: not jinja: Expected an"):
        trained_by(stories, "a\n{% for %}")


def test_alpaca_prompts_take_single_exchanges_only(stories):
    alpaca = choose_template(
        data_section(prompt_template="alpaca"), recognise_format("messages", ["messages"], ""), stories
    )
    assert alpaca.render(EXCHANGE).text.endswith("### Response:\nTwo.")
    with pytest.raises(BadRow, match="several exchanges"):
        alpaca.render(LONGER)


def test_auto_follows_the_format_and_files_are_read(stories, tmp_path):
    (tmp_path / "mine.jinja").write_text("x")
    chosen = {
        (format, wanted): choose_template(
            data_section(prompt_template=wanted),
            recognise_format(format, ["instruction", "output", "messages"], ""),
            stories,
        ).name
        for format in ("alpaca", "messages")
        for wanted in ("auto", "chat", "alpaca", str(tmp_path / "mine.jinja"))
    }
    assert list(chosen.values()) == ["alpaca", "chat", "alpaca", "mine.jinja", "chat", "chat", "alpaca", "mine.jinja"]


def test_what_cannot_be_rendered_names_the_key(quickstart):
    from transformers import AutoTokenizer

    bare = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    bare.chat_template = None
    messages = recognise_format("messages", ["messages"], "")
    with pytest.raises(UserError, match=r"no chat template.*data\.prompt_template"):
        choose_template(data_section(), messages, bare)
    with pytest.raises(UserError, match=r"data\.prompt_template: nowhere\.jinja cannot be read"):
        choose_template(data_section(prompt_template="nowhere.jinja"), messages, bare)
    bare.eos_token = None
    with pytest.raises(UserError, match=r"no EOS token.*model\.tokenizer\.eos_token"):
        choose_template(data_section(), recognise_format("alpaca", ["instruction", "output"], ""), bare)


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_prompt_and_its_completion_stand_as_they_are(stories, train_on):
    format = recognise_format("prompt_completion", ["prompt", "completion"], "")
    template = choose_template(data_section(train_on=train_on), format, stories)
    rendered = template.render(format.convert(Record({"prompt": "2 + 2 =", "completion": " 4"}, "d:1")))
    assert rendered.text == "2 + 2 = 4" and template.name == "plain"
    assert [rendered.text[slice(*span)] for span in rendered.trained] == ["2 + 2 = 4" if train_on == "all" else " 4"]
    (encoded,) = Encoder(stories).encode([rendered])
    assert encoded.input_ids[[0, -1]].tolist() == [stories.bos_token_id, stories.eos_token_id]
    assert encoded.labels[-1] == stories.eos_token_id


def test_control_tokens_that_a_plain_row_brings_are_not_doubled(stories):
    format = recognise_format("prompt_completion", ["prompt", "completion"], "")
    row = {"prompt": "<s>[INST] q [/INST]", "completion": " a</s>"}
    rendered = choose_template(data_section(), format, stories).render(format.convert(Record(row, "d")))
    (encoded,) = Encoder(stories).encode([rendered])
    ids = encoded.input_ids.tolist()
    assert (ids.count(stories.bos_token_id), ids.count(stories.eos_token_id)) == (1, 1)
    assert encoded.labels[-1] == stories.eos_token_id


def test_what_plain_rows_have_no_use_for_is_said(stories):
    raw = recognise_format("text", ["text"], "")
    pairs = recognise_format("prompt_completion", ["prompt", "completion"], "")
    with pytest.raises(UserError, match=r"data\.prompt_template: chat is not for rows of format text"):
        choose_template(data_section(prompt_template="chat"), raw, stories)
    with pytest.raises(UserError, match=r"data\.system_prompt has no place in rows of format prompt_completion"):
        choose_template(data_section(system_prompt="s"), pairs, stories)
    assert choose_template(data_section(system_prompt="s", prompt_template="chat"), pairs, stories).name == "chat"
