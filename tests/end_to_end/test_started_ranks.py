"""`ligertune train` that starts its own ranks: refusals, signals, and ranks that die or hang."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from support.command_line import Background, Done, losses, run, start, train_command, wait_until
from support.quickstart_runs import ONE_ROW

SETTINGS = {
    "parallel.num_processes": 2,
    "train.max_steps": 400,
    "logging.logging_steps": 1,
    "checkpoint.save_steps": 3,
    "checkpoint.save_model": "false",
    "checkpoint.output_dir": "run",
}


def ranks_of(process: subprocess.Popen) -> dict[int, int]:
    """Rank -> the id of its process."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
    found = {}
    for pid in map(int, children):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                found[int(variable[5:])] = pid
    return found


def disturb_run(
    folder: Path, disturb: Callable[[subprocess.Popen], None], *, after: str = "checkpoints/step-3", **changes: object
) -> Done:
    """Call `disturb` on a run of two ranks when the file `after` exists. Returns the finished run."""
    process = start(train_command(**{**SETTINGS, **ONE_ROW, **changes}), cwd=folder)
    wait_until(process, (folder / "run" / after).exists)
    if process.poll() is None:
        disturb(process)
    out, err = process.communicate()
    return Done(process.returncode, out, err)


def newest(folder: Path) -> str:
    """Return the newest checkpoint as error messages write it."""
    steps = [int(entry.name.removeprefix("step-")) for entry in (folder / "run" / "checkpoints").glob("step-*")]
    return f"run/checkpoints/step-{max(steps)}"


def test_bad_input_is_refused_once_before_anything_is_written(tmp_path):
    """The launcher is a fork of this process, and refuses before the ranks have imported much. Both may write."""
    command = train_command(**{**SETTINGS, "train.per_device_train_batch_size": 4, "train.global_batch_size": 12})
    done = Background(*command[3:], cwd=tmp_path).finish()
    assert done.code == 2
    assert done.out.count("Error:") == 1 and "4 x 2 = 8" in done.out
    assert not (tmp_path / "run").exists()


def assert_all_end(pids: Iterable[int]) -> None:
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [*(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
    ids=lambda number: number.name,
)
def test_ranks_that_wait_for_the_plan_end_with_their_parent(number, tmp_path):
    """Ranks start while the plan is made, and may not yet have requested the signal of their parent's death."""
    process = start(train_command(**SETTINGS), cwd=tmp_path)
    while len(ranks := ranks_of(process)) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == (-number if number == signal.SIGKILL else 130)
    # The handler ends the process; an exception would be lost in a destructor or in `try: import`.
    assert err.strip() == ("" if number == signal.SIGKILL else f"Stopped by {number.name}.")
    assert_all_end(ranks.values())
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ctrl_c_saves_and_says_so_once(tmp_path):
    done = disturb_run(tmp_path, lambda process: process.send_signal(signal.SIGINT))
    assert done.code == 130, done.err[-3000:]
    assert done.out.count("interrupted by SIGINT") == 1
    assert done.err.count("Stopping after this step and saving.") == 1
    assert newest(tmp_path) == f"run/checkpoints/step-{len(losses(tmp_path / 'run'))}"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    before = ["planning", "starting the processes", "loading the model", "preparing to train", "first step"]
    seconds = report["seconds_to_first_step"]
    assert list(seconds) == before
    assert seconds["starting the processes"] < seconds["planning"], "ranks must start while the plan is made"


@pytest.mark.slow
def test_an_error_on_every_rank_is_printed_once(tmp_path):
    first = {**SETTINGS, "train.max_steps": 4, "checkpoint.output_dir": tmp_path / "first"}
    assert run(train_command(**first), cwd=tmp_path).code == 0
    from_there = {"checkpoint.resume_from_checkpoint": tmp_path / "first" / "checkpoints" / "step-3"}
    other = {**SETTINGS, **from_there, "train.global_batch_size": 4, "train.max_steps": 6}
    done = run(train_command(**other), cwd=tmp_path)
    assert done.code == 2
    assert done.err.count("Error:") == 1 and "was trained with a global batch of 8" in done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "after", "words"),
    [
        (signal.SIGKILL, "checkpoints/step-3", "was killed by SIGKILL"),
        (signal.SIGSTOP, "checkpoints/step-3", "did not answer for 4 seconds"),
        (signal.SIGSTOP, "plan.json", "did not answer for 4 seconds"),  # before the first step
    ],
)
def test_a_rank_that_dies_or_hangs_ends_the_run_with_one_sentence(number, after, words, tmp_path):
    """The process groups themselves wait half an hour before the first step and while saving."""
    disturbed = []

    def disturb(process: subprocess.Popen) -> None:
        os.kill(ranks_of(process)[1], number)
        disturbed.append(time.monotonic())

    done = disturb_run(tmp_path, disturb, after=after, **{"parallel.timeout": 4})
    assert done.code == 1 and time.monotonic() - disturbed[0] < 60
    said = done.err.strip()
    assert len(said.splitlines()) == 1, said
    kept = "There is no checkpoint" if after == "plan.json" else newest(tmp_path)
    assert "Rank 1 (process " in said and words in said and kept in said


@pytest.mark.slow
def test_ranks_end_when_their_parent_is_killed(tmp_path):
    pids: list[int] = []

    def kill(process: subprocess.Popen) -> None:
        pids.extend(ranks_of(process).values())
        process.kill()

    assert disturb_run(tmp_path, kill).code == -signal.SIGKILL
    assert_all_end(pids)
