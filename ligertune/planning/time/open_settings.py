"""Settings that a recipe leaves open, with `auto`: batch split, checkpointing, recomputation and parallel strategy.

Where the time of a step can be predicted, `settings_choice` chooses them. Elsewhere they have fixed values: 4 rows in a
micro-batch, no accumulation and no checkpointing.
"""

from __future__ import annotations

from dataclasses import dataclass

from ligertune.errors import UserError
from ligertune.planning.memory.states import Strategy
from ligertune.recipe.schema import Recipe

AUTO = "auto"
USUAL_ROWS = 4  # of a micro-batch


@dataclass(frozen=True)
class OpenSettings:
    """Which settings the recipe leaves open. split: micro-batch and accumulation, for a fixed global batch.

    strategy: DDP or FSDP2. copies: with it, one copy of a sharded model per node. resharding: of FSDP2, after the
    forward. `kernels.recompute: auto` alone keeps its own rule (`activation_policy.recomputes`).
    """

    split: bool
    checkpointing: bool
    recompute: bool
    strategy: bool = False
    copies: bool = False
    resharding: bool = False

    @staticmethod
    def of(recipe: Recipe, *, decided: Strategy | None = "single") -> OpenSettings:
        """Return those of a recipe. decided: the strategy; None if `auto` has a choice."""
        train = recipe.train
        fixed_steps = train.gradient_accumulation_steps not in (None, AUTO)
        split = train.per_device_train_batch_size == AUTO and not fixed_steps
        checkpointing = train.gradient_checkpointing == AUTO
        parallel = recipe.parallel
        shards = decided in (None, "fsdp")
        return OpenSettings(
            split=split,
            checkpointing=checkpointing,
            recompute=(split or checkpointing) and recipe.kernels.recompute == AUTO,
            strategy=decided is None,
            copies=decided is None and "dp_replicate_size" not in parallel.model_fields_set,
            resharding=shards and parallel.reshard_after_forward == AUTO and not parallel.cpu_offload,
        )

    def __bool__(self) -> bool:
        return self.split or self.checkpointing or self.strategy or self.resharding


NOTHING_OPEN = OpenSettings(split=False, checkpointing=False, recompute=False)


def with_train(recipe: Recipe, **values: object) -> Recipe:
    """Return the recipe with other values of `train`."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=values)})


def with_parallel(recipe: Recipe, **values: object) -> Recipe:
    """Return the recipe with other values of `parallel`."""
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=values)})


def with_usual_values(recipe: Recipe, row_ranks: int) -> Recipe:
    """Return the recipe with fixed values in place of `auto`. row_ranks: processes that read different rows."""
    train = recipe.train
    micro = train.per_device_train_batch_size
    wanted = train.global_batch_size
    if micro == AUTO:
        micro = USUAL_ROWS if wanted is None else _usual_micro_batch(wanted, row_ranks)
    steps = train.gradient_accumulation_steps
    return with_train(
        recipe,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=1 if steps == AUTO else steps,
        gradient_checkpointing=False if train.gradient_checkpointing == AUTO else train.gradient_checkpointing,
    )


def _usual_micro_batch(wanted: int, row_ranks: int) -> int:
    """Return the largest micro-batch of at most USUAL_ROWS that divides each process's part of the global batch."""
    share, rest = divmod(wanted, row_ranks)
    if rest:
        raise UserError(
            f"train.global_batch_size: {wanted} is not a multiple of {row_ranks} processes.",
            hint=f"Write {row_ranks * max(1, share)}.",
        )
    return next(rows for rows in range(USUAL_ROWS, 0, -1) if share % rows == 0)


def with_batch_of_tokens(recipe: Recipe, tokens_per_row: float, row_ranks: int) -> Recipe:
    """Return the recipe with `global_batch_tokens` as rows: at least one per process, the nearest multiple."""
    tokens = recipe.train.global_batch_tokens
    if tokens is None:
        return recipe
    share = max(1, round(tokens / tokens_per_row / row_ranks))
    return with_train(
        recipe, global_batch_tokens=None, global_batch_size=share * row_ranks, gradient_accumulation_steps=None
    )
