"""Kills at random moments, each resumed: the model at the end is that of a run nobody disturbed.

CI does a few; LIGERTUNE_CHAOS_KILLS=30 does what the README claims, on whatever device is there.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import SystemRandom

import pytest
from command_line import environment, overrides

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("LIGERTUNE_CHAOS_KILLS", "3"))
SETTINGS = {
    "data.packing": False,  # short examples, two a step: the time goes into starting, saving and evaluating
    "data.datasets.0.max_samples": 80,
    "train.per_device_train_batch_size": 2,
    "train.gradient_accumulation_steps": 1,
    "train.max_steps": 40 if KILLS <= 3 else 12 * KILLS,
    "checkpoint.save_steps": 2,
    "logging.logging_steps": 1,
    "eval.eval_strategy": "steps",
    "eval.eval_steps": 7,
    "checkpoint.load_best_model_at_end": "true",
}
CHANCE = SystemRandom()


def command(recipe: Path, folder: str, async_save: str, *more: str) -> list[str]:
    own = {"checkpoint.output_dir": folder, "checkpoint.async_save": async_save}
    settings = overrides({**SETTINGS, **own})
    return [sys.executable, "-m", "ligertune", "train", str(recipe), *settings, *more]


def killed(arguments: list[str], cwd: Path, number: int, lines: int) -> tuple[int, str]:
    """Start, wait for some lines of metrics and a random moment, send the signal. (exit code, stderr)"""
    process = subprocess.Popen(
        arguments, cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    metrics = cwd / "cut" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= lines):
        time.sleep(0.01)
    time.sleep(CHANCE.uniform(0, 1.0))
    process.send_signal(number)
    return process.wait(), process.stderr.read()


def finished(folder: Path) -> bool:
    report = folder / "report.json"
    return report.exists() and json.loads(report.read_text())["status"] == "completed"


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_killed_at_random_moments_and_resumed_it_ends_in_the_same_model(async_save, recipe, tmp_path):
    whole = subprocess.run(
        command(recipe, "whole", "false"), cwd=tmp_path, env=environment(), capture_output=True, check=False
    )
    assert whole.returncode == 0, whole.stderr.decode()[-2000:]
    cut, done = tmp_path / "cut", 0
    for kill in range(KILLS):
        if finished(cut):
            break
        number = CHANCE.choice([signal.SIGKILL, signal.SIGTERM])
        more = ["--resume"] if cut.exists() else []
        target = (kill + 1) * SETTINGS["train.max_steps"] // (KILLS + 1)
        code, said = killed(command(recipe, "cut", async_save, *more), tmp_path, number, target)
        assert code in (0, 130, -signal.SIGKILL, -signal.SIGTERM), said[-2000:]
        assert "damaged" not in said
        done += 1
    assert done
    if not finished(cut):
        last = subprocess.run(
            command(recipe, "cut", async_save, "--resume"),
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            check=False,
        )
        assert last.returncode == 0, last.stderr.decode()[-2000:]
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("cut", "whole")]
    assert models[0] == models[1]
    logged = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("cut", "whole")]
    values = [[(x["step"], x.get("loss"), x.get("eval_loss")) for x in map(json.loads, lines)] for lines in logged]
    assert values[0] == values[1]
    assert not list((cut / "checkpoints").glob(".step-*"))
