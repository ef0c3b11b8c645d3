"""How processes share a model: each holds all of it (DDP), or a part (FSDP); and what they then cannot do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.memory.activation_bytes import CONTEXT
from ligertune.planning.memory.estimate import FRAGMENTS, Budget
from ligertune.planning.memory.states import StateBytes
from ligertune.recipe import Recipe
from ligertune.recipe.optimizer_table import OPTIMIZERS

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


def check_copies(copies: int, world_size: int) -> None:
    """A UserError where `parallel.dp_replicate_size` leaves a copy of the model with nobody to share it."""
    if world_size % copies or world_size == copies:
        raise UserError(
            f"parallel.dp_replicate_size: {copies} copies need {2 * copies} processes, or more by {copies}, for each "
            f"is shared by two at least; this run has {world_size}.",
            hint="Write a number that divides the processes and is smaller, or leave it out.",
        )


def check_parts(ranks: int, world_size: int) -> None:
    """A UserError where `parallel.cp_size` does not divide the processes."""
    if world_size % ranks:
        raise UserError(
            f"parallel.cp_size: {ranks} processes are to share each row, and this run has {world_size}.",
            hint=f"Run on {ranks} processes, or more by {ranks}; or write a number that divides them.",
        )


def check_pictures(recipe: Recipe, accumulation: int) -> None:
    """A UserError where copies of a model that sees would add up gradients of unlike micro batches.

    Those of one without images have none of the tower, and torch adds what each micro batch has by its place.
    """
    if recipe.parallel.dp_replicate_size > 1 and accumulation > 1:
        raise UserError(
            "parallel.dp_replicate_size: copies of a model that sees do not accumulate gradients, and this run makes "
            f"a step of {accumulation} micro batches.",
            hint="Write train.gradient_accumulation_steps: 1, or leave parallel.dp_replicate_size out.",
        )


def shards_of(dp_replicate_size: int, strategy: Strategy, world_size: int) -> int:
    """Return into how many parts each copy of the model states is cut."""
    return 1 if strategy in ("single", "ddp") else world_size // dp_replicate_size


@dataclass(frozen=True)
class Refusal:
    """What a run that is shared so must not do. `applies` is told the recipe and the autocast."""

    strategies: tuple[Strategy, ...]
    applies: Callable[[Recipe, str], bool]
    says: str
    hint: str


ZERO = ("deepspeed_zero2", "deepspeed_zero3")
REFUSALS = (
    Refusal(
        ("ddp",),
        lambda recipe, autocast: recipe.train.optim_in_backward,
        "train.optim_in_backward: under ddp each rank would step with its own gradients, before they are averaged.",
        "Write parallel.strategy: fsdp, which also shards what the key is to save, or leave the key out.",
    ),
    Refusal(
        ("single", "fsdp"),
        lambda recipe, autocast: recipe.train.optim_in_backward and autocast == "fp16",
        "train.optim_in_backward: with model.dtype: float16 the gradients are scaled until the step.",
        "Write model.dtype: bfloat16 or float32, or leave the key out.",
    ),
    Refusal(
        ("fsdp",),
        lambda recipe, autocast: not OPTIMIZERS[recipe.train.optim].takes_parts,
        "train.optim: {recipe.train.optim} steps whole weights, and under fsdp each rank has a part of each.",
        "Write parallel.strategy: ddp, or another optimizer (train.optim: adamw_bf16 or adamw_torch_8bit).",
    ),
    Refusal(
        ("fsdp",),
        lambda recipe, autocast: recipe.train.optim_offload,
        "train.optim_offload: under fsdp each rank's share of the states is small already.",
        "Leave the key out, or write parallel.strategy: ddp.",
    ),
    Refusal(
        ("fsdp",),
        lambda recipe, autocast: recipe.checkpoint.async_save,
        "checkpoint.async_save: under fsdp all ranks write their shards of a checkpoint together, and wait for it.",
        "Leave the key out, or write parallel.strategy: ddp.",
    ),
    Refusal(
        ("fsdp",),
        lambda recipe, autocast: recipe.parallel.dp_replicate_size > 1 and autocast == "fp16",
        "parallel.dp_replicate_size: copies train in bfloat16 or float32 here, and this run would be in float16.",
        "Write model.dtype: bfloat16 or float32, or leave the key out.",
    ),
    Refusal(
        ZERO,
        lambda recipe, autocast: autocast == "fp16",
        "parallel.strategy: {recipe.parallel.strategy} trains in bfloat16 or float32 here, and this run would be in "
        "float16.",
        "Write model.dtype: bfloat16 or float32, or parallel.strategy: ddp.",
    ),
)


def check_strategy(recipe: Recipe, strategy: Strategy, *, autocast: str) -> None:
    """A UserError where ranks would step on gradients that are not final, or could not do what the recipe says.

    What contradicts `parallel.strategy` as it is written is complained of in the recipe, with its line (recipe/rules).
    """
    for refusal in REFUSALS:
        if strategy in refusal.strategies and refusal.applies(recipe, autocast):
            raise UserError(refusal.says.format(recipe=recipe), hint=refusal.hint)


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


def shared_by(
    recipe: Recipe,
    machine: Machine,
    unshared: StateBytes,
    budget_of: Callable[..., Budget | None],
    row_length: int,
    *,
    launched_with_fsdp: bool,
) -> tuple[Strategy, str]:
    """The strategy and its reason. unshared: what a device keeps that holds the whole model."""
    if recipe.parallel.cpu_offload:
        check_offload(machine)
        return "fsdp", "with parallel.cpu_offload"
    parts = recipe.parallel.cp_size
    if parts > 1:
        check_parts(parts, machine.world_size)
        return "fsdp", f"{parts} processes share each row"
    copies = recipe.parallel.dp_replicate_size
    if copies > 1:
        check_copies(copies, machine.world_size)
        return "fsdp", f"{copies} copies, each shared by {machine.world_size // copies} processes"
    micro = recipe.train.per_device_train_batch_size
    return choose_strategy(
        recipe.parallel.strategy,
        world_size=machine.world_size,
        launched_with_fsdp=launched_with_fsdp,
        method=recipe.method.type,
        alone=whole(
            unshared, budget_of(states=unshared), machine, micro=1 if micro == "auto" else micro, row_length=row_length
        ),
    )
