"""Activation memory of a step with tiled layers (`train.tiled_mlp`), by formula.

All layers are checkpointed, and all but attention and the residual stream is computed a tile of tokens at a time
(`ligertune.activations.tiling`). What exists for the whole row, in elements per token, with E hidden, Q and K the
widths of queries and keys:

    forward    embedding, layer's input, norm's output; queries, keys and values; attention's and o_proj's outputs
    MLP        layer's input, queries, keys, values, attention's output, MLP block's input; its gradient and output's
    attention  layer's input, queries, keys, values, attention's output; gradients of the block, of that output, and of
               queries, keys and values
    loss       the last layer's input and output, that normed, and its gradient

With offloading, the inputs of the other layers are in host memory. A layer's input is copied when the next one is
stored, and copied back when it is needed: no copy is under way while a layer computes, so none needs memory there.
"""

from __future__ import annotations

from ligertune_kernels import document_attention_memory

from ligertune.planning.memory.activation_bytes import (
    ActivationPolicy,
    LayerStack,
    MicroBatch,
    StepBytes,
    StepPhase,
    gradient_bytes,
    loss_bytes,
)
from ligertune.planning.memory.flash_4_bytes import FA4_OR_DOCUMENT_ATTENTION, MOST_SUMS, flash_4_memory
from ligertune.planning.memory.model_shape import HeadShape, LayerShape

TILE = 4096  # tokens: products of this many rows run at cuBLAS's best rate
# Token ids, labels, positions, indices of labelled rows (int64), begin and end of each token's document (int32).
BATCH_BYTES = 4 * 8 + 2 * 4


def saved_by_tiled_layer(layer: LayerShape, policy: ActivationPolicy, itemsize: int) -> int:
    """Return the bytes per token that a layer has saved when its second run ends, without the MLP's tile."""
    elements = layer.norms + 2 * layer.query + 2 * layer.key
    if not (policy.fused_norm and layer.normed):  # the tiles of the projections and of the MLP do not contain the norm
        elements += (1 + layer.attn_in) * layer.hidden
    return elements * itemsize + 4 * (layer.heads + layer.norms // layer.hidden)


def tile_bytes(layer: LayerShape, policy: ActivationPolicy, itemsize: int, tokens: int) -> int:
    """Return the bytes of one tile at the widest point of its backward.

    gate, up, their product, and the gradients of the product and, with adapters, of gate and up. A plain layer writes
    those over gate and up. The gradients of trained weights are added in float32.
    """
    tile = min(tokens, policy.tile)
    widths = (5 if layer.adapters else 4) * layer.mlp + 4 * layer.hidden
    trained = 3 * layer.hidden * layer.mlp * (layer.mlp_in and not layer.adapters)
    return tile * widths * itemsize + trained * (4 + itemsize)


def _sums_bytes(layer: LayerShape, policy: ActivationPolicy, tokens: int) -> int:
    """Return the bytes of the fp32 sums in attention's backward, which H100 and H200 have."""
    width = layer.query // layer.heads
    shape = tokens, layer.heads, layer.key // width, width
    names = "document_attention", FA4_OR_DOCUMENT_ATTENTION
    ours = document_attention_memory(*shape) if policy.attention in names else 0
    others = flash_4_memory(*shape) if policy.attention == FA4_OR_DOCUMENT_ATTENTION else 0
    return max(ours, others) if others <= MOST_SUMS else ours


def tiled_phases(
    layer: LayerShape, head: HeadShape, policy: ActivationPolicy, batch: MicroBatch, step: StepBytes, stack: LayerStack
) -> tuple[StepPhase, ...]:
    """Return the phases of a step on one device. Layers with a dense MLP are not told apart."""
    itemsize = step.itemsize
    layers = stack.number
    tokens = batch.tokens
    gradients = step.gradients
    hidden = tokens * layer.hidden * itemsize
    width = tokens * itemsize
    # rotary tables (cos and sin) and the batch
    always = tokens * (2 * (layer.query // layer.heads) * itemsize + BATCH_BYTES) + stack.tower
    inputs = 0 if policy.offloads_inputs else layers * hidden
    saved = tokens * saved_by_tiled_layer(layer, policy, itemsize)
    tile = tile_bytes(layer, policy, itemsize, tokens)
    loss_peak, loss_held = loss_bytes(head, policy, batch, itemsize, step.free, in_backward=step.in_backward)
    before = gradients if batch.accumulates else 0
    existing, _, another = gradient_bytes(head, batch, gradients, itemsize, layers=layers, last=0, shards=1)
    projections = width * (2 * layer.query + 2 * layer.key)  # q, k, v and attention's output, or their gradients
    forward = (4 * hidden if policy.offloads_inputs else inputs + 2 * hidden) + projections
    mlp = saved + 2 * hidden + tile
    # The norm's output is freed with the MLP, if it was saved; the block's input is as large as the block's gradient.
    normed = 0 if policy.fused_norm and layer.normed else hidden
    attention = saved - normed + projections + 4 * tokens * layer.heads + _sums_bytes(layer, policy, tokens)
    held = max(0, loss_held - batch.labels * layer.hidden * itemsize)
    others = max(0, inputs - hidden)  # inputs of the layers before the last
    work = step.workspace
    return (
        StepPhase("forward", always + forward, before, 0, work + tile),
        StepPhase("loss", always + 2 * hidden + max(hidden, inputs), before, loss_peak, work),
        StepPhase("backward", always + others + max(mlp, attention), before, held, work),
        StepPhase("first layer", always + max(mlp, attention), existing, another, work),
        StepPhase("gradients", always + hidden, gradients, head.elements * itemsize * head.embedding_trains, work),
        StepPhase("step", 0, gradients, 0, work + step.optimizer_step),
    )
