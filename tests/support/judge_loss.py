"""Judges a loss that computes its gradient together with itself, where nothing but roundings tells it from torch.

Such a gradient is rounded when the loss is computed, and again by an upstream gradient that is not 1: torch rounds it
once. So the upstream gradient is 1 here. In float16 the divisor of a mean always comes after the first rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from judge import Op, assert_close


def judge_loss(op: Op, reference: Op, inputs: Sequence[torch.Tensor]) -> None:
    """Loss and gradients, which may lose no more than the reference in the same dtype does, and their own rounding."""
    found = []
    for f, dtype in ((op, None), (reference, None), (reference, torch.float64)):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
        loss = f(*leaves)
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    roundings = 2.0 if inputs[0].dtype is torch.float16 else 1.0
    for i, (ours, plain, truth) in enumerate(zip(*found, strict=True)):
        name = f"gradient {i - 1}" if i else "loss"
        assert_close(name, ours, plain, truth, inputs[0].dtype, slack=roundings)
