"""Prompts of a recipe's data sets: rows up to their last answer, with the other columns for score functions.

Rows without an answer get a placeholder for one, so that they are recognised, checked and rendered as rows with an
answer are; what stands before the answer is the prompt, in the template of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ligertune.data.bad_rows import DROP_REASONS, LENGTH_REASONS, BadRow
from ligertune.data.dataset_report import DatasetReport
from ligertune.data.rows.conversation import ROLES, Conversation, Message
from ligertune.data.rows.data_files import Record, display_path
from ligertune.data.rows.formats import Format, RowShape
from ligertune.data.rows.pairs import ANSWERS, PairTask, recognise_pairs
from ligertune.data.rows.row_kind import CONVERSATIONS, FirstRows
from ligertune.data.rows.sources import RecordStream
from ligertune.data.shapes.recognise_shape import recognise_shape
from ligertune.data.shapes.turn_lists import turns_in
from ligertune.data.templates.control_tokens import Rendered
from ligertune.data.templates.label_masking import Encoder
from ligertune.data.templates.prompt_templates import choose_template
from ligertune.decode.answer_metric import end_token
from ligertune.errors import UserError, panics_as_errors

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions, DatasetOptions

Form = Literal["chat", "alpaca", "plain"]
Turns = list[dict[str, Any]]

PLACEHOLDER = "The placeholder of an answer."
_NO_ANSWER = ("no answer", "last turn is not an answer")  # reasons of rows that end with a question
_TURN_COLUMNS = ("messages", "conversations")
_EXCHANGES = (("prompt", "completion"), ("question", "answer"), ("instruction", "output"))
_SAMPLE = 5000  # records whose columns decide the format, as in training
_ENDS_FROM = 16  # rows of a data set that show with which special token an answer ends


@dataclass(frozen=True)
class SamplePrompt:
    """The prompt of a row.

    ids: token ids; none if a server answers. form: chat if a chat template renders the turns, else a text.
    messages: the turns; tools: those that the row declares. text: as the model reads it. columns: of the row.
    source: "file:line".
    """

    ids: tuple[int, ...]
    form: Form
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    text: str
    columns: dict[str, Any]
    source: str

    @property
    def turns(self) -> Turns:
        """The messages as data files hold them: role, content, and reasoning and calls if there are any."""
        return [_as_turn(message) for message in self.messages]

    @property
    def scored(self) -> str | Turns:
        """The prompt as score functions get it: messages under a chat template, else a text, as in TRL."""
        return self.turns if self.form == "chat" else self.text

    def completion(self, text: str) -> str | Turns:
        """Return an answer as score functions get it: a list with one message under a chat template, else a text."""
        return [{"role": "assistant", "content": text}] if self.form == "chat" else text


@dataclass
class SamplePrompts:
    """The prompts of all data sets in their order. end_tokens: ids that end answers in the data. notes: for people."""

    prompts: list[SamplePrompt] = field(default_factory=list)
    end_tokens: set[int] = field(default_factory=set)
    rows_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)


@panics_as_errors()
def read_prompts(data: DataOptions, tokenizer: PreTrainedTokenizerBase | None) -> SamplePrompts:
    """Return the prompts of `data.datasets`, in their order. tokenizer: None if a server answers.

    Raises UserError for data without prompts, and if more rows cannot be used than data.max_dropped allows.
    """
    found = SamplePrompts()
    # the span that is trained begins where the model begins to write
    changes = {"train_on": "last", "mask_reasoning": False, "roles_to_train": ("assistant",), "train_on_eos": "turn"}
    data = data.model_copy(update=changes)
    for spec in data.datasets:
        _PromptReader(spec, data, tokenizer).read(found)
    if data.val_split:
        found.notes.append(
            "data.val_split holds no rows out of sampling: prompts are those of all rows of data.datasets."
        )
    if any(spec.weight != 1 for spec in data.datasets):
        found.notes.append("data.datasets[].weight does not apply to prompts: each row is answered once.")
    return found


class _PromptReader:
    """Reads the prompts of one data set."""

    def __init__(self, spec: DatasetOptions, data: DataOptions, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._spec = spec
        self._data = data
        self._tokenizer = tokenizer
        self._path = display_path(Path(spec.path))
        self._stream = RecordStream(spec, data.max_record_bytes, sample=_SAMPLE, download=not data.streaming)
        self._dropped: Counter[str] = Counter()
        self._first_dropped: dict[str, str] = {}

    def read(self, found: SamplePrompts) -> None:
        """Add the prompts of the data set to `found`. Raises UserError."""
        records = iter(self._stream)
        first = list(islice(records, _SAMPLE))
        if not first:
            raise UserError(f"{self._spec.path} holds no records.")
        shape, lacks_answer = self._shape(first)
        writer = _PromptWriter(self._data, shape.format, self._tokenizer)
        rows_read = 0
        used = 0
        for record in chain(first, records):
            rows_read += 1
            try:
                conversation = _conversation(record, shape, lacks_answer, self._repairs)
                prompt, ends = writer.prompt(conversation, record, with_end=used < _ENDS_FROM)
            except (BadRow, RecursionError, UnicodeEncodeError) as problem:
                self._drop(problem, record.source)
                continue
            used += 1
            found.prompts.append(prompt)
            found.end_tokens |= ends
        self._check(shape, rows_read, used)
        found.rows_read += rows_read
        found.dropped += self._dropped

    @property
    def _repairs(self) -> list[str] | None:
        return [] if self._spec.on_bad_row == "repair" else None

    def _shape(self, first: Sequence[Record]) -> tuple[RowShape, bool]:
        """Return the shape of the rows, and whether they need a placeholder for their answer."""
        names = {name for record in first for name in record.row}
        # pairs have both answers, and need no placeholder
        if set(ANSWERS) <= names:
            task = PairTask(needs="prompts of pairs need both answers", labels_hint="")
            return RowShape(recognise_pairs(task, FirstRows(first, self._spec.format, self._path))), False
        # first as they are, then with placeholders; if both fail, the error of the rows as they are is the one to show
        try:
            shape = recognise_shape(self._spec, CONVERSATIONS, first, self._path)
            lacks_answer = False
        except UserError as problem:
            try:
                shape = recognise_shape(self._spec, CONVERSATIONS, [_answered(one) for one in first], self._path)
                lacks_answer = True
            except UserError:
                raise problem from None
        if shape.format.raw:
            raise UserError(
                f"{self._path}: its rows are {'token ids' if shape.format.tokens else 'texts'} without prompts, so "
                "there is nothing to answer.",
                hint="Name a data set of prompts, conversations or pairs in data.datasets.",
            )
        return shape, lacks_answer

    def _drop(self, problem: Exception, source: str) -> None:
        bad = problem if isinstance(problem, BadRow) else _as_bad_row(problem)
        if self._spec.on_bad_row == "error" and bad.reason not in LENGTH_REASONS:
            raise UserError(
                f"{source}: {bad}: {DROP_REASONS[bad.reason]}.",
                hint="Repair the row, or let data.datasets[].on_bad_row be drop or repair.",
            ) from problem
        self._dropped[bad.reason] += 1
        self._first_dropped.setdefault(bad.reason, f"{source} ({bad.detail})" if bad.detail else source)

    def _check(self, shape: RowShape, rows_read: int, used: int) -> None:
        report = DatasetReport(
            path=self._path,
            format=shape.format.name,
            template="",
            rows_read=rows_read,
            examples=used,
            dropped=dict(self._dropped.most_common()),
            first_dropped=self._first_dropped,
        )
        report.check_dropped(self._data)


def _as_bad_row(problem: Exception) -> BadRow:
    if isinstance(problem, UnicodeEncodeError):
        return BadRow("broken text", f"U+{ord(problem.object[problem.start]):04X}")
    return BadRow("nested too deeply")


def _conversation(record: Record, shape: RowShape, lacks_answer: bool, repairs: list[str] | None) -> Conversation:
    """Return the conversation of a row, which ends with its last answer or a placeholder. Raises BadRow."""
    if record.too_large:
        raise BadRow("too large", f"{record.too_large:,} bytes")
    given = shape.of(_answered(record) if lacks_answer else record)
    try:
        found = shape.format.parse(given, repairs).conversations[0]
    except BadRow as bad:
        if bad.reason not in _NO_ANSWER:
            raise
        found = shape.format.parse(_answered(given), repairs).conversations[0]
    *prompt, answer = found.messages
    return replace(found, messages=(*prompt, replace(answer, trained=True)))


def _answered(record: Record) -> Record:
    """Return a record whose prompt has an answer, a placeholder, where it has none."""
    row = dict(record.row)
    for column in _TURN_COLUMNS:
        turns = turns_in(row.get(column))
        last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
        role, content = ("from", "value") if "from" in last else ("role", "content")
        if ROLES.get(str(last.get(role)).lower()) in ("user", "tool"):
            row[column] = [*turns, {role: "assistant", content: PLACEHOLDER}]
    for prompt, answer in _EXCHANGES:
        if row.get(prompt) is not None and row.get(answer) is None:
            is_turns = isinstance(turns_in(row[prompt]), list)
            row[answer] = [{"role": "assistant", "content": PLACEHOLDER}] if is_turns else PLACEHOLDER
    return record._replace(row=row)


# ---- rendering


class _PromptWriter:
    """Makes the prompts of one data set from its conversations, with token ids if a model answers here."""

    def __init__(self, data: DataOptions, format: Format, tokenizer: PreTrainedTokenizerBase | None) -> None:
        wanted = format.template if data.prompt_template == "auto" else data.prompt_template
        self._form: Form = "plain" if wanted == "plain" else "alpaca" if wanted == "alpaca" else "chat"
        self._max_length = data.max_length
        self._tokenizer = tokenizer
        if tokenizer is not None:
            self._template = choose_template(data, format, tokenizer)
            self._encoder = Encoder(tokenizer)

    def prompt(self, conversation: Conversation, record: Record, *, with_end: bool) -> tuple[SamplePrompt, set[int]]:
        """Return the prompt, and the id that ends its answer if that is wanted. Raises BadRow."""
        asked = conversation.messages[:-1]
        text = "\n\n".join(_content_of(message) for message in asked)
        ids: list[int] = []
        ends: set[int] = set()
        if self._tokenizer is not None:
            rendered = self._template.render(conversation)
            # the template leaves the answer out, or changes it
            if not rendered.trained:
                raise BadRow("the answer cannot be placed")
            before = _before_answer(rendered)
            text = before.text
            ids = self._encoded(before)
            if len(ids) > self._max_length:
                raise BadRow("too long", f"{len(ids)} tokens")
            if with_end:
                ends = end_token(self._encoded(rendered)[len(ids) :], self._tokenizer)
        if not ids and not text.strip():
            raise BadRow("empty prompt")
        prompt = SamplePrompt(
            ids=tuple(ids),
            form=self._form,
            messages=asked,
            tools=conversation.tools,
            text=text,
            columns=record.row,
            source=record.source,
        )
        return prompt, ends

    def _encoded(self, rendered: Rendered) -> list[int]:
        (encoded,) = self._encoder.encode([rendered])
        if isinstance(encoded, BadRow):
            raise encoded
        return [int(token) for token in encoded.input_ids]


def _before_answer(rendered: Rendered) -> Rendered:
    """Return the text before the answer, without trained spans and without EOS."""
    start = rendered.trained[0][0]
    literal = tuple(span for span in rendered.literal if span[1] <= start)
    return rendered._replace(text=rendered.text[:start], trained=(), literal=literal, eos=None, eos_trained=False)


def _as_turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {**message.fields, "role": message.role, "content": _content_of(message)}
    if message.reasoning:
        turn["reasoning_content"] = message.reasoning
    if message.calls:
        turn["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
        ]
    return turn


def _content_of(message: Message) -> str:
    return f"{message.content}\n\n{message.input}" if message.input.strip() else message.content
