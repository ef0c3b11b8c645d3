"""Rendered text to token ids and labels: tokenised once, as a whole, the trained characters mapped to tokens.

A token is trained if it begins inside a trained span. One that begins in the prompt and reaches into the answer (Qwen
merges the line break of "assistant\\n" with those an answer begins with) is not: at inference the prompt is given, and
such a token could not be generated. Those are counted as `straddling`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ligertune.data.control import ControlTokens, Rendered
from ligertune.data.conversation import BadRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORE_INDEX = -100
_BATCH = 1000  # texts given to the tokenizer at once: it works on all cores, and the offsets of one batch stay small


class Encoded(NamedTuple):
    """`labels` stand under `input_ids`, not shifted; the first is never trained, for nothing comes before it."""

    input_ids: np.ndarray  # (T,) int32
    labels: np.ndarray  # (T,) int32
    straddling: int


def encode(texts: Sequence[Rendered], tokenizer: PreTrainedTokenizerBase) -> Iterator[Encoded | BadRow]:
    """One `Encoded` for each text, in order, or the reason for which there is none."""
    control = ControlTokens(tokenizer)
    for first in range(0, len(texts), _BATCH):
        batch = texts[first : first + _BATCH]
        tokens = tokenizer(
            [rendered.text for rendered in batch],
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,  # it would warn of texts longer than the model: data.max_length decides that
        )
        for rendered, ids, offsets in zip(batch, tokens.input_ids, tokens.offset_mapping, strict=True):
            yield _literally(rendered, control) if rendered.literal else _labelled(rendered, ids, offsets)


def _literally(rendered: Rendered, control: ControlTokens) -> Encoded | BadRow:
    try:
        return _labelled(rendered, *control.tokenised(rendered))
    except BadRow as bad:
        return bad


def _labelled(rendered: Rendered, tokens: list[int], offsets: list[tuple[int, int]]) -> Encoded:
    input_ids = np.array(tokens, dtype=np.int32)
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    trained = np.zeros(len(tokens), dtype=bool)
    straddling = 0
    for start, end in rendered.trained:
        trained |= (starts >= start) & (starts < end)
        straddling += int(((starts < start) & (ends > start)).sum())
    if rendered.bos is not None:
        input_ids, trained = np.insert(input_ids, 0, rendered.bos), np.insert(trained, 0, False)
    if rendered.eos is not None:
        input_ids, trained = np.append(input_ids, rendered.eos), np.append(trained, bool(rendered.trained))
    labels = np.where(trained, input_ids, IGNORE_INDEX).astype(np.int32)
    labels[:1] = IGNORE_INDEX
    return Encoded(input_ids.astype(np.int32), labels, straddling)
