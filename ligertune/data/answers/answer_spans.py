"""Answer spans: which characters of a rendered conversation are the assistant's answers.

An answer begins where its prompt ends: the rendering of the turns before it, with `add_generation_prompt`, is a prefix
of the whole text. It ends after the last special token that the template writes at the end of the turn, but before the
line break that follows it. If the template ends its turns without a special token, the one that begins the next turn
ends an answer (GLM); without such a token, only the text is trained.

Some templates write earlier turns differently once there are later ones (they drop old reasoning), or have a generation
prompt that a finished conversation does not show. Then the conversation is rendered again with tags of noncharacters
around each text and each name of a call. If that rendering equals the text except for the tags, the tags show where the
texts are. An answer begins where the text after the previous turn stops to equal the generation prompt. If the template
rewrites an answer, or writes it more than once, it cannot be placed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ligertune.data.bad_rows import BadRow
from ligertune.data.templates.control_tokens import Span
from ligertune.data.templates.template_messages import REASONING_FIELDS

_TAG = re.compile("\ufdd2(\\d+)\ufdd2|\ufdd3(\\d+)\ufdd3")  # begin and end of the field N
_PART_OF_MARKUP = re.compile(r"<[^<>]*\Z")


FieldName = Literal["content", "reasoning", "call"]


class TaggedField(NamedTuple):
    """A text of a turn between tags: its content, its reasoning, or the name of a call."""

    turn: int
    name: FieldName
    text: str  # without white space around it


class Tag(NamedTuple):
    """A tag of the field `number`, and its place in the text without tags."""

    number: int
    is_end: bool
    place: int


@dataclass(frozen=True)
class AnswerFinder:
    """Finds the answers in `text`, the rendering of `messages`.

    render: renders messages, with or without a generation prompt; None if the template refuses this part of the
    conversation. special: matches the names of special tokens.
    """

    render: Callable[..., str | None]
    messages: Sequence[dict[str, Any]]
    text: str
    special: re.Pattern[str]

    def spans(self) -> list[Span | BadRow]:
        """Return the span of each assistant turn, from the end of its prompt to the token that ends the turn.

        For an answer that is not in the text, or not exactly once, the list has the reason.
        """
        spans: list[Span | BadRow] = []
        rewrites = False  # a template that rewrites one answer rewrites others: tags are tried first
        for index, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            span = self._between_tags(index) if rewrites else None
            span = span or self._after_prompt(index)
            if span is None and not rewrites:
                rewrites = True
                span = self._between_tags(index)
            spans.append(self._checked(index, span))
        return spans

    def _checked(self, index: int, span: Span | None) -> Span | BadRow:
        if span and span[1] > span[0] and not self._holds_result(span):
            return span
        what = "nothing is written for" if span else "the template rewrites"
        if span and span[1] > span[0]:
            what = "the template writes results of tools into"
        return BadRow("the answer cannot be placed", f"{what} {_content(self.messages[index])[:40]!r}")

    def _holds_result(self, span: Span) -> bool:
        """Return whether a tool's result stands between a turn's call and its text (Gemma 4)."""
        if all(message["role"] != "tool" for message in self.messages):
            return False
        results = (tag for tag in self._tags if self.messages[self._fields[tag.number].turn]["role"] == "tool")
        return any(span[0] < tag.place < span[1] for tag in results)

    def _after_prompt(self, index: int) -> Span | None:
        """Return the span if the prompt is a prefix of the text, and so is the turn at least to the answer's end.

        The whole turn must be a prefix if the answer has no text but only tool calls.
        """
        prompt = self.render(self.messages[:index], add_generation_prompt=True)
        is_last = index == len(self.messages) - 1
        turn = self.text if is_last else self.render(self.messages[: index + 1])
        if prompt is None or turn is None or not turn.startswith(prompt) or not self.text.startswith(prompt):
            return None
        start = len(prompt)
        stop = n_shared(self.text, turn)
        content = _content(self.messages[index])
        inner = content if content in self.text[start:stop] else content.strip()
        found = self.text.find(inner, start, stop)
        if found < 0 or (stop < len(turn) and (not inner or "tool_calls" in self.messages[index])):
            return None
        return start, self._end_of_turn(index, start, found + len(inner), stop, is_whole=stop == len(turn))

    def _end_of_turn(self, index: int, start: int, after: int, stop: int, *, is_whole: bool) -> int:
        """Return the end of the last special token in [after, stop), or else of the text in [start, stop).

        Special tokens inside a call do not end the turn. is_whole: the template writes nothing more for this turn. Then
        the special token that begins the next turn ends it (GLM).
        """
        if not is_whole:  # the text goes on differently, perhaps in the middle of a token
            tokens = (match.span() for match in self.special.finditer(self.text, after))
            stop = next((begin for begin, end in tokens if begin < stop < end), stop)
        ends = [match.end() for match in self.special.finditer(self.text, after, stop)]
        if ends and "tool_calls" not in self.messages[index]:
            return ends[-1]
        of_text = max(after, start + len(self.text[start:stop].rstrip()))
        if ends and ends[-1] >= of_text:
            return ends[-1]
        next_turn = self.special.match(self.text, of_text) if is_whole and stop == of_text else None
        return next_turn.end() if next_turn else of_text

    # ---- by tags

    def _between_tags(self, index: int) -> Span | None:
        """Return the span of an answer by its tags, with the white space that the data set has around it."""
        written = [place for place, tag in enumerate(self._tags) if self._fields[tag.number].turn == index]
        turn = self.render(self._tagged[: index + 1])
        last = _last_tag(turn or "")
        if not written or turn is None or last is None or not self._is_unchanged(index):
            return None
        end = next((tag for tag in self._tags if tag.is_end and tag.number == int(last[2] or -1)), None)
        start = self._start(index, written[0])
        if end is None or start is None or self._fields[end.number].turn != index:
            return None
        after = end.place
        tail = turn[last.end() :]
        content = _content(self.messages[index])
        trail = content[len(content.rstrip()) :]
        stop = after + n_shared(self.text[after : after + len(tail)], tail)
        is_whole = stop == after + len(tail)
        if self._fields[end.number].name == "content" and self.text.startswith(trail, after):
            after += len(trail)
        return start, self._end_of_turn(index, start, after, max(stop, after), is_whole=is_whole)

    def _start(self, index: int, first: int) -> int | None:
        """Return where the answer begins whose first tag is `self._tags[first]`.

        The text after the previous turn is compared with what the prompt of this answer has there.
        """
        place = self._tags[first].place - self._tags[first].is_end  # an end: the beginning of the answer is left out
        prompt = self.render(self._tagged[:index], add_generation_prompt=True)
        if prompt is None:
            return place
        before = self._tags[first - 1] if first else None
        last = _last_tag(prompt)
        if (before and before.number) != (last and int(last[2] or last[1])):
            return None
        begin = before.place if before else 0
        prompt = prompt[last.end() :] if last else prompt
        head = self.text[begin:place]
        shared = n_shared(head, prompt)
        if shared < len(prompt):
            shared = len(_PART_OF_MARKUP.sub("", head[:shared]))
            shared -= head[:shared].endswith(" ")  # tokenizers merge the space before a word into its token
        return begin + shared

    def _is_unchanged(self, index: int) -> bool:
        """Return whether the content of a turn is in the text once, at least its end, or the names of its calls are."""
        found = False
        for number, field in enumerate(self._fields):
            if field.turn != index or field.name == "reasoning":
                continue
            tags = [tag for tag in self._tags if tag.number == number]
            ends = [tag.place for tag in tags if tag.is_end]
            begins = [tag.place for tag in tags if not tag.is_end]
            if not ends:
                continue
            several = field.name == "content" and (len(ends) > 1 or len(begins) > 1)
            if several or not self._is_written(field.text, begins[:1], ends[0]):
                return False
            found = True
        return found

    def _is_written(self, field: str, begins: list[int], end: int) -> bool:
        """Return whether a field ends at `end`. begins: where it begins; empty if its beginning is left out."""
        begin = begins[0] if begins else self._begin_of_tail(end, field)
        left_out = "" if begins else field[: begin - end]
        is_reasoning = left_out.find("<think>") <= 0  # other text before it would be lost
        return begin < end and left_out + self.text[begin:end] == field and is_reasoning

    def _begin_of_tail(self, end: int, content: str) -> int:
        """Return where the part of `content` begins that the text up to `end` ends with; not in a special token."""
        text = self.text[:end]
        begin = end - n_shared(text[::-1], content[::-1])
        return next(
            (match.end() for match in self.special.finditer(text) if match.start() < begin < match.end()), begin
        )

    @cached_property
    def _marked(self) -> tuple[list[dict[str, Any]], list[TaggedField]]:
        return tag_messages(self.messages)

    @property
    def _tagged(self) -> list[dict[str, Any]]:
        return self._marked[0]

    @property
    def _fields(self) -> list[TaggedField]:
        return self._marked[1]

    @cached_property
    def _tags(self) -> list[Tag]:
        """The tags of all turns in the order of the text; none if the template writes another text because of them."""
        return find_tags(self.render(self._tagged), self.text)


def find_tags(written: str | None, text: str) -> list[Tag]:
    """Return the tags in `written`, a rendering of tagged messages, or none unless it equals `text` but for them."""
    if written is None or _TAG.sub("", written) != text:
        return []
    tags = []
    length_of_tags = 0
    for match in _TAG.finditer(written):
        tags.append(Tag(int(match[1] or match[2]), match[1] is None, match.start() - length_of_tags))
        length_of_tags += len(match[0])
    return tags


def tag_messages(
    messages: Sequence[dict[str, Any]], *, system: bool = False
) -> tuple[list[dict[str, Any]], list[TaggedField]]:
    """Return the messages with tags around contents, reasoning and names of calls, and these fields by number.

    System turns have some only with `system`. White space around a text stays outside the tags, for templates that
    trim the text.
    """
    fields: list[TaggedField] = []

    def tagged(turn: int, name: FieldName, text: str) -> str:
        inner = text.strip()
        if not inner:
            return text
        number, lead = len(fields), text[: len(text) - len(text.lstrip())]
        fields.append(TaggedField(turn, name, inner))
        return f"{lead}\ufdd2{number}\ufdd2{inner}\ufdd3{number}\ufdd3{text[len(text.rstrip()) :]}"

    def tagged_message(turn: int, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "system" and not system:
            return message
        new = dict(message)
        reasoning = [name for name in REASONING_FIELDS if name in message]
        if reasoning:
            new |= dict.fromkeys(reasoning, tagged(turn, "reasoning", message[reasoning[0]]))
        if message["content"]:
            new["content"] = tagged(turn, "content", message["content"])
        if "tool_calls" in message:
            calls = message["tool_calls"]
            names = [tagged(turn, "call", call["function"]["name"]) for call in calls]
            new["tool_calls"] = [
                {**call, "function": {**call["function"], "name": name}}
                for call, name in zip(calls, names, strict=True)
            ]
        return new

    return [tagged_message(turn, message) for turn, message in enumerate(messages)], fields


def _content(message: dict[str, Any]) -> str:
    return message["content"] or ""


def _last_tag(text: str) -> re.Match[str] | None:
    return next(reversed(list(_TAG.finditer(text))), None)


def n_shared(text: str, other: str) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(text), len(other))
    if text[:shorter] == other[:shorter]:  # nearly always, and many times faster than the loop
        return shorter
    return next(index for index in range(shorter) if text[index] != other[index])
