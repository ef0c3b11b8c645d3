"""What a device keeps all the time, by the way in which processes share a model."""

from __future__ import annotations

from ligertune.planning.memory.states import StateBytes, state_bytes
from ligertune.planning.parallelism import SHARING_WEIGHTS, Strategy, shards_of
from ligertune.recipe import Recipe


def states_of(
    recipe: Recipe, shape: object, weight_dtype: str, *, strategy: Strategy = "single", world_size: int = 1
) -> StateBytes:
    """Of one process. `shape`: the model's ModelShape."""
    zero = strategy.startswith("deepspeed")
    return state_bytes(
        shape.parameters,
        weight_dtype=weight_dtype,
        optim=recipe.train.optim,
        method=recipe.method.type,
        shards=shards_of(recipe.parallel.dp_replicate_size, strategy, world_size),
        whole_weights=strategy not in SHARING_WEIGHTS,
        master_weights=zero and weight_dtype != "float32",
        rank=recipe.train.galore.rank,
        offload=recipe.train.optim_offload,
    )
