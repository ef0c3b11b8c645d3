"""Forward and backward of one micro batch."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from ligertune.attention.sdpa import same_bits
from ligertune.planning.plan import Plan
from ligertune.train.cuda_graphs import GraphedSteps


class MicroStep:
    """Called with a batch: its share of the step's loss, whose gradients it adds to those of the model."""

    def __init__(self, plan: Plan, accelerator: Accelerator, model: nn.Module) -> None:
        self._accelerator, self._model = accelerator, model
        self._attention, self._steady = plan.attn_implementation, plan.build.execution.full_determinism
        self._steady_forward = self._steady and plan.build.execution.torch_compile
        graphed = plan.build.execution.cuda_graphs and accelerator.device.type == "cuda"
        self.graphs = GraphedSteps(self._launch, model.parameters(), accelerator.device) if graphed else None

    def __call__(self, batch: dict[str, Any]) -> Tensor:
        """The loss, without a history, to be used before the next call."""
        return (self.graphs or self._launch)(batch)

    def _launch(self, batch: dict[str, Any]) -> Tensor:
        with same_bits(self._steady_forward, self._attention):
            loss = self._model(**batch, use_cache=False).loss
        with same_bits(self._steady, self._attention):
            # DDP and FSDP average over ranks; the loss is a part of a sum
            self._accelerator.backward(loss * self._accelerator.num_processes)
        return loss.detach()
