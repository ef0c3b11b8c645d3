"""What a run keeps from the forward to the backward: by which kernels, and how many layers are checkpointed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.memory.activation_bytes import Kept
from ligertune.planning.memory.estimate import Budget, largest
from ligertune.planning.micro_batch import Batching
from ligertune.recipe import Recipe

if TYPE_CHECKING:
    from ligertune.planning.plan import KernelLine


WORTH_SAYING = 0.9  # of the layers, if so many would do


def copies_inputs(recipe: Recipe) -> bool:
    """Whether adapters keep what they make of their input, which `kernels.recompute` then does not save."""
    method = recipe.method
    return method.type in ("lora", "qlora") and (method.lora_dropout > 0 or method.use_dora)


def kept_with(recipe: Recipe, attn_implementation: str, kernels: Iterable[KernelLine]) -> Kept:
    """What the model is computed with, as far as memory goes; every layer checkpointed where any is."""
    applied = {line.kernel for line in kernels if line.applied}
    return Kept(
        norm="rms_norm" in applied,
        mlp=bool(applied & {"swiglu", "geglu"}),
        in_head=bool(applied & {"linear_cross_entropy", "multi_head_linear_cross_entropy"}),
        attention=attn_implementation,
        checkpointing=recipe.train.gradient_checkpointing,
        recompute=recipe.kernels.recompute if "recompute" in applied and not copies_inputs(recipe) else False,
        float8=("compiled" if recipe.train.torch_compile else "eager") if "float8_linear" in applied else "no",
    )


def why_not_predicted(task: str) -> str:
    """Return the reason why no memory is predicted, as a phrase."""
    if task == "medusa":
        return "with heads, memory is known of one process or ddp, the fused loss, and no self_distillation"
    return "this model's layers are not understood"


def with_checkpointed_layers(
    recipe: Recipe, budget: Budget | None, batching: Batching, row_length: int, machine: Machine
) -> Budget | None:
    """The budget with as many layers checkpointed as `train.gradient_checkpointing_layers` says.

    auto: as few as fit on the device with that batch; all of them where not even that fits, as a run then finds out.
    A UserError for more than there are, or where the layers are not understood.
    """
    wanted = recipe.train.gradient_checkpointing_layers
    if not recipe.train.gradient_checkpointing or wanted == "all":
        return budget
    if budget is None:
        raise UserError(
            f"train.gradient_checkpointing_layers: {wanted} goes by the memory plan: {why_not_predicted(recipe.task)}.",
            hint="Leave it out: all layers are checkpointed then.",
        )

    if wanted == "auto":
        return _with_fewest(budget, batching, row_length, machine)
    if wanted > budget.layers:
        raise UserError(
            f"train.gradient_checkpointing_layers: {wanted}, but the model has {budget.layers} layers.",
            hint="Write a smaller number, or leave it out: all layers are checkpointed then.",
        )
    return _keeping(budget, budget.layers - wanted)


def _keeping(budget: Budget, layers: int) -> Budget:
    """With so many layers that are not checkpointed."""
    return replace(budget, kept=replace(budget.kept, not_checkpointed=layers))


def _with_fewest(budget: Budget, batching: Batching, row_length: int, machine: Machine) -> Budget:
    """With as few layers checkpointed as the device has room for."""
    accumulates, memory = batching.accumulation > 1, machine.memory_bytes

    def fits(layers: int) -> bool:
        kept = _keeping(budget, layers)
        return kept.fits(batching.micro_batch_size, row_length, accumulates=accumulates, memory=memory)

    return _keeping(budget, largest(fits, limit=budget.layers))


def layers_notes(
    recipe: Recipe, budget: Budget | None, batching: Batching, row_length: int, machine: Machine
) -> tuple[str, ...]:
    """How many layers are checkpointed, in words, where it is not all of them, or need not be all."""
    wanted, key = recipe.train.gradient_checkpointing_layers, "train.gradient_checkpointing"
    if budget is None or not recipe.train.gradient_checkpointing:
        return ()
    if wanted != "all":
        checkpointed = budget.layers - budget.kept.not_checkpointed
        return (f"{key}_layers: {wanted}: {checkpointed} of {budget.layers} layers are checkpointed",)
    trains = budget.heads is None or budget.heads.beside_model
    if machine.device == "cpu" or not trains or budget.shards > 1:  # of shards the plan is less exact
        return ()
    needed = budget.layers - _with_fewest(budget, batching, row_length, machine).kept.not_checkpointed
    if needed == 0:
        return (f"{key}: by the plan this device has room for all that the layers keep, and none need be run again",)
    if needed <= WORTH_SAYING * budget.layers:
        return (f"{key}: by the plan {key}_layers: auto would run {needed} of {budget.layers} layers again, not all",)
    return ()
