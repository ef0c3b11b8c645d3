"""scripts/bench async_save: steps before and during a save, and a run of two CPU processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import ROOT, environment
from support.script_modules import script_module

benchmark = script_module("benchmarks.runs.async_save")


def test_steps_are_those_before_the_save_and_those_that_end_while_it_writes():
    """The time for which the save stops training belongs to no step."""
    clock = benchmark.SaveClock(benchmark.WARMUP + benchmark.BEFORE, Path("checkpoints"))
    for _ in range(clock.save_after):
        clock.ends.append(len(clock.ends) * 1.0)
    clock.began = clock.ends[-1]
    clock.returned = clock.began + 5.0
    clock.ends += [clock.returned + 2.0, clock.returned + 4.0, clock.returned + 6.0]
    clock.complete = clock.returned + 4.5
    assert clock.steps() == ([1.0] * benchmark.BEFORE, [2.0, 2.0])


def test_the_plain_write_leaves_no_file(tmp_path):
    assert benchmark.plain_write(tmp_path, 100_000, files=2) > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_processes_save_while_they_train(tmp_path):
    command = [sys.executable, "scripts/bench", "async_save", "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (page,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"page": '))
    (row,) = page["rows"]
    assert row["size"] > 0 and 0 < row["stopped"] < row["save_seconds"] and row["steps_during"] > 0
