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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ligertune.data.answers.answer_spans import AnswerFinder
from ligertune.data.answers.reasoning import ReasoningMask, drop_history_reasoning, end_of_think_block
from ligertune.data.answers.turn_parts import (
    TrainOnEos,
    TurnFinder,
    TurnParts,
    end_tokens,
    ends_that_train,
    is_open,
    joined_spans,
    parts_of_answer,
    unplaced_turns,
)
from ligertune.data.bad_rows import BadRow
from ligertune.data.rows.conversation import Conversation, Message, Role
from ligertune.data.rows.formats import Format
from ligertune.data.templates.bounded_jinja import known_templates, read_template, template_name, template_path
from ligertune.data.templates.control_tokens import ControlTokens, Rendered, Span
from ligertune.data.templates.jinja_renderer import JinjaRenderer, has
from ligertune.data.templates.template_messages import REASONING_FIELDS, forms_of, split_calls, template_messages
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions

TrainOn = Literal["assistant", "last", "all"]

_STRING = re.compile(r"\bis\s+string\b")  # the template reads content that is a plain string


def choose_template(
    data: DataOptions, format: Format, tokenizer: PreTrainedTokenizerBase, *, part_type: str | None = None
) -> PlainTemplate | ChatTemplate:
    """Return the template that `data.prompt_template` selects for rows of this format.

    part_type: of the files that marks in the texts stand for; None: there are none. Raises UserError for combinations
    that make no sense.
    """
    wanted = format.template if data.prompt_template == "auto" else data.prompt_template
    if format.raw and wanted != format.template:
        raise UserError(
            f"data.prompt_template: {data.prompt_template} is not for rows of format {format.name}, which are used "
            "unchanged.",
            hint="Write data.prompt_template: auto, or name the columns of a conversation in data.datasets[].columns.",
        )
    _check_options(wanted, data, format)
    if wanted == "plain":
        return PlainTemplate(tokenizer, data)
    if wanted == "alpaca":
        return AlpacaTemplate(tokenizer, data)
    name = wanted
    source = None
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
    return ChatTemplate(
        tokenizer,
        source,
        name,
        data.system_prompt,
        data.train_on,
        part_type=part_type,
        mask_reasoning=data.mask_reasoning,
        drop_history_reasoning=data.drop_history_reasoning,
        chat_template_kwargs=data.chat_template_kwargs,
        roles_to_train=data.roles_to_train,
        train_on_eos=data.train_on_eos,
    )


def _check_options(wanted: str, data: DataOptions, format: Format) -> None:
    """Raise UserError for options that have no effect on rows of this format under the template `wanted`."""
    if wanted == "plain" and data.system_prompt:
        raise UserError(
            f"data.system_prompt has no place in rows of format {format.name}, which are used unchanged.",
            hint="Remove it" + ("." if format.raw else ", or write data.prompt_template: chat."),
        )
    if wanted in ("plain", "alpaca") and data.chat_template_kwargs:
        raise UserError(
            f"data.chat_template_kwargs has no effect on rows of format {format.name} without a chat template.",
            hint="Remove it" + ("." if format.raw else ", or write data.prompt_template: chat."),
        )
    if wanted in ("plain", "alpaca") and tuple(data.roles_to_train) != ("assistant",):
        raise UserError(
            f"data.roles_to_train has no effect on rows of format {format.name} without a chat template.",
            hint="Remove it, or write data.train_on: all to train the prompt, too"
            + ("." if format.raw else ", or data.prompt_template: chat."),
        )
    if format.tokens and data.train_on_eos != "turn":
        raise UserError(
            f"data.train_on_eos has no effect on rows of format {format.name}, whose labels say what is trained.",
            hint="Remove it.",
        )
    if format.raw and data.mask_reasoning:
        raise UserError(
            f"data.mask_reasoning has no effect on rows of format {format.name}, which hold no turns.",
            hint="Remove it.",
        )


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja chat template: the tokenizer's if `source` is None, or the text of the file `name`."""

    tokenizer: PreTrainedTokenizerBase
    source: str | None
    name: str
    system_prompt: str | None
    train_on: TrainOn
    part_type: str | None = None  # of content parts that stand for files
    mask_reasoning: bool = False
    drop_history_reasoning: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    roles_to_train: tuple[Role, ...] = ("assistant",)
    train_on_eos: TrainOnEos = "turn"

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    @cached_property
    def _file(self) -> str:
        return self.name if self.source else template_name(self.tokenizer)

    def render(self, conversation: Conversation) -> Rendered:
        """Return the text that the template writes, and the spans of the answers that are trained.

        Raises BadRow for a conversation that the template cannot render completely, or without an answer that can be
        trained.
        """
        tools = self._control.mark(list(conversation.tools)) or None
        source = self.tokenizer.get_chat_template(self.source, tools)
        options = {**self.chat_template_kwargs, **conversation.chat_template_kwargs}
        renderer = JinjaRenderer(
            source,
            self._file,
            {**self.tokenizer.special_tokens_map, **self._control.mark(options), "tools": tools},
            part_type=self._part_type_in(source),
            takes_strings=has(source, _STRING),
        )
        turns = conversation.messages
        written = self._write(drop_history_reasoning(turns) if self.drop_history_reasoning else turns, renderer)
        if self.train_on == "all":
            return self._control.unmark(Rendered(written.text, ((0, len(written.text)),)))
        if self.roles_to_train == ("assistant",) and self.train_on_eos == "turn":
            return self._control.unmark(self._with_trained_spans(written, renderer))
        return self._control.unmark(self._with_trained_turns(written, renderer))

    def _part_type_in(self, source: str) -> str | None:
        """Return the type of the content parts of files; None if there are none, or the template does not read them."""
        if self.part_type is None or not has(source, re.compile(f"[\"']{self.part_type}[\"']")):
            return None
        return self.part_type

    def _write(self, turns: Sequence[Message], renderer: JinjaRenderer) -> _Written:
        """Render the turns in the first form that the template accepts and writes completely.

        Raises BadRow with the fault of the usual form if there is none.
        """
        refusal: BadRow | None = None
        for form in forms_of(turns, renderer.source):
            shown = split_calls(turns) if form.split else list(turns)
            if self.system_prompt and shown[0].role != "system":
                shown.insert(0, Message("system", self.system_prompt))
            messages = self._control.mark(template_messages(shown, renderer.source, form))
            try:
                text = renderer.render(messages)
                renderer.check_complete(messages, text)
                return _Written(shown, messages, text)
            except BadRow as bad:
                refusal = refusal or bad
        assert refusal is not None  # there is at least one form
        raise refusal

    def _answer_spans(self, written: _Written, renderer: JinjaRenderer) -> Sequence[BadRow | list[Span]]:
        """Return the spans of each answer in the text, or why it has none."""
        _, messages, text = written
        if renderer.marks_answers:
            return renderer.marked_answers(messages)
        found = AnswerFinder(renderer.try_render, messages, text, self._control.pattern).spans()
        return [answer if isinstance(answer, BadRow) else [answer] for answer in found]

    def _with_trained_spans(self, written: _Written, renderer: JinjaRenderer) -> Rendered:
        """Return the text with the spans that are trained, and why others are not. Raises BadRow if none can be."""
        turns, messages, text = written
        spans = self._answer_spans(written, renderer)
        places = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
        chosen = [(place, span) for place, span in zip(places, spans, strict=True) if turns[place].trained]
        if self.train_on == "last":
            chosen = [(place, span) for place, span in chosen if place == places[-1]]
        answers = [answer for _, answer in chosen]
        if self.mask_reasoning:
            mask = ReasoningMask(renderer.try_render, messages, text)
            answers = [
                answer if isinstance(answer, BadRow) else mask.unmasked(place, answer) for place, answer in chosen
            ]
        faults = [answer for answer in answers if isinstance(answer, BadRow)]
        if faults and len(faults) == len(answers):
            raise faults[0]
        trained = tuple([span for answer in answers if not isinstance(answer, BadRow) for span in answer])
        is_open = bool(trained) and trained[-1][1] == len(text) and not renderer.marks_answers
        end = self._next_role(messages, text, renderer) if is_open else None
        return Rendered(text, trained, eos=end, unplaced=tuple([fault.detail for fault in faults]))

    def _with_trained_turns(self, written: _Written, renderer: JinjaRenderer) -> Rendered:
        """As `_with_trained_spans`, for `roles_to_train` and `train_on_eos`."""
        turns, messages, text = written
        parts = self._parts_of_turns(written, renderer)
        last = max(place for place, turn in enumerate(turns) if turn.role == "assistant")
        chosen = [place for place, turn in enumerate(turns) if turn.trained and turn.role in self.roles_to_train]
        if self.train_on == "last":
            chosen = [last] if last in chosen else []
        appended = None
        if is_open(parts[last], len(text)) and not renderer.marks_answers:
            appended = self._next_role(messages, text, renderer)
        ends = ends_that_train(parts, chosen, self.train_on_eos, last_has_end=appended is not None)
        return Rendered(
            text,
            tuple(joined_spans(parts, chosen, ends)),
            eos=appended if last in ends else None,
            eos_trained=last in ends,
            unplaced=unplaced_turns(parts, chosen, ends),
        )

    def _parts_of_turns(self, written: _Written, renderer: JinjaRenderer) -> dict[int, TurnParts | BadRow]:
        """Return text and end token of each turn, without the reasoning that is not trained."""
        turns, messages, text = written
        special = self._control.pattern
        parts: dict[int, TurnParts | BadRow] = {}
        for place, spans in self._spans_by_turn(written, renderer).items():
            parts[place] = parts_of_answer(spans, text, special, has_calls=bool(turns[place].calls))
        names = {self.tokenizer.eos_token, *end_tokens(parts, text, special)}
        finder = TurnFinder(renderer.try_render, messages, text, special, names)
        return parts | {place: finder.parts(place) for place in range(len(turns)) if place not in parts}

    def _spans_by_turn(self, written: _Written, renderer: JinjaRenderer) -> dict[int, BadRow | list[Span]]:
        """Return the spans of each answer by the number of its turn."""
        turns, messages, text = written
        answers = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
        found = dict(zip(answers, self._answer_spans(written, renderer), strict=True))
        if self.mask_reasoning:
            mask = ReasoningMask(renderer.try_render, messages, text)
            found |= {place: mask.unmasked(place, span) for place, span in found.items() if isinstance(span, list)}
        return found

    def _next_role(self, messages: list[dict[str, Any]], text: str, renderer: JinjaRenderer) -> int | None:
        """Return the special token that would begin the turn after the last answer, if nothing else ends that (GLM)."""
        if text.endswith(self._control.names):
            return None
        # without reasoning, which templates drop once there is another turn
        plain = [{name: message[name] for name in message if name not in REASONING_FIELDS} for message in messages]
        role = "tool" if "tool_calls" in messages[-1] else "user"
        begin = renderer.try_render(plain)
        longer = renderer.try_render([*plain, {"role": role, "content": "?"}])
        if begin is None or longer is None or not longer.startswith(begin):
            return None
        following = self._control.pattern.match(longer, len(begin))
        return self._control.id_of(following[0]) if following else None


class _Written(NamedTuple):
    """A rendered conversation: its turns, the dicts that the template got, and the text."""

    turns: list[Message]
    messages: list[dict[str, Any]]
    text: str


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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataOptions) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "The tokenizer has no EOS token, so a model would never learn to stop.",
                hint="Name one in model.tokenizer.eos_token.",
            )
        writes_bos = tokenizer.bos_token_id is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
        self._train_on = data.train_on
        self._mask_reasoning = data.mask_reasoning
        # one turn is also the last one and all of them
        self._eos_trained = None if data.train_on_eos == "turn" else data.train_on_eos != "none"
        self._bos = tokenizer.bos_token_id if writes_bos else None
        self._eos = tokenizer.eos_token_id
        self._bos_text = tokenizer.bos_token or ""
        self._eos_text = tokenizer.eos_token

    def render(self, conversation: Conversation) -> Rendered:
        """Return prompt and completion, with BOS and EOS unless the text has its own."""
        *prompt, answer = conversation.messages
        if len(prompt) > 1 or any(turn.role != "user" for turn in prompt) or answer.calls or answer.reasoning:
            raise BadRow("several exchanges", f"{len(conversation.messages)} turns")
        rendered = self._exchange(prompt[0].content if prompt else "", answer)
        has_bos = self._bos_text and rendered.text.startswith(self._bos_text)
        has_eos = rendered.text.endswith(self._eos_text)
        if has_eos and self._eos_trained is False:
            stop = len(rendered.text) - len(self._eos_text)
            rendered = rendered._replace(trained=tuple((start, min(end, stop)) for start, end in rendered.trained))
        return rendered._replace(bos=None if has_bos else self._bos, eos=None if has_eos else self._eos)

    def _exchange(self, prompt: str, answer: Message) -> Rendered:
        text = prompt + answer.content
        start = 0 if self._train_on == "all" else len(prompt)
        if self._mask_reasoning:
            start = len(prompt) + end_of_think_block(answer.content)
        trained = ((start, len(text)),) if answer.trained or self._train_on == "all" else ()
        return Rendered(text, trained, bos=self._bos, eos=self._eos, eos_trained=self._eos_trained)


class AlpacaTemplate(PlainTemplate):
    """The two Stanford Alpaca prompts, with and without an input. Names of control tokens in the row are text."""

    name = "alpaca"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: DataOptions) -> None:
        super().__init__(tokenizer, data)
        self._system_prompt = data.system_prompt
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
