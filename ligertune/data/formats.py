"""The forms in which data sets write a conversation: recognised by their columns, turned into a `Conversation`.

A new form is a row of FORMATS and its function.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Literal

from ligertune.data.conversation import ROLES, BadRow, Conversation, Message, ToolCall, checked
from ligertune.data.sources import Record
from ligertune.errors import UserError

_WEIGHT_KEYS = ("loss_weight", "weight", "train")  # LLaMA-Factory's, OpenAI's and axolotl's name for the same thing


@dataclass(frozen=True)
class Format:
    """One way to write a row. `template` is what `prompt_template: auto` renders it with."""

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    template: Literal["alpaca", "chat"]
    convert: Callable[[Record], Conversation]


def recognise(name: str, columns: Collection[str], path: str) -> Format:
    """The format called `name`; with "auto", the one whose required columns are all there."""
    candidates = [row for row in FORMATS if name in ("auto", row.name)]
    fitting = [row for row in candidates if set(row.required) <= set(columns)]
    if len(fitting) == 1:
        return fitting[0]
    found = ", ".join(sorted(columns))
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


def _alpaca(record: Record) -> Conversation:
    """`instruction`, `input`, `output`; `system` and `history` (pairs of earlier turns) if they are there."""
    row = record.row
    messages = [Message("system", _text(row, "system", ""))]
    for pair in _list(row.get("history"), "`history`"):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)):
            raise BadRow("not a list of turns", "`history` is not a list of pairs of texts")
        messages += [Message("user", pair[0]), Message("assistant", pair[1])]
    messages.append(Message("user", _text(row, "instruction"), input=_text(row, "input", "")))
    messages.append(Message("assistant", _text(row, "output")))
    return checked(messages)


def _conversation(record: Record, *, column: str) -> Conversation:
    """A list of turns in `column`, each with `from` and `value` or with `role` and `content`."""
    row = record.row
    turns = row.get(column)
    if turns is None:
        raise BadRow("missing value", f"`{column}`")
    if isinstance(turns, str):  # a cell of a CSV file
        turns = _parsed(turns, "not a list of turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise BadRow("not a list of turns", f"`{column}`")
    messages = [_message(turn, record.source) for turn in turns]
    if row.get("system") is not None and (not messages or messages[0].role != "system"):
        messages.insert(0, Message("system", _text(row, "system")))
    return checked(messages, _tools(row.get("tools")))


def _message(turn: dict[str, Any], source: str) -> Message:
    name = turn.get("from") or turn.get("role")
    if not isinstance(name, str):
        raise BadRow("missing value", "`from` or `role` of a turn")
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise BadRow("unknown role", repr(name)[:40])
    trained = _trained(turn, role, source)
    value = turn["value"] if turn.get("value") is not None else turn.get("content")
    if name == "function_call":
        return Message(role, "", calls=_calls(value), trained=trained)
    calls = tuple(_call(call) for call in _list(turn.get("tool_calls"), "`tool_calls`"))
    if value is None and (role != "assistant" or not calls):
        raise BadRow("missing value", f"the text of a turn by {name}")
    reasoning = turn.get("reasoning_content") or turn.get("reasoning") or ""
    parts = [value or ""] if isinstance(value or "", str) else value
    if not isinstance(parts, list):
        raise BadRow("not text", f"a turn by {name} is {value!r:.40}")
    content = ""
    for part in parts:
        kind, text = _part(part)
        if kind == "text":
            content += text
        elif kind == "reasoning":
            reasoning += text
        else:
            calls += _calls(text)
    return Message(role, content, reasoning=_as_text(reasoning, "reasoning"), calls=calls, trained=trained)


def _part(part: Any) -> tuple[str, str]:
    """(kind, text) of a piece of a turn: a text, or `{type: text | reasoning | tool_call, value | text: ...}`."""
    if isinstance(part, str):
        return "text", part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "reasoning", "tool_call"):
        raise BadRow("not text", f"a part of type {kind!r:.40}")
    return kind, _as_text(part.get("value", part.get("text")), f"a part of type {kind}")


def _trained(turn: dict[str, Any], role: str, source: str) -> bool:
    """Whether the turn's own weight lets it be trained: 0 or 1, false or true; none is 1."""
    given = [(key, turn[key]) for key in _WEIGHT_KEYS if turn.get(key) is not None]
    for key, weight in given:
        if weight not in (0, 1):
            raise UserError(f"{source}: {key} {weight!r}: only 0 and 1 are possible.", hint="Round it, or remove it.")
        if weight == 1 and role != "assistant":
            raise UserError(
                f"{source}: {key} {weight!r} on a turn by the {role}: only the assistant's turns can be trained.",
                hint="Set it to 0.",
            )
    return all(weight == 1 for _, weight in given)


def _calls(value: Any) -> tuple[ToolCall, ...]:
    """The calls of a `function_call` turn or a `tool_call` part: one object or a list of them, mostly as JSON text."""
    parsed = _parsed(value, "call is not JSON") if isinstance(value, str) else value
    if not isinstance(parsed, list):
        return (_call(parsed, text=value if isinstance(value, str) else None),)
    return tuple(_call(call) for call in parsed)


def _call(call: Any, text: str | None = None) -> ToolCall:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise BadRow("call is not JSON", f"{call!r:.40} has no name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form
        arguments = _parsed(arguments, "call is not JSON")
    plain = {"name": inner["name"], "arguments": arguments}
    return ToolCall(inner["name"], arguments, text or json.dumps(plain, ensure_ascii=False))


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The declared tools, each as `{type: function, function: {...}}`, which is what chat templates read."""
    parsed = _parsed(value, "tools are not JSON") if isinstance(value, str) and value.strip() else value or []
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise BadRow("tools are not JSON", "not a list of objects")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in parsed)


def _parsed(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(reason, f"{text[:40]!r}") from error


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value or [], list):
        raise BadRow("not a list of turns", f"{what} is {value!r:.40}")
    return value or []


def _text(row: dict[str, Any], column: str, absent: str | None = None) -> str:
    value = row.get(column)
    if value is None:
        if absent is None:
            raise BadRow("missing value", f"`{column}`")
        return absent
    return _as_text(value, f"`{column}`")


def _as_text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRow("not text", f"{what} is {value!r:.40}")
    return value


FORMATS: tuple[Format, ...] = (
    Format("alpaca", ("instruction", "output"), ("input", "system", "history"), "alpaca", _alpaca),
    Format("sharegpt", ("conversations",), ("system", "tools"), "chat", partial(_conversation, column="conversations")),
    Format("messages", ("messages",), ("system", "tools"), "chat", partial(_conversation, column="messages")),
)
