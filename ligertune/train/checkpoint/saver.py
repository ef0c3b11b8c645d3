"""Saving checkpoints: at once, or in a thread while training goes on (`checkpoint.async_save`).

The thread receives copies in host memory of everything that the next step changes. At most one save runs at a time. The
rename is its last action, so a kill leaves the checkpoint before it. An error of the thread ends the run at the next
step, with the message of a synchronous save. The files equal those of accelerate's `save_state` bit for bit.
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
from ligertune.train.checkpoint.checkpoint_files import begin, complete, explain_failed_save, save_checkpoint
from ligertune.train.checkpoint.trained_weights import FILE, all_train, trained

State = dict[str, Any]


class Saver:
    """Save checkpoints. All ranks call it. `model` and `optimizer` are those that accelerate prepared."""

    def __init__(self, accelerator: Accelerator, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._accelerator, self._plan = accelerator, plan
        self._model, self._optimizer = model, optimizer
        # Python waits for the pool's thread at exit, also after an error.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, step: int) -> None:
        """Write `step-N`, or start to write it."""
        if not self._plan.checkpoint.async_save:
            save_checkpoint(self._accelerator, self._plan, step)
            return
        self.finish()
        partial, accelerator = begin(self._accelerator, self._plan, step), self._accelerator
        with explain_failed_save(self._plan, step, partial):  # each rank's random states are small
            rank = accelerator.process_index
            save_accelerator_state(str(partial), [], [], [], [], rank, accelerator.step, accelerator.scaler)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            weights, states = self._copy_weights(), _copy_to_host(self._optimizer.state_dict())
            self._running = self._pool.submit(self._write_and_complete, step, partial, weights, states)

    def look(self) -> None:
        """Raise the error of a finished save, if it had one. Does not wait."""
        if self._running is not None and self._running.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the running save, and raise its error if it had one."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _copy_weights(self) -> State:
        """Return copies in host memory. Tied weights stay tied, since safetensors must store them once."""
        model = self._accelerator.unwrap_model(self._model)
        found = model.state_dict() if all_train(model) else trained(model)
        copies: dict[tuple, Tensor] = {}
        for name, tensor in found.items():
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
            copies[memory] = found[name] = copies[memory] if memory in copies else _copy_to_host(tensor)
        return found

    def _write_and_complete(self, step: int, partial: Path, weights: State, states: State) -> None:
        with explain_failed_save(self._plan, step, partial):
            self.write(partial, weights, states)
            complete(self._plan, step, partial)

    def write(self, partial: Path, weights: State, states: State) -> None:
        """Write the files as `save_state` does, and trainable weights alone as `save_only_what_trains` does."""
        if all_train(self._model):
            save(weights, partial / SAFE_WEIGHTS_NAME, safe_serialization=True)
        else:
            save_file({name: t.contiguous() for name, t in weights.items()}, partial / FILE)
        save(states, partial / f"{OPTIMIZER_NAME}.bin")


def _copy_to_host(value: Any) -> Any:
    """Copy all tensors in nested containers to host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_to_host(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_copy_to_host(inner) for inner in value)
    return value
