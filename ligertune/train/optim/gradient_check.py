"""A step that changes nothing must not look like one that trains."""

from __future__ import annotations

import torch

from ligertune.errors import UserError
from ligertune.train.optim.combined import SteppedInBackward


def follow_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Called when accelerate has wrapped the model, and may have given the optimizer other parameters."""
    inner = unwrapped(optimizer)
    if isinstance(inner, SteppedInBackward):
        inner.attach()


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """A UserError where the backward gave none of the optimizer's parameters a gradient. The host alone is asked."""
    inner = unwrapped(optimizer)
    if isinstance(inner, SteppedInBackward):
        found = inner.updates > 0
    else:
        found = any(p.grad is not None for group in inner.param_groups for p in group["params"])
    if not found:
        raise UserError(
            "No gradient reached any of the parameters that train, so that this step would change nothing.",
            hint="The loss does not depend on what trains, or FSDP's hooks never ran.",
            exit_code=1,
        )


def unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What accelerate wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
