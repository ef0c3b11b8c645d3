"""Label masking: tokenize a rendered text once, as a whole, and label the tokens of its trained spans.

A token is trained if it begins inside a trained span. A token that begins in the prompt and reaches into the answer
(Qwen merges the line break of "assistant\\n" with those that an answer begins with) is not trained: at inference the
prompt is given, so the model could not generate that token. `straddling` counts such tokens.

Texts are tokenized in batches and labelled as one array. The ends of a span are looked up by character: fetching the
offsets of all tokens and calling numpy for each text took half as long as tokenizing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ligertune.data.bad_rows import BadRow
from ligertune.data.templates.control_tokens import ControlTokens, Rendered, Span
from ligertune.data.templates.words import WordTokens, word_tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
_BATCH = 1000  # texts that the tokenizer gets at once: enough for all cores, and its results stay small


class Encoded(NamedTuple):
    """A tokenized example. `labels` are not shifted; the first is never trained, because nothing precedes it."""

    input_ids: np.ndarray  # (T,) int32
    labels: np.ndarray  # (T,) int32
    straddling: int

    @property
    def trained(self) -> np.ndarray:
        """The ids of the tokens that are trained."""
        return self.labels[self.labels != IGNORE_INDEX]

    def cut(self, start: int, stop: int) -> Encoded:
        """Return a copy of the tokens [start, stop). Straddling tokens are counted with the whole example."""
        input_ids = self.input_ids[start:stop].copy()
        labels = self.labels[start:stop].copy()
        labels[:1] = IGNORE_INDEX
        return Encoded(input_ids, labels, 0)


class TokenizedText(NamedTuple):
    """The tokens of a text without BOS and EOS. `trained` are ranges of tokens."""

    input_ids: list[int]
    trained: list[Span]
    straddling: int


class Encoder:
    """Tokenizes and labels rendered texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokenizer("", add_special_tokens=False)  # sets the backend to neither pad nor truncate
        self._backend = tokenizer.backend_tokenizer
        self._control = ControlTokens(tokenizer)
        self._words = word_tokenizer(tokenizer)
        # Without a pre-tokenizer (Llama 2) BPE caches whole texts, which do not repeat: 126 MiB more in
        # scripts/bench streaming. `_resize_cache` is a private method of tokenizers.
        resize = getattr(self._backend.model, "_resize_cache", None)
        if resize is not None and self._backend.pre_tokenizer is None:
            resize(0)

    def encode(self, texts: Sequence[Rendered]) -> Iterator[Encoded | BadRow]:
        """Yield one Encoded for each text, in order, or the reason why there is none."""
        for first in range(0, len(texts), _BATCH):
            batch = texts[first : first + _BATCH]
            found = [self._mark(text) for text in batch]
            left = [place for place, marked in enumerate(found) if marked is None]
            encodings = self._backend.encode_batch([batch[place].text for place in left], add_special_tokens=False)
            for place, encoding in zip(left, encodings, strict=True):
                found[place] = mark_tokens(batch[place], encoding)
            pairs = zip(batch, found, strict=True)
            labelled = _label([(text, marked) for text, marked in pairs if isinstance(marked, TokenizedText)])
            yield from (marked if isinstance(marked, BadRow) else next(labelled) for marked in found)

    def _mark(self, text: Rendered) -> TokenizedText | BadRow | None:
        """Tokenize and mark one text by its own path; None if the tokenizer is needed."""
        if text.literal:
            try:
                return mark_tokens_by_offsets(text, *self._control.tokenize(text))
            except BadRow as bad:
                return bad
        tokens = self._words.tokens(text.text) if self._words else None
        return mark_word_tokens(text, tokens) if tokens else None


def mark_word_tokens(rendered: Rendered, tokens: WordTokens) -> TokenizedText:
    """As mark_tokens, for a text that was tokenized word by word."""
    trained = []
    straddling = 0
    for start, end in rendered.trained:
        if end > start:
            inside, n_straddling = tokens.first_from(start)
            trained.append((inside, tokens.first_from(end)[0]))
            straddling += n_straddling
    return TokenizedText(tokens.ids, trained, straddling)


def mark_tokens(rendered: Rendered, encoding: Encoding) -> TokenizedText:
    """Find the tokens that begin in each trained span, and count those that begin before it and reach into it."""
    n_tokens = len(encoding)
    last = len(rendered.text)
    trained = []
    straddling = 0
    for start, end in rendered.trained:
        if n_tokens == 0 or end <= start:
            continue
        first = encoding.char_to_token(start)
        stop = n_tokens if end == last else encoding.char_to_token(end)
        if first is None or stop is None:  # a character that no token stands for
            return mark_tokens_by_offsets(rendered, encoding.ids, encoding.offsets)
        inside = _first_from(encoding, first, start, n_tokens)
        straddling += max(inside - first, 0)
        trained.append((inside, _first_from(encoding, stop, end, n_tokens)))
    return TokenizedText(encoding.ids, trained, straddling)


def _first_from(encoding: Encoding, near: int, character: int, n_tokens: int) -> int:
    """Return the first token that begins at `character` or after it, searching from the token `near`."""
    while near > 0 and _begin(encoding, near - 1) >= character:
        near -= 1
    while near < n_tokens and _begin(encoding, near) < character:
        near += 1
    return near


def _begin(encoding: Encoding, token: int) -> int:
    """Return the first character of a token."""
    span = encoding.token_to_chars(token)
    assert span is not None  # only special tokens that the tokenizer adds have no characters, and it adds none here
    return span[0]


def mark_tokens_by_offsets(rendered: Rendered, ids: list[int], offsets: Sequence[Span]) -> TokenizedText:
    """As mark_tokens, from the offsets of all tokens: slower, but right for any offsets."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(ids), dtype=bool)
    straddling = 0
    for start, end in rendered.trained:
        inside |= (starts >= start) & (starts < end)
        straddling += int(((starts < start) & (ends > start)).sum())
    changes = np.flatnonzero(np.diff(inside, prepend=False, append=False)).reshape(-1, 2)
    return TokenizedText(ids, [(start, stop) for start, stop in changes.tolist()], straddling)


def _label(texts: Sequence[tuple[Rendered, TokenizedText]]) -> Iterator[Encoded]:
    """Add BOS and EOS, label all texts in one array, and yield each text's part of it."""
    parts = []
    places = []
    ends = []
    total = 0
    for rendered, marked in texts:
        bos, eos = ([] if token is None else [token] for token in (rendered.bos, rendered.eos))
        parts += [bos, marked.input_ids, eos]
        total += len(bos)
        places += [(total + start, total + stop) for start, stop in marked.trained]
        total += len(marked.input_ids)
        places += [(total, total + len(eos))] if rendered.trains_eos else []
        total += len(eos)
        ends.append(total)
    input_ids = np.concatenate([np.zeros(0, dtype=np.int32), *(np.array(ids, dtype=np.int32) for ids in parts)])
    trained = np.zeros(total, dtype=bool)
    for start, stop in places:
        trained[start:stop] = True
    bounds = np.array([0, *ends])
    trained[bounds[:-1][np.diff(bounds) > 0]] = False  # the first token of a text: nothing precedes it
    labels = np.where(trained, input_ids, np.int32(IGNORE_INDEX))
    for (_, marked), start, stop in zip(texts, [0, *ends], ends, strict=False):
        yield Encoded(input_ids[start:stop], labels[start:stop], marked.straddling)
