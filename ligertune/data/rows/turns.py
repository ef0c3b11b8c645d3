"""Turn parsing: one turn of a conversation with its role, its text or parts, its tool calls and its loss weight.

Also the values of other columns: declared tools, variables of the chat template, and numbers.
"""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import ROLES, Message, Role, ToolCall
from ligertune.data.shapes.marked_texts import quoted_call
from ligertune.data.shapes.turn_lists import as_turns, is_turn, is_turn_text, turns_in
from ligertune.errors import UserError
from ligertune.recipe.section import RESERVED_VARIABLES

MAX_NUMBER = 1e18  # the squared error of larger numbers overflows float32
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# names of LLaMA-Factory, OpenAI, ms-swift, and of axolotl's documentation for message_field_training
_WEIGHT_KEYS = ("loss_weight", "weight", "loss", "train", "training")
# Keys that exclude tokens in a form that is not read: axolotl's ranges of characters (message_field_training_detail),
# and `mask`, which no tool documents.
_PART_MASKS = ("train_detail", "training_detail", "mask")
# the other keys of a turn that this module reads; a template may read the rest
_READ_KEYS = frozenset(
    ("from", "role", "value", "content", "tool_calls", "function_call", *_REASONING_KEYS, *_WEIGHT_KEYS, *_PART_MASKS)
)
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")  # OpenAI's, Llama's, LangChain's and Anthropic's name
_TEXT_PARTS = ("text", "input_text", "output_text")  # the last two are those of OpenAI's responses
_MEDIA_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")
_MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass
class RowReader:
    """Reads the values of one row that must be text.

    With `repair` null becomes the empty text and any other value its JSON text; `repairs` lists such repairs. Without
    it both raise BadRow.
    """

    source: str
    repair: bool = False
    repairs: list[str] = field(default_factory=list)
    trained_roles: tuple[Role, ...] = ("assistant",)  # whose turns may have a weight of 1

    def text(self, value: Any, what: str) -> str:
        """Return a value that must be text. `what` names it in errors."""
        if isinstance(value, str):
            return value
        if value is None and self.repair:
            return ""
        if value is None:
            raise BadRow("missing value", what)
        if self.repair:
            self.repairs.append("not text")
            with contextlib.suppress(TypeError, ValueError):  # bytes or a date, from a parquet file
                return json.dumps(value, ensure_ascii=False)
        raise BadRow("not text", f"{what} is {value!r:.40}")

    def optional(self, row: dict[str, Any], column: str) -> str:
        """Return the text of a column, or an empty text if it is absent or null."""
        return "" if row.get(column) is None else self.text(row[column], f"`{column}`")

    def message(self, turn: dict[str, Any]) -> Message:
        """Parse a turn with `from` and `value`, or with `role` and `content`."""
        name = turn.get("from") or turn.get("role")
        if not isinstance(name, str):
            raise BadRow("missing value", "`from` or `role` of a turn")
        name = name.strip().lower().replace("-", "_")
        role = ROLES.get(name)
        if role is None:
            raise BadRow("unknown role", repr(name)[:40])
        trained = self._is_trained(turn, role)
        fields = {key: value for key, value in turn.items() if key not in _READ_KEYS and value is not None}
        value = turn["value"] if turn.get("value") is not None else turn.get("content")
        if name in ("function_call", "tool_call"):
            return Message(role, "", calls=_calls(value), trained=trained, fields=fields)
        calls = tuple(_call(call) for call in list_of(turn.get("tool_calls"), "`tool_calls`"))
        if turn.get("function_call"):  # OpenAI's older form
            calls += _calls(turn["function_call"])
        if value is None and role == "assistant" and calls:
            value = ""
        texts, called = self._texts(value if isinstance(value, list) else [self.text(value, f"a turn by {name}")])
        given = next((turn[key] for key in _REASONING_KEYS if turn.get(key)), "")
        reasoning = self.text(given, "reasoning") + texts["reasoning"]
        return Message(role, texts["text"], reasoning=reasoning, calls=calls + called, trained=trained, fields=fields)

    def turns(self, row: dict[str, Any], column: str) -> list[Message]:
        """Parse a list of turns in `column`."""
        turns = row.get(column)
        if turns is None:
            raise BadRow("missing value", f"`{column}`")
        if isinstance(turns, str):  # a cell of a csv file
            turns = parse_json(turns, "not a list of turns")
        turns = as_turns(turns)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise BadRow("not a list of turns", f"`{column}`")
        return [self.message(turn) for turn in turns]

    def turns_or_text(self, row: dict[str, Any], column: str) -> list[Message] | str:
        """Parse a column that holds a text, one turn or a list of turns."""
        value = turns_in(row.get(column))
        if not isinstance(value, list | dict):
            return self.plain_text(row, column)
        return self.turns({column: [value] if is_turn(value) else value}, column)

    def plain_text(self, row: dict[str, Any], column: str) -> str:
        """Return the text of a column that may also hold turns. Raise BadRow for turns in a text that is not JSON."""
        text = self.text(row.get(column), f"`{column}`")
        if is_turn_text(text):
            raise BadRow("not a list of turns", f"{text[:40]!r}")
        return text

    def instruction(self, row: dict[str, Any]) -> list[Message]:
        """Parse Alpaca's `instruction`, `input`, and the optional `system` and `history` (pairs of earlier turns)."""
        messages = [Message("system", self.optional(row, "system"))]
        for pair in list_of(row.get("history"), "`history`"):
            if not (isinstance(pair, list) and len(pair) == 2):
                raise BadRow("not a list of turns", "`history` is not a list of pairs of texts")
            texts = [self.text(text, "a text of `history`") for text in pair]
            messages += [Message("user", texts[0]), Message("assistant", texts[1])]
        instruction = self.text(row.get("instruction"), "`instruction`")
        return [*messages, Message("user", instruction, input=self.optional(row, "input"))]

    def refuse_media(self, row: dict[str, Any]) -> None:
        """Raise UserError for a row with images, videos or sounds: a text model cannot learn an answer about them."""
        for column in _MEDIA_COLUMNS:
            if row.get(column):
                raise self._media_error(f"the row's `{column}`")

    def _texts(self, parts: list[Any]) -> tuple[dict[str, str], tuple[ToolCall, ...]]:
        """Return the text and the reasoning of a turn's parts, and its calls."""
        texts = {"text": "", "reasoning": ""}
        calls: tuple[ToolCall, ...] = ()
        for part in parts:
            kind, text = self._part(part)
            if kind == "tool_call":
                calls += _calls(text)
            else:
                texts[kind] += text
        return texts, calls

    def _part(self, part: Any) -> tuple[str, str]:
        """Parse a string or `{type: text | reasoning | tool_call, value | text: ...}` into (type, text)."""
        if isinstance(part, str):
            return "text", part
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _MEDIA_PARTS:
            raise self._media_error(f"a part of type {kind}")
        if kind in _TEXT_PARTS:
            kind = "text"
        if kind not in ("text", "reasoning", "tool_call"):
            raise BadRow("not text", f"a part of type {kind!r:.40}")
        return kind, self.text(part.get("value", part.get("text")), f"a part of type {kind}")

    def _media_error(self, what: str) -> UserError:
        return UserError(
            f"{self.source}: {what} is not text, and this run trains on text only.",
            hint="Leave out the rows with images, videos or sounds.",
        )

    def _is_trained(self, turn: dict[str, Any], role: str) -> bool:
        """Return whether the turn's loss weight, 0 or 1 or a boolean, lets it be trained. Without a weight it does."""
        if masked := [key for key in _PART_MASKS if turn.get(key)]:
            raise UserError(
                f"{self.source}: the key `{masked[0]}` of a turn masks it in a form that is not read.",
                hint="Write `weight`: 0 for a turn that is context only, and remove the key.",
            )
        given = [(key, turn[key]) for key in _WEIGHT_KEYS if turn.get(key) is not None]
        for key, weight in given:
            found = f"{self.source}: {key} {weight!r}"
            if weight not in (0, 1):
                raise UserError(f"{found}: only 0 and 1 are possible.", hint="Round it, or remove it.")
            if weight == 1 and role not in self.trained_roles:
                others = f"turns by {' and '.join(self.trained_roles)}"
                who = "the assistant's turns" if self.trained_roles == ("assistant",) else others
                raise UserError(
                    f"{found} on a turn by the {role}: only {who} are trained.",
                    hint=f"Set it to 0, or add {role} to data.roles_to_train.",
                )
        return all(weight == 1 for _, weight in given)


def _calls(value: Any) -> tuple[ToolCall, ...]:
    """Parse a `function_call` turn or a `tool_call` part: one object or a list of them, often as JSON text."""
    parsed = quoted_call(value) or parse_json(value, "call is not JSON") if isinstance(value, str) else value
    if isinstance(parsed, list):
        return tuple(_call(call) for call in parsed)
    return (_call(parsed, text=value if isinstance(value, str) else None),)


def _call(call: Any, text: str | None = None) -> ToolCall:
    call = parse_json(call, "call is not JSON") if isinstance(call, str) else call
    inner = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(inner, str) and inner.lstrip().startswith("{"):
        inner = parse_json(inner, "call is not JSON")
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise BadRow("call is not JSON", f"{call!r:.40} has no name")
    arguments: Any = next((inner[key] for key in _ARGUMENT_KEYS if inner.get(key) is not None), {})
    if isinstance(arguments, str):  # OpenAI's form
        arguments = parse_json(arguments, "call is not JSON") if arguments.strip() else {}
    plain = {"name": inner["name"], "arguments": arguments}
    number = call.get("id") if isinstance(call, dict) else None
    try:
        return ToolCall(
            inner["name"],
            arguments,
            text or json.dumps(plain, ensure_ascii=False),
            id=number if isinstance(number, str) else "",
        )
    except (TypeError, ValueError, RecursionError) as error:  # bytes of a parquet file, or too deep a value
        raise BadRow("call is not JSON", str(error)) from error


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Return the declared tools as `{type: function, function: {...}}`, the form that chat templates read.

    The list, each tool, its function and its parameters may be JSON text.
    """
    parsed = value or []
    if isinstance(value, str):
        parsed = (parse_json(value, "tools are not JSON") if value.strip() else None) or []
    if not isinstance(parsed, list):
        raise BadRow("tools are not JSON", "not a list of objects")
    return tuple(_tool(tool) for tool in parsed)


def _tool(tool: Any) -> dict[str, Any]:
    tool = _parsed_object(tool)
    if "function" not in tool:
        return {"type": "function", "function": _function(tool)}
    function = _parsed_object(tool["function"])
    return {**tool, "function": _function(function)}


def _function(function: dict[str, Any]) -> dict[str, Any]:
    """Return a declared function with its parameters as an object, which templates expect."""
    parameters = function.get("parameters")
    if not isinstance(parameters, str):
        return function
    return {**function, "parameters": _parsed_object(parameters)}


def _parsed_object(value: Any) -> dict[str, Any]:
    """Return an object, or the object in a JSON text. Raise BadRow for anything else."""
    parsed = parse_json(value, "tools are not JSON") if isinstance(value, str) else value
    if not isinstance(parsed, dict):
        raise BadRow("tools are not JSON", f"not an object: {value!r:.40}")
    return parsed


def template_kwargs(row: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the row's chat template: its column `chat_template_kwargs`, an object or its JSON text.

    Variables that are null are left out: they are those of other rows in parquet files.
    """
    given = row.get("chat_template_kwargs")
    reason = "chat_template_kwargs are wrong"
    if given in (None, ""):
        return {}
    parsed = parse_json(given, reason) if isinstance(given, str) else given
    if not isinstance(parsed, dict):
        raise BadRow(reason, f"{parsed!r:.40}")
    if reserved := [name for name in RESERVED_VARIABLES if name in parsed]:
        raise BadRow(reason, f"it sets {reserved[0]}")
    return {name: value for name, value in parsed.items() if value is not None}


def finite_number(value: Any) -> float | None:
    """Return a number, or text that is one, as float; None for booleans, anything else, and what is not finite."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    if isinstance(value, str) and "_" in value:  # Python reads "1_2" as 12
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def parse_json(text: str, reason: str) -> Any:
    """Parse JSON text. Raise BadRow with `reason` if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow(reason, f"{text[:40]!r}") from error


def list_of(value: Any, what: str) -> list[Any]:
    """Return a list, or that in a JSON text, or an empty one for null. Raise BadRow for anything else."""
    parsed = parse_json(value, "not a list of turns") if isinstance(value, str) and value.strip() else value
    if not isinstance(parsed or [], list):
        raise BadRow("not a list of turns", f"{what} is {value!r:.40}")
    return parsed or []
