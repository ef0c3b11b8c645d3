"""Optimizer offload: weights' copies, gradients and states in host memory, the step on the CPU.

A step copies all gradients to the host. As each arrives, its copy of the weight is updated and copied back while the
next one is updated. Host memory holds the copies, their gradients and the states: 8 bytes per parameter for AdamW with
bfloat16 weights. The device holds no states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligertune.train.optim.combined import CombinedOptimizer


def host_copy_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy in host memory with room for its gradient; pinned if the parameter is on a GPU."""
    copy = nn.Parameter(_empty_on_host(parameter).copy_(parameter.detach()))
    copy.grad = _empty_on_host(parameter).zero_()
    return copy


def _empty_on_host(parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.is_cuda)


class OffloadedOptimizer(torch.optim.Optimizer):
    """Step on host copies. `parts[i]` is an optimizer of the copy of `parameters[i]`; one group per parameter.

    The state dict is that of the copies' optimizers. The learning rate is set here and passed on in each step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: Sequence[torch.optim.Optimizer]) -> None:
        self._on_host = CombinedOptimizer(parts)
        groups = [{**group, "params": [p]} for p, group in zip(parameters, self._on_host.param_groups, strict=True)]
        super().__init__(groups, defaults={"lr": 0.0})

    def state_dict(self) -> dict[str, Any]:
        return self._on_host.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states, and copy the weights, which the same checkpoint has restored already, to the host."""
        self._on_host.load_state_dict(state_dict)
        with torch.no_grad():
            for parameter, copy in self._pairs():
                copy.copy_(parameter)

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        groups = zip(self.param_groups, self._on_host.param_groups, strict=True)
        return [(on_device["params"][0], on_host["params"][0]) for on_device, on_host in groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        pairs = self._pairs()
        waits = [_start_copy(p.grad, copy.grad) if p.grad is not None else None for p, copy in pairs]
        work = zip(pairs, waits, self._on_host.parts, self.param_groups, strict=True)
        for (parameter, copy), wait, part, group in work:
            if wait is None:
                continue
            for part_group in part.param_groups:
                part_group["lr"] = group["lr"]
            wait()
            part.step()
            parameter.copy_(copy, non_blocking=True)


def _start_copy(source: Tensor, target: Tensor) -> Callable[[], None]:
    """Start a copy to the host; return a function that waits for it."""
    target.copy_(source, non_blocking=True)
    if not source.is_cuda:
        return lambda: None
    done = torch.cuda.Event()
    done.record()
    return done.synchronize
