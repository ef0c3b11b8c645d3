"""Rows of preferences: pairs of answers, and single answers with a label that says whether they are good (KTO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import ParsedRow
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.formats import FORMATS, Format, check_format_name, recognise_format
from ligertune.data.rows.pairs import (
    ANSWER_LABELS,
    ANSWERS,
    PAIR_FORMATS,
    PairTask,
    first_value,
    plain_or_chat,
    recognise_pairs,
)
from ligertune.data.rows.row_kind import DetectedTask, FirstRows, RowKind
from ligertune.data.shapes.column_names import PROMPT_NAMES
from ligertune.data.shapes.recognise_shape import renamed_records
from ligertune.data.shapes.sample_columns import SampleColumns
from ligertune.errors import UserError
from ligertune.features.preference.refuse_preferences import PAIR_NAMES, YES_NO, refuse_labels, refuse_pairs

if TYPE_CHECKING:
    from ligertune.planning.options import DataOptions, DatasetOptions

# Cells of a csv file are text, and pandas writes 1 as 1.0 in a column with a missing value.
_LABELS = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}
_LABELLED_NEEDS = "preference.loss_type: kto needs answers with a label"
_PAIR_TASK = PairTask(
    needs="task: dpo needs pairs", labels_hint="Answers with a label are trained on with preference.loss_type: kto."
)
# names that published data sets give to a column that says whether the answer is good
_VOTE_NAMES = ("label", "kto_tag", "desirable", "is_desirable", "thumbs_up", "is_good", "good", "preferred", "accepted")


@dataclass(frozen=True)
class LabelledFormat(Format):
    """A format of answers with a label. Only the last answer of a conversation is trained, or the whole completion."""

    def parse(self, record: Record, repairs: list[str] | None = None) -> ParsedRow:
        """Return the conversation and whether its answer is desirable."""
        conversation = self.convert(record, repairs)
        label = next((record.row[name] for name in ANSWER_LABELS if record.row.get(name) is not None), None)
        desirable = _LABELS.get(str(label).strip().lower())
        if desirable is None:
            raise BadRow("no label", f"{label!r:.40}")
        messages = conversation.messages
        # the label is about the last answer: earlier ones would be trained with a label that is not theirs
        if self.name != "prompt_completion":  # whose label is about all of the completion, as in TRL
            messages = (*(replace(turn, trained=False) for turn in messages[:-1]), messages[-1])
        return ParsedRow((replace(conversation, messages=messages),), desirable)


def _labelled(row: Format) -> LabelledFormat:
    """Return a format of conversations with the columns of a label."""
    optional = (*row.optional, *ANSWER_LABELS)
    return LabelledFormat(row.name, row.required, optional, row.template, row.read, is_fallback=row.is_fallback)


# The other formats of conversations have no single answer that a label could be about.
_ANSWER_FORMATS = ("alpaca", "sharegpt", "messages", "prompt_completion", "question_answer")
LABELLED_FORMATS = tuple(_labelled(row) for row in FORMATS if row.name in _ANSWER_FORMATS)


def recognise_labelled(first: FirstRows) -> LabelledFormat:
    """Return the format of answers with a label from the first records. Raises UserError for other rows."""
    check_format_name(first.format, LABELLED_FORMATS, _LABELLED_NEEDS)
    _check_has_labels(first)
    format = recognise_format(first.format, first.columns, first.path, LABELLED_FORMATS)
    return plain_or_chat(format, is_text=isinstance(first_value("completion", first.records), str))


def _check_has_labels(first: FirstRows) -> None:
    if any(name in first.columns for name in ANSWER_LABELS):
        return
    hint = "If it has another name, write data.datasets[].columns: {label: its name}."
    if first.columns >= set(ANSWERS):
        hint = "To train on pairs, write another preference.loss_type than kto."
    raise UserError(
        f"{first.path}: its columns ({first.found}) lack `label`, 1 or 0, which preference.loss_type: kto needs.",
        hint=hint,
    )


def _check(data: DataOptions) -> None:
    """Raise UserError for settings that preferences do not have."""
    # preference.reference: precompute needs all answers before the first step
    if data.streaming:
        raise UserError(
            "data.streaming: preference pairs and answers with a label cannot be streamed.",
            hint="Write data.streaming: false.",
        )
    if data.train_on == "all":
        raise UserError(
            "data.train_on: all is not for preferences: the prompt is no answer that could be preferred.",
            hint="Write data.train_on: assistant, or last for the last turn only.",
        )


def _detect_pairs(sample: SampleColumns, first: Sequence[Record], spec: DatasetOptions) -> DetectedTask | None:
    """Return the task of pairs of a chosen and a rejected answer, with the columns that need other names."""
    names = next((names for names in PAIR_NAMES if set(names) <= sample.names), None)
    if names is None:
        return None
    columns = {ours: name for ours, name in zip(ANSWERS, names, strict=True) if ours != name}
    if not _fits_pairs(columns, first, spec.path):
        # texts need a prompt, which may have another name: it is rendered by the chat template
        prompts = [name for name in sample.spelled(PROMPT_NAMES) if sample.is_text(name)]
        candidates = [{**columns, "question": name} for name in prompts]
        columns = next((one for one in candidates if _fits_pairs(one, first, spec.path)), columns)
    settings = {"preference.loss_type": "sigmoid"}
    return DetectedTask("dpo", f"has the columns {names[0]} and {names[1]}, which are pairs", settings, columns)


def _fits_pairs(columns: dict[str, str], first: Sequence[Record], path: str) -> bool:
    # the reader itself decides, so that `init` writes no columns that `train` refuses
    try:
        recognise_pairs(_PAIR_TASK, FirstRows(renamed_records(first, columns), "auto", path))
    except UserError:
        return False
    return True


def _detect_votes(sample: SampleColumns, first: Sequence[Record], spec: DatasetOptions) -> DetectedTask | None:
    """Return the task of answers with a label that says whether they are good."""
    for name in sample.spelled(_VOTE_NAMES):
        values = {str(value).strip().lower() for value in sample.values(name)}
        # a rating of five stars is a label too, and says nothing about good or bad
        if not values or not values <= YES_NO:
            continue
        columns = {} if name in ANSWER_LABELS else {"label": name}
        try:
            recognise_labelled(FirstRows(renamed_records(first, columns), spec.format, spec.path))
        except UserError:
            continue
        settings = {"preference.loss_type": "kto"}
        why = f"has answers, and a column {name} that says which are good"
        return DetectedTask("dpo", why, settings, columns, variant=" with preference.loss_type: kto")
    return None


PAIRS = RowKind(
    name="pairs",
    noun="preference pairs",
    setting="task: dpo",
    formats=PAIR_FORMATS,
    recognise=partial(recognise_pairs, _PAIR_TASK),
    check=_check,
    without_files="on preferences",
    refuse=refuse_pairs,
    detect=_detect_pairs,
)
LABELLED = RowKind(
    name="labelled",
    noun="answers with a label",
    setting="preference.loss_type: kto",  # the task is that of pairs: this key decides between the two
    formats=LABELLED_FORMATS,
    recognise=recognise_labelled,
    check=_check,
    without_files="on preferences",
    refuse_format=refuse_labels,
    detect=_detect_votes,
)
# Pairs first: data with both answers and a label are pairs.
ROWS = {kind.name: kind for kind in (PAIRS, LABELLED)}
