"""Pairs of a chosen and a rejected answer to one prompt.

The answers of a pair are texts, single turns or lists of turns. A list that begins with a system or user turn is a
whole conversation: the turns that both conversations begin with are the prompt. Only the answers after the prompt are
trained.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation, Message, ParsedRow, Role
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.formats import OTHER_NAMES, Format, FormatType, check_format_name, checked, recognise_format
from ligertune.data.rows.row_kind import FirstRows
from ligertune.data.rows.turns import MAX_NUMBER, RowReader, finite_number, parse_tools, template_kwargs
from ligertune.data.shapes.turn_lists import turns_in
from ligertune.errors import UserError

# the order of the two sequences in an example: losses take the first as the better one
ANSWERS = ("chosen", "rejected")
# label of a single answer, 1 or 0: TRL's and LLaMA-Factory's name
ANSWER_LABELS = ("label", "kto_tag")
SCORE_COLUMNS = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))
_HH_TURN = re.compile(r"\n\n(Human|Assistant):")  # of Anthropic's hh-rlhf


@dataclass(frozen=True)
class PairFormat(Format):
    """A format of pairs. `read` returns the prompt: no turns if it is in both answers.

    reads_margin: the column `margin`, by which the rewards should differ, is read.
    """

    reads_margin: bool = False

    def parse(self, record: Record, repairs: list[str] | None = None) -> ParsedRow:
        """Return the chosen and the rejected conversation. Raises BadRow if neither is better."""
        row = record.row
        reader = RowReader(record.source, repair=repairs is not None)
        reader.refuse_media(row)
        for names in SCORE_COLUMNS:
            # in csv files they are text
            chosen_score, rejected_score = (finite_number(row.get(name)) for name in names)
            if chosen_score is not None and chosen_score == rejected_score:
                raise BadRow("equal scores", f"both {chosen_score:g}")
        prompt = self.read(row, reader)
        sides = _split_prompt(prompt.messages, *(reader.turns_or_text(row, column) for column in ANSWERS))
        shared = prompt.tools, template_kwargs(row)
        chosen, rejected = (checked(Conversation(side, *shared), reader, repairs) for side in sides)
        if chosen == rejected:
            raise BadRow("equal answers")
        return ParsedRow((chosen, rejected), targets=_margin(row) if self.reads_margin else ())


def _margin(row: dict[str, Any]) -> tuple[float, ...]:
    margin = row.get("margin")
    if margin is None or margin == "":  # an empty field of a csv file
        return ()
    number = finite_number(margin)
    if number is None or abs(number) > MAX_NUMBER:
        raise BadRow("margin is not a number", f"{margin!r:.40}")
    return (number,)


def _split_prompt(
    prompt: tuple[Message, ...], chosen: list[Message] | str, rejected: list[Message] | str
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Return both conversations; only the answers after the prompt are trained."""
    if isinstance(chosen, str) and isinstance(rejected, str) and not prompt:
        prompt, chosen, rejected = _texts_without_prompt(chosen, rejected)
    sides = [[Message("assistant", side)] if isinstance(side, str) else side for side in (chosen, rejected)]
    if all(_is_whole(side) for side in sides) and not _continue(sides, prompt):
        # The prompt is in both answers. Only a system turn may be missing there.
        system = prompt[:1] if prompt and prompt[0].role == "system" and sides[0][0].role != "system" else ()
        sides = [[*system, *side] for side in sides]
        shared = _n_equal(*sides)
    else:
        sides = [[*prompt, *side] for side in sides]
        shared = len(prompt)
    marked = [(*(replace(turn, trained=False) for turn in side[:shared]), *side[shared:]) for side in sides]
    return marked[0], marked[1]


def _is_whole(turns: Sequence[Message]) -> bool:
    return bool(turns) and turns[0].role in ("system", "user")


def _continue(sides: Sequence[Sequence[Message]], prompt: tuple[Message, ...]) -> bool:
    """Return whether answers that begin with a user turn come after a prompt that ends with an answer."""
    ends_with_answer = bool(prompt) and prompt[-1].role == "assistant"
    return ends_with_answer and not any(tuple(side[: len(prompt)]) == prompt for side in sides)


def _n_equal(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return how many turns both begin with. The last turn of the shorter conversation is not counted."""
    most = min(len(chosen), len(rejected)) - 1
    return next((number for number in range(most) if chosen[number] != rejected[number]), most)


def _texts_without_prompt(
    chosen: str, rejected: str
) -> tuple[tuple[Message, ...], list[Message] | str, list[Message] | str]:
    """Return (prompt, chosen, rejected) of two texts that begin with the same prompt."""
    if _is_hh(chosen) and _is_hh(rejected):
        return (), _hh_turns(chosen), _hh_turns(rejected)
    both = zip(chosen, rejected, strict=False)
    shared = next((number for number, (a, b) in enumerate(both) if a != b), min(len(chosen), len(rejected)))
    word = re.split(r"\s", chosen[:shared])[-1]  # the beginning of a word that goes on differently
    shared -= len(word) if len(word) < shared else 0
    if chosen[:shared].endswith(" "):  # tokenizers merge a space into the word that follows
        shared -= 1
    prompt = Message("user", chosen[:shared])
    return (prompt,) if prompt.content else (), chosen[shared:], rejected[shared:]


def _is_hh(text: str) -> bool:
    return _HH_TURN.match(f"\n\n{text.lstrip()}") is not None


def _hh_turns(text: str) -> list[Message]:
    """Parse "\\n\\nHuman: ...\\n\\nAssistant: ..."."""
    _, *parts = _HH_TURN.split(f"\n\n{text.lstrip()}")
    roles: list[Role] = ["user" if name == "Human" else "assistant" for name in parts[::2]]
    return [Message(role, content.strip()) for role, content in zip(roles, parts[1::2], strict=True)]


def _prompt(row: dict[str, Any], reader: RowReader, *, column: str | None, is_text: bool = False) -> Conversation:
    """Read the prompt in `column`, turns or with `is_text` also a text, and the optional `system` and `tools`."""
    messages = []
    if column and is_text and row.get(column) is not None:
        prompt = reader.turns_or_text(row, column)
        messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
    elif column and (row.get(column) is not None or isinstance(row.get("chosen"), str)):
        messages = reader.turns(row, column)
    if row.get("system") and (not messages or messages[0].role != "system"):
        messages.insert(0, Message("system", reader.text(row["system"], "`system`")))
    return Conversation(tuple(messages), parse_tools(row.get("tools")))


def _instruction(row: dict[str, Any], reader: RowReader) -> Conversation:
    return Conversation(tuple(reader.instruction(row)))


_MORE = ("system", "tools", "margin", *(name for names in SCORE_COLUMNS for name in names))


def _pairs(name: str, column: str | None, template: Literal["chat", "plain"], *, is_text: bool = False) -> PairFormat:
    required = ANSWERS if column is None else (column, *ANSWERS)
    read = partial(_prompt, column=column, is_text=is_text)
    # UltraFeedback has `messages` next to `prompt`: the chosen conversation
    return PairFormat(name, required, _MORE, template, read, is_fallback=column == "messages")


PAIR_FORMATS = (
    _pairs("prompt_pairs", "prompt", "plain", is_text=True),
    _pairs("question_pairs", "question", "chat", is_text=True),
    PairFormat("alpaca_pairs", ("instruction", *ANSWERS), ("input", "history", *_MORE), "alpaca", _instruction),
    _pairs("sharegpt_pairs", "conversations", "chat"),
    _pairs("messages_pairs", "messages", "chat"),
    _pairs("pairs", None, "plain"),
)


@dataclass(frozen=True)
class PairTask:
    """A task that trains on pairs. needs: the recipe's line and what it needs, as a clause.

    labels_hint: which setting trains on single answers with a label. reads_margin: see PairFormat.
    """

    needs: str
    labels_hint: str
    reads_margin: bool = False


def recognise_pairs(task: PairTask, first: FirstRows) -> PairFormat:
    """Return the format of pairs from the first records: their columns, and whether answers are texts or turns.

    Raises UserError for rows that do not hold what the task needs.
    """
    check_format_name(first.format, PAIR_FORMATS, task.needs)
    _check_has_pairs(task, first)
    format = recognise_format(first.format, first.columns, first.path, PAIR_FORMATS)
    format = replace(format, reads_margin=task.reads_margin)
    answer = first_value("chosen", first.records)
    is_text = isinstance(answer, str) and not (format.name == "pairs" and _is_hh(answer))
    # what two texts begin with is rarely their whole prompt: only the user can say that it is
    if is_text and format.name == "pairs" and first.format == "auto":
        raise _no_prompt(first)
    return plain_or_chat(format, is_text=is_text)


def plain_or_chat(format: FormatType, *, is_text: bool) -> FormatType:
    """Return a format whose answers are texts or turns: turns need the chat template."""
    return replace(format, template="chat") if format.template == "plain" and not is_text else format


def first_value(column: str, records: Sequence[Record]) -> Any:
    """Return the first value of a column that is not null, with turns in JSON text as objects."""
    return next((turns_in(record.row[column]) for record in records if record.row.get(column) is not None), None)


def _check_has_pairs(task: PairTask, first: FirstRows) -> None:
    missing = [f"`{name}`" for name in ANSWERS if name not in first.columns]
    if not missing:
        return
    names = [next((name for name in OTHER_NAMES[ours] if name in first.columns), "its name") for ours in ANSWERS]
    hint = f"If they have other names, write data.datasets[].columns: {{chosen: {names[0]}, rejected: {names[1]}}}."
    # rows with a label hold single answers: no rename makes pairs of them
    if any(name in first.columns for name in ANSWER_LABELS):
        hint = task.labels_hint
    raise UserError(
        f"{first.path}: its columns ({first.found}) lack {' and '.join(missing)}, and {task.needs} of answers.",
        hint=hint,
    )


def _no_prompt(first: FirstRows) -> UserError:
    """Return the error for texts without a prompt column, with the lines that work."""
    prompts = ("input", "query", "problem", "inputs", "user")
    name = next((name for name in prompts if name in first.columns), "its name")
    return UserError(
        f"{first.path}: the columns ({first.found}) lack the prompt of `chosen` and `rejected`, which are texts.",
        hint=f"Write data.datasets[].columns: {{prompt: {name}}}, or {{question: {name}}} for a chat template; or "
        "data.datasets[].format: pairs, if both texts begin with the prompt.",
    )
