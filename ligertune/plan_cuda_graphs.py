"""Where train.cuda_graphs can record a step, and what is said where it cannot."""

from __future__ import annotations

from ligertune.errors import UserError
from ligertune.machine import Machine
from ligertune.plan import Plan
from ligertune.recipe import Recipe

ONE_LAUNCH = ("varlen", "flash_attention_2")  # attention over all documents of a row, wherever each begins


def check_cuda_graphs(plan: Plan, *, sees: bool) -> None:
    """A UserError where the recipe asks for graphs, and each batch would be another, or ranks meet in between."""
    if not plan.recipe.train.cuda_graphs:
        return
    if plan.strategy != "single":
        raise UserError(
            f"train.cuda_graphs records what one process does, and parallel.strategy is {plan.strategy} here.",
            hint="Write parallel.num_processes: 1, or leave train.cuda_graphs out.",
        )
    if sees:
        raise UserError(
            f"train.cuda_graphs: {plan.model_family} sees, and pictures give each batch other sizes.",
            hint="Leave it out.",
        )
    if plan.precision.autocast == "fp16":
        raise UserError(
            f"train.cuda_graphs: {plan.machine.name} trains in float16, whose loss is scaled anew from step to step.",
            hint="Leave it out.",
        )
    if plan.rows.packed and plan.machine.device == "cuda" and plan.attn_implementation not in ONE_LAUNCH:
        raise UserError(
            f"train.cuda_graphs: {plan.attn_implementation} attention goes by each row's own documents "
            f"({plan.attn_why}).",
            hint="Write data.packing: false, or leave train.cuda_graphs out.",
        )


def cuda_graphs_notes(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    """What the plan's numbers do not say."""
    if not recipe.train.cuda_graphs:
        return ()
    if machine.device != "cuda":
        return ("train.cuda_graphs does nothing on a CPU",)
    return (
        "train.cuda_graphs keeps the memory of activations and loss: the first batch of another shape, and an "
        "evaluation, take theirs beside it",
    )
