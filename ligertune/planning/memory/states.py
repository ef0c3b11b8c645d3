"""Bytes a run needs for what it keeps all the time: weights, gradients and optimizer states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ligertune.recipe.optimizer_table import OPTIMIZERS, optimizer_bytes, step_bytes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# NF4 in blocks of 64 with an 8-bit scale each, and for every 256 of those one of 4 bytes (Dettmers et al. 2023)
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


@dataclass(frozen=True)
class ParameterKind:
    """Parameters that cost alike. inside: not the embedding's or the head's. linear: the weight of a linear layer."""

    shape: tuple[int, ...]
    trains: bool
    inside: bool
    linear: bool
    adapter: bool

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def quantised(self, method: str) -> bool:
        """Whether QLoRA keeps it in four bits."""
        return method == "qlora" and self.linear and self.inside and not self.adapter

    def itemsize(self, weight_dtype: str) -> int:
        """Bytes of an element in full precision: adapters are float32."""
        return 4 if self.adapter else DTYPE_BYTES[weight_dtype]


@dataclass(frozen=True)
class StateBytes:
    """Per device, before activations. `trained` is the share of the weights that train."""

    weights: int
    gradients: int
    optimizer: int
    trained: int
    step: int = 0  # made and given back by the optimizer's step
    saves_adapter: bool = False
    in_host_memory: int = 0  # states of the optimizer that the device does not hold

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def model(self) -> int:
        """What the finished model takes on disk."""
        return self.trained if self.saves_adapter else self.weights

    @property
    def saved_states(self) -> int:
        """What a checkpoint has of the optimizer, wherever that kept it."""
        return self.optimizer + self.in_host_memory


def state_bytes(
    parameters: Iterable[tuple[ParameterKind, int]],
    *,
    weight_dtype: str,
    optim: str,
    method: str,
    shards: int = 1,
    whole_weights: bool = False,
    master_weights: bool = False,
    rank: int = 0,
    offload: bool = False,
) -> StateBytes:
    """Of parameters and how many there are of each kind. `shards`: ranks that share them (FSDP, ZeRO).

    whole_weights: all but the weights is shared. master_weights: the optimizer steps on float32 copies of its own.
    rank: of the gradients, for an optimizer that projects them. offload: it works in host memory.
    """
    weights = trained = masters = 0.0
    states: Counter = Counter()
    for kind, count in parameters:
        size = NF4_BYTES if kind.quantised(method) else kind.itemsize(weight_dtype)
        weights += count * kind.elements * size
        if kind.trains:
            trained += count * kind.elements * size
            masters += 4 * count * kind.elements * master_weights
            itemsize = 4 if master_weights else kind.itemsize(weight_dtype)
            states[(kind.shape, itemsize, kind.inside)] += count
    kept = (optimizer_bytes(optim, states, rank=rank) + round(masters)) // shards
    hosted = kept if offload or OPTIMIZERS[optim].on_host else 0
    return StateBytes(
        weights=round(weights if whole_weights else weights / shards),
        gradients=round(trained / shards),
        optimizer=kept - hosted,
        trained=round(trained / shards),
        step=0 if offload else step_bytes(optim, states) // shards,
        saves_adapter=method in ("lora", "qlora"),
        in_host_memory=hosted,
    )
