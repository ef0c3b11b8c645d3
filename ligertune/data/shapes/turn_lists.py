"""Lists of turns in unusual forms, as lists of objects with a role and a text.

Forms: {"role": [...], "content": [...]} (a table of turns, as `datasets` stores sequences), texts by user and assistant
in turn (LIMA, UltraChat, DailyDialog), pairs of texts, exchanges such as {"human": ..., "assistant": ...} or
{"input": ..., "output": ...} (XTuner), Gemini's `parts`, and other names for role and text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from ligertune.data.rows.conversation import ROLES

ROLE_KEYS = ("role", "from", "speaker", "author")
TEXT_KEYS = ("content", "value", "text", "message", "utterance")
_OTHER_TEXTS = ("text", "message", "utterance", "parts")
_EXCHANGES = (
    ("human", "assistant"), ("user", "assistant"), ("input", "output"), ("prompt", "response"),
    ("question", "answer"), ("instruction", "output"), ("query", "response"),
)  # fmt: skip
# The beginning of a turn, or of a list of turns, that is written as text, and its role. Python's quotes count, too:
# pandas writes a list in a cell of a csv file as Python does.
_TURN_TEXT = re.compile(r"""\s*(?:\[\s*)?\{\s*["'](?:role|from|content|value)["']\s*:""")
_ROLE_TEXT = re.compile(r"""["'](?:role|from)["']\s*:\s*["']([\w ]+)["']""")


def turns_in(value: Any) -> Any:
    """Return a turn or turns that are written as JSON text as objects, or the value unchanged.

    A cell of a csv file is such a text, and so is each turn where a container stores JSON as text. Only objects with a
    known role count: another text may be JSON that somebody wants to train.
    """
    if isinstance(value, list):
        return [_turn_in(turn) for turn in value] if any(isinstance(turn, str) for turn in value) else value
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    parsed = _parsed(value)
    if not isinstance(parsed, list):
        return parsed if _has_role(parsed) else value
    turns = turns_in(parsed)
    turns = as_turns(turns) if all(isinstance(turn, dict) for turn in turns) else []
    return turns if turns and all(map(_has_role, turns)) else value


def is_turn_text(text: str) -> bool:
    """Return whether a text begins as a turn or a list of turns and is not JSON, so that it cannot be read as one."""
    return _written_role(text) in ROLES and _parsed(text) is None


def _written_role(text: str) -> str:
    """Return the role of the first turn in a text that begins as turns do; empty for another text."""
    role = _ROLE_TEXT.search(text) if _TURN_TEXT.match(text) else None
    return role[1].strip().lower() if role else ""


def is_turn(value: Any) -> bool:
    """Return whether a value is one turn: an object with a known role and a text."""
    return _has_role(value) and any(value.get(key) is not None for key in TEXT_KEYS)


def _turn_in(turn: Any) -> Any:
    parsed = _parsed(turn) if isinstance(turn, str) and turn.lstrip().startswith("{") else None
    return parsed if _has_role(parsed) else turn


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _has_role(turn: Any) -> bool:
    if not isinstance(turn, dict):
        return False
    names = [turn[key] for key in ROLE_KEYS if isinstance(turn.get(key), str)]
    return bool(names) and names[0].strip().lower() in ROLES


def as_turns(value: Any) -> Any:
    """Return the list as turns with `role` and `content`, or unchanged if it has none of the known forms."""
    value = _table_rows(value) if isinstance(value, dict) else turns_in(value)
    if not isinstance(value, list) or not value:
        return value
    if all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value):
        return value if all(_has_text(turn) for turn in value) else [_plain_turn(turn) for turn in value]
    if all(isinstance(turn, str) for turn in value) and len(value) % 2 == 0:
        # a turn that is written as JSON and cannot be read as one is no text to train
        return value if any(map(_written_role, value)) else _alternating(value)
    if all(_is_pair(turn) for turn in value):
        return _alternating(text for pair in value for text in pair)
    if all(isinstance(turn, dict) for turn in value):
        return _exchanges(value) or [_plain_turn(turn) for turn in value]
    return value


def _has_text(turn: dict[str, Any]) -> bool:
    return (
        turn.get("content") is not None
        or turn.get("value") is not None
        or not any(turn.get(key) for key in _OTHER_TEXTS)
    )


def _table_rows(table: dict[str, Any]) -> Any:
    """Return the rows of a table that is stored by columns, or the dict unchanged."""
    columns = {name: column for name, column in table.items() if isinstance(column, list)}
    lengths = {len(column) for column in columns.values()}
    if len(lengths) != 1 or not any(key in columns for key in ROLE_KEYS):
        return table
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _is_pair(turn: Any) -> bool:
    return isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(text, str) for text in turn)


def _alternating(texts: Iterable[str]) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


def _exchanges(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return two turns for each exchange of a question and an answer, or nothing if they have other keys."""
    names = next((names for names in _EXCHANGES if all(set(names) <= set(turn) for turn in turns)), None)
    if names is None:
        return []
    question, answer = names
    made: list[dict[str, Any]] = []
    for turn in turns:
        if turn.get("system"):
            made.append({"role": "system", "content": turn["system"]})
        made.append({"role": "user", "content": turn[question]})
        made.append({"role": "assistant", "content": turn[answer]})
    return made


def _plain_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Return the turn with `role` and `content`, where it has other names for them."""
    role = next((turn[key] for key in ROLE_KEYS if isinstance(turn.get(key), str)), None)
    text = next((turn[key] for key in TEXT_KEYS if turn.get(key) is not None), None)
    if text is None and isinstance(turn.get("parts"), list):
        text = [{"type": "text", **part} if isinstance(part, dict) and "text" in part else part
                for part in turn["parts"]]  # fmt: skip
    others = {key: value for key, value in turn.items() if key not in ("from", "value")}
    return {**others, **({"role": role} if role else {}), "content": text}
