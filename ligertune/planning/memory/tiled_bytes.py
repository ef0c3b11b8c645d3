"""Activation memory of a training step with tiled layers (`train.tiled_mlp`), by formula.

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
    attends,
    gradient_bytes,
    keeps_gates,
    loss_bytes,
)
from ligertune.planning.memory.layer_bytes import FA4_OR_DOCUMENT_ATTENTION, MOST_SUMS, flash_4_memory, saved_by_mixer
from ligertune.planning.memory.model_shape import HeadShape, LayerShape

# Token ids, labels, positions, indices of labelled rows (int64), begin and end of each token's document (int32).
BATCH_BYTES = 4 * 8 + 2 * 4


def saved_by_tiled_layer(layer: LayerShape, policy: ActivationPolicy, itemsize: int) -> int:
    """Return the bytes per token that a layer has saved when its second run ends, without the MLP's tile."""
    elements = layer.norms + 2 * layer.query + 2 * layer.key
    if not (policy.fused_norm and layer.normed):  # the tiles of the projections and of the MLP do not contain the norm
        elements += (1 + layer.attn_in) * layer.hidden
    elements += layer.gated_out + 2 * layer.gated * layer.query
    mixer = saved_by_mixer(layer, itemsize, fused=policy.mixer_chunk > 0, fused_norm=policy.fused_norm)
    return elements * itemsize + 4 * (layer.heads + layer.norms // layer.hidden) + mixer


def tile_bytes(layer: LayerShape, policy: ActivationPolicy, itemsize: int, tokens: int) -> int:
    """Return the bytes of one tile at the widest point of its backward.

    gate, up, their product, and the gradients of the product and, with PEFT's adapters, of gate and up. Other layers
    write those over gate and up. The gradients of trained weights are added in float32.
    """
    tile = min(tokens, policy.tile)
    widths = (5 if keeps_gates(layer, policy) else 4) * layer.mlp + 4 * layer.hidden
    trained = 3 * layer.hidden * layer.mlp * (layer.mlp_in and not layer.adapters)
    return tile * widths * itemsize + trained * (4 + itemsize)


def _sums_bytes(layer: LayerShape, policy: ActivationPolicy, tokens: int) -> int:
    """Return the bytes of the fp32 sums in attention's backward, which H100 and H200 have."""
    if not layer.heads:
        return 0
    width = layer.query // layer.heads
    shape = tokens, layer.heads, layer.key // width, width
    ours = document_attention_memory(*shape) if attends(layer, policy) else 0
    others = flash_4_memory(*shape) if policy.attention == FA4_OR_DOCUMENT_ATTENTION else 0
    return max(ours, others) if others <= MOST_SUMS else ours


def _projected(layer: LayerShape) -> int:
    """Return the elements per token of q, k, v and attention's output, or their gradients; a mixer has also a gate."""
    mixing = 0 if layer.mixer is None else layer.mixer.projected + layer.mixer.values
    return 2 * layer.query + 2 * layer.key + mixing


def _tiled_backward(layer: LayerShape, policy: ActivationPolicy, itemsize: int, tokens: int) -> int:
    """Return the bytes of a tiled layer at the widest point of its backward: in its MLP, or in its attention."""
    hidden = tokens * layer.hidden * itemsize
    saved = tokens * saved_by_tiled_layer(layer, policy, itemsize)
    mlp = saved + 2 * hidden + tile_bytes(layer, policy, itemsize, tokens)
    # The norm's output is freed with the MLP, if it was saved; the block's input is as large as the block's gradient.
    normed = 0 if policy.fused_norm and layer.normed else hidden
    if layer.mixer is not None:
        mixer = tokens * layer.mixer.in_backward(itemsize, chunk=policy.mixer_chunk)
        return max(mlp, saved - normed + mixer)
    projections = tokens * _projected(layer) * itemsize
    attention = saved - normed + projections + 4 * tokens * layer.heads + _sums_bytes(layer, policy, tokens)
    return max(mlp, attention)


def tiled_phases(
    layer: LayerShape, head: HeadShape, policy: ActivationPolicy, batch: MicroBatch, step: StepBytes, stack: LayerStack
) -> tuple[StepPhase, ...]:
    """Return the phases of a step on one device."""
    itemsize = step.itemsize
    layers = stack.number
    tokens = batch.tokens
    gradients = step.gradients
    hidden = tokens * layer.hidden * itemsize
    width = tokens * itemsize
    # rotary tables (cos and sin) and the batch
    always = tokens * (2 * (layer.query // max(layer.heads, 1)) * itemsize + BATCH_BYTES) + stack.tower
    inputs = 0 if policy.offloads_inputs else layers * hidden
    tile = tile_bytes(layer, policy, itemsize, tokens)
    loss_peak, loss_held = loss_bytes(head, policy, batch, itemsize, step.free, in_backward=step.in_backward)
    before = gradients if batch.accumulates else 0
    existing, _, another = gradient_bytes(head, batch, gradients, itemsize, layers=layers, last=0, shards=1)
    kinds = stack.kinds(layer)
    projections = width * max(map(_projected, kinds))
    forward = (4 * hidden if policy.offloads_inputs else inputs + 2 * hidden) + projections
    widest = max(_tiled_backward(one, policy, itemsize, tokens) for one in kinds)
    held = max(0, loss_held - batch.labels * layer.hidden * itemsize)
    others = max(0, inputs - hidden)  # inputs of the layers before the last
    work = step.workspace
    return (
        StepPhase("forward", always + forward, before, 0, work + tile),
        StepPhase("loss", always + 2 * hidden + max(hidden, inputs), before, loss_peak, work),
        StepPhase("backward", always + others + widest, before, held, work),
        StepPhase("first layer", always + widest, existing, another, work),
        StepPhase("gradients", always + hidden, gradients, head.elements * itemsize * head.embedding_trains, work),
        StepPhase("step", 0, gradients, 0, work + step.optimizer_step),
    )
