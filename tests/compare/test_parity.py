"""Loss parity: losses of every step, and the gradient norm of the first."""

from __future__ import annotations

import math

import pytest

from ligertune.compare.summary import TOLERANCES, parity
from ligertune.compare.trial import Step

EXACT = [dtype for dtype in TOLERANCES if dtype != "float8"]  # these may differ by rounding only
CURVE = (4.0, 3.5, 3.0, 2.5)


def run(losses=CURVE, norm: float | None = 2.0) -> tuple[Step, ...]:
    return tuple(Step(i + 1, loss, norm, 100, 1.0) for i, loss in enumerate(losses))


@pytest.mark.parametrize("dtype", EXACT)
def test_a_loss_that_is_one_percent_off_is_found_at_its_step(dtype):
    found = parity(run((4.0, 3.5, 3.0 * 1.01, 2.5)), run(), dtype)
    assert (found.same, found.failed_step, found.worst_step) == (False, 3, 3)
    assert found.worst == pytest.approx(0.01)
    assert "DIFFERENT in the loss at step 3" in found.sentence
    wrong_gradient = parity(run(norm=2.06), run(), dtype)
    assert (wrong_gradient.failed_step, wrong_gradient.failed_in) == (1, "the gradient norm")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_rounding_is_allowed_and_the_first_loss_may_differ_by_less(dtype):
    assert parity(run(tuple(loss * (1 + 1e-6) for loss in CURVE), norm=2 * (1 + 1e-6)), run(), dtype).same
    drift = 1 + TOLERANCES[dtype].loss / 2
    assert parity(run((4.0, 3.5, 3.0, 2.5 * drift)), run(), dtype).same
    assert parity(run((4.0 * drift, 3.5, 3.0, 2.5)), run(), dtype).failed_step == 1


def test_runs_without_a_gradient_norm_are_compared_by_their_losses():
    assert parity(run(norm=None), run(norm=None), "float32").same
    assert not parity(run(norm=None), run(), "float32").same


@pytest.mark.parametrize("broken", [(*CURVE[:3], math.nan), CURVE[:3], ()], ids=["nan", "short", "empty"])
def test_nan_and_missing_steps_are_differences(broken):
    assert not parity(run(broken), run(), "bfloat16").same
