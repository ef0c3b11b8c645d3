"""Labels of a classification: kinds of labels, ids, formats of rows, tokens, and the errors of bad ones."""

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from transformers import AutoTokenizer

from ligertune.data.prepare import PreparedData, prepare
from ligertune.errors import UserError
from ligertune.features.scores.recipe import ClassificationSpec
from ligertune.planning.options import DataOptions


@pytest.fixture(scope="module")
def tokenizer(quickstart):
    return AutoTokenizer.from_pretrained(quickstart / "stories260K")


@pytest.fixture
def read(tmp_path, tokenizer):
    """read(rows, ...): prepared data of rows that are texts with labels."""

    def call(rows: list[dict], *, more: dict | None = None, dataset: dict | None = None, **options) -> PreparedData:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"datasets": [{"path": str(path), **(dataset or {})}], "num_proc": 1, "cache": False, "max_dropped": 1.0}
        spec = ClassificationSpec(**options)
        return prepare(DataOptions(**data, **(more or {})), tokenizer, seed=1, rows="texts", label_options=spec)

    return call


def labelled(*labels: object) -> list[dict]:
    return [{"text": f"Text number {i}.", "label": label} for i, label in enumerate(labels)]


SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
# labels of the rows, options -> (num_labels, problem_type, names, targets)
CASES = {
    "names": (("b", "a", "b"), {}, (2, SINGLE, ("a", "b"), [(1,), (0,), (1,)])),
    "names in an order": (("b", "a"), {"labels": ("b", "a", "c")}, (3, SINGLE, ("b", "a", "c"), [(0,), (1,)])),
    "ids": ((2, 0, 0), {}, (3, SINGLE, (), [(2,), (0,), (0,)])),
    "ids with names": ((1, 0), {"labels": ("no", "yes")}, (2, SINGLE, ("no", "yes"), [(1,), (0,)])),
    "ids as text": (("1", "0", "10"), {}, (11, SINGLE, (), [(1,), (0,), (10,)])),
    "booleans": ((True, False), {}, (2, SINGLE, (), [(1,), (0,)])),
    "number of labels": ((0, 1), {"num_labels": 5}, (5, SINGLE, (), [(0,), (1,)])),
    "numbers": ((0.5, 2, -1.25), {}, (1, REGRESSION, (), [(0.5,), (2,), (-1.25,)])),
    "ids as numbers": ((1, 3), {"problem_type": REGRESSION}, (1, REGRESSION, (), [(1,), (3,)])),
    "one score": ((1, 3), {"num_labels": 1}, (1, REGRESSION, (), [(1,), (3,)])),
    "vectors": (([0.5, 1.5], [2.0, 3.0]), {}, (2, REGRESSION, (), [(0.5, 1.5), (2, 3)])),
    "lists of names": ((["b", "a"], [], ["c"]), {}, (3, MULTI, ("a", "b", "c"), [(1, 0), (), (2,)])),
    "lists of ids": (([0, 2], [1]), {}, (3, MULTI, (), [(0, 2), (1,)])),
    "indicators": (([1.0, 0.0, 1.0], [0.0, 0.0, 0.0]), {"problem_type": MULTI}, (3, MULTI, (), [(0, 2), ()])),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_labels_become_ids_or_numbers(case, read):
    labels, options, (count, problem, names, targets) = CASES[case]
    found = read(labelled(*labels), **options)
    assert (found.labels.num_labels, found.labels.problem_type, found.labels.labels) == (count, problem, names)
    assert [example.targets for example in found.train] == targets
    assert found.train.trained.tolist() == [1] * len(labels)


# labels, options -> the error
REFUSED = [
    (("a", "b"), {"labels": ("a", "c")}, r"the data has the label 'b', which the list lacks"),
    (("a", "a"), {}, r"all rows have the same label"),
    (("a", "b"), {"num_labels": 3}, r"num_labels: 3, and the data has 2 labels \(a, b\)"),
    ((0, 7), {"num_labels": 2}, r"num_labels: 2, and the data has the label 7; ids count from 0"),
    (("a", "b"), {"problem_type": REGRESSION}, r"regression needs numbers, and the labels are names"),
    ((0, 1), {"problem_type": MULTI}, r"needs lists of labels, and the labels are whole numbers"),
    (([0], [1]), {"problem_type": SINGLE}, r"needs one label per row, and the labels are lists of whole numbers"),
    ((0.5, 1.5), {"problem_type": SINGLE}, r"numbers with a fraction or below 0 are no ids"),
    (([0.5, 1.0], [1.0]), {}, r"2 numbers are predicted, and a row has 1"),
    (([0.5, 1.0], [1.0, 1.0]), {"problem_type": MULTI}, r"must hold 0\.0 or 1\.0 for each label"),
]


@pytest.mark.parametrize(("labels", "options", "message"), REFUSED)
def test_labels_that_make_no_sense_are_refused(labels, options, message, read):
    with pytest.raises(UserError, match=message):
        read(labelled(*labels), **options)


def test_rows_without_a_usable_label_or_text_are_dropped_and_counted(read):
    rows = [*labelled(0, 1, -1, None, [0]), {"text": "  ", "label": 1}]
    found = read(rows)
    assert found.report.dropped == {"label of another kind": 2, "no label": 1, "no text": 1} and len(found.train) == 2
    assert found.report.notes == ("2 labels by number of texts: 0 1, 1 1.",)


def test_labels_that_differ_in_case_or_white_space_only_are_noted(read):
    found = read(labelled("spam", "ham", "Spam ", "spam", "new  york", "new york"))
    counts, similar = found.labels.notes
    assert "'Spam ' 1," in counts and " spam 2" in counts
    assert similar.endswith(": 'Spam ' and 'spam'; 'new  york' and 'new york'.")
    assert len(read(labelled("spam", "ham")).labels.notes) == 1


def test_tokens_are_those_of_the_tokenizer(read, tokenizer):
    """One text, a pair, a conversation, and a text in a user turn."""
    found = read([{"sentence1": "A cat.", "sentence2": "A dog sat.", "label": i % 2} for i in range(2)])
    assert found.train[0].input_ids.tolist() == tokenizer("A cat.", "A dog sat.").input_ids
    found = read([{"text": " Two  spaces.", "label": i % 2} for i in range(2)])
    assert found.train[1].input_ids.tolist() == tokenizer(" Two  spaces.").input_ids
    turns = [{"role": "user", "content": "Hello?"}]
    expected = tokenizer.apply_chat_template(turns, tokenize=False)
    for row, more in (({"messages": turns}, {}), ({"text": "Hello?"}, {"prompt_template": "chat"})):
        found = read([{**row, "label": i % 2} for i in range(2)], more=more)
        assert found.train[0].input_ids.tolist() == tokenizer(expected, add_special_tokens=False).input_ids
    answered = [*turns, {"role": "assistant", "content": "Hi."}]
    assert len(read([{"messages": answered, "label": i} for i in range(2)]).train) == 2


def test_long_texts_are_cut_at_their_end_or_dropped(read):
    rows = [{"text": "word " * 40, "label": 0}, {"text": "word", "label": 1}, {"text": "words", "label": 0}]
    cut = read(rows, more={"max_length": 16, "on_overlength": "truncate"}).train
    assert len(cut) == 3 and len(cut[0].input_ids) == 16 and cut.trained.tolist() == [1, 1, 1]
    assert len(read(rows, more={"max_length": 16}).train) == 2


def test_names_of_a_class_label_column_are_kept(tmp_path, tokenizer):
    features = datasets.Features({"text": datasets.Value("string"), "topic": datasets.ClassLabel(names=["z", "a"])})
    rows = datasets.Dataset.from_dict({"text": ["One.", "Two."], "topic": [0, 1]}, features=features)
    rows.to_parquet(tmp_path / "rows.parquet")
    spec = {"path": str(tmp_path / "rows.parquet"), "columns": {"label": "topic"}}
    data = DataOptions(datasets=[spec], num_proc=1)  # through the cache, twice
    for _ in range(2):
        found = prepare(data, tokenizer, seed=1, rows="texts", label_options=ClassificationSpec())
        assert found.labels.labels == ("z", "a") and found.train.n_targets.tolist() == [1, 1]


@pytest.fixture
def read_classes(tmp_path, tokenizer):
    """read_classes(names of each data set, ...): data, and (text, label) of the rows. The last set evaluates."""

    def call(*declared: list[str] | None, many: bool = False, ids=None, **options) -> tuple[PreparedData, list]:
        paths = []
        for number, names in enumerate(declared):
            text = datasets.Value("string")
            one = datasets.ClassLabel(names=names) if names else datasets.Value("int64")
            features = datasets.Features({"text": text, "label": datasets.List(one) if many else one})
            found = ids or [i % len(names or "ab") for i in range(12)]
            texts = [f"{number} {names[i % len(names)] if names else i}" for i in found]
            columns = {"text": texts, "label": [[i] for i in found] if many else found}
            paths.append({"path": str(tmp_path / f"{number}.parquet")})
            datasets.Dataset.from_dict(columns, features=features).to_parquet(paths[-1]["path"])
        data = DataOptions(datasets=paths[:-1] or paths, eval_datasets=paths[1:][-1:], num_proc=1, cache=False)
        found = prepare(data, tokenizer, seed=1, rows="texts", label_options=ClassificationSpec(**options))
        rows = [*found.train, *(found.eval or ())]
        texts = [tokenizer.decode(row.input_ids, skip_special_tokens=True).split()[-1] for row in rows]
        learned = [found.labels.words(row.targets) for row in rows]
        return found, list(zip(texts, learned, strict=True))

    return call


CLASSES = [
    ([["neg", "pos"], ["pos", "neg"]], {}, ("neg", "pos")),
    ([["neg", "pos"], ["pos", "neg"], ["pos", "neg"]], {}, ("neg", "pos")),
    ([["neg", "pos"], ["neg", "neutral", "pos"]], {}, ("neg", "pos", "neutral")),
    ([["neg", "pos"]], {"labels": ("pos", "neg")}, ("pos", "neg")),
    ([["neg", "pos"], ["pos", "neg"]], {"labels": ("neutral", "pos", "neg")}, ("neutral", "pos", "neg")),
]


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize(("declared", "options", "names"), CLASSES)
def test_ids_of_a_class_label_column_are_read_by_name(declared, options, names, many, read_classes):
    """Each text ends with the name of its label."""
    found, rows = read_classes(*declared, many=many, **options)
    assert found.labels.labels == names
    assert len(rows) == 12 * len(declared) and all(text == learned for text, learned in rows)


def test_a_name_of_a_class_label_column_that_the_list_lacks_is_refused(read_classes):
    with pytest.raises(UserError, match=r"the data has the label 'neg', which the list lacks"):
        read_classes(["neg", "pos"], labels=("bad", "pos"))
    with pytest.raises(UserError, match=r"0\.parquet:2: the label -1 has no name: .*0\.parquet declares 2 names"):
        read_classes(["neg", "pos"], ids=[0, -1, -1, 1], problem_type=SINGLE)
    found, rows = read_classes(["neg", "pos"], None)  # ids without names are those of the list
    assert found.labels.labels == ("neg", "pos") and ("0", "neg") in rows and ("1", "pos") in rows


def test_files_of_a_data_set_that_declare_other_names_are_refused(tmp_path, tokenizer):
    for file, names in (("a", ["neg", "pos"]), ("b", ["pos", "neg"])):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
        rows = datasets.Dataset.from_dict({"text": ["One.", "Two."], "label": [0, 1]}, features=features)
        rows.to_parquet(tmp_path / f"{file}.parquet")
    data = DataOptions(datasets=[{"path": str(tmp_path)}], num_proc=1, cache=False)
    with pytest.raises(UserError, match=r"b\.parquet: the names of `label` \(pos, neg\) are not those of a\.parquet"):
        prepare(data, tokenizer, seed=1, rows="texts", label_options=ClassificationSpec())


def test_data_sets_and_chunks_share_the_ids_of_names(tmp_path, tokenizer):
    """Each chunk of rows and each data set has its own table of names before."""
    paths = []
    for number, names in enumerate((["b", "c"], ["a", "b"])):
        rows = ({"text": f"{i} of {number}", "label": names[i >= 256 and i % 4 == 0]} for i in range(320))
        paths.append(tmp_path / f"{number}.jsonl")
        paths[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    specs = [{"path": str(path)} for path in paths]
    data = DataOptions(datasets=specs[:1], eval_datasets=specs[1:], num_proc=1)
    found = prepare(data, tokenizer, seed=1, rows="texts", label_options=ClassificationSpec())
    assert found.labels.labels == ("a", "b", "c")
    parts = ([int(example.targets[0]) for example in part] for part in (found.train, found.eval))
    counts = [np.bincount(ids, minlength=3).tolist() for ids in parts]
    assert counts == [[0, 304, 16], [304, 16, 0]]


@pytest.mark.parametrize(
    ("rows", "dataset", "message"),
    [
        ([{"text": "a"}], {}, r"its columns \(text\) lack `label`.*task: classification"),
        ([{"label": 1}], {}, r"lack a text to classify"),
        (labelled(0, 1), {"format": "alpaca"}, r"format: alpaca does not fit: task: classification"),
        (labelled(None, None), {}, r"the column `label` is null in the first rows"),
    ],
)
def test_rows_of_another_form_are_refused(rows, dataset, message, read):
    with pytest.raises(UserError, match=message):
        read(rows, dataset=dataset)


def test_a_margin_is_read_for_rewards_only(tmp_path, tokenizer):
    rows = [{"prompt": "Q: ", "chosen": "yes", "rejected": "no", "margin": m} for m in (0.5, None, "much")]
    path: Path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataOptions(datasets=[{"path": str(path)}], num_proc=1, cache=False)
    rewards = prepare(data, tokenizer, seed=1, rows="reward_pairs")
    assert [example.targets for example in rewards.train] == [(0.5,), ()]
    assert rewards.report.dropped == {"margin is not a number": 1} and rewards.train.trained.tolist() == [2, 2]
    assert [example.targets for example in prepare(data, tokenizer, seed=1, rows="pairs").train] == [()] * 3
