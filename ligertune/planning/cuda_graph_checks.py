"""Checks for `train.cuda_graphs`: refuse what cannot be recorded, and suggest it if the host is the bottleneck."""

from __future__ import annotations

import dataclasses

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.plan import Plan
from ligertune.recipe import Recipe, contradicts_itself

# Attention that handles all documents of a row in one launch, independent of where they begin.
ONE_LAUNCH = ("document_attention", "varlen", "flash_attention_2")
# Host seconds per layer for forward and backward, a low guess: a step of Llama-3.2-1B on 128 tokens took 4.7 ms per
# layer on an H100 (scripts/bench_e2e --only tiny), most of it host time.
HOST_SECONDS_PER_LAYER = 2e-3
REACHED_SHARE_OF_PEAK = 0.5  # FLOP/s of a whole step over the device's peak


def check_cuda_graphs(plan: Plan, *, has_images: bool, wanted: bool | None = None) -> None:
    """Raise UserError if `train.cuda_graphs` is set (`wanted` overrides it) and a step cannot be recorded."""
    if not (plan.build.execution.cuda_graphs if wanted is None else wanted):
        return
    if plan.strategy != "single":
        raise UserError(
            f"train.cuda_graphs records the work of one process, and parallel.strategy is {plan.strategy} here.",
            hint="Write parallel.num_processes: 1, or leave train.cuda_graphs out.",
        )
    if has_images:
        raise UserError(
            f"train.cuda_graphs: {plan.model_family} reads images, which give each batch another shape.",
            hint="Leave it out.",
        )
    if plan.precision.autocast == "fp16":
        raise UserError(
            f"train.cuda_graphs: {plan.machine.name} trains in float16, whose loss scale changes between steps.",
            hint="Leave it out.",
        )
    if plan.rows.packed and plan.machine.device == "cuda" and plan.attn_implementation not in ONE_LAUNCH:
        raise UserError(
            f"train.cuda_graphs: the launches of {plan.attn_implementation} attention depend on the documents of each "
            f"row ({plan.attn_why}).",
            hint="Write data.packing: false, or leave train.cuda_graphs out.",
        )


def cuda_graphs_notes(recipe: Recipe, machine: Machine) -> tuple[str, ...]:
    """Return a note about the memory that `train.cuda_graphs` needs, or that it has no effect on a CPU."""
    if not recipe.train.cuda_graphs:
        return ()
    if machine.device != "cuda":
        return ("train.cuda_graphs has no effect on a CPU",)
    return (
        "train.cuda_graphs keeps the memory of activations and loss allocated: the first batch of another shape and "
        "each evaluation need their memory in addition",
    )


def suggest_cuda_graphs(plan: Plan, recipe: Recipe, *, has_images: bool) -> Plan:
    """Return the plan, with a note if the host takes longer to launch a micro-batch than the device to compute it."""
    train, machine = recipe.train, plan.machine
    if train.cuda_graphs or machine.device != "cuda" or not machine.peak_flops or plan.memory is None:
        return plan
    tokens = plan.batching.micro_batch_size * plan.row_length
    device_seconds = 6.0 * plan.n_parameters * tokens / (REACHED_SHARE_OF_PEAK * machine.peak_flops)
    if device_seconds > plan.memory.layers * HOST_SECONDS_PER_LAYER:
        return plan
    with_graphs = recipe.model_copy(update={"train": train.model_copy(update={"cuda_graphs": True})})
    if contradicts_itself(with_graphs):
        return plan
    try:
        check_cuda_graphs(plan, has_images=has_images, wanted=True)
    except UserError:
        return plan
    note = (
        f"the GPU computes {tokens:,} tokens per micro-batch faster than the host launches its kernels; "
        "train.cuda_graphs: true launches them at once"
    )
    return dataclasses.replace(plan, notes=(*plan.notes, note))
