"""Kind of the labels of a data set, decided by the majority of its first rows: names, ids, booleans or numbers.

A label that does not fit is dropped as a bad row, and never changes the kind. Where the minority is too large to be bad
rows, nothing is guessed: the data set is refused with the line that decides.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ligertune.data.rows.turns import finite_number
from ligertune.errors import UserError, plural

if TYPE_CHECKING:
    from ligertune.data.rows.data_files import Record

SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
REGRESSION = "regression"
# ids: whole numbers from 0; values: other numbers; indicators: lists of 0 and 1, one for each label
LabelKind = Literal["names", "ids", "booleans", "values", "indicators"]
KIND_WORDS: dict[str, str] = {
    "names": "names", "ids": "whole numbers", "booleans": "booleans", "values": "numbers", "indicators": "0 and 1",
}  # fmt: skip
# Labels of another kind up to this share are bad rows. Above, and up to a half, either reading loses many rows.
BAD_SHARE = 0.1
MAX_LABELS = 2**20  # transformers writes a name of each label into config.json; checkpoints with more are refused
_NUMBER_SIGNS = set("0123456789.,+-eE \t\r\n")
_SEEN = 1000  # labels of one row that are looked at: enough to tell their kind


@dataclass(frozen=True)
class Labels:
    """Kind of the labels of a data set. many: each row has a list. evidence: the rows that decided, for people."""

    kind: LabelKind
    many: bool
    evidence: str
    width: int = 0  # of lists of indicators


def is_name(value: Any) -> bool:
    """Return whether a label is a name: text that is not blank, no missing number (nan, inf) and no list."""
    if not isinstance(value, str) or not value.strip() or _is_list_text(value):
        return False
    try:
        return math.isfinite(float(value))
    except ValueError:
        return True


def read_label(value: Any) -> Any:
    """Return the list in a label that is JSON text of one, as in a cell of a csv file; another label unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def _is_list_text(text: str) -> bool:
    """Return whether a text is a list as Python or numpy writes it, and pandas in a csv: ['a'], ['a' 'b'], [0 1]."""
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return False
    items = text[1:-1].strip()
    return items.endswith(("'", '"')) or not set(items) - _NUMBER_SIGNS


def decide_labels(first: Sequence[Record], column: str, path: str, problem_type: str | None) -> Labels:
    """Return the kind of labels in the first records. problem_type: the recipe's, which decides where two kinds fit.

    Raises UserError, naming `path`, without labels, and for labels of two kinds.
    """
    filled = [(read_label(record.row[column]), record.source) for record in first if record.row.get(column) is not None]
    if not filled:
        raise UserError(f"{path}: the column `{column}` is null in the first rows.", hint="Name another one.")
    shapes = [("lists" if isinstance(value, list | tuple) else "single labels", source) for value, source in filled]
    many = _majority(shapes, column, path, "Give each row one label, or each row a list.") == "lists"
    rows = [(value if many else [value], source) for value, source in filled if isinstance(value, list | tuple) == many]
    found = [(_class_of(one), source) for values, source in rows for one in values[:_SEEN]]
    usable = [(kind, source) for kind, source in found if kind != "unusable"]
    if not usable:
        value, source = filled[0]
        raise UserError(
            f"{path}: the column `{column}` holds no label in the first rows; {source} has {value!r:.40}.",
            hint="A label is a text, a whole number from 0 or another number, one per row or a list.",
        )
    broad = [(kind if kind in ("names", "booleans") else "numbers", source) for kind, source in usable]
    common = _majority(broad, column, path, "Make all labels names, or all labels numbers.")
    width = 0
    kind: LabelKind
    if common == "numbers":
        if many and problem_type != REGRESSION:
            width = _indicator_width([values for values, _ in rows])
        missing = len(first) - len(filled)
        kind = "indicators" if width else _number_kind(found, missing, column, path, problem_type)
    else:
        kind = "names" if common == "names" else "booleans"
    count = sum(_fits(one, kind) for one, _ in usable)
    total = len(found) + len(first) - len(rows)
    return Labels(kind, many, f"column `{column}`, {count:,} of the first {plural(total, 'label')}", width)


def _class_of(value: Any) -> str:
    """Return the class of one label: names, booleans, ids, whole (a float such as 2.0), fractions, or unusable."""
    if isinstance(value, bool):
        return "booleans"
    number = finite_number(value)
    if number is None:
        return "names" if is_name(value) else "unusable"
    if not number.is_integer() or number < 0:
        return "fractions"
    return "whole" if isinstance(value, float) else "ids"


def _fits(found: str, kind: LabelKind) -> bool:
    if kind in ("names", "booleans"):
        return found == kind
    return found in ("ids", "whole", "fractions") if kind == "values" else found in ("ids", "whole")


def _majority(found: Sequence[tuple[str, str]], column: str, path: str, hint: str) -> str:
    """Return what most labels are. Raises UserError if the others are too many to be bad rows."""
    counts = Counter(kind for kind, _ in found)
    kind, number = counts.most_common(1)[0]
    others = len(found) - number
    if others > max(1, BAD_SHARE * len(found)) or others == number:
        first = dict(reversed(found))
        parts = ", ".join(f"{count:,} {name} (first {first[name]})" for name, count in counts.most_common())
        raise UserError(f"{path}: the column `{column}` has labels of several kinds: {parts}.", hint=hint)
    return kind


def _number_kind(
    found: Sequence[tuple[str, str]], missing: int, column: str, path: str, problem_type: str | None
) -> LabelKind:
    """Return ids or values for labels that are mostly numbers. missing: rows whose label is null."""
    counts = Counter(kind for kind, _ in found)
    whole_numbers = counts["ids"] + counts["whole"]
    floats = counts["whole"]
    fractions = counts["fractions"]
    if problem_type == REGRESSION or (fractions and floats + fractions >= counts["ids"]):
        return "values"
    if fractions == 0:
        return _whole_kind(counts, missing + counts["unusable"], column, path, problem_type)
    if problem_type is None and fractions > max(1, BAD_SHARE * (whole_numbers + fractions)):
        source = next(source for kind, source in found if kind == "fractions")
        raise UserError(
            f"{path}: the column `{column}` has {whole_numbers:,} whole numbers, which would be ids, and {fractions:,} "
            f"numbers with a fraction or below 0 (first {source}).",
            hint=f"Write classification.problem_type: {REGRESSION}, or {SINGLE} to drop the latter.",
        )
    return "ids"


def _whole_kind(counts: Counter[str], missing: int, column: str, path: str, problem_type: str | None) -> LabelKind:
    """Return the kind of whole numbers: ids if written so; floats such as 2.0 are numbers, as in transformers."""
    if counts["ids"] >= counts["whole"] or problem_type is not None:
        return "ids"
    if missing:  # pandas turns ids into floats in a column with a missing value
        raise UserError(
            f"{path}: the column `{column}` holds whole numbers written as floats, and "
            f"{plural(missing, 'missing label')}: they can be ids, or numbers to predict.",
            hint=f"Write classification.problem_type: {SINGLE} or {REGRESSION}.",
        )
    return "values"


def _indicator_width(rows: Sequence[Sequence[Any]]) -> int:
    """Return the length of lists that hold 0 or 1 for each label; 0 for other lists.

    Lists of ids differ from them: an id stands once in a list.
    """
    allowed = max(1, BAD_SHARE * len(rows)) if len(rows) > 2 else 0  # bad rows
    width, number = Counter(len(values) for values in rows).most_common(1)[0]
    if width < 2 or len(rows) - number > allowed:
        return 0
    binary = [values for values in rows if len(values) == width and all(_is_binary(one) for one in values)]
    if len(rows) - len(binary) > allowed:
        return 0
    as_floats = any(isinstance(one, float) for values in binary for one in values)
    orders = {tuple(finite_number(one) for one in values) for values in binary}
    return width if width > 2 or as_floats or len(orders) > 1 else 0


def _is_binary(value: Any) -> bool:
    return finite_number(value) in (0.0, 1.0)
