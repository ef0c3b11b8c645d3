"""Texts that a model scores as a whole: tokenized as `tokenizer(text)` or `tokenizer(text, text_pair)` does.

The special tokens are those that the tokenizer adds to one text or to a pair. Only the last token of a sequence, where
its score is read, counts as trained; the loss finds the labels in `Example.targets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation
from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.label_masking import IGNORE_INDEX, Encoded
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextTemplate:
    """A text, unchanged. `SpecialTokens` adds those of the tokenizer."""

    name = "text"

    def render(self, conversation: Conversation) -> Rendered:
        """Return the text of the only turn."""
        text = conversation.messages[0].content
        return Rendered(text, ((0, len(text)),))


class SpecialTokens:
    """The special tokens that a tokenizer puts before, between and after one or two texts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find them in the tokens of short texts. Raises UserError for a tokenizer that changes the texts' tokens."""
        texts = ["a b", "c d"]
        plain = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        self._parts = [
            _between(tokenizer(*texts[:count]).input_ids, plain[:count], type(tokenizer).__name__) for count in (1, 2)
        ]

    def join(self, sides: Sequence[Encoded]) -> Encoded:
        """Return one sequence of one or two tokenized texts."""
        parts = self._parts[len(sides) - 1]
        ids = [np.array(parts[0], dtype=np.int32)]
        for side, after in zip(sides, parts[1:], strict=True):
            ids += [side.input_ids, np.array(after, dtype=np.int32)]
        joined = np.concatenate(ids)
        return Encoded(joined, joined.copy(), sum(side.straddling for side in sides))


def _between(ids: list[int], texts: Sequence[list[int]], name: str) -> list[list[int]]:
    """Return the tokens before, between and after the tokens of some texts."""
    parts = []
    done = 0
    for text in texts:
        starts = range(done, len(ids) - len(text) + 1)
        start = next((start for start in starts if ids[start : start + len(text)] == text), None)
        if start is None:
            raise UserError(
                f"{name} tokenizes a text otherwise with special tokens than without them.",
                hint="Use another tokenizer, or rows with `messages`, which the chat template renders.",
            )
        parts.append(ids[done:start])
        done = start + len(text)
    return [*parts, ids[done:]]


def labelled_at_end(side: Encoded) -> Encoded:
    """Return a sequence whose last token is the only labelled one. Raises BadRow for one of less than two tokens."""
    if len(side.input_ids) < 2:
        raise BadRow("no trained token", f"{len(side.input_ids)} tokens")
    labels = np.full_like(side.labels, IGNORE_INDEX)
    labels[-1] = side.input_ids[-1]
    return side._replace(labels=labels)
