"""What evaluations lead to: the best model kept, an early stop, answers to prompts; and that a resume knows them."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file
from test_keys import read

from ligertune.run import plan_for, run
from ligertune.train.evaluate import EarlyStopping

pytestmark = pytest.mark.slow

# the loss on held-out data falls for five steps and then rises, as the few examples are learnt by heart
OVERFIT = {
    "data.datasets.0.max_samples": 12,
    "data.val_split": 0.4,
    "train.max_steps": 14,
    "train.learning_rate": 0.006,
    "train.lr_scheduler_type": "constant",
    "eval.eval_strategy": "steps",
    "eval.eval_steps": 1,
    "checkpoint.save_strategy": "steps",
    "checkpoint.save_steps": 3,
}


def evaluated(folder) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}


@pytest.fixture(scope="module")
def best(quickstart, tmp_path_factory):
    """A run that ends with its best model, and stops when three evaluations were no better: (folder, report)."""
    folder = tmp_path_factory.mktemp("best")
    changes = {**OVERFIT, "checkpoint.load_best_model_at_end": True, "eval.early_stopping_patience": 3}
    report = run(plan_for(read(quickstart, folder, **changes)), lambda line: None)
    return folder / "run", report


def test_it_stops_when_evaluations_get_no_better(best):
    folder, report = best
    found = evaluated(folder)
    lowest = min(found, key=found.get)
    assert report.status == "completed"
    assert report.steps == max(found) == lowest + 3 < 14
    assert any("stopped early" in note for note in report.notes)


def test_the_model_is_that_of_the_lowest_loss(best, quickstart, tmp_path):
    folder, report = best
    found = evaluated(folder)
    lowest = min(found, key=found.get)
    assert any(f"the model is that of step {lowest}" in note for note in report.notes)
    until = {**OVERFIT, "train.max_steps": lowest}
    run(plan_for(read(quickstart, tmp_path, **until)), lambda line: None)
    ours, theirs = (load_file(path / "model" / "model.safetensors") for path in (folder, tmp_path / "run"))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_resumed_run_remembers_the_best_and_how_long_ago_it_was(best, quickstart, tmp_path):
    folder, report = best
    changes = {**OVERFIT, "checkpoint.load_best_model_at_end": True, "eval.early_stopping_patience": 3}
    run(plan_for(read(quickstart, tmp_path, **{**changes, "train.max_steps": report.steps})), lambda line: None)
    (tmp_path / "run" / "report.json").unlink()
    again = run(
        plan_for(read(quickstart, tmp_path, **changes, **{"checkpoint.resume_from_checkpoint": "auto"})),
        lambda line: None,
    )
    assert again.resumed_from > 0
    assert (again.steps, evaluated(tmp_path / "run")) == (report.steps, evaluated(folder))
    models = [(path / "model" / "model.safetensors").read_bytes() for path in (folder, tmp_path / "run")]
    assert models[0] == models[1]


def test_prompts_are_answered_after_each_evaluation_and_change_nothing(quickstart, tmp_path):
    changes = {**OVERFIT, "train.max_steps": 2, "method.type": "lora"}
    asked = {"eval.sample_prompts": "[Name three colours., Hello]"}
    found = []
    for name, more in (("silent", {}), ("asked", asked)):
        run(plan_for(read(quickstart, tmp_path / name, **changes, **more)), lambda line: None)
        found.append(evaluated(tmp_path / name / "run"))
    assert found[0] == found[1]
    lines = [json.loads(line) for line in (tmp_path / "asked" / "run" / "metrics.jsonl").read_text().splitlines()]
    samples = [line["samples"] for line in lines if "samples" in line]
    assert [[one["prompt"] for one in step] for step in samples] == [["Name three colours.", "Hello"]] * 2
    assert all(one["answer"].strip() for step in samples for one in step)


def test_patience_counts_evaluations_in_a_row():
    losses = [3.0, 2.0, 2.5, 2.0]
    assert (EarlyStopping(None, losses).best, EarlyStopping(None, losses).since_best) == (2.0, 2)
    assert EarlyStopping(2, losses).should_stop
    assert not EarlyStopping(3, losses).should_stop and not EarlyStopping(None, losses).should_stop
    again = EarlyStopping(1, losses)
    assert again.add(1.9) and not again.should_stop
