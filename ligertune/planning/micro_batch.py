"""Micro-batch size and gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ligertune.errors import UserError
from ligertune.recipe import Recipe
from ligertune.recipe.train_sections import MAX_ROWS_OF_A_STEP


@dataclass(frozen=True)
class Batching:
    """Sizes of a step: global_batch_size = micro_batch_size * accumulation * row_ranks."""

    micro_batch_size: int
    accumulation: int
    world_size: int
    eval_batch_size: int
    cp_size: int = 1  # context-parallel ranks, which share each row

    @property
    def row_ranks(self) -> int:
        """Number of ranks that read different rows."""
        return self.world_size // self.cp_size

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation * self.row_ranks


def choose_batching(recipe: Recipe, world_size: int, fits: Callable[[int, bool], bool] | None = None) -> Batching:
    """Resolve micro-batch size and accumulation. Raises UserError if they do not divide `global_batch_size`.

    fits(micro_batch_size, accumulates): whether a micro-batch fits on the device, for `auto`, which takes the largest.
    """
    micro = recipe.train.per_device_train_batch_size
    row_ranks = world_size // recipe.parallel.cp_size
    if micro == "auto":
        micro = _largest_micro_batch(recipe.train.global_batch_size, row_ranks, fits)
    accumulation = recipe.train.gradient_accumulation_steps or 1
    wanted = recipe.train.global_batch_size
    if wanted is not None:
        accumulation, rest = divmod(wanted, micro * row_ranks)
        if rest or accumulation == 0:
            raise UserError(
                f"train.global_batch_size: {wanted} is not a multiple of per_device_train_batch_size x processes "
                f"= {micro} x {row_ranks} = {micro * row_ranks}.",
                hint=f"Write a multiple of {micro * row_ranks}, or another train.per_device_train_batch_size.",
            )
    if micro * accumulation * row_ranks > MAX_ROWS_OF_A_STEP:
        raise UserError(
            "train.per_device_train_batch_size x gradient_accumulation_steps x processes = "
            f"{micro} x {accumulation} x {row_ranks} is {micro * accumulation * row_ranks:,} rows in a step, and the "
            f"most are {MAX_ROWS_OF_A_STEP:,}.",
            hint="Lower them, or write train.global_batch_size.",
        )
    eval_batch_size = recipe.eval.per_device_eval_batch_size
    return Batching(micro, accumulation, world_size, eval_batch_size, recipe.parallel.cp_size)


def _largest_micro_batch(global_batch_size: int, row_ranks: int, fits: Callable[[int, bool], bool] | None) -> int:
    """Return the largest micro-batch that fits and divides each rank's part of the global batch."""
    share, rest = divmod(global_batch_size, row_ranks)
    if rest:
        raise UserError(
            f"train.global_batch_size: {global_batch_size} is not a multiple of {row_ranks} processes.",
            hint=f"Write {row_ranks * max(1, share)}.",
        )
    if fits is None:
        raise UserError(
            "train.per_device_train_batch_size: auto needs a memory prediction, and this model's layers are not "
            "understood.",
            hint="Write a number.",
        )
    for micro in range(share, 0, -1):
        if share % micro == 0 and fits(micro, micro < share):
            return micro
    raise UserError(
        "train.per_device_train_batch_size: auto found no micro-batch that fits on this device: not even one row fits.",
        hint="Lower data.max_length, set train.gradient_checkpointing: true, or write method.type: lora.",
    )
