"""Templates: the answer and the token that ends it are trained, for every kind of template and tokenizer."""

import numpy as np
import pytest
from support.data.family_templates import FAMILIES
from transformers import AutoTokenizer

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation, Message
from ligertune.data.rows.formats import recognise_format
from ligertune.data.rows.sources import Record
from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.label_masking import Encoder
from ligertune.data.templates.prompt_templates import ChatTemplate, alpaca_prompt, choose_template
from ligertune.errors import UserError
from ligertune.planning.options import DataOptions, DatasetOptions

EXCHANGE = Conversation((Message("user", "How much?"), Message("assistant", "Two.")))
LONGER = Conversation((*EXCHANGE.messages, Message("user", "Two?"), Message("assistant", "Two. ")))
COLUMNS = (["messages"], ["instruction", "output"], ["prompt", "completion"])
MESSAGES, ALPACA, PAIRS = (recognise_format("auto", columns, "") for columns in COLUMNS)


def template_for(tokenizer, format=MESSAGES, **section):
    return choose_template(DataOptions(datasets=[DatasetOptions(path="unused")], **section), format, tokenizer)


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["qwen2.5", "mistral-7b-v0.1", "phi-3-mini", "gpt2", "stories260K"])
def test_alpaca_prompts_begin_as_the_tokenizer_begins(tokenizer_named, name):
    """With BOS if the tokenizer writes it."""
    tokenizer = tokenizer_named(name)
    rendered = template_for(tokenizer, ALPACA).render(EXCHANGE)
    (encoded,) = Encoder(tokenizer).encode([rendered])
    prompt = tokenizer(rendered.text[: rendered.trained[0][0]]).input_ids
    assert encoded.input_ids[: len(prompt)].tolist() == prompt


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "gpt2", "stories260K", "phi-3-mini"])
@pytest.mark.parametrize("prompts", ["chat", "alpaca"])
def test_bos_is_never_doubled(tokenizer_named, name, prompts):
    tokenizer = tokenizer_named(name)
    rendered = template_for(tokenizer, prompt_template=prompts).render(EXCHANGE)
    (encoded,) = Encoder(tokenizer).encode([rendered])
    # a chat template decides on BOS itself, for others the tokenizer does
    text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    expected = text.startswith(tokenizer.bos_token) if prompts == "chat" else tokenizer("a").input_ids[0] == 1
    assert int((encoded.input_ids[:3] == tokenizer.bos_token_id).sum()) == int(expected)


def test_alpaca_prompts_with_and_without_input_keep_braces():
    assert alpaca_prompt("{x} {input}") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{x} {input}\n\n### Response:\n"
    )
    assert alpaca_prompt("i", "{n}", "Be brief.") == (
        "Be brief.\n\nBelow is an instruction that describes a task, paired with an input that provides further "
        "context. Write a response that appropriately completes the request."
        "\n\n### Instruction:\ni\n\n### Input:\n{n}\n\n### Response:\n"
    )


def test_alpacas_input_follows_the_instruction_in_a_chat_template(stories):
    """The input of a Stanford row may also be empty or white space."""
    template = chat_template(stories, each("{{ m.role }}> {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"))
    for given, shown in (("A text.", "Sum up.\n\nA text."), ("", "Sum up."), (" \n", "Sum up.")):
        turns = Message("user", "Sum up.", input=given), Message("assistant", "Two.")
        rendered = template.render(Conversation(turns))
        assert rendered.text == f"user> {shown}\nassistant> Two.</s>\n"
        assert [rendered.text[start:end] for start, end in rendered.trained] == ["assistant> Two.</s>"]


def each(turn: str, prompt: str = "") -> str:
    return "{% for m in messages %}" + turn + "{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"


def chat_template(stories, source: str, **given) -> ChatTemplate:
    return ChatTemplate(stories, source, "test", given.get("system_prompt"), given.get("train_on", "assistant"))


def trained_by(stories, source: str, conversation: Conversation = LONGER, **given) -> list[str]:
    rendered = chat_template(stories, source, **given).render(conversation)
    return [rendered.text[start:end] for start, end in rendered.trained]


# like DeepSeek-R1's: the generation prompt opens a thought that a finished conversation does not show
THINKS_FIRST = each("<{{ m.role }}> {{ m.content }}{{ eos_token if m.role == 'assistant' }}", "<assistant> <think>")
SHAPES = {
    "header written with the answer": (
        each("{{ m.role }}> {{ m.content }}{{ eos_token if m.role == 'assistant' }}\n"),
        ["assistant> Two.</s>", "assistant> Two. </s>"]),
    "generation prompt, content trimmed": (
        each("[{{ m.role }}]{{ m.content | trim }}</s>\n", "[assistant]"), ["Two.</s>", "Two.</s>"]),
    "no special token at the end": (each("{{ m.role }}: {{ m.content }}\n", "assistant:"), [" Two.", " Two. "]),
    "a word at the end": (each("{{ m.role }}: {{ m.content }} END\n", "assistant: "), ["Two. END", "Two.  END"]),
    "generation blocks": (
        each("{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}"
             "{% else %}{{ m.content }}{% endif %}\n"), ["Two.!", "Two. !"]),
    "the prompt is no prefix, and the answer's text is there twice": (THINKS_FIRST, [" Two.</s>", " Two. </s>"]),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_templates_of_different_shapes(stories, shape):
    source, expected = SHAPES[shape]
    assert trained_by(stories, source) == expected


DEAF = "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
WITH_TOOL = Conversation((Message("user", "q"), Message("assistant", "wait"), Message("tool", "49"),
                          Message("assistant", "49!")))  # fmt: skip
REFUSED = [
    (each("{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}\n"), LONGER,
     "the answer cannot be placed: 4 marked spans for 2 answers"),
    (THINKS_FIRST.replace("m.content }}", "m.content | upper | reverse }}"), LONGER,
     r"the answer cannot be placed: the template rewrites 'Two\.'"),
    (DEAF, WITH_TOOL, "the template leaves a turn out: tool"),
    ("{{ raise_exception('no system') }}", LONGER, "the template refuses it: no system"),
    ("{{ messages[0].content + 1 }}", LONGER, "the template refuses it: ."),
    ("{{ nothing.at.all }}", LONGER, "the template refuses it: ."),
]  # fmt: skip


@pytest.mark.parametrize(("source", "conversation", "says"), REFUSED)
def test_rows_that_a_template_does_not_render_completely(stories, source, conversation, says):
    with pytest.raises(BadRow, match=says):
        trained_by(stories, source, conversation)


def test_a_special_token_inside_an_answer_does_not_end_it_and_an_untrained_answer_is_context(stories):
    conversation = Conversation((Message("user", "q"), Message("assistant", "a </s> b")))
    source = each("{{ m.role }}: {{ m.content }}\n", "assistant: ")
    assert trained_by(stories, source, conversation) == ["a </s> b"]
    # an untrained answer is context only
    turns = (Message("user", "q"), Message("assistant", "a", trained=False), *EXCHANGE.messages)
    assert trained_by(stories, stories.chat_template, Conversation(turns)) == ["Two.</s>"]


@pytest.mark.parametrize(
    ("train_on", "expected"), [("assistant", ["Two.</s>", "Two. </s>"]), ("last", ["Two. </s>"]), ("all", None)]
)
def test_train_on(stories, train_on, expected):
    rendered = chat_template(stories, stories.chat_template, train_on=train_on).render(LONGER)
    spans = [rendered.text[start:end] for start, end in rendered.trained]
    assert spans == (expected or [rendered.text])


def test_train_on_all_trains_every_token_but_the_first(stories):
    for template in ("chat", "alpaca"):
        rendered = template_for(stories, prompt_template=template, train_on="all").render(EXCHANGE)
        (encoded,) = Encoder(stories).encode([rendered])
        assert encoded.labels.tolist() == [-100, *encoded.input_ids[1:]]


def test_the_system_prompt_is_added_where_there_is_none(stories):
    own = Conversation((Message("system", "Mine."), *EXCHANGE.messages))
    template = chat_template(stories, stories.chat_template, system_prompt="Be brief.")
    assert template.render(EXCHANGE).text.startswith("<s>### system:\nBe brief.\n\n### user")
    assert template.render(own).text.startswith("<s>### system:\nMine.\n\n### user")


def test_calls_and_reasoning_go_into_the_text_unless_the_template_knows_them(stories):
    said = (("reasoning", "hm"), ("text", "Look:"), ("tool_call", '{"name": "f"}'))
    parts = [{"type": kind, "value": value} for kind, value in said]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]
    conversation = MESSAGES.convert(Record({"messages": turns}, "d:1"))
    (text,) = trained_by(stories, stories.chat_template, conversation)
    assert text == '<think>\nhm\n</think>\n\nLook:\n{"name": "f"}</s>'
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


def test_alpaca_prompts_take_single_exchanges_only(stories):
    alpaca = template_for(stories, prompt_template="alpaca")
    assert alpaca.render(EXCHANGE).text.endswith("### Response:\nTwo.")
    with pytest.raises(BadRow, match="several exchanges"):
        alpaca.render(LONGER)


def test_auto_follows_the_format_and_files_are_read(stories, tmp_path):
    mine = tmp_path / "mine.jinja"
    mine.write_text("x")
    for format, auto in ((ALPACA, "alpaca"), (MESSAGES, "chat")):
        for name, chosen in (("auto", auto), ("chat", "chat"), ("alpaca", "alpaca"), (str(mine), "mine.jinja")):
            assert template_for(stories, format, prompt_template=name).name == chosen


def test_broken_and_missing_templates_and_tokens_name_their_key(stories, quickstart):
    with pytest.raises(UserError, match=r"^test:2: not jinja: Expected an"):
        trained_by(stories, "a\n{% for %}")
    bare = AutoTokenizer.from_pretrained(quickstart / "stories260K")
    bare.chat_template = None
    with pytest.raises(UserError, match=r"no chat template.*data\.prompt_template"):
        template_for(bare)
    with pytest.raises(UserError, match=r"data\.prompt_template: nowhere\.jinja cannot be read"):
        template_for(bare, prompt_template="nowhere.jinja")
    bare.eos_token = None
    with pytest.raises(UserError, match=r"no EOS token.*model\.tokenizer\.eos_token"):
        template_for(bare, ALPACA)


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_prompt_and_its_completion_are_not_changed(stories, train_on):
    template = template_for(stories, PAIRS, train_on=train_on)
    rendered = template.render(PAIRS.convert(Record({"prompt": "2 + 2 =", "completion": " 4"}, "d:1")))
    assert rendered.text == "2 + 2 = 4" and template.name == "plain"
    assert [rendered.text[slice(*span)] for span in rendered.trained] == ["2 + 2 = 4" if train_on == "all" else " 4"]
    (encoded,) = Encoder(stories).encode([rendered])
    assert encoded.input_ids[[0, -1]].tolist() == [stories.bos_token_id, stories.eos_token_id]
    assert encoded.labels[-1] == stories.eos_token_id
    # a row's own control tokens are not doubled
    row = {"prompt": "<s>[INST] q [/INST]", "completion": " a</s>"}
    rendered = template_for(stories, PAIRS).render(PAIRS.convert(Record(row, "d")))
    (encoded,) = Encoder(stories).encode([rendered])
    ids = encoded.input_ids.tolist()
    assert (ids.count(stories.bos_token_id), ids.count(stories.eos_token_id)) == (1, 1)
    assert encoded.labels[-1] == stories.eos_token_id


def test_settings_that_plain_rows_do_not_use_are_errors(stories):
    raw = recognise_format("text", ["text"], "")
    with pytest.raises(UserError, match=r"data\.prompt_template: chat is not for rows of format text"):
        template_for(stories, raw, prompt_template="chat")
    with pytest.raises(UserError, match=r"data\.system_prompt has no place in rows of format prompt_completion"):
        template_for(stories, PAIRS, system_prompt="s")
    assert template_for(stories, PAIRS, system_prompt="s", prompt_template="chat").name == "chat"


QUESTION = "How much is 1 + 1?"
# the same answer twice, the second with a trailing space: searching for its text would find two
CHAT = (
    Message("user", QUESTION), Message("assistant", "Two."), Message("user", "Sure?"), Message("assistant", "Two. "),
)  # fmt: skip
SYSTEM = Message("system", "Be brief.")


@pytest.fixture
def template_of(quickstart):
    def of(name: str, **given) -> tuple[ChatTemplate, object]:
        tokenizer = AutoTokenizer.from_pretrained(quickstart / "stories260K")
        tokenizer.add_special_tokens({"additional_special_tokens": list(FAMILIES[name].special)})
        source = FAMILIES[name].template
        return ChatTemplate(tokenizer, source, name, None, given.get("train_on", "assistant")), tokenizer

    return of


def runs_of(labels: np.ndarray, tokenizer) -> list[str]:
    """Return the text of each run of trained tokens."""
    trained = np.flatnonzero(labels != -100)
    return [tokenizer.decode(labels[run]) for run in np.split(trained, np.flatnonzero(np.diff(trained) != 1) + 1)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("system", [(), (SYSTEM,)], ids=["", "system"])
def test_exactly_what_the_model_has_to_write_is_trained(template_of, name, system):
    family = FAMILIES[name]
    template, tokenizer = template_of(name)
    conversation = Conversation((*system, *CHAT))
    if system and not family.system:
        with pytest.raises(BadRow, match="the template refuses it: no system role"):
            template.render(conversation)
        return
    rendered = template.render(conversation)
    assert tuple(rendered.text[start:end] for start, end in rendered.trained) == family.trained
    (encoded,) = Encoder(tokenizer).encode([rendered])
    runs = runs_of(encoded.labels, tokenizer)  # this tokenizer decodes a space next to special tokens
    assert ["".join(run.split()) for run in runs] == ["".join(text.split()) for text in family.trained]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_generation_prompt_and_the_answer_make_the_example(template_of, name):
    """In one exchange, all text before the trained span is the prompt at inference. `last` trains the last answer."""
    template, tokenizer = template_of(name)
    rendered = template.render(Conversation(CHAT[:2]))
    options = {"chat_template": FAMILIES[name].template, "tokenize": False, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}], **options)
    thought = "<think>\n" if name == "DeepSeek-R1" else ""  # its prompt opens one, which the row does not have
    assert prompt == rendered.text[: rendered.trained[0][0]] + thought
    template, _ = template_of(name, train_on="last")
    rendered = template.render(Conversation(CHAT))
    assert [rendered.text[start:end] for start, end in rendered.trained] == [FAMILIES[name].trained[-1]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3", ["Two.<|im_end|>", "<think>\nAgain.\n</think>\n\nYes.<|im_end|>"]),
        ("DeepSeek-R1", ["\n\nTwo.<|end|>", "\n\nYes.<|end|>"]),
    ],
)
def test_reasoning_that_a_template_drops_is_not_trained(template_of, name, expected):
    turns = (CHAT[0], Message("assistant", "Two.", reasoning="1 and 1"), *CHAT[2:3])
    template, _ = template_of(name)
    rendered = template.render(Conversation((*turns, Message("assistant", "Yes.", reasoning="Again."))))
    assert [rendered.text[start:end] for start, end in rendered.trained] == expected
