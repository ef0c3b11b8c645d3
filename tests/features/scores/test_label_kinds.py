"""Kind of labels: one bad label among many is dropped, and never changes what is trained; ids are bounded."""

import json
import math
import time
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from ligertune.data.prepare import PreparedData, prepare
from ligertune.errors import UserError
from ligertune.features.scores.recipe import ClassificationSpec
from ligertune.planning.options import DataOptions

SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


@pytest.fixture(scope="module")
def tokenizer(quickstart):
    return AutoTokenizer.from_pretrained(quickstart / "stories260K")


@pytest.fixture
def read(tmp_path, tokenizer):
    """read(labels, ...): prepared data of a text for each label, written as jsonl or csv, with evaluation labels."""

    def call(labels, *, csv: bool = False, dataset: dict | None = None, evaluation=(), **options) -> PreparedData:
        files = {"rows": labels, "eval": evaluation}
        for name, values in files.items():
            rows = [{"text": f"Text number {i}.", "label": label} for i, label in enumerate(values)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            if csv:
                text = "text,label\n" + "".join(f"{row['text']},{row['label']}\n" for row in rows)
            files[name] = tmp_path / (f"{name}.csv" if csv else f"{name}.jsonl")
            files[name].write_text(text)
        data = {"datasets": [{"path": str(files["rows"]), **(dataset or {})}], "num_proc": 1, "cache": False}
        data["eval_datasets"] = [{"path": str(files["eval"])}] if evaluation else ()
        return prepare(DataOptions(**data), tokenizer, seed=1, rows="texts",
                       label_options=ClassificationSpec(**options))  # fmt: skip

    return call


SCORES = [0.05 + i / 10 for i in range(20)]
BINARY = [0, 1] * 10
NAMES = ["cat", "dog"] * 10
HOT = [[1, 0, 1], [0, 0, 0], [0, 1, 1], [1, 1, 1]] * 5
ID_LISTS = [[0, 2], [1], [0, 1], []] * 5
NAN, INFINITY = math.nan, math.inf
# name -> (labels of most rows, the bad label, problem_type, number of labels)
ONE_BAD = {
    **{f"{bad!r} among fractions": (SCORES, bad, REGRESSION, 1)
       for bad in (NAN, INFINITY, -INFINITY, "x", None, True, [0.5], {}, "", "nan")},
    **{f"{bad!r} among 0 and 1": (BINARY, bad, SINGLE, 2)
       for bad in (NAN, INFINITY, 0.5, "x", None, -1, True, [1], {}, 10**9, 10**30, "1e400", "inf")},
    **{f"{bad!r} among names": (NAMES, bad, SINGLE, 2) for bad in (NAN, 0.5, 7, None, False, ["cat"], {}, " ", "nan")},
    **{f"{bad!r} among booleans": ([True, False] * 10, bad, SINGLE, 2) for bad in (2, 1, "true", NAN, [True])},
    **{f"{bad!r} among lists of 0 and 1": (HOT, bad, MULTI, 3)
       for bad in ([1, 0], [1, 0, 2], [1, 0, 0.5], 1, None, [1, 0, "x"], [1, 0, NAN], [True, False, True])},
    **{f"{bad!r} among lists of ids": (ID_LISTS, bad, MULTI, 3) for bad in (1, [0.5], ["x"], [10**12], [None], None)},
}  # fmt: skip


@pytest.mark.parametrize("case", ONE_BAD)
def test_one_bad_label_is_dropped_with_its_line_and_changes_nothing(case, read):
    labels, bad, problem, count = ONE_BAD[case]
    labels = [*labels[:7], bad, *labels[7:]]
    found = read(labels)
    assert (found.labels.problem_type, found.labels.num_labels) == (problem, count)
    assert len(found.train) == len(labels) - 1 and sum(found.report.dropped.values()) == 1
    (first,) = found.report.first_dropped.values()
    assert "rows.jsonl:8" in first
    with pytest.raises(UserError, match=r"rows\.jsonl:8: (no )?label"):
        read(labels, dataset={"on_bad_row": "error"})


@pytest.mark.parametrize(
    ("labels", "bad", "problem"),
    [
        (["0.05", "0.15", "0.3"] * 7, "x", REGRESSION),
        (["0", "1"] * 10, "0.5", SINGLE),
        (["0.0", "1.0"] * 10, "0.5", SINGLE),  # of pandas
        (["0", "1"] * 10, "", SINGLE),
        (["a", "b"] * 10, "nan", SINGLE),
    ],
)
def test_text_of_a_csv_file_that_is_a_number_is_a_number(labels, bad, problem, read):
    assert read(labels, csv=True).labels.problem_type == problem
    found = read([*labels, bad], csv=True)
    reason = "label of another kind" if bad else "no label"
    assert found.labels.problem_type == problem and found.report.dropped == {reason: 1}


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([["a", "b"], ["b"], []], MULTI),
        ([[0, 2], [1], []], MULTI),
        ([[0, 1, 1], [1, 0, 0]], MULTI),
        ([[0.0, 1.5], [2.0, 0.5]], REGRESSION),
    ],
)
def test_lists_in_json_text_are_the_lists(labels, problem, read):
    """A cell of a csv file is a text; the same text in another file is read alike."""
    as_text = [json.dumps(label) for label in labels] * 8
    in_csv = ['"' + text.replace('"', '""') + '"' for text in as_text]
    expected = read(labels * 8)
    for found in (read(as_text), read(in_csv, csv=True)):
        assert found.labels == replace(expected.labels, inferred_from=found.labels.inferred_from)
        assert found.labels.problem_type == problem and found.report.dropped == {}
        assert [example.targets for example in found.train] == [example.targets for example in expected.train]


@pytest.mark.parametrize("text", ["['a', 'b']", "['a' 'b']", "[0 1 1]", "[0. 1.5]", "[\"a'\", 'b']"])
def test_lists_in_the_text_of_another_language_are_no_names(text, read):
    with pytest.raises(UserError, match=r"holds no label in the first rows; .*rows\.jsonl:1 has"):
        read([text, text.replace("b", "c")] * 8)
    found = read([*NAMES, text, "[sic]", "[a, b]"])
    assert found.report.dropped == {"label of another kind": 1}
    assert found.labels.labels == ("[a, b]", "[sic]", "cat", "dog")


def test_a_bad_label_behind_the_first_rows_is_dropped_too(read):
    labels = [i % 2 for i in range(5200)]
    labels[5100] = 0.5
    found = read(labels)
    assert (found.labels.problem_type, found.labels.num_labels) == (SINGLE, 2)
    assert found.report.first_dropped["label of another kind"].endswith("rows.jsonl:5101 (0.5)")


REFUSED = {
    "a third of fractions": ([0, 1, 0, 1, 0.5, 1.5], r"4 whole numbers, which would be ids, and 2 numbers"),
    "unlabelled test rows": ([0, 1, 1, -1, -1], r"3 whole numbers, which would be ids, and 2 numbers"),
    "names and numbers": (["a", "b", "c", 1, 2], r"several kinds: 3 names \(first .*:1\), 2 numbers \(first .*:4\)"),
    "lists and single labels": ([[0], [1], 0, 1], r"several kinds: 2 lists .*, 2 single labels"),
    "floats of pandas": ([0.0, 1.0, 1.0, None], r"whole numbers written as floats, and 1 missing label"),
    "nothing but NaN": ([NAN, NAN], r"holds no label in the first rows; .*rows\.jsonl:1 has nan"),
    "one number": ([-1, -1, -1], r"all rows have the number -1, so there is nothing to learn"),
    "an id far away": ([0, 1, 1, 250_000], r"rows\.jsonl:4: the label 250000 would be an id of 250,001 labels"),
    "an id without bound": ([0, 0, 10**9], r"all rows have the same label.*1 row dropped: label is too large, first"),
    "years": ([1999, 2004, 2020], r"rows\.jsonl:3: the label 2020 would be an id"),
    "a million numbers in a row": ([[0.5] * 1_100_000], r"no row can be used: .*label is too large.*list of 1,100,000"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_labels_that_could_be_two_things_are_refused_at_once(case, read):
    labels, message = REFUSED[case]
    began = time.process_time()  # other tests may hold the cores
    with pytest.raises(UserError, match=message):
        read(labels)
    assert time.process_time() - began < 5


def test_the_recipe_decides_where_the_labels_do_not(read):
    mixed = [0, 1, 0, 1, 0.5, 1.5]
    assert [e.targets for e in read(mixed, problem_type=REGRESSION).train] == [(value,) for value in mixed]
    assert len(read(mixed, problem_type=SINGLE).train) == 4
    pandas = read([0.0, 1.0, 1.0, None], problem_type=SINGLE)
    assert pandas.labels.num_labels == 2 and len(pandas.train) == 3
    assert read([0, 1, 250_000], num_labels=250_001).labels.num_labels == 250_001


def test_lists_of_0_and_1_are_indicators_as_integers_and_as_floats(read):
    for rows in (HOT, [[float(one) for one in row] for row in HOT]):
        found = read(rows)
        assert (found.labels.problem_type, found.labels.num_labels) == (MULTI, 3)
        assert [example.targets for example in found.train][:4] == [(0, 2), (), (1, 2), (0, 1, 2)]
    never = read([[1, 0, 0], [0, 1, 0], [1, 1, 0]])  # the last label has no row, and its score stays
    assert never.labels.num_labels == 3


def test_the_kind_is_announced_with_what_it_was_inferred_from(read):
    found = read([*BINARY, "x"])
    assert found.labels.about.endswith(
        "rows.jsonl has whole numbers (column `label`, 20 of the first 21 labels)."
    ) and found.labels.about.startswith("single_label_classification with 2 labels: ")
    assert f"labels: {found.labels.about}" in found.notes
    assert read(BINARY, problem_type=SINGLE).labels.inferred_from == "classification.problem_type"


def test_evaluation_data_have_the_kind_of_training_data(read):
    with pytest.raises(UserError, match=r"numbers in .*rows.jsonl, names in .*eval.jsonl|whole numbers in .*names in"):
        read(BINARY, evaluation=["a", "b"])
    found = read(NAMES, evaluation=["dog", "cow"])
    assert any("1 label in evaluation data without a row in training data: cow (first" in note for note in found.notes)


def test_an_unbounded_number_of_labels_is_refused_by_the_recipe():
    assert ClassificationSpec(num_labels=2**20).num_labels == 2**20
    with pytest.raises(ValueError, match="1048576"):
        ClassificationSpec(num_labels=10**9)


@pytest.mark.parametrize("bad", [True, "much", math.nan, 10**400, 1e300])
def test_a_margin_is_a_number_also_as_text(bad, tmp_path, tokenizer):
    rows = [{"prompt": "Q: ", "chosen": "yes", "rejected": "no", "margin": m} for m in ("0.5", bad, 2, "")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataOptions(datasets=[{"path": str(path)}], num_proc=1, cache=False)
    found = prepare(data, tokenizer, seed=1, rows="reward_pairs")
    assert [example.targets for example in found.train] == [(0.5,), (2.0,), ()]
    assert found.report.dropped == {"margin is not a number": 1}
