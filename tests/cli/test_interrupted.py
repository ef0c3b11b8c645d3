"""Ctrl-C and closed terminals: commands leave with one line and exit code 130, and leave no process behind."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command_line import ROOT, environment, overrides, run_here, start, train_command, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")]

MODEL = ROOT / "configs" / "quickstart" / "stories260K"
ONE = {"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": 1}


def processes_in(folder: Path) -> list[str]:
    """The command lines of all processes whose working directory is `folder`."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if (process / "cwd").readlink() == folder:
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:  # it has ended, or is a zombie
                continue
    return found


@pytest.mark.parametrize(
    ("command", "begun"),
    [
        (("generate", MODEL, "Once upon a time", "--raw", "--max-new-tokens", "400"), "Once"),
        (("bench",), "Milliseconds"),
        (("compare", "--steps", "500", *overrides(ONE), "--out", "out"), "kernels"),
        (("compare", "--steps", "500", "--processes", "2", *overrides(ONE), "--out", "out"), "kernels"),
    ],
    ids=["generate", "bench", "compare", "compare on two processes"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_command_leaves_with_one_line_and_no_process(number, command, begun, tmp_path):
    process = start([sys.executable, "-m", "ligertune", *map(str, command)], cwd=tmp_path)
    if command[0] == "compare":  # in the first trial
        wait_until(process, lambda: any((tmp_path / "out").rglob("metrics.jsonl")))
    else:
        process.stdout.read(1)
    process.send_signal(number)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert said.splitlines() == [f"Stopped by {signal.Signals(number).name}."], said
    assert "Traceback" not in out
    end = time.monotonic() + 10
    while (left := processes_in(tmp_path)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
    assert not list(tmp_path.rglob(".run.lock"))


def test_chat_leaves_at_its_prompt(tmp_path):
    command = [sys.executable, "-m", "ligertune", "chat", str(MODEL), "--raw"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), text=True, **pipes)
    process.stderr.readline()  # about the missing chat template
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (130, "Stopped by SIGINT.\n")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_closed_terminal_saves_the_run(processes, tmp_path):
    """The kernel sends SIGHUP, and each write to the terminal is an error from then on."""
    settings = {**ONE, "train.max_steps": 400, "parallel.num_processes": processes, "checkpoint.output_dir": "run"}
    settings |= {"logging.logging_steps": 1, "data.val_split": 0}
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, also in this process
        os.chdir(tmp_path)
        os.execve(sys.executable, train_command(**settings), environment())
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text().count("\n") > 3):
        os.read(terminal, 1 << 16)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    reached = len(metrics.read_text().splitlines()) - 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{reached}"]
    assert (tmp_path / "run" / "report.json").is_file() and not (tmp_path / "run" / ".run.lock").exists()
    done = run_here(*train_command(**{**settings, "train.max_steps": reached + 1})[3:], "--resume", cwd=tmp_path)
    assert done.code == 0, done.err


def test_nohup_outlives_the_terminal(tmp_path):
    settings = {**ONE, "train.max_steps": 30, "checkpoint.output_dir": "run", "logging.logging_steps": 1}
    process = start(["nohup", *train_command(**settings)], cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(process, metrics.exists)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 0
