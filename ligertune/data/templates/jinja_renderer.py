"""Renderer of one conversation: a chat template with the variables that all renderings of the conversation share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ligertune.data.bad_rows import BadRow
from ligertune.data.modalities.modality import marked_parts
from ligertune.data.templates.bounded_jinja import TemplateRefusalError, render_chat_template
from ligertune.data.templates.control_tokens import Span
from ligertune.data.templates.template_messages import check_calls

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@lru_cache(maxsize=64)
def has(source: str, pattern: re.Pattern[str]) -> bool:
    """Return whether a template contains a pattern. Each template is searched once, and not for each row."""
    return bool(pattern.search(source))


@dataclass(frozen=True)
class JinjaRenderer:
    """A jinja template with the arguments that all renderings of one conversation share."""

    source: str
    file: str  # its name, for errors
    variables: dict[str, Any]  # tools, and names of special tokens
    part_type: str | None  # of files, if content may be a list of parts; None: it is text
    takes_strings: bool

    def render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        """Return the text. Raises BadRow if the template refuses the messages."""
        return self._run(messages, add_generation_prompt=add_generation_prompt)[0]

    def try_render(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False) -> str | None:
        """Render, or return None: templates may refuse a part of a conversation that they accept as a whole."""
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt)
        except BadRow:
            return None

    @property
    def marks_answers(self) -> bool:
        """Whether the template marks the text that is trained, with `{% generation %}`."""
        return has(self.source, _GENERATION)

    def marked_answers(self, messages: Sequence[dict[str, Any]]) -> list[list[Span]]:
        """Return the spans of the `{% generation %}` blocks of each answer.

        Raises BadRow if other turns have such blocks, too.
        """
        spans = self._generation_spans(messages)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) == len(answers):
            return [[span] for span in spans]
        bounds = [0]  # an answer may have several blocks: those that its turn adds
        for place in answers:
            before, after = (len(self._generation_spans(messages[:stop])) for stop in (place, place + 1))
            if before != bounds[-1] or after == before:
                break
            bounds.append(after)
        if len(bounds) <= len(answers) or bounds[-1] != len(spans):
            raise BadRow("the answer cannot be placed", f"{len(spans)} marked spans for {len(answers)} answers")
        return [spans[start:stop] for start, stop in pairwise(bounds)]

    def check_complete(self, messages: list[dict[str, Any]], text: str) -> None:
        """Raise BadRow if the text lacks a system turn, a call or its result: answers would not have their cause.

        A turn is in the text if a change of its content changes the text.
        """
        for role in ("system", "tool"):
            changed = [
                {**message, "content": message["content"] + "?"} if message["role"] == role else message
                for message in messages
            ]
            if changed != messages and self.try_render(changed) == text:
                raise BadRow("the template leaves a turn out", role)
        check_calls(messages, text, self.try_render)

    def _generation_spans(self, messages: Sequence[dict[str, Any]]) -> list[Span]:
        return self._run(messages, spans=True)[1]

    def _run(self, messages: Sequence[dict[str, Any]], **options: bool) -> tuple[str, list[Span]]:
        messages = [self._with_parts(message) for message in messages]
        try:
            return render_chat_template(self.source, messages, name=self.file, **self.variables, **options)
        except TemplateRefusalError as error:
            raise BadRow("the template refuses it", str(error)) from error

    def _with_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        """Split the content into parts if it shows a file, or if the template reads only parts."""
        if message["content"] is None:
            return message
        parts = [] if self.part_type is None else marked_parts(message["content"], self.part_type)
        if all(part["type"] == "text" for part in parts) and (self.takes_strings or self.part_type is None):
            return message
        return {**message, "content": parts}
