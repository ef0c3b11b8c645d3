"""A process that SIGSTOP stopped is noticed after so many seconds, and only if it was stopped all the while."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ligertune.launcher.stalled import Standstill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' /proc")


@pytest.fixture
def pids():
    """Rank -> the id of a process that does nothing."""
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


def test_only_who_is_stopped_for_that_long_is_over(pids):
    now = [0.0]
    standstill = Standstill(5, clock=lambda: now[0])
    assert standstill.over(pids) == []
    send(pids[1], signal.SIGSTOP, "T")
    for now[0], over in ((1.0, []), (2.5, []), (4.0, []), (5.5, []), (6.0, [1])):
        assert standstill.over(pids) == over
    send(pids[1], signal.SIGCONT, "S")
    assert standstill.over(pids) == []
    send(pids[1], signal.SIGSTOP, "T")
    for now[0], over in ((7.0, []), (9.0, []), (11.0, []), (12.0, [1])):  # counted anew
        assert standstill.over(pids) == over


def test_hours_in_which_nobody_looked_do_not_count(pids):
    """A suspended job: its starter goes on first, and finds the ranks stopped as they were."""
    now = [0.0]
    standstill = Standstill(5, clock=lambda: now[0])
    send(pids[0], signal.SIGSTOP, "T")
    for now[0], over in ((1.0, []), (7200.0, []), (7201.0, []), (7203.0, [0])):
        assert standstill.over(pids) == over


def test_a_process_that_has_ended_is_not():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert Standstill(0).over({0: done.pid}) == []
