"""Parallel strategy: each process holds the whole model (DDP) or a part of it (FSDP2, ZeRO), and what that excludes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.batch_layout import BatchShape
from ligertune.planning.memory.activation_bytes import CUDA_CONTEXT
from ligertune.planning.memory.estimate import FRAGMENTATION, MemoryEstimate
from ligertune.planning.memory.states import StateBytes, Strategy
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.recipe.schema import Recipe

# Largest share of a device for the model states if no activation memory is predicted.
SHARE_OF_STATES = 0.6
# Share of each device's memory that chosen settings leave free on several GPUs: predictions of sharded weights were up
# to 7 % off, NCCL's buffers are not counted, and a run of several processes does not begin again.
FREE_OF_SEVERAL = 0.07


@dataclass(frozen=True)
class DeviceNeed:
    """Bytes that a step of the whole model needs on a device, and the bytes that the device has."""

    needed: int
    memory: int

    @property
    def fits(self) -> bool:
        return self.needed <= self.memory

    def __str__(self) -> str:
        return f"{self.needed / 2**30:.1f} GiB of {self.memory / 2**30:.1f}"


def usable_memory(machine: Machine) -> int:
    """Return the bytes of a device that chosen settings may fill."""
    share = 1.0 if machine.world_size == 1 else 1 - FREE_OF_SEVERAL
    return int(share * machine.memory_bytes)


def unsharded_need(
    states: StateBytes, estimate: MemoryEstimate | None, machine: Machine, *, batch: BatchShape
) -> DeviceNeed:
    """Return what a device needs that holds the whole model, for this micro-batch."""
    # Processes without a GPU share the host's memory.
    memory = machine.memory_bytes if machine.device == "cuda" else machine.memory_bytes // machine.world_size
    if estimate is None:
        return DeviceNeed(round(states.total / SHARE_OF_STATES), memory)
    peak = estimate.peak(batch.rows, batch.row_length, accumulates=True, memory=memory, labels=batch.labels)
    return DeviceNeed(round(peak.total * (1 + FRAGMENTATION)) + CUDA_CONTEXT, memory)


def choose_strategy(
    recipe: Recipe, machine: Machine, *, why_fsdp: str, need: Callable[[int], DeviceNeed], is_stored: bool = False
) -> tuple[Strategy, str]:
    """Resolve `parallel.strategy`, by memory where `auto` has a choice. Return it with the reason.

    need(micro_batch_size): what a device needs that holds the whole model. The other arguments, and the errors, are
    those of `decided_strategy`.
    """
    decided = decided_strategy(recipe, machine, why_fsdp=why_fsdp, is_stored=is_stored)
    if decided is not None:
        return decided
    micro = recipe.train.per_device_train_batch_size
    alone = need(1 if micro == "auto" else micro)
    if alone.fits:
        return "ddp", f"each device holds the whole model: {alone}"
    return "fsdp", f"a whole model would need {alone} on each device"


def decided_strategy(
    recipe: Recipe, machine: Machine, *, why_fsdp: str, is_stored: bool = False
) -> tuple[Strategy, str] | None:
    """Return the strategy that recipe, launcher or base decide; None where `auto` has a choice.

    The reason is empty if the recipe or one process decides. why_fsdp: why a launcher decided for FSDP; empty if it
    did not. is_stored: the frozen weights stay in few bits. Raises UserError if the number of
    processes does not suit the recipe.
    """
    section = recipe.parallel
    world_size = machine.world_size
    if section.cpu_offload:
        check_cpu_offload(machine)
        return "fsdp", "with parallel.cpu_offload"
    if section.cp_size > 1:
        check_cp_size(section.cp_size, world_size)
        return "fsdp", f"{section.cp_size} processes share each row"
    if section.dp_replicate_size > 1:
        copies = section.dp_replicate_size
        check_replicas(copies, world_size)
        return "fsdp", f"{copies} copies, each sharded over {world_size // copies} processes"
    if section.strategy == "single" and world_size > 1:
        raise UserError(
            f"parallel.strategy: single is one process, and the launcher started {world_size}.",
            hint="Write parallel.strategy: auto.",
        )
    if world_size == 1:
        return "single", ""
    if section.strategy != "auto":
        return section.strategy, ""
    if why_fsdp:
        return "fsdp", why_fsdp
    if recipe.method.stored_as is not None:
        four = recipe.method.type == "qlora"
        return "ddp", "4-bit weights are sharded on request only" if four else "8-bit weights cannot be sharded"
    if is_stored:
        return "ddp", "weights in few bits are not sharded"
    return None


def check_cpu_offload(machine: Machine) -> None:
    """Raise UserError if `parallel.cpu_offload` would change nothing."""
    if machine.device == "cpu":
        raise UserError(
            "parallel.cpu_offload: this machine has no GPU, so everything is in host memory already.",
            hint="Leave it out.",
        )
    if machine.world_size == 1:
        raise UserError(
            "parallel.cpu_offload is a part of fsdp, and fsdp needs more than one process.",
            hint="Run on several GPUs, or lower the memory with train.optim: paged_adamw_8bit or method.type: lora.",
        )


def check_replicas(copies: int, world_size: int) -> None:
    """Raise UserError if `parallel.dp_replicate_size` leaves fewer than two processes for each copy of the model."""
    if world_size % copies or world_size == copies:
        raise UserError(
            f"parallel.dp_replicate_size: {copies} copies need a multiple of {copies} processes, and at least "
            f"{2 * copies}, because each copy is sharded over two or more; this run has {world_size}.",
            hint="Write a smaller number that divides the processes, or leave it out.",
        )


def check_four_bit_experts(recipe: Recipe, strategy: Strategy, *, experts: bool) -> None:
    """Raise UserError if FSDP would shard the 4-bit weights of experts, which have no dtype that it shards."""
    if experts and strategy == "fsdp" and recipe.method.type == "qlora":
        raise UserError(
            "method.type: qlora: the 4-bit weights of a mixture's experts cannot be sharded, and parallel.strategy is"
            " fsdp.",
            hint="Write parallel.strategy: ddp, or method.type: lora.",
        )


def check_stored_base(recipe: Recipe, strategy: Strategy, *, is_stored: bool) -> None:
    """Raise UserError for what a base whose weights stay in 4 bits, MXFP4 or block float8 does not work with.

    is_stored: whether the base does.
    """
    if not is_stored:
        return
    base = "the base's weights stay in few bits (4 bits, MXFP4 or float8)"
    instead = "or give a copy of the base in bfloat16"
    if strategy not in ("single", "ddp"):
        raise UserError(
            f"parallel.strategy: {strategy} shards weights, and {base}, which are not sharded.",
            hint=f"Write parallel.strategy: ddp, {instead}.",
        )
    if recipe.train.fp8:
        raise UserError(f"train.fp8: {base}, and float8 products read others.", hint=f"Leave it out, {instead}.")
    start = recipe.method.init_lora_weights
    if isinstance(start, str) and start not in ("default", "gaussian", "orthogonal"):
        raise UserError(
            f"method.init_lora_weights: {start} changes the weights of the base, and {base}.",
            hint=f"Leave it out, {instead}.",
        )


def quant_storage_notes(recipe: Recipe, strategy: Strategy) -> tuple[str, ...]:
    """Return a note on a dtype of 4-bit weights' bytes that no sharding needs."""
    storage = recipe.method.bnb_4bit_quant_storage
    if storage == "uint8" or strategy == "fsdp":
        return ()
    return (f"method.bnb_4bit_quant_storage: {storage} has no effect without parallel.strategy: fsdp",)


def check_cp_size(ranks: int, world_size: int) -> None:
    """Raise UserError if `parallel.cp_size` does not divide the processes."""
    if world_size % ranks:
        raise UserError(
            f"parallel.cp_size: {ranks} processes share each row, and this run has {world_size}, which is not a "
            f"multiple of {ranks}.",
            hint=f"Run on a multiple of {ranks} processes, or write a number that divides {world_size}.",
        )


def check_tower_accumulation(recipe: Recipe, accumulation: int, *, model_kind: str) -> None:
    """Raise UserError if replicas of a model with a tower would accumulate gradients.

    A micro-batch without files has no gradients of the tower, and torch adds up the gradients of
    micro-batches by their position in a list.
    """
    if recipe.parallel.dp_replicate_size > 1 and accumulation > 1:
        raise UserError(
            f"parallel.dp_replicate_size: replicas of a {model_kind} cannot accumulate gradients, and this run "
            f"accumulates {accumulation} micro-batches per step.",
            hint="Write train.gradient_accumulation_steps: 1, or leave parallel.dp_replicate_size out.",
        )


@dataclass(frozen=True)
class UnsupportedSetting:
    """A setting that a strategy does not support. `applies` receives the recipe and the autocast."""

    strategies: tuple[Strategy, ...]
    applies: Callable[[Recipe, str], bool]
    message: str
    hint: str


ZERO: tuple[Strategy, ...] = ("deepspeed_zero2", "deepspeed_zero3")
UNSUPPORTED = (
    UnsupportedSetting(
        ("fsdp",),
        lambda recipe, autocast: recipe.method.type == "qlora" and recipe.method.bnb_4bit_quant_storage == "uint8",
        "method.bnb_4bit_quant_storage: uint8 is not sharded, and the launcher configured fsdp.",
        "Write parallel.strategy: fsdp and method.bnb_4bit_quant_storage: bfloat16, or start the run without fsdp.",
    ),
    UnsupportedSetting(
        ("ddp",),
        lambda recipe, autocast: recipe.train.optim_in_backward,
        "train.optim_in_backward: under ddp each rank would step with its own gradients, before they are averaged.",
        "Write parallel.strategy: fsdp, which also shards the gradients, or leave the key out.",
    ),
    UnsupportedSetting(
        ("single", "fsdp"),
        lambda recipe, autocast: recipe.train.optim_in_backward and autocast == "fp16",
        "train.optim_in_backward: with model.dtype: float16 the gradients stay scaled until the step.",
        "Write model.dtype: bfloat16 or float32, or leave the key out.",
    ),
    UnsupportedSetting(
        ("fsdp", *ZERO),
        lambda recipe, autocast: recipe.method.load_in_8bit,
        "method.load_in_8bit: its weights cannot be sharded, and the launcher configured otherwise.",
        "Start the run without fsdp, or leave method.load_in_8bit out.",
    ),
    UnsupportedSetting(
        ("fsdp",),
        lambda recipe, autocast: not OPTIMIZERS[recipe.train.optim].takes_parts,
        "train.optim: {recipe.train.optim} needs whole weights, and under fsdp each rank has a part of each.",
        "Write parallel.strategy: ddp, or another optimizer (train.optim: adamw_bf16 or adamw_torch_8bit).",
    ),
    UnsupportedSetting(
        ("fsdp", *ZERO),
        lambda recipe, autocast: bool(recipe.method.trainable_token_indices),
        "method.trainable_token_indices: PEFT reads whole embeddings, and this run shards them.",
        "Write parallel.strategy: ddp, or train all rows with method.lora_modules_to_save.",
    ),
    UnsupportedSetting(
        ("fsdp",),
        lambda recipe, autocast: recipe.train.optim_offload,
        "train.optim_offload is not supported under fsdp, where each rank's share of the states is small already.",
        "Leave the key out, or write parallel.strategy: ddp.",
    ),
    UnsupportedSetting(
        ("fsdp",),
        lambda recipe, autocast: recipe.train.fp8 is True,
        "train.fp8: true keeps float8 copies of whole weights, and under fsdp each rank has a part of each.",
        "Write train.fp8: torchao, or parallel.strategy: ddp.",
    ),
    UnsupportedSetting(
        ("fsdp",),
        lambda recipe, autocast: recipe.parallel.dp_replicate_size > 1 and autocast == "fp16",
        "parallel.dp_replicate_size: replicas train in bfloat16 or float32 only, and this run would use float16.",
        "Write model.dtype: bfloat16 or float32, or leave the key out.",
    ),
    UnsupportedSetting(
        ZERO,
        lambda recipe, autocast: autocast == "fp16",
        "parallel.strategy: {recipe.parallel.strategy} trains in bfloat16 or float32 only, and this run would use "
        "float16.",
        "Write model.dtype: bfloat16 or float32, or parallel.strategy: ddp.",
    ),
)


def check_strategy(recipe: Recipe, strategy: Strategy, *, autocast: str) -> None:
    """Raise UserError for settings that the resolved strategy does not support.

    Settings that contradict `parallel.strategy` as written are refused earlier, with their line (recipe/rules).
    """
    for row in UNSUPPORTED:
        if strategy in row.strategies and row.applies(recipe, autocast):
            raise UserError(row.message.format(recipe=recipe), hint=row.hint)
