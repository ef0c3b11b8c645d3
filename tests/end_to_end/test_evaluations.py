"""Evaluation: the best model is kept, training stops early, prompts are answered; a resumed run remembers all of it."""

import html
import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from support.command_line import RECIPE, losses, metrics, weights
from support.quickstart_runs import ALPACA_ROWS, RESUME, TWO_LAYERS, plan_run, saves, train, unfinished
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerControl, TrainerState

from ligertune.cli.render.run_report import show_report
from ligertune.decode import generate
from ligertune.planning.preflight import has_trained
from ligertune.training.evaluate import EarlyStopping

# The evaluation loss falls for some steps and then rises: a few examples at a high learning rate overfit.
OVERFIT = {
    "data.datasets.0.max_samples": 12,
    "data.val_split": 0.4,
    "train.max_steps": 14,
    "train.learning_rate": 0.006,
    "train.lr_scheduler_type": "constant",
    "eval.eval_strategy": "steps",
    "eval.eval_steps": 1,
    **saves(3),
}
SHORT_ANSWER = 24  # tokens, of 64 that a run writes
BEST = {**OVERFIT, **ALPACA_ROWS, "checkpoint.load_best_model_at_end": True, "eval.early_stopping_patience": 3}


def eval_losses(run) -> dict[int, float]:
    """Step -> evaluation loss."""
    return {line["step"]: line["eval_loss"] for line in metrics(run) if "eval_loss" in line}


def greedy_answer(prompt: str) -> str:
    """The base model's answer by plain transformers, in Alpaca's format."""
    folder = RECIPE.parent / "stories260K"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{prompt}\n\n### Response:\n"
    )
    ids = tokenizer(text, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = model.generate(**ids, max_new_tokens=SHORT_ANSWER, do_sample=False)
    return tokenizer.decode(found[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def best(tmp_path_factory):
    """A run that keeps its best model and stops after three evaluations without improvement: (folder, report)."""
    folder = tmp_path_factory.mktemp("best")
    report = train(folder, **BEST)
    return folder / "run", report


def test_it_stops_early_and_keeps_the_model_of_the_lowest_loss(best, tmp_path):
    folder, report = best
    found = eval_losses(folder)
    lowest = min(found, key=found.get)
    assert report.status == "completed"
    assert report.steps == max(found) == lowest + 3 < 14
    assert any("stopped early" in note for note in report.notes)
    assert any(f"the model is that of step {lowest}" in note for note in report.notes)
    train(tmp_path, **{**OVERFIT, **ALPACA_ROWS, "train.max_steps": lowest})
    kept, expected = (load_file(path / "model" / "model.safetensors") for path in (folder, tmp_path / "run"))
    assert all(kept[name].equal(expected[name]) for name in expected)


def test_a_resumed_run_remembers_the_best_loss_and_the_evaluations_since(best, tmp_path):
    folder, report = best
    train(tmp_path, **{**BEST, "train.max_steps": report.steps})
    run = unfinished(tmp_path)
    again = train(tmp_path, **BEST, **RESUME)
    assert again.resumed_from > 0
    assert (again.steps, eval_losses(run)) == (report.steps, eval_losses(folder))
    assert weights(run) == weights(folder)


def test_prompts_are_answered_before_training_and_after_each_evaluation_and_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "SAMPLE_TOKENS", SHORT_ANSWER)
    changes = {**OVERFIT, **ALPACA_ROWS, "train.max_steps": 2, "method.type": "lora", "method.lora_dropout": 0.5}
    train(tmp_path / "silent", **changes)
    train(tmp_path / "asked", **changes, **{"eval.sample_prompts": "[Name three colours., Hello]"})
    assert eval_losses(tmp_path / "silent" / "run") == eval_losses(tmp_path / "asked" / "run")
    samples = [line["samples"] for line in metrics(tmp_path / "asked" / "run") if "samples" in line]
    assert [[sample["prompt"] for sample in step] for step in samples] == [["Name three colours.", "Hello"]] * 3
    assert all(sample["answer"].strip() and "###" not in sample["answer"] for step in samples for sample in step)
    assert samples[0][1]["answer"] == greedy_answer("Hello") != samples[-1][1]["answer"]
    page = html.unescape((tmp_path / "asked/run/report.html").read_text())
    when = ("before training", "after step 2")
    assert re.findall("<p class=dim>([^<]*)</p><pre>([^<]*)</pre>", page) == [
        (moment, step[i]["answer"])
        for i in range(2)
        for moment, step in zip(when, (samples[0], samples[-1]), strict=True)
    ]


def test_early_stopping_counts_as_transformers_does():
    generator = torch.Generator().manual_seed(0)
    for threshold in (0.0, 0.05, 0.3):
        values = (torch.rand(60, generator=generator) + torch.linspace(1, 0, 60)).tolist()
        callback, state = EarlyStoppingCallback(10**6, threshold), TrainerState()
        arguments = SimpleNamespace(metric_for_best_model="loss", greater_is_better=False)
        ours = EarlyStopping(10**6, threshold=threshold)
        for value in values:
            callback.on_evaluate(arguments, state, TrainerControl(), metrics={"eval_loss": value})
            if state.best_metric is None or value < state.best_metric:  # as the Trainer does after the callback
                state.best_metric = value
            ours.add(value)
            assert (ours.since_best, ours.best) == (callback.early_stopping_patience_counter, state.best_metric)


def test_a_folder_with_an_evaluation_before_the_first_step_only_is_no_run(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for text, trained in (
        ('{"step": 0, "eval_loss": 2.0}\n{"step": 0, "samples": []}\n', False),
        ('{"step": 0, "eval_loss": 2.0}\n{"step": 0, "loss_before_training": 2.0}\n', True),
        ('{"step": 0, "eval_loss": 2.0}\n{"step": 1, "eval_loss": 2.0}\n', True),
        ('{"step": 0, "eval_loss": 2.0}\nnonsense\n', True),
        ("", False),
    ):
        path.write_text(text)
        assert has_trained(tmp_path) == trained


def test_an_evaluation_before_the_first_step_counts_for_nothing_and_changes_nothing(best, tmp_path):
    """A threshold above every improvement stops after `patience` evaluations."""
    changes = {"eval.eval_on_start": True, "eval.early_stopping_threshold": 100, "checkpoint.save_strategy": "no"}
    report = train(tmp_path, **{**BEST, **changes})
    found, usual = eval_losses(tmp_path / "run"), eval_losses(best[0])
    assert report.steps == 1 + BEST["eval.early_stopping_patience"] and list(found) == [0, 1, 2, 3, 4]
    assert found.pop(0) < min(found.values())  # and yet it counts neither as the best nor for the patience
    assert any("the model is that of step 4" in note for note in report.notes)
    assert found == {step: usual[step] for step in found}
    assert any("without a loss below" in note and "by more than 100" in note for note in report.notes)


def test_an_evaluation_before_training_is_chosen_where_it_is_cheap_and_leaves_the_weights_equal(
    tmp_path, capsys, monkeypatch
):
    """Dropout draws random numbers: an evaluation that drew any would change every later step."""
    monkeypatch.setattr(generate, "SAMPLE_TOKENS", SHORT_ANSWER)
    few = {**TWO_LAYERS, "data.datasets.0.max_samples": 40, "data.val_split": 0.03, "train.max_steps": 12,
           "method.type": "lora", "method.lora_dropout": 0.5, "eval.sample_prompts": "[Hello]"}  # fmt: skip
    report = train(tmp_path / "auto", **few)
    train(tmp_path / "without", **few, **{"eval.eval_on_start": False})
    with_it, without = (tmp_path / name / "run/model/adapter_model.safetensors" for name in ("auto", "without"))
    assert with_it.read_bytes() == without.read_bytes()
    found, usual = eval_losses(tmp_path / "auto/run"), eval_losses(tmp_path / "without/run")
    assert found == {0: report.eval_loss_before_training, **usual} and list(usual) == [12]
    for name, steps in (("auto", [0, 12]), ("without", [12])):
        assert [line["step"] for line in metrics(tmp_path / name / "run") if "samples" in line] == steps
    show_report(report)
    expected = f"{found[0]:.4f} before training, {found[12]:.4f} after"
    assert expected in capsys.readouterr().out
    page = (tmp_path / "auto/run/report.html").read_text()
    assert f"{found[0]:.3f} before training" in page
    short = plan_run(tmp_path / "short", **{**few, "data.val_split": 0.4}).plan  # 16 examples for 12 steps of 4
    assert not short.evaluation.eval_on_start and report.steps == 12


@pytest.mark.slow
def test_a_plateau_lowers_the_rate_of_the_next_step_and_a_resumed_run_remembers_it(tmp_path):
    plateau = {
        **OVERFIT,
        "train.lr_scheduler_type": "reduce_lr_on_plateau",
        "train.lr_scheduler_kwargs": "{factor: 0.5, patience: 0}",
        "logging.logging_steps": 1,
    }
    train(tmp_path, **plateau)
    run, whole = tmp_path / "run", {}
    whole = {line["step"]: line["learning_rate"] for line in metrics(run) if "learning_rate" in line}
    losses, rate, best, expected = eval_losses(run), 0.006, float("inf"), {}
    for step in sorted(losses):
        expected[step] = rate
        rate, best = (rate, losses[step]) if losses[step] < best * (1 - 1e-4) else (rate / 2, best)
    assert whole == pytest.approx(expected) and min(whole.values()) < 0.006
    resumed = unfinished(tmp_path)
    train(tmp_path, **plateau, **RESUME)
    again = {line["step"]: line["learning_rate"] for line in metrics(resumed) if "learning_rate" in line}
    assert again == pytest.approx(expected)


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
def test_an_evaluation_does_not_change_the_steps_of_qlora(tmp_path):
    """On some CPUs bitsandbytes packs 4-bit weights when a model is evaluated, and they have no gradients then."""
    qlora = {**TWO_LAYERS, "method.type": "qlora", "train.max_steps": 2}
    for name, changes in {"alone": {}, "evaluated": {"eval.eval_strategy": "steps", "eval.eval_steps": 1}}.items():
        train(tmp_path / name, **qlora, **changes)
    assert losses(tmp_path / "evaluated" / "run") == losses(tmp_path / "alone" / "run")
