"""Encoder: span ends give the labels that all offsets give; names of control tokens in a row's text stay text."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation, Message, ToolCall
from ligertune.data.rows.formats import recognise_format
from ligertune.data.templates.control_tokens import ControlTokens, Rendered
from ligertune.data.templates.label_masking import IGNORE_INDEX, Encoder, mark_tokens, mark_tokens_by_offsets
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


def test_rows_with_quoted_names_are_counted_and_noncharacters_used_as_marks_are_broken_text(prepared, stories):
    rows = [{"instruction": f"What is {token}?", "output": "A tag."} for token in ("</s>", "<b>", "<s>")]
    assert prepared(rows).report.literal == prepared(rows, prompt_template="chat").report.literal == 2
    with pytest.raises(BadRow, match=r"broken text: U\+FDD0"):
        encoded_by(stories, exchange("a\ufdd0", "b"), "chat")


# where token bounds are not character bounds: bytes, combining marks, joined emoji, line breaks, spaces
AWKWARD = "a é e\u0301 q\u0307\u0323 你好 👩‍👧 \n\n  \t x\u200b 12 don't <b> ﬁ \u00a0end "


def spans_of(text: str, rng: random.Random) -> tuple[tuple[int, int], ...]:
    cuts = sorted(rng.sample(range(len(text) + 1), k=min(6, len(text))))
    return tuple(zip(cuts[::2], cuts[1::2], strict=False))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.corpus
def test_span_ends_and_all_offsets_mark_the_same_tokens(tokenizer_named, name):
    tokenizer, rng = tokenizer_named(name), random.Random(name)
    texts = ["".join(rng.choices(AWKWARD, k=rng.randint(1, 40))) for _ in range(300)] + [AWKWARD * 3]
    for text in texts:
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        rendered = Rendered(text, spans_of(text, rng))
        quick, whole = mark_tokens(rendered, encoding), mark_tokens_by_offsets(rendered, encoding.ids, encoding.offsets)
        n_tokens = len(encoding.ids)
        assert np.array_equal(covered(quick.trained, n_tokens), covered(whole.trained, n_tokens)), repr(text)
        assert quick.straddling == whole.straddling, repr(text)


def covered(ranges: list[tuple[int, int]], n_tokens: int) -> np.ndarray:
    inside = np.zeros(n_tokens, dtype=bool)
    for start, stop in ranges:
        inside[start:stop] = True
    return inside


def test_a_batch_is_labelled_text_by_text(stories):
    rendered = [Rendered("one two", ((3, 7),), bos=1, eos=2), Rendered("", (), eos=2), Rendered("three", ((0, 5),))]
    first, empty, last = Encoder(stories).encode(rendered)
    assert stories.decode(first.labels[first.labels != IGNORE_INDEX]).split() == ["two</s>"]
    assert (first.input_ids[0], first.input_ids[-1], first.labels[-1], first.trained[-1]) == (1, 2, 2, 2)
    assert not (first.labels[:3] >= 0).any()
    assert (empty.input_ids.tolist(), empty.labels.tolist(), len(empty.trained)) == ([2], [-100], 0)
    assert last.labels[0] == IGNORE_INDEX and np.array_equal(last.labels[1:], last.input_ids[1:])
    (context,) = Encoder(stories).encode([Rendered("ab cde", (), bos=1, eos=2)])
    assert context.input_ids[[0, -1]].tolist() == [1, 2] and not len(context.trained)  # EOS only after an answer


def test_a_cut_does_not_change_the_whole(stories):
    (whole,) = Encoder(stories).encode([Rendered("say a few words", ((3, 15),))])
    before = whole.labels.copy()
    part = whole.cut(5, 9)
    assert part.labels[0] == IGNORE_INDEX and len(part.trained) == 3
    assert np.array_equal(whole.labels, before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_texts_are_not_cached_by_the_tokenizer(stories):
    """A tokenizer without a pre-tokenizer would cache thousands of whole texts: 46 MiB here."""
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefghij klmnop", k=120)) for _ in range(9000)]

    def resident(read: list[str]) -> float:
        list(Encoder(stories).encode([Rendered(text, ((0, len(text)),)) for text in read]))
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4 / 1024  # MiB

    before = resident(texts[:1000])
    assert resident(texts[1000:]) - before < 24
