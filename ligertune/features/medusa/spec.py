"""Medusa heads as a feature: heads on top of the model, their losses, and what they cost and report."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ligertune.any_types import AnyModule
from ligertune.errors import format_rate, plural
from ligertune.features.medusa.medusa_run import save_heads, with_heads
from ligertune.features.medusa.medusa_task import MedusaShape, MedusaTask
from ligertune.features.medusa.recipe import MedusaSpec
from ligertune.planning.feature_spec import FeatureSpec, ResultTable
from ligertune.planning.options import BuildOptions, KernelOptions
from ligertune.planning.plan import KernelLine, Plan
from ligertune.recipe.feature import TaskOptions

LOSS_KERNEL = "multi_head_linear_cross_entropy"


def _make_task(plan: Plan, model: AnyModule) -> MedusaTask:
    """Return the task of a `MedusaModel`."""
    options = plan.build.section(MedusaSpec)
    return MedusaTask(
        MedusaShape.of_heads(model),
        model.shifts,
        heads_coefficient=options.heads_coefficient,
        warmup_steps=round(options.heads_warmup_ratio * plan.schedule.total_steps),
    )


def _trains_model(options: TaskOptions) -> bool:
    """Return whether the model trains with its heads (stage 2)."""
    return options.section(MedusaSpec).stage == 2


def _added_lr_multiplier(options: TaskOptions) -> float:
    """Return the learning rate of heads next to a model that trains. Heads alone have the recipe's rate."""
    return options.section(MedusaSpec).lr_multiplier if _trains_model(options) else 1.0


def _kernel_lines(kernels: KernelOptions) -> tuple[KernelLine, ...]:
    """Return the line of the kernel that computes the losses of all heads."""
    return (KernelLine(LOSS_KERNEL, 1, 0, ""),) if kernels.fuses_heads_loss else ()


def _wrap(options: BuildOptions, model: Any) -> nn.Module:
    """Return the model with its heads."""
    return with_heads(options, model)


def _title(settings: Mapping[str, Any], words: str) -> str:
    """Return the words for the method in a title."""
    return "Medusa heads" if settings["medusa"]["stage"] == 1 else f"Medusa heads and model, {words}"


def _result_tables(found: Mapping[str, Any]) -> Sequence[ResultTable]:
    """Return the accuracy of each head, and decoding with the heads against plain decoding.

    found: MedusaReport.as_dict().
    """
    rows = [
        [f"head {k}", f"+{k + 1}", f"{100 * top1:.1f} %", f"{100 * top5:.1f} %"]
        for k, (top1, top5) in enumerate(zip(found["top1"], found["top5"], strict=True), start=1)
    ]
    title = f"Accuracy of the heads on {found['measured_on']}"
    accuracy = ResultTable(title, rows, header=("", "token", "top-1", "top-5"))
    decoding = found["decoding"]
    if decoding is None:
        return (accuracy,)
    tokens = plural(decoding["new_tokens"], "new token")
    prompts = plural(decoding["prompts"], "prompt")
    with_heads_rate = format_rate(decoding["tokens_per_second"])
    plain_rate = format_rate(decoding["plain_tokens_per_second"])
    speed = f"{with_heads_rate} with heads, {plain_rate} with plain decoding: {decoding['speed_up']:.2f}x"
    decoded = [
        ("tree", f"{plural(found['tree_nodes'], 'node')}, depth {found['tree_depth']}"),
        ("accepted length", f"{decoding['accepted_length']:.2f} tokens per forward pass ({tokens})"),
        ("text", f"equal to plain decoding's for {decoding['identical']} of {prompts}"),
        ("tokens/s", f"{speed} (one prompt at a time)"),
    ]
    return (accuracy, ResultTable("Decoding", decoded))


def _next_step(folder: Path, command: str) -> str:
    """Return how to generate with the heads."""
    heads = shlex.quote(str(folder))
    return f"Generate from it:  {command} generate {heads} 'Give three tips for staying healthy.' --medusa"


SPECS = {
    "medusa": FeatureSpec(
        task=_make_task,
        loss_kernel=LOSS_KERNEL,
        forward_only=True,  # in stage 1, of the frozen model
        own_loss=True,
        gives_predictions=False,
        added_lr_multiplier=_added_lr_multiplier,
        uses_method=_trains_model,
        why_no_memory="with Medusa heads, memory is predicted for one process or ddp, with the fused loss, and without "
        "self_distillation",
        wrap=_wrap,
        shape=MedusaShape.of_heads,
        kernel_lines=_kernel_lines,
        counts_experts=False,  # MedusaModel calls the backbone without its router outputs
        save=save_heads,
        saves_base=_trains_model,
        saves_adapter=False,  # heads are served with one model, so the adapter is merged
        title=_title,
        loss_unit=lambda settings: "nats, weighted sum over the heads",
        result_tables=_result_tables,
        next_step=_next_step,
        export_note="Medusa heads are not compared; `ligertune medusa RECIPE --report` measures them.",
    )
}
