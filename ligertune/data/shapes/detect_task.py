"""Detection of the task that fits data by its columns: preference pairs, answers with a label, texts with a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from ligertune.data.rows.conversation import ROLES
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.label_formats import LABEL_COLUMNS, TEXT_COLUMNS, LabelFormat, recognise_labels
from ligertune.data.rows.preference_formats import recognise_preferences
from ligertune.data.rows.sources import RecordStream, find_files
from ligertune.data.shapes.column_names import PROMPT_NAMES, renamed_row
from ligertune.data.shapes.recognise_shape import recognise_shape
from ligertune.data.shapes.refuse_preferences import PAIR_NAMES, YES_NO
from ligertune.data.shapes.sample_columns import SampleColumns
from ligertune.errors import UserError

if TYPE_CHECKING:
    from ligertune.planning.options import DatasetOptions

_ROWS = 100  # first rows that are read
# names that published data sets give to a column of labels, and to the text
_LABEL_NAMES = (
    "label", "labels", "sentiment", "class", "category", "intent", "emotion", "toxicity", "toxic", "stars", "rating",
    "score", "topic", "target", "polarity", "airline_sentiment", "spam", "is_spam", "is_duplicate", "class index",
    "class_index", "label_text", "language", "type",
)  # fmt: skip
_VOTE_NAMES = ("label", "kto_tag", "desirable", "is_desirable", "thumbs_up", "is_good", "good", "preferred", "accepted")
_TEXT_NAMES = (*(names[0] for names in TEXT_COLUMNS if len(names) == 1), "body", "comment", "message", "document",
               "description", "sms", "statement", "utterance", "headline",
               "comment_text", "review_text", "review_body", "sentence_text", "tweet_text", "full_text")  # fmt: skip
# A column that is not called `label` is one of labels only if its values repeat: a score of 100 rows does not.
_MOST_LABELS = 20
_MOST_DISTINCT = 0.5
_PROBLEMS = {"names": "single_label_classification", "ids": "single_label_classification", "values": "regression"}


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
    found = _pairs(sample, first, spec.path) or _votes(spec, sample, first)
    if found is None and not _is_fine_tuning(spec, sample, first):
        found = _labels(sample, first, spec.path)
    return found or DetectedTask("sft", "has rows to fine-tune on")


def _pairs(sample: SampleColumns, first: Sequence[Record], path: str) -> DetectedTask | None:
    """Return the task of pairs of a chosen and a rejected answer, with the columns that need other names."""
    names = next((names for names in PAIR_NAMES if set(names) <= sample.names), None)
    if names is None:
        return None
    columns = {ours: name for ours, name in zip(("chosen", "rejected"), names, strict=True) if ours != name}
    if not _fits_pairs(columns, first, path):
        # texts need a prompt, which may have another name: it is rendered by the chat template
        prompts = [name for name in sample.spelled(PROMPT_NAMES) if sample.is_text(name)]
        candidates = [{**columns, "question": name} for name in prompts]
        columns = next((one for one in candidates if _fits_pairs(one, first, path)), columns)
    settings = {"preference.loss_type": "sigmoid"}
    return DetectedTask("dpo", f"has the columns {names[0]} and {names[1]}, which are pairs", settings, columns)


def _fits_pairs(columns: dict[str, str], first: Sequence[Record], path: str) -> bool:
    try:
        recognise_preferences("pairs", "auto", _renamed(first, columns), path)
    except UserError:
        return False
    return True


def _votes(spec: DatasetOptions, sample: SampleColumns, first: Sequence[Record]) -> DetectedTask | None:
    """Return the task of answers with a label that says whether they are good."""
    for name in sample.spelled(_VOTE_NAMES):
        values = {str(value).strip().lower() for value in sample.values(name)}
        if not values or not values <= YES_NO:
            continue
        columns = {} if name in LABEL_COLUMNS or name == "kto_tag" else {"label": name}
        try:
            recognise_preferences("labelled", spec.format, _renamed(first, columns), spec.path)
        except UserError:
            continue
        settings = {"preference.loss_type": "kto"}
        why = f"has answers, and a column {name} that says which are good"
        return DetectedTask("dpo", why, settings, columns, variant=" with preference.loss_type: kto")
    return None


def _is_fine_tuning(spec: DatasetOptions, sample: SampleColumns, first: Sequence[Record]) -> bool:
    """Return whether the rows hold answers, next to which a label is not what is learned."""
    if "completions" in sample and "labels" in sample:
        return True  # labels of steps: no task trains on them, and the reader says so
    for name in ("messages", "conversations"):
        roles = {ROLES.get(role) for role in sample.roles(name)}
        if roles and "assistant" not in roles:
            return False  # questions without answers
    try:
        return not recognise_shape(spec, "conversations", first, spec.path).format.raw
    except UserError:
        return False


def _labels(sample: SampleColumns, first: Sequence[Record], path: str) -> DetectedTask | None:
    """Return the task of texts with a label, with the columns that need other names."""
    label = next((name for name in sample.spelled(_LABEL_NAMES) if _is_label(sample, name)), None)
    if label is None:
        return None
    columns = {} if label in LABEL_COLUMNS else {"label": label}
    format = _label_format(columns, first, path)
    texts = [name for name in sample.spelled(_TEXT_NAMES) if name != label and sample.is_text(name)]
    if format is None and texts:
        columns["text"] = texts[0]
        format = _label_format(columns, first, path)
    if format is None:
        return None
    labels = format.labels
    problem = "multi_label_classification" if labels.many and labels.kind != "values" else _PROBLEMS[labels.kind]
    what = columns.get("text") or " and ".join(format.texts) or "a conversation"
    settings = {"classification.problem_type": problem}
    return DetectedTask("classification", f"has a text ({what}) and a label ({label})", settings, columns)


def _is_label(sample: SampleColumns, name: str) -> bool:
    values = [str(value) for value in sample.values(name)]
    if not values:
        return False
    distinct = len(set(values))
    return name in LABEL_COLUMNS or distinct <= min(_MOST_LABELS, max(2, _MOST_DISTINCT * len(values)))


def _label_format(columns: dict[str, str], first: Sequence[Record], path: str) -> LabelFormat | None:
    try:
        return recognise_labels("auto", _renamed(first, columns), path)
    except UserError:
        return None


def _renamed(first: Sequence[Record], columns: dict[str, str]) -> list[Record]:
    if not columns:
        return list(first)
    return [record._replace(row=renamed_row(record.row, columns)) for record in first]
