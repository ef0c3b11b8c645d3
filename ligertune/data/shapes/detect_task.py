"""Choose the task that fits a data set, for `ligertune recipe init`."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from ligertune.data.rows.row_kind import DetectedTask, other_row_kinds
from ligertune.data.rows.sources import RecordStream, files_of
from ligertune.data.shapes.sample_columns import SampleColumns

if TYPE_CHECKING:
    from ligertune.planning.options import DatasetOptions

FIRST_ROWS = 100  # by which the task is recognised


def detect_task(spec: DatasetOptions) -> DetectedTask | None:
    """Return the task that fits the first rows of local data; None for a hub data set, and for data of no rows.

    Raises UserError for a file that cannot be read.
    """
    if not files_of(spec):
        return None
    records = list(islice(RecordStream(spec), FIRST_ROWS))
    first = [record for record in records if record.row]
    if not first:
        return None
    sample = SampleColumns(first)
    for kind in other_row_kinds():
        if found := kind.detect(sample, first, spec):
            return found
    return DetectedTask("sft", "has rows to fine-tune on")
