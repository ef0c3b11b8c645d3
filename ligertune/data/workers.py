"""Records to blocks of examples in several processes, the blocks in the records' order.

Templates and word-by-word tokenising are Python, which only processes do side by side; what the tokenizer's own threads
do, a process for each core does as well. Records go out in chunks, and only a few chunks are under way at a time, so a
stream longer than memory passes through.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Literal

from ligertune.data.blocks import Block
from ligertune.data.row_pipeline import RowPath, Tally
from ligertune.data.rows.sources import Record
from ligertune.errors import UserError

# 256 Alpaca records are 30 ms of work: small beside the whole, large beside the way to a worker and back (2 ms)
CHUNK = 256
# fewer chunks than this are done before workers would have started
_WORTH_WORKERS = 5
# the reader alone gives some 100,000 Alpaca records a second, one worker takes 5,000 to 8,000
_MOST_WORKERS = 24

Done = tuple[Block, Tally]


def count_processes(num_proc: int | Literal["auto"]) -> int:
    """`data.num_proc`: auto is a process for each core that this process may use, shared with the ranks beside it."""
    if num_proc != "auto":
        return num_proc
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _MOST_WORKERS))


def blocks_of(rows: RowPath, records: Iterable[Record], *, processes: int) -> Iterator[Done]:
    """What becomes of each chunk of the records, in their order."""
    chunks = _chunks(records)
    first = list(islice(chunks, _WORTH_WORKERS))
    few = processes == 1 or len(first) < _WORTH_WORKERS
    with _old_objects_left_alone():
        every = chain(first, chunks)
        yield from (_work(rows, chunk) for chunk in every) if few else _by_workers(rows, every, processes)


def _by_workers(rows: RowPath, chunks: Iterator[list[Record]], processes: int) -> Iterator[Done]:
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
    while chunk := list(islice(iterator, CHUNK)):
        yield chunk


def _work(rows: RowPath, chunk: list[Record]) -> Done:
    tally = Tally()
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


_rows: RowPath | None = None  # a worker's, set as it starts


def _enter(rows: RowPath) -> None:
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
