"""A signal to one of several ranks stops all of them, one step later."""

from accelerate import Accelerator
from support.forked_ranks import on_ranks

from ligertune.training.parallel.distributed import HostThrottle


def answers(rank: int) -> list[bool]:
    """Return the answers after four steps; rank 1 receives a signal in the second."""
    throttle = HostThrottle(Accelerator(cpu=True))
    return [throttle(rank == 1 and step == 1) for step in range(4)]


def test_all_ranks_stop_one_step_after_the_signal_to_one() -> None:
    assert on_ranks(2, answers) == [[False, False, True, False]] * 2
