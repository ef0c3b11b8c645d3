"""RowKind: one kind of rows (conversations, pairs, texts with labels), as one value that a feature's folder registers.

A feature defines ROWS, its kinds by name, in its module `data`. Code outside `features/` asks the kind that the run's
task names, and knows no kind but conversations.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ligertune.data.rows.formats import FORMATS, Format
from ligertune.errors import UserError
from ligertune.recipe.feature import feature_packages

if TYPE_CHECKING:
    from ligertune.data.examples import Block
    from ligertune.data.rows.data_files import Record
    from ligertune.data.shapes.sample_columns import SampleColumns
    from ligertune.data.templates.whole_texts import TextTemplate
    from ligertune.planning.options import DataOptions, DatasetOptions
    from ligertune.recipe.section import Section


@dataclass(frozen=True)
class FirstRows:
    """The first records of a data set, by which its format is recognised.

    format: of the recipe, a name or auto. path: of the data set, for errors. problem_type: see RowKind.
    """

    records: Sequence[Record]
    format: str
    path: str
    problem_type: str | None = None

    @cached_property
    def columns(self) -> set[str]:
        """Return the columns that any of the records has."""
        return {column for record in self.records for column in record.row}

    @property
    def found(self) -> str:
        """Return the columns for an error."""
        return ", ".join(sorted(self.columns)) or "none"


class TargetNames(Protocol):
    """What the targets of examples stand for: names of labels, or numbers."""

    @property
    def about(self) -> str:
        """Return a sentence on the targets and what they were inferred from."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on the targets for the user."""

    def as_dict(self) -> dict[str, Any]:
        """Return the targets for the JSON report."""

    def words(self, targets: Sequence[float]) -> str:
        """Return the targets of an example for people."""


@dataclass(frozen=True)
class DetectedTask:
    """The task that fits a data set.

    settings: values of recipe keys; columns: `data.datasets[].columns`; why: the end of a sentence about the data.
    """

    task: str
    why: str
    settings: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    variant: str = ""  # " with KEY: VALUE", if the data decide on more than the task

    @property
    def choice(self) -> str:
        """What the user would write."""
        return f"task: {self.task}{self.variant}"


@dataclass(frozen=True)
class RowKind:
    """One kind of rows. The defaults of the functions are those of conversations.

    noun: the rows, in the plural. setting: the line of a recipe that trains on them.
    """

    name: str
    noun: str
    setting: str
    formats: tuple[Format, ...]

    # ---- how the rows are read
    # Return the format of a data set, whose `parse` makes the sequences of an example from a record. Raises UserError.
    # None: the recognition of conversations.
    recognise: Callable[[FirstRows], Format] | None = None
    # Raise UserError for settings that these rows do not allow.
    check: Callable[[DataOptions], None] = lambda data: None
    # For what no model that reads images is trained, to complete "is not trained"; empty: rows may have images.
    without_files: str = ""
    # A model scores each sequence at its last token: no answer is looked for, and the whole text counts.
    whole_texts: bool = False
    # Return the template of rows that are texts, unchanged; None: data.prompt_template, or that of the format.
    text_template: Callable[[str, Format], TextTemplate | None] = lambda prompt_template, format: None

    # ---- targets of examples
    # Return the problem that the recipe names for the targets, before the rows are read; None: the rows decide.
    problem_type: Callable[[Section | None], str | None] = lambda section: None
    # Return the data sets with numbers as targets, and what these stand for, once all data sets are loaded:
    # (blocks of training and then of evaluation data, their reports, number of training sets, section of the recipe).
    resolve: Callable[..., tuple[list[Block], TargetNames]] | None = None

    # ---- what such rows mean under another task
    # Raise UserError if the columns are those of rows that nobody means to train on as conversations.
    refuse: Callable[[SampleColumns, str], None] = lambda sample, path: None
    # Raise UserError for conversations that other columns make such rows: (sample, path, format, renamed columns).
    refuse_format: Callable[[SampleColumns, str, Format, dict[str, str]], None] = lambda *found: None
    # Return a sentence about columns of conversations that only these rows use: (format, columns that are not read).
    note: Callable[[Format, Sequence[str]], str] = lambda format, unread: ""
    # Return the task that fits data of these rows, for `init`.
    detect: Callable[[SampleColumns, Sequence[Record], DatasetOptions], DetectedTask | None] = lambda *found: None
    # What to do about dropped rows, as a sentence, by the reason.
    remedies: Mapping[str, str] = field(default_factory=dict)


# Not in a feature's folder: several features train on them.
CONVERSATIONS = RowKind("conversations", "conversations", "task: sft", FORMATS)


@cache
def _packages() -> tuple[str, ...]:
    """Return the dotted names of the packages of features that bring kinds of rows."""
    return tuple(name for name, part in feature_packages().items() if part.brings_rows)


@cache
def row_kinds() -> dict[str, RowKind]:
    """Return name -> kind of rows: conversations, and then those of features, in the features' order."""
    found = {CONVERSATIONS.name: CONVERSATIONS}
    for package in _packages():
        found |= importlib.import_module(f"{package}.data").ROWS
    return found


def other_row_kinds() -> list[RowKind]:
    """Return the kinds of rows that features bring."""
    return [kind for kind in row_kinds().values() if kind is not CONVERSATIONS]


def row_code() -> list[Path]:
    """Return the folders of the features that bring rows: examples depend on their code."""
    files = [importlib.import_module(package).__file__ for package in _packages()]
    return [Path(file).parent for file in files if file is not None]  # None: of a package without an __init__.py


def check_columns(columns: Collection[str]) -> None:
    """Raise UserError for a rename to a column that no format reads."""
    formats = [row for kind in row_kinds().values() for row in kind.formats]
    # `thread` of oasst is made of the rows of a message tree, and is no column of a data set
    known = sorted({column for row in formats if row.name != "oasst" for column in row.required + row.optional})
    for column in columns:
        if column not in known:
            raise UserError(
                f"data.datasets[].columns: no format reads a column `{column}`.",
                hint=f"Write {{our name: the data set's name}}; our names are {', '.join(known)}.",
            )
