"""Word cache: tokenize ASCII text word by word with byte-level BPE, asking the tokenizer once for each new word.

Byte-level BPE (GPT-2, Llama 3, Qwen) splits a text at added tokens, then into words by a regular expression without
look-behind, and merges only inside words. So the tokens of a text are those of its words. In ASCII text `\\p{L}` is
`[A-Za-z]` and `\\p{N}` is `[0-9]`, which Python's `re` can express, and normal forms change nothing.

Preparing 100,000 Alpaca records (16,019 distinct ones, repeated) in one process takes 14.5 s of processor time instead
of 32.2 s with qwen2.5 (2.2 times as fast), and 13.3 s instead of 29.5 s with gpt2 (2.2 times as fast). Without the
repetition it takes 2.65 s instead of 5.04 s (1.9) and 2.49 s instead of 5.03 s (2.0). The cache of tokenizers' own BPE
does not help: with room for 262,144 words instead of 10,000, 9,229 Alpaca records with qwen2.5 take 2.9 s instead of
2.8, and 1.3 with the words here. Where few texts are ASCII nothing is gained: Chinese takes as long either way.

The tokenizer itself gets all other texts: text beyond ASCII, unknown regular expressions, tokenizers that normalize,
pad words or trim offsets, and those that disagree on a sample.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_GPT_2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN_2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_3 = _QWEN_2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
WORD_PATTERNS = (_GPT_2, _QWEN_2, _LLAMA_3)

_PLAIN = re.compile(r"[\t\n\r -~]*")  # ASCII whose classes are the same in Rust's and Python's regular expressions
_BYTE_LETTERS = {byte: chr(0x100 + byte) for byte in b"\t\n\r "}  # letters that byte-level vocabularies use for these
_MAX_WORDS = 1 << 18  # about 50 MB; the 52,002 records of Alpaca have 100,000 words
_MAX_LENGTH = 64  # characters of a word that is cached: longer ones do not repeat
_SAMPLE = (
    "Don't we'll\tgo  there?\n\n### It's 12345 (or 1,024) x_y=z;\r\n  - a... \n \nWE'LL see; 'tis I'd {'k': [1]}  "
)


class WordTokens:
    """The tokens of one text, word by word."""

    def __init__(self, words: list[str], tokens: list[tuple[int, ...]], length_of: Callable[[int], int]) -> None:
        self._ends = list(accumulate(map(len, words)))
        self._tokens = tokens
        self._length_of = length_of
        self.ids = list(chain.from_iterable(tokens))

    def first_from(self, character: int) -> tuple[int, int]:
        """Return (the first token that begins at `character` or after it, how many before it reach past it: 0 or 1)."""
        word = bisect_right(self._ends, character)
        token = sum(map(len, self._tokens[:word]))
        at = self._ends[word - 1] if word else 0
        for index in self._tokens[word] if word < len(self._tokens) else ():
            if at >= character:
                break
            at += self._length_of(index)
            token += 1
        return token, int(character < at and word < len(self._tokens))


class _WordCache(dict[str, tuple[int, ...]]):
    """Word -> its tokens; the tokenizer's model is asked for a missing word."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self.backend = backend

    def __missing__(self, word: str) -> tuple[int, ...]:
        tokens = tuple([token.id for token in self.backend.model.tokenize(word.translate(_BYTE_LETTERS))])
        if len(word) <= _MAX_LENGTH and len(self) < _MAX_WORDS:
            self[word] = tokens
        return tokens

    def __reduce__(self) -> tuple[type[_WordCache], tuple[Tokenizer]]:  # worker processes start with an empty cache
        return _WordCache, (self.backend,)


class WordTokenizer:
    """Splits texts into words and looks their tokens up."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pattern: str) -> None:
        ascii_only = pattern.replace(r"\p{L}\p{N}]", "A-Za-z0-9]")  # inside a class
        self._pattern = re.compile(ascii_only.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]"))
        self._added = {token.content: (index,) for index, token in tokenizer.added_tokens_decoder.items()}
        longest_first = sorted(self._added, key=len, reverse=True)
        self._added_pattern = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._cache = _WordCache(tokenizer.backend_tokenizer)

    def length_of(self, index: int) -> int:
        """Return the characters of a token: in its vocabulary entry each byte is one letter."""
        token = self._cache.backend.id_to_token(index)
        assert token is not None  # the ids are those that this tokenizer gave
        return len(token)

    def tokens(self, text: str) -> WordTokens | None:
        """Tokenize a text; None if only the tokenizer itself can."""
        if not (text.isascii() and _PLAIN.fullmatch(text)):
            return None
        words: list[str] = []
        tokens: list[tuple[int, ...]] = []
        cache = self._cache
        for place, part in enumerate(self._added_pattern.split(text)):  # added tokens are at odd places
            inside = [part] if place % 2 else self._pattern.findall(part)
            words += inside
            tokens += [self._added[part]] if place % 2 else [cache[word] for word in inside]
        return WordTokens(words, tokens, self.length_of)


def word_tokenizer(tokenizer: PreTrainedTokenizerBase) -> WordTokenizer | None:
    """Return a WordTokenizer, or None for a tokenizer that might give other tokens."""
    pattern = _word_pattern(tokenizer)
    if pattern is None:
        return None
    found = WordTokenizer(tokenizer, pattern)
    encoding = tokenizer.backend_tokenizer.encode(_SAMPLE, add_special_tokens=False)
    tokens = found.tokens(_SAMPLE)
    if tokens is None or tokens.ids != encoding.ids:
        return None
    lengths = [end - start for start, end in encoding.offsets]
    return found if list(map(found.length_of, tokens.ids)) == lengths else None


def _word_pattern(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the regular expression that splits words, if the tokenizer does nothing else to the text."""
    from tokenizers.models import BPE

    backend = tokenizer.backend_tokenizer
    model = backend.model
    if not isinstance(model, BPE) or tokenizer.split_special_tokens:
        return None
    post = _parts(backend.post_processor, "processors")
    changes_text = (
        model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix or model.byte_fallback,
        *(token.lstrip or token.rstrip or token.single_word for token in tokenizer.added_tokens_decoder.values()),
        *(part["type"] != "NFC" for part in _parts(backend.normalizer, "normalizers")),
        *(part["type"] not in ("ByteLevel", "TemplateProcessing") or part.get("trim_offsets") for part in post),
    )
    match [] if any(changes_text) else _parts(backend.pre_tokenizer, "pretokenizers"):
        case [{"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}]:
            return _GPT_2
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
        ]:
            return pattern if pattern in WORD_PATTERNS else None
    return None


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """Return a component of a tokenizer as its file has it; the parts of a sequence."""
    if component is None:
        return []
    written = json.loads(component.__getstate__())
    return written[name] if written["type"] == "Sequence" else [written]
