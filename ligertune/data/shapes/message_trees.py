"""Message trees (OpenAssistant): rows that are single messages with a parent, or whole trees, as conversations.

A conversation is the way from a prompt to its last answer. Of several answers to one prompt the best ranked is taken;
several prompts after one answer give several conversations, and the answers that they share are trained once. The
messages of one tree must follow each other, as in the published files, so that trees are read in bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ligertune.data.rows.data_files import Record

TREE_COLUMNS = {"message_id", "message_tree_id"}  # data with one of these may hold trees


class _Message(NamedTuple):
    row: dict[str, Any]
    source: str
    replies: list[_Message]

    @property
    def is_answer(self) -> bool:
        return self.row.get("role") == "assistant"


def assemble_trees(records: Iterable[Record], row: dict[str, Any]) -> Iterator[Record]:
    """Yield the conversations of message trees as rows with one column, `thread`. Yield other records unchanged.

    row: the first of the records that is not too large.
    """
    if _is_message(row):
        yield from _of_messages(records)
    elif _is_tree(row):
        for record in records:
            is_tree = _is_tree(record.row)
            yield from _conversations(_nested(record.row["prompt"], record.source)) if is_tree else [record]
    else:
        yield from records


def _is_message(row: dict[str, Any]) -> bool:
    """Return whether a row is a message. A prompt has no `parent_id` in files that are written without nulls."""
    is_part = "parent_id" in row or row.get("role") == "prompter"
    return {"message_id", "text", "role"} <= row.keys() and is_part


def _is_tree(row: dict[str, Any]) -> bool:
    prompt = row.get("prompt")
    return isinstance(prompt, dict) and "replies" in prompt and "text" in prompt


def _nested(row: dict[str, Any], source: str) -> _Message:
    """Return the root of a tree whose messages have their replies in them."""
    root = _Message(row, source, [])
    pending = [root]
    while pending:
        message = pending.pop()
        replies = message.row.get("replies")
        for reply in replies if isinstance(replies, list) else ():
            if isinstance(reply, dict) and not reply.get("deleted"):
                message.replies.append(_Message(reply, source, []))
        pending += message.replies
    return root


def _of_messages(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the conversations of rows that are messages, tree by tree."""
    tree: Any = None
    messages: list[Record] = []
    for record in records:
        if not record.row:  # too large
            yield record
            continue
        is_root = record.row.get("parent_id") is None
        next_tree = record.row.get("message_tree_id", record.row.get("message_id") if is_root else tree)
        if next_tree != tree:
            yield from _of_tree(messages)
            tree = next_tree
            messages = []
        messages.append(record)
    yield from _of_tree(messages)


def _of_tree(records: list[Record]) -> Iterator[Record]:
    """Yield the conversations of one tree. A message without its parent is a row that cannot be used."""
    messages = {
        str(record.row.get("message_id")): _Message(record.row, record.source, [])
        for record in records
        if not record.row.get("deleted")
    }
    roots = []
    for message in messages.values():
        parent = message.row.get("parent_id")
        if parent is None:
            roots.append(message)
        elif str(parent) in messages and messages[str(parent)] is not message:
            messages[str(parent)].replies.append(message)
        else:
            yield Record({"thread": None}, message.source)
    for root in roots:
        yield from _conversations(root)


def _conversations(root: _Message) -> Iterator[Record]:
    """Yield a record for each way through a tree, depth first."""
    trained: set[int] = set()
    pending = [[root]]
    while pending:
        path = pending.pop()
        while len(ways := _next_messages(path[-1])) == 1:
            path.append(ways[0])
        pending += [[*path, way] for way in reversed(ways)]
        if not ways:
            yield Record({"thread": [_turn(message, trained) for message in path]}, path[-1].source)


def _turn(message: _Message, trained: set[int]) -> dict[str, Any]:
    """Return the message as a turn, which is trained if it is an answer that is not in `trained`. Add it there."""
    role = message.row.get("role")
    turn = {"role": "user" if role == "prompter" else role, "content": message.row.get("text")}
    if message.is_answer and id(message) in trained:
        turn["weight"] = 0
    trained.add(id(message))
    return turn


def _next_messages(message: _Message) -> list[_Message]:
    """Return the messages that conversations go on with: the best answer, or all prompts that have an answer."""
    if message.is_answer:
        return [reply for reply in message.replies if reply.replies]
    return sorted(message.replies, key=_rank)[:1]


def _rank(message: _Message) -> float:
    rank = message.row.get("rank")
    return rank if isinstance(rank, int | float) else math.inf
