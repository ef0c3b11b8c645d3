"""Labels of a classification: from the names and numbers of all data sets to ids, with Hugging Face's names for both.

single_label_classification   one id per text; names get ids in sorted order, whole numbers are ids
multi_label_classification    a list of ids or names per text, or a list of 0.0 and 1.0, one for each label
regression                    one or several numbers per text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ligertune.errors import UserError, plural

if TYPE_CHECKING:
    from ligertune.data.dataset_report import DatasetReport
    from ligertune.data.examples import Block
    from ligertune.planning.options import ClassificationOptions

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
_SHOWN = 10  # labels that a note lists


@dataclass(frozen=True)
class LabelSet:
    """What the scores of a classification stand for. labels: names by id; empty for a regression or ids alone."""

    num_labels: int
    problem_type: str
    labels: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def words(self, targets: Sequence[float]) -> str:
        """Return the labels of a text, or its numbers, for people."""
        if self.problem_type == REGRESSION:
            return ", ".join(f"{value:g}" for value in targets)
        return ", ".join(self.labels[int(i)] if self.labels else f"label {int(i)}" for i in targets) or "no label"

    def resolved(self, options: ClassificationOptions) -> ClassificationOptions:
        """Return the recipe's section with all values."""
        values = {"problem_type": self.problem_type, "num_labels": self.num_labels, "labels": self.labels or None}
        return options.model_copy(update=values)


def resolve_labels(
    blocks: Sequence[Block], reports: Sequence[DatasetReport], options: ClassificationOptions
) -> tuple[list[Block], LabelSet]:
    """Return the data sets' blocks with ids or numbers as targets, and the labels. Raises UserError.

    reports: of the data sets, with the kind of their labels.
    """
    kinds = {(report.label_kind, report.many_labels) for report in reports}
    if len(kinds) > 1:
        found = ", ".join(f"{_kind(report.label_kind, report.many_labels)} in {report.path}" for report in reports)
        raise UserError(f"data.datasets: the labels are {found}.", hint="Give all data sets labels of one kind.")
    ((kind, many),) = kinds
    problem = options.problem_type or _problem_of(kind, many, options)
    _check_problem(problem, kind, many)
    if problem == REGRESSION:
        return list(blocks), _regression(blocks, options)
    if problem == MULTI and kind == "values":
        blocks = [_ids_of_indicators(block, report.path) for block, report in zip(blocks, reports, strict=True)]
    declared = next((report.class_names for report in reports if report.class_names), ())
    names = tuple(options.labels or ()) or (() if kind == "names" else tuple(declared))
    if kind == "names":
        names = names or tuple(sorted({name for block in blocks for name in block.label_names}))
        blocks = [_ids_of_names(block, names) for block in blocks]
    count = _count(blocks, names, options)
    if problem == SINGLE and count < 2:
        raise UserError(
            "classification: all rows have the same label, so there is nothing to tell apart.",
            hint="Give data with at least 2 labels, or write classification.problem_type: regression.",
        )
    return blocks, LabelSet(count, problem, names, (_note(blocks, names, count),))


def _kind(kind: str, many: bool) -> str:
    return f"{'lists of ' if many else ''}{ {'names': 'names', 'ids': 'whole numbers', 'values': 'numbers'}[kind] }"


def _problem_of(kind: str, many: bool, options: ClassificationOptions) -> str:
    """Return the problem that labels of this kind pose, as transformers decides: one score is a regression."""
    if kind == "values" or (options.num_labels == 1 and kind != "names"):
        return REGRESSION
    return MULTI if many else SINGLE


def _check_problem(problem: str, kind: str, many: bool) -> None:
    found = _kind(kind, many)
    if problem == REGRESSION and kind == "names":
        raise UserError(
            f"classification.problem_type: {problem} needs numbers, and the labels are {found}.", hint="Leave it out."
        )
    if problem != REGRESSION and many != (problem == MULTI):
        needs = "lists of labels" if problem == MULTI else "one label per row"
        raise UserError(
            f"classification.problem_type: {problem} needs {needs}, and the labels are {found}.", hint="Leave it out."
        )


def _regression(blocks: Sequence[Block], options: ClassificationOptions) -> LabelSet:
    counts = {int(count) for block in blocks for count in np.unique(block.n_targets)}
    count = options.num_labels or max(counts)
    if counts != {count}:
        raise UserError(
            f"classification.num_labels: {count} numbers are predicted, and a row has {min(counts - {count})}.",
            hint="Give each row as many numbers.",
        )
    return LabelSet(count, REGRESSION, tuple(options.labels or ()))


def _ids_of_indicators(block: Block, path: str) -> Block:
    """Turn rows of 0.0 and 1.0, one for each label, into rows of ids."""
    widths = np.unique(block.n_targets)
    if len(widths) > 1 or not np.isin(block.targets, (0.0, 1.0)).all():
        raise UserError(
            f"{path}: labels that are lists of numbers must hold 0.0 or 1.0 for each label.",
            hint="Write lists of ids or names instead.",
        )
    rows, ids = np.nonzero(block.targets.reshape(len(block), -1))
    counts = np.bincount(rows, minlength=len(block)).astype(np.int32)
    return replace(block, targets=ids.astype(np.float64), n_targets=counts)


def _ids_of_names(block: Block, names: tuple[str, ...]) -> Block:
    place = {name: number for number, name in enumerate(names)}
    if unknown := [name for name in block.label_names if name not in place]:
        raise UserError(
            f"classification.labels: the data has the label {unknown[0]!r}, which the list lacks.",
            hint="Add it, or leave classification.labels out.",
        )
    ids = np.array([place[name] for name in block.label_names] or [0], dtype=np.float64)
    return replace(block, targets=ids[block.targets.astype(np.int64)], label_names=())


def _count(blocks: Sequence[Block], names: tuple[str, ...], options: ClassificationOptions) -> int:
    """Return the number of labels. Raises UserError if an id has no label."""
    highest = int(max((block.targets.max(initial=-1) for block in blocks), default=-1))
    if any((block.targets != np.floor(block.targets)).any() or (block.targets < 0).any() for block in blocks):
        raise UserError(
            "classification.problem_type: labels that are numbers with a fraction or below 0 are no ids.",
            hint="Write classification.problem_type: regression, or name the labels.",
        )
    count = options.num_labels or len(names) or highest + 1
    if names and count != len(names):
        raise UserError(
            f"classification.num_labels: {count}, and the data has {plural(len(names), 'label')} "
            f"({', '.join(names[:_SHOWN])}).",
            hint="Leave it out, or list all names in classification.labels.",
        )
    if highest >= count:
        raise UserError(
            f"classification.num_labels: {count}, and the data has the label {highest}; ids count from 0.",
            hint=f"Write {highest + 1} or more names or labels.",
        )
    return count


def _note(blocks: Sequence[Block], names: tuple[str, ...], count: int) -> str:
    """Return how many texts have each label."""
    found = sum(np.bincount(block.targets.astype(np.int64), minlength=count) for block in blocks)
    shown = [f"{names[i] if names else i} {number:,}" for i, number in enumerate(found[:_SHOWN].tolist())]
    more = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
    unused = int((found == 0).sum())
    without = f"; {unused} of them {'is' if unused == 1 else 'are'} in no row" if unused else ""
    return f"{plural(count, 'label')} by number of texts: {', '.join([*shown, *more])}{without}."
