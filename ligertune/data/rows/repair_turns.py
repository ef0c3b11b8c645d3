"""on_bad_row: repair. Turns out of order become a conversation where nothing has to be guessed for it.

What is left out or joined is in `conversation.REPAIRS`. A row that has other faults stays a bad row, and is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from ligertune.data.rows.conversation import Message


def repair_turns(messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
    """The turns as they may be learnt from, and which of REPAIRS that took; they may still be out of order."""
    done: list[str] = []
    turns = [message for message in messages if message.role != "system" or not message.is_empty]
    leading = next((number for number, turn in enumerate(turns) if turn.role == "user"), len(turns))
    head, exchanges = _opening(turns[:leading], done), _exchanges(turns[leading:])
    kept = [turn for exchange in exchanges for turn in _whole(exchange, done)]
    last = max((number for number, turn in enumerate(kept) if turn.role == "assistant"), default=-1)
    if last < len(kept) - 1:
        done.append("trailing question")
    return _joined(head, done) + kept[: last + 1], done


def _opening(turns: list[Message], done: list[str]) -> list[Message]:
    """What may stand before the first question: system turns, and answers that follow them directly."""
    systems = next((number for number, turn in enumerate(turns) if turn.role != "system"), len(turns))
    if systems and turns[systems:] and all(turn.role == "assistant" for turn in turns[systems:]):
        answers = [turn for turn in turns[systems:] if not turn.is_empty]
        if len(answers) < len(turns) - systems:
            done.append("empty turn")
        return turns[:systems] + answers
    if turns[systems:]:
        done.append("leading answer")
    return turns[:systems]


def _exchanges(turns: list[Message]) -> list[list[Message]]:
    """Each question, or several in a row, with all that follows up to the next one."""
    exchanges: list[list[Message]] = []
    before = None
    for turn in turns:
        if turn.role == "user" and before != "user":
            exchanges.append([])
        exchanges[-1].append(turn)
        before = turn.role
    return exchanges


def _whole(exchange: list[Message], done: list[str]) -> list[Message]:
    """The exchange without repetitions; nothing of it where its question or one of its answers is empty."""
    turns = []
    for _, run in groupby(exchange, key=lambda turn: turn.role):
        run = list(run)
        filled = [turn for turn in run if turn.role == "tool" or not turn.is_empty]
        if len(filled) < len(run):
            done.append("empty turn")
        if not filled:
            return []
        turns += filled
    return _joined(turns, done)


def _joined(turns: list[Message], done: list[str]) -> list[Message]:
    """Neighbours of one role as one turn. Not after a call, nor where one is trained and the other is not."""
    joined: list[Message] = []
    for turn in turns:
        before = joined[-1] if joined else None
        alike = before is not None and (before.role, before.trained) == (turn.role, turn.trained)
        if not alike or turn.role == "tool" or before.calls:
            joined.append(turn)
        else:
            done.append("repeated role")
            joined[-1] = replace(
                turn,
                content=_lines(before.content, turn.content),
                input=_lines(before.input, turn.input),
                reasoning=_lines(before.reasoning, turn.reasoning),
            )
    return joined


def _lines(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text.strip())
