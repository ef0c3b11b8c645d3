"""Signals that stop a run, and runs that are replaced."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from command_line import environment, overrides

SETTINGS = {"train.max_steps": 300, "logging.logging_steps": 1, "checkpoint.save_strategy": "no",
            "checkpoint.output_dir": "run"}  # fmt: skip


def stopped_by(number: int, recipe, folder, **changes) -> int:
    """Exit code of a run that gets the signal after its third step."""
    command = [sys.executable, "-m", "ligertune", "train", str(recipe), *overrides({**SETTINGS, **changes})]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    metrics = folder / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate()
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1], ids=["Ctrl-C", "what Slurm sends"])
def test_a_signal_saves_and_says_how_to_go_on(number, recipe, tmp_path):
    assert stopped_by(number, recipe, tmp_path) == 130
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) == 1


def test_without_save_on_signal_it_stops_at_once(recipe, tmp_path):
    code = stopped_by(signal.SIGTERM, recipe, tmp_path, **{"checkpoint.save_on_signal": "false"})
    assert code == 130
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_overwrite_replaces_the_run_and_nothing_else(recipe, tmp_path, ligertune):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "stale.txt").write_text("from before")
    (run / "notes.txt").write_text("mine")
    done = ligertune("train", recipe, *overrides({**SETTINGS, "train.max_steps": 2}), "--overwrite")
    assert done.code == 0, done.err
    assert not (run / "model" / "stale.txt").exists()
    assert (run / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(".step-3.partial", id="a save cut off"),
        pytest.param("step-9", id="no progress file", marks=pytest.mark.slow),
    ],
)
def test_an_incomplete_checkpoint_is_not_resumed_from(left, recipe, tmp_path, ligertune):
    assert stopped_by(signal.SIGTERM, recipe, tmp_path) == 130
    complete = next((tmp_path / "run" / "checkpoints").iterdir()).name
    (tmp_path / "run" / "checkpoints" / left).mkdir()
    steps = int(complete.removeprefix("step-")) + 2
    done = ligertune("train", recipe, *overrides({**SETTINGS, "train.max_steps": steps}), "--resume")
    assert done.code == 0, done.err
    assert f"resumed at {steps - 2}" in done.out
