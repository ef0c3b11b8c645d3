"""Training from Python: reports, own losses, steps and loops, callbacks and metrics, on the quickstart's model."""

import json
import math
import signal
import threading

import numpy as np
import pandas
import pytest
import torch
from support.command_line import ROOT
from torch import nn
from transformers import TrainerCallback

import ligertune
from ligertune.cli.render.run_report import show_report
from ligertune.launcher.signals import StopRequest
from ligertune.trainer import Trainer, plan, train

QUICKSTART = ROOT / "configs" / "quickstart"
ROWS = [{"instruction": f"Say {i}.", "output": f"It is {i}."} for i in range(24)]


@pytest.fixture
def recipe(tmp_path):
    return {
        "model": {"model_name_or_path": str(QUICKSTART / "stories260K"), "dtype": "float32"},
        "data": {
            "datasets": [{"path": str(QUICKSTART / "dolly_short.jsonl"), "max_samples": 40}],
            "max_length": 512,
            "packing": False,
            "val_split": 0.2,
            "cache": False,
        },
        "train": {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3},
        "checkpoint": {"output_dir": str(tmp_path / "run"), "save_strategy": "no"},
        "eval": {"eval_on_start": False},
        "logging": {"logging_steps": 1},
    }


def losses_of(recipe, **options):
    lines = []
    report = train(recipe, show=lines.append, **options)
    return report, [line["loss"] for line in lines if "loss" in line]


def test_a_mapping_a_file_and_a_recipe_train_alike(recipe, tmp_path):
    report, losses = losses_of(recipe)
    assert report.status == "completed" and len(losses) == 3 and losses[-1] < losses[0]
    assert report.loss_last == losses[-1]
    assert repr(report).splitlines()[0] == "run completed: step 3 of 3"
    file = tmp_path / "recipe.yaml"
    file.write_text(ligertune.recipe.dump_recipe(ligertune.recipe.recipe_of(recipe)), encoding="utf-8")
    again = ["checkpoint.overwrite=true"]
    assert losses_of(file, overrides=again)[1] == losses
    assert losses_of(ligertune.load_recipe(file), overrides=again)[1] == losses
    planned = plan(file)  # although output_dir holds a run
    assert planned.schedule.total_steps == 3
    assert "3 steps of 2 rows" in repr(planned).splitlines()


def test_wrong_keys_are_one_error_with_the_sentences_of_the_command(recipe):
    recipe["train"]["learning_rat"] = 1
    del recipe["data"]["datasets"]
    with pytest.raises(ligertune.UserError) as caught:
        train(recipe)
    text = str(caught.value)
    assert "train.learning_rat is not a recipe key. Did you mean train.learning_rate?" in text
    assert "data.datasets is missing" in text


def test_a_loop_of_ones_own_gives_the_losses_of_train(recipe):
    _, expected = losses_of(recipe)
    trainer = Trainer(recipe, ["checkpoint.overwrite=true"])
    with trainer.open() as training:
        found = [training.run_step(step) for step in range(trainer.plan.schedule.total_steps)]
    assert [loss for loss, _ in found] == expected
    assert all(grad_norm > 0 for _, grad_norm in found)


def test_rows_are_trained_on_in_place_of_the_recipes_data(recipe):
    recipe["data"]["val_split"] = 0.0
    trainer = Trainer(recipe, data=ROWS)
    assert trainer.plan.data.examples == len(ROWS)
    report = trainer.train()
    assert math.isfinite(report.loss_last)
    with pytest.raises(ligertune.UserError, match="data: row 1 is str"):
        Trainer(recipe, data=["text"]).plan  # noqa: B018


def test_rows_take_the_place_of_data_sets_that_a_recipe_leaves_out(recipe):
    del recipe["data"]["datasets"], recipe["data"]["val_split"]
    trainer = Trainer(recipe, data={"train": ROWS, "eval": ROWS[:3]})
    assert (trainer.plan.data.examples, trainer.plan.data.eval_examples) == (len(ROWS), 3)
    assert math.isfinite(trainer.train().eval_loss)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"train": ROWS, "test": ROWS}, "data: the splits are train, test. Name them"),
        ([{"instruction": 3, "output": [None]}], r"^data: no row can be used: .*the first at data:1 "),
        ({"train": ROWS, "eval": [{"instruction": "a"}]}, r"^data\['eval'\]: its columns"),
    ],
)
def test_a_fault_of_rows_is_named_as_they_were_given(data, sentence, recipe):
    recipe["data"]["val_split"] = 0.0
    with pytest.raises(ligertune.UserError, match=sentence):
        Trainer(recipe, data=data).plan  # noqa: B018


def test_rows_replace_data_sets_under_other_names_and_keep_formats_of_each_split(recipe, tmp_path, monkeypatch):
    own = recipe["data"].pop("datasets")
    recipe["data"] |= {"dataset": own, "val_split": 0.0}
    questions = [{"q": row["instruction"], "output": row["output"]} for row in ROWS]
    assert Trainer(recipe, data=ROWS).plan.data.examples == len(ROWS)
    del recipe["data"]["dataset"]
    recipe["data"] |= {"datasets": [{"path": "d", "columns": {"instruction": "q"}}], "eval_datasets": [{"path": "e"}]}
    assert Trainer(recipe, data={"train": questions, "eval": ROWS[:2]}).plan.data.eval_examples == 2
    recipe["data"]["eval_datasets"] = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.chdir(tmp_path)  # messages name files below it by their relative path
    with pytest.raises(ligertune.UserError, match=r"^data has no column `q`"):
        Trainer(recipe, data=ROWS).plan  # noqa: B018
    recipe["data"]["streaming"] = True
    recipe["train"]["max_steps"] = 1
    with pytest.raises(ligertune.UserError, match="rows from Python are not streamed"):
        Trainer(recipe, data=ROWS)


def test_the_loss_can_be_replaced(recipe):
    _, expected = losses_of(recipe)
    recipe["train"]["max_steps"] = 1
    report, doubled = losses_of(
        recipe,
        overrides=["checkpoint.overwrite=true"],
        loss=lambda model, batch: 2 * model(**batch, use_cache=False).loss,
    )
    assert doubled == [pytest.approx(2 * expected[0], rel=1e-6)]
    assert report.losses["fused"] > 0


class Entropy(ligertune.Task):
    """Cross-entropy from logits; logs the entropy of the predictions."""

    def __init__(self, shape):
        super().__init__(shape, ligertune.Measures(("entropy",)))

    def loss(self, model, batch):
        logits, labels = self.predictions(model, batch)
        kept = labels[:, 1:] != -100
        log_probs = logits[:, :-1].log_softmax(-1)
        self.measures.add("entropy", -(log_probs.exp() * log_probs).sum(-1)[kept])
        total = nn.functional.nll_loss(log_probs[kept], labels[:, 1:][kept], reduction="sum")
        return total / batch["num_items_in_batch"]


def test_a_task_of_ones_own_gives_the_same_losses_and_its_measure(recipe):
    _, expected = losses_of(recipe)
    lines = []
    train(recipe, ["checkpoint.overwrite=true"], task=Entropy, show=lines.append)
    logged = [line for line in lines if "loss" in line]
    assert [line["loss"] for line in logged] == pytest.approx(expected, rel=1e-4)
    assert all(0 < line["entropy"] < math.log(512) for line in logged)  # the vocabulary has 512 tokens


def test_a_step_of_ones_own_replaces_the_update(recipe):
    calls = []

    def make_step(training):
        before = [p.detach().clone() for p in training.model.parameters()]

        def step(micro_batches, make_batch, loss_inputs, loss_sum):
            for rows in micro_batches:
                loss = training.task.loss(training.model, {**make_batch(rows), **loss_inputs})
                loss_sum += loss.detach()
            calls.append(all(torch.equal(p, b) for p, b in zip(training.model.parameters(), before, strict=True)))
            return None

        return step

    train(recipe, step=make_step)
    assert calls == [True, True, True]  # nothing was updated


class Recorder(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.events.append(("begin", state.global_step, state.max_steps))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.events.append(("step", state.global_step, round(state.epoch, 4)))
        control.should_evaluate = state.global_step == 1
        control.should_save = state.global_step == 1
        control.should_training_stop = state.global_step == 2
        return control

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        self.events.append(("evaluate", sorted(metrics)))

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        self.events.append(("end", len(state.log_history) > 2))


def test_callbacks_of_transformers_see_and_change_the_run(recipe, tmp_path):
    recorder = Recorder()
    report = train(recipe, callbacks=[recorder])
    names = [event[0] for event in recorder.events]
    assert names == ["begin", "step", "evaluate", "save", "step", "end"]
    assert recorder.events[0] == ("begin", 0, 3) and recorder.events[2] == ("evaluate", ["eval_loss"])
    assert recorder.events[1][2] == round(2 / 32, 4)  # 2 of the 32 examples that val_split leaves
    assert recorder.events[-1] == ("end", True)
    assert report.steps == 2 and "a callback stopped the run at step 2" in report.notes
    assert (tmp_path / "run" / "checkpoints" / "step-1" / "progress.json").is_file()


def test_an_object_without_an_event_is_no_callback(recipe):
    with pytest.raises(ligertune.UserError, match="callbacks: object has none of the methods"):
        Trainer(recipe, callbacks=[object()])


def accuracy(found):
    predicted, labels = found.predictions[:, :-1], found.label_ids[:, 1:]
    return {"token_accuracy": float((predicted == labels)[labels != -100].mean()), "rows": len(found.label_ids)}


def test_metrics_are_computed_from_all_predictions(recipe):
    recipe["data"]["padding_free"] = False
    recipe["eval"]["per_device_eval_batch_size"] = 3
    lines = []
    report = train(
        recipe,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        show=lines.append,
    )
    evaluated = next(line for line in lines if "eval_loss" in line)
    assert evaluated["eval_rows"] == 8  # a fifth of 40, in batches of 3, 3 and 2
    assert report.eval_measures["token_accuracy"] == evaluated["eval_token_accuracy"]
    model = ligertune.AutoModelForCausalLM.from_pretrained(report.model_path, dtype=torch.float32)
    right = total = 0
    for example in Trainer(recipe, ["checkpoint.overwrite=true"]).job.data.eval:
        ids = torch.from_numpy(np.asarray(example.input_ids, np.int64))[None]
        labels = torch.from_numpy(np.asarray(example.labels, np.int64))[1:]
        predicted = model(input_ids=ids).logits[0, :-1].argmax(-1)
        right += int((predicted == labels)[labels != -100].sum())
        total += int((labels != -100).sum())
    assert evaluated["eval_token_accuracy"] == pytest.approx(right / total)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"loss": "ce"}, TypeError, "Trainer: loss must be a function, and is 'ce'"),
        ({"show": True}, TypeError, "Trainer: show must be a function"),
        ({"callbacks": Recorder}, TypeError, "callbacks: give a list of objects"),
        ({"callbacks": [Recorder]}, TypeError, "Recorder is a class. Give an object"),
        ({"data": "rows.jsonl"}, TypeError, "data: give rows, .* and not str"),
        (
            {"data": [{"instruction": "a", "output": object()}]},
            ligertune.UserError,
            "data: row 1 .instruction, output.",
        ),
        ({"preprocess_logits_for_metrics": accuracy}, ligertune.UserError, "is read by compute_metrics only"),
        ({"overrides": "train.max_steps=2"}, TypeError, "overrides must be a list"),
        ({"loss": lambda model, batch: 1.0}, TypeError, "loss returned float. Return a tensor with one number"),
        ({"loss": lambda model, batch: torch.ones(())}, TypeError, "loss returned a tensor without gradient"),
        ({"task": lambda plan, model: {}}, TypeError, "task returned dict. Return an object of a subclass"),
        ({"task": {"a": 1}}, TypeError, "Trainer: task must be a function"),
        ({"step": lambda training: None}, TypeError, "step returned NoneType. Return the function of a step"),
        ({"step": lambda training: lambda *given: 0.5}, TypeError, "step returned float. Return the gradient norm"),
        ({"data": pandas.DataFrame(ROWS)}, TypeError, r"and not DataFrame. Give its rows: to_dict\("),
        ({"data": {"train": pandas.DataFrame(ROWS)}}, TypeError, "and not DataFrame"),
        ({"overrides": 5}, TypeError, "overrides must be a list .* and is 5"),
        ({"compute_metrics": lambda found: {"big": 10**400}}, ligertune.UserError, "big is a whole number above"),
        ({"compute_metrics": lambda found: 0.5}, TypeError, "compute_metrics returned float. Return a dict"),
        ({"compute_metrics": lambda found: {"loss": 1}}, ligertune.UserError, "loss is the name of a column"),
    ],
)
def test_a_wrong_argument_is_one_sentence(options, error, words, recipe):
    with pytest.raises(error, match=words):
        train(recipe, **options)


def test_a_loss_is_for_the_default_task_only_and_nothing_is_overwritten(recipe, tmp_path):
    train(recipe)
    kept = (tmp_path / "run" / "report.json").read_bytes()
    recipe["task"] = "dpo"
    recipe["checkpoint"]["overwrite"] = True
    with pytest.raises(ligertune.UserError, match="loss trains on the labels of task: sft, and task is dpo"):
        train(recipe, loss=lambda model, batch: model(**batch).loss)
    with pytest.raises(ligertune.UserError, match="dpo makes no predictions"):
        train(recipe, compute_metrics=accuracy)
    assert (tmp_path / "run" / "report.json").read_bytes() == kept


def test_measures_have_names_of_their_own():
    for names in (("loss",), ("a", "a")):
        with pytest.raises(ligertune.UserError, match=r"is a column of metrics.jsonl, or given twice"):
            ligertune.Measures(names)
    with pytest.raises(TypeError, match="give a tuple of names"):
        ligertune.Measures("entropy")


def test_an_error_at_the_end_of_training_does_not_cost_the_model(recipe, tmp_path):
    class Failing:
        def on_train_end(self, args, state, control, **kwargs):
            raise RuntimeError("no tracker")

    with pytest.raises(RuntimeError, match="no tracker"):
        train(recipe, callbacks=(callback for callback in [Failing()]))
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_metrics_that_are_not_finite_are_null_in_files(recipe, tmp_path, capsys):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    report = train(
        recipe,
        compute_metrics=lambda found: {"f1": math.nan, "ratio": -math.inf, "rows": len(found.label_ids)},
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    texts = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [json.loads(text, parse_constant=refuse) for text in texts]
    evaluated = next(line for line in lines if "eval_loss" in line)
    assert (evaluated["eval_f1"], evaluated["eval_ratio"], evaluated["eval_rows"]) == (None, None, 8)
    written = json.loads((tmp_path / "run" / "report.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert written["eval_measures"]["f1"] is None
    assert report.eval_measures == {"f1": None, "ratio": None, "rows": 8}
    show_report(report)
    shown = capsys.readouterr()
    assert "f1 not finite" in " ".join((shown.out + shown.err).split())  # to stderr after a command with --json


def test_a_recipe_that_contains_itself_is_one_sentence(recipe):
    recipe["data"]["datasets"].append(recipe)
    for call in (train, plan, Trainer):
        with pytest.raises(ligertune.UserError, match="recipe: a value contains itself"):
            call(recipe)


def test_a_whole_number_too_long_for_a_message_is_one_sentence(recipe):
    recipe["train"]["learning_rate"] = 10**5000
    with pytest.raises(ligertune.UserError, match=r"recipe: a whole number is above 1\.8e308"):
        Trainer(recipe)


def test_no_overrides_may_be_none(recipe, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(ligertune.recipe.dump_recipe(ligertune.recipe.recipe_of(recipe)), encoding="utf-8")
    for given in (recipe, file, ligertune.load_recipe(file, None)):
        assert Trainer(given, None).recipe.train.max_steps == 3


def test_paths_and_numbers_of_numpy_and_torch_are_values_of_a_recipe(recipe, tmp_path):
    recipe["checkpoint"]["output_dir"] = tmp_path / "run"
    recipe["train"]["max_steps"] = np.int64(1)
    recipe["train"]["learning_rate"] = nn.Parameter(torch.tensor(0.5))
    recipe["train"]["seed"] = torch.tensor(7)
    recipe["model"]["dtype"] = torch.float32
    trainer = Trainer(recipe, data=iter({"instruction": "a", "output": "b", "n": np.float32(1)} for _ in range(9)))
    assert trainer.plan.schedule.total_steps == 1
    assert (trainer.recipe.train.learning_rate, trainer.recipe.train.seed) == (0.5, 7)
    with pytest.raises(TypeError, match="recipe: a key must be a text, and is 1"):
        Trainer({1: 2})


@pytest.fixture
def ctrl_c():
    """Handle SIGINT as a Python prompt does: a process that was started in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_an_own_loop_is_a_keyboard_interrupt_and_releases_the_folder(recipe):
    with pytest.raises(KeyboardInterrupt), Trainer(recipe).open() as training:
        training.run_step(0)
        signal.raise_signal(signal.SIGINT)
    assert train(recipe, ["checkpoint.overwrite=true"]).status == "completed"


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_train_saves_and_raises(recipe, tmp_path):
    class Interrupting:
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 1:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="is saved in"):
        train(recipe, callbacks=[Interrupting()])
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_signals_are_left_alone_in_a_thread():
    """Python allows handlers in the main thread only. A whole run is not tried: later tests fork this process."""
    entered = []

    def enter() -> None:
        with StopRequest() as stop:
            stop.hold()
            entered.append(stop.received)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [None]


def test_a_task_without_predictions_refuses_metrics(recipe):
    recipe["task"] = "dpo"
    recipe["data"]["datasets"] = [{"path": str(QUICKSTART / "preferences.jsonl"), "max_samples": 20}]
    with pytest.raises(ligertune.UserError, match="compute_metrics: task: dpo makes no predictions"):
        train(recipe, compute_metrics=accuracy)
