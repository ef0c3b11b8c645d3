"""Model states: bytes of weights, gradients and optimizer states on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ligertune.planning.memory.model_shape import ParameterKind
from ligertune.recipe.optimizer_table import OPTIMIZERS, optimizer_bytes, step_bytes
from ligertune.recipe.schema import Recipe

Strategy = Literal["single", "ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"]
SHARDED_WEIGHTS = ("fsdp", "deepspeed_zero3")  # strategies under which each process holds a part of the weights
# NF4 and FP4 have blocks of 64 values with a 4-byte scale. Double quantisation stores an 8-bit scale per block, and one
# of 4 bytes per 256 blocks (Dettmers et al. 2023).
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
SINGLE_4BIT_BYTES = 0.5 + 4 / 64


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one device that exist through the whole run. `trained` is the trainable part of the weights."""

    weights: int
    gradients: int
    optimizer: int
    trained: int
    step: int = 0  # temporaries of the optimizer's step
    gathered: int = 0  # weights of the whole model, as FSDP gathers them
    saves_adapter: bool = False
    in_host_memory: int = 0  # optimizer states that are kept in host memory instead

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def model(self) -> int:
        """Bytes of the finished model on disk."""
        return self.trained if self.saves_adapter else self.weights

    @property
    def saved_states(self) -> int:
        """Bytes of optimizer states in a checkpoint."""
        return self.optimizer + self.in_host_memory


def shards_of(dp_replicate_size: int, strategy: Strategy, world_size: int) -> int:
    """Return into how many parts each copy of the model states is cut."""
    return 1 if strategy in ("single", "ddp") else world_size // dp_replicate_size


def states_of(
    recipe: Recipe,
    parameters: Iterable[tuple[ParameterKind, int]],
    weight_dtype: str,
    *,
    strategy: Strategy = "single",
    world_size: int = 1,
) -> StateBytes:
    """Return the model states of one process under a strategy.

    parameters: (kind, number of parameters of that kind). GaLore's optimizer states have the size of its projected
    gradients.
    """
    optim = recipe.train.optim
    method = recipe.method.type
    offload = recipe.train.optim_offload
    shards = shards_of(recipe.parallel.dp_replicate_size, strategy, world_size)
    # DeepSpeed's optimizer keeps float32 copies of the weights.
    master_weights = strategy.startswith("deepspeed") and weight_dtype != "float32"
    weights = trained = masters = scales = 0.0
    states = Counter[tuple[tuple[int, ...], int, bool]]()
    four_bits = NF4_BYTES if recipe.method.bnb_4bit_use_double_quant else SINGLE_4BIT_BYTES
    for kind, count in parameters:
        size = four_bits if kind.quantised(method) else kind.itemsize(weight_dtype)
        if kind.in_eight_bits(recipe.method.stored_as):
            size = 1 + 4 / kind.shape[-1]
        weights += count * kind.elements * size
        # FSDP shards the bytes of 4-bit weights, and each process keeps all scales
        scales += kind.quantised(method) * count * kind.elements * (four_bits - 0.5)
        if kind.trains:
            trained += count * kind.elements * size
            masters += 4 * count * kind.elements * master_weights
            itemsize = 4 if master_weights else round(kind.itemsize(weight_dtype))
            states[(kind.shape, itemsize, kind.inside)] += count
    kept = (optimizer_bytes(optim, states, rank=recipe.train.galore.rank) + round(masters)) // shards
    hosted = kept if offload or OPTIMIZERS[optim].on_host else 0
    return StateBytes(
        weights=round((weights - scales) / shards + scales if strategy in SHARDED_WEIGHTS else weights),
        gradients=round(trained / shards),
        optimizer=kept - hosted,
        trained=round(trained / shards),
        step=0 if offload else step_bytes(optim, states) // shards,
        gathered=round(weights - scales),
        saves_adapter=method in ("lora", "qlora"),
        in_host_memory=hosted,
    )
