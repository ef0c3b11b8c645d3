"""A run that is killed at random moments and resumed ends with the model of an undisturbed run.

Three kills by default; LIGERTUNE_CHAOS_KILLS=30 reproduces the README's claim on the machine's device.
"""

import json
import os
import signal
import time
from pathlib import Path
from random import SystemRandom

import pytest
from command_line import metrics, run, start, train_command, wait_until, weights

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("LIGERTUNE_CHAOS_KILLS", "3"))
SETTINGS = {
    "data.packing": False,  # two short examples a step: starting, saving and evaluating take most of the time
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
CHANCE, SIGNALS = SystemRandom(), (signal.SIGKILL, signal.SIGTERM)


def command(folder: str, async_save: str, *more: str) -> list[str]:
    return train_command(*more, **{**SETTINGS, "checkpoint.output_dir": folder, "checkpoint.async_save": async_save})


def kill(arguments: list[str], cwd: Path, number: int, lines: int) -> tuple[int, str]:
    """Send a signal at a random moment after so many lines of metrics. Returns (exit code, stderr)."""
    process = start(arguments, cwd=cwd)
    path = cwd / "cut" / "metrics.jsonl"
    wait_until(process, lambda: path.exists() and path.read_text().count("\n") >= lines)
    time.sleep(CHANCE.uniform(0, 1.0))
    process.send_signal(number)
    err = process.communicate()[1]
    return process.returncode, err


def finished(folder: Path) -> bool:
    report = folder / "report.json"
    return report.exists() and json.loads(report.read_text())["status"] == "completed"


@pytest.mark.parametrize("async_save", ["false", "true"])
def test_a_run_killed_at_random_moments_and_resumed_ends_with_the_same_model(async_save, tmp_path):
    whole = run(command("whole", "false"), cwd=tmp_path)
    assert whole.code == 0, whole.err[-2000:]
    cut, kills = tmp_path / "cut", 0
    while kills < KILLS and not finished(cut):
        more = ["--resume", "auto"] if cut.exists() else []
        after = (kills + 1) * SETTINGS["train.max_steps"] // (KILLS + 1)
        code, said = kill(command("cut", async_save, *more), tmp_path, CHANCE.choice(SIGNALS), after)
        assert code in (0, 130, -signal.SIGKILL, -signal.SIGTERM), said[-2000:]
        assert "damaged" not in said
        kills += 1
    assert kills
    if not finished(cut):
        last = run(command("cut", async_save, "--resume", "auto"), cwd=tmp_path)
        assert last.code == 0, last.err[-2000:]
    assert weights(cut) == weights(tmp_path / "whole")
    logged = [[(x["step"], x.get("loss"), x.get("eval_loss")) for x in metrics(tmp_path / name)]
              for name in ("cut", "whole")]  # fmt: skip
    assert logged[0] == logged[1]
    assert not list((cut / "checkpoints").glob(".step-*"))
