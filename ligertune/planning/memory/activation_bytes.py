"""Bytes that a step needs beside what is always there, by formula: no model is loaded and nothing is run.

A step's memory has up to six high points, and the highest is the peak:

    loss         all activations, the head's chunks of logits, and the gradients it computes while it has them
    backward     all activations, and one layer on its way back
    run again    where the last layers are not checkpointed: the first that is, theirs gone and their gradients there
    first layer  the layer that is last on the way back: every gradient but its own and the embedding's is there
    gradients    that layer done: every gradient is there, and the embedding's is being made
    step         every gradient, and the optimizer's temporaries

Without checkpointing a layer keeps, for each token, its norms' inputs, the inputs of those products whose weight or
adapter trains, queries, keys, values, attention's output, gate and up. With it, only what goes into the layer, and one
layer is whole at a time. This is what our kernels keep; the plain model keeps more, which is counted too. With
`kernels.recompute` norms' outputs and the gated product (or the former only) are not among the products' inputs that
are kept: one of them at a time is made again on the way back.

Under FSDP2 the embedding and the head are whole from the forward to the end of the backward, and two layers at a time:
the one that computes and the next. A layer's gradient is whole before it is shared out, and so are those of the ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

# cuBLAS's workspace on Hopper, once for the forward's thread and once for the backward's (torch: getWorkspaceSize)
WORKSPACE = 2 * (32 << 20)
# what a CUDA process holds outside torch's allocator: context, kernels, libraries
CONTEXT = 600 << 20


@dataclass(frozen=True)
class LayerShape:
    """One layer: sizes in elements a token. Inputs of products that are kept for a gradient: attn_in, mlp_in, mlp_out.

    norms: the inputs of all its norms. adapters: rank times adapted products. mlp of a mixture: of the experts used.
    normed: what goes into attention and the MLP is a norm's output, not what the layer before gave.
    """

    hidden: int
    query: int
    key: int
    heads: int
    mlp: int
    norms: int
    attn_in: bool = True
    mlp_in: bool = True
    mlp_out: bool = True
    adapters: int = 0
    routed: int = 0  # copies of the token that go to experts
    normed: bool = True


@dataclass(frozen=True)
class Kept:
    """What the model is computed with: which kernels, which attention, and what is recomputed."""

    norm: bool = True
    mlp: bool = True
    in_head: bool = True
    attention: str = "sdpa"
    checkpointing: bool | str = False
    not_checkpointed: int = 0  # nevertheless: so many of the layers, the last ones
    recompute: Literal["norms"] | bool = False
    float8: Literal["no", "compiled", "eager"] = "no"
    keys: float = 1.0  # for each token: more where ranks share a row, and attention has those of others

    @property
    def inputs_wait(self) -> bool:
        """Whether what goes into checkpointed layers is in host memory until they are run again."""
        return self.checkpointing in ("offload", "offload_both")

    @property
    def gates_wait(self) -> bool:
        """Whether the gates of their MLPs are."""
        return self.checkpointing in ("offload_gate", "offload_both")

    def without_checkpointing(self) -> Kept:
        """The same, of layers that are not checkpointed."""
        return replace(self, checkpointing=False, not_checkpointed=0)


@dataclass(frozen=True)
class TowerShape:
    """The layers that see: how many, their width, elements a patch that one keeps, and the patches behind a token.

    projector: elements a token that what is between them and the language model keeps, which is not checkpointed.
    """

    layers: int
    hidden: int
    kept: int
    patches_per_token: float
    trains: bool
    projector: int = 0

    def held_bytes(self, image_tokens: float, kept: Kept, itemsize: int) -> int:
        """What all of them keep of a batch's pictures; nothing where they are frozen, and the graph begins behind."""
        of_projector = math.ceil(image_tokens) * self.projector * itemsize
        if not self.trains or kept.inputs_wait:
            return of_projector
        patches = math.ceil(image_tokens * self.patches_per_token)
        return of_projector + self.layers * patches * (self.hidden if kept.checkpointing else self.kept) * itemsize


@dataclass(frozen=True)
class Moment:
    """Bytes at a high point of a step, beside weights, optimizer states and gradients kept from steps before."""

    name: str
    activations: int
    gradients: int
    loss: int
    working: int

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.loss + self.working


def layer_bytes(layer: LayerShape, kept: Kept, itemsize: int, row_length: int) -> int:
    """What one layer keeps of one token. row_length: tokens that eager attention compares each with."""
    elements = layer.norms + 2 * layer.query + round(2 * layer.key * kept.keys) + 2 * layer.mlp
    elements += layer.attn_in * layer.hidden + layer.mlp_in * layer.hidden + layer.mlp_out * layer.mlp
    elements -= sum(made_again(layer, kept))
    elements += layer.adapters + 2 * layer.routed * layer.hidden
    size = elements * itemsize + 4 * (layer.heads + layer.norms // layer.hidden)
    if not kept.norm:  # the input in fp32, and the normalised value in both dtypes
        size += layer.norms * (4 if itemsize < 4 else 0) + layer.norms * itemsize
    if not kept.mlp:  # act(gate)
        size += layer.mlp * itemsize
    if kept.attention == "eager":
        size += layer.heads * row_length * (2 * itemsize + 4)
    return size


def made_again(layer: LayerShape, kept: Kept) -> tuple[int, int, int]:
    """Elements a token that the backward makes again instead of keeping: attn_in, mlp_in, mlp_out.

    Where a layer is checkpointed it is run again as a whole. Experts keep the token as it is sorted to them.
    """
    if not kept.recompute or kept.checkpointing:
        return 0, 0, 0
    normed, dense = kept.norm and layer.normed, not layer.routed
    return (
        (layer.attn_in and normed) * layer.hidden,
        (layer.mlp_in and normed and dense) * layer.hidden,
        (layer.mlp_out and kept.mlp and dense and kept.recompute is True) * layer.mlp,
    )


def backward_bytes(layer: LayerShape, kept: Kept, itemsize: int) -> int:
    """What a token needs on its way back through one layer, beside what was kept."""
    # with plain layers the gradients of gate and up are written over them; adapters and float8 need memory of their own
    gates = 2 if layer.adapters or kept.float8 != "no" else 1
    return (2 * layer.hidden + gates * layer.mlp + max(made_again(layer, kept))) * itemsize


def gate_bytes(layer: LayerShape, kept: Kept, itemsize: int) -> int:
    """A token's gate of one layer where gates wait on the host: one more is on the device than is in use.

    While the loss is computed these are the last layer's, and the one before it, which has just been copied.
    """
    return layer.mlp * itemsize if kept.gates_wait and not layer.routed else 0


def float8_bytes(layer: LayerShape, kept: Kept, tokens: int) -> int:
    """Copies of the operands of the widest product's backward: weight, input and the output's gradient in float8.

    The weight's gradient reads input and gradient in the other order, so both are there twice. Where nothing is
    compiled, the gradient is cast once for each product, and on its way through two copies in float32.
    """
    if kept.float8 == "no":
        return 0
    width = layer.query if layer.routed else layer.mlp  # experts are no linear layers
    of_gradient = {"compiled": 2, "eager": 1 + 8 + 1}[kept.float8]
    return layer.hidden * width + tokens * (of_gradient * width + 2 * layer.hidden)


@dataclass(frozen=True)
class HeadShape:
    """The output head and the embedding: V rows of E. tied: one weight."""

    vocab: int
    hidden: int
    head_trains: bool = True
    embedding_trains: bool = True
    tied: bool = False

    @property
    def elements(self) -> int:
        return self.vocab * self.hidden


@dataclass(frozen=True)
class Batch:
    """A micro batch: its token slots, the labels among them, a row's length, and whether others came before it."""

    tokens: int
    labels: int
    row_length: int
    accumulates: bool


def loss_bytes(head: HeadShape, kept: Kept, batch: Batch, itemsize: int, free: int | None) -> tuple[int, int]:
    """(the most while the loss is computed, what is left of it until the head's backward)."""
    if not kept.in_head:
        logits = batch.tokens * head.vocab
        return logits * (2 * itemsize + 12), logits * (itemsize + 4)
    import torch
    from ligertune_kernels.ops.losses._schedule import schedule_of

    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    chosen = schedule_of(batch.labels, head.hidden, head.vocab, dtype, needs_dw=head.head_trains, free_bytes=free)
    picked = 0 if batch.labels == batch.tokens else batch.labels * head.hidden * itemsize
    left = batch.labels * head.hidden * itemsize + head.head_trains * head.elements * itemsize
    return chosen.extra_bytes + picked + left, left


def moments(
    layer: LayerShape,
    head: HeadShape,
    kept: Kept,
    batch: Batch,
    *,
    layers: int,
    itemsize: int,
    gradients: int,
    step_bytes: int,
    workspace: int = 0,
    free: int | None = None,
    tower: int = 0,
    unit: int = 0,
    shards: int = 1,
) -> tuple[Moment, ...]:
    """The high points of a step. Bytes: gradients, of all; free, what the loss may count on; tower, kept there;
    unit, one layer's weights where FSDP2 gathers them for a rank that keeps 1 / shards."""
    last = min(kept.not_checkpointed, layers) if kept.checkpointing else layers  # that keep what they have
    plain = kept.without_checkpointing()
    of_last, of_first = plain if last else kept, kept if last < layers else plain
    one = batch.tokens * layer.hidden * itemsize
    of_lasts = last * layer_bytes(layer, of_last, itemsize, batch.row_length) * batch.tokens
    # where inputs wait, the last one does not leave: it is what the last layer has anyway, or one more
    inputs = (0 < last < layers if kept.inputs_wait else layers - last) * one
    held = of_lasts + inputs + tower
    whole = layer_bytes(layer, of_first, itemsize, batch.row_length) * batch.tokens
    gate = gate_bytes(layer, of_first, itemsize) * batch.tokens
    # the embedding's output or the last layer's, the last norm's output, and rotary tables of one head's width
    ends = batch.tokens * (2 * layer.hidden + 2 * (layer.query // layer.heads)) * itemsize
    most, left = loss_bytes(head, kept, batch, itemsize, free)
    # where a layer is computed again, the norm behind the last one and the loss have given back theirs, and what went
    # into the layer is among what was held
    again = whole - (2 if kept.inputs_wait and last == 0 else 3) * one if last < layers else 0
    of_loss = batch.labels * layer.hidden * itemsize if last == 0 else 0
    before = gradients if batch.accumulates else 0
    in_float8 = float8_bytes(layer, kept, batch.tokens)
    back, back_of_last = (backward_bytes(layer, k, itemsize) * batch.tokens + in_float8 for k in (of_first, of_last))
    of_ends = head.elements * itemsize
    embedding = of_ends if head.embedding_trains and (head.tied or batch.accumulates) else 0
    # FSDP2's units: a tied embedding and head stay gathered to the end of the backward; apart, the embedding is there
    # while it looks up and while its gradient is made, and the head from the last norm until that norm's backward
    end = of_ends if unit else 0
    gathered = workspace + end * head.tied + 3 * unit
    kept_end = of_ends // shards
    of_layers = max(0, gradients - kept_end * trained_ends(head))
    if batch.accumulates:
        there, done, another = gradients, gradients, of_ends * (head.tied and head.embedding_trains)
    else:
        there = max(0, gradients - of_layers // layers - kept_end * (head.embedding_trains and not head.tied))
        done, another = of_layers * last // layers + kept_end * head.head_trains, 0
    some = held - of_lasts + ends + again + gate
    return (
        Moment("loss", held + ends + (1 if last else 2) * gate, before, most, workspace + end + 2 * unit),
        Moment("backward", held + ends + (last == 0) * again - of_loss + gate, before, left, back_of_last + gathered),
        *((Moment("run again", some, done, end * head.tied, back + gathered),) if 0 < last < layers else ()),
        Moment("first layer", whole + tower, there, another, back + gathered),
        Moment("gradients", ends, gradients, embedding, workspace + back + 2 * end),
        Moment("step", 0, gradients, 0, workspace + step_bytes),
    )


def trained_ends(head: HeadShape) -> int:
    """How many gradients of E x V there are; a tied weight has one."""
    return int(head.head_trains or head.embedding_trains) if head.tied else head.head_trains + head.embedding_trains
