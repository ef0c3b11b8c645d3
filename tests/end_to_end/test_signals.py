"""Signals during training, resuming after them, and --overwrite."""

import shlex
import signal
import sys
import time
from random import SystemRandom

import pytest
from support.command_line import RECIPE, Background, losses, overrides, start, wait_until, weights
from support.quickstart_runs import SHORT_ROWS

from ligertune.cli.render.run_report import resumed

SETTINGS = {"train.max_steps": 300, "logging.logging_steps": 1, "checkpoint.save_strategy": "no",
            "data.val_split": 0, **SHORT_ROWS, "checkpoint.output_dir": "run", "train.per_device_train_batch_size": 1,
            "train.gradient_accumulation_steps": 1}  # fmt: skip


def stop_with(number: int, folder, after: int = 3, **changes: object) -> int:
    """Send a signal after so many steps of a run. Returns its exit code."""
    process = Background("train", RECIPE, *overrides({**SETTINGS, **changes}), cwd=folder)
    metrics = folder / "run" / "metrics.jsonl"
    wait_until(process, lambda: metrics.exists() and metrics.read_text().count("\n") >= after)
    process.send_signal(number)
    return process.finish().code


def checkpoints(folder) -> list[str]:
    return [path.name for path in (folder / "run" / "checkpoints").glob("step-*")]


def test_without_save_on_signal_a_run_stops_at_once(tmp_path):
    assert stop_with(signal.SIGTERM, tmp_path, **{"checkpoint.save_on_signal": "false"}) == 130
    assert not checkpoints(tmp_path)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGHUP,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)),
    ],
)
def test_resume_after_a_signal_at_a_random_step_is_bit_equal(number, tmp_path, ligertune, recipe):
    """SIGINT is Ctrl-C, SIGUSR1 Slurm's, SIGHUP a closed terminal's. Folders of incomplete checkpoints are ignored."""
    steps, stop_after = 30, SystemRandom().randint(1, 10)
    settings = {**SETTINGS, "train.max_steps": steps}
    whole = ligertune("train", recipe, *overrides({**settings, "checkpoint.output_dir": "whole"}))
    assert whole.code == 0, whole.err
    assert stop_with(number, tmp_path, stop_after, **{"train.max_steps": steps}) == 130
    reached = len(losses(tmp_path / "run"))
    assert stop_after <= reached < steps and checkpoints(tmp_path) == [f"step-{reached}"]
    for incomplete in (".step-99.partial", "step-98"):
        (tmp_path / "run" / "checkpoints" / incomplete).mkdir()
    resumed = ligertune("train", recipe, *overrides(settings), "--resume")
    assert resumed.code == 0, resumed.err
    assert f"resumed at step {reached}" in resumed.out
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_overwrite_replaces_the_run_and_keeps_other_files(recipe, tmp_path, ligertune):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "stale.txt").write_text("from before")
    (run / "notes.txt").write_text("mine")
    done = ligertune("train", recipe, *overrides({**SETTINGS, "train.max_steps": 2}), "--overwrite")
    assert done.code == 0, done.err
    assert not (run / "model" / "stale.txt").exists()
    assert (run / "notes.txt").read_text() == "mine"


def test_resume_needs_a_checkpoint_and_resume_auto_does_not(recipe, tmp_path, ligertune):
    command = ("train", recipe, *overrides({**SETTINGS, "train.max_steps": 1}))
    refused = ligertune(*command, "--resume")
    assert refused.code == 2 and "run holds no complete checkpoint" in refused.err and "--resume auto" in refused.err
    assert not (tmp_path / "run").exists()
    started = ligertune(command[0], "--resume", "auto", *command[1:])
    assert started.code == 0, started.err
    assert len(losses(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    ("given", "again"),
    [
        ("medusa --heads 5 --set 'a=[b c]'", "medusa --heads 5 --set 'a=[b c]' --resume"),
        ("train r.yaml --overwrite", "train r.yaml --resume"),
        ("train r.yaml --resume=auto", "train r.yaml --resume=auto"),
    ],
)
def test_the_command_that_continues_a_run_repeats_its_arguments(given, again):
    assert shlex.join(resumed(shlex.split(given))) == again


# A training step is one long call of C: Python runs no handler before it ends.
LONG_CALL = """
import hashlib, os, signal, sys
from pathlib import Path
from ligertune.launcher.signals import StopRequest
with StopRequest(Path("run")) as stop:
    stop.hold()
    if os.fork() == 0:
        signal.raise_signal(signal.SIGINT)
        os._exit(0)
    os.wait()
    assert stop.received is None, "a child's signal stops its parent"
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**7)
"""


@pytest.mark.parametrize("step", [None, 50])
def test_ctrl_c_is_answered_within_a_step_and_a_second_one_leaves(step, tmp_path):
    if step is not None:
        (tmp_path / "run" / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "run" / "checkpoints" / f"step-{step}" / "progress.json").write_text("{}")
    process = start([sys.executable, "-c", LONG_CALL], cwd=tmp_path)
    assert process.stdout.readline() == "ready\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    answer = process.stderr.readline().strip()
    assert time.monotonic() - began < 2  # usually 0.001; the call takes six seconds
    kept = f"last checkpoint: step {step}" if step else "no checkpoint yet"
    assert answer == f"Stopping after this step and saving. Press Ctrl-C again to leave now; {kept}"
    process.send_signal(signal.SIGINT)
    kept = f"the last checkpoint is step {step}" if step else "there is no checkpoint"
    assert process.communicate()[1].strip() == f"Left without saving; {kept}."
    assert process.returncode == 130
