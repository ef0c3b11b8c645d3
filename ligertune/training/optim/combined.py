"""Several optimizers as one: one learning rate, one state dict, one step.

Three uses: an optimizer for matrices together with one for the other parameters; one optimizer per parameter, which
steps in the backward as soon as that parameter's gradient is complete; and one per parameter on copies in host memory.

torch's `_apply_optimizer_in_backward` (2.13) is private, has a state dict per parameter, and does not step a parameter
that replaces another, as FSDP2 does. torchao's `CPUOffloadOptimizer` (0.18) refuses to run without a GPU, so that no
test on a CPU could run it, and its `load_state_dict` leaves the host's weights as they were before a resume.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def keep_settings(group: dict[str, Any], given: dict[str, Any]) -> None:
    """Give a group that was loaded the settings of `given`: loading replaces them by those of the checkpoint."""
    group.update({name: value for name, value in given.items() if name not in ("params", "lr")})


class CombinedOptimizer(torch.optim.Optimizer):
    """Step all of `parts`. Groups and states are those of the parts, not copies: a rate set here is set there."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], defaults={"lr": 0.0})
        self.parts = parts
        self._share()

    def _share(self) -> None:
        """Use one state for this optimizer and all parts; each part has its own parameters in it."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            self.state.update(part.state)
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let each part load its own states, so that quantised states are not cast by another part."""
        saved = iter(state_dict["param_groups"])
        self.state = defaultdict(dict)  # states of parameters that the saved ones lack must not stay
        for part in self.parts:
            groups = [next(saved) for _ in part.param_groups]
            owned = {i for group in groups for i in group["params"]} & state_dict["state"].keys()
            states = {i: state_dict["state"][i] for i in owned}
            part.load_state_dict({"state": states, "param_groups": groups})
        self._share()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is called
        for part in self.parts:
            part.step()


class OptimizerInBackward(CombinedOptimizer):
    """One part per parameter, which steps when that parameter's gradient is complete, and frees the gradient.

    `updates` counts the parameters updated since the last `step`. `step` updates only parameters whose gradients were
    set by hand, as torch does to initialise the states that a sharded checkpoint is loaded into.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(parts)
        self.updates = 0
        self._hooks: list[RemovableHandle] = []
        self.attach()

    def attach(self) -> None:
        """Register hooks on the parameters that the parts have now: FSDP replaces those of the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for part in self.parts:
            (parameter,) = (p for group in part.param_groups for p in group["params"])
            self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._step_in_backward, part)))

    def _step_in_backward(self, part: torch.optim.Optimizer, parameter: nn.Parameter) -> None:
        part.step()
        parameter.grad = None
        self.updates += 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is called
        for part in self.parts:
            if any(p.grad is not None for group in part.param_groups for p in group["params"]):
                part.step()
        self.updates = 0


class OffloadedOptimizer(torch.optim.Optimizer):
    """Optimizer offload: weights' copies, gradients and states in host memory, the step on the CPU.

    A step copies all gradients to the host. As each arrives, its copy of the weight is updated and copied back while
    the next one is updated. Host memory holds the copies, their gradients and the states: 8 bytes per parameter for
    AdamW with bfloat16 weights. The device holds no states.

    `parts[i]` is an optimizer of the copy of `parameters[i]`; one group per parameter. The state dict is that of the
    copies' optimizers. The learning rate is set here and passed on in each step.
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
        for on_device, on_host in zip(self.param_groups, self._on_host.param_groups, strict=True):
            keep_settings(on_host, on_device)
        with torch.no_grad():
            for parameter, copy in self._pairs():
                copy.copy_(parameter)

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        groups = zip(self.param_groups, self._on_host.param_groups, strict=True)
        return [(on_device["params"][0], on_host["params"][0]) for on_device, on_host in groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is called
        pairs = self._pairs()
        waits = [_start_gradient_copy(p, copy) for p, copy in pairs]
        work = zip(pairs, waits, self._on_host.parts, self.param_groups, strict=True)
        for (parameter, copy), wait, part, group in work:
            if wait is None:
                continue
            for part_group in part.param_groups:
                part_group["lr"] = group["lr"]
            wait()
            part.step()
            # The next step writes `copy` after its `wait`, for a copy that follows this one in the stream.
            parameter.copy_(copy, non_blocking=True)


def _start_gradient_copy(parameter: nn.Parameter, copy: nn.Parameter) -> Callable[[], None] | None:
    """Start to copy a gradient to the host; return a function that waits for it, or None without a gradient."""
    if parameter.grad is None:
        return None
    assert copy.grad is not None  # `host_copy_of` makes it, and `zero_grad` drops gradients on the device only
    copy.grad.copy_(parameter.grad, non_blocking=True)
    if not parameter.grad.is_cuda:
        return lambda: None
    done = torch.cuda.Event()
    done.record()
    return done.synchronize


def host_copy_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy in host memory with room for its gradient; pinned if the parameter is on a GPU."""
    pins = parameter.is_cuda  # a copy between a GPU and pageable memory makes the host wait
    host = torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=pins)
    copy = nn.Parameter(host.copy_(parameter.detach()))
    copy.grad = torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=pins).zero_()
    return copy
