"""Detection of the task that fits data by its columns: each kind of rows says whether the data are its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from ligertune.data.rows.conversation import ROLES
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.row_kind import CONVERSATIONS, DetectedTask, other_row_kinds
from ligertune.data.rows.sources import RecordStream, find_files
from ligertune.data.shapes.column_names import renamed_row
from ligertune.data.shapes.recognise_shape import recognise_shape
from ligertune.data.shapes.sample_columns import SampleColumns
from ligertune.errors import UserError

if TYPE_CHECKING:
    from ligertune.planning.options import DatasetOptions

_ROWS = 100  # first rows that are read


def detect_task(spec: DatasetOptions) -> DetectedTask | None:
    """Return the task that fits the first rows of local data; None for a hub data set, and for data of no rows.

    Raises UserError for a file that cannot be read.
    """
    if not find_files(spec.path):
        return None
    first = list(islice(RecordStream(spec), _ROWS))
    first = [record for record in first if record.row]
    if not first:
        return None
    sample = SampleColumns(first)
    for kind in other_row_kinds():
        if found := kind.detect(sample, first, spec):
            return found
    return DetectedTask("sft", "has rows to fine-tune on")


def holds_answers(sample: SampleColumns, first: Sequence[Record], spec: DatasetOptions) -> bool:
    """Return whether the rows hold answers, next to which a label is not what is learned."""
    if "completions" in sample and "labels" in sample:
        return True  # labels of steps: no task trains on them, and the reader says so
    for name in ("messages", "conversations"):
        roles = {ROLES.get(role) for role in sample.roles(name)}
        if roles and "assistant" not in roles:
            return False  # questions without answers
    try:
        return not recognise_shape(spec, CONVERSATIONS, first, spec.path).format.raw
    except UserError:
        return False


def renamed_records(first: Sequence[Record], columns: dict[str, str]) -> list[Record]:
    """Return the records with `columns` applied, a dict of {our name: the data set's name}."""
    if not columns:
        return list(first)
    return [record._replace(row=renamed_row(record.row, columns)) for record in first]
