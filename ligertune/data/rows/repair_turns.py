"""Repair of conversations for on_bad_row: repair, where the fix needs no guess.

REPAIRS in conversation.py lists the repairs. A row with other faults stays a bad row, and is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ligertune.data.rows.conversation import Message


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
    system, others = turns[:n_system], turns[n_system:]
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
