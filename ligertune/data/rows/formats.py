"""The forms in which data sets write their rows: recognised by their columns, turned into a `Conversation`.

A new form is a row of FORMATS and its function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Literal, NamedTuple

from ligertune.data.rows.conversation import BadRow, Conversation, Message, check_conversation
from ligertune.data.rows.repair_turns import repair_turns
from ligertune.data.rows.sources import Record
from ligertune.data.rows.turns import (
    STRICT,
    RepairingText,
    TextReader,
    list_of,
    message_of,
    parsed_json,
    refuse_media,
    tools_of,
)
from ligertune.errors import UserError


class ParsedRow(NamedTuple):
    """A row that was read, and not yet found to be in order."""

    messages: list[Message]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Format:
    """One way to write a row. `template` is what `prompt_template: auto` renders it with.

    `raw`: the row is one text and no conversation. It is taken as it stands, and is never too long: it is split.
    `gives_way`: with `format: auto`, a row that also fits another format is that one's.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    template: Literal["alpaca", "chat", "plain"]
    read: Callable[[Record, TextReader], ParsedRow]
    raw: bool = False
    gives_way: bool = False

    def convert(self, record: Record) -> Conversation:
        """The row as a conversation that is in order, or a BadRow."""
        refuse_media(record.row, record.source)
        draft = self.read(record, STRICT)
        return Conversation(tuple(draft.messages)) if self.raw else check_conversation(*draft)

    def repair(self, record: Record) -> tuple[Conversation, list[str]]:
        """As `convert`, for a row that may have faults that can be mended; and which it had (`REPAIRS`)."""
        refuse_media(record.row, record.source)
        reading = RepairingText()
        draft = self.read(record, reading)
        if self.raw:
            return Conversation(tuple(draft.messages)), reading.done
        messages, done = repair_turns(draft.messages)
        return check_conversation(messages, draft.tools), list(dict.fromkeys(reading.done + done))


def recognise_format(name: str, columns: Collection[str], path: str) -> Format:
    """The format called `name`; with "auto", the one whose required columns are all there."""
    candidates = [row for row in FORMATS if name in ("auto", row.name)]
    fitting = [row for row in candidates if set(row.required) <= set(columns)]
    if len(fitting) > 1:
        fitting = [row for row in fitting if not row.gives_way] or fitting
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join(sorted(columns)) or "none"
    if fitting:
        names = " and ".join(row.name for row in fitting)
        raise UserError(f"{path}: the columns ({found}) fit {names}.", hint="Say which: data.datasets[].format.")
    nearest = max(candidates, key=lambda row: _likeness(row, columns))
    missing = ", ".join(f"`{column}`" for column in nearest.required if column not in columns)
    form = "are no format that is known; nearest is" if name == "auto" else "do not fit"
    raise UserError(
        f"{path}: its columns ({found}) {form} {nearest.name}, which also needs {missing}.",
        hint="If a column has another name, say so with data.datasets[].columns: {ours: theirs}.",
    )


def check_columns(columns: Collection[str]) -> None:
    """Complains of a rename to a name that no format reads."""
    known = sorted({column for row in FORMATS for column in row.required + row.optional})
    for column in columns:
        if column not in known:
            raise UserError(
                f"data.datasets[].columns: no format reads a column `{column}`.",
                hint=f"Write {{ours: theirs}}; ours is one of {', '.join(known)}.",
            )


def _likeness(row: Format, columns: Collection[str]) -> float:
    best = (max(SequenceMatcher(None, ours, theirs).ratio() for theirs in columns) for ours in row.required)
    return sum(best, start=0.0) / len(row.required) if columns else 0.0


def _alpaca(record: Record, reading: TextReader) -> ParsedRow:
    """`instruction`, `input`, `output`; `system` and `history` (pairs of earlier turns) if they are there."""
    row = record.row
    messages = [Message("system", _optional(row, "system", reading))]
    for pair in list_of(row.get("history"), "`history`"):
        if not (isinstance(pair, list) and len(pair) == 2):
            raise BadRow("not a list of turns", "`history` is not a list of pairs of texts")
        texts = [reading.text(text, "a text of `history`") for text in pair]
        messages += [Message("user", texts[0]), Message("assistant", texts[1])]
    instruction = reading.text(row.get("instruction"), "`instruction`")
    messages.append(Message("user", instruction, input=_optional(row, "input", reading)))
    messages.append(Message("assistant", reading.text(row.get("output"), "`output`")))
    return ParsedRow(messages)


def _conversation(record: Record, reading: TextReader, *, column: str) -> ParsedRow:
    """A list of turns in `column`, each with `from` and `value` or with `role` and `content`."""
    row = record.row
    messages = _turns(row, column, record.source, reading)
    if row.get("system") is not None and (not messages or messages[0].role != "system"):
        messages.insert(0, Message("system", reading.text(row["system"], "`system`")))
    return ParsedRow(messages, tools_of(row.get("tools")))


def _turns(row: dict[str, Any], column: str, source: str, reading: TextReader) -> list[Message]:
    turns = row.get(column)
    if turns is None:
        raise BadRow("missing value", f"`{column}`")
    if isinstance(turns, str):  # a cell of a CSV file
        turns = parsed_json(turns, "not a list of turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("not a list of turns", f"`{column}`")
    return [message_of(turn, source, reading) for turn in turns]


def _prompt_completion(record: Record, reading: TextReader) -> ParsedRow:
    """`prompt` and `completion`: two texts, or two lists of turns, of which those of the completion are trained."""
    row = record.row
    if not isinstance(row.get("prompt"), list):
        prompt = reading.text(row.get("prompt"), "`prompt`")
        return ParsedRow(
            [Message("user", prompt), Message("assistant", reading.text(row.get("completion"), "`completion`"))]
        )
    asked = _turns(row, "prompt", record.source, reading)
    context = [
        Message(turn.role, turn.content, reasoning=turn.reasoning, calls=turn.calls, trained=False) for turn in asked
    ]
    return ParsedRow(context + _turns(row, "completion", record.source, reading), tools_of(row.get("tools")))


def _text(record: Record, reading: TextReader) -> ParsedRow:
    """`text`: raw text, all of it trained."""
    text = reading.text(record.row.get("text"), "`text`")
    if not text.strip():
        raise BadRow("no text")
    return ParsedRow([Message("assistant", text)])


def _optional(row: dict[str, Any], column: str, reading: TextReader) -> str:
    value = row.get(column)
    return "" if value is None else reading.text(value, f"`{column}`")


_CHAT = ("system", "tools", "image", "images")
FORMATS: tuple[Format, ...] = (
    Format("alpaca", ("instruction", "output"), ("input", "system", "history"), "alpaca", _alpaca),
    Format("sharegpt", ("conversations",), _CHAT, "chat", partial(_conversation, column="conversations")),
    Format("llava", ("conversations",), _CHAT, "chat", partial(_conversation, column="conversations"), gives_way=True),
    Format("messages", ("messages",), _CHAT, "chat", partial(_conversation, column="messages")),
    Format("prompt_completion", ("prompt", "completion"), ("tools",), "plain", _prompt_completion, gives_way=True),
    Format("text", ("text",), (), "plain", _text, raw=True, gives_way=True),
)
