"""AdamW in our Triton kernel (`kernels.optimizer`): one pass over weights, gradients and states, clipping included."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from ligertune_kernels import adamw_step, runs_triton
from torch import Tensor


class KernelAdamW(torch.optim.AdamW):
    """torch.optim.AdamW(fused=True) with the same states, state dict and numbers; `grad_scale` divides gradients."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self._steps: dict[Tensor, int] = {}  # the step count of each parameter, on the host

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._steps.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        on_triton = all(runs_triton(p) for group in self.param_groups for p in group["params"])
        # A loss scaler may skip the step on the device (`found_inf`), which torch's kernel supports.
        if closure is not None or getattr(self, "found_inf", None) is not None or not on_triton:
            self._steps.clear()
            return super().step(closure)
        scale = getattr(self, "grad_scale", None)
        for group in self.param_groups:
            trained: list[Tensor] = []
            grads: list[Tensor] = []
            means: list[Tensor] = []
            squares: list[Tensor] = []
            steps: list[Tensor] = []
            self._init_group(group, trained, grads, means, squares, [], steps)
            if not trained:
                continue
            torch._foreach_add_(steps, 1)
            for tensors in zip(trained, grads, means, squares, steps, strict=True):
                adamw_step(
                    *map(_local_shard, tensors[:4]),
                    step=self._count(tensors[0], tensors[4]),
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    grad_scale=scale,
                )
        return None

    def _count(self, param: Tensor, step: Tensor) -> int:
        """Return the step count of `param`. Reading `step` synchronises, so it is read once and then counted here."""
        known = self._steps.get(param)
        self._steps[param] = int(step) if known is None else known + 1
        return self._steps[param]


def _local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that FSDP2 shards."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def with_kernel_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a KernelAdamW with the groups and options of `optimizer`, an AdamW that has not stepped yet."""
    known = inspect.signature(torch.optim.AdamW).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return KernelAdamW(optimizer.param_groups, **options)
