"""Row formats: recognised by their columns and converted to a Conversation.

To add a format, write its read function and add a row to FORMATS.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation, Message, ParsedRow, Role, check_conversation, repair_turns
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.turns import RowReader, parse_tools, template_kwargs
from ligertune.data.shapes.column_names import ANSWER_NAMES, PROMPT_NAMES, renamed_row
from ligertune.data.shapes.marked_texts import functions_in, parse_marked_text
from ligertune.data.tokenized_rows import TOKEN_COLUMNS
from ligertune.errors import UserError

if TYPE_CHECKING:
    from ligertune.planning.options import DatasetOptions


@dataclass(frozen=True)
class Format:
    """A row format. `template` is the prompt template that `data.prompt_template: auto` selects for it.

    raw: the row is one text, not a conversation. It is used unchanged and split to data.max_length, never dropped for
    its length. tokens: the row holds token ids (tokenized_rows.py), and `read` returns no turns. is_fallback: `format:
    auto` prefers any other format whose columns are there too. by_values: `auto` recognises it by the values of the
    rows, not by its columns. trained_roles: of turns that may have a weight of 1.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    template: Literal["alpaca", "chat", "plain"]
    read: Callable[[dict[str, Any], RowReader], Conversation]
    raw: bool = False
    tokens: bool = False
    is_fallback: bool = False
    by_values: bool = False
    trained_roles: tuple[Role, ...] = ("assistant",)

    def convert(self, record: Record, repairs: list[str] | None = None) -> Conversation:
        """Return the row as a checked conversation. Raises BadRow, and UserError for what no setting allows.

        repairs: a list to which the names of repairs are appended; None repairs nothing.
        """
        reader = RowReader(record.source, repair=repairs is not None, trained_roles=self.trained_roles)
        reader.refuse_media(record.row)
        conversation = self.read(record.row, reader)
        if self.raw:
            if repairs is not None:
                repairs += dict.fromkeys(reader.repairs)
            return conversation
        if record.row.get("chat_template_kwargs"):
            conversation = replace(conversation, chat_template_kwargs=template_kwargs(record.row))
        return checked(conversation, reader, repairs)

    def parse(self, record: Record, repairs: list[str] | None = None) -> ParsedRow:
        """Return what the row holds. Arguments and errors are those of convert."""
        return ParsedRow((self.convert(record, repairs),))

    def report(self, spec: DatasetOptions) -> dict[str, Any]:
        """Return fields of DatasetReport about the rows' targets, as JSON."""
        return {}


@dataclass(frozen=True)
class RowShape:
    """The format of a data set's rows.

    columns: what is read under another name than the format's, as {our name: the data set's}, in addition to
    `data.datasets[].columns`. unread: columns that are not read. note: a sentence on what that changes, or empty.
    """

    format: Format
    columns: dict[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    note: str = ""

    @property
    def about(self) -> dict[str, Any]:
        """What the report on the data set says, as JSON."""
        return {"format": self.format.name, "columns": self.columns, "unread": list(self.unread), "note": self.note}

    def of(self, record: Record) -> Record:
        """Return the record with the format's names."""
        return record._replace(row=renamed_row(record.row, self.columns)) if self.columns else record


FormatType = TypeVar("FormatType", bound=Format)


def checked(conversation: Conversation, reader: RowReader, repairs: list[str] | None) -> Conversation:
    """Return a conversation whose turns are in order. Repair it, and list the repairs, unless `repairs` is None."""
    messages: Sequence[Message] = conversation.messages
    if repairs is not None:
        messages, done = repair_turns(messages)
        repairs += [repair for repair in dict.fromkeys(reader.repairs + done) if repair not in repairs]
    return check_conversation(messages, conversation.tools, conversation.chat_template_kwargs)


def plain_format(columns: Collection[str]) -> Format | None:
    """Return alpaca for data that has its columns and no others, so that nothing else has to be looked at."""
    alpaca = FORMATS[0]
    return alpaca if set(alpaca.required) <= set(columns) <= {*alpaca.required, *alpaca.optional} else None


def _fitting(candidates: list[FormatType], columns: set[str]) -> list[FormatType]:
    """Return the formats whose required columns are there and are not a part of another's; fallbacks come last."""
    complete = [row for row in candidates if set(row.required) <= columns]
    largest = [row for row in complete if not any(set(row.required) < set(other.required) for other in complete)]
    return largest if len(largest) == 1 else [row for row in largest if not row.is_fallback] or largest


def recognise_format(name: str, columns: Collection[str], path: str, formats: Sequence[FormatType] = ()) -> FormatType:
    """Return the format called `name`, or for "auto" the one whose required columns are all in `columns`.

    formats: the formats to choose from; none: FORMATS. If all required columns of one are among those of another, the
    other is chosen. Raises UserError, naming `path`, if the columns fit no format or several.
    """
    every: Sequence[Any] = formats or FORMATS
    candidates = [row for row in every if name == row.name or (name == "auto" and not row.by_values)]
    found = ", ".join(sorted(columns)) or "none"
    fitting = _fitting(candidates, set(columns))
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        names = " and ".join(row.name for row in fitting)
        raise UserError(f"{path}: the columns ({found}) fit {names}.", hint="Choose one in data.datasets[].format.")
    nearest = max(candidates, key=lambda row: _similarity(row, columns))
    missing = ", ".join(f"`{column}`" for column in nearest.required if column not in columns)
    what = "fit no known format; nearest is" if name == "auto" else "do not fit"
    raise UserError(
        f"{path}: its columns ({found}) {what} {nearest.name}, which also needs {missing}.",
        hint=header_hint(columns, path) or _renames(columns, candidates),
    )


def header_hint(columns: Collection[str], path: str) -> str:
    """Return what to write if the columns of a csv file look like its first row; else an empty text."""
    sentences = [column for column in columns if len(column.split()) >= _WORDS_OF_VALUES]
    if not sentences or not re.search(r"\.(csv|tsv)(\.gz|\.zst)?\Z", path, re.IGNORECASE):
        return ""
    return f"If {min(sentences)!r:.60} is no name but a value, write the names of the columns into the first line."


def check_format_name(name: str, formats: Sequence[Format], needs: str) -> None:
    """Raise UserError for a name that is neither auto nor one of these formats. needs: which rows a setting needs."""
    names = ["auto", *(row.name for row in formats)]
    if name not in names:
        raise UserError(
            f"data.datasets[].format: {name} does not fit: {needs}.",
            hint=f"Write {', '.join(names[:-1])} or {names[-1]}.",
        )


_WORDS_OF_VALUES = 4  # a name of so many words is rather a value
# Names of columns in published data sets, by our name; the first that a data set has is taken.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("instruction", "question", "prompt"), PROMPT_NAMES),
    **dict.fromkeys(("output", "answer", "completion"), ANSWER_NAMES),
    "messages": ("conversation", "dialogue", "dialog", "chat", "turns"),
    "chosen": ("chosen_response", "response_chosen", "preferred", "accepted", "better"),
    "rejected": ("rejected_response", "response_rejected", "dispreferred", "worse"),
    "text": ("content", "document", "body", "article"),
}


def _renames(columns: Collection[str], candidates: Collection[Format]) -> str:
    """Return a hint: the `columns` that make one of these formats fit, if their names are known."""
    for row in candidates:
        names = {
            ours: [name for name in (ours, *OTHER_NAMES.get(ours, ())) if name in columns] for ours in row.required
        }
        if all(names.values()):
            renamed = ", ".join(f"{ours}: {found[0]}" for ours, found in names.items() if found[0] != ours)
            return f"Write data.datasets[].columns: {{{renamed}}}."
    return "If a column has another name, write data.datasets[].columns: {our name: its name}."


def _similarity(row: Format, columns: Collection[str]) -> float:
    best = (max(SequenceMatcher(None, name, column).ratio() for column in columns) for name in row.required)
    return sum(best, start=0.0) / len(row.required) if columns else 0.0


def _alpaca(row: dict[str, Any], reader: RowReader) -> Conversation:
    """Read `instruction`, `input`, `output`, and the optional `system` and `history` (pairs of earlier turns)."""
    prompt = reader.instruction(row)
    return Conversation((*prompt, Message("assistant", reader.text(row.get("output"), "`output`"))))


def _conversation(row: dict[str, Any], reader: RowReader, *, column: str) -> Conversation:
    """Read a list of turns in `column`."""
    messages = reader.turns(row, column)
    if row.get("system") is not None and (not messages or messages[0].role != "system"):
        messages.insert(0, Message("system", reader.text(row["system"], "`system`")))
    return Conversation(tuple(messages), parse_tools(row.get("tools")))


def _prompt_completion(row: dict[str, Any], reader: RowReader) -> Conversation:
    """Read `prompt` and `completion`: two texts, or two lists of turns. Only the completion is trained."""
    prompt = reader.turns_or_text(row, "prompt")
    if isinstance(prompt, str):
        return Conversation((Message("user", prompt), Message("assistant", reader.plain_text(row, "completion"))))
    completion = reader.turns_or_text(row, "completion")
    if isinstance(completion, str):
        completion = [Message("assistant", completion)]
    context = [replace(turn, trained=False) for turn in prompt]
    return Conversation((*context, *completion), parse_tools(row.get("tools")))


def _question_answer(row: dict[str, Any], reader: RowReader) -> Conversation:
    """Read `question` and `answer`; with `tools` the answer may be a list of calls (xLAM)."""
    tools = parse_tools(row.get("tools"))
    answer = row.get("answer")
    messages = reader.instruction({**row, "instruction": reader.text(row.get("question"), "`question`")})
    if tools and _are_calls(answer):
        messages.append(reader.message({"from": "function_call", "value": answer}))
    else:
        reasoning = reader.optional(row, "reasoning")
        messages.append(Message("assistant", reader.text(answer, "`answer`"), reasoning=reasoning))
    return Conversation(tuple(messages), tools)


def _are_calls(value: Any) -> bool:
    """Return whether a value is a list of tool calls, as objects or as JSON text."""
    if isinstance(value, str):
        return re.match(r'\s*\[\s*\{\s*"(name|function)"', value) is not None
    return isinstance(value, list) and all(isinstance(call, dict) for call in value)


def _dialogue(row: dict[str, Any], reader: RowReader) -> Conversation:
    """Read `text`, a dialogue with role markers, and glaive's `system` with its functions."""
    text = reader.text(row.get("text"), "`text`")
    turns = parse_marked_text(text)
    if turns is None:
        raise BadRow("not a list of turns", f"no role markers in {text:.40}")
    system = reader.optional(row, "system")
    if turns[0]["role"] == "system" and not system:
        system = turns.pop(0)["content"]
    system, functions = functions_in(system)
    messages = (Message("system", system), *map(reader.message, turns))
    return Conversation(messages, (*parse_tools(row.get("tools")), *parse_tools(functions)))


def _thread(row: dict[str, Any], reader: RowReader) -> Conversation:
    """Read `thread`, a conversation of a message tree."""
    if row.get("thread") is None:
        raise BadRow("parent is missing")
    return Conversation(tuple(reader.turns(row, "thread")))


def _text(row: dict[str, Any], reader: RowReader) -> Conversation:
    """Read `text`: raw text, all of it trained."""
    text = reader.text(row.get("text"), "`text`")
    if not text.strip():
        raise BadRow("no text")
    return Conversation((Message("assistant", text),))


def _tokens(row: dict[str, Any], reader: RowReader) -> Conversation:
    """Return no turns: the row holds the tokens of a text that is not known."""
    return Conversation(())


_CHAT = ("system", "tools", "chat_template_kwargs", "image", "images")
_ANSWER_MORE = ("input", "history", "reasoning", *_CHAT)
_conversations = partial(_conversation, column="conversations")
FORMATS: tuple[Format, ...] = (
    Format("alpaca", ("instruction", "output"), ("input", "system", "history"), "alpaca", _alpaca),
    Format("sharegpt", ("conversations",), _CHAT, "chat", _conversations),
    Format("llava", ("conversations",), _CHAT, "chat", _conversations, is_fallback=True),
    Format("messages", ("messages",), _CHAT, "chat", partial(_conversation, column="messages")),
    Format("prompt_completion", ("prompt", "completion"), _CHAT[1:3], "plain", _prompt_completion, is_fallback=True),
    Format("question_answer", ("question", "answer"), _ANSWER_MORE, "chat", _question_answer, is_fallback=True),
    Format("text", ("text",), (), "plain", _text, raw=True, is_fallback=True),
    Format("dialogue", ("text",), _CHAT[:3], "chat", _dialogue, by_values=True),
    Format("oasst", ("thread",), (), "chat", _thread, by_values=True),
    Format("tokenized", TOKEN_COLUMNS[:1], TOKEN_COLUMNS[1:], "plain", _tokens, raw=True, tokens=True, by_values=True),
)
