"""A first step that runs out of memory: the run begins again, once, with other settings that the plan has tried."""

import dataclasses
import json
import weakref

import pytest
import torch
from support.command_line import metrics
from support.forked_ranks import on_ranks
from support.quickstart_runs import TWO_LAYERS, plan_run, recipe_for

from ligertune.hardware import this_machine
from ligertune.planning.plan import TriedSettings
from ligertune.planning.time.settings_choice import settings_that_fit
from ligertune.report.make_report import peak_over_predicted
from ligertune.run import run
from ligertune.trainer import Trainer
from ligertune.training import resolve
from ligertune.training.checks import OutOfDeviceMemory

SETTINGS = {
    **TWO_LAYERS,
    "method.type": "lora",
    "method.lora_dropout": 0.1,  # the second try draws the same random numbers as the first one did
    "data.padding_free": False,
    "data.max_length": 256,
    "data.on_overlength": "truncate",
    "eval.eval_on_start": True,
    "train.learning_rate": 1e-2,
    "train.max_steps": 2,
}
GIB = 2**30


def settings(rows, accumulation, checkpointing, recompute, *, seconds=1.0, peak=GIB):
    """One entry of Plan.settings_tried."""
    values = {
        "train.per_device_train_batch_size": rows,
        "train.gradient_accumulation_steps": accumulation,
        "train.gradient_checkpointing": checkpointing,
        "kernels.recompute": recompute,
    }
    return TriedSettings(values, seconds, peak)


FAILED = settings(4, 1, False, False, seconds=1, peak=2 * GIB)
SLOW = settings(1, 4, True, False, seconds=3)
FAST = settings(2, 2, True, False, seconds=2)
AS_LARGE = settings(4, 1, False, "norms", seconds=1.5, peak=2 * GIB)
TRIED = (FAILED, SLOW, AS_LARGE, FAST)


def chosen(job, tried=TRIED):
    """Return the job as if the plan had chosen its settings; on a CPU no time is predicted."""
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, settings_tried=tried))


def job_of(folder, tried=TRIED):
    """Return a job whose plan has chosen 4 rows in a micro-batch."""
    changes = {"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 1}
    return chosen(plan_run(folder, **SETTINGS, **changes), tried)


class Limit:
    """Let a training step of more than `rows` rows run out of memory, as on a small device.

    It leaves a file in the folder of trackers, and remembers the models without keeping them.
    """

    def __init__(self, folder, rows):
        self.trackers = folder / "run" / "trackers"
        self.rows = rows
        self.models = []

    def __call__(self, model):
        alive = [one for one in self.models if one() is not None]
        assert not alive  # the memory of the first model is free before the second one is loaded
        self.models.append(weakref.ref(model))
        self.trackers.mkdir(exist_ok=True)
        (self.trackers / str(len(self.models))).touch()

        def check(module, arguments, inputs):
            if module.training and inputs["input_ids"].shape[0] > self.rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        model.register_forward_pre_hook(check, with_kwargs=True)


MEASURED = {"time", "seconds", "peak_memory", "tokens_per_second", "remaining_seconds"}


def computed(lines):
    """Return lines of metrics.jsonl without what differs between two equal runs."""
    return [{name: value for name, value in line.items() if name not in MEASURED} for line in lines]


def test_the_second_try_equals_a_run_with_its_settings(tmp_path):
    shown = []
    limit = Limit(tmp_path / "tried", 2)
    report = run(job_of(tmp_path / "tried"), shown.append, change=limit)
    folder = tmp_path / "tried" / "run"
    assert len(limit.models) == 2

    (note,) = [line["note"] for line in shown if "ran out" in line.get("note", "")]
    assert note == f"the first step ran out of memory with {FAILED}: the run began again with {FAST}"
    assert report.notes.count(note) == 1
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["notes"].count(note) == 1
    assert [one["values"] for one in plan["settings_tried"]] == [FAST.values, SLOW.values]

    written = {
        "train.per_device_train_batch_size": 2,
        "train.gradient_accumulation_steps": 2,
        "train.gradient_checkpointing": True,
        "kernels.recompute": False,
    }
    expected = run(plan_run(tmp_path / "written", **SETTINGS, **written), lambda line: None)
    other = tmp_path / "written" / "run"
    assert computed(metrics(folder)) == computed(metrics(other))
    assert [line["step"] for line in metrics(folder)] == [0, 0, 1, 2, 2]  # evaluation, loss before training, steps
    texts = [path.joinpath("resolved_recipe.yaml").read_text().replace(str(path), "") for path in (folder, other)]
    assert texts[0] == texts[1]
    chosen = {f"{name}: {words}" for name, words in (("chosen", FAST), ("next best", SLOW))}
    assert chosen <= {*report.notes}
    overridden = "--set train."  # the quickstart's keys that the tests replace
    notes = [{one for one in found.notes if not one.startswith(overridden)} for found in (report, expected)]
    assert notes[0] - {note} - chosen == notes[1]
    if report.peak_memory["kind"] == "device":  # nothing of the first try is left there
        peaks = [one.peak_memory["allocated_run"] for one in (report, expected)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.02)
    files = [{str(file.relative_to(path)) for file in path.rglob("*")} for path in (folder, other)]
    assert files[0] - files[1] == {"trackers", "trackers/2"} and files[1] <= files[0]


def test_memory_that_runs_out_twice_is_explained(tmp_path):
    shown = []
    limit = Limit(tmp_path, 1)
    with pytest.raises(OutOfDeviceMemory, match=r"ran out of memory: tried to allocate 2\.00 GiB") as caught:
        run(job_of(tmp_path), shown.append, change=limit)
    assert len(limit.models) == 2 and caught.value.hint
    assert len([line for line in shown if "ran out" in line.get("note", "")]) == 1


@pytest.mark.parametrize("tried", [(), (FAILED,), (FAILED, AS_LARGE)], ids=["written by the user", "alone", "larger"])
def test_without_other_settings_the_error_is_the_usual_one(tried, tmp_path):
    shown = []
    limit = Limit(tmp_path, 2)
    with pytest.raises(OutOfDeviceMemory, match="ran out of memory"):
        run(job_of(tmp_path, tried), shown.append, change=limit)
    assert len(limit.models) == 1 and not [line for line in shown if "ran out" in line.get("note", "")]
    assert (tmp_path / "run" / "trackers" / "1").exists()


def test_several_processes_make_no_second_try(tmp_path):
    def models(rank):
        limit = Limit(tmp_path, 2)
        with pytest.raises(OutOfDeviceMemory):
            run(job_of(tmp_path), lambda line: None, change=limit)
        return len(limit.models)

    assert on_ranks(2, models) == [1, 1]


def test_a_later_step_that_runs_out_of_memory_is_not_repeated(tmp_path):
    limit = Limit(tmp_path, 4)

    def lower(line):
        limit.rows = 2 if "loss" in line else 4

    with pytest.raises(OutOfDeviceMemory):
        run(job_of(tmp_path), lower, change=limit)
    assert len(limit.models) == 1
    assert [line["step"] for line in metrics(tmp_path / "run") if "loss" in line] == [1]


def test_a_python_user_gets_the_second_try_with_a_loss_of_their_own(tmp_path):
    rows = []

    def loss(model, batch):
        if model.training:
            rows.append(len(batch["input_ids"]))
            if rows == [4]:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return model(**batch, use_cache=False).loss

    shorter = ["train.max_steps=1", "eval.eval_on_start=false"]
    trainer = Trainer(job_of(tmp_path).plan.settings, shorter, loss=loss)
    trainer.job = chosen(trainer.job)
    report = trainer.train()
    assert rows == [4, 2, 2] and report.steps == 1
    assert sum("began again" in note for note in report.notes) == 1


@pytest.mark.parametrize(
    "split",
    [{"train.global_batch_size": 4}, {"train.gradient_accumulation_steps": "auto"}],
    ids=["fixed batch", "auto"],
)
def test_settings_are_planned_as_they_were_tried(split, tmp_path, monkeypatch):
    h200 = {"device": "cuda", "vendor": "nvidia", "arch": "sm90", "name": "NVIDIA H200", "peak_flops": 989e12}
    machine = dataclasses.replace(this_machine(), **h200, memory_bytes=139 * GIB)
    monkeypatch.setattr(resolve, "simulated_machine", lambda **_: machine)
    keys = ("train.per_device_train_batch_size", "train.gradient_checkpointing", "kernels.recompute")
    recipe = recipe_for(tmp_path, **dict.fromkeys(keys, "auto"), **split, **{"data.padding_free": False})
    job = resolve.plan_for(recipe, for_show=True)
    tried = job.plan.settings_tried
    assert len({one.values["train.per_device_train_batch_size"] for one in tried}) == 3
    for one in tried:
        plan = job.plan_with(one)
        assert plan.time.total == one.seconds and plan.peak.total == one.peak
        assert plan.batching.micro_batch_size == one.values["train.per_device_train_batch_size"]
        assert plan.batching.global_batch_size == 4
        assert plan.settings["train"]["gradient_checkpointing"] == one.values["train.gradient_checkpointing"]
        assert plan.settings["kernels"]["recompute"] == one.values["kernels.recompute"]


def test_the_report_compares_the_peak_with_the_prediction(tmp_path):
    plan = plan_run(tmp_path).plan
    assert peak_over_predicted(plan, {"kind": "device", "allocated_run": 3 * plan.peak.total}) == 3
    assert peak_over_predicted(plan, {"kind": "resident", "allocated_run": GIB}) is None  # Python and torch, too


def test_settings_are_judged_by_what_the_device_has_measured(tmp_path):
    plan = job_of(tmp_path).plan
    small = dataclasses.replace(plan, machine=dataclasses.replace(plan.machine, memory_bytes=2 * GIB))
    assert settings_that_fit(small, None) == (FAST, SLOW)
    assert settings_that_fit(small, GIB) == (FAST, SLOW)  # less than predicted: another process took the rest
    assert settings_that_fit(small, int(2 * 1.83 * GIB)) == (FAST, SLOW)
    assert settings_that_fit(small, int(2 * 1.85 * GIB)) == ()  # 1.85 GiB are more than 0.92 x 2 GiB
