"""Evaluations, best weights, learning rates and counted work, in one run and in a resumed one."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import metrics
from support.quickstart_runs import RESUME, plan_run, saves, train, unfinished

from ligertune.files.storage import MetricsFile, read_metrics
from ligertune.planning.feature_spec import feature_of
from ligertune.run import run
from ligertune.training import loop as loop_module
from ligertune.training.checkpoint.checkpoint_files import Saver
from ligertune.training.metrics import meter as meter_module

# At this rate the loss rises above that of the base, falls and rises again: the evaluation before the first step has
# the lowest loss, the best one after it is not the last, and the plateau lowers the rate.
SETTINGS = {
    "data.datasets.0.max_samples": 12,
    "data.val_split": 0.4,
    "train.max_steps": 6,
    "train.learning_rate": 0.1,
    "train.lr_scheduler_type": "reduce_lr_on_plateau",
    "train.lr_scheduler_kwargs": "{factor: 0.9, patience: 0}",
    "eval.eval_strategy": "steps",
    "eval.eval_steps": 1,
    "eval.eval_on_start": True,
    "eval.early_stopping_patience": 5,
    "eval.early_stopping_threshold": 0.01,
    "model.dtype": "float32",
    "checkpoint.load_best_model_at_end": True,
    **saves(2),
}
# Keys of a line that the clock decides
TIMES = ("time", "seconds", "tokens_per_second", "remaining_seconds", "peak_memory")


def lines(folder) -> list[dict]:
    found = [line for line in metrics(folder / "run") if "note" not in line]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run: (folder, report)."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, **SETTINGS)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A run that was killed after step 4 and resumed: (folder, report). Its lines have another measure, too."""
    folder = tmp_path_factory.mktemp("resumed")
    train(folder, **{**SETTINGS, "train.max_steps": 5})
    path = unfinished(folder) / "metrics.jsonl"
    # A measure that looks like a better loss must not decide anything.
    kept = [line | ({"eval_accuracy": 0.01} if "eval_loss" in line else {}) for line in read_metrics(path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return folder, train(folder, **SETTINGS, **RESUME)


def test_the_rates_are_those_of_torchs_plateau_over_the_evaluations_after_a_step(whole):
    found = lines(whole[0])
    losses = {line["step"]: line["eval_loss"] for line in found if "eval_loss" in line}
    rates = {line["step"]: line["learning_rate"] for line in found if "learning_rate" in line}
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=0)
    expected = {}
    for step in range(1, 7):
        expected[step] = optimizer.param_groups[0]["lr"]
        plateau.step(losses[step])
    assert rates == pytest.approx(expected)
    assert min(rates.values()) < 0.1
    # else a loop that observes the evaluation before the first step would have the same rates
    assert losses[0] < losses[1]


def test_a_resumed_run_has_the_lines_and_the_counts_of_an_undisturbed_one(whole, resumed):
    assert resumed[1].resumed_from == 4
    expected = lines(whole[0])
    found = [{key: value for key, value in line.items() if key != "eval_accuracy"} for line in lines(resumed[0])]
    assert found == expected
    for name in ("tokens", "padded_tokens", "trained_tokens", "eval_loss", "loss_first", "loss_last", "steps"):
        assert getattr(resumed[1], name) == getattr(whole[1], name), name


def test_the_best_is_the_lowest_evaluation_after_a_step_and_the_report_shows_the_last(whole, resumed):
    losses = {line["step"]: line["eval_loss"] for line in lines(whole[0]) if "eval_loss" in line and line["step"]}
    best = min(losses, key=losses.get)
    assert losses[6] > losses[best]
    assert whole[1].eval_loss == losses[6]
    for _, report in (whole, resumed):
        assert any(f"the model is that of step {best}, with" in note for note in report.notes)


def test_other_measures_of_an_evaluation_do_not_decide_the_best():
    assert feature_of("sft").judged({"eval_loss": 2.0, "eval_accuracy": 0.9}) == 2.0


def test_the_work_of_a_step_is_counted_by_hand(whole):
    folder, report = whole
    job = plan_run(folder, **SETTINGS, **{"checkpoint.output_dir": folder / "other"})
    plan, examples = job.plan, job.data.train
    micro = plan.batching.micro_batch_size
    found = [line for line in lines(folder) if "loss" in line]
    assert sum(line["tokens"] for line in found) == report.tokens
    lengths = [len(example.input_ids) for example in examples]
    # Whole epochs visit each example once: 7 examples in steps of 4, so 6 steps are 24 examples.
    assert (len(lengths), micro) == (7, 2)
    assert report.trained_tokens < report.tokens < report.padded_tokens
    longest = 16 * math.ceil(max(lengths) / 16)
    assert all(line["padded_tokens"] <= 4 * longest for line in found)
    assert any(line["padded_tokens"] < 4 * longest for line in found)  # micro-batches are padded one by one


def test_neither_saving_nor_evaluating_counts_as_training_time(tmp_path, monkeypatch):
    """Each reading of the clock is a second later; an evaluation and a save take a thousand."""
    clock = SimpleNamespace(now=itertools.count(), paused=0.0)
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: next(clock.now) + clock.paused))

    def slow(function):
        def call(*arguments):
            clock.paused += 1000
            return function(*arguments)

        return call

    monkeypatch.setattr(loop_module, "evaluate", slow(loop_module.evaluate))
    monkeypatch.setattr(Saver, "save", slow(Saver.save))
    report = run(plan_run(tmp_path, **{**SETTINGS, "train.max_steps": 4}), lambda line: None)
    assert clock.paused >= 6000
    assert report.throughput.tokens_per_second > report.tokens / 1000
    assert all(line["seconds"] < 1000 for line in metrics(tmp_path / "run") if "seconds" in line)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict:
    """Settings of DPO on eight pairs."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"prompt": f"Tell me {n}.", "chosen": "Once upon a time.", "rejected": "No " * (n + 1)} for n in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"task": "dpo", "data.datasets.0.path": path, "data.datasets.0.max_samples": 8, "model.dtype": "float32"}


def test_the_logged_norm_is_that_of_the_gradient_next_to_measures(pairs, quickstart, tmp_path):
    """A step of SGD moves the weights by its rate times the gradient."""
    changes = {"train.max_steps": 1, "train.optim": "sgd", "train.learning_rate": 0.01, "train.weight_decay": 0}
    train(tmp_path, **pairs, **changes, **{"train.lr_scheduler_type": "constant", "train.max_grad_norm": 1e9})
    before, after = (
        load_file(folder / "model.safetensors") for folder in (quickstart / "stories260K", tmp_path / "run" / "model")
    )
    moved = math.sqrt(sum(float((after[name] - before[name]).double().square().sum()) for name in after))
    (line,) = [line for line in metrics(tmp_path / "run") if "grad_norm" in line]
    assert line["grad_norm"] == pytest.approx(moved / 0.01, rel=1e-3)


def test_measures_of_training_steps_survive_an_evaluation(pairs, tmp_path):
    """A line of four steps, with an evaluation after each, has the mean margin of all four."""
    changes = {**pairs, "train.max_steps": 4, "eval.eval_strategy": "steps", "eval.eval_steps": 1}
    report = train(tmp_path / "each", **changes)
    train(tmp_path / "together", **{**changes, "logging.logging_steps": 4})
    each = [line["rewards/margins"] for line in metrics(tmp_path / "each" / "run") if "rewards/margins" in line]
    (together,) = [line for line in metrics(tmp_path / "together" / "run") if "rewards/margins" in line]
    assert len(each) == 4 and len(set(each)) > 1
    assert together["rewards/margins"] == pytest.approx(sum(each) / 4, rel=1e-5, abs=1e-9)
    evaluations = [line for line in metrics(tmp_path / "each" / "run") if "eval_loss" in line and line["step"]]
    assert len(evaluations) == 4
    margins = [line["eval_rewards/margins"] for line in evaluations]
    assert margins[0] != margins[-1] == report.eval_measures["rewards/margins"]


def test_a_resumed_metrics_file_drops_the_lines_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3, 4)))
    kept = MetricsFile(path, enabled=True)
    kept.begin(after=2)
    kept.write({"step": 3, "loss": 2.0})
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1.0), (2, 1.0), (3, 2.0)]
