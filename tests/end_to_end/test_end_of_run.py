"""Before its first step and after its last one a run is as safe as between them: signals and kills in both places."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import environment, overrides
from test_keys import read

from ligertune.run import plan_for, run

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


def started(recipe: Path, folder: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "ligertune", "train", str(recipe), *overrides(SETTINGS), *more]
    return subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_until(process: subprocess.Popen, happened) -> None:
    while process.poll() is None and not happened():
        time.sleep(0.002)


def lines(run_folder: Path) -> list[str]:
    path = run_folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def is_whole(model: Path) -> bool:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(model)
    _, info = AutoModelForCausalLM.from_pretrained(model, output_loading_info=True)
    return not info["missing_keys"] and not info["unexpected_keys"]


@pytest.fixture(scope="module")
def undisturbed(quickstart, tmp_path_factory) -> bytes:
    """The weights that a run ends in when nobody disturbs it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    process = started(quickstart / "stories260k.yaml", folder)
    assert process.communicate()[1] is not None and process.returncode == 0
    return (folder / "run" / "model" / "model.safetensors").read_bytes()


def name_of(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(s, marks=pytest.mark.slow) for s in (signal.SIGUSR1, signal.SIGINT))],
    ids=name_of,
)
def test_before_the_first_step_a_signal_ends_it_promptly_and_nothing_is_half_written(number, recipe, tmp_path):
    process, folder = started(recipe, tmp_path), tmp_path / "run"
    wait_until(process, (folder / "plan.json").exists)  # the model is loaded after it
    process.send_signal(number)
    said = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert not lines(folder) and not list((folder / "checkpoints").iterdir())
    assert not list(folder.rglob("*.partial"))


def test_while_it_is_planned_a_signal_ends_it_like_control_c(recipe, tmp_path):
    process = started(recipe, tmp_path)
    time.sleep(1.5)  # torch and transformers are being imported
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=30)[1].decode()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["last step", "writing"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=name_of)
def test_after_the_last_step_nothing_is_lost(number, moment, recipe, tmp_path, undisturbed):
    """A signal: the model is finished. A kill: there is no model or a whole one, and --resume leaves it."""
    process, folder = started(recipe, tmp_path), tmp_path / "run"
    last = f'"step": {STEPS}, "eval_loss"'  # a signal during that evaluation saves instead, and leaves it to --resume
    written = [folder / ".model.partial", folder / "model"]
    reached = {
        "last step": lambda: any(last in line for line in lines(folder)),
        "writing": lambda: any(path.exists() for path in written),
    }
    wait_until(process, reached[moment])
    process.send_signal(number)
    said = process.communicate()[1].decode()
    assert process.returncode == (0 if number == signal.SIGTERM else -signal.SIGKILL), said
    assert not (folder / "model").exists() or is_whole(folder / "model")
    if not (folder / "report.json").exists():
        assert number == signal.SIGKILL
        again = started(recipe, tmp_path, "--resume")
        said = again.communicate()[1].decode()
        assert again.returncode == 0, said
    assert (folder / "model" / "model.safetensors").read_bytes() == undisturbed
    assert json.loads((folder / "report.json").read_text())["status"] == "completed"
    assert not list(folder.rglob("*.partial"))


def stop_at_the_last_line(line: dict) -> None:
    if line["step"] == 3 and "loss" in line:
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_after_the_last_step_lets_the_run_complete(quickstart, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    report = run(plan_for(read(quickstart, tmp_path, **{"data.val_split": 0})), stop_at_the_last_line)
    assert (report.status, report.stopped_by) == ("completed", None)
    assert is_whole(tmp_path / "run" / "model")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_before_the_last_evaluation_saves_and_resuming_writes_the_model(quickstart, tmp_path):
    report = run(plan_for(read(quickstart, tmp_path)), stop_at_the_last_line)
    assert (report.status, report.stopped_by, report.model_path) == ("interrupted", "SIGTERM", None)
    resumed = {"checkpoint.resume_from_checkpoint": "auto"}
    report = run(plan_for(read(quickstart, tmp_path, **resumed)), lambda line: None)
    assert (report.status, report.resumed_from, report.eval_loss is None) == ("completed", 3, False)
    assert is_whole(tmp_path / "run" / "model")


def test_resuming_writes_a_model_again_that_was_removed(quickstart, tmp_path):
    settings = {"checkpoint.save_strategy": "steps", "checkpoint.save_steps": 2}
    run(plan_for(read(quickstart, tmp_path, **settings)), lambda line: None)
    model = tmp_path / "run" / "model"
    before = (model / "model.safetensors").read_bytes()
    shutil.rmtree(model)
    resumed = {**settings, "checkpoint.resume_from_checkpoint": "auto"}
    report = run(plan_for(read(quickstart, tmp_path, **resumed)), lambda line: None)
    assert report.resumed_from == 2
    assert (model / "model.safetensors").read_bytes() == before
