"""Checkpoints of a run: written at once, or (checkpoint.async_save) by a thread while training goes on.

The thread gets copies in host memory of all that the next step changes; at most one is under way. The renaming stays
the last thing, so that a kill in the middle leaves the checkpoint before it. What a thread met ends the run at the next
step, in the words of a save that failed at once. The files are those of accelerate's `save_state`, bit for bit.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, save
from safetensors.torch import save_file
from torch import Tensor, nn

from ligertune.planning.plan import Plan
from ligertune.train.checkpoint import checkpoint_files as checkpoint
from ligertune.train.checkpoint.trained_weights import FILE, all_train, trained

State = dict[str, Any]


class Saver:
    """Called by all ranks. `model` and `optimizer` are what accelerate prepared."""

    def __init__(self, accelerator: Accelerator, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._accelerator, self._plan = accelerator, plan
        self._model, self._optimizer = model, optimizer
        # a run that ends by an error waits for it, as for every thread that Python knows
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None

    def save(self, step: int) -> None:
        """Write `step-N`, or begin to."""
        if not self._plan.checkpoint.async_save:
            checkpoint.save_checkpoint(self._accelerator, self._plan, step)
            return
        self.finish()
        aside, process = checkpoint.begin(self._accelerator, self._plan, step), self._accelerator
        with checkpoint.unwritten(self._plan, step, aside):  # what is small, and each rank's own
            save_accelerator_state(str(aside), [], [], [], [], process.process_index, process.step, process.scaler)
        process.wait_for_everyone()
        if process.is_main_process:
            weights, states = self._weights(), _on_host(self._optimizer.state_dict())
            self._under_way = self._pool.submit(self._complete, step, aside, weights, states)

    def look(self) -> None:
        """Raises what a thread met, if it is over."""
        if self._under_way is not None and self._under_way.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the one under way."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _weights(self) -> State:
        """On the host; tied ones are still tied."""
        model = self._accelerator.unwrap_model(self._model)
        found = model.state_dict() if all_train(model) else trained(model)
        copies: dict[tuple, Tensor] = {}
        for name, tensor in found.items():
            place = (tensor.data_ptr(), tensor.shape, tensor.stride())
            copies[place] = found[name] = copies[place] if place in copies else _on_host(tensor)
        return found

    def _complete(self, step: int, aside: Path, weights: State, states: State) -> None:
        """The thread's work."""
        with checkpoint.unwritten(self._plan, step, aside):
            self.write(aside, weights, states)
            checkpoint.complete(self._plan, step, aside)

    def write(self, aside: Path, weights: State, states: State) -> None:
        """As accelerate does, and for weights of which some train as `save_only_what_trains` does."""
        if all_train(self._model):
            save(weights, aside / SAFE_WEIGHTS_NAME, safe_serialization=True)
        else:
            save_file({name: t.contiguous() for name, t in weights.items()}, aside / FILE)
        save(states, aside / f"{OPTIMIZER_NAME}.bin")


def _on_host(value: Any) -> Any:
    """A copy in host memory of all tensors in nested containers."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _on_host(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_host(inner) for inner in value)
    return value
