"""Gradients between backward and optimizer step: clipping, and a check that there are any."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate

from ligertune.errors import UserError
from ligertune.training.optim.algorithms import KernelAdamW
from ligertune.training.optim.combined import OptimizerInBackward
from ligertune.training.parallel.distributed import local_shard, uses_deepspeed


def clip_gradients(
    accelerator: Accelerator, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], max_norm: float
) -> Tensor:
    """Return the norm () of all gradients before clipping, fp32; the next step uses them clipped to `max_norm`.

    Fused AdamW divides gradients by `grad_scale` as it reads them, so clipping costs no pass over memory. For
    Llama-3-8B cut to 8 layers (5.6 GB of bfloat16 gradients) such a pass takes 4.8 ms of each step on an H100. Other
    optimizers and runs with a loss scaler get scaled gradients. At least one parameter must have a gradient
    (`check_gradients`).
    """
    if uses_deepspeed(accelerator):  # its engine has clipped and stepped inside the backward
        return torch.as_tensor(float(accelerator.deepspeed_engine_wrapped.get_global_grad_norm() or 0.0))
    accelerator.unscale_gradients()
    gradients = [p.grad for p in parameters if p.grad is not None]
    inner = unwrap_optimizer(optimizer)
    norm = gradient_norm(gradients, accelerator.device)
    # 1e-6 as in torch's clip_grad_norm_, which multiplies by the inverse
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0)
    if _divides_while_reading(accelerator, inner, gradients):
        # torch's fused AdamW reads this attribute, which no type declares: GradScaler sets it in the same way.
        inner.grad_scale = _like_gradients(divisor, gradients[0])  # type: ignore[attr-defined]
    else:
        torch._foreach_div_([local_shard(gradient) for gradient in gradients], divisor.to(gradients[0].device))
    return norm


def gradient_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the L2 norm () of all gradients, fp32, on their device.

    device: where ranks exchange their sums of squares; shards of FSDP2 may be in host memory. Unless they are, the host
    does not wait for the device.

    Sums are in float64, so that the norm is the same however the gradients are sharded: rounded to the last bit, it
    would change the rounding of bfloat16 weights, and with them the losses of all later steps.
    """
    norms = _norms([local_shard(gradient) for gradient in gradients])
    # the process groups over which gradients are sharded -> norms of shards
    groups: dict[tuple[ProcessGroup, ...], list[Tensor]] = {}
    for gradient, norm in zip(gradients, norms, strict=True):
        groups.setdefault(_sharding_groups(gradient), []).append(norm)
    total = norms[0].new_zeros(())
    for sharded_over, of_group in groups.items():
        partial = torch.stack(of_group).square().sum().to(device)
        for group in sharded_over:
            torch.distributed.all_reduce(partial, group=group)
        total += partial.to(total.device)
    return total.sqrt().float()


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the L2 norm () of each tensor, in float64.

    Each call has tensors of one dtype: of a list of several dtypes torch copies every tensor to float64. Hybrid models
    have such lists, because their decays are float32. Without the copies a step of four layers of Kimi-Linear takes
    135 ms on an H200, and 169 with them.
    """
    norms: dict[int, Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        found = torch._foreach_norm([tensors[place] for place in places], 2.0, dtype=torch.float64)
        norms |= zip(places, found, strict=True)
    return [norms[place] for place in range(len(tensors))]


def _sharding_groups(gradient: Tensor) -> tuple[ProcessGroup, ...]:
    """Return the process groups over which the gradient is sharded; () for a gradient that each rank holds whole."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(gradient.device_mesh.get_group(dim) for dim, placement in enumerate(gradient.placements)
                 if placement.is_shard())  # fmt: skip


def _like_gradients(value: Tensor, gradient: Tensor) -> Tensor:
    """Return a number on the gradient's device, as a replicated DTensor if the gradient is a DTensor."""
    value = value.to(gradient.device)
    if not isinstance(gradient, DTensor):
        return value
    mesh = gradient.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _divides_while_reading(accelerator: Accelerator, optimizer: torch.optim.Optimizer, gradients: list[Tensor]) -> bool:
    """Return whether the optimizer is fused AdamW, whose `grad_scale` no loss scaler uses, on one kind of tensors."""
    fused = type(optimizer) in (torch.optim.AdamW, KernelAdamW) and all(
        group["fused"] for group in optimizer.param_groups
    )
    meshes = {getattr(gradient, "device_mesh", None) for gradient in gradients}  # None: plain tensors
    return fused and accelerator.scaler is None and len(meshes) == 1


def check_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError if no parameter of the optimizer has a gradient after the backward. No synchronisation."""
    inner = unwrap_optimizer(optimizer)
    if isinstance(inner, OptimizerInBackward):
        found = inner.updates > 0
    else:
        found = any(p.grad is not None for group in inner.param_groups for p in group["params"])
    if not found:
        raise UserError(
            "No gradient reached any of the parameters that train, so that this step would change nothing.",
            hint="The loss does not depend on what trains, or FSDP's hooks never ran.",
            exit_code=1,
        )


def attach_to_prepared(optimizer: torch.optim.Optimizer) -> None:
    """Register backward hooks on the parameters that accelerate has put in place of the model's own."""
    inner = unwrap_optimizer(optimizer)
    if isinstance(inner, OptimizerInBackward):
        inner.attach()


def unwrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that accelerate has wrapped."""
    return getattr(optimizer, "optimizer", optimizer)
