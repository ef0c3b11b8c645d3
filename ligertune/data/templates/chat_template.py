"""Chat templates: a conversation as the text that the model reads, and which characters of it are trained.

A chat template writes every special token itself (Hugging Face's rule), so its text is encoded without adding any. What
is trained of it:

- a template with `{% generation %}` marks it itself: what is inside is trained, nothing else;
- otherwise everything that the model has to write after the generation prompt: see `answers`. So the space that
  Mistral's template puts before an answer is trained, and a finished conversation's own EOS (Phi-3) belongs to the last
  answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ligertune.data.rows.conversation import BadRow, Conversation, Message
from ligertune.data.rows.formats import Format
from ligertune.data.rows.image_rows import image_parts
from ligertune.data.templates.answer_spans import answer_spans
from ligertune.data.templates.control_tokens import ControlTokens, Rendered, Span
from ligertune.data.templates.prompts import AlpacaTemplate, PlainTemplate, TrainOn
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions

# what a template may raise on data it was not written for
_TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_IMAGE = re.compile(r"[\"']image[\"']")  # the template knows parts of this type
_STRING = re.compile(r"\bis\s+string\b")  # and turns that are a plain text


class RowTemplate(Protocol):
    """`AlpacaPrompts`, `PlainText` or `ChatTemplate`."""

    name: str

    def render(self, conversation: Conversation) -> Rendered: ...


def choose_template(
    data: DataOptions, format: Format, tokenizer: PreTrainedTokenizerBase, *, with_images: bool = False
) -> RowTemplate:
    """What `data.prompt_template` means for rows of this format; `with_images`: their texts may hold image marks."""
    wanted = format.template if data.prompt_template == "auto" else data.prompt_template
    if format.raw and wanted != format.template:
        raise UserError(
            f"data.prompt_template: {data.prompt_template} is not for rows of format {format.name}: they are texts.",
            hint="Write data.prompt_template: auto, or name the columns of a conversation in data.datasets[].columns.",
        )
    if wanted == "plain" and data.system_prompt:
        raise UserError(
            f"data.system_prompt has no place in rows of format {format.name}, which are taken as they stand.",
            hint="Remove it" + ("." if format.raw else ", or write data.prompt_template: chat."),
        )
    if wanted == "plain":
        return PlainTemplate(tokenizer, data.train_on)
    if wanted == "alpaca":
        return AlpacaTemplate(tokenizer, data.system_prompt, data.train_on)
    if wanted == "chat":
        if not tokenizer.chat_template:
            raise UserError(
                f"The tokenizer has no chat template, which data.prompt_template: {data.prompt_template} needs here.",
                hint="Name a jinja file there, or write data.prompt_template: alpaca if the rows are single exchanges.",
            )
        return ChatTemplate(tokenizer, None, "chat", data.system_prompt, data.train_on, with_images=with_images)
    file = Path(wanted)
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"data.prompt_template: {wanted} cannot be read as a template file.",
            hint="Write auto, chat, alpaca or the name of a jinja file.",
        ) from error
    return ChatTemplate(tokenizer, source, file.name, data.system_prompt, data.train_on, with_images=with_images)


class ChatTemplate:
    """A jinja chat template: the tokenizer's, or that of a file."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str | None,
        name: str,
        system_prompt: str | None,
        train_on: TrainOn,
        *,
        with_images: bool = False,
    ) -> None:
        self.name = name
        self._with_images = with_images
        self._tokenizer = tokenizer
        self._source = source
        self._system_prompt = system_prompt
        self._train_on = train_on
        self._control = ControlTokens(tokenizer)

    def render(self, conversation: Conversation) -> Rendered:
        """The conversation as the template writes it, and the spans of the answers that are trained."""
        tools = self._control.marked(list(conversation.tools)) or None
        source = self._tokenizer.get_chat_template(self._source, tools)
        messages = [_as_template_sees(message, source) for message in conversation.messages]
        if self._system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._system_prompt})
        messages = self._control.marked(messages)
        writer = _Writer(source, self.name if self._source else None, tools, self._tokenizer.special_tokens_map)
        writer.takes_parts = self._with_images and bool(_IMAGE.search(source))
        writer.takes_strings = bool(_STRING.search(source))
        text = writer.write(messages)
        _check_nothing_is_left_out(writer, messages, text)
        if self._train_on == "all":
            return self._control.unmarked(Rendered(text, ((0, len(text)),)))
        if _GENERATION.search(source):
            spans = writer.generation_spans(messages)
        else:
            spans = answer_spans(writer, messages, text, self._control.pattern)
        answers = [message for message in conversation.messages if message.role == "assistant"]
        if len(spans) != len(answers):
            raise BadRow("the answer cannot be placed", f"{len(spans)} marked spans for {len(answers)} answers")
        chosen = list(zip(answers, spans, strict=True))
        if self._train_on == "last":
            chosen = chosen[-1:]
        return self._control.unmarked(Rendered(text, tuple(span for answer, span in chosen if answer.trained)))


class _Writer:
    """The jinja template with what stays the same for all renderings of one conversation."""

    def __init__(
        self, source: str, file: str | None, tools: list[dict[str, Any]] | None, special_tokens: dict[str, Any]
    ) -> None:
        self._file = file
        self.takes_parts, self.takes_strings = False, True  # of turns, how the template wants them
        self._fixed = {"chat_template": source, "tools": tools, **special_tokens}

    def write(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        return self._run(messages, add_generation_prompt=add_generation_prompt)[0][0]

    def try_write(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = False) -> str | None:
        """As `write`; None where the template refuses a part of a conversation that it takes as a whole."""
        try:
            return self.write(messages, add_generation_prompt=add_generation_prompt)
        except BadRow:
            return None

    def generation_spans(self, messages: Sequence[dict[str, Any]]) -> list[Span]:
        return [(start, end) for start, end in self._run(messages, return_assistant_tokens_mask=True)[1][0]]

    def _run(self, messages: Sequence[dict[str, Any]], **options: bool) -> tuple[list[str], list[list[Span]]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [self._as_taken(message) for message in messages]
        try:
            return render_jinja_template(conversations=[messages], **self._fixed, **options)
        except jinja2.TemplateSyntaxError as error:
            where = f"{self._file}:{error.lineno}" if self._file else f"The tokenizer's template, line {error.lineno}"
            raise UserError(f"{where}: not jinja: {error.message.rstrip('.')}.") from error
        except (jinja2.TemplateError, *_TEMPLATE_ERRORS) as error:
            raise BadRow("the template refuses it", str(error).partition("\n")[0][:120]) from error

    def _as_taken(self, message: dict[str, Any]) -> dict[str, Any]:
        """A turn in parts where it shows an image, or where the template knows no other form."""
        parts = image_parts(message["content"]) if self.takes_parts else []
        if all(part["type"] == "text" for part in parts) and (self.takes_strings or not self.takes_parts):
            return message
        return {**message, "content": parts}


def _as_template_sees(message: Message, source: str) -> dict[str, Any]:
    """The dict that chat templates read. What this template does not know goes into the text, in the usual form."""
    content = f"{message.content}\n\n{message.input}" if message.input.strip() else message.content
    seen: dict[str, Any] = {"role": message.role}
    if message.calls and "tool_calls" in source:
        calls = ({"name": call.name, "arguments": call.arguments} for call in message.calls)
        seen["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    elif message.calls:
        content = "\n".join([*([content] if content else []), *(call.text for call in message.calls)])
    if message.reasoning and "reasoning_content" in source:
        seen["reasoning_content"] = message.reasoning
    elif message.reasoning:
        content = f"<think>\n{message.reasoning}\n</think>\n\n{content}"
    return {**seen, "content": content}


def _check_nothing_is_left_out(writer: _Writer, messages: list[dict[str, Any]], text: str) -> None:
    """An answer must not be learnt from a tool's result or a system turn that the model is not shown."""
    for role in ("system", "tool"):
        others = [{**seen, "content": seen["content"] + "?"} if seen["role"] == role else seen for seen in messages]
        if others != messages and writer.try_write(others) == text:
            raise BadRow("the template leaves a turn out", role)
