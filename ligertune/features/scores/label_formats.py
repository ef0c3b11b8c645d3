"""Rows of a classification: a text, a pair of texts or a conversation, and its label, labels or numbers.

The kind of a data set's labels is that of most of its first rows (label_kinds.py), one label per row or a list.
Text that is a number, as in a csv file, is a number. A row with a label of another kind is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation, Message, ParsedRow
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.formats import Format, checked, header_hint
from ligertune.data.rows.row_kind import FirstRows
from ligertune.data.rows.sources import class_names
from ligertune.data.rows.turns import MAX_NUMBER, RowReader, finite_number, parse_tools
from ligertune.errors import UserError
from ligertune.features.scores.label_kinds import MAX_LABELS, Labels, decide_labels, is_name, read_label

if TYPE_CHECKING:
    from ligertune.planning.options import DatasetOptions

LABEL_COLUMNS = ("label", "labels")
NAMES = Labels("names", False, "")


@dataclass(frozen=True)
class LabelFormat(Format):
    """A format of rows with labels. texts: columns of the text or of the two texts; empty for a conversation."""

    texts: tuple[str, ...] = ()
    label: str = "label"
    labels: Labels = NAMES

    def parse(self, record: Record, repairs: list[str] | None = None) -> ParsedRow:
        """Return one conversation, or one for each of two texts, and the row's labels."""
        row = record.row
        reader = RowReader(record.source, repair=repairs is not None)
        reader.refuse_media(row)
        targets = self._targets(read_label(row.get(self.label)))
        if not self.texts:
            return ParsedRow((_without_answer_check(self.read(row, reader), reader, repairs),), targets=targets)
        texts = [reader.text(row.get(column), f"`{column}`") for column in self.texts]
        if not all(text.strip() for text in texts):
            raise BadRow("no text")
        return ParsedRow(tuple(Conversation((Message("user", text),)) for text in texts), targets=targets)

    def report(self, spec: DatasetOptions) -> dict[str, Any]:
        """Return the kind of the labels and the names that the data set declares for them."""
        labels = self.labels
        return {
            "label_kind": labels.kind,
            "many_labels": labels.many,
            "label_evidence": labels.evidence,
            "label_width": labels.width,
            "class_names": list(class_names(spec, self.label)),
        }

    def _targets(self, value: Any) -> tuple[str | float, ...]:
        """Return the labels of a row: names, or numbers. Raises BadRow for another kind than most first rows have."""
        if value is None or (isinstance(value, str) and not value.strip()):
            raise BadRow("no label")
        if isinstance(value, list | tuple) != self.labels.many:
            raise BadRow("label of another kind", f"{value!r:.40}")
        if self.labels.many and len(value) > MAX_LABELS:
            raise BadRow("label is too large", f"a list of {len(value):,}")
        if self.labels.width and len(value) != self.labels.width:
            raise BadRow("label of another kind", f"{len(value)} indicators, not {self.labels.width}")
        return tuple(self._target(one) for one in (value if self.labels.many else [value]))

    def _target(self, value: Any) -> str | float:
        kind = self.labels.kind
        if kind == "names" and is_name(value):
            return value
        if kind == "booleans" and isinstance(value, bool):
            return float(value)
        number = finite_number(value)
        if kind in ("names", "booleans") or number is None:
            raise BadRow("label of another kind", f"{value!r:.40}")
        if kind == "ids" and (number < 0 or not number.is_integer()):
            raise BadRow("label of another kind", f"{value!r:.40}")
        if kind == "indicators" and number not in (0.0, 1.0):
            raise BadRow("label of another kind", f"{value!r:.40}")
        if abs(number) > (MAX_LABELS - 1 if kind == "ids" else MAX_NUMBER):
            raise BadRow("label is too large", f"{value!r:.40}")
        return number


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


def _turns(row: dict[str, Any], reader: RowReader, *, column: str) -> Conversation:
    messages = reader.turns(row, column)
    if row.get("system") and (not messages or messages[0].role != "system"):
        messages.insert(0, Message("system", reader.text(row["system"], "`system`")))
    return Conversation(tuple(messages), parse_tools(row.get("tools")))


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
        LabelFormat("messages_label", (column,), (*_MORE, *LABEL_COLUMNS), "chat", partial(_turns, column=column))
        for column in ("messages", "conversations")
    ),
)  # fmt: skip


def recognise_labels(first: FirstRows) -> LabelFormat:
    """Return the format of data from its first records: columns of texts, column and kind of labels.

    Raises UserError for rows without a text or a label.
    """
    names = list(dict.fromkeys(row.name for row in LABEL_FORMATS))
    if first.format not in ("auto", *names):
        raise UserError(
            f"data.datasets[].format: {first.format} does not fit: task: classification needs texts with a label.",
            hint=f"Write {', '.join(names[:-1])} or {names[-1]}.",
        )
    label = next((column for column in LABEL_COLUMNS if column in first.columns), None)
    if label is None:
        raise UserError(
            f"{first.path}: its columns ({first.found}) lack `label`, which task: classification needs.",
            hint=header_hint(first.columns, first.path)
            or "If it has another name, write data.datasets[].columns: {label: its name}.",
        )
    named = [row for row in LABEL_FORMATS if first.format in ("auto", row.name)]
    fitting = next((row for row in named if set(row.required) <= first.columns), None)
    if fitting is None:
        raise UserError(
            f"{first.path}: its columns ({first.found}) lack a text to classify.",
            hint="Write data.datasets[].columns: {text: its name}; {premise: ..., hypothesis: ...} for two texts.",
        )
    labels = decide_labels(first.records, label, first.path, first.problem_type)
    return replace(fitting, label=label, labels=labels)
