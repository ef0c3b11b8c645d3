"""Failed ranks: the diagnosis names the cause, and processes that SIGSTOP has stopped are found."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ligertune.launcher.failures import RankError, RankExit, diagnose
from ligertune.launcher.processes import StalledProcesses, exit_code

NEWEST = Path("run/checkpoints/step-7")
CLOSED = RankError("RuntimeError: Connection closed by peer", "", 1, expected=False)
SLOW = RankError("RuntimeError: Timed out waiting 60000ms for recv", "", 1, expected=False)
NAN = RankError("The loss of step 3 is not a number.", "Look at the batch.", 1, expected=True)


def exits(*ends: tuple[int, float]) -> list[RankExit]:
    """Rank i ended with (exit code, time)."""
    return [RankExit(rank, 10 + rank, code, at) for rank, (code, at) in enumerate(ends)]


# name -> (ends of the ranks, their errors, the beginning of the message)
CAUSES = {
    "killed": (exits((1, 101), (-9, 100)), {0: CLOSED}, "Rank 1 (process 11) was killed by SIGKILL"),
    "hung, gloo": (exits((1, 100), (-9, 130)), {0: SLOW}, "Rank 1 (process 11) did not answer for 60 s"),
    "hung, NCCL": (exits((-6, 100), (-9, 130)), {}, "Rank 1 (process 11) did not answer for 60 s"),
    "UserError": (exits((-15, 100), (1, 100)), {1: NAN}, "The loss of step 3 is not a number."),
    "error": (exits((1, 100), (-9, 130)), {0: CLOSED}, "Rank 0 (process 10) failed (RuntimeError: Conn"),
    "UserError and its effect": (exits((1, 100), (1, 100)), {0: CLOSED, 1: NAN}, "The loss of step 3 is not a number."),
    "silent": (exits((-15, 100), (7, 100)), {}, "failed (exit code"),
    "crash": (exits((-11, 100), (-15, 101)), {}, "Rank 0 (process 10) was killed by SIGSEGV"),
}


@pytest.mark.parametrize("name", CAUSES)
def test_the_cause_is_named(name):
    ended, errors, expected = CAUSES[name]
    problem = diagnose(ended, errors, timeout=60, newest=NEWEST)
    assert problem.message.startswith(expected) or expected in problem.message
    assert problem.exit_code == 1
    assert (str(NEWEST) in str(problem)) == (problem.message != NAN.message)


def test_without_a_checkpoint_the_message_does_not_suggest_to_resume():
    problem = diagnose(exits((-9, 100)), {}, timeout=60, newest=None)
    assert "There is no checkpoint." in str(problem) and "--resume" not in str(problem)
    problem = diagnose(exits((-9, 100)), {}, timeout=60, newest=None, kept="Finished answers are kept.")
    assert str(problem).endswith("runs out of memory. Finished answers are kept.")


def test_a_stalled_rank_that_the_launcher_killed_is_named():
    """It ends first, by the signal that the system sends when memory runs out; the others fail after it."""
    problem = diagnose(exits((1, 100.5), (-9, 100)), {0: CLOSED}, timeout=60, newest=NEWEST, stalled={1})
    assert problem.message.startswith("Rank 1 (process 11) did not answer for 60 seconds and was ended.")
    assert str(NEWEST) in problem.message and problem.exit_code == 1


@pytest.mark.parametrize(
    ("codes", "received", "code"),
    [
        ((-9, 130), (), None),  # torch ended the remaining rank, which exits as after a signal
        ((-9, 130), (signal.SIGTERM,), 130),
        ((130, 130), (), 130),  # the ranks were signalled directly
        ((130,), (signal.SIGINT,), 130),
    ],
    ids=str,
)
def test_a_run_was_stopped_only_if_all_ranks_were(codes, received, code):
    assert exit_code(None, exits(*((each, 0.0) for each in codes)), list(received)) == code


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


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


@linux
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


@linux
def test_time_between_two_looks_counts_two_seconds_at_most(pids):
    """After a suspended job resumes, the launcher may run before its ranks do."""
    now = [0.0]
    watch = StalledProcesses(5, clock=lambda: now[0])
    send(pids[0], signal.SIGSTOP, "T")
    for now[0], expected in ((1.0, []), (7200.0, []), (7201.0, []), (7203.0, [0])):
        assert watch.stalled(pids) == expected


@linux
def test_an_ended_process_is_not_stalled():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert StalledProcesses(0).stalled({0: done.pid}) == []
