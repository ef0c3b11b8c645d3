"""Execute the part of Go's text/template that our Modelfiles use: if, else, else if, range, and fields."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

ACTION = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
LAST = "eq (len (slice $.Messages $i)) 1"


def execute(template: str, messages: Sequence[dict[str, str]]) -> str:
    """Return the text of a template for a conversation. As in Ollama, .System is the text of the system messages."""
    pieces = ACTION.split(template)  # text, action, text, ...
    nodes, rest = _parse(pieces, 0)
    assert rest == len(pieces), "an end too many"
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    return _run(nodes, {"System": system, "Messages": list(messages)}, None)


def _parse(pieces: list[str], place: int) -> tuple[list[Any], int]:
    """Return the nodes up to an `else` or `end`, and its place."""
    nodes: list[Any] = []
    while place < len(pieces):
        if place % 2 == 0:
            nodes.append(("text", pieces[place]))
            place += 1
            continue
        action = pieces[place].strip()
        if action == "end" or action.startswith("else"):
            return nodes, place
        if action.startswith("if "):
            node, place = _parse_if(pieces, place, action.removeprefix("if "))
        elif action.startswith("range "):
            assert action == "range $i, $_ := .Messages", action
            body, place = _parse(pieces, place + 1)
            node = ("range", body)
        else:
            assert re.fullmatch(r"\.\w+", action), action
            node = ("field", action[1:])
        nodes.append(node)
        place += 1
    return nodes, place


def _parse_if(pieces: list[str], place: int, condition: str) -> tuple[Any, int]:
    body, place = _parse(pieces, place + 1)
    action = pieces[place].strip()
    otherwise: list[Any] = []
    if action.startswith("else if "):
        node, place = _parse_if(pieces, place, action.removeprefix("else if "))
        otherwise = [node]
    elif action == "else":
        otherwise, place = _parse(pieces, place + 1)
    assert pieces[place].strip() == "end"
    return ("if", condition, body, otherwise), place


def _run(nodes: list[Any], data: dict[str, Any], place: int | None) -> str:
    """place: of the message that a range is at, whose fields a dot then means."""
    text = ""
    fields = data if place is None else {key.capitalize(): value for key, value in data["Messages"][place].items()}
    for kind, *node in nodes:
        if kind == "text":
            text += node[0]
        elif kind == "field":
            text += fields[node[0]]
        elif kind == "range":
            text += "".join(_run(node[0], data, number) for number in range(len(data["Messages"])))
        else:
            text += _run(node[1] if _holds(node[0], data, fields, place) else node[2], data, place)
    return text


def _holds(condition: str, data: dict[str, Any], fields: dict[str, Any], place: int | None) -> bool:
    if condition == LAST:
        assert place is not None
        return len(data["Messages"][place:]) == 1
    if compared := re.fullmatch(r'eq \.(\w+) "(\w+)"', condition):
        return bool(fields[compared[1]] == compared[2])
    assert re.fullmatch(r"\.\w+", condition), condition
    return bool(fields[condition[1:]])
