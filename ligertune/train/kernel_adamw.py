"""torch's fused AdamW with its step in our kernel: one pass over weights, gradients and states, clipping included.

Small tensors stay with torch, which steps hundreds of them in one launch; ours takes one for each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from ligertune_kernels import adamw_step, runs_triton
from torch import Tensor
from torch.optim.adamw import adamw

from ligertune.plan import Plan

LARGE = 1 << 22  # elements: 20 us of an H100's bandwidth, which is what a launch costs the host


class KernelAdamW(torch.optim.AdamW):
    """The same states, state dict and numbers as torch.optim.AdamW(fused=True). `grad_scale` divides the gradients.

    large: elements from which on a tensor is stepped by our kernel.
    """

    def __init__(self, params: Any, *, large: int = LARGE, **options: Any) -> None:
        super().__init__(params, **options)
        self._large = large
        self._steps: dict[Tensor, int] = {}  # of each parameter, known to the host

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._steps.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        on_triton = all(runs_triton(p) for group in self.param_groups for p in group["params"])
        # a loss scaler may call the step off on the device, which torch's kernel knows how to do
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
            together = list(zip(trained, grads, means, squares, steps, strict=True))
            self._step_large([tensors for tensors in together if self._is_large(tensors[0])], group, scale)
            self._step_small([tensors for tensors in together if not self._is_large(tensors[0])], group, scale)
        return None

    def _is_large(self, param: Tensor) -> bool:
        return param.numel() >= self._large

    def _step_large(self, together: list[tuple[Tensor, ...]], group: dict[str, Any], scale: Tensor | None) -> None:
        if together:
            torch._foreach_add_([tensors[4] for tensors in together], 1)
        for tensors in together:
            adamw_step(
                *map(_own_part, tensors[:4]),
                step=self._count(tensors[0], tensors[4]),
                lr=group["lr"],
                betas=group["betas"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                grad_scale=scale,
            )

    def _step_small(self, together: list[tuple[Tensor, ...]], group: dict[str, Any], scale: Tensor | None) -> None:
        if not together:
            return
        params, grads, means, squares, steps = map(list, zip(*together, strict=True))
        adamw(
            params, grads, means, squares, [], steps, fused=True, amsgrad=False, maximize=False, grad_scale=scale,
            lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1], eps=group["eps"],
            weight_decay=group["weight_decay"],
        )  # fmt: skip

    def _count(self, param: Tensor, step: Tensor) -> int:
        """The number of this step of `param`. The device is asked once, after which both count."""
        known = self._steps.get(param)
        self._steps[param] = int(step) if known is None else known + 1
        return self._steps[param]


def steps_in_our_kernel(plan: Plan) -> bool:
    """Whether the recipe asks for it; "auto" does where each device has whole weights and torch's fused step."""
    wanted, optimizer = plan.recipe.kernels.optimizer, plan.optimizer
    if plan.recipe.kernels.enabled is False:
        return False
    if wanted != "auto":
        return wanted
    fused = optimizer.name == "adamw_torch_fused" and not (optimizer.in_backward or optimizer.offload)
    return fused and plan.strategy in ("single", "ddp") and plan.kernels_backend == "triton"


def _own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that FSDP2 shards."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def in_our_kernel(optimizer: torch.optim.Optimizer, *, large: int = LARGE) -> torch.optim.Optimizer:
    """`optimizer`, which has not stepped yet, with its step in our kernel."""
    known = inspect.signature(torch.optim.AdamW).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in known}
    return KernelAdamW(optimizer.param_groups, large=large, **options)
