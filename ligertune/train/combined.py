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
    """One part for each parameter. `step` finds nothing to do: the backward did it, and freed the gradients."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        return None


def step_in_backward(parts: Sequence[torch.optim.Optimizer]) -> SteppedInBackward:
    """Let each of `parts`, which has one parameter, step when that parameter's gradient is complete."""
    combined = SteppedInBackward(parts)
    for part in parts:
        (parameter,) = (p for group in part.param_groups for p in group["params"])
        parameter.register_post_accumulate_grad_hook(_stepping(part))
    return combined


def _stepping(part: torch.optim.Optimizer) -> Callable[[nn.Parameter], None]:
    def step(parameter: nn.Parameter) -> None:
        part.step()
        parameter.grad = None

    return step
