"""Memory of Medusa heads during training, in addition to their states.

K heads of L residual blocks on M labelled rows save K (2 L - 1) M E elements in their blocks and read M E. The loss of
heads that share the output head holds their hidden states and the gradients of those: 2 K M E. Heads with their own
output weight are computed one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ligertune.planning.memory.activation_bytes import (
    ActivationPolicy,
    MicroBatch,
    StepBytes,
    StepPhase,
    loss_workspace,
)
from ligertune.planning.memory.model_shape import HeadShape, LayerShape, MedusaHeadsShape


def frozen_backbone(
    heads: MedusaHeadsShape,
    layer: LayerShape,
    head: HeadShape,
    policy: ActivationPolicy,
    batch: MicroBatch,
    step: StepBytes,
) -> tuple[StepPhase, ...]:
    """Return the phases of a step that trains heads on a frozen model (stage 1)."""
    hidden_states = batch.tokens * head.hidden * step.itemsize
    before = step.gradients if batch.accumulates else 0
    # widest point of a frozen layer: its input, attention's output, their sum, that normed; gate, up and their product
    widest = batch.tokens * (4 * layer.hidden + (3 + (not policy.fused_mlp)) * layer.mlp) * step.itemsize
    held, loss = heads_loss(heads, head, batch, step.itemsize, step.free)
    gradients_of_heads = 2 * heads.number * batch.labels * head.hidden * step.itemsize
    return (
        StepPhase("frozen model", 0, before, 0, widest + step.workspace),
        StepPhase("loss", hidden_states + held, before, loss, step.workspace),
        StepPhase("backward", hidden_states + held, step.gradients, gradients_of_heads, step.workspace),
        StepPhase("step", 0, step.gradients, 0, step.workspace + step.optimizer_step),
    )


def joint(
    heads: MedusaHeadsShape,
    head: HeadShape,
    batch: MicroBatch,
    phases: Sequence[StepPhase],
    *,
    itemsize: int,
    free: int | None,
) -> tuple[StepPhase, ...]:
    """Return the phases of a step that trains model and heads (stage 2), from the phases of the model alone."""
    held, loss = heads_loss(heads, head, batch, itemsize, free)
    return tuple(
        replace(phase, activations=phase.activations + held, loss=loss) if phase.name == "loss" else phase
        for phase in phases
    )


def heads_loss(
    heads: MedusaHeadsShape, head: HeadShape, batch: MicroBatch, itemsize: int, free: int | None
) -> tuple[int, int]:
    """Return (bytes that the blocks read and save, additional peak bytes of the loss)."""
    row, number = batch.labels * head.hidden * itemsize, heads.number + heads.joint
    blocks = row + heads.number * (2 * heads.blocks - 1) * row
    if not heads.own_projection:
        needs_dw = head.head_trains
        workspace = loss_workspace(number * batch.labels, head, itemsize, needs_dw=needs_dw, free=free)
        return blocks, 2 * number * row + workspace + needs_dw * head.elements * itemsize
    workspace = loss_workspace(batch.labels, head, itemsize, needs_dw=True, free=free)
    gradients = number * (row + head.elements * itemsize)  # the gradients of all heads exist until the backward
    return blocks + heads.number * row, gradients + workspace
