"""Reasoning of answers: leave it out of earlier turns, or out of what is trained.

Reasoning is a field of a message, or a `<think>` block at the beginning of its content. In a rendered answer it reaches
to the mark that closes it (`</think>`, `<|end|>` in gpt-oss) and the white space after that. An empty block, which
templates write for an answer without reasoning, counts as reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ligertune.data.answers.answer_spans import TaggedField, find_tags, tag_messages
from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Message
from ligertune.data.templates.control_tokens import Span

_BLOCK = re.compile(r"\s*<think>.*?</think>", re.DOTALL)
_EMPTY_BLOCK = re.compile(r"\s*(?:<think>)?\s*</think>")
_CLOSING_MARK = re.compile(r"\s*(?:<[^<>\s]*>|\[/?\w+\])?")
_SPACE = re.compile(r"\s*")
_CLOSE = "</think>"


def drop_history_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without the reasoning of answers before the last question.

    Raises BadRow if nothing is left of such an answer.
    """
    last = max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)
    return [_without_reasoning(message, place) for place, message in enumerate(messages[:last])] + [*messages[last:]]


def _without_reasoning(message: Message, place: int) -> Message:
    if message.role != "assistant":
        return message
    block = end_of_think_block(message.content)
    content = message.content[block:].lstrip() if block else message.content
    kept = replace(message, reasoning="", content=content)
    if kept.is_empty:
        raise BadRow("empty answer", f"turn {place + 1} is only reasoning, which data.drop_history_reasoning removes")
    return kept


def end_of_think_block(content: str) -> int:
    """Return where the `<think>` block ends that a text begins with, with the white space after it; 0 without one."""
    block = _BLOCK.match(content)
    return _after_space(content, block.end()) if block else 0


def _after_space(text: str, place: int) -> int:
    """Return the end of the white space at `place`, but for a last space: tokenizers merge it into the next word."""
    space = _SPACE.match(text, place)
    assert space is not None  # the pattern also matches an empty text
    end = space.end()
    return end - (place < end < len(text) and text[end - 1] == " ")


@dataclass(frozen=True)
class ReasoningMask:
    """Finds where the reasoning of each answer ends in `text`, the rendering of `messages`.

    render: renders messages, or returns None if the template refuses them.
    """

    render: Callable[..., str | None]
    messages: Sequence[dict[str, Any]]
    text: str

    def unmasked(self, index: int, spans: Sequence[Span]) -> list[Span] | BadRow:
        """Return the spans of the answer in turn `index` without its reasoning."""
        if self._ends is None and self._has_field(index):
            return BadRow("the answer cannot be placed", "the template rewrites its reasoning")
        end = self._end(index, spans[0][0], spans[-1][1])
        return [(max(start, end), stop) for start, stop in spans if stop > end]

    def _end(self, index: int, start: int, stop: int) -> int:
        """Return the end of the reasoning in [start, stop), or `start` if there is none."""
        field = (self._ends or {}).get(index, -1)
        if start < field <= stop:
            mark = _CLOSING_MARK.match(self.text, field)
            assert mark is not None  # the pattern also matches an empty text
            return min(_after_space(self.text, mark.end()), stop)
        content = self.messages[index]["content"] or ""
        if _BLOCK.match(content):
            found = self.text.find(_CLOSE, start, stop)
            return start if found < 0 else min(_after_space(self.text, found + len(_CLOSE)), stop)
        block = _EMPTY_BLOCK.match(self.text, start, stop)
        return min(_after_space(self.text, block.end()), stop) if block else start

    def _has_field(self, index: int) -> bool:
        return any(field.turn == index and field.name == "reasoning" for field in self._tagged[1])

    @cached_property
    def _tagged(self) -> tuple[list[dict[str, Any]], list[TaggedField]]:
        return tag_messages(self.messages)

    @cached_property
    def _ends(self) -> dict[int, int] | None:
        """Turn -> end of its reasoning in the text; None if the template writes another text because of the tags."""
        messages, fields = self._tagged
        numbers = {number: field.turn for number, field in enumerate(fields) if field.name == "reasoning"}
        if not numbers:
            return {}
        tags = find_tags(self.render(messages), self.text)
        if not tags:
            return None
        ends = [tag for tag in tags if tag.is_end and tag.number in numbers]
        return {numbers[tag.number]: tag.place for tag in reversed(ends)}  # the first of each
