"""The learning rate of each step."""

from __future__ import annotations

import pytest

from ligertune.planning.optimization import TrainSchedule
from ligertune.train.optim.lr_schedule import SHAPES, learning_rate


def schedule(kind: str, *, total: int = 100, warmup: int = 10) -> TrainSchedule:
    return TrainSchedule(total_steps=total, warmup_steps=warmup, learning_rate=1.0, type=kind, min_lr_ratio=0.1)


@pytest.mark.parametrize("kind", SHAPES)
def test_it_warms_up_linearly_and_the_first_rate_is_not_zero(kind):
    rates = [learning_rate(schedule(kind), step) for step in range(11)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0) == rates[10]
    assert rates == sorted(rates)


@pytest.mark.parametrize(
    ("kind", "middle", "end"),
    [
        ("cosine", 0.5, 0.0),
        ("linear", 0.5, 0.0),
        ("cosine_with_min_lr", 0.55, 0.1),
        ("constant_with_warmup", 1.0, 1.0),
    ],
)
def test_it_falls_by_its_schedule(kind, middle, end):
    assert learning_rate(schedule(kind), 55) == pytest.approx(middle)
    assert learning_rate(schedule(kind), 100) == pytest.approx(end, abs=1e-9)


def test_without_warmup_it_starts_at_the_peak():
    assert learning_rate(schedule("cosine", warmup=0), 0) == 1.0
