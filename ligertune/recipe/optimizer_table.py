"""Optimizers that a recipe can choose: bytes of their states per parameter, and the package that each needs.

The planner uses these formulas before a model is loaded. `training/optim` builds the optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Shape = tuple[int, ...]
Bytes = Callable[[Shape, int, int], float]

# Elements; quantising optimizers keep the states of smaller parameters in 32 bits: `min_8bit_size` of bitsandbytes.
SMALL = 4096


@dataclass(frozen=True)
class OptimizerStates:
    """Memory of one optimizer.

    bytes_of: (shape, itemsize, rank) -> bytes of the states of one parameter; rank: of GaLore's projection.
    needs: package of the extra `quant` that holds the optimizer.
    matrices_only: it updates the matrices inside layers; fused AdamW updates embeddings, head, norms and biases.
    on_host: its states are in host memory.
    takes_parts: it can update the shard of a parameter that FSDP gives a process.
    copies: a step temporarily allocates this many copies of all trained weights,
    pieces: and this many of the largest weight (of 2^24 elements at most in adamw_bf16).
    """

    bytes_of: Bytes
    needs: str | None = None
    matrices_only: bool = False
    on_host: bool = False
    takes_parts: bool = True
    copies: float = 0
    pieces: float = 0


def _states(count: float) -> Bytes:
    """States in the parameter's dtype, `count` per element."""
    return lambda shape, itemsize, rank: count * itemsize * math.prod(shape)


def _quantised(bits: float, *, block: int) -> Bytes:
    """Two states per element with `bits` bits each, and a 4-byte scale per `block` elements."""

    def bytes_of(shape: Shape, itemsize: int, rank: int) -> float:
        elements = math.prod(shape)
        per_element = bits / 8 + 4 / block if elements >= SMALL else 4
        return 2 * per_element * elements

    return bytes_of


def _row_and_column_means(shape: Shape, itemsize: int, rank: int) -> float:
    """Adafactor: means of squared gradients over rows and over columns; vectors keep every square."""
    if len(shape) < 2:
        return itemsize * math.prod(shape)
    return itemsize * math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def _projected(shape: Shape, itemsize: int, rank: int) -> float:
    """GaLore: a projection of the shorter side, and two moments of the projected gradient."""
    short, long = sorted(shape)
    return itemsize * min(rank, short) * (short + 2 * long)


OPTIMIZERS = {
    "adamw_torch_fused": OptimizerStates(_states(2)),
    # the square roots of all second moments exist at once: torch steps all parameters together (foreach)
    "adamw_torch": OptimizerStates(_states(2), copies=1),
    # six temporaries of a piece are in fp32, each as large as two copies of it in bfloat16
    "adamw_bf16": OptimizerStates(lambda shape, itemsize, rank: 4 * math.prod(shape), pieces=12),
    "adamw_8bit": OptimizerStates(_quantised(8, block=256), needs="bitsandbytes", takes_parts=False),
    "paged_adamw_8bit": OptimizerStates(
        _quantised(8, block=256), needs="bitsandbytes", on_host=True, takes_parts=False
    ),
    "paged_adamw_32bit": OptimizerStates(
        lambda shape, itemsize, rank: 8 * math.prod(shape), needs="bitsandbytes", on_host=True, takes_parts=False
    ),
    "adamw_torch_8bit": OptimizerStates(_quantised(8, block=256), needs="torchao"),
    "adamw_torch_4bit": OptimizerStates(_quantised(4, block=128), needs="torchao"),
    "adamw_torch_fp8": OptimizerStates(_quantised(8, block=256), needs="torchao"),
    "adafactor": OptimizerStates(_row_and_column_means, copies=2, takes_parts=False),
    "muon": OptimizerStates(_states(1), matrices_only=True, pieces=4),
    "galore_adamw": OptimizerStates(_projected, matrices_only=True, takes_parts=False, pieces=3),
    # the update, before its sign is added to the weight
    "lion": OptimizerStates(_states(1), pieces=1),
    "sgd": OptimizerStates(_states(0)),
}


def step_bytes(name: str, parameters: dict[tuple[Shape, int, bool], int]) -> int:
    """Return the bytes that one step allocates temporarily. parameters: as in `optimizer_bytes`."""
    row = OPTIMIZERS[name]
    piece = 1 << 24 if name == "adamw_bf16" else math.inf
    sizes = [
        (itemsize * math.prod(shape), itemsize * min(math.prod(shape), piece)) for shape, itemsize, _ in parameters
    ]
    whole = sum(size * count for (size, _), count in zip(sizes, parameters.values(), strict=True))
    return round(row.copies * whole + row.pieces * max((size for _, size in sizes), default=0))


def optimizer_bytes(name: str, parameters: dict[tuple[Shape, int, bool], int], *, rank: int) -> int:
    """Return the bytes of an optimizer's states, on the device or the host.

    parameters: (shape, itemsize, inside a layer) -> number of such parameters.
    rank: rank of GaLore's projection.
    """
    row = OPTIMIZERS[name]
    others = OPTIMIZERS["adamw_torch_fused"]
    total = 0.0
    for (shape, itemsize, inside), count in parameters.items():
        suits = not row.matrices_only or (inside and len(shape) == 2)
        total += count * (row if suits else others).bytes_of(shape, itemsize, rank)
    return round(total)
