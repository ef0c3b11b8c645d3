"""Bytes a run needs for what it keeps all the time: weights, gradients and optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


@dataclass(frozen=True)
class StateBytes:
    """Per device, before activations. A checkpoint holds weights and optimizer."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def checkpoint(self) -> int:
        return self.weights + self.optimizer


def state_bytes(*, n_parameters: int, n_trainable: int, weight_dtype: str, shards: int = 1) -> StateBytes:
    """AdamW: two states in the weights' dtype for each trained parameter. `shards`: ranks that share them (FSDP)."""
    size = DTYPE_BYTES[weight_dtype]
    return StateBytes(
        weights=n_parameters * size // shards,
        gradients=n_trainable * size // shards,
        optimizer=2 * n_trainable * size // shards,
    )
