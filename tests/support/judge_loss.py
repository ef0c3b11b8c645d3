"""Compare a loss that computes its gradient in the forward with float64.

This gradient is rounded in the forward, and again if the upstream gradient is not 1; torch rounds it once. The upstream
gradient is therefore 1 here. In float16 the division by the number of rows always follows the first rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from judge import Op, assert_close


def judge_loss(op: Op, reference: Op, inputs: Sequence[torch.Tensor]) -> None:
    """Assert that loss and gradients lose at most what the reference loses in the same dtype, and a rounding."""
    found = []
    for f, dtype in ((op, None), (reference, None), (reference, torch.float64)):
        leaves = [t.detach().to(dtype or t.dtype).requires_grad_() for t in inputs]
        loss = f(*leaves)
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    roundings = 2.0 if inputs[0].dtype is torch.float16 else 1.0
    for i, (ours, plain, truth) in enumerate(zip(*found, strict=True)):
        name = f"gradient {i - 1}" if i else "loss"
        assert_close(name, ours, plain, truth, inputs[0].dtype, slack=roundings)
