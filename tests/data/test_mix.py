"""Data set weights: whole numbers repeat every example, and a seeded draw selects the fractional part."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from row_files import write_rows

from ligertune.data.prepare import mix_datasets, prepare
from ligertune.planning.options import DataOptions, DatasetOptions

SET_OF = np.repeat([0, 1, 2], [10, 4, 7])


def test_whole_weights_repeat_and_fractions_are_drawn():
    assert mix_datasets(SET_OF, [1, 1, 1], seed=3).tolist() == list(range(21))
    seen = Counter(mix_datasets(SET_OF, [2, 0.5, 1.4], seed=0).tolist())
    assert [seen[place] for place in range(10)] == [2] * 10
    assert sorted(seen[place] for place in range(10, 14)) == [0, 0, 1, 1]
    assert Counter(seen[place] for place in range(14, 21)) == {1: 4, 2: 3}


def test_the_seed_decides_the_draw():
    draws = [tuple(mix_datasets(SET_OF, [1, 0.5, 0.5], seed=seed)) for seed in [*range(10), 0]]
    assert draws[0] == draws[-1] and len(set(draws)) > 1


@pytest.fixture
def two(tmp_path) -> list[Path]:
    return [
        write_rows(tmp_path / f"{name}.jsonl", ({"instruction": f"{name}{n}", "output": "o"} for n in range(count)))
        for name, count in (("a", 20), ("b", 10))
    ]


def test_prepare_mixes_and_notes_it(two, stories):
    sets = [DatasetOptions(path=str(path), weight=weight) for path, weight in zip(two, (0.5, 3.0), strict=True)]
    data = prepare(DataOptions(datasets=sets), stories, seed=0)
    files = Counter(Path(source.rpartition(":")[0]).name for source in data.train.sources)
    assert files == {"a.jsonl": 10, "b.jsonl": 30}
    assert data.report.notes == (f"An epoch has 40 examples: 10 of {two[0]} (weight 0.5), 30 of {two[1]} (weight 3).",)


def test_held_out_examples_of_a_repeated_set_are_not_trained(two, stories):
    sets = [DatasetOptions(path=str(path), weight=2.5) for path in two]
    data = prepare(DataOptions(datasets=sets, val_split=0.2), stories, seed=0)
    assert set(data.train.sources).isdisjoint(data.eval.sources)
    assert (len(data.eval), len(set(data.train.sources)), data.report.held_out) == (6, 24, 6)
    assert set(Counter(data.train.sources).values()) == {2, 3}
