"""How processes share a model: each holds all of it (DDP), or a part (FSDP)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ligertune.activations import CONTEXT
from ligertune.budget import FRAGMENTS, Budget
from ligertune.errors import UserError
from ligertune.machine import Machine
from ligertune.memory import StateBytes
from ligertune.optimizer_states import OPTIMIZERS

Strategy = Literal["single", "ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"]
SHARING_WEIGHTS = ("fsdp", "deepspeed_zero3")
# Of a device, what states may take where nobody knows the activations: a model whose layers are not understood.
SHARE_OF_STATES = 0.6


@dataclass(frozen=True)
class Whole:
    """A step on a device that holds the whole model: what it takes, in bytes, and whether the device has that."""

    needed: int
    memory: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory

    def __str__(self) -> str:
        return f"{self.needed / 2**30:.1f} GiB of {self.memory / 2**30:.1f}"


def whole(states: StateBytes, budget: Budget | None, machine: Machine, *, micro: int, row_length: int) -> Whole:
    """Of `micro` rows a pass. Processes without a GPU share the host's memory."""
    memory = machine.memory_bytes if machine.device == "cuda" else machine.memory_bytes // machine.world_size
    if budget is None:
        return Whole(round(states.total / SHARE_OF_STATES), memory)
    peak = budget.peak(micro, row_length, accumulates=True, memory=memory)
    return Whole(round(peak.total * (1 + FRAGMENTS)) + CONTEXT, memory)


def check_offload(machine: Machine) -> None:
    """A UserError where `parallel.cpu_offload` would change nothing."""
    if machine.device == "cpu":
        raise UserError(
            "parallel.cpu_offload: this machine has no GPU, so all is in host memory already.",
            hint="Leave it out.",
        )
    if machine.world_size == 1:
        raise UserError(
            "parallel.cpu_offload: one process has nobody to share with, and offload is a part of fsdp.",
            hint="Run on several GPUs, or lower the memory with train.optim: paged_adamw_8bit or method.type: lora.",
        )


def check_takes_parts(strategy: Strategy, optim: str) -> None:
    """A UserError where the optimizer cannot step on a part of a parameter."""
    if strategy == "fsdp" and not OPTIMIZERS[optim].takes_parts:
        raise UserError(
            f"parallel.strategy: fsdp leaves processes parts of matrices, and train.optim: {optim} needs all of them.",
            hint="Write train.optim: adamw_bf16 or another one, or parallel.strategy: ddp.",
        )


def check_in_backward(world_size: int) -> None:
    """A UserError where `train.optim_in_backward` would step on one process's gradients, before the others' are in."""
    if world_size > 1:
        raise UserError(
            f"train.optim_in_backward steps before {world_size} processes have added up their gradients.",
            hint="Leave it out, or write parallel.num_processes: 1; parallel.strategy: fsdp saves more memory.",
        )


def check_zero(wanted: str, autocast: str) -> None:
    """A UserError where DeepSpeed would train in another way than the recipe says."""
    if wanted.startswith("deepspeed") and autocast == "fp16":
        raise UserError(
            f"parallel.strategy: {wanted} trains in bfloat16 or float32 here, and this run would be in float16.",
            hint="Write model.dtype: bfloat16 or float32, or parallel.strategy: ddp.",
        )


def choose_strategy(
    wanted: str, *, world_size: int, launched_with_fsdp: bool, method: str, alone: Whole
) -> tuple[Strategy, str]:
    """`parallel.strategy` for so many processes, and why, where it was chosen here."""
    if wanted == "single" and world_size > 1:
        raise UserError(
            f"parallel.strategy: single is one process, and the launcher started {world_size}.",
            hint="Write parallel.strategy: auto.",
        )
    if world_size == 1:
        return "single", ""
    if wanted != "auto":
        return wanted, ""
    if launched_with_fsdp:
        return "fsdp", "as the launcher says"
    if method == "qlora":
        return "ddp", "weights of four bits are not shared"
    if alone.fits:
        return "ddp", f"each device holds the whole model: {alone}"
    return "fsdp", f"a whole model would take {alone} on each device"
