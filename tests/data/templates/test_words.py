"""Word by word or whole: the same tokens, and only for the tokenizers and texts of which that is known."""

from __future__ import annotations

import json
import pickle
import random
import re
import string

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.label_masking import mark_tokens, mark_word_tokens
from ligertune.data.templates.words import WORD_PATTERNS, word_tokenizer

pytestmark = pytest.mark.corpus

BY_WORDS = ("qwen2.5", "gpt2")
# what the expressions look at: case after an apostrophe, one space or several, before words, signs, breaks and the end
BITS = [
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "'s",
    "'S",
    "'LL",
    "'re",
    "'",
    '"',
    "a",
    "Word",
    "x1",
    "12345",
    "_",
    "-",
    "...",
    ":\n",
]
BITS += ["#", "<", "<|im_end|>", "<|endoftext|>", "<tool_call>", "{", "}", "\\", *string.ascii_letters[:6]]


def with_pattern(tokenizer, pattern: str) -> PreTrainedTokenizerFast:
    """The tokenizer, its words made by another of the expressions."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    written["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        ],
    }
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(written)))


def assert_same(tokenizer, texts: list[str], rng: random.Random) -> None:
    words = word_tokenizer(tokenizer)
    for text in texts:
        ours, theirs = words.tokens(text), tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        assert ours.ids == theirs.ids, repr(text)
        cuts = sorted(rng.sample(range(len(text) + 1), k=min(4, len(text) + 1)))
        rendered = Rendered(text, tuple(zip(cuts[::2], cuts[1::2], strict=False)))
        assert mark_word_tokens(rendered, ours) == mark_tokens(rendered, theirs), repr(text)


@pytest.mark.parametrize("pattern", WORD_PATTERNS, ids=["gpt2", "qwen2", "llama3"])
@pytest.mark.parametrize("name", BY_WORDS)
def test_texts_made_of_what_the_expressions_look_at(tokenizer_named, name, pattern):
    rng = random.Random(name)
    texts = ["".join(rng.choices(BITS, k=rng.randint(0, 30))) for _ in range(1000)]
    assert_same(with_pattern(tokenizer_named(name), pattern), texts, rng)


@pytest.mark.parametrize("name", BY_WORDS)
def test_any_printable_text(tokenizer_named, name):
    rng = random.Random(name)
    texts = ["".join(rng.choices(string.printable[:97], k=rng.randint(1, 120))) for _ in range(1000)]
    assert_same(tokenizer_named(name), texts, rng)


@pytest.mark.parametrize("name", BY_WORDS)
def test_real_text(corpus, tokenizer_named, name):
    lines = (corpus / "sharegpt" / "sharegpt_gpt4_256.jsonl").read_text(encoding="utf-8").split("\n")
    values = [turn["value"] for line in lines if line for turn in json.loads(line)["conversations"]]
    plain = [value for value in values if re.fullmatch(r"[\t\n\r -~]*", value)]
    assert len(plain) > 500
    assert_same(tokenizer_named(name), plain, random.Random(name))


@pytest.mark.parametrize("text", ["é", "a\x0bb", "a\x1cb", "a\x7fb", "\u2028", "\u017f"])
def test_other_characters_are_left_to_the_tokenizer(tokenizer_named, text):
    assert word_tokenizer(tokenizer_named("qwen2.5")).tokens(f"say {text} once") is None


@pytest.mark.parametrize("name", ["mistral-7b-v0.1", "phi-3-mini", "stories260K"])
def test_other_tokenizers_are_left_alone(tokenizer_named, name):
    assert word_tokenizer(tokenizer_named(name)) is None


CHANGES = {
    "an expression that is not known": {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    "a normaliser": {"normalizer": {"type": "Lowercase"}},
    "trimmed offsets": {
        "post_processor": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    },
    "a space before all": {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}
    },
    "dropout": {"model": {"dropout": 0.1}},
    "an end of words": {"model": {"end_of_word_suffix": "</w>"}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_that_does_more_is_left_alone(tokenizer_named, change):
    written = json.loads(tokenizer_named("gpt2").backend_tokenizer.to_str())
    for name, value in CHANGES[change].items():
        written[name] = {**written[name], **value} if name == "model" else value
    changed = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(written)))
    assert word_tokenizer(changed) is None


def test_added_tokens_that_take_spaces_are_left_to_the_tokenizer(tokenizer_named):
    from tokenizers import AddedToken

    tokenizer = with_pattern(tokenizer_named("qwen2.5"), WORD_PATTERNS[1])
    tokenizer.add_tokens([AddedToken("<sep>", lstrip=True)])
    assert word_tokenizer(tokenizer) is None


def test_it_goes_to_another_process_without_its_words(tokenizer_named):
    words = word_tokenizer(tokenizer_named("gpt2"))
    before = words.tokens("one two three").ids
    assert pickle.loads(pickle.dumps(words)).tokens("one two three").ids == before
