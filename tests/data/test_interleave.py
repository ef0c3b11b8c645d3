"""data.interleave chooses the examples that `datasets.interleave_datasets` chooses, in memory and in a stream."""

from itertools import islice
from pathlib import Path

import datasets
import pytest
from support.data.row_files import write_rows

from ligertune.data.examples import Preparation
from ligertune.data.interleave import expected_examples
from ligertune.data.prepare import prepare
from ligertune.data.stream import ExampleStream
from ligertune.errors import UserError
from ligertune.planning.options import DataOptions, DatasetOptions, InterleaveOptions

SIZES = (40, 7, 150)
# probabilities that end after a few draws, after several blocks of a thousand, and in turn
SHARES = [(0.5, 0.2, 0.3), (0.02, 0.01, 0.97), (0.34, 0.65, 0.01), "round_robin"]
STRATEGIES = ["first_exhausted", "all_exhausted"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("sets")
    rows = {name: [{"prompt": f"{name} {n}:", "completion": "yes"} for n in range(size)]
            for name, size in zip("abc", SIZES, strict=True)}  # fmt: skip
    return [write_rows(folder / f"{name}.jsonl", found) for name, found in rows.items()]


def options(paths, probabilities, strategy="first_exhausted", **more) -> DataOptions:
    chosen = {"probabilities": probabilities, "stopping_strategy": strategy}
    return DataOptions(datasets=[DatasetOptions(path=str(path)) for path in paths], interleave=chosen, **more)


def expected(probabilities, strategy, seed) -> list[str]:
    """Return "set:line" of each example that `datasets` chooses."""
    sets = [
        datasets.Dataset.from_dict({"source": [f"{name}:{n + 1}" for n in range(size)]})
        for name, size in zip("abc", SIZES, strict=True)
    ]
    shares = None if probabilities == "round_robin" else list(probabilities)
    return datasets.interleave_datasets(sets, shares, seed=seed, stopping_strategy=strategy)["source"][:]


def names(examples) -> list[str]:
    return [example.source.rpartition("/")[2].replace(".jsonl", "") for example in examples]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("probabilities", SHARES)
def test_an_epoch_has_the_examples_of_datasets(probabilities, strategy, paths, stories):
    for seed in (0, 7):
        found = prepare(options(paths, probabilities, strategy), stories, seed=seed)
        assert names(found.train) == expected(probabilities, strategy, seed)
    again = prepare(options(paths, probabilities, strategy), stories, seed=7)
    assert again.train.fingerprint == found.train.fingerprint


def test_another_seed_draws_others_and_the_note_counts_them(paths, stories):
    first, second = (prepare(options(paths, (0.5, 0.2, 0.3)), stories, seed=seed) for seed in (0, 1))
    assert names(first.train) != names(second.train)
    counts = [sum(name.startswith(letter) for name in names(first.train)) for letter in "abc"]
    (note,) = first.report.notes
    assert note.startswith(f"An epoch has {sum(counts)} examples: {counts[0]} of ")
    assert "(probability 0.5), " in note and note.endswith("; it ends with first_exhausted.")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("probabilities", [SHARES[0], SHARES[1], "round_robin"])
def test_a_stream_draws_as_datasets_and_other_examples_in_each_epoch(probabilities, strategy, paths, stories):
    data = options(paths, probabilities, strategy, streaming=True)
    stream = ExampleStream(Preparation(data, stories), seed=3, buffer=1)  # without shuffling
    first = expected(probabilities, strategy, [3, 0])
    second = expected(probabilities, strategy, [3, 1])
    assert names(islice(stream, len(first) + len(second))) == [*first, *second]
    assert (first == second) == (probabilities == "round_robin")


def test_the_fingerprint_of_a_stream_tells_interleavings_apart(paths, stories):
    every = [
        options(paths, p, s, streaming=True)
        for p in (None, SHARES[0], SHARES[1])
        for s in STRATEGIES[: 1 + (p is not None)]
    ]
    found = {ExampleStream(Preparation(data, stories), seed=0).fingerprint for data in every}
    assert len(found) == len(every) == 5


def test_a_data_set_without_usable_rows_ends_a_stream(tmp_path, paths, stories):
    bad = write_rows(tmp_path / "bad.jsonl", [{"prompt": "q", "completion": 3}] * 5)
    stream = ExampleStream(Preparation(options([paths[0], bad], (0.5, 0.5), streaming=True), stories), seed=0)
    with pytest.raises(UserError, match=r"bad\.jsonl: no row can be used"):
        next(iter(stream))


def test_val_split_is_drawn_before_and_must_leave_an_example_of_each_set(paths, stories, tmp_path):
    split = prepare(options(paths, (0.5, 0.2, 0.3), "all_exhausted", val_split=0.2), stories, seed=0)
    assert len(split.eval) == round(0.2 * sum(SIZES))
    assert set(names(split.train)).isdisjoint(names(split.eval))
    assert len(set(names(split.train))) == sum(SIZES) - len(split.eval)
    one = write_rows(tmp_path / "one.jsonl", [{"prompt": "q", "completion": "a"}])
    seeds = range(20)
    with pytest.raises(UserError, match=r"data\.interleave: data\.val_split leaves no example of .*one\.jsonl"):
        for seed in seeds:
            prepare(options([one, one], (0.5, 0.5), val_split=0.5), stories, seed=seed)


def test_an_epoch_that_would_be_too_long_is_refused_before_it_is_drawn(paths, stories):
    with pytest.raises(UserError, match=r"all_exhausted makes an epoch of about 1\.5e\+09 examples"):
        prepare(options([paths[0], paths[2]], (1 - 1e-7, 1e-7), "all_exhausted"), stories, seed=0)
    chosen = InterleaveOptions(probabilities=(0.5, 0.5))
    assert expected_examples([10, 20], chosen) == 20
    assert expected_examples([10, 20], chosen.model_copy(update={"probabilities": "round_robin"})) == 20
