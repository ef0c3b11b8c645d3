"""Names of control tokens in a row's text stay text: they give no control token, and no text is lost."""

from __future__ import annotations

import pytest

from ligertune.data.rows.conversation import BadRow, Conversation, Message, ToolCall
from ligertune.data.rows.formats import recognise_format
from ligertune.data.templates.control_tokens import ControlTokens, Rendered
from ligertune.data.templates.label_masking import Encoder
from ligertune.data.templates.prompt_templates import ChatTemplate, choose_template
from ligertune.planning.options import DataOptions, DatasetOptions

NAMES = ["qwen2.5", "mistral-7b-v0.1", "phi-3-mini", "gpt2", "stories260K"]


def special_ids(tokenizer) -> set[int]:
    return {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}


def encoded_by(tokenizer, conversation: Conversation, template: str, **section):
    data = DataOptions(datasets=[DatasetOptions(path="d")], prompt_template=template, **section)
    rendered = choose_template(data, recognise_format("messages", ["messages"], "d"), tokenizer).render(conversation)
    (encoded,) = Encoder(tokenizer).encode([rendered])
    assert not isinstance(encoded, BadRow)
    return rendered, encoded


def exchange(question: str, answer: str) -> Conversation:
    return Conversation((Message("user", question), Message("assistant", answer)))


def all_names(tokenizer) -> str:
    """Return a text with all names of control tokens at the beginning, between words, adjacent, and at the end."""
    names = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return "".join(names[:3]) + " and ".join(["", *names, ""]) + names[-1]


@pytest.mark.corpus
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("template", ["chat", "alpaca"])
def test_a_quoted_control_token_is_text(tokenizer_named, name, template):
    """The example has the same control tokens in the same order as an example without quoted names."""
    tokenizer = tokenizer_named(name)
    text, special = all_names(tokenizer), special_ids(tokenizer)
    _, plain = encoded_by(tokenizer, exchange("q", "a"), template)
    rendered, quoted = encoded_by(tokenizer, exchange(text, text), template)
    control = [token for token in plain.input_ids.tolist() if token in special]
    assert [token for token in quoted.input_ids.tolist() if token in special] == control
    assert tokenizer.decode(quoted.input_ids).count(text) == 2 == rendered.text.count(text)
    trained = tokenizer.decode(quoted.input_ids[quoted.labels != -100])
    assert trained.strip().startswith(text) and len(trained) < len(text) + 40


@pytest.mark.corpus
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_equal_those_of_split_special_tokens(tokenizer_named, name):
    """In a text without control tokens of the template."""
    tokenizer = tokenizer_named(name)
    text = f"One {all_names(tokenizer)} two."
    (encoded,) = Encoder(tokenizer).encode([Rendered(text, ((0, 4),), literal=ControlTokens(tokenizer).found_in(text))])
    expected = tokenizer(text, add_special_tokens=False, split_special_tokens=True)
    assert encoded.input_ids.tolist() == expected.input_ids


@pytest.mark.corpus
@pytest.mark.parametrize("name", NAMES)
def test_a_text_without_quoted_names_is_tokenized_alike_on_both_paths(tokenizer_named, name):
    """The tokenizer copy is forced on a text whose control tokens are all the template's."""
    tokenizer = tokenizer_named(name)
    turns = exchange(" 你好\n\nhow é?", "Fine, “12”.\n").messages * 2
    rendered, encoded = encoded_by(tokenizer, Conversation(turns), "chat")
    ids, offsets = ControlTokens(tokenizer).tokenize(rendered)
    expected = tokenizer(rendered.text, add_special_tokens=False, return_offsets_mapping=True)
    assert ids == expected.input_ids == encoded.input_ids.tolist()
    special = special_ids(tokenizer)
    pairs = zip(ids, offsets, expected.offset_mapping, strict=True)
    assert all(found == own for token, found, own in pairs if token not in special)


@pytest.mark.parametrize("where", ["content", "reasoning", "calls", "tools", "system_prompt"])
def test_every_field_that_can_hold_text(stories, where):
    source = (
        "{{ tools | tojson if tools }}{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls }}</s>{% endfor %}"
    )
    text = "see </s> there"
    answer = Message(
        "assistant",
        text if where == "content" else "a",
        reasoning=text if where == "reasoning" else "",
        calls=(ToolCall("f", {"x": [text]}, "f"),) if where == "calls" else (),
    )
    tools = ({"type": "function", "function": {"name": "f", "description": text}},) if where == "tools" else ()
    system = text if where == "system_prompt" else None
    template = ChatTemplate(stories, source, "test", system, "assistant")
    rendered = template.render(Conversation((Message("user", "q"), answer), tools))
    assert len(rendered.literal) == 1 and rendered.text[slice(*rendered.literal[0])] == "</s>"
    (encoded,) = Encoder(stories).encode([rendered])
    assert encoded.input_ids.tolist().count(stories.eos_token_id) == (3 if system else 2)


def test_the_report_counts_rows_with_quoted_names(prepared):
    rows = [{"instruction": f"What is {token}?", "output": "A tag."} for token in ("</s>", "<b>", "<s>")]
    assert prepared(rows).report.literal == prepared(rows, prompt_template="chat").report.literal == 2


def test_noncharacters_that_are_used_as_marks_are_broken_text(stories):
    with pytest.raises(BadRow, match=r"broken text: U\+FDD0"):
        encoded_by(stories, exchange("a\ufdd0", "b"), "chat")
