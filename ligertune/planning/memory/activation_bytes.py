"""Activation memory of one training step, by formula. No model is loaded and nothing is run.

The memory of a step has up to seven phases with a local maximum. The largest is the peak:

    loss         all activations, the output head's chunks of logits, and the gradients that the loss computes
    last norm    all activations, and the gradients of the last norm's input and output
    backward     all activations, and the backward of one layer
    run again    the first checkpointed layer, if the last layers are not checkpointed: their activations are freed and
                 their gradients exist
    first layer  the last layer of the backward: all gradients exist except its own and the embedding's
    gradients    that layer is done: all gradients exist, and the embedding's is computed
    step         all gradients, and the optimizer's temporaries

Without checkpointing a layer saves, per token: the inputs of its norms, the inputs of the linear layers whose weight or
adapter trains, queries, keys, values, attention's output, gate and up. With checkpointing it saves its input, and one
layer at a time has all of the above. These are the tensors that our kernels save; the plain model saves more, which is
counted too. `kernels.recompute` frees norm outputs and the gated product and recomputes them one at a time.

Layers of a hybrid model and of a mixture of experts differ (`LayerStack.others`). What is saved is counted by kind, and
what one layer needs while it computes is that of the kind that needs the most.

Under FSDP2 the embedding and the head are gathered from the forward to the end of the backward, and so are two layers
at a time: the one that computes and the next one, which is prefetched. Without resharding after the forward all layers
stay gathered, each to its backward. The gradient of a layer, of the embedding and of the head is whole before it is
reduced and scattered, and while a layer has its backward, that of the layer before is scattered.

Tiled layers have other phases (tiled_bytes.py). With offloading, the inputs of the other layers are in host memory, and
so are attention's and o_proj's outputs (`ligertune.activations.second_run`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch
from ligertune_kernels import divergence_workspace, schedule_of
from ligertune_kernels.ops.losses.tiles import MULTIPLE_OF

from ligertune.planning.memory.layer_bytes import (
    FA4_OR_DOCUMENT_ATTENTION,
    Float8,
    adapter_copies,
    experts_backward_bytes,
    float8_bytes,
    float8_saved,
    new_gradients,
    saved_by_experts,
    saved_by_mixer,
)
from ligertune.planning.memory.model_shape import FrozenModelShape, HeadShape, LayerShape

# cuBLAS allocates one workspace for the forward's thread and one for the backward's (torch: getWorkspaceSize, Hopper).
CUBLAS_WORKSPACE = 2 * (32 << 20)
# Device memory of a CUDA process outside torch's allocator: context, kernels, libraries.
CUDA_CONTEXT = 600 << 20
TILE = 4096  # tokens: products of this many rows run at cuBLAS's best rate
LOSS_CHUNK_ROWS = 1024  # tokens whose logits exist at a time in losses of plain torch


@dataclass(frozen=True)
class ActivationPolicy:
    """What the forward saves for the backward: fused kernels, attention, checkpointing, recomputation and float8."""

    fused_norm: bool = True
    fused_mlp: bool = True
    fused_experts: bool = True
    fused_loss: bool = True
    attention: str = "sdpa"
    checkpointing: bool | str = False
    not_checkpointed: int = 0  # last layers that are not checkpointed although `checkpointing` is on
    recompute: Literal["norms", "mlps"] | bool = False
    float8: Float8 = "no"
    float8_mlp: bool = False  # SwiGLU's kernels write float8 operands
    fused_lora: bool = False  # our functions compute the adapters
    lora_dropout: bool = False  # adapters read their input with elements dropped
    dora: bool = False  # adapters of PEFT's DoRA
    tile: int = 0  # tokens per tile of tiled layers; 0: the layers are not tiled
    mixer_chunk: int = 64  # tokens per chunk of our recurrence; 0: transformers' functions compute it
    keys_per_token: float = 1.0  # above 1 under context parallel: attention also holds keys of other ranks

    @property
    def offloads_inputs(self) -> bool:
        """Whether inputs of checkpointed layers are offloaded to host memory."""
        return self.checkpointing in ("offload", "offload_both")

    @property
    def offloads_gates(self) -> bool:
        """Whether the MLP gates of checkpointed layers are offloaded to host memory."""
        return self.checkpointing in ("offload_gate", "offload_both")

    def without_checkpointing(self) -> ActivationPolicy:
        return replace(self, checkpointing=False, not_checkpointed=0, tile=0)


@dataclass(frozen=True)
class MicroBatch:
    """Sizes of one micro-batch in token slots. `accumulates`: gradients of earlier micro-batches exist.

    full_rows: of each row, only the last token has no label.
    """

    tokens: int
    labels: int
    row_length: int
    accumulates: bool
    full_rows: bool = False

    @property
    def copied_labels(self) -> int:
        """Labels whose rows the loss first copies together: rows without a label are skipped.

        A few are computed to fill up a multiple of rows; if these are all, nothing is copied.
        """
        computed = -(-self.labels // MULTIPLE_OF) * MULTIPLE_OF
        return 0 if self.full_rows and computed >= self.tokens else self.labels


@dataclass(frozen=True)
class StepPhase:
    """Bytes in one phase of a step, without weights and optimizer states."""

    name: str
    activations: int
    gradients: int
    loss: int
    working: int

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.loss + self.working


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a step that do not depend on activations."""

    itemsize: int  # of the compute dtype
    gradients: int
    optimizer_step: int  # temporaries of the optimizer's step
    workspace: int
    recorded_buffer: int = 0  # of the workspace, what does not exist in the loss
    free: int | None = None  # device memory that the loss may use; None: unlimited
    in_backward: bool = False  # the optimizer steps in the backward and frees each gradient when it is complete


def layer_bytes(layer: LayerShape, policy: ActivationPolicy, itemsize: int, row_length: int) -> int:
    """Return the bytes that one layer saves per token. `row_length` matters for eager attention's (T, T) scores."""
    elements = layer.norms + 2 * layer.query + round(2 * layer.key * policy.keys_per_token) + layer.saved_by_mlp
    mlp_in = layer.mlp_in or (layer.experts is not None and policy.fused_experts)  # our op saves its input always
    elements += layer.attn_in * layer.hidden + mlp_in * layer.hidden
    # q_norm reads a part of q_proj's output and saves all of it, and the gate's sigmoid is saved
    elements += layer.gated_out + 2 * layer.gated * layer.query
    elements -= sum(recomputed_elements(layer, policy))
    elements += layer.adapters
    # the magnitude's gradient reads the frozen product and the low-rank one
    elements += 2 * policy.dora * layer.adapter_outputs
    size = 0
    if policy.lora_dropout and not policy.fused_lora:
        # PEFT's layers save what is left of their inputs, and a mask of one byte, in place of the inputs
        shared = layer.attn_in * layer.hidden + (layer.mlp_in and layer.experts is None) * layer.hidden
        product = layer.dense_mlp * (layer.mlp_out and layer.ungated is None)
        elements += layer.adapter_inputs - (shared + product) * (layer.adapter_inputs > 0)
        size += layer.adapter_inputs
    # float32 statistics: one per head (attention's log-sum-exp) and one per norm (its reciprocal deviation)
    size += elements * itemsize + 4 * (layer.heads + layer.norms // layer.hidden)
    if not policy.fused_norm and layer.norms_train:  # the input in float32, and the normalised value for the weight
        size += layer.norms * (4 if itemsize < 4 else 0) + layer.norms * itemsize
    elif not policy.fused_norm:  # with frozen weights an eager norm saves its input in float32 only
        size += layer.norms * (4 - itemsize)
    if not policy.fused_mlp and layer.ungated is None:  # eager code also saves act(gate)
        size += layer.dense_mlp * itemsize
    if layer.experts is not None:
        size += saved_by_experts(layer.experts, layer.hidden, itemsize, fused=policy.fused_experts)
    size += float8_saved(layer, policy.float8, itemsize, fused_mlp=policy.float8_mlp)
    size += saved_by_mixer(layer, itemsize, fused=policy.mixer_chunk > 0, fused_norm=policy.fused_norm)
    if policy.attention == "eager":
        size += layer.heads * row_length * (2 * itemsize + 4)
    return size


def recomputed_elements(layer: LayerShape, policy: ActivationPolicy) -> tuple[int, int, int]:
    """Return the elements per token that `kernels.recompute` does not save: inputs of attention, MLP and down_proj.

    A checkpointed layer is run again as a whole instead. In a mixture of experts the router reads the MLP's input too,
    so only the attention's input is recomputed.
    """
    if not policy.recompute or policy.checkpointing:
        return 0, 0, 0
    normed = policy.fused_norm and layer.normed and policy.recompute != "mlps"
    dense = layer.experts is None
    fused_mlp = policy.fused_mlp and layer.ungated is None
    return (
        (layer.attn_in and normed) * layer.hidden,
        (layer.mlp_in and normed and dense) * layer.hidden,
        (layer.mlp_out and fused_mlp and dense and policy.recompute != "norms") * layer.mlp,
    )


def saved_bytes(layer: LayerShape, policy: ActivationPolicy, itemsize: int, batch: MicroBatch) -> int:
    """Return the bytes that one layer saves for a micro-batch."""
    per_token = layer_bytes(layer, policy, itemsize, batch.row_length)
    factors = layer.adapter_elements * itemsize * policy.fused_lora  # copies in the compute dtype
    return per_token * batch.tokens + factors + adapter_copies(layer.experts, itemsize)


def backward_bytes(
    layer: LayerShape, policy: ActivationPolicy, itemsize: int, tokens: int, *, expert_gradients: bool = False
) -> int:
    """Return the bytes that the backward of one layer needs in addition to what was saved.

    expert_gradients: count the gradients of its experts' weights, which are not yet among the gradients.
    """
    # The gradients of gate and up are written over gate and up, unless PEFT's adapters or float8 still need the values.
    # Float8 MLPs have the gradient of their product in 16 bits, and count those of gate and up in float8.
    fused = policy.float8_mlp and not layer.adapters
    gates = 2 if keeps_gates(layer, policy) or (policy.float8 != "no" and not fused) else 1
    outside = tokens * (2 * layer.hidden + max(recomputed_elements(layer, policy))) * itemsize
    if policy.lora_dropout:  # the gradient of what an adapter has read, before that of its input is made of it
        outside += tokens * layer.widest_adapter * itemsize
    mlp = tokens * gates * layer.dense_mlp * itemsize
    if layer.experts is not None:  # the shared experts and the routed ones have their backward one after the other
        fused = policy.fused_experts
        routed = experts_backward_bytes(
            layer.experts, layer.hidden, tokens, itemsize, fused=fused, gradients=expert_gradients
        )
        mlp = max(mlp, routed)
    if layer.mixer is not None:  # its backward begins when that of the MLP has freed what the MLP saved
        without_mlp = replace(layer, mlp=0, mlp_in=False, mlp_out=False, experts=None)
        freed = layer_bytes(layer, policy, itemsize, 1) - layer_bytes(without_mlp, policy, itemsize, 1)
        mixer = layer.mixer.in_backward(itemsize, chunk=policy.mixer_chunk)
        made = new_gradients(layer.experts, itemsize) * expert_gradients
        mlp = max(mlp, tokens * (mixer - freed) + made)
    return outside + mlp + float8_bytes(layer, policy.float8, tokens, fused_mlp=fused)


def keeps_gates(layer: LayerShape, policy: ActivationPolicy) -> bool:
    """Return whether adapters still need gate and up when their gradients are computed."""
    return bool(layer.adapters) and not (policy.fused_lora and policy.fused_mlp)


def gate_bytes(layer: LayerShape, policy: ActivationPolicy, itemsize: int) -> int:
    """Return the bytes per token of one layer's gate if gates are offloaded: one is prefetched while one is used."""
    return layer.mlp * itemsize if policy.offloads_gates and layer.experts is None else 0


def result_bytes(layer: LayerShape, policy: ActivationPolicy, itemsize: int) -> int:
    """Return the bytes per token of a layer's results that wait in host memory: of o_proj and of our attention."""
    if policy.checkpointing != "offload" or policy.tile:
        return 0
    return (layer.hidden + attends(layer, policy) * layer.query) * itemsize


def _kept_results(
    layer: LayerShape, policy: ActivationPolicy, itemsize: int, tokens: int, layers: int
) -> tuple[int, int]:
    """Return the bytes of one layer's results, and those of all layers' row statistics, which stay on the device."""
    results = result_bytes(layer, policy, itemsize) * tokens
    of_attention = results > 0 and attends(layer, policy)
    return results, 4 * layer.heads * tokens * layers * of_attention


def attends(layer: LayerShape, policy: ActivationPolicy) -> bool:
    """Return whether our kernels compute the layer's attention."""
    return layer.heads > 0 and policy.attention in ("document_attention", FA4_OR_DOCUMENT_ATTENTION)


def loss_workspace(rows: int, head: HeadShape, itemsize: int, *, needs_dw: bool, free: int | None) -> int:
    """Return the bytes that linear_cross_entropy allocates in addition to the gradients, by its own schedule."""
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    return schedule_of(rows, head.hidden, head.vocab, dtype, needs_dw=needs_dw, free_bytes=free).extra_bytes


def loss_bytes(
    head: HeadShape,
    policy: ActivationPolicy,
    batch: MicroBatch,
    itemsize: int,
    free: int | None,
    *,
    in_backward: bool = False,
) -> tuple[int, int]:
    """Return (peak bytes while the loss is computed, bytes held in the backward of the last layer).

    in_backward: the optimizer steps in the backward. It frees the head's gradient before the last layer's backward.
    """
    if head.gives_scores:
        return 0, 0
    copies = 2 * head.token_rows * head.elements * itemsize
    if not policy.fused_loss:
        logits = batch.tokens * head.vocab
        # The backward of transformers' loss holds in float32 log_softmax's output, its gradient and the gradient of the
        # logits. A soft cap saves one more copy in the compute dtype.
        return logits * (itemsize + 12) + copies, logits * (itemsize + 4) + copies
    needs_dw = head.head_trains or head.token_rows
    workspace = loss_workspace(batch.labels, head, itemsize, needs_dw=needs_dw, free=free)
    gathered = batch.copied_labels * head.hidden * itemsize
    gradient = head.head_trains * head.elements * itemsize
    held = batch.labels * head.hidden * itemsize + copies
    freed = in_backward and not head.tied  # the embedding adds to the gradient of a tied weight at the end
    return workspace + gathered + gradient + held, held + gradient * (not freed)


def divergence_bytes(
    head: HeadShape, frozen: FrozenModelShape, policy: ActivationPolicy, batch: MicroBatch, itemsize: int
) -> int:
    """Return the peak bytes while the divergence from a teacher is computed, with the teacher's hidden states."""
    given = batch.tokens * frozen.hidden_bytes
    if not policy.fused_loss:
        # Counted for the student: logits, float32 log-probabilities, their gradient, and that of the logits.
        # The teacher's logits are made for one chunk of rows at a time, and are small next to these.
        return given + batch.tokens * head.vocab * (itemsize + 16)
    dtypes = [{2: torch.bfloat16, 4: torch.float32}[size] for size in (itemsize, frozen.itemsize)]
    sizes = batch.labels, head.hidden, head.vocab
    workspace = divergence_workspace(*sizes, *dtypes, needs_dw=head.head_trains)
    row = head.hidden * itemsize
    gathered = batch.copied_labels * (row + frozen.hidden_bytes)
    return given + gathered + workspace + batch.labels * row + head.head_trains * head.elements * itemsize


def chunked_loss_bytes(head: HeadShape, batch: MicroBatch, itemsize: int, rows: int) -> int:
    """Return the peak bytes of a loss in plain torch that makes the logits of `rows` tokens at a time.

    In its backward a chunk has its logits in the compute dtype and, in float32, a copy, one without the kept tokens,
    the gradients of both, and one temporary. The weight's gradient of a chunk is added to that of the others.
    """
    logits = min(rows, batch.labels) * head.vocab * (itemsize + 5 * 4)
    return logits + 2 * batch.labels * head.hidden * itemsize + 2 * head.head_trains * head.elements * itemsize


def gradient_bytes(
    head: HeadShape, batch: MicroBatch, gradients: int, itemsize: int, *, layers: int, last: int, shards: int
) -> tuple[int, int, int]:
    """Return bytes of gradients: (before that of the first layer, after those of the `last` layers, the embedding's).

    The third number is not 0 if the embedding's new gradient is computed before it is added to that of earlier
    micro-batches.
    """
    end_weight = head.elements * itemsize  # of the embedding or of the head
    if batch.accumulates:
        return gradients, gradients, end_weight * (head.tied and head.embedding_trains)
    end_shard = end_weight // shards
    layer_gradients = max(0, gradients - end_shard * head.trained_weights)
    untied_embedding = end_shard * (head.embedding_trains and not head.tied)
    before_first = max(0, gradients - layer_gradients // layers - untied_embedding)
    return before_first, layer_gradients * last // layers + end_shard * head.head_trains, 0


def _end_bytes(layer: LayerShape, itemsize: int) -> int:
    """Return the bytes per token outside the layers: the output of the embedding or of the last layer, that of the
    last norm, and rotary tables (cos and sin, D wide).
    """
    head_dim = layer.query // max(layer.heads, 1)
    return 2 * (layer.hidden + head_dim) * itemsize


@dataclass(frozen=True)
class LayerStack:
    """The layers of a model, and what else its step holds.

    number: of layers with a backward. tower: bytes that the tower saves. weights: bytes of one layer's weights
    if FSDP2 gathers them (0 otherwise), for a rank that holds 1 / shards of the model. stay_gathered: layers that are
    not resharded after the forward. others: kinds of layers unlike the last one, each with the number of its layers.
    """

    number: int
    tower: int = 0
    weights: int = 0
    shards: int = 1
    stay_gathered: int = 0
    others: tuple[tuple[LayerShape, int], ...] = ()

    def kinds(self, layer: LayerShape) -> tuple[LayerShape, ...]:
        """Return the kinds of layers. layer: the last one."""
        return layer, *(one for one, number in self.others if number)

    def gathered(self, waiting: int) -> int:
        """Return the bytes of gathered weights while so many layers wait for their backward.

        In the backward they include the gradient of the layer before, which is being reduced and scattered.
        """
        done = self.number - waiting
        # and the buffers of two gathers
        return (max(2, self.stay_gathered - done + 2) + (done > 0)) * self.weights


def _gathered_ends(head: HeadShape, itemsize: int, stack: LayerStack) -> tuple[int, int]:
    """Return the bytes of embedding or head that FSDP2 gathers, and those of the embedding that the backward holds.

    A tied embedding and head stay gathered to the end of the backward. If they are separate, the embedding is gathered
    for its lookup and its gradient, and the head from the last norm to that norm's backward.
    """
    weight = head.elements * itemsize if stack.weights else 0
    return weight, weight * (head.tied or stack.stay_gathered > 0)


def _saved_by_last(
    layer: LayerShape, last: int, policy: ActivationPolicy, itemsize: int, batch: MicroBatch, stack: LayerStack
) -> int:
    """Return the bytes that the last layers save, in which each kind has the share that it has in all layers."""
    usual = saved_bytes(layer, policy, itemsize, batch)
    others = (
        round(last * number / stack.number) * (saved_bytes(one, policy, itemsize, batch) - usual)
        for one, number in stack.others
    )
    return last * usual + sum(others)


def _layer_needs(
    layer: LayerShape, policy: ActivationPolicy, *, batch: MicroBatch, itemsize: int, gradients: bool
) -> tuple[int, int]:
    """Return the bytes that a layer saves, and what its backward needs in addition."""
    saved = saved_bytes(layer, policy, itemsize, batch)
    return saved, backward_bytes(layer, policy, itemsize, batch.tokens, expert_gradients=gradients)


def _kept_in_loss(policy: ActivationPolicy, last: int, layers: int) -> bool:
    """Return whether the loss phase has one hidden state more, as traces show.

    It is an input on its way to the host, or a recomputed norm of fused adapters. last: layers that save everything.
    """
    if policy.offloads_inputs:
        return last < layers
    return last > 0 and policy.fused_lora and bool(policy.recompute)


def _freed_by_last_norm(head: HeadShape, policy: ActivationPolicy, batch: MicroBatch, itemsize: int) -> int:
    """Return the bytes of the loss phase that are free, or not used yet, when the last MLP has its backward.

    The backward of the last norm has freed its input and output, and replaced the gradient of the loss. The gradient of
    the MLP's input does not exist yet.
    """
    states = 2 + (not policy.offloads_inputs)
    rows = 0 if head.gives_scores else batch.labels
    return (states * batch.tokens + rows) * head.hidden * itemsize


def step_phases(
    layer: LayerShape, head: HeadShape, policy: ActivationPolicy, batch: MicroBatch, step: StepBytes, stack: LayerStack
) -> tuple[StepPhase, ...]:
    """Return the phases of a step."""
    itemsize = step.itemsize
    layers = stack.number
    layer_weights = stack.weights
    gradients = step.gradients
    last = min(policy.not_checkpointed, layers) if policy.checkpointing else layers  # layers that save everything
    policy_of_last = policy.without_checkpointing() if last else policy
    policy_of_first = policy if last < layers else policy.without_checkpointing()
    hidden_states = batch.tokens * layer.hidden * itemsize
    saved_by_last = _saved_by_last(layer, last, policy_of_last, itemsize, batch, stack)
    # With offload, the input of the last checkpointed layer stays: nothing would hide its copy back.
    inputs = (last < layers if policy.offloads_inputs else layers - last) * hidden_states
    results, row_sums = _kept_results(layer, policy_of_first, itemsize, batch.tokens, layers - last)
    held = saved_by_last + inputs + stack.tower + row_sums
    before = gradients if batch.accumulates else 0
    new = not layer_weights  # under FSDP2 the whole gradient of a layer is one of the three gathered layers
    needs = functools.partial(_layer_needs, batch=batch, itemsize=itemsize, gradients=new)
    largest = max(stack.kinds(layer), key=lambda one: sum(needs(one, policy_of_first)))
    whole_layer, back = needs(largest, policy_of_first)
    gate = gate_bytes(largest, policy_of_first, itemsize) * batch.tokens
    ends = _end_bytes(layer, itemsize) * batch.tokens
    loss_peak, loss_held = loss_bytes(head, policy, batch, itemsize, step.free, in_backward=step.in_backward)
    back_of_last = back
    if last:
        saved, own = needs(layer, policy_of_last)
        # the backward of a layer of another kind begins when that of the last layer has freed what that one saved
        back_of_last = max(own, max(needs(one, policy_of_last)[1] for one in stack.kinds(layer)) - saved)
    done_layer = backward_bytes(largest, policy_of_first, itemsize, batch.tokens)
    end_weight = head.elements * itemsize  # of the embedding or of the head
    # Two of a tied weight that accumulates: that of the head is added when the embedding's is there, too.
    embedding = end_weight * head.embedding_trains * (head.tied + batch.accumulates)
    gathered_end, kept_end = _gathered_ends(head, itemsize, stack)
    with_gradient = step.workspace + kept_end + layer_weights  # the last term is a layer's whole gradient
    existing, done, another = gradient_bytes(
        head, batch, gradients, itemsize, layers=layers, last=last, shards=stack.shards
    )
    # the last norm and the loss have freed their tensors, and the layer's input is held already
    rest = held - saved_by_last + ends + whole_layer - 3 * hidden_states + gate
    back_of_first = back + with_gradient
    again = StepPhase("run again", rest, done, gathered_end * head.tied, back_of_first + stack.gathered(layers - last))
    of_last = results if last else whole_layer - (1 - policy.offloads_inputs) * hidden_states
    backward = held + ends + of_last + gate - _freed_by_last_norm(head, policy, batch, itemsize)
    in_loss = held + ends + _kept_in_loss(policy, last, layers) * hidden_states
    # the gradient of the norm's input, and that of its output where the loss reads one token of a text
    in_norm = held + ends + hidden_states * (1 + head.gives_scores)
    ends_in_loss = max(gathered_end, kept_end * (2 - head.tied))
    working_in_loss = step.workspace - step.recorded_buffer + ends_in_loss + stack.gathered(layers)
    working_in_backward = back_of_last + with_gradient + stack.gathered(layers)
    return (
        StepPhase("loss", in_loss + (1 if last else 2) * (gate + results), before, loss_peak, working_in_loss),
        StepPhase("last norm", in_norm, before, loss_held, working_in_loss),
        StepPhase("backward", backward, before, loss_held, working_in_backward),
        *([again] if 0 < last < layers else []),
        StepPhase("first layer", whole_layer + stack.tower, existing, another, back_of_first + stack.gathered(1)),
        StepPhase("gradients", ends, gradients, embedding, step.workspace + done_layer + 2 * gathered_end),
        StepPhase("step", 0, gradients, 0, step.workspace + step.optimizer_step),
    )
