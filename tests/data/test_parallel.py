"""Worker processes: the same examples in the same order, errors included, with few chunks in memory."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path

import pytest
from row_files import write_rows

from ligertune.data.examples import Examples, Preparation
from ligertune.data.prepare import prepare
from ligertune.data.row_pipeline import ROWS_PER_CHUNK, RowCounts, RowPipeline, build_blocks, count_processes
from ligertune.data.rows.sources import Record, RecordStream
from ligertune.errors import UserError
from ligertune.planning.options import DataOptions, DatasetOptions

ROWS = 7 * ROWS_PER_CHUNK + 3  # enough for workers, and a last chunk that is not full


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    rows = [{"instruction": f"Say {n}.", "output": "" if n % 100 == 7 else f"{n} " * (n % 9 + 1)} for n in range(ROWS)]
    return write_rows(tmp_path_factory.mktemp("many") / "many.jsonl", rows)


def test_more_processes_give_the_same_examples_and_report(many, prepared):
    alone, three = (prepared(many, num_proc=number, cache=False) for number in (1, 3))
    assert three.train.fingerprint == alone.train.fingerprint
    assert three.train.sources == alone.train.sources
    assert three.report == alone.report
    assert three.report.dropped == {"empty answer": 18}
    assert three.report.first_dropped["empty answer"].startswith(f"{many}:8 ")


def test_an_error_in_a_worker_reaches_the_user(many, prepared):
    with pytest.raises(UserError, match=r"many\.jsonl:8: empty answer"):
        prepared(many, num_proc=2, cache=False, dataset={"on_bad_row": "error"})


def test_progress_counts_rows(many, stories):
    seen: list[tuple[str, int, float]] = []
    data = DataOptions(datasets=[DatasetOptions(path=str(many))], num_proc=2, cache=False)
    prepare(data, stories, seed=0, progress=lambda *told: seen.append(told))
    assert [done for _, done, _ in seen] == [*range(ROWS_PER_CHUNK, ROWS, ROWS_PER_CHUNK), ROWS, ROWS]
    shares = [share for _, _, share in seen]
    assert shares == sorted(shares) and shares[-1] == 1.0 and {path for path, _, _ in seen} == {str(many)}


def test_auto_is_the_number_of_usable_cores():
    assert count_processes("auto") == min(len(os.sched_getaffinity(0)), 24)
    assert count_processes(5) == 5


class Rows:
    """A RowPipeline that makes no examples."""

    def examples(self, records, counts):
        counts.rows_read += len(records)
        return []


class Fatal(Rows):
    def examples(self, records, counts):
        os.kill(os.getpid(), signal.SIGKILL)


def test_few_chunks_are_read_ahead():
    taken = 0

    def records():
        nonlocal taken
        for taken in range(1, 100 * ROWS_PER_CHUNK + 1):
            yield Record({}, f"f:{taken}")

    done = build_blocks(Rows(), records(), processes=2)
    next(done)
    assert taken <= 6 * ROWS_PER_CHUNK
    assert sum(counts.rows_read for _, counts in done) + ROWS_PER_CHUNK == taken == 100 * ROWS_PER_CHUNK


def test_a_killed_worker_is_an_error():
    with pytest.raises(UserError, match="was killed") as caught:
        list(build_blocks(Fatal(), [Record({}, "f:1")] * ROWS, processes=2))
    assert caught.value.exit_code == 1
    assert "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.parametrize("template", ["alpaca", "chat"])
def test_a_pickled_pipeline_makes_the_same_examples(many, stories, template):
    spec = DatasetOptions(path=str(many), max_samples=20)
    data = DataOptions(datasets=[spec], prompt_template=template)
    records = list(RecordStream(spec))
    rows = RowPipeline(spec, Preparation(data, stories), records)
    here, there = (path.examples(records, RowCounts()) for path in (rows, pickle.loads(pickle.dumps(rows))))
    assert Examples(there).fingerprint == Examples(here).fingerprint
