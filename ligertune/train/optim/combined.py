"""Several optimizers that look like one: one learning rate, one state to save, one step.

Two users: an optimizer of matrices beside one for the rest, and an optimizer for each parameter, which steps in the
backward as soon as that parameter's gradient is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


class Combined(torch.optim.Optimizer):
    """Its groups and states are those of `parts`, not copies: a rate set here is a rate set there."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], defaults={"lr": 0.0})
        self.parts = parts
        self._share()

    def _share(self) -> None:
        """Let the parts and this one know each other's states, which each part keeps for its own parameters."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]
        for part in self.parts:
            self.state.update(part.state)
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Each part loads what is its own, as it would alone: quantised states are not cast by others."""
        saved, self.state = iter(state_dict["param_groups"]), defaultdict(dict)
        for part in self.parts:
            groups = [next(saved) for _ in part.param_groups]
            owned = {i for group in groups for i in group["params"]} & state_dict["state"].keys()
            states = {i: state_dict["state"][i] for i in owned}
            part.load_state_dict({"state": states, "param_groups": groups})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for part in self.parts:
            part.step()


class SteppedInBackward(Combined):
    """One part for each parameter, which steps when that parameter's gradient is complete, and frees it.

    `step` finds nothing to do, except for who sets gradients by hand, as torch does to make the states that a sharded
    checkpoint is loaded into. `updates`: parameters that were updated since the last one.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(parts)
        self.updates, self._hooks = 0, []
        self.attach()

    def attach(self) -> None:
        """Wait for the gradients of the parameters that the parts hold now: FSDP puts its own in place of a model's."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for part in self.parts:
            (parameter,) = (p for group in part.param_groups for p in group["params"])
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._stepping(part)))

    def _stepping(self, part: torch.optim.Optimizer) -> Callable[[nn.Parameter], None]:
        def step(parameter: nn.Parameter) -> None:
            part.step()
            parameter.grad = None
            self.updates += 1

        return step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for part in self.parts:
            if any(p.grad is not None for group in part.param_groups for p in group["params"]):
                part.step()
        self.updates = 0
