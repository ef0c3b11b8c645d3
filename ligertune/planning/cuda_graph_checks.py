"""Where train.cuda_graphs can record a step, what is said where it cannot, and where it is worth naming."""

from __future__ import annotations

import dataclasses

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.plan import Plan, row_length
from ligertune.recipe import Recipe, contradicts_itself

# attention over all documents of a row, wherever each begins
ONE_LAUNCH = ("document_attention", "varlen", "flash_attention_2")
# Seconds of a host for a layer's forward and backward, guessed low: a step of Llama-3.2-1B on 128 tokens took 4.7 ms a
# layer on an H100 (scripts/bench_e2e --only tiny), most of it the host's.
LAUNCHING_A_LAYER = 2e-3
REACHED = 0.5  # of the peak, by whole steps


def check_cuda_graphs(plan: Plan, *, sees: bool, wanted: bool | None = None) -> None:
    """A UserError where the recipe asks for graphs, and each batch would be another, or ranks meet in between."""
    if not (plan.build.execution.cuda_graphs if wanted is None else wanted):
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


def advise_cuda_graphs(plan: Plan, recipe: Recipe, *, sees: bool) -> Plan:
    """With a note where launching a micro batch takes the host longer than the device needs for it."""
    train, machine = recipe.train, plan.machine
    if train.cuda_graphs or machine.device != "cuda" or not machine.peak_flops or plan.budget is None:
        return plan
    tokens = plan.batching.micro_batch_size * row_length(plan.rows, plan.data)
    computing = 6.0 * plan.n_parameters * tokens / (REACHED * machine.peak_flops)
    if computing > plan.budget.layers * LAUNCHING_A_LAYER:
        return plan
    asked = recipe.model_copy(update={"train": train.model_copy(update={"cuda_graphs": True})})
    if contradicts_itself(asked):
        return plan
    try:
        check_cuda_graphs(plan, sees=sees, wanted=True)
    except UserError:
        return plan
    said = (
        f"{tokens:,} tokens a micro batch are computed faster than a host launches their kernels; "
        "train.cuda_graphs: true launches them at once"
    )
    return dataclasses.replace(plan, notes=(*plan.notes, said))
