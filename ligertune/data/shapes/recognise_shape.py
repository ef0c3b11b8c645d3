"""Recognition of a data set from its first rows: a format, and the columns that are read under other names.

In this order: message trees, token ids, the columns of alpaca, sharegpt and messages, a list of turns under any name,
one prompt name and one answer name, texts with role markers, and raw text. What could be meant in two ways is refused
with the lines that choose. Rows of another kind than conversations are refused by that kind (rows/row_kind.py).

Also recognition of the task that fits data: each kind of rows says whether the data are its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from ligertune.data.rows.conversation import ROLES
from ligertune.data.rows.data_files import Record
from ligertune.data.rows.formats import FORMATS, Format, RowShape, recognise_format
from ligertune.data.rows.row_kind import CONVERSATIONS, FirstRows, RowKind, other_row_kinds
from ligertune.data.shapes.column_names import (
    ANSWER_NAMES,
    OPTIONAL_NAMES,
    PROMPT_NAMES,
    REASONED_ANSWERS,
    TURN_NAMES,
    WEAK_ANSWER_NAMES,
    WEAK_PROMPT_NAMES,
    columns_line,
    is_weighty,
    renamed_row,
)
from ligertune.data.shapes.sample_columns import SampleColumns
from ligertune.data.tokenized_rows import TOKEN_COLUMNS, TOKENS
from ligertune.errors import UserError

if TYPE_CHECKING:
    from ligertune.planning.options import DatasetOptions

_MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
_RAW_NAMES = ("text", "content", "document", "body", "article", "code")  # of raw text
_MAX_LINES = 4  # of a refusal
_BY_NAME = {row.name: row for row in FORMATS}
_ANSWERS = {"answer", "output", "completion"}
_EXCHANGE = {"question", "instruction", "prompt", *_ANSWERS}
_FIRST = tuple(_BY_NAME[name] for name in ("alpaca", "sharegpt", "llava", "messages"))


def recognise_shape(
    spec: DatasetOptions, kind: RowKind, first: Sequence[Record], path: str, *, problem_type: str | None = None
) -> RowShape:
    """Return the shape of data from its first records, to which `data.datasets[].columns` is applied.

    problem_type: of the targets, if the recipe names one.
    Raises UserError, naming `path`, for rows that fit no format, several, or another task.
    """
    sample = SampleColumns(first)
    columns = dict[str, str]()
    if "thread" in sample and kind.recognise is not None:
        raise UserError(
            f"{path}: message trees hold conversations, and this task needs rows of another kind.",
            hint="Write task: sft, or another data set.",
        )
    if kind.recognise is not None and TOKENS in sample.names <= set(TOKEN_COLUMNS):
        raise UserError(
            f"{path}: its rows are token ids, and this task needs {kind.noun}.",
            hint=f"Write task: sft, or name a data set of {kind.noun}.",
        )
    if kind.recognise is not None:
        format = kind.recognise(FirstRows(first, spec.format, path, problem_type))
    elif spec.format != "auto":
        _refuse_format_name(spec.format)
        format = recognise_format(spec.format, sample.names, path)
    else:
        format, columns = _recognise_conversations(sample, spec, path)
    if format.name == "prompt_completion" and sample.is_turns(columns.get("prompt", "prompt")):
        format = replace(format, template="chat")
    columns |= _optional_columns(format, sample, columns, path)
    read = {*format.required, *format.optional, *(name.split(".")[0] for name in columns.values()), *_MEDIA}
    read |= set() if format.raw else {"chat_template_kwargs"}
    unread = tuple(sorted(sample.names - read))
    return RowShape(format, columns, unread, _note(path, format, unread))


def _recognise_conversations(sample: SampleColumns, spec: DatasetOptions, path: str) -> tuple[Format, dict[str, str]]:
    """Return the format of conversations, and its columns that have other names. Rows of other kinds are refused."""
    others = other_row_kinds()
    for other in others:
        other.refuse(sample, path)
    format, columns = _Recognition(sample, spec.columns, path).found()
    for other in others:
        other.refuse_format(sample, path, format, columns)
    return format, columns


def _refuse_format_name(name: str) -> None:
    """Raise UserError for the name of a format of other rows than conversations."""
    if name in _BY_NAME:
        return
    kind = next(kind for kind in other_row_kinds() if name in (row.name for row in kind.formats))
    raise UserError(f"data.datasets[].format: {name} is for {kind.noun}.", hint=f"Write {kind.setting}.")


def _optional_columns(format: Format, sample: SampleColumns, columns: dict[str, str], path: str) -> dict[str, str]:
    """Return the names of system prompt, tools and other optional columns."""
    found = {}
    for ours, names in OPTIONAL_NAMES.items():
        if ours not in format.optional or (ours in sample and (sample.values(ours) or not sample.rows)):
            continue
        others = [name for name in sample.spelled((ours, *names)) if name != ours and name not in columns.values()]
        others += [name for name in names if "." in name and sample.values(name)]
        filled = [name for name in others if sample.values(name)] or others[:1]
        if len(filled) > 1:
            raise _ambiguous(sample, path, [{ours: name} for name in filled])
        if filled and _fits(ours, filled[0], sample):
            found[ours] = filled[0]
    return found


def _fits(ours: str, name: str, sample: SampleColumns) -> bool:
    """Return whether the values of an optional column can be what its name says."""
    return ours == "tools" or not sample.values(name) or sample.is_text(name)


def _note(path: str, format: Format, unread: Sequence[str]) -> str:
    sentences = []
    if format.name == "oasst":
        sentences.append(f"{path}: of several answers to one prompt, only the best ranked is read.")
    if weighty := [f"`{name}`" for name in unread if is_weighty(name)]:
        verb, subject = ("is", "it has") if len(weighty) == 1 else ("are", "they have")
        sentences.append(f"{path}: {', '.join(weighty)} {verb} not read: {subject} no effect on what is trained.")
    sentences += [kind.note(format, unread) for kind in other_row_kinds()]
    return " ".join(filter(None, sentences))


def _ambiguous(sample: SampleColumns, path: str, choices: Sequence[dict[str, str]], more: str = "") -> UserError:
    """Return the error for columns that can be read in several ways, with a line for each."""
    lines = " or ".join(columns_line(choice) for choice in choices[:_MAX_LINES])
    return UserError(f"{path}: its columns ({sample.found}) can be read in several ways.", hint=f"Write {lines}{more}.")


def _last_word(name: str) -> str:
    """Return the part of a nested name that says what it is: `answers` of `answers.text.0`."""
    words = [part for part in name.split(".") if not part.isdecimal()]
    return words[-2] if len(words) > 1 and words[-1] in ("text", "value", "content") else words[-1]


class _Recognition:
    """The rules of `format: auto`, in their order, over the first rows of one data set.

    named: our names in `data.datasets[].columns`: they decide where several columns could be meant.
    """

    def __init__(self, sample: SampleColumns, named: Collection[str], path: str) -> None:
        self.sample = sample
        self.named = set(named)
        self.path = path
        self.prompts = self._texts(PROMPT_NAMES)
        self.answers = self._texts(ANSWER_NAMES, or_calls="tools" in sample)
        if len(self.prompts) > 1:  # `input` is the second part of another prompt
            self.prompts = [name for name in self.prompts if name.lower() != "input"]

    def found(self) -> tuple[Format, dict[str, str]]:
        """Return the format, and its columns that have other names."""
        for rule in (
            self._trees,
            self._tokens,
            self._columns,
            self._turns,
            self._exchange,
            self._dialogue,
            self._raw_text,
        ):
            if result := rule():
                return result
        return self._by_columns_alone()

    def _texts(self, names: Sequence[str], *, or_calls: bool = False) -> list[str]:
        """Return the columns with these names that hold texts; only those that the recipe names, if it does."""
        found = [
            name
            for name in self.sample.spelled(names)
            if self.sample.is_text(name) or (or_calls and self._are_calls(name))
        ]
        return [name for name in found if name in self.named] or found

    def _are_calls(self, name: str) -> bool:
        values = [value[:1] if isinstance(value, list) else [] for value in self.sample.values(name)]
        return bool(values) and all(
            isinstance(call, dict) and "name" in call for first in values for call in first or [0]
        )

    def _trees(self) -> Any:
        return (_BY_NAME["oasst"], {}) if "thread" in self.sample else None

    def _tokens(self) -> Any:
        """Recognise rows that are tokenized, other columns or not, unless the recipe names those of another format."""
        others = self.named - set(TOKEN_COLUMNS)
        # a list, or its JSON text in a csv file
        is_list = any(str(value).lstrip().startswith("[") for value in self.sample.values(TOKENS))
        return (_BY_NAME["tokenized"], {}) if is_list and not others else None

    def _columns(self) -> Any:
        """Recognise alpaca, sharegpt and messages by their columns, unless the recipe names those of another."""
        texts = set(self.sample.dialogues)  # in place of turns
        fitting = [row for row in _FIRST if set(row.required) <= self.sample.names - texts]
        asked = {column for row in FORMATS if row not in _FIRST for column in row.required} & self.named
        if not fitting or (asked and not any(set(row.required) & self.named for row in fitting)):
            return None
        return recognise_format("auto", self.sample.names - texts, self.path, _FIRST), {}

    def _turns(self) -> Any:
        """Recognise a list of turns under any name, or turns as prompt with an answer as text or turns."""
        sample = self.sample
        if sample.is_turns("prompt"):
            if "completion" in sample and (sample.is_turns("completion") or sample.is_text("completion")):
                return _BY_NAME["prompt_completion"], {}
            if "assistant" not in sample.roles("prompt") and len(self.answers) == 1:
                return _BY_NAME["prompt_completion"], {"completion": self.answers[0]}
        found = [name for name in sorted(sample.names) if "assistant" in sample.roles(name)]
        pairs = self._pairs(self.answers)
        if not found or (pairs and self.named & _EXCHANGE):
            return None
        if len(found) == 1 and (not pairs or found[0].lower() in TURN_NAMES):
            return _BY_NAME["messages"], {"messages": found[0]}
        raise _ambiguous(sample, self.path, [*({"messages": name} for name in found), *pairs])

    def _exchange(self) -> Any:
        """Recognise one prompt and one answer."""
        if not (self.prompts and self.answers):
            return None
        answers = [*self._reasoned_answers(), *self.answers]
        if len(self.prompts) > 1 or len(answers) > 1:
            raise _ambiguous(self.sample, self.path, self._pairs(answers))
        columns = self._exchange_columns(self.prompts[0], self.answers[0])
        format = next(row for row in FORMATS if set(row.required) == set(columns))
        return format, {ours: name for ours, name in columns.items() if ours != name}

    def _pairs(self, answers: Sequence[str]) -> list[dict[str, str]]:
        """Return the columns of each prompt with each answer. A column that keeps its name is chosen by naming it."""
        return [self._exchange_columns(*pair) for pair in product(self.prompts, answers)]

    def _reasoned_answers(self) -> list[str]:
        """Return the answers of reasoning models, unless the recipe names the answer."""
        return [] if self.named & _ANSWERS else [name for name in REASONED_ANSWERS if self.sample.is_text(name)]

    def _exchange_columns(self, prompt: str, answer: str) -> dict[str, str]:
        """Return the columns of one exchange. Only `prompt` and `completion` are joined without a template."""
        if prompt.lower() == "instruction":
            return {"instruction": prompt, "output": answer}
        if self.sample.values(reasoning := REASONED_ANSWERS.get(answer, "")):
            return {"question": prompt, "answer": answer, "reasoning": reasoning}
        others = self.sample.spelled((*OPTIONAL_NAMES["system"], *OPTIONAL_NAMES["tools"]))
        names = ("history", "system", "tools", *others)
        has_more = any(value not in ("", "[]", []) for name in names for value in self.sample.values(name))
        if (prompt.lower(), answer.lower()) == ("prompt", "completion") and not has_more:
            return {"prompt": prompt, "completion": answer}
        return {"question": prompt, "answer": answer}

    def _dialogue(self) -> Any:
        """Recognise texts with role markers."""
        found = ["text"] if "text" in self.named and "text" in self.sample.dialogues else self.sample.dialogues
        if len(found) > 1:
            raise _ambiguous(self.sample, self.path, [{"text": name} for name in found])
        if not found:
            return None
        return _BY_NAME["dialogue"], {} if found == ["text"] else {"text": found[0]}

    def _raw_text(self) -> Any:
        """Recognise raw text, which is all trained, unless there is a column that could be its answer."""
        if "text" not in self.sample:
            return None
        answers = self._texts((*ANSWER_NAMES, *WEAK_ANSWER_NAMES))
        if self.sample.is_text("text") and (answers or self.prompts) and "text" not in self.named:
            pairs = [{"question": "text", "answer": name} for name in answers]
            pairs += [self._exchange_columns(name, "text") for name in self.prompts]
            raise _ambiguous(self.sample, self.path, pairs, more=", or data.datasets[].format: text to train all of it")
        return _BY_NAME["text"], {}

    def _by_columns_alone(self) -> tuple[Format, dict[str, str]]:
        """Recognise a format whose values are not those of the format. Raises UserError, with the lines that work."""
        if choices := self._choices():
            lines = " or ".join(columns_line(choice) for choice in choices[:_MAX_LINES])
            found = f"{self.path}: its columns ({self.sample.found}) fit no known format"
            raise UserError(f"{found}.", hint=f"Write {lines}.")
        options = next((name for name in ("choices", "options") if name in self.sample), "")
        if options and "question" in self.sample:
            raise UserError(
                f"{self.path}: its columns ({self.sample.found}) are those of multiple choice.",
                hint=f"Write the text of the right one of the `{options}` into a column `answer`.",
            )
        return recognise_format("auto", self.sample.names, self.path), {}

    def _choices(self) -> list[dict[str, str]]:
        """Return columns with which the data set is read, the most likely first."""
        sample = self.sample
        turns = [name for name in sample.nested if "assistant" in sample.roles(name)]
        if turns:
            return [{"messages": name} for name in turns]
        prompts = self.prompts or self._candidates((*PROMPT_NAMES, *WEAK_PROMPT_NAMES))
        answers = self.answers or self._candidates((*ANSWER_NAMES, *WEAK_ANSWER_NAMES))
        pairs = [self._line(*pair) for pair in product(prompts, answers) if pair[0] != pair[1]]
        if not pairs and "translation" in sample:
            texts = [name for name in sample.nested if name.startswith("translation.")][:2]
            pairs = [{"question": a, "answer": b} for a in texts for b in texts if a != b]
        return pairs or [{"text": name} for name in sample.spelled(_RAW_NAMES) if sample.is_text(name)]

    def _candidates(self, names: Sequence[str]) -> list[str]:
        """Return columns and nested names with one of these names, in the order of the names."""
        sample = self.sample
        flat = [name for name in sample.spelled(names) if sample.is_text(name)]
        nested = [(names.index(_last_word(name)), name) for name in sample.nested
                  if _last_word(name) in names and sample.is_text(name)]  # fmt: skip
        return flat + [name for _, name in sorted(nested)]

    def _line(self, prompt: str, answer: str) -> dict[str, str]:
        """Return the columns of one exchange that the recipe has to name."""
        if (prompt, answer) == ("prompt", "canonical_solution"):
            return {"completion": answer}
        columns = self._exchange_columns(prompt, answer)
        return {ours: name for ours, name in columns.items() if ours != name} or columns


# ---- what features ask of the first rows


def holds_answers(sample: SampleColumns, first: Sequence[Record], spec: DatasetOptions) -> bool:
    """Return whether the rows hold answers, next to which a label is not what is learned."""
    if "completions" in sample and "labels" in sample:
        return True  # labels of steps: no task trains on them, and the reader says so
    for name in ("messages", "conversations"):
        roles = {ROLES.get(role) for role in sample.roles(name)}
        if roles and "assistant" not in roles:
            return False  # questions without answers
    try:
        return not recognise_shape(spec, CONVERSATIONS, first, spec.path).format.raw
    except UserError:
        return False


def renamed_records(first: Sequence[Record], columns: dict[str, str]) -> list[Record]:
    """Return the records with `columns` applied, a dict of {our name: the data set's name}."""
    if not columns:
        return list(first)
    return [record._replace(row=renamed_row(record.row, columns)) for record in first]
