"""Prompt templates: render a conversation as the model's text, and find the characters that are trained.

A chat template writes all special tokens itself (Hugging Face's convention), so its text is tokenized without adding
any. The trained part is:

- under a template with `{% generation %}`, what these blocks contain, and nothing else;
- otherwise all that the model has to write after the generation prompt: see answer_spans.py. So the space that
  Mistral's template puts before an answer is trained, and Phi-3's EOS of a finished conversation belongs to the last
  answer.

The Alpaca prompts are Stanford's, with a line break after "### Response:" as nearly all later projects write them
(without it the answer's first word would follow the colon directly). Under them, and for plain texts, BOS is added
before the text if the tokenizer normally writes one, and EOS after the answer; both are added as ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ligertune.data.rows.conversation import BadRow, Conversation, Message
from ligertune.data.rows.formats import Format
from ligertune.data.rows.image_rows import image_parts
from ligertune.data.templates.answer_spans import AnswerFinder
from ligertune.data.templates.bounded_jinja import TemplateRefusalError, render_chat_template, template_name
from ligertune.data.templates.control_tokens import ControlTokens, Rendered, Span
from ligertune.data.templates.named_templates import known_templates, read_template, template_path
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions

TrainOn = Literal["assistant", "last", "all"]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_IMAGE = re.compile(r"[\"']image[\"']")  # the template reads parts of this type
_STRING = re.compile(r"\bis\s+string\b")  # the template reads content that is a plain string


def choose_template(
    data: DataOptions, format: Format, tokenizer: PreTrainedTokenizerBase, *, with_images: bool = False
) -> PlainTemplate | ChatTemplate:
    """Return the template that `data.prompt_template` selects for rows of this format.

    with_images: the texts may contain image marks. Raises UserError for combinations that make no sense.
    """
    wanted = format.template if data.prompt_template == "auto" else data.prompt_template
    if format.raw and wanted != format.template:
        raise UserError(
            f"data.prompt_template: {data.prompt_template} is not for rows of format {format.name}: they are texts.",
            hint="Write data.prompt_template: auto, or name the columns of a conversation in data.datasets[].columns.",
        )
    if wanted == "plain" and data.system_prompt:
        raise UserError(
            f"data.system_prompt has no place in rows of format {format.name}, which are used unchanged.",
            hint="Remove it" + ("." if format.raw else ", or write data.prompt_template: chat."),
        )
    if wanted == "plain":
        return PlainTemplate(tokenizer, data.train_on)
    if wanted == "alpaca":
        return AlpacaTemplate(tokenizer, data.system_prompt, data.train_on)
    name, source = wanted, None
    if wanted != "chat":
        name = template_path(wanted).name
        try:
            source = read_template(wanted)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"data.prompt_template: {wanted} cannot be read as a template file.",
                hint=f"Write auto, chat, alpaca, a jinja file, or a built-in template. {known_templates(wanted)}",
            ) from error
    elif not tokenizer.chat_template:
        raise UserError(
            f"The tokenizer has no chat template, which data.prompt_template: {data.prompt_template} needs here.",
            hint="Name a jinja file there, or write "
            + (
                "data.datasets[].format: text to train on the texts as they are."
                if format.name == "dialogue"
                else "data.prompt_template: alpaca if the rows are single exchanges."
            ),
        )
    return ChatTemplate(tokenizer, source, name, data.system_prompt, data.train_on, with_images=with_images)


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja chat template: the tokenizer's if `source` is None, or the text of the file `name`."""

    tokenizer: PreTrainedTokenizerBase
    source: str | None
    name: str
    system_prompt: str | None
    train_on: TrainOn
    with_images: bool = False

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    @cached_property
    def _file(self) -> str:
        return self.name if self.source else template_name(self.tokenizer)

    def render(self, conversation: Conversation) -> Rendered:
        """Return the text that the template writes, and the spans of the answers that are trained.

        Raises BadRow for a conversation that the template cannot render completely.
        """
        tools = self._control.mark(list(conversation.tools)) or None
        source = self.tokenizer.get_chat_template(self.source, tools)
        messages = [_template_message(message, source) for message in conversation.messages]
        if self.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        messages = self._control.mark(messages)
        renderer = _JinjaRenderer(
            source,
            self._file,
            {"tools": tools, **self.tokenizer.special_tokens_map},
            takes_parts=self.with_images and bool(_IMAGE.search(source)),
            takes_strings=bool(_STRING.search(source)),
        )
        text = renderer.render(messages)
        _check_complete(renderer, messages, text)
        if self.train_on == "all":
            return self._control.unmark(Rendered(text, ((0, len(text)),)))
        if _GENERATION.search(source):
            spans = renderer.generation_spans(messages)
        else:
            spans = AnswerFinder(renderer.try_render, messages, text, self._control.pattern).spans()
        answers = [message for message in conversation.messages if message.role == "assistant"]
        if len(spans) != len(answers):
            raise BadRow("the answer cannot be placed", f"{len(spans)} marked spans for {len(answers)} answers")
        chosen = list(zip(answers, spans, strict=True))
        if self.train_on == "last":
            chosen = chosen[-1:]
        return self._control.unmark(Rendered(text, tuple(span for answer, span in chosen if answer.trained)))


@dataclass(frozen=True)
class _JinjaRenderer:
    """A jinja template with the arguments that all renderings of one conversation share."""

    source: str
    file: str  # its name, for errors
    variables: dict[str, Any]  # tools, and names of special tokens
    takes_parts: bool  # content as a list of parts, for turns with images
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

    def generation_spans(self, messages: Sequence[dict[str, Any]]) -> list[Span]:
        """Return the spans of the `{% generation %}` blocks."""
        return self._run(messages, spans=True)[1]

    def _run(self, messages: Sequence[dict[str, Any]], **options: bool) -> tuple[str, list[Span]]:
        messages = [self._with_parts(message) for message in messages]
        try:
            return render_chat_template(self.source, messages, name=self.file, **self.variables, **options)
        except TemplateRefusalError as error:
            raise BadRow("the template refuses it", str(error)) from error

    def _with_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        """Split the content into parts if it shows an image, or if the template reads only parts."""
        parts = image_parts(message["content"]) if self.takes_parts else []
        if all(part["type"] == "text" for part in parts) and (self.takes_strings or not self.takes_parts):
            return message
        return {**message, "content": parts}


def _template_message(message: Message, source: str) -> dict[str, Any]:
    """Return the dict that chat templates read. Fields that this template does not read become text of the content."""
    content = f"{message.content}\n\n{message.input}" if message.input.strip() else message.content
    fields: dict[str, Any] = {"role": message.role}
    if message.calls and "tool_calls" in source:
        calls = ({"name": call.name, "arguments": call.arguments} for call in message.calls)
        fields["tool_calls"] = [{"type": "function", "function": call} for call in calls]
    elif message.calls:
        content = "\n".join([*([content] if content else []), *(call.text for call in message.calls)])
    if message.reasoning and "reasoning_content" in source:
        fields["reasoning_content"] = message.reasoning
    elif message.reasoning:
        content = f"<think>\n{message.reasoning}\n</think>\n\n{content}"
    return {**fields, "content": content}


def _check_complete(renderer: _JinjaRenderer, messages: list[dict[str, Any]], text: str) -> None:
    """Raise BadRow if the text lacks a tool result or system turn: the model would learn answers without their cause.

    A turn is in the text if a change of its content changes the text.
    """
    for role in ("system", "tool"):
        changed = [
            {**message, "content": message["content"] + "?"} if message["role"] == role else message
            for message in messages
        ]
        if changed != messages and renderer.try_render(changed) == text:
            raise BadRow("the template leaves a turn out", role)


ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str, input: str = "", introduction: str | None = None) -> str:
    """Return the text before the answer. `introduction` is a system prompt, which comes before Alpaca's own."""
    prompt = ALPACA_PROMPT_WITH_INPUT if input.strip() else ALPACA_PROMPT
    filled = prompt.format(instruction=instruction, input=input)
    return f"{introduction}\n\n{filled}" if introduction else filled


class PlainTemplate:
    """A prompt and its completion, or one text, unchanged: control tokens in it are control tokens."""

    name = "plain"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "The tokenizer has no EOS token, so a model would never learn to stop.",
                hint="Name one in model.tokenizer.eos_token.",
            )
        writes_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
        self._train_on = train_on
        self._bos, self._eos = tokenizer.bos_token_id if writes_bos else None, tokenizer.eos_token_id
        self._bos_text, self._eos_text = tokenizer.bos_token or "", tokenizer.eos_token

    def render(self, conversation: Conversation) -> Rendered:
        """Return prompt and completion, with BOS and EOS unless the text has its own."""
        *prompt, answer = conversation.messages
        if len(prompt) > 1 or any(turn.role != "user" for turn in prompt) or answer.calls or answer.reasoning:
            raise BadRow("several exchanges", f"{len(conversation.messages)} turns")
        rendered = self._exchange(prompt[0].content if prompt else "", answer)
        has_bos = self._bos_text and rendered.text.startswith(self._bos_text)
        has_eos = rendered.text.endswith(self._eos_text)
        return rendered._replace(bos=None if has_bos else self._bos, eos=None if has_eos else self._eos)

    def _exchange(self, prompt: str, answer: Message) -> Rendered:
        text = prompt + answer.content
        start = 0 if self._train_on == "all" else len(prompt)
        trained = ((start, len(text)),) if answer.trained or self._train_on == "all" else ()
        return Rendered(text, trained, bos=self._bos, eos=self._eos)


class AlpacaTemplate(PlainTemplate):
    """The two Stanford Alpaca prompts, with and without an input. Names of control tokens in the row are text."""

    name = "alpaca"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None, train_on: TrainOn) -> None:
        super().__init__(tokenizer, train_on)
        self._system_prompt = system_prompt
        self._control = ControlTokens(tokenizer)

    def render(self, conversation: Conversation) -> Rendered:
        """Return the filled prompt followed by the answer. Raises BadRow for more than one exchange."""
        *system, user, answer = conversation.messages
        several = len(system) > 1 or user.role != "user" or (system and system[0].role != "system")
        if several or answer.calls or answer.reasoning or conversation.tools:
            raise BadRow("several exchanges", f"{len(conversation.messages)} turns")
        introduction = system[0].content if system else self._system_prompt
        rendered = self._exchange(alpaca_prompt(user.content, user.input, introduction), answer)
        return rendered._replace(literal=self._control.found_in(rendered.text))
