"""Row pipeline: convert, render, tokenize and label the records of one data set, in this process or in workers.

A record's examples depend only on the record, the recipe and the tokenizer, so the pipeline also runs in other
processes and on a stream.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ligertune.data.bad_rows import DROP_REASONS, LENGTH_REASONS, BadRow
from ligertune.data.examples import Block, Example, Preparation
from ligertune.data.modalities.modality import RowFile
from ligertune.data.rows.data_files import Record, display_path
from ligertune.data.rows.formats import RowShape, plain_format
from ligertune.data.rows.row_kind import CONVERSATIONS, row_kinds
from ligertune.data.shapes.recognise_shape import recognise_shape
from ligertune.data.templates.control_tokens import ControlTokens, Rendered
from ligertune.data.templates.label_masking import Encoded, Encoder
from ligertune.data.templates.prompt_templates import choose_template
from ligertune.data.templates.whole_texts import SpecialTokens, TextTemplate, labelled_at_end
from ligertune.data.tokenized_rows import TokenReader
from ligertune.errors import UserError, panics_as_errors
from ligertune.hardware import usable_cores

if TYPE_CHECKING:
    from ligertune.planning.options import DatasetOptions

_JOINT = 12  # characters on each side of a joint that a note shows
_SENTENCE_ENDS = ".?!,;\"'\u2026\u3002\uff1f\uff01"


@dataclass
class RowCounts:
    """Counts of rows by what became of them: rows_read == rows_used + sum(dropped.values())."""

    rows_read: int = 0
    rows_used: int = 0  # a row gives several examples if it is a long raw text, or holds several documents
    dropped: Counter[str] = field(default_factory=Counter)  # by DROP_REASONS
    first_dropped: dict[str, str] = field(default_factory=dict)
    repaired: Counter[str] = field(default_factory=Counter)  # by the name of the repair
    first_repaired: dict[str, str] = field(default_factory=dict)
    literal: int = 0  # rows with text that looks like a control token
    unplaced: int = 0  # answers that are not trained, because the template rewrites them
    first_unplaced: dict[str, str] = field(default_factory=dict)  # "answer" -> its source
    overlength: int = 0
    truncated: int = 0
    straddling: int = 0  # tokens
    systems: int = 0  # rows with a system prompt
    glued: int = 0  # rows whose prompt and answer are joined to one text without white space
    first_glued: dict[str, str] = field(default_factory=dict)  # "prompt" -> the words at the joint, and the source
    unended: int = 0  # rows, or documents of token ids, that were not truncated and do not end with a special token

    def __post_init__(self) -> None:
        self.dropped, self.repaired = Counter(self.dropped), Counter(self.repaired)  # dicts in the cache's JSON

    def add(self, later: RowCounts) -> None:
        """Add the counts of records that come later in the source."""
        for name, value in vars(later).items():
            own = getattr(self, name)
            setattr(self, name, {**value, **own} if name.startswith("first_") else own + value)

    @property
    def totals(self) -> dict[str, Any]:
        """Return the counts that the report on a data set has; the most frequent reason comes first."""
        dropped = dict(self.dropped.most_common())
        return {"rows_read": self.rows_read, "dropped": dropped, "first_dropped": dict(self.first_dropped)}

    def nothing_used(self, path: str) -> UserError:
        """Return the error for a data set whose rows were all dropped."""
        reason, source = next(iter(self.first_dropped.items()))
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())
        untrained = set(self.dropped) == {"no trained token"}
        what = "0 % of its tokens would be trained" if untrained else "no row can be used"
        return UserError(
            f"{path}: {what}: all {self.rows_read} are dropped ({reasons}), the first at {source}.",
            hint=f"{reason}: {DROP_REASONS[reason]}.",
        )


class RenderedRow(NamedTuple):
    """The texts of a row with their spans, one or the two of a pair."""

    sides: list[Rendered]
    source: str
    files: Sequence[RowFile] = ()
    desirable: int = -1
    targets: tuple[str | float, ...] = ()
    documents: Sequence[Encoded] = ()  # of a row that is tokenized, which has no sides


class RowPipeline:
    """Converts records of one data set to examples. It has no state between calls."""

    def __init__(self, spec: DatasetOptions, preparation: Preparation, first: Sequence[Record]) -> None:
        """Recognise the format from the columns of the records `first`, and choose the prompt template.

        Raises UserError without records, and for columns that fit no format.
        """
        data = preparation.data
        tokenizer = preparation.tokenizer
        reader = preparation.reader
        if not first:
            raise UserError(f"{spec.path} holds no records.")
        columns = {column for record in first for column in record.row}
        if not columns and first[0].too_large:
            raise UserError(
                f"{first[0].source}: a record of {first[0].too_large:,} bytes, and no smaller one among the first "
                f"{len(first)}; data.max_record_bytes allows {data.max_record_bytes:,}.",
                hint="Raise it if the records are this large.",
            )
        path = display_path(Path(spec.path))
        kind = row_kinds()[preparation.rows]
        plain = plain_format(columns) if kind is CONVERSATIONS and spec.format == "auto" else None
        problem_type = preparation.problem_type
        self.shape = RowShape(plain) if plain else recognise_shape(spec, kind, first, path, problem_type=problem_type)
        self.format = replace(self.shape.format, trained_roles=data.roles_to_train)
        self._tokens = TokenReader.of(tokenizer, columns) if self.format.tokens else None
        if reader is not None and self._tokens is not None:
            raise UserError(
                f"{path}: its rows are token ids, with which a {reader.model_kind} is not trained.",
                hint="Write the rows as texts or messages.",
            )
        text_template = kind.text_template(data.prompt_template, self.format)
        part_type = None if reader is None else reader.part_type
        self.template = text_template or choose_template(data, self.format, tokenizer, part_type=part_type)
        self._special_tokens = SpecialTokens(tokenizer) if isinstance(self.template, TextTemplate) else None
        self._whole_texts = kind.whole_texts
        self._files = None if reader is None else reader.row_files(data.image_dir)
        self._file_token = None if reader is None else reader.token_id
        self._spec = spec
        self._data = data
        self._encoder = Encoder(tokenizer)
        self._special = ControlTokens(tokenizer).ids

    @property
    def about(self) -> dict[str, Any]:
        """What the report on the data set says about format and template, as JSON."""
        return {**self.shape.about, "template": self.template.name}

    def examples(self, records: Sequence[Record], counts: RowCounts) -> list[Example]:
        """Return the examples of these records, in their order, and add to `counts` what became of the rows."""
        counts.rows_read += len(records)
        rendered = list(self._rendered(records, counts))
        encodings = self._encoder.encode([side for row in rendered for side in row.sides])
        examples: list[Example] = []
        for row in rendered:
            encoded = list(islice(encodings, len(row.sides)))
            try:
                if self._tokens is not None:
                    examples += self._examples_of_documents(row.documents, row.source, counts)
                else:
                    examples += self._examples_of(row, encoded, counts)
            except BadRow as bad:
                self._refuse(bad, row.source, counts)
        return examples

    def _examples_of(self, row: RenderedRow, encoded: list[Encoded | BadRow], counts: RowCounts) -> list[Example]:
        """Return the examples of a row: one, or several of a long raw text. Raises BadRow."""
        sides: list[Encoded] = []
        for side in encoded:
            if isinstance(side, BadRow):
                raise side
            sides.append(side)
        if self._files:
            sides = [self._files.expand(side, row.files) for side in sides]
        if self._special_tokens:
            sides = [self._special_tokens.join(sides)]
        fitting = self._split(sides[0]) if self.format.raw else self._fit(sides, row.source, counts)
        if self.format.raw and self._files and row.files and len(fitting) > 1:  # which part shows which file is unknown
            raise BadRow(self._files.cut_reason, f"{len(sides[0].input_ids)} tokens")
        counts.rows_used += 1
        counts.literal += any(side.literal for side in row.sides)
        counts.straddling += sum(side.straddling for side in sides)
        self._count_joint(row, counts)
        for fault in (fault for side in row.sides for fault in side.unplaced):
            counts.unplaced += 1
            counts.first_unplaced.setdefault("answer", f"{row.source} ({fault})")
        whole = sides if self.format.raw else [side for side, kept in zip(sides, fitting, strict=True) if side is kept]
        counts.unended += any(int(side.trained[-1]) not in self._special for side in whole)
        paths = tuple(file.path for file in row.files)
        if self._whole_texts:
            fitting = [labelled_at_end(side) for side in fitting]
        if len(sides) == 2:
            chosen, rejected = fitting
            return [_pair(chosen, rejected, row.source, row.targets)]
        return [
            Example(part.input_ids, part.labels, row.source, paths, desirable=row.desirable, targets=row.targets)
            for part in fitting
        ]

    def _count_joint(self, row: RenderedRow, counts: RowCounts) -> None:
        """Count a row whose prompt runs into its answer. A template puts text between them."""
        if self.template.name == "plain" and (joint := _joint(row.sides[0])):
            counts.glued += 1
            counts.first_glued.setdefault("prompt", f'"{joint}" at {row.source}')

    def _examples_of_documents(self, documents: Sequence[Encoded], source: str, counts: RowCounts) -> list[Example]:
        """Return an example for each document that has labels. A document that is too long drops the row."""
        trained = [document for document in documents if len(document.trained)]
        if not trained:
            raise BadRow("no trained token")
        fitting = [self._fit([document], source, counts)[0] for document in trained]
        counts.rows_used += 1
        whole = [part for part, document in zip(fitting, trained, strict=True) if part is document]
        counts.unended += sum(int(document.trained[-1]) not in self._special for document in whole)
        return [Example(document.input_ids, document.labels, source) for document in fitting]

    def _rendered(self, records: Sequence[Record], counts: RowCounts) -> Iterator[RenderedRow]:
        """Yield each row that can be used."""
        for record in records:
            try:
                yield self._rendered_row(record, counts)
            except BadRow as bad:
                self._refuse(bad, record.source, counts)
            except RecursionError:
                self._refuse(BadRow("nested too deeply"), record.source, counts)
            except UnicodeEncodeError as error:
                self._refuse(BadRow("broken text", f"U+{ord(error.object[error.start]):04X}"), record.source, counts)

    def _rendered_row(self, record: Record, counts: RowCounts) -> RenderedRow:
        if record.too_large:
            raise BadRow("too large", f"{record.too_large:,} bytes")
        row = self.shape.of(record).row
        row, references = self._files.extract(row) if self._files else (row, [])
        repairs: list[str] | None = [] if self._spec.on_bad_row == "repair" else None
        parsed = self.format.parse(Record(row, record.source), repairs)
        if self._tokens is not None:
            return RenderedRow([], record.source, documents=self._tokens.documents(row, record.source))
        for repair in repairs or ():
            counts.repaired[repair] += 1
            counts.first_repaired.setdefault(repair, record.source)
        opening = parsed.conversations[0].messages[:1]
        counts.systems += not self._whole_texts and any(turn.role == "system" for turn in opening)
        sides = [self.template.render(conversation) for conversation in parsed.conversations]
        files: Sequence[RowFile] = ()
        if self._files:
            files = self._files.find(parsed.conversations[0], references, record.source)
            sides = [self._files.insert(sides[0], files)]
        for side in sides:
            side.text.encode()
        return RenderedRow(sides, record.source, files, parsed.desirable, parsed.targets)

    def _split(self, encoded: Encoded) -> list[Encoded]:
        """Split a raw text into examples of data.max_length tokens. A last one of a single token is left out."""
        length = self._data.max_length
        n_tokens = len(encoded.input_ids)
        parts = [encoded.cut(first, first + length) for first in range(0, n_tokens - 1, length)]
        if not parts:
            raise BadRow("no trained token")
        return parts

    def _fit(self, sides: list[Encoded], source: str, counts: RowCounts) -> list[Encoded]:
        """Return the sequences of an example, each within data.max_length. Raise BadRow if the example is dropped."""
        length = max(len(side.input_ids) for side in sides)
        data = self._data
        if not all(len(side.trained) for side in sides):
            raise BadRow("no trained token")
        if length <= data.max_length:
            return sides
        counts.overlength += 1
        if data.on_overlength == "error":
            raise UserError(
                f"{source}: {length} tokens, more than data.max_length: {data.max_length}.",
                hint="Raise it, or let data.on_overlength be drop or truncate.",
            )
        if data.on_overlength == "drop":
            raise BadRow("too long", f"{length} tokens")
        if self._files and (sides[0].input_ids[data.max_length :] == self._file_token).any():
            raise BadRow(self._files.cut_reason, f"{length} tokens")
        truncated = [side if len(side.input_ids) <= data.max_length else side.cut(0, data.max_length) for side in sides]
        if not all(len(side.trained) for side in truncated):
            raise BadRow("cut before the answer", f"{length} tokens")
        counts.truncated += 1
        return truncated

    def _refuse(self, bad: BadRow, source: str, counts: RowCounts) -> None:
        """Count a dropped row, or raise UserError if `on_bad_row` is error. Length has its own setting."""
        if self._spec.on_bad_row == "error" and bad.reason not in LENGTH_REASONS:
            raise UserError(
                f"{source}: {bad}: {DROP_REASONS[bad.reason]}.",
                hint="Repair the row, or let data.datasets[].on_bad_row be drop or repair.",
            ) from bad
        counts.dropped[bad.reason] += 1
        counts.first_dropped.setdefault(bad.reason, f"{source} ({bad.detail})" if bad.detail else source)


def _joint(rendered: Rendered) -> str:
    """Return the end of a prompt and the begin of its answer if no white space is between them; else an empty text.

    A prompt that ends with another sign than that of a sentence ("Answer:", "[/INST]") was most likely meant to.
    """
    start = rendered.trained[0][0] if rendered.trained else 0
    before = rendered.text[max(0, start - _JOINT) : start]
    after = rendered.text[start : start + _JOINT]
    meant = not before or not (before[-1].isalnum() or before[-1] in _SENTENCE_ENDS)
    return "" if meant or not after or after[0].isspace() else before + after


def _pair(chosen: Encoded, rejected: Encoded, source: str, targets: tuple[str | float, ...] = ()) -> Example:
    """Return a pair as one example. Raise BadRow if both sequences are the same, for instance once cut."""
    if np.array_equal(chosen.input_ids, rejected.input_ids):
        raise BadRow("equal answers", f"within {len(chosen.input_ids)} tokens")
    ids, labels = (np.concatenate([getattr(side, name) for side in (chosen, rejected)]) for name in Encoded._fields[:2])
    return Example(ids, labels, source, first_length=len(chosen.input_ids), targets=targets)


# 256 Alpaca records take 30 ms: short compared with the whole, long compared with the way to a worker and back (2 ms)
ROWS_PER_CHUNK = 256
_MIN_CHUNKS = 5  # fewer are done before workers would have started
_MAX_WORKERS = 24  # the reader yields about 100,000 Alpaca records/s, and a worker takes 5,000 to 8,000

BuiltBlock = tuple[Block, RowCounts]


def count_processes(num_proc: int | Literal["auto"]) -> int:
    """Resolve `data.num_proc`: auto is one process per core that this process may use."""
    if num_proc != "auto":
        return num_proc
    return min(usable_cores(), _MAX_WORKERS)


def build_blocks(rows: RowPipeline, records: Iterable[Record], *, processes: int) -> Iterator[BuiltBlock]:
    """Yield the block and the counts of each chunk of the records, in their order."""
    iterator = iter(records)
    chunks = iter(lambda: list(islice(iterator, ROWS_PER_CHUNK)), [])
    first = list(islice(chunks, _MIN_CHUNKS))
    few = processes == 1 or len(first) < _MIN_CHUNKS
    gc.freeze()  # reading creates many objects: without this each collection would search the older ones again
    try:
        every = chain(first, chunks)
        yield from (_work(rows, chunk) for chunk in every) if few else _work_in_processes(rows, every, processes)
    finally:
        gc.unfreeze()


def _work(rows: RowPipeline, chunk: list[Record]) -> BuiltBlock:
    counts = RowCounts()
    return Block.of(rows.examples(chunk, counts)), counts


def _work_in_processes(rows: RowPipeline, chunks: Iterator[list[Record]], processes: int) -> Iterator[BuiltBlock]:
    # forked workers share what is loaded; spawned ones import everything again, which takes seconds
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pending: deque[Future[BuiltBlock]] = deque()
    with (
        _no_tokenizer_threads(),
        ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker, initargs=(rows,)) as pool,
    ):
        try:
            for chunk in chunks:
                pending.append(pool.submit(_work_in_worker, chunk))
                # a chunk in work and one waiting for each worker: the reader is faster, and would fill the memory
                if len(pending) > 2 * processes:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "A process that prepares the data was killed, most likely because memory ran out.",
                hint="Write a smaller data.num_proc.",
                exit_code=1,
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _no_tokenizer_threads() -> Iterator[None]:
    """Make each worker use one thread. Set before workers are forked, because tokenizers warns of forks otherwise."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


_rows: RowPipeline  # of a worker process


def _start_worker(rows: RowPipeline) -> None:
    global _rows
    _rows = rows
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and the signals that Slurm sends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a spawned worker does not always inherit it
    gc.freeze()


@panics_as_errors()  # which this process could not send: its class cannot be pickled
def _work_in_worker(chunk: list[Record]) -> BuiltBlock:
    return _work(_rows, chunk)
