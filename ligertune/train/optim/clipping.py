"""Gradient clipping without a pass of its own: the optimizer's fused kernel divides the gradients as it reads them.

Llama-3-8B cut to 8 layers has 5.6 GB of bfloat16 gradients: to read and write them once more takes 4.8 ms of each step
on an H100, clipped or not. The fused kernel only writes them, since the user of a GradScaler may look at them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ligertune.train.optim.gradient_check import unwrapped
from ligertune.train.optim.kernel_adamw import KernelAdamW
from ligertune.train.zero import grad_norm_of, is_zero


def clip_gradients(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], max_norm: float
) -> Tensor:
    """The norm of all gradients before clipping, float32; `optimizer`'s next step takes them scaled to `max_norm`.

    Where the optimizer cannot (it is not torch's fused AdamW, or its scale is the loss scaler's, or gradients are
    sharded) they are scaled here, as torch.nn.utils.clip_grad_norm_ does. There is a gradient: see `gradients`.
    """
    if is_zero(accelerator):
        return grad_norm_of(accelerator)
    trained = [p for p in parameters if p.grad is not None]
    inner = unwrapped(optimizer)
    if not _divides_as_it_reads(accelerator, inner, trained):
        return accelerator.clip_grad_norm_(trained, max_norm)
    # float32 norms: those of bfloat16 gradients would be rounded to three digits
    norms = torch._foreach_norm([p.grad for p in trained], 2.0, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    inner.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    return norm


def _divides_as_it_reads(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> bool:
    plain = type(optimizer) in (torch.optim.AdamW, KernelAdamW) and all(
        group["fused"] for group in optimizer.param_groups
    )
    return plain and accelerator.scaler is None and all(type(p.grad) is Tensor for p in parameters)
