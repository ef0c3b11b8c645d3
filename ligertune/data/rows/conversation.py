"""Conversation and Message: the form of every row before it is rendered; its check, and its repair.

`on_bad_row: repair` repairs what needs no guess; a row with other faults is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

from ligertune.data.bad_rows import BadRow
from ligertune.errors import plural

Role = Literal["system", "user", "assistant", "tool"]

# names that data sets use for the four roles
_ROLE_NAMES: dict[Role, tuple[str, ...]] = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": (
        "assistant",
        "gpt",
        "chatgpt",
        "bing",
        "bard",
        "bot",
        "chatbot",
        "ai",
        "model",
        "function_call",
        "tool_call",
    ),
    "tool": ("tool", "function", "observation", "function_response", "tool_response"),
}
ROLES: dict[str, Role] = {name: role for role, names in _ROLE_NAMES.items() for name in names}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the assistant. `text` is its JSON as the data set wrote it; `id` is empty without one."""

    name: str
    arguments: Any
    text: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `input` is Alpaca's second field; only the assistant has `reasoning` and `calls`.

    fields: what else the turn has for a template, such as `name` and `tool_call_id`.
    """

    role: Role
    content: str
    input: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    trained: bool = True  # False for an assistant's turn that is context only
    fields: dict[str, Any] = field(default_factory=dict)

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
    targets: tuple[str | float, ...] = ()  # labels or numbers of a text, or the margin of a pair


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
    """Return the repaired turns and the names of the repairs. The turns may still be out of order."""
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
        if (
            previous is None
            or (previous.role, previous.trained) != (turn.role, turn.trained)
            or turn.role == "tool"
            or previous.calls
        ):
            joined.append(turn)
        else:
            repairs.append("repeated role")
            joined[-1] = replace(
                turn,
                content=_paragraphs(previous.content, turn.content),
                input=_paragraphs(previous.input, turn.input),
                reasoning=_paragraphs(previous.reasoning, turn.reasoning),
            )
    return joined


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(str.strip, texts))
