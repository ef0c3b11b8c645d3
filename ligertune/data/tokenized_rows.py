"""Rows of token ids that another program made: checked, freed of padding, and split at the ends of their documents.

A token is trained if its label is not -100 and all masks of the row are 1. Labels are not shifted, as in transformers.
Lists that do not fit together are an error of the program that wrote them, so they stop the run, and are not dropped.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.data.bad_rows import BadRow
from ligertune.data.templates.label_masking import IGNORE_INDEX, Encoded
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = "input_ids"
# of Axolotl, TRL and transformers; the mask of attention also says which tokens are padding
LABEL_COLUMNS = ("labels", "loss_mask", "assistant_masks", "completion_mask")
MASKS = ("attention_mask", *LABEL_COLUMNS[1:])
BOUNDS = ("position_ids", "seq_lengths")
TOKEN_COLUMNS = (TOKENS, *LABEL_COLUMNS, "attention_mask", *BOUNDS)


@dataclass(frozen=True)
class TokenReader:
    """Reads the rows of one data set. n_ids: as in token_documents; label_columns: those that every row must have."""

    n_ids: int
    label_columns: frozenset[str]

    @staticmethod
    def of(tokenizer: PreTrainedTokenizerBase, columns: Collection[str]) -> TokenReader:
        """Return the reader of rows with these columns, made by this tokenizer."""
        return TokenReader(1 + max(tokenizer.get_vocab().values()), frozenset(LABEL_COLUMNS) & frozenset(columns))

    def documents(self, row: dict[str, Any], source: str) -> list[Encoded]:
        """Return the documents of a row, as token_documents does."""
        return token_documents(dict.fromkeys(self.label_columns) | row, source, self.n_ids)


def token_documents(row: dict[str, Any], source: str, n_ids: int) -> list[Encoded]:
    """Return the documents of a row, without padding.

    n_ids: ids are below this number. Raises BadRow for a row without tokens, and UserError, which begins with `source`,
    for lists that do not fit together and for ids that the tokenizer does not have.
    """
    ids = _numbers(row, TOKENS, source)
    if ids is None or not len(ids):
        raise BadRow("no text" if ids is not None else "missing value", f"`{TOKENS}`")
    # without its labels or mask a row would be trained as a whole
    if empty := [name for name in LABEL_COLUMNS if name in row and row[name] is None]:
        raise BadRow("missing value", f"`{empty[0]}`")
    _check_ids(ids, TOKENS, source, n_ids)
    real = _mask(row, "attention_mask", source, len(ids))
    labels = _labels(row, ids, source, n_ids)
    for name in MASKS:
        labels = np.where(_mask(row, name, source, len(ids)), labels, IGNORE_INDEX)
    starts = _starts(row, source, real)
    places = np.flatnonzero(real)
    if not len(places):
        raise BadRow("no text", "`attention_mask` is 0 everywhere")
    gaps = places[1:][(np.diff(places) > 1) & ~starts[places[1:]]]
    if len(gaps):
        raise _error(source, f"`attention_mask` is 0 before token {gaps[0]}, in the middle of a document")
    documents = np.split(places, np.flatnonzero(starts[places])[1:])
    return [_document(ids[document], labels[document]) for document in documents]


def _document(ids: np.ndarray, labels: np.ndarray) -> Encoded:
    return Encoded(ids.astype(np.int32), labels.astype(np.int32), 0).cut(0, len(ids))


def _labels(row: dict[str, Any], ids: np.ndarray, source: str, n_ids: int) -> np.ndarray:
    """Return the labels of a row (T,): those it has, or its tokens."""
    labels = _numbers(row, "labels", source, len(ids))
    if labels is None:
        return ids
    trained = labels != IGNORE_INDEX
    _check_ids(labels[trained], "labels", source, n_ids)
    # a label that is the next token predicts the one after it: the model shifts labels itself
    is_next = (labels[:-1] == ids[1:])[trained[:-1]]
    if len(is_next) > 1 and is_next.all() and (labels != ids)[trained].any():
        raise _error(source, "`labels` are shifted: each is the token after its own", "Write labels[i] = input_ids[i].")
    return labels


def _mask(row: dict[str, Any], name: str, source: str, length: int) -> np.ndarray:
    """Return a mask of booleans (T,), all true if the row has none."""
    values = _numbers(row, name, source, length)
    if values is None:
        return np.ones(length, dtype=bool)
    wrong = values[(values != 0) & (values != 1)]
    if len(wrong):
        raise _error(source, f"`{name}` holds {wrong[0]}", "Write 1 and 0; boundaries of documents are `seq_lengths`.")
    return values == 1


def _starts(row: dict[str, Any], source: str, real: np.ndarray) -> np.ndarray:
    """Return which tokens begin a document (T,). real: (T,) the tokens that are no padding."""
    starts = np.zeros(len(real), dtype=bool)
    lengths = _numbers(row, "seq_lengths", source)
    if lengths is not None:
        if (lengths < 1).any() or lengths.sum() != len(real):
            raise _error(source, f"`seq_lengths` add up to {lengths.sum()}, and `{TOKENS}` has {len(real)}")
        starts[np.cumsum(lengths) - lengths] = True
    positions = _numbers(row, "position_ids", source, len(real))
    if positions is None:
        return starts
    places = np.flatnonzero(real)
    found = positions[places]
    expected = np.concatenate([[0], found[:-1] + 1])
    wrong = places[(found != 0) & (found != expected)]
    if len(wrong):
        raise _error(source, f"`position_ids` jump to {positions[wrong[0]]} at token {wrong[0]}", "Count from 0.")
    begins = np.zeros(len(real), dtype=bool)
    begins[places[found == 0]] = True
    if lengths is not None and (begins != starts)[real].any():
        raise _error(source, "`position_ids` and `seq_lengths` say different documents", "Leave one of them out.")
    return begins


def _numbers(row: dict[str, Any], name: str, source: str, length: int | None = None) -> np.ndarray | None:
    """Return a list of whole numbers as int64 (T,), or None if the row has none. length: that it must have."""
    value = row.get(name)
    if value is None:
        return None
    try:
        value = json.loads(value) if isinstance(value, str) else value  # text: a cell of a csv file
        numbers = np.array(value if value != [] else (), dtype=None if value else np.int64)
    except (ValueError, RecursionError):  # no JSON, or lists of different lengths
        numbers = np.array(None)
    if numbers.ndim != 1 or numbers.dtype.kind not in "bi":
        raise _error(source, f"`{name}` is no list of whole numbers", "Write one list for each row.")
    if length is not None and len(numbers) != length:
        raise _error(source, f"`{name}` has {len(numbers)} numbers, and `{TOKENS}` has {length}")
    return numbers.astype(np.int64)


def _check_ids(ids: np.ndarray, name: str, source: str, n_ids: int) -> None:
    wrong = ids[(ids < 0) | (ids >= n_ids)]
    if len(wrong):
        what = f"`{name}` holds {wrong[0]}, and the tokenizer's ids are 0 to {n_ids - 1}"
        raise _error(source, what, "Name the tokenizer that made the rows in model.tokenizer.path.")


def _error(source: str, what: str, hint: str = "Write the rows again.") -> UserError:
    return UserError(f"{source}: {what}.", hint=hint)
