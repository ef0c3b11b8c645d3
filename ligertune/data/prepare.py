"""`prepare`: the data section of a recipe, a tokenizer and a seed in; examples and an honest account of them out."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.conversation import REASONS
from ligertune.data.encode import IGNORE_INDEX
from ligertune.data.examples import Example, Examples
from ligertune.data.formats import check_columns, recognise
from ligertune.data.rows import RowPath, Tally
from ligertune.data.sources import read_records, shown_path
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    examples: list[Example]
    tally: Tally


def _load(spec: DatasetSpec, data: DataSpec, tokenizer: PreTrainedTokenizerBase) -> _LoadedSet:
    """One data set, from its files to labelled examples."""
    check_columns(spec.columns)
    records = read_records(spec)
    path = shown_path(Path(spec.path))
    format = recognise(spec.format, {column for record in records for column in record.row}, path)
    rows, tally = RowPath(spec, data, format, tokenizer), Tally()
    loaded = _LoadedSet(path, format.name, rows.template.name, rows.examples(records, tally), tally)
    if not loaded.examples:
        raise _nothing_left(loaded)
    return loaded


def _report(sets: Sequence[_LoadedSet], kept: Examples, data: DataSpec) -> DataReport:
    """The counts of all sets together; `kept` is what is left of their examples after `val_split`."""
    examples = sum(len(part.examples) for part in sets)
    dropped = sum((part.tally.dropped for part in sets), Counter())
    endless = sum(part.tally.endless for part in sets)
    notes = []
    if endless and data.train_on != "all":
        notes.append(
            f"{endless} of {examples} examples end without a special token: "
            "the template does not teach the model where to stop."
        )
    return DataReport(
        rows_read=sum(part.tally.rows_read for part in sets),
        examples=len(kept),
        held_out=examples - len(kept),
        dropped=dict(dropped.most_common()),
        first_dropped=dict(ChainMap(*(part.tally.first_dropped for part in sets))),
        tokens=int(kept.lengths.sum()),
        trained_tokens=sum(int((example.labels != IGNORE_INDEX).sum()) for example in kept),
        overlength=sum(part.tally.overlength for part in sets),
        truncated=sum(part.tally.truncated for part in sets),
        straddling=sum(part.tally.straddling for part in sets),
        sets=tuple(
            SetReport(part.path, part.format, part.template, part.tally.rows_read, len(part.examples)) for part in sets
        ),
        notes=tuple(notes),
    )


def _nothing_left(loaded: _LoadedSet) -> UserError:
    """The complaint for a data set of which every row was dropped."""
    reason, source = next(iter(loaded.tally.first_dropped.items()))
    counts = ", ".join(f"{count} {reason}" for reason, count in loaded.tally.dropped.most_common())
    untrained = set(loaded.tally.dropped) == {"no trained token"}
    what = "0 % of its tokens would be trained" if untrained else "no row can be used"
    return UserError(
        f"{loaded.path}: {what}: all {loaded.tally.rows_read} are dropped ({counts}), the first at {source}.",
        hint=f"{reason}: {REASONS[reason]}.",
    )
