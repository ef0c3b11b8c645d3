"""Rows of a classification: a text, a pair of texts or a conversation, and its label, labels or numbers.

The kind of a data set's labels is that of its first rows: names (text), ids (whole numbers), or values (numbers with a
fraction), one per row or a list. Text that is a number, as in a csv file, is a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ligertune.data.rows.conversation import BadRow, Conversation, Message, ParsedRow
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.formats import Format, checked
from ligertune.data.rows.turns import RowReader, parse_tools
from ligertune.errors import UserError

LABEL_COLUMNS = ("label", "labels")
LabelKind = Literal["names", "ids", "values"]


@dataclass(frozen=True)
class LabelFormat(Format):
    """A format of rows with labels. texts: columns of the text or of the two texts; empty for a conversation."""

    texts: tuple[str, ...] = ()
    label: str = "label"
    kind: LabelKind = "names"
    many: bool = False  # each row has a list of labels

    def parse(self, record: Record, repairs: list[str] | None = None) -> ParsedRow:
        """Return one conversation, or one for each of two texts, and the row's labels."""
        row, reader = record.row, RowReader(record.source, repair=repairs is not None)
        reader.refuse_media(row)
        targets = self._targets(row.get(self.label))
        if not self.texts:
            return ParsedRow((_without_answer_check(self.read(row, reader), reader, repairs),), targets=targets)
        texts = [reader.text(row.get(column), f"`{column}`") for column in self.texts]
        if not all(text.strip() for text in texts):
            raise BadRow("no text")
        return ParsedRow(tuple(Conversation((Message("user", text),)) for text in texts), targets=targets)

    def _targets(self, value: Any) -> tuple[str | float, ...]:
        """Return the labels of a row: names, or numbers. Raises BadRow for another kind than the first rows have."""
        if isinstance(value, list | tuple) != self.many:
            raise BadRow("label of another kind", f"{value!r:.40}")
        return tuple(self._target(one) for one in (value if self.many else [value]))

    def _target(self, value: Any) -> str | float:
        if self.kind == "names" and isinstance(value, str | int | float) and str(value).strip():
            return str(value)
        number = _number(value)
        if self.kind == "names" or number is None:
            raise BadRow("label of another kind", f"{value!r:.40}")
        if self.kind == "ids" and (number < 0 or not number.is_integer()):
            raise BadRow("label of another kind", f"{value!r:.40}")
        return number


def _number(value: Any) -> float | None:
    """Return a number, or text that is one, as float; None for anything else, and for what is not finite."""
    if not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _without_answer_check(conversation: Conversation, reader: RowReader, repairs: list[str] | None) -> Conversation:
    """Return a checked conversation, which may end with a question: it is classified, not answered."""
    messages = conversation.messages
    if not messages or messages[-1].role == "assistant":
        return checked(conversation, reader, repairs)
    answered = Conversation((*messages, Message("assistant", "-")), conversation.tools)
    whole = checked(answered, reader, repairs)
    return replace(whole, messages=whole.messages[:-1])


def _nothing(row: dict[str, Any], reader: RowReader) -> Conversation:
    raise TypeError("rows of texts are not read as a conversation")


def _turns(column: str) -> Any:
    def read(row: dict[str, Any], reader: RowReader) -> Conversation:
        messages = reader.turns(row, column)
        if row.get("system") and (not messages or messages[0].role != "system"):
            messages.insert(0, Message("system", reader.text(row["system"], "`system`")))
        return Conversation(tuple(messages), parse_tools(row.get("tools")))

    return read


# columns of one text, and of two, in data sets of the hub; the first that fits is taken
TEXT_COLUMNS = (
    ("premise", "hypothesis"), ("sentence1", "sentence2"), ("question1", "question2"), ("text1", "text2"),
    ("text", "text_pair"), ("question", "sentence"), ("query", "passage"), ("text",), ("sentence",), ("content",),
    ("review",), ("prompt",), ("question",), ("tweet",), ("title",),
)  # fmt: skip
_MORE = ("system", "tools")
LABEL_FORMATS = (
    *(
        LabelFormat("text_label" if len(texts) == 1 else "texts_label", texts, LABEL_COLUMNS, "plain", _nothing,
                    texts=texts)
        for texts in TEXT_COLUMNS
    ),
    *(
        LabelFormat("messages_label", (column,), (*_MORE, *LABEL_COLUMNS), "chat", _turns(column))
        for column in ("messages", "conversations")
    ),
)  # fmt: skip


def recognise_labels(name: str, first: Sequence[Record], path: str) -> LabelFormat:
    """Return the format of data from its first records: columns of texts, column and kind of labels.

    Raises UserError, naming `path`, for rows without a text or a label.
    """
    columns = {column for record in first for column in record.row}
    found = ", ".join(sorted(columns)) or "none"
    names = list(dict.fromkeys(row.name for row in LABEL_FORMATS))
    if name not in ("auto", *names):
        raise UserError(
            f"data.datasets[].format: {name} does not fit: task: classification needs texts with a label.",
            hint=f"Write {', '.join(names[:-1])} or {names[-1]}.",
        )
    label = next((column for column in LABEL_COLUMNS if column in columns), None)
    if label is None:
        raise UserError(
            f"{path}: its columns ({found}) lack `label`, which task: classification needs.",
            hint="If it has another name, write data.datasets[].columns: {label: its name}.",
        )
    fitting = [row for row in LABEL_FORMATS if name in ("auto", row.name) and set(row.required) <= columns]
    if not fitting:
        raise UserError(
            f"{path}: its columns ({found}) lack a text to classify.",
            hint="Write data.datasets[].columns: {text: its name}; {premise: ..., hypothesis: ...} for two texts.",
        )
    values = [record.row[label] for record in first if record.row.get(label) is not None]
    return replace(fitting[0], label=label, **_kind_of(values, label, path))


def _kind_of(values: Sequence[Any], label: str, path: str) -> dict[str, Any]:
    """Return `kind` and `many` of the labels of the first rows."""
    if not values:
        raise UserError(f"{path}: the column `{label}` is null in the first rows.", hint="Name another one.")
    many = sum(isinstance(value, list | tuple) for value in values) > len(values) // 2
    single = [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]
    numbers = [_number(one) for one in single]
    if any(number is None for number in numbers):
        return {"kind": "names", "many": many}
    are_floats = any(
        isinstance(one, float) or not number.is_integer() for one, number in zip(single, numbers, strict=True)
    )
    return {"kind": "values" if are_floats else "ids", "many": many}


def names_of_classes(features: Any, label: str) -> tuple[str, ...]:
    """Return the names of a ClassLabel feature of `datasets`, or of a list of them; empty for another feature."""
    feature = (features or {}).get(label)
    feature = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else feature)
    return tuple(getattr(feature, "names", None) or ())
