"""`prepare`: the data section of a recipe, a tokenizer and a seed in; examples and an honest account of them out."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ligertune.data.dataset_loading import LoadedSet, Progress, load
from ligertune.data.examples import Examples
from ligertune.data.mix import mixed
from ligertune.data.stream import ExampleStream, StreamedExamples
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions
    from ligertune.vision.reader import ImageReader


@dataclass(frozen=True)
class SetReport:
    """One entry of `datasets`: what it was taken for and what came of it; `cached` if it was prepared before."""

    path: str
    format: str
    template: str
    rows_read: int
    examples: int
    cached: bool = False


@dataclass(frozen=True)
class DataReport:
    """What became of the rows of some data sets: rows_read == examples + held_out + sum(dropped.values()).

    But of raw text a row gives as many examples as it is long. `held_out` went to `val_split`; tokens are those of
    `examples`. `dropped` is by reason (`conversation.REASONS`) and `repaired` by repair (`conversation.REPAIRS`), with
    the place of the first. `overlength` rows had more than max_length tokens; `truncated` of them were cut.
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
    repaired: dict[str, int]
    first_repaired: dict[str, str]
    literal: int  # rows with text that looks like a control token, and is taken as text
    sets: tuple[SetReport, ...]
    notes: tuple[str, ...]

    @property
    def trained_share(self) -> float:
        return self.trained_tokens / max(self.tokens, 1)


@dataclass(frozen=True)
class PreparedData:
    """`eval` comes from `eval_datasets` (then `eval_report` is theirs) or from `val_split`."""

    train: Examples | StreamedExamples
    eval: Examples | None
    report: DataReport
    template: str
    eval_report: DataReport | None = None

    @property
    def streamed(self) -> bool:
        """Whether the training examples are read while training; then the report has not counted them."""
        return isinstance(self.train, StreamedExamples)


def prepare(
    data: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    progress: Progress | None = None,
    images: ImageReader | None = None,
) -> PreparedData:
    """Reads, renders, tokenises and labels the data of a recipe; the same arguments give the same examples.

    `progress` is told of the rows as they are done; of what the cache holds there is nothing to tell. `images`: how the
    model sees, where it does.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, which label masks need.",
            hint="Use a tokenizer that has a tokenizer.json.",
        )
    held_out, eval_report = None, None
    if data.eval_datasets:
        eval_sets = [load(spec, data, tokenizer, progress, images) for spec in data.eval_datasets]
        held_out = Examples.of_blocks([part.block for part in eval_sets])
        eval_report = _report(eval_sets, held_out, data)
    if data.streaming:
        stream = ExampleStream(data, tokenizer, seed=seed, images=images)
        nothing_yet = _report([], Examples(), data)
        return PreparedData(StreamedExamples(stream), held_out, nothing_yet, stream.template, eval_report)
    sets = [load(spec, data, tokenizer, progress, images) for spec in data.datasets]
    train = Examples.of_blocks([part.block for part in sets])
    if data.val_split:
        train, held_out = split(train, data.val_split, seed=seed)
    report = _report(sets, train, data)
    weights = [spec.weight for spec in data.datasets]
    if any(weight != 1 for weight in weights):
        train = train.select(mixed(train.block_of, weights, seed=seed))
        report = replace(report, notes=(*report.notes, _mixture(sets, weights, train)))
    template = ", ".join(dict.fromkeys(part.template for part in sets))
    return PreparedData(train, held_out, report, template, eval_report)


def _mixture(sets: Sequence[LoadedSet], weights: Sequence[float], train: Examples) -> str:
    parts = (
        f"{count} of {part.path} (weight {weight:g})"
        for part, weight, count in zip(sets, weights, np.bincount(train.block_of, minlength=len(sets)), strict=True)
    )
    return f"An epoch sees {len(train)} examples: {', '.join(parts)}."


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


def _report(sets: Sequence[LoadedSet], kept: Examples, data: DataOptions) -> DataReport:
    """The counts of all sets together; `kept` is what is left of their examples after `val_split`."""
    examples = sum(len(part.block) for part in sets)
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
        trained_tokens=int(kept.trained.sum()),
        overlength=sum(part.tally.overlength for part in sets),
        truncated=sum(part.tally.truncated for part in sets),
        straddling=sum(part.tally.straddling for part in sets),
        repaired=dict(sum((part.tally.repaired for part in sets), Counter()).most_common()),
        first_repaired=dict(ChainMap(*(part.tally.first_repaired for part in sets))),
        literal=sum(part.tally.literal for part in sets),
        sets=tuple(
            SetReport(part.path, part.format, part.template, part.tally.rows_read, len(part.block), part.cached)
            for part in sets
        ),
        notes=tuple(notes),
    )
