"""Signals and kills before the first step and after the last one lose nothing."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.command_line import RECIPE, Background, overrides, start, train_command, wait_until, weights
from support.quickstart_runs import RESUME, plan_run, train

from ligertune.planning.preflight import check_output_dir
from ligertune.recipe.train_sections import CheckpointSpec
from ligertune.run import run

STEPS = 4
SETTINGS = {
    "data.packing": False,
    "data.datasets.0.max_samples": 40,
    "train.per_device_train_batch_size": 2,
    "train.gradient_accumulation_steps": 1,
    "train.max_steps": STEPS,
    "logging.logging_steps": 1,
    "checkpoint.save_steps": 3,
    "checkpoint.output_dir": "run",
}


def run_in_background(folder: Path) -> Background:
    return Background("train", RECIPE, *overrides(SETTINGS), cwd=folder)


def start_run(folder: Path, *more: str) -> subprocess.Popen:
    return start(train_command(*more, **SETTINGS), cwd=folder)


def lines(run_folder: Path) -> list[str]:
    path = run_folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def loads(model: Path) -> bool:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(model)
    _, info = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    return not info["missing_keys"] and not info["unexpected_keys"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> bytes:
    """The weights of a run without a signal."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = start_run(folder)
    process.communicate()
    assert process.returncode == 0
    return weights(folder / "run")


def name_of(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)),
    ],
    ids=name_of,
)
def test_a_signal_before_the_first_step_ends_the_run_and_leaves_no_partial_file(number, tmp_path):
    process, folder = run_in_background(tmp_path), tmp_path / "run"
    wait_until(process, (folder / "plan.json").exists)  # the model is loaded after it
    process.send_signal(number)
    done = process.finish()
    assert done.code == 130, done.out
    assert "Traceback" not in done.out
    assert not lines(folder) and not list((folder / "checkpoints").iterdir())
    assert not list(folder.rglob("*.partial")) and not (folder / ".run.lock").exists()
    check_output_dir(CheckpointSpec(output_dir=str(folder)))  # without a trained step it is no run


def test_a_signal_during_planning_ends_the_run_as_ctrl_c_does(tmp_path):
    process = start_run(tmp_path)
    time.sleep(1.5)  # torch and transformers are being imported
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["last step", "writing"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=name_of)
def test_after_the_last_step_nothing_is_lost(number, moment, tmp_path, undisturbed):
    """After a signal the model is finished. After a kill the model is absent or complete, and --resume writes it."""
    process, folder = start_run(tmp_path), tmp_path / "run"
    last = f'"step": {STEPS}, "eval_loss"'  # a signal during that evaluation saves, and --resume writes the model
    written = [folder / ".model.partial", folder / "model"]
    reached = {
        "last step": lambda: any(last in line for line in lines(folder)),
        "writing": lambda: any(path.exists() for path in written),
    }
    wait_until(process, reached[moment])
    process.send_signal(number)
    said = process.communicate()[1]
    assert process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL), said
    assert not (folder / "model").exists() or loads(folder / "model")
    if not (folder / "report.json").exists():
        assert number == signal.SIGKILL
        again = start_run(tmp_path, "--resume", "auto")
        said = again.communicate()[1]
        assert again.returncode == 0, said
    assert weights(folder) == undisturbed
    assert json.loads((folder / "report.json").read_text())["status"] == "completed"
    assert not list(folder.rglob("*.partial"))


def sigterm_at_the_last_loss(line: dict) -> None:
    if line["step"] == 3 and "loss" in line:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_after_the_last_step_lets_the_run_complete(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    report = run(plan_run(tmp_path, **{"data.val_split": 0}), sigterm_at_the_last_loss)
    assert (report.status, report.stopped_by) == ("completed", None)
    assert loads(tmp_path / "run" / "model")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_before_the_last_evaluation_saves_and_resuming_writes_the_model(tmp_path):
    report = run(plan_run(tmp_path), sigterm_at_the_last_loss)
    assert (report.status, report.stopped_by, report.model_path) == ("interrupted", "SIGTERM", None)
    report = train(tmp_path, **RESUME)
    assert (report.status, report.resumed_from, report.eval_loss is None) == ("completed", 3, False)
    before = weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    assert train(tmp_path, **RESUME).resumed_from == 3
    assert weights(tmp_path / "run") == before and loads(tmp_path / "run" / "model")
