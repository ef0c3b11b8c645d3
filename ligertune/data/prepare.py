"""`prepare`: the data section of a recipe, a tokenizer and a seed in; examples and an honest account of them out."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ligertune.data.cache import CacheWriter, cache_home, data_key, load_or_make
from ligertune.data.examples import Block, Examples
from ligertune.data.row_pipeline import RowCounts, RowPipeline, build_blocks, count_processes, image_tokens
from ligertune.data.rows.conversation import DROP_REASONS
from ligertune.data.rows.formats import check_columns, recognise_format
from ligertune.data.rows.sources import Record, RecordStream, display_path
from ligertune.data.stream import ExampleStream, StreamedExamples
from ligertune.errors import UserError
from ligertune.hardware import is_first_on_node, ranks_on_node

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.planning.options import DataOptions, DatasetOptions
    from ligertune.vision.reader import ImageReader

# (data set, rows done, share of them all): called as the rows are done
ProgressCallback = Callable[[str, int, float], None]
_FIRST = 5000  # records whose columns say what format all have; only so many are held in memory


@dataclass(frozen=True)
class LoadedDataset:
    """The examples of one data set, and what was counted on the way."""

    path: str
    format: str
    template: str
    block: Block
    tally: RowCounts
    cached: bool


def load_dataset(
    spec: DatasetOptions,
    data: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    progress: ProgressCallback | None = None,
    images: ImageReader | None = None,
) -> LoadedDataset:
    """The cache's examples if it has them, else the files', which the cache then keeps."""
    check_columns(spec.columns)
    key = data_key(spec, data, tokenizer, images) if data.cache else None
    making = DatasetBuilder(spec, data, tokenizer, progress, ranks=1 if key else ranks_on_node(), images=images)
    if key is None:
        block = Block.joined(list(making.blocks()))
        about = making.about()
    else:
        try:
            entry = load_or_make(key, making.write, first=is_first_on_node())
        except OSError as error:
            raise UserError(
                f"The cache of prepared data, {cache_home()}, cannot be used: {error.strerror or error}.",
                hint="Name another folder in the environment variable LIGERTUNE_CACHE, or write data.cache: false.",
                exit_code=1,
            ) from error
        block, about = entry.block, entry.about
    loaded = LoadedDataset(block=block, cached=not making.done, **{**about, "tally": _tally(about["tally"])})
    if not len(block):
        raise _nothing_left(loaded)
    if loaded.cached:
        _check_pictures(block.pictures)
    return loaded


def _check_pictures(pictures: Sequence[str]) -> None:
    """Complains now, and not in the middle of training, of pictures that went away since their rows were prepared."""
    for path in pictures:
        if not Path(path).is_file():
            raise UserError(
                f"{path}: this image was there when the data was prepared, and is gone.",
                hint="Put it back, or write data.cache: false to prepare the data again.",
            )


class DatasetBuilder:
    """The way from the files to blocks, gone once and only if it must be."""

    def __init__(
        self,
        spec: DatasetOptions,
        data: DataOptions,
        tokenizer: PreTrainedTokenizerBase,
        progress: ProgressCallback | None,
        *,
        ranks: int,
        images: ImageReader | None = None,
    ) -> None:
        self.done = False
        self._spec, self._data, self._tokenizer = spec, data, tokenizer
        self._show = progress or (lambda path, done, share: None)
        self._processes = max(1, count_processes(data.num_proc) // ranks)
        self._images = images
        self._path = display_path(Path(spec.path))
        self._tally = RowCounts()

    def blocks(self) -> Iterator[Block]:
        """The examples, some at a time."""
        stream = RecordStream(self._spec, sample=_FIRST, download=True)
        records = iter(stream)
        first = list(islice(records, _FIRST))
        if not first:
            raise UserError(f"{self._spec.path} holds no records.")
        rows = self._rows(first)
        for block, tally in build_blocks(rows, chain(first, records), processes=self._processes):
            self._tally.add(tally)
            self._show(self._path, self._tally.rows_read, stream.share)
            yield block
        self._show(self._path, self._tally.rows_read, 1.0)
        self.done = True

    def write(self, writer: CacheWriter) -> dict[str, Any]:
        for block in self.blocks():
            writer.add(block)
        return self.about()

    def about(self) -> dict[str, Any]:
        """What is to be said of the blocks, once they are made; it can be written as JSON."""
        return {"path": self._path, "format": self._format, "template": self._template, "tally": vars(self._tally)}

    def _rows(self, first: list[Record]) -> RowPipeline:
        format = recognise_format(self._spec.format, {column for record in first for column in record.row}, self._path)
        rows = RowPipeline(self._spec, self._data, format, self._tokenizer, image_tokens(self._data, self._images))
        self._format, self._template = format.name, rows.template.name
        return rows


def _tally(counts: dict[str, Any]) -> RowCounts:
    """As it was before it was written: counters are counters again."""
    counters = {field.name for field in fields(RowCounts) if field.default_factory is Counter}
    return RowCounts(**{name: Counter(value) if name in counters else value for name, value in counts.items()})


def _nothing_left(loaded: LoadedDataset) -> UserError:
    """The complaint for a data set of which every row was dropped."""
    reason, source = next(iter(loaded.tally.first_dropped.items()))
    counts = ", ".join(f"{count} {reason}" for reason, count in loaded.tally.dropped.most_common())
    untrained = set(loaded.tally.dropped) == {"no trained token"}
    what = "0 % of its tokens would be trained" if untrained else "no row can be used"
    return UserError(
        f"{loaded.path}: {what}: all {loaded.tally.rows_read} are dropped ({counts}), the first at {source}.",
        hint=f"{reason}: {DROP_REASONS[reason]}.",
    )


def mix_datasets(set_of: np.ndarray, weights: Sequence[float], *, seed: int) -> np.ndarray:
    """The places of an epoch's examples, set by set. set_of: the number of each example's data set, (N,).

    Weight 2.5 is all examples twice, and a half of them once more: a draw that depends on the seed and is the same in
    every epoch. Examples that are seen several times follow one another; the order of training shuffles them.
    """
    rng = np.random.default_rng(seed)
    chosen = []
    for number, weight in enumerate(weights):
        places = np.flatnonzero(set_of == number)
        whole = int(weight)
        more = rng.permutation(len(places))[: round((weight - whole) * len(places))]
        times = np.full(len(places), whole)
        times[more] += 1
        chosen.append(np.repeat(places, times))
    return np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class DatasetReport:
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
    sets: tuple[DatasetReport, ...]
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
    progress: ProgressCallback | None = None,
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
        eval_sets = [load_dataset(spec, data, tokenizer, progress, images) for spec in data.eval_datasets]
        held_out = Examples.of_blocks([part.block for part in eval_sets])
        eval_report = _report(eval_sets, held_out, data)
    if data.streaming:
        stream = ExampleStream(data, tokenizer, seed=seed, images=images)
        nothing_yet = _report([], Examples(), data)
        return PreparedData(StreamedExamples(stream), held_out, nothing_yet, stream.template, eval_report)
    sets = [load_dataset(spec, data, tokenizer, progress, images) for spec in data.datasets]
    train = Examples.of_blocks([part.block for part in sets])
    if data.val_split:
        train, held_out = split_examples(train, data.val_split, seed=seed)
    report = _report(sets, train, data)
    weights = [spec.weight for spec in data.datasets]
    if any(weight != 1 for weight in weights):
        train = train.select(mix_datasets(train.block_of, weights, seed=seed))
        report = replace(report, notes=(*report.notes, _mixture(sets, weights, train)))
    template = ", ".join(dict.fromkeys(part.template for part in sets))
    return PreparedData(train, held_out, report, template, eval_report)


def _mixture(sets: Sequence[LoadedDataset], weights: Sequence[float], train: Examples) -> str:
    parts = (
        f"{count} of {part.path} (weight {weight:g})"
        for part, weight, count in zip(sets, weights, np.bincount(train.block_of, minlength=len(sets)), strict=True)
    )
    return f"An epoch sees {len(train)} examples: {', '.join(parts)}."


def split_examples(examples: Examples, share: float, *, seed: int) -> tuple[Examples, Examples]:
    """(train, eval): a seeded draw of `share` of the examples, at least one, both parts in their old order."""
    count = max(1, round(share * len(examples)))
    if count >= len(examples):
        raise UserError(
            f"data.val_split: {share} of {len(examples)} examples leaves none to train on.",
            hint="Give more data or a smaller share.",
        )
    order = np.random.default_rng(seed).permutation(len(examples))
    return examples.select(sorted(order[count:])), examples.select(sorted(order[:count]))


def _report(sets: Sequence[LoadedDataset], kept: Examples, data: DataOptions) -> DataReport:
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
            DatasetReport(part.path, part.format, part.template, part.tally.rows_read, len(part.block), part.cached)
            for part in sets
        ),
        notes=tuple(notes),
    )
