"""Refusal of preference data under supervised fine-tuning: pairs, votes, answers with a label, and step labels."""

from __future__ import annotations

import re
from itertools import combinations

from ligertune.data.rows.formats import Format
from ligertune.data.rows.pairs import ANSWER_LABELS
from ligertune.data.shapes.column_names import ANSWER_NAMES, PROMPT_NAMES, columns_line
from ligertune.data.shapes.sample_columns import SampleColumns
from ligertune.errors import UserError

# names of the preferred and of the other answer
PAIR_NAMES = (
    ("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_chosen", "response_rejected"),
    ("preferred_output", "non_preferred_output"), ("preferred", "dispreferred"), ("accepted", "rejected"),
    ("better", "worse"), ("response_j", "response_k"), ("better_response", "worse_response"),
    ("chosen", "reject"), ("good", "bad"), ("answer_chosen", "answer_rejected"),
)  # fmt: skip
# names of two answers; another column says which is better
_SIDE = re.compile(
    r"(conversation|response|answer|output|completion|generation|human_ref|summary|candidate)s?_?([ab]|[0-3])\Z",
    re.IGNORECASE,
)
YES_NO = {"true", "false", "1", "0", "1.0", "0.0"}
_DPO = "Write task: dpo to train on the pairs"


def refuse_pairs(sample: SampleColumns, path: str) -> None:
    """Raise UserError for pairs of answers, unless `messages` holds a conversation to train (UltraFeedback)."""
    if {"messages", "completions"} & sample.names == {"completions"} and "labels" in sample:
        raise UserError(
            f"{path}: its columns ({sample.found}) are those of a process reward model, which is not trained.",
            hint="Fine-tuning needs one answer per row.",
        )
    if "messages" in sample or "thread" in sample:
        return
    for names in PAIR_NAMES:
        if set(names) <= sample.names:
            _refuse_pair(sample, path, *names)
    for first, second in combinations(sorted(sample.names), 2):
        sides = [side[1] for name in (first, second) if (side := _SIDE.match(name))]
        if len(sides) == 2 and sides[0] == sides[1]:
            line = _fine_tuning_columns(sample, first)
            hint = f" To fine-tune on one of them, write {columns_line(line)}." if line else ""
            raise UserError(
                f"{path}: `{first}` and `{second}` are two answers to one prompt, and one is preferred.",
                hint=f"task: dpo reads them as columns `chosen` and `rejected`.{hint}",
            )


def _refuse_pair(sample: SampleColumns, path: str, chosen: str, rejected: str) -> None:
    renames = {"chosen": chosen, "rejected": rejected}
    if sample.is_turns("input.messages"):  # OpenAI's preference data
        renames = {"prompt": "input.messages", **renames}
    renames = {ours: name for ours, name in renames.items() if ours != name}
    with_columns = f", with {columns_line(renames)}" if renames else ""
    line = _fine_tuning_columns(sample, chosen)
    hint = f" To fine-tune on the chosen answers, write {columns_line(line)}." if line else ""
    raise UserError(
        f"{path}: its columns ({sample.found}) are those of preference pairs.", hint=f"{_DPO}{with_columns}.{hint}"
    )


def _prompt_column(sample: SampleColumns) -> str:
    if sample.is_turns("input.messages"):
        return "input.messages"
    return next((name for name in sample.spelled((*PROMPT_NAMES, "context", "history")) if sample.values(name)), "")


def _fine_tuning_columns(sample: SampleColumns, answer: str) -> dict[str, str]:
    """Return the columns with which this answer of a pair is fine-tuned on, or none if no columns do that."""
    roles = sample.roles(answer)
    if roles & {"user", "system"}:
        return {"messages": answer}
    if answer in sample.dialogues:
        return {"text": answer}
    prompt = _prompt_column(sample)
    if sample.is_turns(prompt) and (roles or sample.is_text(answer)):
        columns = {"prompt": prompt, "completion": answer}
    elif not prompt or roles or not sample.is_text(answer):
        return {}
    elif prompt == "instruction":
        columns = {"instruction": prompt, "output": answer}
    elif prompt == "prompt":
        columns = {"prompt": prompt, "completion": answer}
    else:
        columns = {"question": prompt, "answer": answer}
    others = [name for name in sample.spelled(ANSWER_NAMES) if name != answer]
    return {ours: name for ours, name in columns.items() if ours != name or others}


def refuse_labels(sample: SampleColumns, path: str, format: Format, columns: dict[str, str]) -> None:
    """Raise UserError for answers with a label that says whether they are good (KTO)."""
    for label in ANSWER_LABELS:
        values = {str(value).strip().lower() for value in sample.values(label)}
        if format.raw or not values or not values <= YES_NO:
            continue
        renames = f" and {columns_line(columns)}" if columns else ""
        raise UserError(
            f"{path}: its answers have a `{label}`, and bad ones would be trained like good ones.",
            hint="Write task: dpo and preference.loss_type: kto to train on the labels"
            + (f", with {columns_line(columns)}" if columns else "")
            + f". To train on every answer alike, write data.datasets[].format: {format.name}{renames}.",
        )
