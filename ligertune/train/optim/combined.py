"""Several optimizers as one: one learning rate, one state dict, one step.

Two uses: an optimizer for matrices together with one for the other parameters; and one optimizer per parameter, which
steps in the backward as soon as that parameter's gradient is complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


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


class OptimizerInBackward(CombinedOptimizer):
    """One part per parameter, which steps when that parameter's gradient is complete, and frees the gradient.

    `updates` counts the parameters updated since the last `step`. `step` updates only parameters whose gradients were
    set by hand, as torch does to initialise the states that a sharded checkpoint is loaded into.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(parts)
        self.updates, self._hooks = 0, []
        self.attach()

    def attach(self) -> None:
        """Register hooks on the parameters that the parts have now: FSDP replaces those of the model."""
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
