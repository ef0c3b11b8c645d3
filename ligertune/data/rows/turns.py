"""One turn of a conversation as data sets write it: its role, its text or parts, its calls, and its weight."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Protocol

from ligertune.data.rows.conversation import ROLES, BadRow, Message, ToolCall
from ligertune.errors import UserError

_WEIGHT_KEYS = ("loss_weight", "weight", "train")  # LLaMA-Factory's, OpenAI's and axolotl's name for the same thing
_OTHER_SENSES = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")


class TextReader(Protocol):
    """How a value that must be text is taken: `Strict` or `Mending`."""

    def text(self, value: Any, what: str) -> str: ...


class StrictText:
    """Text is text; anything else makes the row a bad one."""

    def text(self, value: Any, what: str) -> str:
        if value is None:
            raise BadRow("missing value", what)
        if not isinstance(value, str):
            raise BadRow("not text", f"{what} is {value!r:.40}")
        return value


@dataclass
class RepairingText:
    """What JSON has a text for becomes that text, and null becomes the empty text; `done` says of which it was so."""

    done: list[str] = field(default_factory=list)

    def text(self, value: Any, what: str) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        self.done.append("not text")
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError) as error:  # bytes or a date, from a parquet file
            raise BadRow("not text", f"{what} is {value!r:.40}") from error


STRICT = StrictText()


def message_of(turn: dict[str, Any], source: str, reading: TextReader) -> Message:
    """A turn with `from` and `value` or with `role` and `content`."""
    name = turn.get("from") or turn.get("role")
    if not isinstance(name, str):
        raise BadRow("missing value", "`from` or `role` of a turn")
    name = name.strip().lower()
    role = ROLES.get(name)
    if role is None:
        raise BadRow("unknown role", repr(name)[:40])
    trained = _trained(turn, role, source)
    value = turn["value"] if turn.get("value") is not None else turn.get("content")
    if name == "function_call":
        return Message(role, "", calls=_calls(value), trained=trained)
    calls = tuple(_call(call) for call in list_of(turn.get("tool_calls"), "`tool_calls`"))
    if turn.get("function_call"):  # OpenAI's older form
        calls += _calls(turn["function_call"])
    if value is None and role == "assistant" and calls:
        value = ""
    content, reasoning = "", turn.get("reasoning_content") or turn.get("reasoning") or ""
    for part in value if isinstance(value, list) else [reading.text(value, f"a turn by {name}")]:
        kind, text = _part(part, source, reading)
        if kind == "text":
            content += text
        elif kind == "reasoning":
            reasoning += text
        else:
            calls += _calls(text)
    reasoning = reading.text(reasoning, "reasoning")
    return Message(role, content, reasoning=reasoning, calls=calls, trained=trained)


def refuse_media(row: dict[str, Any], source: str) -> None:
    """Complains of a row with images, videos or sounds: no answer is learnt from what the model is not shown."""
    for column in ("image", "images", "video", "videos", "audio", "audios"):
        if row.get(column):
            raise _not_text_only(source, f"the row's `{column}`")


def _part(part: Any, source: str, reading: TextReader) -> tuple[str, str]:
    """(kind, text) of a piece of a turn: a text, or `{type: text | reasoning | tool_call, value | text: ...}`."""
    if isinstance(part, str):
        return "text", part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _OTHER_SENSES:
        raise _not_text_only(source, f"a part of type {kind}")
    if kind not in ("text", "reasoning", "tool_call"):
        raise BadRow("not text", f"a part of type {kind!r:.40}")
    return kind, reading.text(part.get("value", part.get("text")), f"a part of type {kind}")


def _not_text_only(source: str, what: str) -> UserError:
    return UserError(
        f"{source}: {what} is no text, and this run trains on text only.",
        hint="Leave out the rows with images, videos or sounds.",
    )


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
    parsed = parsed_json(value, "call is not JSON") if isinstance(value, str) else value
    if not isinstance(parsed, list):
        return (_call(parsed, text=value if isinstance(value, str) else None),)
    return tuple(_call(call) for call in parsed)


def _call(call: Any, text: str | None = None) -> ToolCall:
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise BadRow("call is not JSON", f"{call!r:.40} has no name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):  # OpenAI's form
        arguments = parsed_json(arguments, "call is not JSON")
    plain = {"name": inner["name"], "arguments": arguments}
    return ToolCall(inner["name"], arguments, text or json.dumps(plain, ensure_ascii=False))


def tools_of(value: Any) -> tuple[dict[str, Any], ...]:
    """The declared tools, each as `{type: function, function: {...}}`, which is what chat templates read."""
    parsed = parsed_json(value, "tools are not JSON") if isinstance(value, str) and value.strip() else value or []
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise BadRow("tools are not JSON", "not a list of objects")
    return tuple(tool if "function" in tool else {"type": "function", "function": tool} for tool in parsed)


def parsed_json(text: str, reason: str) -> Any:
    """What a text says as JSON; `reason` if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(reason, f"{text[:40]!r}") from error


def list_of(value: Any, what: str) -> list[Any]:
    """A list, or the empty one for null."""
    if not isinstance(value or [], list):
        raise BadRow("not a list of turns", f"{what} is {value!r:.40}")
    return value or []
