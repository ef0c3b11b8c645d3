"""Word cache: the same tokens as the tokenizer's, and only for tokenizers and texts where that is certain."""

import json
import pickle
import random
import re
import string

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.label_masking import mark_tokens, mark_word_tokens
from ligertune.data.templates.words import WORD_PATTERNS, word_tokenizer

pytestmark = pytest.mark.corpus

BY_WORDS = ("qwen2.5", "gpt2")
# what the patterns distinguish: case after an apostrophe, number of spaces, signs, line breaks, the end
BITS = [" ", "  ", "\n", "\r\n", "\t", "'s", "'S", "'LL", "'re", "'", '"', "a", "Word", "x1", "12345", "_", "-", "...",
        ":\n", "#", "<", "<|im_end|>", "<|endoftext|>", "<tool_call>", "{", "}", "\\", *"abcdef"]  # fmt: skip


def changed(tokenizer, **changes: dict) -> PreTrainedTokenizerFast:
    """Return the tokenizer with changed sections of its tokenizer.json."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    for name, value in changes.items():
        written[name] = {**written[name], **value} if name == "model" else value
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(written)))


def shortened(tokenizer) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its first 2,000 tokens and their merges, which is changed and read more quickly."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special = tokenizer.all_special_tokens
    vocab = {token: number for token, number in model["vocab"].items() if number < 2000 or token in special}
    merges = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= vocab.keys()]
    assert len(merges) > 1500
    return changed(tokenizer, model={"vocab": vocab, "merges": merges})


def with_pattern(tokenizer, pattern: str) -> PreTrainedTokenizerFast:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return changed(tokenizer, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, byte_level(use_regex=False)]})


def byte_level(*, add_prefix_space: bool = False, trim_offsets: bool = False, use_regex: bool = True) -> dict:
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": trim_offsets,
            "use_regex": use_regex}  # fmt: skip


def assert_same(tokenizer, texts: list[str], rng: random.Random) -> None:
    words = word_tokenizer(tokenizer)
    for text in texts:
        found, expected = words.tokens(text), tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        assert found.ids == expected.ids, repr(text)
        cuts = sorted(rng.sample(range(len(text) + 1), k=min(4, len(text) + 1)))
        rendered = Rendered(text, tuple(zip(cuts[::2], cuts[1::2], strict=False)))
        assert mark_word_tokens(rendered, found) == mark_tokens(rendered, expected), repr(text)


@pytest.mark.parametrize(
    "name, pattern", [*(("gpt2", pattern) for pattern in WORD_PATTERNS), ("qwen2.5", WORD_PATTERNS[1])]
)
def test_texts_made_of_what_the_patterns_distinguish(tokenizer_named, name, pattern):
    rng = random.Random(name)
    texts = ["".join(rng.choices(BITS, k=rng.randint(0, 30))) for _ in range(400)]
    assert_same(with_pattern(shortened(tokenizer_named(name)), pattern), texts, rng)


@pytest.mark.parametrize("name", BY_WORDS)
def test_printable_and_real_text(corpus, tokenizer_named, name):
    rng = random.Random(name)
    texts = ["".join(rng.choices(string.printable[:97], k=rng.randint(1, 120))) for _ in range(400)]
    lines = (corpus / "sharegpt" / "sharegpt_gpt4_256.jsonl").read_text(encoding="utf-8").split("\n")
    values = [turn["value"] for line in lines if line for turn in json.loads(line)["conversations"]]
    plain = [value for value in values if re.fullmatch(r"[\t\n\r -~]*", value)]
    assert len(plain) > 500
    assert_same(tokenizer_named(name), texts + plain, rng)


@pytest.mark.parametrize("text", ["é", "a\x0bb", "a\x1cb", "a\x7fb", "\u2028", "\u017f"])
def test_other_characters_are_left_to_the_tokenizer(tokenizer_named, text):
    assert word_tokenizer(tokenizer_named("qwen2.5")).tokens(f"say {text} once") is None


CHANGES = {
    "unknown pattern": {"pre_tokenizer": {"type": "WhitespaceSplit"}},
    "normalizer": {"normalizer": {"type": "Lowercase"}},
    "trimmed offsets": {"post_processor": byte_level(add_prefix_space=True, trim_offsets=True)},
    "prefix space": {"pre_tokenizer": byte_level(add_prefix_space=True)},
    "dropout": {"model": {"dropout": 0.1}},
    "word suffix": {"model": {"end_of_word_suffix": "</w>"}},
}


def test_other_tokenizers_get_no_word_cache(tokenizer_named):
    for name in ("mistral-7b-v0.1", "phi-3-mini", "stories260K"):
        assert word_tokenizer(tokenizer_named(name)) is None, name
    gpt2 = shortened(tokenizer_named("gpt2"))
    assert word_tokenizer(gpt2) is not None
    for name, changes in CHANGES.items():
        assert word_tokenizer(changed(gpt2, **changes)) is None, name
    strips = with_pattern(gpt2, WORD_PATTERNS[1])
    assert word_tokenizer(strips) is not None
    strips.add_tokens([AddedToken("<sep>", lstrip=True)])
    assert word_tokenizer(strips) is None


def test_a_worker_process_gets_a_copy_without_the_cached_words(tokenizer_named):
    words = word_tokenizer(tokenizer_named("gpt2"))
    before = words.tokens("one two three").ids
    assert pickle.loads(pickle.dumps(words)).tokens("one two three").ids == before
