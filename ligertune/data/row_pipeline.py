"""One data set's path from a record to labelled examples: converted, rendered, tokenised, cut to length, and counted.

It depends on the record, the recipe and the tokenizer alone, so it runs as well in another process or on a stream.
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
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING, Literal

from ligertune.data.cache import cache_home
from ligertune.data.examples import Block, Example
from ligertune.data.rows.conversation import DROP_REASONS, LENGTH_REASONS, BadRow, Conversation
from ligertune.data.rows.image_rows import ImageTokens, extract_images
from ligertune.data.rows.sources import Record
from ligertune.data.templates.chat_template import choose_template
from ligertune.data.templates.control_tokens import ControlTokens, Rendered
from ligertune.data.templates.label_masking import Encoded, Encoder, cut
from ligertune.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ligertune.data.rows.formats import Format
    from ligertune.planning.options import DataOptions, DatasetOptions
    from ligertune.vision.image_files import ImageFile
    from ligertune.vision.reader import ImageReader


@dataclass
class RowCounts:
    """What was counted on the way: rows_read == rows_used + sum(dropped.values())."""

    rows_read: int = 0
    rows_used: int = 0  # of raw text, a row gives as many examples as it is long
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, str] = field(default_factory=dict)
    repaired: Counter[str] = field(default_factory=Counter)  # rows, by `conversation.REPAIRS`
    first_repaired: dict[str, str] = field(default_factory=dict)
    literal: int = 0  # rows with text that looks like a control token
    overlength: int = 0
    truncated: int = 0
    straddling: int = 0
    endless: int = 0  # last answers that are whole and yet end without a special token

    def add(self, later: RowCounts) -> None:
        """Adds the counts of records that come later in the source."""
        self.rows_read += later.rows_read
        self.rows_used += later.rows_used
        self.dropped += later.dropped
        self.first_dropped = {**later.first_dropped, **self.first_dropped}
        self.repaired += later.repaired
        self.first_repaired = {**later.first_repaired, **self.first_repaired}
        self.literal += later.literal
        self.overlength += later.overlength
        self.truncated += later.truncated
        self.straddling += later.straddling
        self.endless += later.endless


class RowPipeline:
    """Records of one data set to examples. It holds no state of its own."""

    def __init__(
        self,
        spec: DatasetOptions,
        data: DataOptions,
        format: Format,
        tokenizer: PreTrainedTokenizerBase,
        images: ImageTokens | None = None,
    ) -> None:
        """images: of a model that sees; without them a row with images is refused."""
        self.format = format
        self.template = choose_template(data, format, tokenizer, with_images=images is not None)
        self._images = images
        self._spec = spec
        self._data = data
        self._encoder = Encoder(tokenizer)
        self._special = ControlTokens(tokenizer).ids

    def examples(self, records: Sequence[Record], tally: RowCounts) -> list[Example]:
        """The examples of these records, in their order; what became of the others is counted in `tally`."""
        tally.rows_read += len(records)
        rendered = self._rendered(records, tally)
        encodings = self._encoder.encode([text for text, _, _ in rendered])
        examples: list[Example] = []
        for (text, source, pictures), encoded in zip(rendered, encodings, strict=True):
            try:
                if self._images and isinstance(encoded, Encoded):
                    encoded = self._images.expanded(encoded, pictures)
                fitting = self._fitting(encoded, source, tally)
                if pictures and len(fitting) > 1:  # a raw text is split, and nobody knows which part shows what
                    raise BadRow("cut through an image", f"{len(encoded.input_ids)} tokens")
            except BadRow as bad:
                self._refuse(bad, source, tally)
                continue
            tally.rows_used += 1
            tally.literal += bool(text.literal)
            tally.straddling += encoded.straddling
            if fitting[0] is encoded or self.format.raw:  # not cut
                tally.endless += encoded.last_trained not in self._special
            names = tuple(picture.path for picture in pictures)
            examples += (Example(piece.input_ids, piece.labels, source, names) for piece in fitting)
        return examples

    def _rendered(self, records: Sequence[Record], tally: RowCounts) -> list[tuple[Rendered, str, list[ImageFile]]]:
        """The rows that are in order, each as (text with its spans, source, the pictures that it shows)."""
        rendered = []
        for record in records:
            try:
                row, references = extract_images(record.row) if self._images else (record.row, [])
                conversation = self._converted(Record(row, record.source), tally)
                text, pictures = self.template.render(conversation), []
                if self._images:
                    pictures = self._images.pictures(conversation, references, record.source)
                    text = self._images.placed(text, pictures)
                _check_encodable(text.text)
            except BadRow as bad:
                self._refuse(bad, record.source, tally)
            else:
                rendered.append((text, record.source, pictures))
        return rendered

    def _converted(self, record: Record, tally: RowCounts) -> Conversation:
        if self._spec.on_bad_row != "repair":
            return self.format.convert(record)
        conversation, done = self.format.repair(record)
        for repair in done:
            tally.repaired[repair] += 1
            tally.first_repaired.setdefault(repair, record.source)
        return conversation

    def _fitting(self, encoded: Encoded | BadRow, source: str, tally: RowCounts) -> list[Encoded]:
        """The examples within data.max_length that a row gives: one, or of raw text as many as it takes."""
        if isinstance(encoded, BadRow):
            raise encoded
        if not self.format.raw:
            return [self._fit(encoded, source, tally)]
        found = list(split_text(encoded, self._data.max_length))
        if not found:
            raise BadRow("no trained token")
        return found

    def _fit(self, encoded: Encoded, source: str, tally: RowCounts) -> Encoded:
        """The example within data.max_length, or the reason for which it is left out."""
        length, data = len(encoded.input_ids), self._data
        if not encoded.n_trained:
            raise BadRow("no trained token")
        if length <= data.max_length:
            return encoded
        tally.overlength += 1
        if data.on_overlength == "error":
            raise UserError(
                f"{source}: {length} tokens, more than data.max_length: {data.max_length}.",
                hint="Raise it, or let data.on_overlength be drop or truncate.",
            )
        if data.on_overlength == "drop":
            raise BadRow("too long", f"{length} tokens")
        if self._images and (encoded.input_ids[data.max_length :] == self._images.token_id).any():
            raise BadRow("cut through an image", f"{length} tokens")
        beginning = cut(encoded, 0, data.max_length)
        if not beginning.n_trained:
            raise BadRow("cut before the answer", f"{length} tokens")
        tally.truncated += 1
        return beginning

    def _refuse(self, bad: BadRow, source: str, tally: RowCounts) -> None:
        """Drops a row and counts it, or stops, as `on_bad_row` says; what is too long has its own policy."""
        if self._spec.on_bad_row == "error" and bad.reason not in LENGTH_REASONS:
            raise UserError(
                f"{source}: {bad}: {DROP_REASONS[bad.reason]}.",
                hint="Mend the row, or let data.datasets[].on_bad_row be drop or repair.",
            ) from bad
        tally.dropped[bad.reason] += 1
        tally.first_dropped.setdefault(bad.reason, f"{source} ({bad.detail})" if bad.detail else source)


def image_tokens(data: DataOptions, images: ImageReader | None) -> ImageTokens | None:
    """What puts images into rows; images that a data set holds as bytes become files beside the cache."""
    return None if images is None else ImageTokens(images, data.image_dir, cache_home().with_name("images"))


def split_text(encoded: Encoded, length: int) -> Iterator[Encoded]:
    """A long text as examples of `length` tokens and a shorter one; what one token alone is left of is left out."""
    for first in range(0, len(encoded.input_ids) - 1, length):
        piece = cut(encoded, first, first + length)
        if len(piece.labels) > 1:
            yield piece


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow("broken text", f"U+{ord(text[error.start]):04X}") from error


# 256 Alpaca records are 30 ms of work: small beside the whole, large beside the way to a worker and back (2 ms)
ROWS_PER_CHUNK = 256
# fewer chunks than this are done before workers would have started
_WORTH_WORKERS = 5
# the reader alone gives some 100,000 Alpaca records a second, one worker takes 5,000 to 8,000
_MOST_WORKERS = 24

Done = tuple[Block, RowCounts]


def count_processes(num_proc: int | Literal["auto"]) -> int:
    """`data.num_proc`: auto is a process for each core that this process may use, shared with the ranks beside it."""
    if num_proc != "auto":
        return num_proc
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _MOST_WORKERS))


def build_blocks(rows: RowPipeline, records: Iterable[Record], *, processes: int) -> Iterator[Done]:
    """What becomes of each chunk of the records, in their order."""
    chunks = _chunks(records)
    first = list(islice(chunks, _WORTH_WORKERS))
    few = processes == 1 or len(first) < _WORTH_WORKERS
    with _old_objects_left_alone():
        every = chain(first, chunks)
        yield from (_work(rows, chunk) for chunk in every) if few else _by_workers(rows, every, processes)


def _by_workers(rows: RowPipeline, chunks: Iterator[list[Record]], processes: int) -> Iterator[Done]:
    # forked workers share what is loaded; elsewhere they start anew, which takes seconds
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with (
        _one_thread_each(),
        ProcessPoolExecutor(processes, mp_context=context, initializer=_enter, initargs=(rows,)) as pool,
    ):
        try:
            yield from _in_order(pool, chunks, ahead=2 * processes)
        except BrokenProcessPool as error:
            raise UserError(
                "A process that prepares the data was killed, most likely for want of memory.",
                hint="Write a smaller data.num_proc.",
                exit_code=1,
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, chunks: Iterator[list[Record]], *, ahead: int) -> Iterator[Done]:
    under_way: deque[Future[Done]] = deque()
    for chunk in chunks:
        under_way.append(pool.submit(_work_here, chunk))
        if len(under_way) > ahead:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    iterator = iter(records)
    while chunk := list(islice(iterator, ROWS_PER_CHUNK)):
        yield chunk


def _work(rows: RowPipeline, chunk: list[Record]) -> Done:
    tally = RowCounts()
    return Block.of(rows.examples(chunk, tally)), tally


@contextlib.contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Reading makes so many objects that all that were there before are searched for garbage again and again."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Each worker is one thread of work. Said before they are forked: tokenizers warns of forks otherwise."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


_rows: RowPipeline | None = None  # a worker's, set as it starts


def _enter(rows: RowPipeline) -> None:
    global _rows
    _rows = rows
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer, and so is what Slurm sends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # also where workers start anew


def _work_here(chunk: list[Record]) -> Done:
    assert _rows is not None
    return _work(_rows, chunk)
