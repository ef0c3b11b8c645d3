"""Parts of turns: what of a rendered conversation belongs to a turn of any role, and the token that ends the turn.

An answer is a span of answer_spans.py, which ends with its end tokens. Of another turn only the content is known to
belong to it, not the header that the template writes; tags around the content show where it is. Its end token is the
first one after the content that also ends an answer, or is the tokenizer's EOS token, as in Axolotl.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ligertune.data.answers.answer_spans import Tag, TaggedField, find_tags, tag_messages
from ligertune.data.bad_rows import BadRow
from ligertune.data.templates.control_tokens import Span

TrainOnEos = Literal["turn", "last", "all", "none"]


class TurnParts(NamedTuple):
    """The text of a turn, and the token that ends it; None if the template writes no such token."""

    body: tuple[Span, ...]
    end: Span | None


Parts = Mapping[int, TurnParts | BadRow]  # by the number of the turn


def parts_of_answer(
    spans: Sequence[Span] | BadRow, text: str, special: re.Pattern[str], *, has_calls: bool
) -> TurnParts | BadRow:
    """Split the end tokens from an answer: the special tokens with which its spans end; of a call only the last."""
    if isinstance(spans, BadRow):
        return spans
    if not spans:
        return TurnParts((), None)
    start, stop = spans[-1]
    found = list(special.finditer(text, start, stop))
    first = stop
    for match in reversed(found):
        if text[match.end() : first].strip() or (has_calls and first < stop):
            break
        first = match.start()
    return TurnParts((*spans[:-1], (start, first)), (first, stop) if first < stop else None)


@dataclass(frozen=True)
class TurnFinder:
    """Finds the turns of other roles than the assistant's in `text`, the rendering of `messages`.

    render: renders messages, or returns None if the template refuses them. special: matches the names of special
    tokens. ends: those names that end turns.
    """

    render: Callable[..., str | None]
    messages: Sequence[dict[str, Any]]
    text: str
    special: re.Pattern[str]
    ends: Collection[str]

    def parts(self, index: int) -> TurnParts | BadRow:
        """Return content and end token of turn `index`, or why they cannot be placed."""
        content = self.messages[index]["content"] or ""
        if not content.strip():
            return TurnParts((), None)
        numbers = {number for number, field in enumerate(self._fields) if field == (index, "content", content.strip())}
        places = [tag.place for tag in self._tags if tag.number in numbers]
        if len(places) != 2:
            return BadRow("the answer cannot be placed", f"the template rewrites {content[:40]!r}")
        start, stop = places
        start -= self.text[:start].endswith(" ")  # tokenizers merge the space before a word into its token
        following = (tag.place for tag in self._tags if tag.place >= stop and tag.number not in numbers)
        tokens = self.special.finditer(self.text, stop, min(following, default=len(self.text)))
        end = next((token.span() for token in tokens if token[0] in self.ends), None)
        return TurnParts(((start, stop),), end)

    @cached_property
    def _tagged(self) -> tuple[list[dict[str, Any]], list[TaggedField]]:
        return tag_messages(self.messages, system=True)

    @property
    def _fields(self) -> list[TaggedField]:
        return self._tagged[1]

    @cached_property
    def _tags(self) -> list[Tag]:
        return find_tags(self.render(self._tagged[0]), self.text)


def end_tokens(parts: Parts, text: str, special: re.Pattern[str]) -> set[str]:
    """Return the names of the special tokens with which these turns end."""
    ends = [found.end for found in parts.values() if isinstance(found, TurnParts) and found.end is not None]
    return {name for start, stop in ends for name in special.findall(text[start:stop])}


def is_open(found: TurnParts | BadRow, length: int) -> bool:
    """Return whether a text of this length ends with a turn's text, and without a token that ends the turn."""
    return isinstance(found, TurnParts) and found.end is None and bool(found.body) and found.body[-1][1] == length


def ends_that_train(
    parts: Parts, chosen: Collection[int], train_on_eos: TrainOnEos, *, last_has_end: bool = False
) -> Collection[int]:
    """Return the turns whose end token is trained.

    chosen: the turns that are trained. last_has_end: a token that is added to the text ends the last turn.
    """
    if train_on_eos == "turn":
        return chosen
    if train_on_eos == "all":
        return parts.keys()
    ended = [place for place, found in parts.items() if isinstance(found, TurnParts) and found.end is not None]
    ended += [max(parts)] if last_has_end else []
    return [max(ended)] if train_on_eos == "last" and ended else []


def unplaced_turns(parts: Parts, chosen: Collection[int], ends: Collection[int]) -> tuple[str, ...]:
    """Return why turns that should have labels have none. Raise BadRow if no chosen turn can have them."""
    faults = {place: found for place, found in sorted(parts.items()) if isinstance(found, BadRow)}
    if chosen and all(place in faults for place in chosen):
        raise faults[min(chosen)]
    return tuple([fault.detail for place, fault in faults.items() if place in chosen or place in ends])


def joined_spans(parts: Parts, bodies: Collection[int], ends: Collection[int]) -> list[Span]:
    """Return the spans of these turns' texts and of these turns' end tokens, in the order of the text."""
    spans: list[Span] = []
    for place, found in sorted(parts.items()):
        if isinstance(found, BadRow):
            continue
        spans += found.body if place in bodies else ()
        if found.end is None or place not in ends:
            continue
        if spans and spans[-1][1] == found.end[0]:
            spans[-1] = (spans[-1][0], found.end[1])
        else:
            spans.append(found.end)
    return spans
