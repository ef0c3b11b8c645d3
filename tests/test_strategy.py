"""How many processes train, and how they share the model."""

from __future__ import annotations

import pytest

from ligertune.errors import UserError
from ligertune.machine import choose_processes
from ligertune.plan_strategy import Whole, choose_strategy

FITS, TOO_LARGE = Whole(20 << 30, 80 << 30), Whole(130 << 30, 80 << 30)


@pytest.mark.parametrize(
    ("asked", "world", "with_fsdp", "method", "alone", "chosen"),
    [
        ("fsdp", 1, True, "full", TOO_LARGE, "single"),
        ("auto", 2, False, "full", FITS, "ddp"),
        ("auto", 2, False, "full", TOO_LARGE, "fsdp"),
        ("auto", 2, True, "full", FITS, "fsdp"),
        ("auto", 2, False, "qlora", TOO_LARGE, "ddp"),
        ("ddp", 2, True, "full", TOO_LARGE, "ddp"),
    ],
)
def test_auto_shares_what_does_not_fit(asked, world, with_fsdp, method, alone, chosen):
    found, why = choose_strategy(asked, world_size=world, launched_with_fsdp=with_fsdp, method=method, alone=alone)
    assert found == chosen
    assert bool(why) == (asked == "auto" and world > 1)


def test_one_process_is_not_asked_of_a_launcher_that_started_two():
    with pytest.raises(UserError, match="single is one process, and the launcher started 2"):
        choose_strategy("single", world_size=2, launched_with_fsdp=False, method="full", alone=FITS)


@pytest.fixture
def launched(monkeypatch):
    """launched(2): as a launcher of two processes would have set the environment."""
    for name in ("WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return lambda count: monkeypatch.setenv("WORLD_SIZE", str(count))


@pytest.mark.parametrize(
    ("wanted", "strategy", "by_launcher", "found"),
    [(3, "auto", None, 3), ("auto", "single", None, 1), ("auto", "auto", 2, 2), (2, "auto", 2, 2)],
)
def test_processes_are_the_launchers_or_the_recipes(wanted, strategy, by_launcher, found, launched):
    if by_launcher:
        launched(by_launcher)
    import torch

    if torch.cuda.is_available() and wanted == 3 and torch.cuda.device_count() < 3:
        pytest.skip("fewer than three GPUs")
    assert choose_processes(wanted, strategy) == found


def test_a_launcher_that_started_another_number_is_refused(launched):
    launched(4)
    with pytest.raises(UserError, match=r"num_processes: 2, but the launcher started 4"):
        choose_processes(2, "auto")
