"""Rows that a model scores as a whole: texts with labels or numbers, and pairs whose chosen answer scores higher."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ligertune.data.rows.data_files import Record
from ligertune.data.rows.formats import Format
from ligertune.data.rows.pairs import PAIR_FORMATS, PairTask, recognise_pairs
from ligertune.data.rows.row_kind import DetectedTask, FirstRows, RowKind
from ligertune.data.shapes.recognise_shape import holds_answers, renamed_records
from ligertune.data.shapes.sample_columns import SampleColumns
from ligertune.data.templates.whole_texts import TextTemplate
from ligertune.errors import UserError
from ligertune.features.scores.label_formats import (
    LABEL_COLUMNS,
    LABEL_FORMATS,
    TEXT_COLUMNS,
    LabelFormat,
    recognise_labels,
)
from ligertune.features.scores.label_kinds import MULTI, REGRESSION, SINGLE
from ligertune.features.scores.labels import LabelSet, note_unseen, resolve_labels, wanted_problem

if TYPE_CHECKING:
    from ligertune.data.dataset_report import DatasetReport
    from ligertune.data.examples import Block
    from ligertune.features.scores.recipe import ClassificationSpec
    from ligertune.planning.options import DataOptions, DatasetOptions

# names that published data sets give to a column of labels, and to the text
_LABEL_NAMES = (
    "label", "labels", "sentiment", "class", "category", "intent", "emotion", "toxicity", "toxic", "stars", "rating",
    "score", "topic", "target", "polarity", "airline_sentiment", "spam", "is_spam", "is_duplicate", "class index",
    "class_index", "label_text", "language", "type",
)  # fmt: skip
_TEXT_NAMES = (*(names[0] for names in TEXT_COLUMNS if len(names) == 1), "body", "comment", "message", "document",
               "description", "sms", "statement", "utterance", "headline",
               "comment_text", "review_text", "review_body", "sentence_text", "tweet_text", "full_text")  # fmt: skip
_ROW_IDS = ("id", "_id", "idx", "index", "uid", "unnamed: 0", "")
# A column that is not called `label` is one of labels only if its values repeat: a score of 100 rows does not.
_MOST_LABELS = 20
_MOST_DISTINCT = 0.5
# problem of one label per row; rows with lists of labels are multi-label
_PROBLEMS = {"names": SINGLE, "booleans": SINGLE, "ids": SINGLE, "values": REGRESSION}


def _check(data: DataOptions) -> None:
    """Raise UserError for settings that rows to score do not have."""
    # names of labels get their ids, in sorted order, once all rows are read
    if data.streaming:
        raise UserError(
            "data.streaming: texts with labels and pairs of texts cannot be streamed.",
            hint="Write data.streaming: false.",
        )


def _text_template(prompt_template: str, format: Format) -> TextTemplate | None:
    """Return the template of texts to classify; None for conversations, and for texts in a chat template."""
    assert isinstance(format, LabelFormat)  # of `LABEL_FORMATS`, as all formats of these rows
    if not format.texts:
        return None
    # the tokenizer joins two texts by its own special tokens; a chat template has no place for the second
    if prompt_template == "alpaca" or (prompt_template != "auto" and len(format.texts) == 2):
        raise UserError(
            f"data.prompt_template: {prompt_template} is not for rows of format {format.name}, which are used "
            "unchanged.",
            hint="Write auto" + (", or chat to put the text into a user turn." if len(format.texts) == 1 else "."),
        )
    return TextTemplate() if prompt_template == "auto" else None


def _resolve(
    blocks: Sequence[Block], reports: Sequence[DatasetReport], n_training: int, options: ClassificationSpec
) -> tuple[list[Block], LabelSet]:
    """Return the data sets with ids in place of the names of labels, and the labels of all.

    n_training: the first of the data sets are those of the training data, the others of the evaluation data.
    """
    blocks, labels = resolve_labels(blocks, reports, options)
    return blocks, note_unseen(labels, blocks[:n_training], blocks[n_training:])


def _note(format: Format, unread: Sequence[str]) -> str:
    if format.name == "text" and "label" in unread:
        return "Labels of texts are learned with task: classification."
    return ""


def _detect(sample: SampleColumns, first: Sequence[Record], spec: DatasetOptions) -> DetectedTask | None:
    """Return the task of texts with a label, with the columns that need other names."""
    # a label next to an answer is about the answer, or is not what is learned
    if holds_answers(sample, first, spec):
        return None
    label = next((name for name in sample.spelled(_LABEL_NAMES) if _is_label(sample, name)), None)
    if label is None:
        return None
    columns = {} if label in LABEL_COLUMNS else {"label": label}
    format = _label_format(columns, first, spec.path)
    texts = _text_columns(sample, label)
    # a column whose name a format reads comes first; without one, the first name that is often that of a text
    if format is None and texts:
        columns["text"] = texts[0]
        format = _label_format(columns, first, spec.path)
    if format is None:
        return None
    labels = format.labels
    problem = MULTI if labels.many and labels.kind != "values" else _PROBLEMS[labels.kind]
    what = columns.get("text") or " and ".join(format.texts) or "a conversation"
    settings = {"classification.problem_type": problem}
    return DetectedTask("classification", f"has a text ({what}) and a label ({label})", settings, columns)


def _text_columns(sample: SampleColumns, label: str) -> list[str]:
    """Return the columns that can be the text: those with the name of one, or the only other column."""
    if texts := [name for name in sample.spelled(_TEXT_NAMES) if name != label and sample.is_text(name)]:
        return texts
    others = [name for name in sample.names if name != label and name.lower() not in _ROW_IDS]
    return others if len(others) == 1 and sample.is_text(others[0]) else []


def _is_label(sample: SampleColumns, name: str) -> bool:
    values = [str(value) for value in sample.values(name)]
    if not values:
        return False
    distinct = len(set(values))
    return name in LABEL_COLUMNS or distinct <= min(_MOST_LABELS, max(2, _MOST_DISTINCT * len(values)))


def _label_format(columns: dict[str, str], first: Sequence[Record], path: str) -> LabelFormat | None:
    try:
        return recognise_labels(FirstRows(renamed_records(first, columns), "auto", path))
    except UserError:
        return None


TEXTS = RowKind(
    name="texts",
    noun="texts with a label",
    setting="task: classification",
    formats=LABEL_FORMATS,
    recognise=recognise_labels,
    check=_check,
    without_files="to score texts",
    whole_texts=True,
    text_template=_text_template,
    problem_type=wanted_problem,
    resolve=_resolve,
    note=_note,
    detect=_detect,
    remedies={
        "label of another kind": "Repair the labels, or write classification.problem_type if most first rows mislead."
    },
)
# A margin is what the scores of the two answers should differ by: only a loss on scores can use it.
_PAIR_TASK = PairTask(
    needs="task: reward needs pairs",
    labels_hint="Texts with a label are trained on with task: classification.",
    reads_margin=True,
)
# Without `detect`: `init` writes the other task that trains on pairs, and names this one next to it.
REWARD_PAIRS = RowKind(
    name="reward_pairs",
    noun="pairs",
    setting="task: reward",
    formats=PAIR_FORMATS,
    recognise=partial(recognise_pairs, _PAIR_TASK),
    check=_check,
    without_files="to score texts",
    whole_texts=True,
)
ROWS = {kind.name: kind for kind in (TEXTS, REWARD_PAIRS)}
