"""A note on runs of very few optimizer steps, with the keys that give more."""

import json

import pytest
from support.quickstart_runs import plan_run

TASKS = {
    "sft": {"instruction": "Name a colour.", "output": "Blue."},
    "dpo": {"prompt": "Name a colour. ", "chosen": "Blue.", "rejected": "No."},
    "classification": {"text": "A short text."},
    "reward": {"prompt": "Name a colour. ", "chosen": "Blue.", "rejected": "No."},
}


def notes_of(folder, task="sft", **changes):
    path = folder / "rows.jsonl"
    rows = [{**TASKS[task], "label": number % 2} if task == "classification" else TASKS[task] for number in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = {"task": task, "data.datasets.0.path": path, "data.val_split": 0, "data.packing": True,
             "train.gradient_accumulation_steps": 1}  # fmt: skip
    short |= {} if "train.max_steps" in changes else {"train.num_train_epochs": 1}
    plan = plan_run(folder, **{**short, **changes}).plan
    return plan.schedule.total_steps, [note for note in plan.notes if "optimizer step" in note]


@pytest.mark.parametrize("task", TASKS)
def test_eight_packed_rows_are_one_step_and_the_note_says_what_to_write(task, tmp_path):
    steps, (note,) = notes_of(tmp_path, task)
    assert steps == 1 and "only 1 optimizer step" in note and "packed into " in note
    assert "num_train_epochs (now 1)" in note and "data.packing: false" in note
    assert ("per_device_train_batch_size (now 2)" in note) == ("into 2 rows" in note)  # of 1 row it changes nothing
    assert "gradient_accumulation_steps" not in note  # it is 1 already


def test_each_way_that_the_note_names_gives_more_steps(tmp_path):
    one, _ = notes_of(tmp_path, **{"train.gradient_accumulation_steps": 2, "data.packing": False})
    for change in ({"train.num_train_epochs": 3}, {"train.per_device_train_batch_size": 1},
                   {"train.gradient_accumulation_steps": 1}):  # fmt: skip
        changes = {"train.gradient_accumulation_steps": 2, "data.packing": False, **change}
        assert notes_of(tmp_path, **changes)[0] > one


def test_enough_steps_and_a_chosen_number_have_no_note(tmp_path):
    assert notes_of(tmp_path, **{"train.num_train_epochs": 10})[1] == []
    assert notes_of(tmp_path, **{"train.max_steps": 2}) == (2, [])
