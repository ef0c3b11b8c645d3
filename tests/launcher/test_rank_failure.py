"""What is said of ranks that failed, whichever of them ended first."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ligertune.launcher.failures import Ended, Word, verdict
from ligertune.launcher.processes import _code

NEWEST = Path("run/checkpoints/step-7")
CLOSED = Word("RuntimeError: Connection closed by peer", "", 1, expected=False)
SLOW = Word("RuntimeError: Timed out waiting 60000ms for recv", "", 1, expected=False)
NAN = Word("The loss of step 3 is not a number.", "Look at the batch.", 1, expected=True)


@pytest.mark.parametrize(
    ("ended", "words", "said"),
    [
        ([Ended(1, 11, -9, 100), Ended(0, 10, 1, 101)], {0: CLOSED}, "Rank 1 (process 11) was killed by SIGKILL"),
        ([Ended(0, 10, 1, 100), Ended(1, 11, -9, 130)], {0: SLOW}, "Rank 1 (process 11) did not answer for 60 s"),
        ([Ended(0, 10, -6, 100), Ended(1, 11, -9, 130)], {}, "Rank 1 (process 11) did not answer for 60 s"),
        ([Ended(0, 10, -15, 100), Ended(1, 11, 1, 100)], {1: NAN}, "The loss of step 3 is not a number."),
        ([Ended(0, 10, 1, 100), Ended(1, 11, -9, 130)], {0: CLOSED}, "Rank 0 (process 10) failed (RuntimeError: Conn"),
        ([Ended(0, 10, 1, 100), Ended(1, 11, 1, 100)], {0: CLOSED, 1: NAN}, "The loss of step 3 is not a number."),
        ([Ended(0, 10, -15, 100), Ended(1, 11, 7, 100)], {}, "failed (exit code"),
        ([Ended(0, 10, -11, 100), Ended(1, 11, -15, 101)], {}, "Rank 0 (process 10) was killed by SIGSEGV"),
    ],
    ids=["killed", "hung, gloo", "hung, NCCL", "told", "error", "told and its consequence", "silent", "crash"],
)
def test_the_cause_is_named(ended, words, said):
    problem = verdict(ended, words, timeout=60, newest=NEWEST)
    assert problem.message.startswith(said) or said in problem.message
    assert problem.exit_code == 1
    assert (str(NEWEST) in str(problem)) == (problem.message != NAN.message)


def test_without_a_checkpoint_nobody_is_told_to_resume():
    problem = verdict([Ended(0, 10, -9, 100)], {}, timeout=60, newest=None)
    assert "There is no checkpoint." in str(problem) and "--resume" not in str(problem)


def test_who_stood_still_and_was_ended_for_it_did_not_answer():
    """It ends first, by a signal that would else be the system's for want of memory; the others fail after it."""
    ended = [Ended(1, 11, -9, 100), Ended(0, 10, 1, 100.5)]
    problem = verdict(ended, {0: CLOSED}, timeout=60, newest=NEWEST, given_up={1})
    assert problem.message.startswith("Rank 1 (process 11) did not answer for 60 seconds, and was given up.")
    assert str(NEWEST) in problem.message and problem.exit_code == 1


@pytest.mark.parametrize(
    ("codes", "received", "code"),
    [
        ((-9, 130), (), None),  # torch ends the rank that is left, which leaves as for a signal
        ((-9, 130), (signal.SIGTERM,), 130),
        ((130, 130), (), 130),  # whoever stops the ranks themselves
        ((130,), (signal.SIGINT,), 130),
    ],
    ids=str,
)
def test_ranks_were_stopped_only_where_all_were_told_to(codes, received, code):
    failures = [Ended(rank, 100 + rank, each, 0.0) for rank, each in enumerate(codes)]
    assert _code(None, failures, list(received)) == code
