"""Where the answers stand in a conversation that a chat template has rendered, to the character.

An answer begins where its prompt ends: the rendering of the turns before it, with `add_generation_prompt`, is a prefix
of the whole. It ends behind the last special token that the template writes at the end of the turn, but before the line
break that follows it; a template that ends its turns without one has nothing to train but the text.

Some templates write earlier turns differently once there are later ones (they drop old thoughts), or prompt with what a
finished conversation does not show. Then the answers are rendered once more, each between two tags of noncharacters:
where the tags come out is where its text stands, if the rendering without them is the same. If not, the template
rewrites the answer, and what it would write in its place cannot be marked. Where only the end of an answer is written,
that is what is trained.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from ligertune.data.rows.conversation import BadRow
from ligertune.data.templates.control_tokens import Span

_TAG = re.compile("\ufdd2(\\d+)\ufdd2|\ufdd3(\\d+)\ufdd3")
_Messages = Sequence[dict[str, Any]]


class TemplateRenderer(Protocol):
    """The template, filled in; None where it refuses a part of a conversation that it takes as a whole."""

    def try_write(self, messages: _Messages, *, add_generation_prompt: bool = False) -> str | None: ...


def answer_spans(writer: TemplateRenderer, messages: _Messages, text: str, special: re.Pattern[str]) -> list[Span]:
    """For each turn of the assistant: from the end of its prompt to the end of what ends the turn."""
    spans: list[Span] = []
    tagged: dict[int, Span] | None = None
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = writer.try_write(messages[:index], add_generation_prompt=True)
        turn = text if index == len(messages) - 1 else writer.try_write(messages[: index + 1])
        span = _after_prompt(text, prompt, turn, message["content"], special)
        if span is None:
            tagged = _tagged_places(writer, messages, text, special) if tagged is None else tagged
            if index not in tagged:
                raise BadRow("the answer cannot be placed", f"the template rewrites {message['content'][:40]!r}")
            span = _between_tags(writer, messages, index, text, tagged[index], prompt, special)
        if span[1] <= span[0]:
            raise BadRow("the answer cannot be placed", f"nothing is written for {message['content'][:40]!r}")
        spans.append(span)
    return spans


def _after_prompt(
    text: str, prompt: str | None, turn: str | None, content: str, special: re.Pattern[str]
) -> Span | None:
    """The span of an answer whose prompt and turn are prefixes of the text, or as much of the turn as holds it.

    An answer without text, made of calls alone, must have its whole turn there.
    """
    if prompt is None or turn is None or not turn.startswith(prompt) or not text.startswith(prompt):
        return None
    start, stop = len(prompt), _shared(text, turn)
    inner = content if content in text[start:stop] else content.strip()
    found = text.find(inner, start, stop)
    if found < 0 or (not inner and stop < len(turn)):
        return None
    return start, _behind_terminator(text, start, max(found, start) + len(inner), stop, special)


def _behind_terminator(text: str, start: int, after: int, stop: int, special: re.Pattern[str]) -> int:
    ends = [match.end() for match in special.finditer(text, after, stop)]
    return ends[-1] if ends else max(after, start + len(text[start:stop].rstrip()))


def _between_tags(
    writer: TemplateRenderer,
    messages: _Messages,
    index: int,
    text: str,
    place: Span,
    prompt: str | None,
    special: re.Pattern[str],
) -> Span:
    """The span of an answer whose text stands at `place`, with the white space that the data set gave it."""
    content = messages[index]["content"]
    start, after = place
    lead, trail = _outer(content)
    whole = after - start == len(content.strip())
    prompt = prompt or ""
    if prompt and text.startswith(prompt) and len(prompt) <= (start if whole else after - 1):
        start = len(prompt)
    elif whole:
        start -= len(lead) if text[:start].endswith(lead) else 0
        start -= text[start - 1 : start] == " "  # tokenizers take the space before a word into its token
    else:  # what is dropped may end in the line break that also ends the prompt
        start = max(start, _shared(text, prompt))
    after += len(trail) if text.startswith(trail, after) else 0
    return start, _behind_terminator(text, start, after, _stop(writer, messages, index, text, place[1]), special)


def _stop(writer: TemplateRenderer, messages: _Messages, index: int, text: str, end: int) -> int:
    """Where the turn ends whose text ends at `end`: as far as the text goes on as it would were this the last turn."""
    if index == len(messages) - 1:
        return len(text)
    turn = writer.try_write([*messages[:index], _tagged(messages[index], index)]) or ""
    tail = turn.rpartition(f"\ufdd3{index}\ufdd3")[2]
    return end + _shared(text[end : end + len(tail)], tail)


def _tagged_places(
    writer: TemplateRenderer, messages: _Messages, text: str, special: re.Pattern[str]
) -> dict[int, Span]:
    """Where the text of each answer stands that the template writes as it is, or but for its beginning (a thought)."""
    with_tags = [
        _tagged(message, index) if message["role"] == "assistant" and message["content"].strip() else message
        for index, message in enumerate(messages)
    ]
    written = writer.try_write(with_tags)
    if written is None or _TAG.sub("", written) != text:
        return {}
    begins: dict[int, list[int]] = defaultdict(list)
    ends: dict[int, list[int]] = defaultdict(list)
    for place, begin, end in _tags(written):
        (begins if begin else ends)[int(begin or end)].append(place)
    places = {}
    for index, (end, *others) in ends.items():
        content, begun = messages[index]["content"].strip(), begins[index]
        begin = begun[0] if begun else _begin_of_tail(text[:end], content, special)
        expected = content if begun else content[begin - end :]
        if not others and len(begun) < 2 and begin < end and text[begin:end] == expected:
            places[index] = begin, end
    return places


def _begin_of_tail(text: str, content: str, special: re.Pattern[str]) -> int:
    """Where that part of `content` begins with which `text` ends; never inside a special token of the template."""
    begin = len(text) - _shared(text[::-1], content[::-1])
    return next((match.end() for match in special.finditer(text) if match.start() < begin < match.end()), begin)


def _tags(written: str) -> Iterator[tuple[int, str | None, str | None]]:
    """Of each tag: where it stands in the text without tags, and whose beginning or end it is."""
    before = 0
    for match in _TAG.finditer(written):
        yield match.start() - before, match[1], match[2]
        before += len(match[0])


def _tagged(message: dict[str, Any], index: int) -> dict[str, Any]:
    content = message["content"]
    lead, trail = _outer(content)
    return {**message, "content": f"{lead}\ufdd2{index}\ufdd2{content.strip()}\ufdd3{index}\ufdd3{trail}"}


def _outer(content: str) -> tuple[str, str]:
    """The white space before and behind a text: templates that trim it must still find it at the ends."""
    return content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]


def _shared(text: str, other: str) -> int:
    """Length of the beginning that two texts share."""
    shorter = min(len(text), len(other))
    if text[:shorter] == other[:shorter]:
        return shorter
    return next(index for index in range(shorter) if text[index] != other[index])
