"""`prepare`: the data section of a recipe, a tokenizer and a seed in; examples and an honest account of them out."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.conversation import OVERLENGTH, REASONS, BadRow
from ligertune.data.encode import IGNORE_INDEX, Encoded, encode
from ligertune.data.examples import Example, Examples
from ligertune.data.formats import check_columns, recognise
from ligertune.data.render import Rendered, Template, choose_template
from ligertune.data.sources import Record, read_records, shown_path
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.data.formats import Format
    from ligertune.recipe.schema import DatasetSpec, DataSpec


@dataclass(frozen=True)
class SetReport:
    """One entry of `datasets`: what it was taken for and what came of it."""

    path: str
    format: str
    template: str
    rows_read: int
    examples: int


@dataclass(frozen=True)
class DataReport:
    """What became of the rows of some data sets: rows_read == examples + held_out + sum(dropped.values()).

    `held_out` went to `val_split`; tokens are those of `examples`. `dropped` is by reason (`conversation.REASONS`),
    with the place of the first. `overlength` rows had more than max_length tokens; `truncated` of them were cut.
    """

    rows_read: int
    examples: int
    held_out: int
    dropped: dict[str, int]
    first_dropped: dict[str, str]
    tokens: int
    trained_tokens: int
    overlength: int
    truncated: int
    straddling: int  # tokens that begin in a prompt and reach into the answer: not trained
    sets: tuple[SetReport, ...]
    notes: tuple[str, ...]

    @property
    def trained_share(self) -> float:
        return self.trained_tokens / max(self.tokens, 1)


@dataclass(frozen=True)
class PreparedData:
    """`eval` comes from `eval_datasets` (then `eval_report` is theirs) or from `val_split`."""

    train: Examples
    eval: Examples | None
    report: DataReport
    template: str
    eval_report: DataReport | None = None


def prepare(data: DataSpec, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreparedData:
    """Reads, renders, tokenises and labels the data of a recipe; the same arguments give the same examples."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, which label masks need.",
            hint="Use a tokenizer that has a tokenizer.json.",
        )
    sets = [_load(spec, data, tokenizer) for spec in data.datasets]
    train = Examples(example for part in sets for example in part.examples)
    held_out, eval_report = None, None
    if data.eval_datasets:
        eval_sets = [_load(spec, data, tokenizer) for spec in data.eval_datasets]
        held_out = Examples(example for part in eval_sets for example in part.examples)
        eval_report = _report(eval_sets, held_out, data)
    elif data.val_split:
        train, held_out = split(train, data.val_split, seed=seed)
    template = ", ".join(dict.fromkeys(part.template for part in sets))
    return PreparedData(train, held_out, _report(sets, train, data), template, eval_report)


def split(examples: Examples, share: float, *, seed: int) -> tuple[Examples, Examples]:
    """(train, eval): a seeded draw of `share` of the examples, at least one, both parts in their old order."""
    count = max(1, round(share * len(examples)))
    if count >= len(examples):
        raise UserError(
            f"data.val_split: {share} of {len(examples)} examples leaves none to train on.",
            hint="Give more data or a smaller share.",
        )
    order = np.random.default_rng(seed).permutation(len(examples))
    return examples.select(sorted(order[count:])), examples.select(sorted(order[:count]))


@dataclass
class _LoadedSet:
    """The examples of one data set, and what was counted on the way."""

    path: str
    format: str
    template: str
    rows_read: int
    examples: list[Example] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)
    overlength: int = 0
    truncated: int = 0
    straddling: int = 0
    endless: int = 0  # last answers that are whole and yet end without a special token


def _load(spec: DatasetSpec, data: DataSpec, tokenizer: PreTrainedTokenizerBase) -> _LoadedSet:
    """One data set, from its files to labelled examples."""
    check_columns(spec.columns)
    records = read_records(spec)
    path = shown_path(Path(spec.path))
    format = recognise(spec.format, {column for record in records for column in record.row}, path)
    template = choose_template(data, format, tokenizer)
    loaded = _LoadedSet(path, format.name, template.name, len(records))
    rendered = _render_rows(records, spec, format, template, loaded)
    special = _special_ids(tokenizer)
    encodings = encode([text for text, _ in rendered], tokenizer)
    for (_, source), encoded in zip(rendered, encodings, strict=True):
        try:
            fitting = _fit(encoded, data, source, loaded)
        except BadRow as bad:
            _refuse(bad, source, spec, loaded)
            continue
        if fitting is encoded:  # not cut
            loaded.endless += int(encoded.input_ids[encoded.labels != IGNORE_INDEX][-1]) not in special
        loaded.straddling += encoded.straddling
        loaded.examples.append(Example(fitting.input_ids, fitting.labels, source))
    if not loaded.examples:
        raise _nothing_left(loaded)
    return loaded


def _report(sets: Sequence[_LoadedSet], kept: Examples, data: DataSpec) -> DataReport:
    """The counts of all sets together; `kept` is what is left of their examples after `val_split`."""
    examples = sum(len(part.examples) for part in sets)
    dropped = sum((part.dropped for part in sets), Counter())
    endless = sum(part.endless for part in sets)
    notes = []
    if endless and data.train_on != "all":
        notes.append(
            f"{endless} of {examples} examples end without a special token: "
            "the template does not teach the model where to stop."
        )
    return DataReport(
        rows_read=sum(part.rows_read for part in sets),
        examples=len(kept),
        held_out=examples - len(kept),
        dropped=dict(dropped.most_common()),
        first_dropped=dict(ChainMap(*(part.first_dropped for part in sets))),
        tokens=int(kept.lengths.sum()),
        trained_tokens=sum(int((example.labels != IGNORE_INDEX).sum()) for example in kept),
        overlength=sum(part.overlength for part in sets),
        truncated=sum(part.truncated for part in sets),
        straddling=sum(part.straddling for part in sets),
        sets=tuple(
            SetReport(part.path, part.format, part.template, part.rows_read, len(part.examples)) for part in sets
        ),
        notes=tuple(notes),
    )


def _render_rows(
    records: Sequence[Record], spec: DatasetSpec, format: Format, template: Template, loaded: _LoadedSet
) -> list[tuple[Rendered, str]]:
    """The rows that are in order, each as (text with its spans, source)."""
    rendered = []
    for record in records:
        try:
            text = template.render(format.convert(record))
            _check_encodable(text.text)
        except BadRow as bad:
            _refuse(bad, record.source, spec, loaded)
        else:
            rendered.append((text, record.source))
    return rendered


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("broken text", f"U+{ord(text[error.start]):04X}") from error


def _fit(encoded: Encoded, data: DataSpec, source: str, loaded: _LoadedSet) -> Encoded:
    """The example within data.max_length, or the reason for which it is left out."""
    length = len(encoded.input_ids)
    if not _is_trained(encoded):
        raise BadRow("no trained token")
    if length <= data.max_length:
        return encoded
    loaded.overlength += 1
    if data.on_overlength == "error":
        raise UserError(
            f"{source}: {length} tokens, more than data.max_length: {data.max_length}.",
            hint="Raise it, or let data.on_overlength be drop or truncate.",
        )
    if data.on_overlength == "drop":
        raise BadRow("too long", f"{length} tokens")
    cut = Encoded(encoded.input_ids[: data.max_length], encoded.labels[: data.max_length], encoded.straddling)
    if not _is_trained(cut):
        raise BadRow("cut before the answer", f"{length} tokens")
    loaded.truncated += 1
    return cut


def _is_trained(encoded: Encoded) -> bool:
    return bool((encoded.labels != IGNORE_INDEX).any())


def _refuse(bad: BadRow, source: str, spec: DatasetSpec, loaded: _LoadedSet) -> None:
    """Drops a row and counts it, or stops, as `on_bad_row` says; what is too long has its own policy."""
    if spec.on_bad_row == "error" and bad.reason not in OVERLENGTH:
        raise UserError(
            f"{source}: {bad}: {REASONS[bad.reason]}.",
            hint="Mend the row, or let data.datasets[].on_bad_row be drop.",
        ) from bad
    loaded.dropped[bad.reason] += 1
    loaded.first_dropped.setdefault(bad.reason, f"{source} ({bad.detail})" if bad.detail else source)


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    added = (index for index, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids).union(added)


def _nothing_left(loaded: _LoadedSet) -> UserError:
    """The complaint for a data set of which every row was dropped."""
    reason, source = next(iter(loaded.first_dropped.items()))
    counts = ", ".join(f"{count} {reason}" for reason, count in loaded.dropped.most_common())
    untrained = set(loaded.dropped) == {"no trained token"}
    what = "0 % of its tokens would be trained" if untrained else "no row can be used"
    return UserError(
        f"{loaded.path}: {what}: all {loaded.rows_read} are dropped ({counts}), the first at {source}.",
        hint=f"{reason}: {REASONS[reason]}.",
    )
