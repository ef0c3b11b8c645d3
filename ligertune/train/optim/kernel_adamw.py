"""AdamW in our Triton kernel (`kernels.optimizer`): one pass over weights, gradients and states, clipping included."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from ligertune_kernels import adamw_step, runs_triton
from torch import Tensor

from ligertune.train.distributed import local_shard


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
            lists: list[list[Tensor]] = [[] for _ in range(5)]
            trained, grads, means, squares, steps = lists
            self._init_group(group, trained, grads, means, squares, [], steps)
            if not trained:
                continue
            torch._foreach_add_(steps, 1)
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            for *tensors, step in zip(*lists, strict=True):
                count = self._count(tensors[0], step)
                adamw_step(*map(local_shard, tensors), step=count, grad_scale=scale, **options)
        return None

    def _count(self, param: Tensor, step: Tensor) -> int:
        """Return the step count of `param`. Reading `step` synchronises, so it is read once and then counted here."""
        known = self._steps.get(param)
        self._steps[param] = int(step) if known is None else known + 1
        return self._steps[param]


def with_kernel_step(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a KernelAdamW with the groups and options of `optimizer`, an AdamW that has not stepped yet."""
    known = inspect.signature(torch.optim.AdamW).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return KernelAdamW(optimizer.param_groups, **options)
