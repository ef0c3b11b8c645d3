"""Labels of a classification: from the names and numbers of all data sets to ids, with Hugging Face's names for both.

single_label_classification   one id per text; names get ids in sorted order, whole numbers are ids
multi_label_classification    a list of ids or names per text, or a list of 0.0 and 1.0, one for each label
regression                    one or several numbers per text
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.errors import UserError, plural
from ligertune.features.scores.label_kinds import KIND_WORDS, MAX_LABELS, MULTI, REGRESSION, SINGLE
from ligertune.features.scores.recipe import ClassificationSpec

if TYPE_CHECKING:
    from ligertune.data.dataset_report import DatasetReport
    from ligertune.data.examples import Block
    from ligertune.recipe.section import Section

_SHOWN = 10  # labels that a note lists
# Without classification.num_labels, ids from _FREE_IDS on need this share of all ids below them in the data: the score
# head has a row for each id, and an id far above the others is a number of another kind (a year, a row's own id).
_FREE_IDS = 1000
_USED_SHARE = 0.1


@dataclass(frozen=True)
class LabelSet:
    """What the scores of a classification stand for. labels: names by id; empty for a regression or ids alone.

    inferred_from: why it is this problem, for people.
    """

    num_labels: int
    problem_type: str
    labels: tuple[str, ...]
    notes: tuple[str, ...] = ()
    inferred_from: str = ""

    @property
    def about(self) -> str:
        """Return the problem, its size and what it was inferred from, in one sentence."""
        noun = "number" if self.problem_type == REGRESSION else "label"
        return f"{self.problem_type} with {plural(self.num_labels, noun)}: {self.inferred_from}."

    def as_dict(self) -> dict[str, Any]:
        """Return the labels for the JSON report."""
        return {
            "problem_type": self.problem_type,
            "num_labels": self.num_labels,
            "labels": list(self.labels),
            "inferred_from": self.inferred_from,
        }

    def words(self, targets: Sequence[float]) -> str:
        """Return the labels of a text, or its numbers, for people."""
        if self.problem_type == REGRESSION:
            return ", ".join(f"{value:g}" for value in targets)
        return ", ".join(self.labels[int(i)] if self.labels else f"label {int(i)}" for i in targets) or "no label"

    def resolved(self, options: ClassificationSpec) -> ClassificationSpec:
        """Return the recipe's section with all values."""
        values = {"problem_type": self.problem_type, "num_labels": self.num_labels, "labels": self.labels or None}
        return options.model_copy(update=values)


def wanted_problem(options: Section | None) -> str | None:
    """Return the problem that the recipe asks for: one score is a regression, as in transformers. None: not said."""
    if not isinstance(options, ClassificationSpec):
        return None
    if options.problem_type is None and options.num_labels == 1:
        return REGRESSION
    return options.problem_type


def resolve_labels(
    blocks: Sequence[Block], reports: Sequence[DatasetReport], options: ClassificationSpec
) -> tuple[list[Block], LabelSet]:
    """Return the data sets' blocks with ids or numbers as targets, and the labels. Raises UserError.

    reports: of the data sets, with the kind of their labels.
    """
    kind, many = _common_kind(reports)
    problem = options.problem_type or _problem_of(kind, many, options)
    _check_problem(problem, kind, many)
    why = _why(reports, options)
    if problem == REGRESSION:
        return list(blocks), replace(_regression(blocks, options), inferred_from=why)
    found = list(blocks)
    if kind in ("values", "indicators") and many:
        found = [_ids_of_indicators(block, report.path) for block, report in zip(blocks, reports, strict=True)]
    declared = () if kind == "names" else dict.fromkeys(name for report in reports for name in report.class_names)
    names = tuple(options.labels or declared)
    if kind == "names":
        names = names or tuple(sorted({name for block in found for name in block.label_names}))
        found = [_ids_of_names(block, names) for block in found]
    else:
        found = [_ids_by_name(block, report, names) for block, report in zip(found, reports, strict=True)]
    width = next((report.label_width for report in reports if kind == "indicators"), 0)
    count = _count(found, names, width, options)
    if problem == SINGLE and count < 2:
        raise UserError(
            f"classification: all rows have the same label, so there is nothing to tell apart{_dropped(reports)}.",
            hint="Give data with at least 2 labels, or write classification.problem_type: regression.",
        )
    return found, LabelSet(count, problem, names, (_note(found, names, count), *_similar(names)), why)


def _common_kind(reports: Sequence[DatasetReport]) -> tuple[str, bool]:
    """Return the kind of the labels of all data sets, and whether rows have lists. Raises UserError for several."""
    kinds = {(report.label_kind, report.many_labels) for report in reports}
    if len(kinds) > 1:
        found = ", ".join(f"{_kind(report.label_kind, report.many_labels)} in {report.path}" for report in reports)
        raise UserError(
            f"data.datasets: the labels are {found}.",
            hint="Give all data sets labels of one kind, or write classification.problem_type if all are numbers.",
        )
    return next(iter(kinds))


def _kind(kind: str, many: bool) -> str:
    return f"{'lists of ' if many else ''}{KIND_WORDS[kind]}"


def _why(reports: Sequence[DatasetReport], options: ClassificationSpec) -> str:
    """Return what the problem was inferred from."""
    if options.problem_type:
        return "classification.problem_type"
    if options.num_labels == 1:
        return "classification.num_labels is 1"
    parts = (f"{report.path} has {_kind(report.label_kind, report.many_labels)} ({report.label_evidence})"
             for report in reports)  # fmt: skip
    return "; ".join(dict.fromkeys(parts))


def _dropped(reports: Sequence[DatasetReport]) -> str:
    """Return how many rows were dropped for their label, and the first of them, to be appended to an error."""
    reasons = ("no label", "label of another kind", "label is too large")
    found = [(report.dropped[reason], report.first_dropped[reason], reason)
             for report in reports for reason in reasons if reason in report.dropped]  # fmt: skip
    if not found:
        return ""
    return f" ({plural(sum(count for count, _, _ in found), 'row')} dropped: {found[0][2]}, first {found[0][1]})"


def _problem_of(kind: str, many: bool, options: ClassificationSpec) -> str:
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


def _regression(blocks: Sequence[Block], options: ClassificationSpec) -> LabelSet:
    counts = {int(count) for block in blocks for count in np.unique(block.n_targets)}
    count = options.num_labels or max(counts)
    if counts != {count}:
        other = min(counts - {count})
        source = next(found for block in blocks if (found := _first_source(block, block.n_targets == other)))
        raise UserError(
            f"classification.num_labels: {count} numbers are predicted, and a row has {other} (first {source}).",
            hint="Give each row as many numbers.",
        )
    _check_number_of_labels(count)
    if all((block.targets == blocks[0].targets[0]).all() for block in blocks):
        raise UserError(
            f"classification: all rows have the number {blocks[0].targets[0]:g}, so there is nothing to learn.",
            hint="Give data with other numbers, or name the right column in data.datasets[].columns.",
        )
    return LabelSet(count, REGRESSION, tuple(options.labels or ()))


def _check_number_of_labels(count: int) -> None:
    if count > MAX_LABELS:
        raise UserError(
            f"classification: the data has {count:,} labels, and at most {MAX_LABELS:,} are possible.",
            hint="Name the column of the labels in data.datasets[].columns.",
        )


def _first_source(block: Block, rows: np.ndarray) -> str:
    """Return the file and line of the first of these rows; empty without any. rows: (N,) bool."""
    found = np.flatnonzero(rows)
    return block.source(int(found[0])) if len(found) else ""


def _source_of_target(blocks: Sequence[Block], target: float) -> str:
    """Return the file and line of the first row with this target."""
    for block in blocks:
        row_of = np.repeat(np.arange(len(block)), block.n_targets)
        rows = np.zeros(len(block), dtype=bool)
        rows[row_of[block.targets == target]] = True
        if source := _first_source(block, rows):
            return source
    return ""


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


def _places(found: Sequence[str], names: tuple[str, ...]) -> np.ndarray:
    """Return the id in `names` of each name. Raises UserError for a name that is not there."""
    place = {name: number for number, name in enumerate(names)}
    if unknown := [name for name in found if name not in place]:
        raise UserError(
            f"classification.labels: the data has the label {unknown[0]!r}, which the list lacks.",
            hint="Add it, or leave classification.labels out.",
        )
    return np.array([place[name] for name in found] or [0], dtype=np.float64)


def _ids_of_names(block: Block, names: tuple[str, ...]) -> Block:
    ids = _places(block.label_names, names)
    return replace(block, targets=ids[block.targets.astype(np.int64)], label_names=())


def _ids_by_name(block: Block, report: DatasetReport, names: tuple[str, ...]) -> Block:
    """Turn ids of a data set that declares names into those of the same names in `names`."""
    if not report.class_names:
        return block
    ids = _places(report.class_names, names)
    unnamed = np.setdiff1d(block.targets, np.arange(len(ids)))
    if len(unnamed):
        raise UserError(
            f"{_source_of_target([block], unnamed[0])}: the label {unnamed[0]:g} has no name: {report.path} declares "
            f"{plural(len(ids), 'name')}.",
            hint="Repair the row, or the names of the column.",
        )
    return replace(block, targets=ids[block.targets.astype(np.int64)])


def _count(blocks: Sequence[Block], names: tuple[str, ...], width: int, options: ClassificationSpec) -> int:
    """Return the number of labels. width: of lists of indicators. Raises UserError if an id has no label."""
    highest = int(max((block.targets.max(initial=-1) for block in blocks), default=-1))
    if any((block.targets != np.floor(block.targets)).any() or (block.targets < 0).any() for block in blocks):
        raise UserError(
            "classification.problem_type: labels that are numbers with a fraction or below 0 are no ids.",
            hint="Write classification.problem_type: regression, or name the labels.",
        )
    count = options.num_labels or len(names) or width or highest + 1
    if names and count != len(names):
        raise UserError(
            f"classification.num_labels: {count}, and the data has {plural(len(names), 'label')} "
            f"({', '.join(names[:_SHOWN])}).",
            hint="Leave it out, or list all names in classification.labels.",
        )
    if highest >= count:
        raise UserError(
            f"classification.num_labels: {count}, and the data has the label {highest}; ids count from 0. The first "
            f"row with it is {_source_of_target(blocks, highest)}.",
            hint=f"Write {highest + 1} or more names or labels, or repair the row.",
        )
    _check_number_of_labels(count)
    if not (options.num_labels or names or width):
        _check_ids_are_used(blocks, highest)
    return count


def _check_ids_are_used(blocks: Sequence[Block], highest: int) -> None:
    """Raise UserError if most ids up to the highest are in no row: then it is rather no id."""
    if highest < _FREE_IDS:
        return
    used = len(np.unique(np.concatenate([np.unique(block.targets) for block in blocks])))
    if used < _USED_SHARE * highest:
        raise UserError(
            f"{_source_of_target(blocks, highest)}: the label {highest} would be an id of {highest + 1:,} labels, of "
            f"which only {used:,} are in a row.",
            hint=f"Repair the row, write classification.num_labels: {highest + 1} if these are ids, or write the "
            "labels as text.",
        )


def _note(blocks: Sequence[Block], names: tuple[str, ...], count: int) -> str:
    """Return how many texts have each label."""
    found = np.sum([np.bincount(block.targets.astype(np.int64), minlength=count) for block in blocks], axis=0)
    shown = [f"{_shown(names[i]) if names else i} {number:,}" for i, number in enumerate(found[:_SHOWN].tolist())]
    more = [f"and {count - _SHOWN} more"] if count > _SHOWN else []
    unused = int((found == 0).sum())
    without = f"; {unused} of them {'is' if unused == 1 else 'are'} in no row" if unused else ""
    return f"{plural(count, 'label')} by number of texts: {', '.join([*shown, *more])}{without}."


def _shown(name: str) -> str:
    """Return the name of a label, in quotes if white space around it would be overlooked."""
    return name if name == name.strip() else repr(name)


def _similar(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note on labels that differ in case or white space only, which most often are one."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(" ".join(name.casefold().split()), []).append(name)
    groups = [" and ".join(map(repr, group)) for group in alike.values() if len(group) > 1]
    if not groups:
        return ()
    shown = "; ".join(groups[:_SHOWN])
    return (f"Labels that differ in case or white space only, and are learned as different ones: {shown}.",)


def note_unseen(labels: LabelSet, training: Sequence[Block], evaluation: Sequence[Block]) -> LabelSet:
    """Return the labels with a note on those that only evaluation data have: they cannot be learned."""
    if labels.problem_type == REGRESSION or not (training and evaluation):
        return labels
    learned, asked = (np.unique(np.concatenate([block.targets for block in part])) for part in (training, evaluation))
    unseen = np.setdiff1d(asked, learned)
    if not len(unseen):
        return labels
    shown = ", ".join(labels.words([target]) for target in unseen[:_SHOWN])
    first = _source_of_target(evaluation, unseen[0])
    note = f"{plural(len(unseen), 'label')} in evaluation data without a row in training data: {shown} (first {first})."
    return replace(labels, notes=(*labels.notes, note))
