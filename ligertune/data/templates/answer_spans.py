"""Answer spans: which characters of a rendered conversation are the assistant's answers.

An answer begins where its prompt ends: the rendering of the turns before it, with `add_generation_prompt`, is a prefix
of the whole text. It ends after the last special token that the template writes at the end of the turn, but before the
line break that follows it. Under a template that ends its turns without a special token only the text is trained.

Some templates write earlier turns differently once there are later ones (they drop old reasoning), or have a generation
prompt that a finished conversation does not show. Then the answers are rendered again, each between two tags of
noncharacters. If that rendering equals the text except for the tags, the tags mark the answers. If not, the template
rewrites the answer, and it cannot be marked. If only the end of an answer was rendered, that end is trained.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ligertune.data.rows.conversation import BadRow
from ligertune.data.templates.control_tokens import Span

_TAG = re.compile("\ufdd2(\\d+)\ufdd2|\ufdd3(\\d+)\ufdd3")  # begin and end of the answer in turn N


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

    def spans(self) -> list[Span]:
        """Return the span of each assistant turn, from the end of its prompt to the token that ends the turn.

        Raises BadRow if an answer is not in the text, or not exactly once.
        """
        spans: list[Span] = []
        for index, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            prompt = self.render(self.messages[:index], add_generation_prompt=True)
            span = self._after_prompt(index, prompt) or self._between_tags(index, prompt or "")
            if span[1] <= span[0]:
                raise BadRow("the answer cannot be placed", f"nothing is written for {message['content'][:40]!r}")
            spans.append(span)
        return spans

    def _after_prompt(self, index: int, prompt: str | None) -> Span | None:
        """Return the span if the prompt is a prefix of the text, and so is the turn at least to the answer's end.

        The whole turn must be a prefix if the answer has no text but only tool calls.
        """
        is_last = index == len(self.messages) - 1
        turn = self.text if is_last else self.render(self.messages[: index + 1])
        if prompt is None or turn is None or not turn.startswith(prompt) or not self.text.startswith(prompt):
            return None
        start, stop, content = len(prompt), _n_shared(self.text, turn), self.messages[index]["content"]
        inner = content if content in self.text[start:stop] else content.strip()
        found = self.text.find(inner, start, stop)
        if found < 0 or (not inner and stop < len(turn)):
            return None
        return start, self._end_of_turn(start, found + len(inner), stop)

    def _end_of_turn(self, start: int, after: int, stop: int) -> int:
        """Return the end of the last special token in [after, stop), or else of the text in [start, stop)."""
        ends = [match.end() for match in self.special.finditer(self.text, after, stop)]
        return ends[-1] if ends else max(after, start + len(self.text[start:stop].rstrip()))

    def _between_tags(self, index: int, prompt: str) -> Span:
        """Return the span of an answer by its tags, with the white space that the data set has around it."""
        text, content = self.text, self.messages[index]["content"]
        if index not in self._tagged_spans:
            raise BadRow("the answer cannot be placed", f"the template rewrites {content[:40]!r}")
        start, after = self._tagged_spans[index]
        lead, trail = _outer_space(content)
        is_whole = after - start == len(content.strip())
        stop = self._stop(index, after)
        if prompt and text.startswith(prompt) and len(prompt) <= (start if is_whole else after - 1):
            start = len(prompt)
        elif is_whole:
            start -= len(lead) if text[:start].endswith(lead) else 0
            start -= text[start - 1 : start] == " "  # tokenizers merge the space before a word into its token
        else:  # the part that was dropped may end in the line break that also ends the prompt
            start = max(start, _n_shared(text, prompt))
        after += len(trail) if text.startswith(trail, after) else 0
        return start, self._end_of_turn(start, after, stop)

    def _stop(self, index: int, end: int) -> int:
        """Return the end of the turn whose answer ends at `end`.

        It reaches as far as the text equals the text after the answer when this turn is the last.
        """
        if index == len(self.messages) - 1:
            return len(self.text)
        turn = self.render([*self.messages[:index], _tagged(self.messages[index], index)]) or ""
        tail = turn.rpartition(f"\ufdd3{index}\ufdd3")[2]
        return end + _n_shared(self.text[end : end + len(tail)], tail)

    @cached_property
    def _tagged_spans(self) -> dict[int, Span]:
        """The spans of the answers that the template writes unchanged, or without their beginning (reasoning)."""
        tagged = [
            _tagged(message, index) if message["role"] == "assistant" and message["content"].strip() else message
            for index, message in enumerate(self.messages)
        ]
        written = self.render(tagged)
        if written is None or _TAG.sub("", written) != self.text:
            return {}
        begins, ends = defaultdict(list), defaultdict(list)
        length_of_tags = 0
        for match in _TAG.finditer(written):
            (begins if match[1] else ends)[int(match[1] or match[2])].append(match.start() - length_of_tags)
            length_of_tags += len(match[0])
        spans = {}
        for index, (end, *others) in ends.items():
            content, begun = self.messages[index]["content"].strip(), begins[index]
            begin = begun[0] if begun else self._begin_of_tail(end, content)
            expected = content if begun else content[begin - end :]
            if not others and len(begun) < 2 and begin < end and self.text[begin:end] == expected:
                spans[index] = begin, end
        return spans

    def _begin_of_tail(self, end: int, content: str) -> int:
        """Return where the part of `content` begins that the text up to `end` ends with; not in a special token."""
        text = self.text[:end]
        begin = end - _n_shared(text[::-1], content[::-1])
        return next(
            (match.end() for match in self.special.finditer(text) if match.start() < begin < match.end()), begin
        )


def _tagged(message: dict[str, Any], index: int) -> dict[str, Any]:
    content = message["content"]
    lead, trail = _outer_space(content)
    return {**message, "content": f"{lead}\ufdd2{index}\ufdd2{content.strip()}\ufdd3{index}\ufdd3{trail}"}


def _outer_space(content: str) -> tuple[str, str]:
    """Return the white space before and after a text. It stays outside the tags, for templates that trim the text."""
    return content[: len(content) - len(content.lstrip())], content[len(content.rstrip()) :]


def _n_shared(text: str, other: str) -> int:
    """Return the length of the common prefix."""
    shorter = min(len(text), len(other))
    if text[:shorter] == other[:shorter]:  # nearly always, and many times faster than the loop
        return shorter
    return next(index for index in range(shorter) if text[index] != other[index])
