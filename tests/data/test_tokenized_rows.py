"""Rows that are tokenized: ids and labels are used as they are, those of TRL included; wrong lists are refused."""

import json
import os

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from support.data.row_files import write_rows

from ligertune.data.tokenized_rows import LABEL_COLUMNS
from ligertune.errors import UserError

X = -100
# name -> (row, [(input_ids, labels) of each example]), written by hand. A first token has no label.
READ = {
    "labels": ({"input_ids": [5, 6, 7, 2], "labels": [X, X, 7, 2]}, [([5, 6, 7, 2], [X, X, 7, 2])]),
    "Axolotl's documentation": (
        {"input_ids": [271, 299, 99], "attention_mask": [1, 1, 1], "labels": [271, X, 99]},
        [([271, 299, 99], [X, X, 99])],
    ),
    "no labels": ({"input_ids": [5, 6, 2]}, [([5, 6, 2], [X, 6, 2])]),
    "other labels": ({"input_ids": [5, 6, 2], "labels": [X, 9, 2]}, [([5, 6, 2], [X, 9, 2])]),
    "loss_mask": ({"input_ids": [5, 6, 2], "loss_mask": [0, 0, 1]}, [([5, 6, 2], [X, X, 2])]),
    "assistant_masks": ({"input_ids": [5, 6, 2], "assistant_masks": [0, 1, 1]}, [([5, 6, 2], [X, 6, 2])]),
    "completion_mask": ({"input_ids": [5, 6, 2], "completion_mask": [0, 1, 1]}, [([5, 6, 2], [X, 6, 2])]),
    "booleans": ({"input_ids": [5, 6, 2], "loss_mask": [False, False, True]}, [([5, 6, 2], [X, X, 2])]),
    "two masks": (
        {"input_ids": [5, 6, 7, 2], "completion_mask": [0, 0, 1, 1], "assistant_masks": [0, 1, 1, 0]},
        [([5, 6, 7, 2], [X, X, 7, X])],
    ),
    "labels and a mask": (
        {"input_ids": [5, 6, 2], "labels": [5, 6, 2], "loss_mask": [0, 0, 1]}, [([5, 6, 2], [X, X, 2])],
    ),
    "a mask without a value": ({"input_ids": [5, 6, 2], "attention_mask": None}, [([5, 6, 2], [X, 6, 2])]),
    "padding on the right": (
        {"input_ids": [5, 6, 2, 0, 0], "attention_mask": [1, 1, 1, 0, 0], "labels": [5, 6, 2, 0, 0]},
        [([5, 6, 2], [X, 6, 2])],
    ),
    "padding on the left": (
        {"input_ids": [0, 0, 5, 6, 2], "attention_mask": [0, 0, 1, 1, 1], "position_ids": [1, 1, 0, 1, 2]},
        [([5, 6, 2], [X, 6, 2])],
    ),
    "seq_lengths": (
        {"input_ids": [5, 6, 2, 7, 8, 9, 2], "labels": [5, 6, 2, 7, X, 9, 2], "seq_lengths": [3, 4]},
        [([5, 6, 2], [X, 6, 2]), ([7, 8, 9, 2], [X, X, 9, 2])],
    ),
    "position_ids": (
        {"input_ids": [5, 6, 2, 7, 8], "position_ids": [0, 1, 2, 0, 1]}, [([5, 6, 2], [X, 6, 2]), ([7, 8], [X, 8])],
    ),
    "position_ids and padding between documents": (
        {"input_ids": [5, 6, 0, 7, 8], "position_ids": [0, 1, 0, 0, 1], "attention_mask": [1, 1, 0, 1, 1]},
        [([5, 6], [X, 6]), ([7, 8], [X, 8])],
    ),
    "both": (
        {"input_ids": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1], "seq_lengths": [2, 2]},
        [([5, 6], [X, 6]), ([7, 8], [X, 8])],
    ),
    "a document without a label": (
        {"input_ids": [5, 6, 7, 8], "labels": [5, X, 7, 8], "seq_lengths": [2, 2]}, [([7, 8], [X, 8])],
    ),
    "a document of one token": ({"input_ids": [5, 7, 8], "seq_lengths": [1, 2]}, [([7, 8], [X, 8])]),
    "JSON text": ({"input_ids": "[5, 6, 2]", "labels": "[-100, 6, 2]"}, [([5, 6, 2], [X, 6, 2])]),
    "text next to them": (
        {"text": "Hello.", "messages": [{"role": "user", "content": "q"}], "input_ids": [5, 6, 2]},
        [([5, 6, 2], [X, 6, 2])],
    ),
}  # fmt: skip


def lists(examples) -> list[tuple[list[int], list[int]]]:
    return [(example.input_ids.tolist(), example.labels.tolist()) for example in examples]


@pytest.mark.parametrize("name", READ)
def test_a_row_is_used_as_it_is(name, prepared, tmp_path):
    row, expected = READ[name]
    found = prepared([row])
    assert lists(found.train) == expected
    assert found.train[0].input_ids.dtype == found.train[0].labels.dtype == np.int32
    assert found.report.sets[0].format == "tokenized" and found.report.dropped == {}
    assert found.train[0].source == f"{tmp_path / 'd.jsonl'}:1"


# words of the sentence -> row that is refused
REFUSED = {
    "d.jsonl:2: `labels` has 2 numbers, and `input_ids` has 3.": {"input_ids": [5, 6, 2], "labels": [5, 6]},
    "`loss_mask` has 4 numbers, and `input_ids` has 3": {"input_ids": [5, 6, 2], "loss_mask": [1, 1, 1, 1]},
    "`attention_mask` has 1 numbers": {"input_ids": [5, 6, 2], "attention_mask": [1]},
    "`position_ids` has 2 numbers": {"input_ids": [5, 6, 2], "position_ids": [0, 1]},
    "`seq_lengths` add up to 4, and `input_ids` has 3": {"input_ids": [5, 6, 2], "seq_lengths": [2, 2]},
    "`seq_lengths` add up to 3": {"input_ids": [5, 6, 2], "seq_lengths": [0, 3]},
    "`input_ids` holds 512, and the tokenizer's ids are 0 to 511": {"input_ids": [5, 512, 2]},
    "`input_ids` holds -1": {"input_ids": [5, -1, 2]},
    "`labels` holds 99999999999": {"input_ids": [5, 6, 2], "labels": [X, 99999999999, 2]},
    "`labels` holds -1": {"input_ids": [5, 6, 2], "labels": [X, -1, 2]},
    "`attention_mask` holds 2": {"input_ids": [5, 6, 2], "attention_mask": [1, 2, 2]},
    "`attention_mask` is 0 before token 2, in the middle": {"input_ids": [5, 6, 2], "attention_mask": [1, 0, 1]},
    "`position_ids` jump to 2 at token 1": {"input_ids": [5, 6, 2], "position_ids": [0, 2, 3]},
    "`position_ids` jump to 1 at token 0": {"input_ids": [5, 6], "position_ids": [1, 2]},
    "`position_ids` and `seq_lengths` say different documents": {
        "input_ids": [5, 6, 2], "position_ids": [0, 1, 2], "seq_lengths": [1, 2]},
    "`input_ids` is no list of whole numbers": {"input_ids": [[5, 6], [2, 3]]},
    "`labels` is no list of whole numbers": {"input_ids": [5, 6, 2], "labels": [5.0, 6.0, 2.0]},
    "`loss_mask` is no list of whole numbers": {"input_ids": [5, 6, 2], "loss_mask": [[1], [1, 1]]},
    "`labels` are shifted": {"input_ids": [5, 6, 7, 2], "labels": [X, 7, 2, X]},
}  # fmt: skip


@pytest.mark.parametrize("says", REFUSED)
@pytest.mark.parametrize("policy", ["drop", "error"])
def test_lists_that_do_not_fit_are_refused_with_the_row(says, policy, prepared):
    usual = {"input_ids": [5, 6, 2]} | {name: [1, 1, 1] for name in REFUSED[says] if name in LABEL_COLUMNS}
    with pytest.raises(UserError) as refused:
        prepared([usual, REFUSED[says]], dataset={"on_bad_row": policy})
    assert says in str(refused.value) and "d.jsonl:2: " in str(refused.value)
    assert str(refused.value).count("\n") <= 1


def test_rows_without_tokens_or_labels_are_dropped_and_counted(prepared):
    rows = [
        {"input_ids": [5, 6, 2], "labels": [5, 6, 2]},
        {"input_ids": [], "labels": []},
        {"input_ids": None, "labels": []},
        {"input_ids": [5, 6, 2], "labels": None},
        {"input_ids": [5, 6, 2]},
        {"input_ids": [5, 6, 2], "labels": [5, X, X]},
        {"input_ids": [5, 6], "labels": [5, 6], "attention_mask": [0, 0]},
    ]
    report = prepared(rows).report
    assert report.dropped == {"missing value": 3, "no text": 2, "no trained token": 1}
    assert (report.rows_read, report.examples) == (7, 1)
    masked = [{"input_ids": [5, 6, 2], "loss_mask": mask} for mask in ([0, 1, 1], None)] + [{"input_ids": [5, 6, 2]}]
    report = prepared(masked, max_dropped=1).report
    assert (report.dropped, report.examples) == ({"missing value": 2}, 1)
    assert report.first_dropped["missing value"].endswith("d.jsonl:2 (`loss_mask`)")
    with pytest.raises(UserError, match=r"d\.jsonl:2: no text"):
        prepared(rows, dataset={"on_bad_row": "error"})


def test_max_length_holds_for_each_document(prepared):
    row = {"input_ids": list(range(3, 15)), "seq_lengths": [8, 4]}
    assert [len(example.labels) for example in prepared([row], max_length=8).train] == [8, 4]
    short = {"input_ids": [5, 6, 2]}
    dropped = prepared([row, short], max_length=6).report
    assert (dropped.dropped, dropped.examples, dropped.overlength) == ({"too long": 1}, 1, 1)
    cut = prepared([row, short], max_length=6, on_overlength="truncate")
    assert lists(cut.train)[0] == ([3, 4, 5, 6, 7, 8], [X, 4, 5, 6, 7, 8])
    assert [len(example.labels) for example in cut.train] == [6, 4, 3] and cut.report.truncated == 1
    with pytest.raises(UserError, match=r"d\.jsonl:1: 8 tokens, more than data\.max_length: 6"):
        prepared([row], max_length=6, on_overlength="error")


def test_the_examples_of_other_rows_are_the_same_once_they_are_tokenized(prepared, tmp_path):
    alpaca = [{"instruction": f"Say {n}.", "output": f"{n} " * (n + 1)} for n in range(20)]
    usual = prepared(alpaca).train
    rows = [{"input_ids": ids, "labels": labels} for ids, labels in lists(usual)]
    assert prepared(rows).train.fingerprint == usual.fingerprint
    # packed rows of a program that wrote all of them into one
    joined = {name: [token for row in rows for token in row[name]] for name in ("input_ids", "labels")}
    joined["seq_lengths"] = [len(row["labels"]) for row in rows]
    assert prepared([joined]).train.fingerprint == usual.fingerprint
    streamed = prepared(rows, streaming=True).train
    streamed.read_to(20)
    found = sorted(lists([streamed[number] for number in range(20)]))
    assert found == sorted(lists(usual))
    table = Dataset.from_list(rows)
    table.save_to_disk(tmp_path / "stored")
    assert prepared(tmp_path / "stored").train.fingerprint == usual.fingerprint
    pyarrow.parquet.write_table(table.data.table, tmp_path / "t.parquet")
    assert prepared(tmp_path / "t.parquet").train.fingerprint == usual.fingerprint


@pytest.mark.slow  # importing the trainer takes 5 s
def test_labels_are_trls(prepared):
    """The batch of TRL's collator for packed rows: without padding, each document begins without a label."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [
        {"input_ids": [5, 6, 2, 7, 8, 9, 2], "labels": [5, 6, 2, 7, X, 9, 2], "seq_lengths": [3, 4]},
        {"input_ids": [9, 8, 2], "labels": [9, 8, 2], "seq_lengths": [3]},
    ]
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([dict(row) for row in rows])
    found = prepared(rows).train
    assert np.concatenate([example.input_ids for example in found]).tolist() == batch["input_ids"][0].tolist()
    assert np.concatenate([example.labels for example in found]).tolist() == batch["labels"][0].tolist()


def test_other_columns_can_be_named_and_the_format_too(prepared):
    rows = [{"tokens": [5, 6, 2], "targets": [X, 6, 2]}]
    columns = {"input_ids": "tokens", "labels": "targets"}
    assert lists(prepared(rows, dataset={"columns": columns}).train) == [([5, 6, 2], [X, 6, 2])]
    both = [{"input_ids": [5, 6, 2], "text": "Hello."}]
    assert prepared(both, dataset={"format": "text"}).report.sets[0].format == "text"
    named = {"text": "body"}
    assert prepared([{"input_ids": [5], "body": "Hello."}], dataset={"columns": named}).report.sets[0].format == "text"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt_template": "chat"}, "data.prompt_template: chat is not for rows of format tokenized"),
        ({"system_prompt": "Be brief."}, "data.system_prompt has no place in rows of format tokenized"),
        ({"mask_reasoning": True}, "data.mask_reasoning has no effect on rows of format tokenized"),
        ({"chat_template_kwargs": {"a": 1}}, "data.chat_template_kwargs has no effect"),
    ],
)
def test_options_of_templates_are_refused(options, says, prepared):
    with pytest.raises(UserError, match=says):
        prepared([{"input_ids": [5, 6, 2]}], **options)


@pytest.mark.parametrize("content", ["pairs", "labelled", "texts", "reward_pairs"])
def test_tasks_of_other_rows_refuse_them(content, prepared):
    rows = [{"input_ids": [5, 6, 2], "labels": [5, 6, 2]}]
    with pytest.raises(UserError, match=r"rows are token ids, and this task needs .*\n?.*task: sft"):
        prepared(rows, content=content)


def test_a_row_of_text_among_them_is_an_error_of_its_line(tmp_path, prepared):
    path = write_rows(tmp_path / "rows.jsonl", [{"input_ids": [5, 6, 2]}, {"input_ids": "Hello."}])
    with pytest.raises(UserError, match=r"rows\.jsonl:2: `input_ids` is no list of whole numbers"):
        prepared(path)
    assert json.loads(path.read_text().split("\n")[0]) == {"input_ids": [5, 6, 2]}
