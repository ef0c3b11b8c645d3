"""Whether two runs trained the same: losses and gradient norms, step by step.

The loss alone would let a wrong gradient pass for many steps, for AdamW's steps do not depend on its scale. The
gradient's norm tells at once, and is compared at the first step alone: later ones follow weights that rounding has
already moved apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ligertune.compare.trial import Step


@dataclass(frozen=True)
class Tolerance:
    """How far two exact computations may drift apart by rounding, relative to the reference.

    The first loss is of equal weights; the later ones follow weights that rounding has moved apart. A norm of bfloat16
    gradients is itself a bfloat16 number, so that its neighbour is up to 0.8 % away. float8 is no rounding of the same
    computation but a coarser one: 3 bits of mantissa, and 2 of gradients.
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
    """Whether two curves are one. `worst` is the largest relative difference of losses, at `worst_step`."""

    same: bool
    worst: float
    worst_step: int
    first_grad_norm: float  # relative difference
    tolerance: Tolerance
    failed_step: int | None  # the first step beyond the tolerance
    failed_in: str | None  # what differs there

    @property
    def sentence(self) -> str:
        """The verdict, for people."""
        shown = (
            f"largest relative difference of losses {self.worst:.1e} at step {self.worst_step} "
            f"(allowed {self.tolerance.first_loss if self.worst_step == 1 else self.tolerance.loss:g}), "
            f"of the first gradient norm {self.first_grad_norm:.1e} "
            f"(allowed {self.tolerance.first_grad_norm:g})"
        )
        return (
            f"the same: {shown}" if self.same else f"DIFFERENT in {self.failed_in} at step {self.failed_step}: {shown}"
        )


def parity(ours: Sequence[Step], theirs: Sequence[Step], dtype: str) -> Parity:
    """Compare `ours` with the reference `theirs`; a curve that is not finite or not as long differs."""
    tolerance = TOLERANCES[dtype]
    losses = [_difference(a.loss, b.loss) for a, b in zip(ours, theirs, strict=False)]
    norm = _difference(ours[0].grad_norm, theirs[0].grad_norm) if ours and theirs else math.inf
    failures = [(1, "the gradient norm")] if norm > tolerance.first_grad_norm else []
    allowed = [tolerance.first_loss, *[tolerance.loss] * len(losses[1:])]
    beyond = (step for step, (found, most) in enumerate(zip(losses, allowed, strict=False), 1) if found > most)
    failures += [(step, "the loss") for step in beyond][:1]
    if len(ours) != len(theirs) or not losses:
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
    """|a - b| / |b|; none where neither side clips, and infinite where a number is not one."""
    if a is None and b is None:
        return 0.0
    if a is None or b is None:
        return math.inf
    found = abs(a - b) / max(abs(b), 1e-12)
    return found if math.isfinite(found) else math.inf
