"""Meter: warm-up, pauses, laps, and runs that are shorter than the warm-up, on a simulated clock."""

from types import SimpleNamespace

import pytest
import torch

from ligertune.train import meter as meter_module
from ligertune.training.metrics.meter import Counts, Meter, resident_peak_bytes


@pytest.fixture
def clock(monkeypatch):
    """A simulated clock in seconds; `clock.now += 1` advances it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def step(meter: Meter, clock: SimpleNamespace, seconds: float, tokens: int) -> None:
    clock.now += seconds
    meter.add(Counts(steps=1, tokens=tokens, padded_tokens=2 * tokens, trained_tokens=tokens // 2, flops=3.0 * tokens))


def pause(meter: Meter, clock: SimpleNamespace, seconds: float) -> None:
    with meter.paused():
        clock.now += seconds


def test_warmup_and_pauses_are_excluded(clock):
    meter = Meter(torch.device("cpu"), warmup_steps=2)
    step(meter, clock, 5.0, 10)
    pause(meter, clock, 30.0)  # during the warm-up, so it does not shorten the time after it
    step(meter, clock, 5.0, 10)
    assert meter.total() == (Counts(2, 20, 40, 10, flops=60.0), 10.0, False)
    for seconds, tokens in ((1.0, 100), (2.0, 200)):
        step(meter, clock, seconds, tokens)
        pause(meter, clock, 7.0)
    assert meter.total() == (Counts(2, 300, 600, 150, flops=900.0), 3.0, True)
    assert meter.total()[0].padding_share == 0.5


def test_laps_are_consecutive_and_exclude_pauses(clock):
    meter = Meter(torch.device("cpu"), warmup_steps=2)
    found = []
    for seconds in (4.0, 1.0):
        step(meter, clock, seconds, 10)
        step(meter, clock, seconds, 20)
        pause(meter, clock, 9.0)
        lap = meter.lap()
        clock.now += 1.0  # belongs to the next lap
        found.append((lap.counts.steps, lap.counts.tokens, lap.seconds()))
    assert found == [(2, 30, 8.0), (2, 30, 3.0)]


def test_without_warmup_all_steps_are_measured(clock):
    meter = Meter(torch.device("cpu"), warmup_steps=0)
    step(meter, clock, 3.0, 10)
    assert meter.total() == (Counts(1, 10, 20, 5, flops=30.0), 3.0, True)


def test_resident_memory_is_in_bytes():
    assert 100 << 20 < resident_peak_bytes() < 100 << 30  # torch alone takes more than 100 MiB


def test_the_share_of_padding_is_that_of_the_slots_without_a_token():
    assert Counts(tokens=30, padded_tokens=40).padding_share == 0.25
    assert Counts(tokens=40, padded_tokens=40).padding_share == 0
