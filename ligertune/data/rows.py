"""One data set's path from a record to labelled examples: converted, rendered, tokenised, cut to length, and counted.

It depends on the record, the recipe and the tokenizer alone, so it runs as well in another process or on a stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ligertune.data.conversation import OVERLENGTH, REASONS, BadRow
from ligertune.data.encode import IGNORE_INDEX, Encoded, encode
from ligertune.data.examples import Example
from ligertune.data.render import Rendered, choose_template
from ligertune.data.sources import Record
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.data.formats import Format
    from ligertune.recipe.schema import DatasetSpec, DataSpec


@dataclass
class Tally:
    """What was counted on the way: rows_read == rows that gave examples + sum(dropped.values())."""

    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)
    overlength: int = 0
    truncated: int = 0
    straddling: int = 0
    endless: int = 0  # last answers that are whole and yet end without a special token

    def add(self, later: Tally) -> None:
        """Adds the counts of records that come later in the source."""
        self.rows_read += later.rows_read
        self.dropped += later.dropped
        self.first_dropped = {**later.first_dropped, **self.first_dropped}
        self.overlength += later.overlength
        self.truncated += later.truncated
        self.straddling += later.straddling
        self.endless += later.endless


class RowPath:
    """Records of one data set to examples. It holds no state of its own."""

    def __init__(self, spec: DatasetSpec, data: DataSpec, format: Format, tokenizer: PreTrainedTokenizerBase) -> None:
        self.format = format
        self.template = choose_template(data, format, tokenizer)
        self._spec = spec
        self._data = data
        self._tokenizer = tokenizer
        added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._special = frozenset(tokenizer.all_special_ids).union(added)

    def examples(self, records: Sequence[Record], tally: Tally) -> list[Example]:
        """The examples of these records, in their order; what became of the others is counted in `tally`."""
        tally.rows_read += len(records)
        rendered = self._rendered(records, tally)
        encodings = encode([text for text, _ in rendered], self._tokenizer)
        examples = []
        for (_, source), encoded in zip(rendered, encodings, strict=True):
            try:
                fitting = self._fit(encoded, source, tally)
            except BadRow as bad:
                self._refuse(bad, source, tally)
                continue
            if fitting is encoded:  # not cut
                tally.endless += int(encoded.input_ids[encoded.labels != IGNORE_INDEX][-1]) not in self._special
            tally.straddling += encoded.straddling
            examples.append(Example(fitting.input_ids, fitting.labels, source))
        return examples

    def _rendered(self, records: Sequence[Record], tally: Tally) -> list[tuple[Rendered, str]]:
        """The rows that are in order, each as (text with its spans, source)."""
        rendered = []
        for record in records:
            try:
                text = self.template.render(self.format.convert(record))
                _check_encodable(text.text)
            except BadRow as bad:
                self._refuse(bad, record.source, tally)
            else:
                rendered.append((text, record.source))
        return rendered

    def _fit(self, encoded: Encoded, source: str, tally: Tally) -> Encoded:
        """The example within data.max_length, or the reason for which it is left out."""
        length, data = len(encoded.input_ids), self._data
        if not _is_trained(encoded):
            raise BadRow("no trained token")
        if length <= data.max_length:
            return encoded
        tally.overlength += 1
        if data.on_overlength == "error":
            raise UserError(
                f"{source}: {length} tokens, more than data.max_length: {data.max_length}.",
                hint="Raise it, or let data.on_overlength be drop or truncate.",
            )
        if data.on_overlength == "drop":
            raise BadRow("too long", f"{length} tokens")
        cut = Encoded(encoded.input_ids[: data.max_length], encoded.labels[: data.max_length], encoded.straddling)
        if not _is_trained(cut):
            raise BadRow("cut before the answer", f"{length} tokens")
        tally.truncated += 1
        return cut

    def _refuse(self, bad: BadRow, source: str, tally: Tally) -> None:
        """Drops a row and counts it, or stops, as `on_bad_row` says; what is too long has its own policy."""
        if self._spec.on_bad_row == "error" and bad.reason not in OVERLENGTH:
            raise UserError(
                f"{source}: {bad}: {REASONS[bad.reason]}.",
                hint="Mend the row, or let data.datasets[].on_bad_row be drop.",
            ) from bad
        tally.dropped[bad.reason] += 1
        tally.first_dropped.setdefault(bad.reason, f"{source} ({bad.detail})" if bad.detail else source)


def _is_trained(encoded: Encoded) -> bool:
    return bool((encoded.labels != IGNORE_INDEX).any())


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("broken text", f"U+{ord(text[error.start]):04X}") from error
