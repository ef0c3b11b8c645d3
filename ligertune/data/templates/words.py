"""The tokens of plain ASCII text, word by word: what the tokenizer says of a word is asked once.

Byte-level BPE (GPT-2, Llama 3, Qwen, ...) cuts a text at added tokens, then into words by a regular expression that
looks at nothing behind it, and merges inside words only. So a text's tokens are its words' tokens one behind another.
In ASCII text `\\p{L}` is `[A-Za-z]` and `\\p{N}` is `[0-9]`, which Python's `re` knows, and no normal form changes it.
The tokenizer itself copies and aligns each word each time; this takes a quarter of its time once words are known, and
two fifths on the first 9,000 Alpaca records.

Whatever is not known to be so goes to the tokenizer whole: text beyond ASCII, expressions not in the table, tokenizers
that normalise, pad words or trim offsets, and any that answers otherwise on a sample.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3 = _QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_KNOWN = (_GPT_2, _QWEN_2, _LLAMA_3)

_PLAIN = re.compile(r"[\t\n\r -~]*")  # ASCII of which every library says the same
_LETTERS = {byte: chr(0x100 + byte) for byte in b"\t\n\r "}  # how byte-level vocabularies write these bytes
_MOST_WORDS = 1 << 18  # some 50 MB; Alpaca's 52,002 records have 100,000
_LONGEST = 64  # characters of a word that is worth keeping
_SAMPLE = (
    "Don't we'll\tgo  there?\n\n### It's 12345 (or 1,024) x_y=z;\r\n  - a... \n \nWE'LL see; 'tis I'd {'k': [1]}  "
)


class WordTokens:
    """The tokens of one text, word by word."""

    def __init__(self, words: list[str], tokens: list[tuple[int, ...]], length_of: Callable[[int], int]) -> None:
        self._ends = list(accumulate(map(len, words)))
        self._tokens, self._length_of = tokens, length_of
        self.ids = list(chain.from_iterable(tokens))

    def first_from(self, character: int) -> tuple[int, int]:
        """The first token that begins at `character` or behind it; how many before it reach behind it (0 or 1)."""
        word = bisect_right(self._ends, character)
        token = sum(map(len, self._tokens[:word]))
        at = self._ends[word - 1] if word else 0
        if word == len(self._ends):
            return token, 0
        for index in self._tokens[word]:
            if at >= character:
                break
            at += self._length_of(index)
            token += 1
        return token, int(at > character)


class _Known(dict[str, tuple[int, ...]]):
    """The tokens of each word that was met; of others, what the model says."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, word: str) -> tuple[int, ...]:
        model = self.tokenizer.backend_tokenizer.model
        tokens = tuple([token.id for token in model.tokenize(word.translate(_LETTERS))])
        if len(word) <= _LONGEST and len(self) < _MOST_WORDS:
            self[word] = tokens
        return tokens

    def __reduce__(self) -> tuple:
        return _Known, (self.tokenizer,)


class WordTokenizer:
    """Cuts texts into words and asks the tokenizer for those it has not met."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pattern: str) -> None:
        ascii_only = pattern.replace(r"\p{L}\p{N}]", "A-Za-z0-9]")  # inside a class
        self._pattern = re.compile(ascii_only.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]"))
        self._added = {token.content: (index,) for index, token in tokenizer.added_tokens_decoder.items()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._added_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._known = _Known(tokenizer)

    def length_of(self, index: int) -> int:
        """Characters of a token: a byte is a letter of the vocabulary, and added tokens are written as they are."""
        return len(self._known.tokenizer.backend_tokenizer.id_to_token(index))

    def tokens(self, text: str) -> WordTokens | None:
        """None where only the tokenizer itself knows."""
        if not (text.isascii() and _PLAIN.fullmatch(text)):
            return None
        known = self._known
        if not self._added_pattern.search(text):
            words = self._pattern.findall(text)
            return WordTokens(words, [known[word] for word in words], self.length_of)
        words, tokens = [], []
        for place, part in enumerate(self._added_pattern.split(text)):
            inside = [part] if place % 2 else self._pattern.findall(part)
            words += inside
            tokens += [self._added[part]] if place % 2 else [known[word] for word in inside]
        return WordTokens(words, tokens, self.length_of)


def word_tokenizer(tokenizer: PreTrainedTokenizerBase) -> WordTokenizer | None:
    """For a tokenizer of which all of the above is known to hold; else None."""
    pattern = _pattern_of(tokenizer)
    if pattern is None:
        return None
    found = WordTokenizer(tokenizer, pattern)
    encoding = tokenizer.backend_tokenizer.encode(_SAMPLE, add_special_tokens=False)
    ours = found.tokens(_SAMPLE)
    same = ours is not None and ours.ids == encoding.ids
    return found if same and list(map(found.length_of, ours.ids)) == [b - a for a, b in encoding.offsets] else None


def _pattern_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The expression that makes words, if nothing else touches the text."""
    from tokenizers.models import BPE

    backend = tokenizer.backend_tokenizer
    model = backend.model
    plain_model = isinstance(model, BPE) and not (
        model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.byte_fallback
    )
    moved = any(t.lstrip or t.rstrip or t.single_word for t in tokenizer.added_tokens_decoder.values())
    if not plain_model or moved or tokenizer.split_special_tokens:
        return None
    if any(part["type"] != "NFC" for part in _parts(backend.normalizer, "normalizers")):
        return None
    for part in _parts(backend.post_processor, "processors"):
        if part["type"] not in ("ByteLevel", "TemplateProcessing") or part.get("trim_offsets"):
            return None
    match _parts(backend.pre_tokenizer, "pretokenizers"):
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return _GPT_2
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:
            return pattern if pattern in _KNOWN else None
    return None


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """A component of a tokenizer as its file writes it; of a sequence, its parts."""
    if component is None:
        return []
    written = json.loads(component.__getstate__())
    return written[name] if written["type"] == "Sequence" else [written]
