"""StalledProcesses finds processes that SIGSTOP has stopped for a number of seconds without interruption."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ligertune.launcher.processes import StalledProcesses

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' /proc")


@pytest.fixture
def pids():
    """Rank -> process id of a sleeping process."""
    processes = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)]
    yield {rank: process.pid for rank, process in enumerate(processes)}
    for process in processes:
        process.kill()
        process.wait()


def send(pid: int, number: int, state: str) -> None:
    os.kill(pid, number)
    deadline = time.monotonic() + 10
    while f") {state}" not in Path(f"/proc/{pid}/stat").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_only_processes_stopped_for_that_long_are_stalled(pids):
    now = [0.0]
    watch = StalledProcesses(5, clock=lambda: now[0])
    assert watch.stalled(pids) == []
    send(pids[1], signal.SIGSTOP, "T")
    for now[0], expected in ((1.0, []), (2.5, []), (4.0, []), (5.5, []), (6.0, [1])):
        assert watch.stalled(pids) == expected
    send(pids[1], signal.SIGCONT, "S")
    assert watch.stalled(pids) == []
    send(pids[1], signal.SIGSTOP, "T")
    for now[0], expected in ((7.0, []), (9.0, []), (11.0, []), (12.0, [1])):  # counted from the second stop
        assert watch.stalled(pids) == expected


def test_time_between_two_looks_counts_two_seconds_at_most(pids):
    """After a suspended job resumes, the launcher may run before its ranks do."""
    now = [0.0]
    watch = StalledProcesses(5, clock=lambda: now[0])
    send(pids[0], signal.SIGSTOP, "T")
    for now[0], expected in ((1.0, []), (7200.0, []), (7201.0, []), (7203.0, [0])):
        assert watch.stalled(pids) == expected


def test_an_ended_process_is_not_stalled():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert StalledProcesses(0).stalled({0: done.pid}) == []
