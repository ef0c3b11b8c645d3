"""What Medusa heads take while they train, beside the states: the high points of a step.

Of K heads of L residual blocks, on M rows that have a target and E elements each, the blocks keep K (2 L - 1) M E, and
are given M E. While the loss of heads that share the output head is computed, their hidden states are there one behind
another, and the gradients of these: 2 K M E. Heads with an output head of their own are computed one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ligertune.planning.memory.activation_bytes import Batch, HeadShape, Kept, LayerShape, Moment

LOSS = "loss"


@dataclass(frozen=True)
class Heads:
    """How many, of how many blocks; whether the model trains beside them; whether each has its own output head."""

    number: int
    blocks: int
    beside_model: bool
    own_projection: bool


def alone(
    heads: Heads,
    layer: LayerShape,
    head: HeadShape,
    kept: Kept,
    batch: Batch,
    *,
    itemsize: int,
    gradients: int,
    step_bytes: int,
    workspace: int,
    free: int | None,
) -> tuple[Moment, ...]:
    """The high points where the heads alone train: the frozen model's widest moment, and the loss."""
    one, before = batch.tokens * head.hidden * itemsize, gradients if batch.accumulates else 0
    # the embedding's output, what the layer was given, its attention's sum, that normed; gate, up and their product
    wide = batch.tokens * (4 * layer.hidden + (3 + (not kept.mlp)) * layer.mlp) * itemsize
    held, most = loss_of(heads, head, batch, itemsize, free)
    return (
        Moment("frozen model", 0, before, 0, wide + workspace),
        Moment(LOSS, one + held, before, most, workspace),
        Moment("backward", one + held, gradients, 2 * heads.number * batch.labels * head.hidden * itemsize, workspace),
        Moment("step", 0, gradients, 0, workspace + step_bytes),
    )


def beside(
    heads: Heads, head: HeadShape, batch: Batch, found: Sequence[Moment], *, itemsize: int, free: int | None
) -> tuple[Moment, ...]:
    """The high points of a model's step, `found`, with its own loss and that of heads beside it."""
    held, most = loss_of(heads, head, batch, itemsize, free)
    return tuple(
        replace(moment, activations=moment.activations + held, loss=most) if moment.name == LOSS else moment
        for moment in found
    )


def loss_of(heads: Heads, head: HeadShape, batch: Batch, itemsize: int, free: int | None) -> tuple[int, int]:
    """(what the blocks keep and are given, the most that the loss takes beside it)."""
    import torch
    from ligertune_kernels.ops.losses._schedule import schedule_of

    row, number = batch.labels * head.hidden * itemsize, heads.number + heads.beside_model
    dtype, sizes = {2: torch.bfloat16, 4: torch.float32}[itemsize], (head.hidden, head.vocab)
    blocks = row + heads.number * (2 * heads.blocks - 1) * row
    if not heads.own_projection:
        schedule = schedule_of(number * batch.labels, *sizes, dtype, needs_dw=head.head_trains, free_bytes=free)
        return blocks, 2 * number * row + schedule.extra_bytes + head.head_trains * head.elements * itemsize
    schedule = schedule_of(batch.labels, *sizes, dtype, free_bytes=free)
    gradients = number * (row + head.elements * itemsize)  # of all are there until the backward
    return blocks + heads.number * row, gradients + schedule.extra_bytes
