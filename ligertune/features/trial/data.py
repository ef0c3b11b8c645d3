"""Rows of the trial task: texts in the column `clean`."""

from __future__ import annotations

from dataclasses import replace

from ligertune.data.rows.formats import FORMATS, Format
from ligertune.data.rows.row_kind import FirstRows, RowKind

TEXT = next(row for row in FORMATS if row.name == "text")
CLEAN = replace(
    TEXT, name="clean", required=("clean",), read=lambda row, reader: TEXT.read({"text": row["clean"]}, reader)
)


def _recognise(first: FirstRows) -> Format:
    return CLEAN


ROWS = {"clean texts": RowKind("clean texts", "texts", "task: trial", (CLEAN,), recognise=_recognise)}
