"""Loss parity of two runs: losses of every step, and the gradient norm of the first.

Losses alone would hide a wrong gradient for many steps, since AdamW's update does not depend on the gradient's scale.
The gradient norm shows it at once. Only its first value is compared: later ones belong to weights that rounding has
moved apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ligertune.compare.trial import Step


@dataclass(frozen=True)
class Tolerance:
    """Largest relative differences between two exact computations that differ by rounding only.

    The first loss is computed from equal weights; later ones from weights that rounding has moved apart. The norm of
    bfloat16 gradients is a bfloat16 number, whose neighbour is up to 0.8 % away. float8 has 3 bits of mantissa, and 2
    for gradients, so that its products differ by more than rounding of bfloat16.
    """

    first_loss: float
    loss: float
    first_grad_norm: float


TOLERANCES = {
    "float32": Tolerance(first_loss=1e-5, loss=1e-4, first_grad_norm=1e-3),
    "bfloat16": Tolerance(first_loss=5e-4, loss=5e-3, first_grad_norm=2e-2),
    "float16": Tolerance(first_loss=5e-4, loss=5e-3, first_grad_norm=2e-2),
    "float8": Tolerance(first_loss=1e-2, loss=2e-2, first_grad_norm=1e-1),
}


@dataclass(frozen=True)
class Parity:
    """Comparison of a run with the reference. All differences are relative to the reference."""

    same: bool
    worst: float  # the largest difference of losses
    worst_step: int
    first_grad_norm: float
    tolerance: Tolerance
    failed_step: int | None  # the first step beyond the tolerance
    failed_in: str | None  # the value that differs in that step

    @property
    def sentence(self) -> str:
        allowed = self.tolerance.first_loss if self.worst_step == 1 else self.tolerance.loss
        verdict = "the same" if self.same else f"DIFFERENT in {self.failed_in} at step {self.failed_step}"
        return (
            f"{verdict}: largest relative difference of losses {self.worst:.1e} at step {self.worst_step} "
            f"(allowed {allowed:g}), of the first gradient norm {self.first_grad_norm:.1e} "
            f"(allowed {self.tolerance.first_grad_norm:g})"
        )


def parity(steps: Sequence[Step], reference: Sequence[Step], dtype: str) -> Parity:
    """Compare the steps of a run with those of the reference. NaN, inf and another number of steps are differences.

    dtype: a key of TOLERANCES.
    """
    tolerance = TOLERANCES[dtype]
    losses = [_difference(a.loss, b.loss) for a, b in zip(steps, reference, strict=False)]
    norm = _difference(steps[0].grad_norm, reference[0].grad_norm) if losses else math.inf
    failures = [(1, "the gradient norm")] if norm > tolerance.first_grad_norm else []
    allowed = [tolerance.first_loss, *[tolerance.loss] * len(losses[1:])]
    beyond = (step for step, (found, most) in enumerate(zip(losses, allowed, strict=False), 1) if found > most)
    failures += [(step, "the loss") for step in beyond][:1]
    if len(steps) != len(reference) or not losses:
        failures.append((len(losses) + 1, "the number of steps"))
    worst = max(losses, default=math.inf)
    failed_step, failed_in = min(failures, default=(None, None))
    return Parity(
        same=not failures,
        worst=worst,
        worst_step=losses.index(worst) + 1 if losses else 1,
        first_grad_norm=norm,
        tolerance=tolerance,
        failed_step=failed_step,
        failed_in=failed_in,
    )


def _difference(a: float | None, b: float | None) -> float:
    """Return |a - b| / |b|; 0 if both are None (neither run clips gradients), inf if one is None, NaN or inf."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    found = abs(a - b) / max(abs(b), 1e-12)
    return found if math.isfinite(found) else math.inf
