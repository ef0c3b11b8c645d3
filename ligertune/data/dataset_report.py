"""Report on one data set: what it was recognised as, its rows, and whether too many of them were dropped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ligertune.data.bad_rows import COLUMN_REASONS, DROP_REASONS, LENGTH_REASONS, REPAIRED_REASONS
from ligertune.data.rows.row_kind import row_kinds
from ligertune.errors import UserError, plural

if TYPE_CHECKING:
    from ligertune.planning.options import DataOptions

WARN_SHARE = 0.05  # share of dropped rows from which they are a warning


@dataclass(frozen=True)
class DatasetReport:
    """What one data set was recognised as, and its numbers.

    columns: what is read under another name, as {our name: the data set's}, beyond `data.datasets[].columns`. unread:
    columns that are not read. note: a sentence for the user, or empty. cached: it was prepared before. sample: the
    numbers are those of its first rows, because it is streamed. label_kind, many_labels, label_width, label_evidence,
    class_names: of the labels of texts, as the format's `report` returns them.
    """

    path: str
    format: str
    template: str
    rows_read: int
    examples: int
    dropped: dict[str, int]  # by DROP_REASONS, the most frequent first
    first_dropped: dict[str, str]  # reason -> source of the first such row
    columns: dict[str, str] = field(default_factory=dict)
    unread: Sequence[str] = ()
    note: str = ""
    cached: bool = False
    sample: bool = False
    label_kind: str = ""
    many_labels: bool = False
    label_width: int = 0
    label_evidence: str = ""
    class_names: tuple[str, ...] = ()

    @property
    def dropped_share(self) -> float:
        """Dropped rows / rows read."""
        return sum(self.dropped.values()) / max(self.rows_read, 1)

    def with_note(self, sentence: str) -> DatasetReport:
        """Return this report with a further sentence for the user."""
        return replace(self, note=f"{self.note} {sentence}".strip())

    def warning(self, data: DataOptions) -> str | None:
        """Return a sentence if many rows are dropped, with the key to change; else None."""
        if self.dropped_share < WARN_SHARE:
            return None
        allowed = " Training is refused: data.max_dropped allows fewer." if self._exceeds(data) else ""
        return f"{self._account()} {remedy(self.dropped, data)}{allowed}"

    def check_dropped(self, data: DataOptions) -> None:
        """Raise UserError if more rows are dropped than `data.max_dropped` allows."""
        if self._exceeds(data):
            enough = math.ceil(100 * self.dropped_share) / 100
            raise UserError(
                f"{self._account()} data.max_dropped: {data.max_dropped:g} allows fewer.",
                hint=f"{remedy(self.dropped, data)} To train on the rest, write data.max_dropped: {enough:g}.",
            )

    def _exceeds(self, data: DataOptions) -> bool:
        return self.dropped_share > data.max_dropped

    def _account(self) -> str:
        rows = f"the first {plural(self.rows_read, 'row')}" if self.sample else plural(self.rows_read, "row")
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items())
        number = sum(self.dropped.values())
        first = self.first_dropped[next(iter(self.dropped))]
        verb = "is" if number == 1 else "are"
        share = f"{100 * self.dropped_share:.0f} %"
        first = first.replace(f"{self.path}:", "line ")
        return f"{self.path}: {number} of {rows} ({share}) {verb} dropped: {reasons}, the first at {first}."


def remedy(dropped: dict[str, int], data: DataOptions) -> str:
    """Return what to change against the most frequent reason."""
    reason = next(iter(dropped))
    if reason == "too long":
        return f"Raise data.max_length (now {data.max_length}), or write data.on_overlength: truncate."
    if reason in LENGTH_REASONS:
        return f"Raise data.max_length (now {data.max_length})."
    if reason == "too large":
        return f"Raise data.max_record_bytes (now {data.max_record_bytes})."
    if reason == "several exchanges":
        return "Write data.prompt_template: chat."
    ways = ["Repair or remove these rows"]
    if reason in COLUMN_REASONS:
        ways.append("name the columns or the format in data.datasets[]")
    if reason in REPAIRED_REASONS:
        ways.append("write data.datasets[].on_bad_row: repair")
    advice = f"{', or '.join(ways)}."
    for kind in row_kinds().values():
        advice = kind.remedies.get(reason, advice)
    return f"{reason[0].upper()}{reason[1:]}: {DROP_REASONS[reason]}. {advice}"
