"""An optimizer that lives in host memory: its states take none of the device's, and it steps on the processor.

Each parameter has a twin on the host, with which its optimizer works. A step copies all gradients over, and as each
arrives updates its twin, which is copied back while the next one is updated. In host memory stand the twins, their
gradients and the states: 8 bytes a parameter for AdamW with bfloat16 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ligertune.train.optim.combined import Combined


def twin_of(parameter: nn.Parameter) -> nn.Parameter:
    """A copy in host memory, pinned where the parameter is on a GPU, with room for its gradient."""
    twin = nn.Parameter(_host_like(parameter).copy_(parameter.detach()))
    twin.grad = _host_like(parameter).zero_()
    return twin


def _host_like(parameter: Tensor) -> Tensor:
    return torch.empty_like(parameter, device="cpu", requires_grad=False, pin_memory=parameter.is_cuda)


class OffloadedOptimizer(torch.optim.Optimizer):
    """`parts[i]` is an optimizer of the twin of `parameters[i]`. Its groups have the parameters, one each.

    The states that are saved are those of the twins; the rate is this one's, which the parts take over at each step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], parts: Sequence[torch.optim.Optimizer]) -> None:
        self._on_host = Combined(parts)
        groups = [{**group, "params": [p]} for p, group in zip(parameters, self._on_host.param_groups, strict=True)]
        super().__init__(groups, defaults={"lr": 0.0})

    def state_dict(self) -> dict[str, Any]:
        return self._on_host.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The weights are there already, from the same checkpoint; the twins take them."""
        self._on_host.load_state_dict(state_dict)
        with torch.no_grad():
            for parameter, twin in self._pairs():
                twin.copy_(parameter)

    def _pairs(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        groups = zip(self.param_groups, self._on_host.param_groups, strict=True)
        return [(mine["params"][0], its["params"][0]) for mine, its in groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        pairs = self._pairs()
        arrived = [_copy(p.grad, twin.grad) if p.grad is not None else None for p, twin in pairs]
        work = zip(pairs, arrived, self._on_host.parts, self.param_groups, strict=True)
        for (parameter, twin), wait, part, group in work:
            if wait is None:
                continue
            for its in part.param_groups:
                its["lr"] = group["lr"]
            wait()
            part.step()
            parameter.copy_(twin, non_blocking=True)


def _copy(source: Tensor, target: Tensor) -> Callable[[], None]:
    """Begins to copy to the host; what is given back waits until it is done."""
    target.copy_(source, non_blocking=True)
    if not source.is_cuda:
        return lambda: None
    done = torch.cuda.Event()
    done.record()
    return done.synchronize
