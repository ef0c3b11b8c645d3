"""Rendered text to token ids and labels: tokenised once, as a whole, the trained characters mapped to tokens.

A token is trained if it begins inside a trained span. One that begins in the prompt and reaches into the answer (Qwen
merges the line break of "assistant\\n" with those an answer begins with) is not: at inference the prompt is given, and
such a token could not be generated. Those are counted as `straddling`.

Texts are tokenised in batches and labelled as one array. A trained span is looked up by the two characters at its ends:
to fetch the offsets of every token and to call numpy for each text took half as long as the tokenising itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ligertune.data.rows.conversation import BadRow
from ligertune.data.templates.control_tokens import ControlTokens, Rendered, Span
from ligertune.data.templates.words import WordTokens, word_tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
_BATCH = 1000  # texts given to the tokenizer at once: it works on all cores, and what it keeps of one batch stays small


class Encoded(NamedTuple):
    """`labels` stand under `input_ids`, not shifted; the first is never trained, for nothing comes before it."""

    input_ids: np.ndarray  # (T,) int32
    labels: np.ndarray  # (T,) int32
    straddling: int
    n_trained: int

    @property
    def last_trained(self) -> int:
        """The id of the last token that is trained."""
        if self.labels[-1] != IGNORE_INDEX:  # nearly always
            return int(self.labels[-1])
        return int(self.labels[self.labels != IGNORE_INDEX][-1])


class TokenizedText(NamedTuple):
    """The tokens of a text without BOS and EOS: `trained` are ranges of them."""

    input_ids: list[int]
    trained: list[Span]
    straddling: int


class Encoder:
    """A tokenizer with what is worth keeping from one batch to the next."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokenizer("", add_special_tokens=False)  # sets the backend to neither pad nor cut
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        self._words = word_tokenizer(tokenizer)
        _forget_whole_texts(tokenizer)

    def encode(self, texts: Sequence[Rendered]) -> Iterator[Encoded | BadRow]:
        """One `Encoded` for each text, in order, or the reason for which there is none."""
        for first in range(0, len(texts), _BATCH):
            batch = texts[first : first + _BATCH]
            marked = self._marked(batch)
            whole = [
                (text, found) for text, found in zip(batch, marked, strict=True) if isinstance(found, TokenizedText)
            ]
            labelled = _labelled(whole)
            yield from (next(labelled) if isinstance(found, TokenizedText) else found for found in marked)

    def _marked(self, batch: Sequence[Rendered]) -> list[TokenizedText | BadRow]:
        """By words where that is possible, else by the tokenizer itself, all such texts at once."""
        found = {place: self._alone(text) for place, text in enumerate(batch)}
        left = [place for place, marked in found.items() if marked is None]
        backend = self._tokenizer.backend_tokenizer
        encodings = backend.encode_batch([batch[place].text for place in left], add_special_tokens=False)
        found |= {place: mark_tokens(batch[place], encoding) for place, encoding in zip(left, encodings, strict=True)}
        return list(found.values())

    def _alone(self, text: Rendered) -> TokenizedText | BadRow | None:
        if text.literal:
            return _literally(text, self._control)
        tokens = self._words.tokens(text.text) if self._words else None
        return mark_word_tokens(text, tokens) if tokens else None


def encode(texts: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded | BadRow]:
    """One `Encoded` for each text, in order, or the reason for which there is none."""
    return Encoder(tokenizer).encode(texts)


def mark_word_tokens(rendered: Rendered, tokens: WordTokens) -> TokenizedText:
    """As `mark`, of a text that was tokenised word by word."""
    trained, straddling = [], 0
    for start, end in rendered.trained:
        if end > start:
            inside, reaching = tokens.first_from(start)
            trained.append((inside, tokens.first_from(end)[0]))
            straddling += reaching
    return TokenizedText(tokens.ids, trained, straddling)


def cut(encoded: Encoded, start: int, stop: int) -> Encoded:
    """A part of an example, in arrays of its own. What straddles is counted with the whole."""
    input_ids, labels = encoded.input_ids[start:stop].copy(), encoded.labels[start:stop].copy()
    labels[:1] = IGNORE_INDEX
    return Encoded(input_ids, labels, 0, int((labels != IGNORE_INDEX).sum()))


def mark_tokens(rendered: Rendered, encoding: Encoding) -> TokenizedText:
    """The tokens that begin in each trained span, and how many begin before it and reach into it."""
    n_tokens, last = len(encoding), len(rendered.text)
    trained, straddling = [], 0
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
    """The first token that begins at `character` or behind it; `near` is about there."""
    while near > 0 and encoding.token_to_chars(near - 1)[0] >= character:
        near -= 1
    while near < n_tokens and encoding.token_to_chars(near)[0] < character:
        near += 1
    return near


def mark_tokens_by_offsets(rendered: Rendered, ids: list[int], offsets: Sequence[Span]) -> TokenizedText:
    """As `mark`, from the characters that each token stands for."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(ids), dtype=bool)
    straddling = 0
    for start, end in rendered.trained:
        inside |= (starts >= start) & (starts < end)
        straddling += int(((starts < start) & (ends > start)).sum())
    changes = np.flatnonzero(np.diff(inside, prepend=False, append=False)).reshape(-1, 2)
    return TokenizedText(ids, [(start, stop) for start, stop in changes.tolist()], straddling)


def _literally(rendered: Rendered, control: ControlTokens) -> TokenizedText | BadRow:
    try:
        return mark_tokens_by_offsets(rendered, *control.tokenised(rendered))
    except BadRow as bad:
        return bad


def _labelled(texts: Sequence[tuple[Rendered, TokenizedText]]) -> Iterator[Encoded]:
    """All texts in one array of ids and one of labels, and of these each text's part."""
    parts, places, ends, total = [], [], [], 0
    for rendered, marked in texts:
        if rendered.bos is not None:
            parts.append([rendered.bos])
            total += 1
        places += [(total + start, total + stop) for start, stop in marked.trained]
        parts.append(marked.input_ids)
        total += len(marked.input_ids)
        if rendered.eos is not None:
            parts.append([rendered.eos])
            places += [(total, total + 1)] if rendered.trained else []
            total += 1
        ends.append(total)
    input_ids = np.concatenate([np.zeros(0, dtype=np.int32), *(np.array(ids, dtype=np.int32) for ids in parts)])
    trained = np.zeros(total, dtype=bool)
    for start, stop in places:
        trained[start:stop] = True
    bounds = np.array([0, *ends])
    trained[bounds[:-1][np.diff(bounds) > 0]] = False  # the first of a text, for nothing comes before it
    labels = np.where(trained, input_ids, np.int32(IGNORE_INDEX))
    counts = np.diff(np.concatenate([[0], np.cumsum(trained)])[bounds]).tolist()
    for (_, marked), start, stop, n_trained in zip(texts, [0, *ends], ends, counts, strict=False):
        yield Encoded(input_ids[start:stop], labels[start:stop], marked.straddling, n_trained)


def _forget_whole_texts(tokenizer: PreTrainedTokenizerBase) -> None:
    """Turn off BPE's memory of the words it has met where nothing cuts texts into words, as in Llama 2's.

    It would hold thousands of texts that do not come again (126 MiB more in scripts/bench_streaming).
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    resize = getattr(getattr(backend, "model", None), "_resize_cache", None)  # tokenizers' own name, not promised
    if resize is not None and backend.pre_tokenizer is None:
        resize(0)
