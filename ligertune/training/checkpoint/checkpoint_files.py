"""Checkpoint folders: written under another name, then renamed, so that each is complete or absent; with checksums.

`output_dir/checkpoints/step-N/` holds what accelerate's `save_state` writes (weights as safetensors, or shards under
FSDP; optimizer and random states), without frozen weights, and `progress.json` with a checksum of each file. DeepSpeed
alone saves frozen weights. Data order and learning rate follow from the step. A damaged checkpoint is not resumed from;
the one before it is (`choose_checkpoint`).

`torch.distributed.checkpoint` (torch 2.13) cannot replace this: it has no checksums, and loads a file with a flipped
bit without an error. A kill while it saves into a folder again leaves that folder unreadable, so one that is complete
or absent would need the same code around it. It is not faster: for 50 million parameters with AdamW's states on a disk,
both save in 0.8 s, it loads in 0.5 to 0.9 s and this in 0.3 to 0.5 s, and `async_save` blocks for 0.3 s instead of 0.2.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.checkpointing import save_accelerator_state
from accelerate.utils import OPTIMIZER_NAME, SAFE_WEIGHTS_NAME, DistributedType, recursively_apply, save
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed import ProcessGroup, new_group
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.serialization import get_crc32_options, set_crc32_options

from ligertune.errors import UserError, format_bytes, message_of
from ligertune.files.checked_files import DamagedFileError
from ligertune.files.storage import (
    complete_checkpoints,
    flush,
    newest_checkpoint,
    put_in_place,
    remove,
    remove_leftovers,
    write_bytes,
)
from ligertune.models.adapters.initial_lora import initial_factors
from ligertune.models.float8.float8_linear import scales_of
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.plan import Plan
from ligertune.training.checkpoint.checkpoint_record import CheckpointRecord, file_checksums
from ligertune.training.checkpoint.load_checkpoint import MODEL_SHARDS, OPTIMIZER_SHARDS
from ligertune.training.checkpoint.weight_files import (
    INITIAL_FILE,
    TRAINED_FILE,
    all_train,
    save_weights,
    trained,
    write_scales,
)
from ligertune.training.parallel.distributed import LONG_TIMEOUT, ZERO_STAGES, unfrozen_states


def save_checkpoint(accelerator: Accelerator, plan: Plan, step: int) -> None:
    """Write `step-N` and remove the oldest checkpoints beyond `save_total_limit`. All ranks call it, without FSDP."""
    partial = begin(accelerator, plan, step)
    with explain_failed_save(plan, step, partial), without_torch_checksums():
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()  # checksums are of what all ranks have written to the end
        if accelerator.is_main_process:
            complete(plan, step, partial)
    accelerator.wait_for_everyone()


def begin(accelerator: Accelerator, plan: Plan, step: int) -> Path:
    """Return an empty folder for all ranks to write into. All ranks call it."""
    partial = plan.output_dir / "checkpoints" / f".step-{step}.partial"
    with explain_failed_save(plan, step, partial):
        if accelerator.is_main_process:
            remove(partial)  # left by a kill during an earlier save
            partial.mkdir(parents=True)
    accelerator.wait_for_everyone()  # the others write into the folder that the main rank makes
    return partial


def complete(plan: Plan, step: int, partial: Path) -> None:
    """Write progress.json into a folder with all states, rename it, and remove the oldest. The main rank calls it."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        flushed = pool.submit(flush, partial)  # the disk writes while the checksums are computed
        checksums = file_checksums(partial)
        flushed.result()
    CheckpointRecord.of(plan, step, checksums).write(partial, plan)
    put_in_place(partial, partial.with_name(f"step-{step}"))
    limit = plan.checkpoint.save_total_limit
    # after the rename: a kill in between leaves one checkpoint more, never one less
    saved = complete_checkpoints(plan.output_dir)
    for old in saved[:-limit] if limit else ():
        remove(old)


@contextlib.contextmanager
def explain_failed_save(plan: Plan, step: int, partial: Path) -> Iterator[None]:
    """Remove `partial` after a failed write (full disk, quota, missing folder), and raise UserError instead."""
    try:
        yield
    # torch and safetensors wrap the system's error; the fourth is of a file that cannot be read back
    except (OSError, RuntimeError, SafetensorError, DamagedFileError, CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        newest = newest_checkpoint(plan.output_dir)
        left = f"The newest complete one is {newest}." if newest else "There is no earlier one."
        # of shards: the first rank's error
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = getattr(cause, "strerror", None) or message_of(cause)
        raise UserError(
            f"The checkpoint of step {step} could not be written to {plan.output_dir} ({reason}). {left}",
            hint="Free disk space or repair the folder, and continue with --resume.",
            exit_code=1,
        ) from error


@contextlib.contextmanager
def without_torch_checksums() -> Iterator[None]:
    """Turn torch's checksums off while files are written, because progress.json has checksums of these files.

    torch's took 40 % of the time of writing shards to memory, on a CPU.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class Saver:
    """Save checkpoints at once, or in a thread while training goes on (`checkpoint.async_save`). All ranks call it.

    The thread receives copies in host memory of everything that the next step changes. Under FSDP2 each rank has such a
    thread, for its shards; they agree through a process group of their own. At most one save runs at a time.
    The rename is its last action, so a kill leaves the checkpoint before it. An error of the thread ends the run at the
    next step, with the message of a synchronous save. The files equal those of a synchronous save bit for bit.

    `model` and `optimizer` are those that accelerate prepared.
    """

    def __init__(self, accelerator: Accelerator, plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._accelerator = accelerator
        self._plan = plan
        self._model = model
        self._optimizer = optimizer
        # Python waits for the pool's thread at exit, also after an error.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None
        self._threads_group: ProcessGroup | None = None

    def save(self, step: int) -> None:
        """Write `step-N`, or start to write it."""
        accelerator = self._accelerator
        shards = accelerator.distributed_type == DistributedType.FSDP
        if not (shards or self._plan.checkpoint.async_save):
            save_checkpoint(accelerator, self._plan, step)
            return
        self.finish()
        partial = begin(accelerator, self._plan, step)
        # each rank's random states are small
        with explain_failed_save(self._plan, step, partial), without_torch_checksums():
            rank = accelerator.process_index
            save_accelerator_state(str(partial), [], [], [], [], rank, accelerator.step, accelerator.scaler)
        accelerator.wait_for_everyone()
        if shards:
            self._save_shards(step, partial)
        elif accelerator.is_main_process:
            if (scales := scales_of(self._model)) is not None:  # small: written at once
                write_scales(scales, partial)
            weights = self._copy_weights()
            states = _copy_to_host(self._optimizer.state_dict())
            self._running = self._pool.submit(self.write_and_complete, step, partial, weights, states)

    def look(self) -> None:
        """Raise the error of a finished save, if it had one. Does not wait."""
        if self._running is not None and self._running.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the running save, and raise its error if it had one."""
        running = self._running
        self._running = None
        if running is not None:
            running.result()

    def _save_shards(self, step: int, partial: Path) -> None:
        """Write what trains, without the frozen weights, and the optimizer states; or start to write copies of them."""
        accelerator = self._accelerator
        shards: dict[str, dict[str, Any]] = {
            MODEL_SHARDS: {"model": unfrozen_states(self._model)},
            OPTIMIZER_SHARDS: {"optimizer": get_optimizer_state_dict(self._model, self._optimizer)},
        }
        if self._plan.checkpoint.async_save:
            self._threads_group = self._threads_group or new_group(backend="gloo", timeout=LONG_TIMEOUT)
            self._running = self._pool.submit(self.write_shards, step, partial, _copy_to_host(shards))
        else:
            self.write_shards(step, partial, shards)
            accelerator.wait_for_everyone()

    def _copy_weights(self) -> dict[str, Tensor]:
        """Return copies in host memory. Tied weights stay tied, since safetensors must store them once."""
        model = self._accelerator.unwrap_model(self._model)
        found = model.state_dict() if all_train(model) else trained(model) | initial_factors(model)
        copies: dict[tuple[Any, ...], Tensor] = {}
        for name, tensor in found.items():
            # the address alone would also unite a tensor with a view of its beginning
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
            copies[memory] = found[name] = copies[memory] if memory in copies else _copy_to_host(tensor)
        return found

    def write_and_complete(self, step: int, partial: Path, weights: dict[str, Tensor], states: dict[str, Any]) -> None:
        """Write the files as `save_state` does, and trainable weights alone as `save_only_what_trains` does."""
        with explain_failed_save(self._plan, step, partial), without_torch_checksums():
            if all_train(self._model):
                save(weights, partial / SAFE_WEIGHTS_NAME, safe_serialization=True)
            else:
                save_weights(weights, partial / TRAINED_FILE)
            save(states, partial / f"{OPTIMIZER_NAME}.bin")
            complete(self._plan, step, partial)

    def write_shards(self, step: int, partial: Path, shards: dict[str, dict[str, Any]]) -> None:
        """Write this rank's shards as `save_state` does. All ranks call it; the main rank completes the checkpoint."""
        is_main = self._accelerator.is_main_process
        with explain_failed_save(self._plan, step, partial), without_torch_checksums():
            initial = initial_factors(self._model)
            if is_main and initial:
                save_weights(initial, partial / INITIAL_FILE)
            for folder, states in shards.items():
                save_shards(
                    states, storage_writer=FileSystemWriter(partial / folder), process_group=self._threads_group
                )
            if is_main:
                complete(self._plan, step, partial)


def _copy_to_host(value: Any) -> Any:
    """Copy all tensors in nested containers to host memory."""
    return recursively_apply(lambda tensor: tensor.detach().to("cpu", copy=True), value)


def check_space(plan: Plan) -> None:
    """Raise UserError if output_dir cannot be written to, or lacks space for the checkpoints and the final model."""
    folder = plan.output_dir / "checkpoints"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for place in (folder, plan.output_dir):
            remove_leftovers(place)
        probe = folder / ".rehearsal"
        write_bytes(probe, b"x")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"checkpoint.output_dir: {plan.output_dir} cannot be written to ({error.strerror}).",
            hint="Name a folder that this user may write to.",
        ) from error
    saves = plan.checkpoint.save_strategy != "no"
    # One more than the limit: the oldest is removed after the newest is complete. Without a limit: for a signal.
    kept = plan.checkpoint.save_total_limit or plan.times(plan.save)
    copies = kept + 1 if saves else int(plan.checkpoint.save_on_signal)
    sharing = plan.shards if plan.shares_weights else 1
    weights = plan.bytes.model * sharing
    if plan.strategy in ZERO_STAGES:
        in_checkpoint = plan.bytes.weights * sharing
    else:
        # PiSSA and OLoRA keep the initial values of their adapters next to the trained ones
        starts_kept = plan.build.method.init_lora_weights.startswith(("pissa", "olora"))
        in_checkpoint = plan.bytes.trained * plan.shards * (1 + starts_kept)
    checkpoint = in_checkpoint + plan.bytes.saved_states * plan.shards
    saves_adapter = plan.bytes.saves_adapter and feature_of(plan.build.task).saves_adapter
    final = weights + (0 if plan.carried is None or saves_adapter else plan.carried.saved_bytes)
    needed = copies * checkpoint + final * plan.checkpoint.save_model
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"checkpoint.output_dir: {plan.output_dir} has {format_bytes(free)} free, and this run's saves need "
            f"{format_bytes(needed)} ({copies} x {format_bytes(checkpoint)}, and the model).",
            hint="Lower checkpoint.save_total_limit, or name a folder on a larger disk.",
        )
