"""Prepare data: read, render, tokenize and label the data sets of a recipe, and report what became of their rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ligertune.data.cache import CacheEntry, cache_home, data_key, load_or_make
from ligertune.data.dataset_report import DatasetReport
from ligertune.data.examples import Block, Examples, Preparation
from ligertune.data.interleave import expected_examples, interleave
from ligertune.data.row_pipeline import RowCounts, RowPipeline, build_blocks, count_processes
from ligertune.data.rows.data_files import display_path
from ligertune.data.rows.row_kind import row_kinds
from ligertune.data.rows.sources import RecordStream, unread_note
from ligertune.data.stream import ExampleStream, StreamedExamples
from ligertune.errors import UserError, plural
from ligertune.hardware import is_first_on_node, ranks_on_node

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.data.modalities.modality import ModalityReader
    from ligertune.data.rows.row_kind import RowKind, TargetNames
    from ligertune.planning.options import DataOptions, DatasetOptions, InterleaveOptions
    from ligertune.recipe.section import Section

# called with (path of the data set, rows done, share done) while rows are prepared
ProgressCallback = Callable[[str, int, float], None]
_MAX_EXAMPLES = 10**9  # of one data set in an epoch; their indices take 8 GB
_SAMPLE = 5000  # records whose columns decide the format; they are held in memory


@dataclass(frozen=True)
class DataReport:
    """What became of the rows of some data sets: rows_read == examples + held_out + sum(dropped.values()).

    The equation does not hold for raw text and token ids: a row may give several examples. `held_out` examples went to
    `val_split`; tokens are those of `examples`. `dropped` is by DROP_REASONS and `repaired` by repair, with the source
    of the first row. `overlength` rows have more than max_length tokens; `truncated` of them were cut.
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
    literal: int  # rows with text that looks like a control token, and is trained as text
    unplaced: int  # answers that are not trained, because the template rewrites them; the other answers of the row are
    first_unplaced: dict[str, str]  # "answer" -> the source of the first
    sets: tuple[DatasetReport, ...]
    notes: tuple[str, ...]

    @property
    def trained_share(self) -> float:
        """Trained tokens / tokens."""
        return self.trained_tokens / max(self.tokens, 1)


@dataclass(frozen=True)
class PreparedData:
    """Training and evaluation examples of `options`. `eval` is from `eval_datasets` (with a report) or `val_split`."""

    train: Examples | StreamedExamples
    eval: Examples | None
    report: DataReport
    template: str
    options: DataOptions
    eval_report: DataReport | None = None
    labels: TargetNames | None = None  # what the targets of the examples stand for

    @property
    def streamed(self) -> bool:
        """Whether the training examples are read during training. Then the report does not count them."""
        return self.stream is not None

    @property
    def stream(self) -> ExampleStream | None:
        """The stream of the training examples; None if they are in memory."""
        return self.train.stream if isinstance(self.train, StreamedExamples) else None

    @property
    def examples_in_memory(self) -> Examples | None:
        """The training examples; None for a stream, whose number and lengths of examples are not known."""
        return None if isinstance(self.train, StreamedExamples) else self.train

    @property
    def stream_notes(self) -> tuple[str, ...]:
        """A sentence for each streamed data set about the rows that were read so far."""
        return tuple(self.train.stream.account()) if isinstance(self.train, StreamedExamples) else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on the labels of the examples, on the training data and on the evaluation data."""
        labels = (f"labels: {self.labels.about}",) if self.labels else ()
        return (*labels, *(note for report in self._reports for note in self.notes_on(report)))

    @property
    def _reports(self) -> list[DataReport]:
        return [self.report, *filter(None, [self.eval_report])]

    def notes_on(self, report: DataReport) -> tuple[str, ...]:
        """Return the remarks on training or evaluation data; warnings about dropped rows come first."""
        warnings = (part.warning(self.options) for part in report.sets)
        notes = (part.note for part in report.sets)
        return (*filter(None, warnings), *filter(None, notes), *report.notes)

    def check_dropped(self) -> None:
        """Raise UserError if a data set has a larger share of dropped rows than `data.max_dropped`."""
        for report in self._reports:
            for part in report.sets:
                part.check_dropped(self.options)


class LoadedDataset(NamedTuple):
    """The examples of one data set, the counts of its rows, and its report."""

    block: Block
    counts: RowCounts
    report: DatasetReport


def prepare(
    data: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    progress: ProgressCallback | None = None,
    reader: ModalityReader | None = None,
    rows: str = "conversations",
    label_options: Section | None = None,
) -> PreparedData:
    """Return the examples that a recipe trains and evaluates on. The same arguments give the same examples.

    progress: not called for data sets that are in the cache. reader: of files; None for a text model. rows:
    name of the kind of rows that the task needs. label_options: the recipe's section on their labels. Raises UserError
    for data that cannot be used.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} does not map tokens to characters, which label masks need.",
            hint="Use a tokenizer that has a tokenizer.json.",
        )
    kind = row_kinds()[rows]
    kind.check(data)
    if kind.without_files and reader is not None:
        raise UserError(
            f"model.model_name_or_path: a {reader.model_kind} is not trained {kind.without_files}.",
            hint="Choose a language model.",
        )
    if kind.whole_texts:
        data = data.model_copy(update={"train_on": "all"})  # no answer is looked for: the whole text is scored
    preparation = Preparation(data, tokenizer, reader, rows, kind.problem_type(label_options))
    load = functools.partial(_load_dataset, preparation=preparation, progress=progress or (lambda *done: None))
    held_out = None
    eval_report = None
    eval_sets = [load(spec) for spec in data.eval_datasets]
    sets = [] if data.streaming else [load(spec) for spec in data.datasets]
    sets, eval_sets, labels = _resolved(kind, sets, eval_sets, label_options)
    if eval_sets:
        held_out = Examples(blocks=[part.block for part in eval_sets])
        eval_report = _report(eval_sets, held_out, data)
    if data.streaming:
        stream = ExampleStream(preparation, seed=seed)
        first = tuple(part.report for part in stream.sets)
        report = replace(_report([], Examples(), data), sets=first)
        return PreparedData(StreamedExamples(stream), held_out, report, stream.template, data, eval_report)
    train = Examples(blocks=[part.block for part in sets])
    if data.val_split:
        train, held_out = split_examples(train, data.val_split, seed=seed)
    report = _report(sets, train, data)
    train, mixture_notes = _mixed(sets, train, data, seed=seed)
    report = replace(report, notes=(*report.notes, *mixture_notes))
    template = ", ".join(dict.fromkeys(part.report.template for part in sets))
    if labels is not None:
        report = replace(report, notes=(*report.notes, *labels.notes))
    return PreparedData(train, held_out, report, template, data, eval_report, labels)


def _resolved(
    kind: RowKind, sets: list[LoadedDataset], eval_sets: list[LoadedDataset], section: Section | None
) -> tuple[list[LoadedDataset], list[LoadedDataset], TargetNames | None]:
    """Return the data sets with numbers as targets, and what these stand for. The labels of all sets are compared."""
    if kind.resolve is None:
        return sets, eval_sets, None
    every = [*sets, *eval_sets]
    blocks, labels = kind.resolve([part.block for part in every], [part.report for part in every], len(sets), section)
    every = [part._replace(block=block) for part, block in zip(every, blocks, strict=True)]
    return every[: len(sets)], every[len(sets) :], labels


def _load_dataset(spec: DatasetOptions, preparation: Preparation, progress: ProgressCallback) -> LoadedDataset:
    """Load a data set from the cache, or build it from its files and store it there."""
    build = functools.partial(_build, spec, preparation, progress)
    if preparation.data.cache:
        try:
            entry = load_or_make(
                data_key(spec, preparation), lambda writer: build(writer.add), first=is_first_on_node()
            )
        except OSError as error:
            raise UserError(
                f"The cache of prepared data, {cache_home()}, cannot be used: {error.strerror or error}.",
                hint="Name another folder in the environment variable LIGERTUNE_CACHE, or write data.cache: false.",
                exit_code=1,
            ) from error
    else:
        blocks: list[Block] = []
        about = build(blocks.append, ranks=ranks_on_node())
        entry = CacheEntry(Block.concatenate(blocks), about, cached=False)
    about = dict(entry.about)
    counts = RowCounts(**about.pop("counts"))
    if not len(entry.block):
        raise counts.nothing_used(about["path"])
    for file in set(entry.block.media_files) if entry.cached else ():
        if not Path(file).is_file():  # now, rather than in the middle of training
            raise UserError(
                f"{file}: this image existed when the data was prepared, and does not any more.",
                hint="Restore it, or write data.cache: false to prepare the data again.",
            )
    report = DatasetReport(**about, examples=len(entry.block), cached=entry.cached, **counts.totals)
    if note := unread_note(spec):  # not from the cache: of the files as they are now
        report = report.with_note(note)
    return LoadedDataset(entry.block, counts, report)


def _build(
    spec: DatasetOptions,
    preparation: Preparation,
    progress: ProgressCallback,
    add: Callable[[Block], None],
    *,
    ranks: int = 1,
) -> dict[str, Any]:
    """Build a data set from its files, pass its blocks to `add`, and return what is reported about it, as JSON.

    ranks: processes of this node that build it at the same time, and share its cores.
    """
    path = display_path(Path(spec.path))
    counts = RowCounts()
    stream = RecordStream(spec, preparation.data.max_record_bytes, sample=_SAMPLE, download=True)
    records = iter(stream)
    first = list(islice(records, _SAMPLE))
    rows = RowPipeline(spec, preparation, first)
    processes = max(1, count_processes(preparation.data.num_proc) // ranks)
    for block, more in build_blocks(rows, chain(first, records), processes=processes):
        counts.add(more)
        progress(path, counts.rows_read, stream.share)
        add(block)
    progress(path, counts.rows_read, 1.0)
    return {"path": path, **rows.about, "counts": vars(counts), **rows.format.report(spec)}


def _mixed(
    sets: Sequence[LoadedDataset], train: Examples, data: DataOptions, *, seed: int
) -> tuple[Examples, tuple[str, ...]]:
    """Return the examples of an epoch by the data sets' weights, or as they are interleaved, and a note on them."""
    if data.interleave.probabilities is not None:
        _check_interleave(sets, train, data.interleave)
        train = train.select(interleave(train.block_of, len(sets), data.interleave, seed=seed))
        return train, (_interleave_note(sets, data.interleave, train),)
    weights = [spec.weight for spec in data.datasets]
    if all(weight == 1 for weight in weights):
        return train, ()
    _check_weights(sets, weights)
    train = train.select(mix_datasets(train.block_of, weights, seed=seed))
    return train, (_mixture_note(sets, weights, train),)


def _check_weights(sets: Sequence[LoadedDataset], weights: Sequence[float]) -> None:
    """Raise UserError if an epoch would hold more examples than can be indexed, or none of a data set."""
    for part, weight in zip(sets, weights, strict=True):
        count = round(weight * len(part.block))
        if not 1 <= count <= _MAX_EXAMPLES:
            raise UserError(
                f"data.datasets[].weight: {weight:g} makes {plural(count, 'example')} of the {len(part.block)} of "
                f"{part.report.path}, and an epoch needs 1 to {_MAX_EXAMPLES:,}.",
                hint="It is how often an epoch repeats the data set: 2 or 0.5.",
            )


def _check_interleave(sets: Sequence[LoadedDataset], train: Examples, options: InterleaveOptions) -> None:
    """Raise UserError if a data set has no example to draw, or an epoch would hold more than can be indexed."""
    lengths = np.bincount(train.block_of, minlength=len(sets)).tolist()
    if 0 in lengths:
        raise UserError(
            f"data.interleave: data.val_split leaves no example of {sets[lengths.index(0)].report.path} to train on.",
            hint="Give more data, a smaller share, or data.eval_datasets.",
        )
    expected = expected_examples(lengths, options)
    if expected > _MAX_EXAMPLES:
        raise UserError(
            f"data.interleave.stopping_strategy: {options.stopping_strategy} makes an epoch of about {expected:.1e} "
            f"examples, and {_MAX_EXAMPLES:,} are possible.",
            hint="Write first_exhausted, or a larger probability for the largest data set.",
        )


def _interleave_note(sets: Sequence[LoadedDataset], options: InterleaveOptions, train: Examples) -> str:
    counts = np.bincount(train.block_of, minlength=len(sets))
    parts = [f"{count} of {part.report.path}" for part, count in zip(sets, counts, strict=True)]
    if isinstance(options.probabilities, tuple):
        parts = [f"{part} (probability {p:g})" for part, p in zip(parts, options.probabilities, strict=True)]
    return (
        f"An epoch has {plural(len(train), 'example')}: {', '.join(parts)}; it ends with {options.stopping_strategy}."
    )


def mix_datasets(set_of: np.ndarray, weights: Sequence[float], *, seed: int) -> np.ndarray:
    """Return the indices of an epoch's examples, data set by data set. set_of: (N,) the data set of each example.

    Weight 2.5 repeats all examples twice and half of them once more: a seeded draw, the same in every epoch. Copies of
    an example are neighbours here; the training order shuffles them.
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


def _mixture_note(sets: Sequence[LoadedDataset], weights: Sequence[float], train: Examples) -> str:
    parts = (
        f"{count} of {part.report.path} (weight {weight:g})"
        for part, weight, count in zip(sets, weights, np.bincount(train.block_of, minlength=len(sets)), strict=True)
    )
    return f"An epoch has {plural(len(train), 'example')}: {', '.join(parts)}."


def split_examples(examples: Examples, share: float, *, seed: int) -> tuple[Examples, Examples]:
    """Return (train, eval): eval is a seeded draw of `share` of the examples, at least one. Both keep their order."""
    count = max(1, round(share * len(examples)))
    if count >= len(examples):
        raise UserError(
            f"data.val_split: {share} of {plural(len(examples), 'example')} leaves none to train on.",
            hint="Give more data or a smaller share.",
        )
    order = np.random.default_rng(seed).permutation(len(examples))
    return examples.select(sorted(order[count:])), examples.select(sorted(order[:count]))


def _report(sets: Sequence[LoadedDataset], kept: Examples, data: DataOptions) -> DataReport:
    """Return the report on all data sets. `kept` are their examples without those of `val_split`."""
    counts = RowCounts()
    for part in sets:
        counts.add(part.counts)
    examples = sum(len(part.block) for part in sets)
    uncounted = ("rows_used", "unended", "systems", "glued", "first_glued")
    counted = {name: value for name, value in vars(counts).items() if name not in uncounted}
    counted |= {name: dict(counted[name].most_common()) for name in ("dropped", "repaired")}
    return DataReport(
        **counted,
        examples=len(kept),
        held_out=examples - len(kept),
        tokens=int(kept.lengths.sum()),
        trained_tokens=int(kept.trained.sum()),
        sets=tuple(part.report for part in sets),
        notes=tuple(_notes(counts, examples, data)),
    )


def _notes(counts: RowCounts, examples: int, data: DataOptions) -> Iterator[str]:
    """Yield what the user should know about the texts of the rows that are used."""
    if counts.unended and data.train_on != "all" and data.train_on_eos != "none":
        yield (
            f"{counts.unended} of {plural(examples, 'example')} "
            f"{'ends' if counts.unended == 1 else 'end'} without a special "
            "token: the model does not learn from them where to stop."
        )
    if counts.unplaced:
        yield (
            f"{plural(counts.unplaced, 'answer')} without labels: the text of the template does not hold the answer "
            f"exactly once. The first is at {counts.first_unplaced['answer']}."
        )
    if 2 * counts.glued > counts.rows_used:
        yield (
            f"{counts.glued} of {plural(counts.rows_used, 'prompt')} and "
            f"{'its answer is' if counts.glued == 1 else 'their answers are'} one text without white space between "
            f"them, the first {counts.first_glued['prompt']}. Write data.prompt_template: chat, or end the prompts "
            "with a line break."
        )
    if 2 * counts.systems > counts.rows_read:
        have = "has a system prompt" if counts.systems == 1 else "have a system prompt"
        yield (
            f"{counts.systems} of {plural(counts.rows_read, 'row')} {have}, which the model learns to read: send one "
            "with later prompts (generate and chat: --system)."
        )
