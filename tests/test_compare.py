"""Loss parity, and how trials become a comparison."""

from __future__ import annotations

import math

import pytest

from ligertune.compare import Trial, parity, summarise

CURVE = (4.0, 3.5, 3.0, 2.5)
REPORT = {"dtype": "float32", "device": "a CPU", "kernels": [{"kernel": "swiglu", "applied": 5}], "versions": {}}


def trial(side: str, losses: tuple[float, ...] = CURVE, rate: float = 100.0, failure: str | None = None) -> Trial:
    return Trial(side, losses, rate, {"resident_run": 1 << 20}, None if failure else REPORT, failure)


def test_a_kernel_scaled_by_a_hundredth_is_found_at_its_step():
    drifted = (4.0, 3.5, 3.0 * 1.01, 2.5)
    found = parity(drifted, CURVE, "float32")
    assert not found.same
    assert found.worst_step == 3
    assert found.worst == pytest.approx(0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_not_a_difference(dtype):
    assert parity(tuple(loss * (1 + 1e-6) for loss in CURVE), CURVE, dtype).same


@pytest.mark.parametrize("broken", [(*CURVE[:3], math.nan), CURVE[:3], ()], ids=["nan", "short", "empty"])
def test_a_curve_that_is_not_whole_differs(broken):
    assert not parity(broken, CURVE, "bfloat16").same


def test_speed_is_a_mean_with_its_standard_error():
    trials = [trial("with", rate=110), trial("without"), trial("without"), trial("with", rate=130)]
    result = summarise(trials, sides=("with", "without"), steps=4, repeats=2)
    assert result.good
    assert result.sides[0].tokens_per_second == 120
    assert result.sides[0].standard_error == pytest.approx(10)
    assert result.speed_ratio == pytest.approx(1.2)


def test_a_side_that_fails_is_shown_and_is_not_good():
    trials = [trial("with"), trial("without", (), 0, failure="out of memory")]
    result = summarise(trials, sides=("with", "without"), steps=4, repeats=1)
    assert not result.good
    assert result.parity is None
    assert result.sides[1].failure == "out of memory"
