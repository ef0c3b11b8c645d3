"""Streams: every example once per epoch, in seeded order, in little memory; dropped rows are counted."""

import os
import tracemalloc
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import islice, pairwise, takewhile
from pathlib import Path

import numpy as np
import pytest
from support.data.row_files import write_rows

from ligertune.data.examples import Preparation
from ligertune.data.prepare import PreparedData, prepare
from ligertune.data.stream import ExampleStream, StreamedExamples
from ligertune.errors import UserError
from ligertune.planning.options import DataOptions, DatasetOptions


def write(path: Path, count: int, **more) -> Path:
    rows = ({"instruction": f"{path.stem} {n}", "output": "o " * (n % 5 + 1), **more} for n in range(count))
    return write_rows(path, rows)


@pytest.fixture
def streamed(stories) -> Callable[..., ExampleStream]:
    def of(*paths: Path, seed: int = 0, buffer: int = 50, weights=None, **data) -> ExampleStream:
        weighted = zip(paths, weights or [1.0] * len(paths), strict=True)
        sets = [DatasetOptions(path=str(path), weight=weight) for path, weight in weighted]
        options = DataOptions(datasets=sets, streaming=True, **data)
        return ExampleStream(Preparation(options, stories), seed=seed, buffer=buffer)

    return of


def sources(stream: ExampleStream, count: int) -> list[str]:
    return [example.source for example in islice(stream, count)]


def test_epochs_hold_every_example_of_prepare_once_in_a_new_order_from_the_seed(tmp_path, streamed, stories):
    path = write(tmp_path / "a.jsonl", 300)
    found = sources(streamed(path), 600)
    assert len(set(found[:300])) == len(set(found[300:])) == 300
    assert found[:300] != found[300:] != sorted(found[300:])
    lines = [int(source.rpartition(":")[2]) for source in found[:250]]  # drawn from a full buffer
    assert sum(a > b for a, b in pairwise(lines)) > 60
    found = sources(streamed(path, seed=7), 300)
    assert found == sources(streamed(path, seed=7), 300) != sources(streamed(path, seed=8), 300)
    whole = prepare(DataOptions(datasets=[DatasetOptions(path=str(path))]), stories, seed=0).train
    ids = {example.source: (example.input_ids.tolist(), example.labels.tolist()) for example in whole}
    for example in islice(streamed(path), 300):
        assert ids[example.source] == (example.input_ids.tolist(), example.labels.tolist())


def test_sets_of_different_size_end_together(tmp_path, streamed):
    """Sizes are 30 to 1, so about one example in 30 is from the small set in every part of the epoch."""
    paths = write(tmp_path / "a.jsonl", 6000), write(tmp_path / "b.jsonl", 200)
    for weight, last in ((1, 0.4), (2, 0.7)):  # b is read in chunks of 100
        total = 6000 + weight * 200
        found = sources(streamed(*paths, buffer=1, weights=[1.0, weight]), total)
        places = np.flatnonzero(["b.jsonl" in source for source in found]) / total
        assert len(places) == weight * 200 and places.min() < 0.1 and places.max() > last


def test_weights_repeat_or_subsample_a_set(tmp_path, streamed):
    stream = streamed(*(write(tmp_path / f"{name}.jsonl", 400) for name in "abc"), weights=[2.0, 0.25, 0.25])
    seen = defaultdict(list)
    for example in takewhile(lambda _: stream.epoch < 3, stream):
        file, _, line = example.source.rpartition(":")
        seen[stream.epoch, Path(file).stem].append(int(line))
    assert sorted(seen[1, "a"]) == sorted([*range(1, 401)] * 2)
    draws = [sorted(seen[place]) for place in ((1, "b"), (1, "c"), (2, "b"))]
    assert all(70 < len(draw) < 130 for draw in draws)  # 100 +- 9 of 400, drawn one by one
    assert draws[0] not in draws[1:]


def test_dropped_rows_are_counted_while_reading(tmp_path, streamed):
    path = write(tmp_path / "a.jsonl", 200)
    path.write_text(path.read_text() + '{"instruction": "i", "output": ""}\n' * 3)
    stream = streamed(path)
    sources(stream, 200)
    (part,) = stream.sets
    assert (part.counts.rows_read, part.counts.rows_used, dict(part.counts.dropped)) == (203, 200, {"empty answer": 3})
    assert stream.account() == [f"{path}: 200 of the 203 rows read are used; 3 empty answer."]
    long = streamed(path, max_length=104)  # shorter than some rows; the account says what to change
    sources(long, 50)
    assert "too long" in long.account()[0] and "Raise data.max_length (now 104)" in long.account()[0]


def test_a_broken_line_is_an_error_when_it_is_read_and_a_set_without_usable_rows_is(tmp_path, streamed):
    path = write(tmp_path / "a.jsonl", 300)
    path.write_text(path.read_text() + "{broken\n")
    stream = streamed(path)
    assert len(sources(stream, 100)) == 100
    with pytest.raises(UserError, match=r"a\.jsonl:301: not JSON"):
        sources(stream, 300)
    rows = '{"instruction": "i", "output": ""}\n' * 120
    (tmp_path / "a.jsonl").write_text(rows)
    with pytest.raises(UserError, match=r"no row can be used: all 120 are dropped .*the first at .*a\.jsonl:1"):
        sources(streamed(tmp_path / "a.jsonl"), 1)
    (tmp_path / "b.jsonl").write_text('{"instruction": "i", "verdict": "o"}\n')
    with pytest.raises(UserError, match="nearest is alpaca, which also needs `output`"):
        streamed(tmp_path / "b.jsonl")


def test_memory_does_not_grow_with_what_was_read(tmp_path, streamed):
    """2,000 rows of 2 kB: 4 MB of file, read through a buffer of 50."""
    stream = iter(streamed(write(tmp_path / "a.jsonl", 2000, note="x" * 2000)))
    tracemalloc.start()
    deque(islice(stream, 500), maxlen=0)
    early = tracemalloc.get_traced_memory()[0]
    deque(islice(stream, 1400), maxlen=0)
    late = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert late - early < 500_000


def test_streamed_examples_by_number(tmp_path, streamed):
    path = write(tmp_path / "a.jsonl", 100)
    expected = list(islice(streamed(path), 60))
    examples = StreamedExamples(streamed(path))
    examples.read_to(40)
    assert [examples[i].source for i in range(40)] == [example.source for example in expected[:40]]
    examples.forget(30)
    examples.read_to(60)
    places = np.arange(30, 60)
    assert examples.lengths[places].tolist() == [len(expected[i].input_ids) for i in places]
    assert examples.trained[places[:, None]].tolist() == [[int((expected[i].labels != -100).sum())] for i in places]


def test_prepare_streams_training_data_and_loads_evaluation_data(tmp_path, stories):
    train, held_out = write(tmp_path / "a.jsonl", 100), write(tmp_path / "b.jsonl", 5)
    sets = {"datasets": [DatasetOptions(path=str(train))], "eval_datasets": [DatasetOptions(path=str(held_out))]}
    data: PreparedData = prepare(DataOptions(streaming=True, **sets), stories, seed=0)
    assert data.streamed and len(data.eval) == 5 and data.template == "alpaca"
    before = data.train.fingerprint
    os.utime(train, (1, 1))
    assert prepare(DataOptions(streaming=True, **sets), stories, seed=0).train.fingerprint != before
