"""Conversation and Message: the form of every row before it is rendered; its check, and its repair.

DROP_REASONS are the reasons for which rows are dropped. `on_bad_row: repair` repairs what needs no guess (REPAIRS); a
row with other faults is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

from ligertune.errors import plural

Role = Literal["system", "user", "assistant", "tool"]

# names that data sets use for the four roles
_ROLE_NAMES: dict[Role, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "chatbot", "ai", "model", "function_call"),
    "tool": ("tool", "function", "observation", "function_response"),
}
ROLES: dict[str, Role] = {name: role for role, names in _ROLE_NAMES.items() for name in names}

DROP_REASONS: dict[str, str] = {
    "too large": "the record has more bytes than data.max_record_bytes",
    "missing value": "a column or a field that the format needs is absent or null",
    "not text": "a value that must be text is a number, a list, an image, ...",
    "not a list of turns": "the conversation is not a list of objects with a role and a text",
    "unknown role": "the role of a turn is not system, user, assistant, tool or another known name of these",
    "roles out of order": "a system turn after the first, an answer to nothing, two turns of one role in a row",
    "parent is missing": "the message of a tree answers one that does not come before it in the tree's rows",
    "no answer": "there is no turn of the assistant",
    "last turn is not an answer": "the conversation breaks off: the turns after its last answer would not be trained",
    "empty prompt": "a user turn without text, often a lost attachment: its answer answers nothing",
    "empty answer": "no text, no reasoning and no call: it would train the model to stop at once",
    "call is not JSON": "a tool call that is not an object with a name and arguments",
    "tools are not JSON": "the list of tools cannot be read",
    "chat_template_kwargs are wrong": "the column is not an object of variables, or sets what ligertune sets itself",
    "nested too deeply": "lists or objects within each other, hundreds of levels deep",
    "broken text": "half of a surrogate pair, which is no character and has no UTF-8",
    "control token in the text": "the tokenizer turns this text into a control token even with special tokens split",
    "the template refuses it": "the chat template raises an error for this conversation",
    "the template leaves a turn out": "the rendered text lacks a system or tool turn",
    "the answer cannot be placed": "the rendered text does not contain the answer exactly once",
    "several exchanges": "it holds more than one question and one answer, which needs prompt_template: chat",
    "image is missing": "there is no such file next to the data file, or in data.image_dir",
    "image cannot be read": "the file is cut off, broken, not an image, or far too narrow",
    "image on the network": "only files, data URLs and data sets with images in them are read",
    "image marks do not fit": "the number of marks in the text (<image>, or parts of type image) is not that of images",
    "image in an answer": "the model writes text only",
    "the template leaves an image out": "the rendered text does not contain each image once",
    "cut through an image": "data.max_length ends before the last image does, with on_overlength: truncate",
    "no text": "the row is empty: there is nothing to learn",
    "equal answers": "the chosen and the rejected answer are the same, so neither can be preferred",
    "equal scores": "the scores of the chosen and the rejected answer are equal: neither is preferred",
    "no label": "the label is neither 1 nor 0, neither true nor false",
    "label of another kind": "the label is null, negative, not finite, or of another kind than most first rows have",
    "label is too large": "ids must be below 1,048,576, lists have at most as many labels, and numbers be at most 1e18",
    "margin is not a number": "the column `margin` of a pair must hold a number",
    "no trained token": "all its answers have weight 0, or the tokenizer merged them into the prompt",
    "too long": "more than data.max_length tokens, with data.on_overlength: drop",
    "cut before the answer": "no trained token is left within data.max_length, with on_overlength: truncate",
}
# reasons that data.on_overlength decides on, not on_bad_row
LENGTH_REASONS = ("too long", "cut before the answer", "cut through an image")
# repairs of on_bad_row: repair, as the report names and explains them
REPAIRS: dict[str, str] = {
    "not text": "a number, a list or an object was replaced by its JSON text",
    "empty turn": "a question or an answer without text was left out, together with its exchange",
    "leading answer": "turns before the first question were left out: they answer nothing",
    "trailing question": "turns after the last answer were left out: they would not be trained",
    "repeated role": "consecutive turns of one role were joined, with an empty line between them",
}


class BadRow(Exception):
    """A row that cannot be used. `reason` is a key of DROP_REASONS, `detail` what was found.

    `data.datasets[].on_bad_row` decides whether the row is dropped or the run stops.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        if reason not in DROP_REASONS:
            raise ValueError(f"not a key of DROP_REASONS: {reason!r}")
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the assistant. `text` is its JSON as the data set wrote it."""

    name: str
    arguments: Any
    text: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `input` is Alpaca's second field; only the assistant has `reasoning` and `calls`."""

    role: Role
    content: str
    input: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    trained: bool = True  # False for an assistant's turn that is context only

    @property
    def is_empty(self) -> bool:
        """Whether the turn has neither text nor calls."""
        return not (self.content.strip() or self.input.strip() or self.reasoning.strip() or self.calls)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns of a checked row, the tools it declares, and variables for the chat template."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class ParsedRow(NamedTuple):
    """What a row holds: one conversation, or the chosen and then the rejected conversation of a pair."""

    conversations: tuple[Conversation, ...]
    desirable: int = -1  # 1 or 0 for an answer with a label, -1 without
    targets: tuple[str | float, ...] = ()  # labels or numbers of a classification, or the margin of a pair


# the roles that may follow each role; None is the beginning
_NEXT_ROLES: dict[Role | None, tuple[Role, ...]] = {
    None: ("system", "user"),
    "system": ("user", "assistant"),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),  # several calls have several results
}


def check_conversation(
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] = (),
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Conversation:
    """Return the turns without empty system turns. Raise BadRow if the model cannot be trained on them."""
    messages = tuple(message for message in messages if message.role != "system" or not message.is_empty)
    if all(message.role != "assistant" for message in messages):
        raise BadRow("no answer", plural(len(messages), "turn"))
    previous = None
    for number, message in enumerate(messages, start=1):
        if message.role not in _NEXT_ROLES[previous]:
            raise BadRow("roles out of order", f"turn {number}: {message.role} after {previous or 'nothing'}")
        if message.is_empty and message.role in ("user", "assistant"):
            raise BadRow("empty prompt" if message.role == "user" else "empty answer", f"turn {number}")
        previous = message.role
    if previous != "assistant":
        raise BadRow("last turn is not an answer", f"its role is {previous}")
    return Conversation(messages, tuple(tools), chat_template_kwargs or {})


def repair_turns(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """Return the repaired turns and the repairs made (keys of REPAIRS). The turns may still be out of order."""
    repairs: list[str] = []
    turns = [message for message in messages if message.role != "system" or not message.is_empty]
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), len(turns))
    opening = _repair_opening(turns[:first], repairs)
    kept = [turn for exchange in _exchanges(turns[first:]) for turn in _repair_exchange(exchange, repairs)]
    last = max((number for number, turn in enumerate(kept) if turn.role == "assistant"), default=-1)
    if last < len(kept) - 1:
        repairs.append("trailing question")
    return _join_roles(opening, repairs) + kept[: last + 1], repairs


def _repair_opening(turns: list[Message], repairs: list[str]) -> list[Message]:
    """Keep the turns that may precede the first question: system turns, and answers directly after them."""
    n_system = next((number for number, turn in enumerate(turns) if turn.role != "system"), len(turns))
    system = turns[:n_system]
    others = turns[n_system:]
    if system and others and all(turn.role == "assistant" for turn in others):
        answers = [turn for turn in others if not turn.is_empty]
        if len(answers) < len(others):
            repairs.append("empty turn")
        return system + answers
    if others:
        repairs.append("leading answer")
    return system


def _exchanges(turns: list[Message]) -> list[list[Message]]:
    """Split the turns before each question; consecutive questions stay together."""
    exchanges: list[list[Message]] = []
    previous = None
    for turn in turns:
        if turn.role == "user" and previous != "user":
            exchanges.append([])
        exchanges[-1].append(turn)
        previous = turn.role
    return exchanges


def _repair_exchange(exchange: list[Message], repairs: list[str]) -> list[Message]:
    """Return the exchange without empty turns and repeated roles, or nothing if a question or answer has no text."""
    turns = []
    for _, group in groupby(exchange, key=lambda turn: turn.role):
        run = list(group)
        filled = [turn for turn in run if turn.role == "tool" or not turn.is_empty]
        if len(filled) < len(run):
            repairs.append("empty turn")
        if not filled:
            return []
        turns += filled
    return _join_roles(turns, repairs)


def _join_roles(turns: list[Message], repairs: list[str]) -> list[Message]:
    """Join consecutive turns of one role, except after a tool call and where only one of them is trained."""
    joined: list[Message] = []
    for turn in turns:
        previous = joined[-1] if joined else None
        is_same = previous is not None and (previous.role, previous.trained) == (turn.role, turn.trained)
        if not is_same or turn.role == "tool" or previous.calls:
            joined.append(turn)
        else:
            repairs.append("repeated role")
            texts = {name: (getattr(previous, name), getattr(turn, name)) for name in ("content", "input", "reasoning")}
            joined[-1] = replace(turn, **{name: "\n\n".join(filter(str.strip, both)) for name, both in texts.items()})
    return joined
