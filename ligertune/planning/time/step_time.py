"""Predicted time of a training step, from counted operations and bytes at the GPU's measured rates.

    products      2 FLOPs per weight and token forward, 2 for the input's gradient, 2 for the weight's; once more
                  forward where layers are checkpointed
    attention     2 products per pair of tokens forward, 5 backward
    element-wise  bytes that norms, rotary embeddings, residual sums, gated products and adapters read and write
    loss          the output head, forward and backward
    update        gradients, weights and optimizer states, read and written
    communication what the ranks exchange, where the computation does not hide it

A micro-batch takes the time of the GPU, or that of the host if its launches take longer and no CUDA graph replays them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ligertune.planning.memory.activation_bytes import ActivationPolicy
from ligertune.planning.memory.model_shape import LayerShape, ModelShape
from ligertune.planning.memory.states import StateBytes
from ligertune.planning.time.gpu_rates import GpuRates, rate_at

# Whole steps run slower than their kernels alone: the GPU lowers its clock, there are gaps between kernels, and small
# kernels are not counted. Fitted, with the next three and ADAPTER, to 120 steps of Llama 1B and 8B, Qwen3.5-4B, Mixtral
# and OLMoE on an H200 (scripts/bench choice).
WHOLE_STEP = 1.08
# Of the rate of large products, the most that a product reaches in a step: alone, small ones run at a higher clock.
SUSTAINED = 0.955
LAYER_SECONDS = 3e-4  # of a layer's gaps, forward and backward
RECORDED_LAYER_SECONDS = 5e-5  # the same in a CUDA graph
# Elements per token that fused kernels read and write, in units of the width that they work on.
NORM = (4, 4)  # add_rms_norm forward and backward, of the hidden size
GATED = (3, 5)  # swiglu, of the MLP's width
ROTATED = (2, 2)  # of queries and keys
ADAPTER = (2, 2)  # of the inputs and outputs of adapted layers: both factors' products, fitted too
FOUR_BIT_BYTES = 0.53 + 2.0  # read and written for each dequantised weight
# Bytes/s of copies from and to pinned host memory, assumed and not measured: PCIe 5.0 x16 carries 63 GB/s at most. At
# half of it, layers of Llama models of 1 B parameters and more still hide their copies on an H100.
HOST_LINK_BANDWIDTH = 40e9
NVLINK_BYTES = 300e9  # bytes/s of a GPU in a reduction or a gather inside a node, a guess
NETWORK_BYTES = 100e9  # the same of all GPUs of a node with other nodes, a guess
HIDDEN = 0.7  # share of the computation that can run while ranks communicate, a guess
BACKWARD = 2 / 3  # of the computation; sums of gradients run in the last backward of a step
# Rows of a product above which its rate alone falls, because the GPU lowers its clock; in a step it does not.
MOST_ROWS = 8192
# Stated with each prediction. The steps that the constants were fitted to have a median error of 2.5 %, and 26 % at
# most; others were not checked.
MEASURED_ERROR = 0.15
GUESSED_ERROR = 0.3  # of a GPU whose rates were not measured, and of several, whose communication was not
FLOAT8_GAIN = 1.5  # products in float8 by products in bfloat16, quantisation included, a guess


@dataclass(frozen=True)
class SharedModel:
    """Ranks that hold `world_size / shards` copies of a model, each cut into `shards` parts; neighbours share a copy.

    reshards: the weights that a forward gathers are gathered again for the backward.
    """

    world_size: int = 1
    nodes: int = 1
    shards: int = 1
    reshards: bool = True

    @property
    def copies(self) -> int:
        return self.world_size // self.shards

    def bandwidth(self, neighbours: int) -> float:
        """Return bytes/s of a collective operation of so many ranks."""
        inside = neighbours <= self.world_size // self.nodes
        return NVLINK_BYTES if inside else min(NVLINK_BYTES, NETWORK_BYTES)


@dataclass(frozen=True)
class StepWork:
    """What one rank computes in a step. tokens, squared_lengths and labels: of a micro-batch, on average.

    four_bits: weights that each use dequantises. host_seconds: of a micro-batch's launches. recorded: CUDA graphs
    replay them. ranks: how those that share the step share the model.
    """

    shape: ModelShape
    policy: ActivationPolicy
    states: StateBytes
    tokens: float
    squared_lengths: float
    labels: float
    accumulation: int
    itemsize: int = 2
    four_bits: int = 0
    host_seconds: float = 0.0
    recorded: bool = False
    ranks: SharedModel = SharedModel()


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by kind of work."""

    products: float = 0.0
    attention: float = 0.0
    recurrence: float = 0.0
    elementwise: float = 0.0
    gaps: float = 0.0
    loss: float = 0.0
    dequantise: float = 0.0
    offload: float = 0.0
    host: float = 0.0  # for which the GPU waits for launches
    communication: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class PredictedTime:
    """A step's predicted seconds. rates: name of the GPU whose measured rates they follow from.

    measured: the run has one GPU of this kind.
    """

    parts: StepTime
    rates: str
    measured: bool

    @property
    def total(self) -> float:
        return self.parts.total

    @property
    def error(self) -> float:
        """How far off the prediction may be, relative to it."""
        return MEASURED_ERROR if self.measured else GUESSED_ERROR


def step_time(work: StepWork, rates: GpuRates) -> StepTime:
    """Predict a step."""
    layers = _layers_of(work)
    products = sum(_products(work, rates, share, again) for share, again in layers)
    attention = sum(share * _attention(work, rates, again) for share, again in layers)
    recurrence = sum(share * _recurrence(work, rates, again) for share, again in layers)
    elementwise = sum(share * _elementwise(work, rates, again) for share, again in layers)
    loss = _loss(work, rates)
    dequantise = sum(share * _dequantise(work, rates, again) for share, again in layers)
    gaps = work.shape.num_hidden_layers * (RECORDED_LAYER_SECONDS if work.recorded else LAYER_SECONDS)
    of_gpu = WHOLE_STEP * (products + attention + recurrence + elementwise + loss + dequantise) + gaps
    host = 0.0 if work.recorded else max(0.0, work.host_seconds - of_gpu)
    offload = max(0.0, _offload(work) - of_gpu)
    number = work.accumulation
    scale = number * WHOLE_STEP
    return StepTime(
        products=scale * products,
        attention=scale * attention,
        recurrence=scale * recurrence,
        elementwise=scale * elementwise,
        gaps=number * gaps,
        loss=scale * loss,
        dequantise=scale * dequantise,
        offload=number * offload,
        host=number * host,
        communication=_communication(work, rates, max(of_gpu, work.host_seconds)),
        update=_update(work, rates),
    )


def _layers_of(work: StepWork) -> tuple[tuple[float, bool], ...]:
    """Return (share of the layers, whether their forward runs again) of checkpointed layers and of the others."""
    if not work.policy.checkpointing:
        return ((1.0, False),)
    total = work.shape.num_hidden_layers
    kept = min(work.policy.not_checkpointed, total) / total
    return ((1.0 - kept, True), (kept, False))


def _products(work: StepWork, rates: GpuRates, share: float, again: bool) -> float:
    """Return the seconds of the linear layers of a share of the model's layers."""
    shape = work.shape
    head = shape.head.elements if shape.head is not None else 0
    in_layers = shape.n_matmul - head
    trained = max(0, shape.n_matmul_trainable - (head if shape.head is not None and shape.head.head_trains else 0))
    repeated = max(0, in_layers - _not_repeated(work)) if again else 0
    flops: float = (4 * in_layers - 2 * shape.n_matmul_in_front + 2 * trained + 2 * repeated) * work.tokens
    rate = _rate_of_layer(shape, rates, work.tokens)
    if work.policy.float8 != "no":
        rate *= FLOAT8_GAIN
    layer = shape.layer
    if layer is None or layer.experts is None:
        return share * flops / rate
    # the experts' products have fewer rows each
    experts = layer.experts
    of_experts = 3 * experts.chosen * experts.mlp * layer.hidden * shape.num_hidden_layers
    part = min(1.0, of_experts / max(in_layers, 1))
    rows = work.tokens * experts.chosen / experts.number
    reached = rate_at(rates.experts, math.sqrt(layer.hidden * experts.mlp), rows)
    return share * flops * (part / reached + (1 - part) / rate)


def _rate_of_layer(shape: ModelShape, rates: GpuRates, tokens: float) -> float:
    """Return FLOP/s of a layer's linear layers, each at the rate of a layer (E, 4 E) with as many weights."""
    layer = shape.layer
    rows = min(tokens, MOST_ROWS)
    most = SUSTAINED * rates.matmul
    if layer is None:
        return min(most, rate_at(rates.linear, shape.hidden_size, rows))
    hidden = layer.hidden
    sizes = [(hidden, layer.query), *[(hidden, layer.key)] * 2, (layer.query, hidden), *[(hidden, layer.dense_mlp)] * 3]
    weights = [inputs * outputs for inputs, outputs in sizes if inputs * outputs]
    seconds = sum(number / min(most, rate_at(rates.linear, math.sqrt(number) / 2, rows)) for number in weights)
    return sum(weights) / seconds if seconds else min(most, rate_at(rates.linear, hidden, rows))


def _not_repeated(work: StepWork) -> int:
    """Return the weights whose products a checkpointed layer does not run again.

    Its last product is of no use to the backward, and with offloading o_proj's output is kept.
    """
    layer = work.shape.layer
    if layer is None:
        return 0
    last = layer.hidden * layer.mlp * (layer.experts is None)
    kept = layer.query * layer.hidden * (work.policy.checkpointing == "offload")
    return work.shape.num_hidden_layers * (last + kept)


def _attention(work: StepWork, rates: GpuRates, again: bool) -> float:
    shape = work.shape
    attending = shape.num_hidden_layers - shape.linear_layers
    if not attending or not shape.attention_width:
        return 0.0
    pair = 2.0 * shape.attention_width * work.squared_lengths * attending  # FLOPs of the forward, half of each square
    runs_again = again and work.policy.checkpointing != "offload"  # which keeps attention's results
    mean_length = work.squared_lengths / max(work.tokens, 1.0)
    layer = shape.layer
    head_dim = 128 if layer is None or not layer.heads else layer.query / layer.heads
    return pair * (3.5 + runs_again) / (rates.matmul * rates.attention_share(mean_length, head_dim))


def _recurrence(work: StepWork, rates: GpuRates, again: bool) -> float:
    shape = work.shape
    if not shape.mixers or shape.mixer is None:
        return 0.0
    flops = shape.recurrence * work.tokens * shape.mixers
    # the convolution and the gated norm: forward reads and writes each channel, backward reads two and writes one
    channels = (5 + 2 * again) * shape.mixer.channels * work.itemsize * work.tokens * shape.mixers
    rule = flops * (3 + again) / (rates.matmul * rates.share("gated_delta_rule", work.tokens, 1))
    return rule + channels / (rates.copy * rates.share("causal_conv1d", work.tokens, 1))


def _elementwise(work: StepWork, rates: GpuRates, again: bool) -> float:
    shape = work.shape
    if shape.layer is None:
        return 0.0
    usual = shape.num_hidden_layers - sum(number for _, number in shape.other_layers)
    elements = usual * _elements(shape.layer, work.policy, again)
    elements += sum(number * _elements(layer, work.policy, again) for layer, number in shape.other_layers)
    share = rates.share("add_rms_norm", shape.hidden_size, 1)
    return elements * work.itemsize * work.tokens / (rates.copy * share)


def _elements(layer: LayerShape, policy: ActivationPolicy, again: bool) -> float:
    """Return the elements per token that a layer's kernels read and write besides its products."""
    runs = (1 + again, 1)  # forward, backward
    norms = 2 * layer.hidden * sum(part * run for part, run in zip(NORM, runs, strict=True))
    rotated = (layer.query + layer.key) * sum(part * run for part, run in zip(ROTATED, runs, strict=True))
    gated = layer.mlp * sum(part * run for part, run in zip(GATED, runs, strict=True))
    adapted = layer.adapter_inputs + layer.adapter_outputs + _expert_adapters(layer)
    adapters = adapted * sum(part * run for part, run in zip(ADAPTER, runs, strict=True))
    recomputed = 0.0
    if policy.recompute and not again:
        recomputed = 4 * layer.hidden * (policy.recompute != "mlps") + 3 * layer.mlp * (policy.recompute != "norms")
    return norms + rotated + gated + adapters + recomputed


def _expert_adapters(layer: LayerShape) -> int:
    """Return the widths of the inputs and outputs of adapted experts, summed over those that a token uses."""
    experts = layer.experts
    if experts is None or not experts.lora:
        return 0
    gate_and_up = layer.hidden + 2 * experts.mlp
    down = experts.mlp + layer.hidden
    return experts.chosen * (gate_and_up + down)


def _loss(work: StepWork, rates: GpuRates) -> float:
    head = work.shape.head
    if head is None or head.gives_scores:
        return 0.0
    flops = (4 + 2 * head.head_trains) * work.labels * head.elements
    return flops / (rates.matmul * rates.share("linear_cross_entropy", work.labels, 0))


def _dequantise(work: StepWork, rates: GpuRates, again: bool) -> float:
    if not work.four_bits:
        return 0.0
    return work.four_bits * FOUR_BIT_BYTES * (2 + again) / (rates.copy * rates.share("dequantize_nf4", 1.0, 0))


def _offload(work: StepWork) -> float:
    """Return the seconds of the copies of a micro-batch, to the host and back."""
    if work.shape.layer is None:
        return 0.0
    width = work.shape.hidden_size * work.policy.offloads_inputs * 3  # the layer's input, attention's and o_proj's
    width += work.shape.layer.mlp * work.policy.offloads_gates
    layers = work.shape.num_hidden_layers - work.policy.not_checkpointed
    return 2 * layers * work.tokens * width * work.itemsize / HOST_LINK_BANDWIDTH


def _communication(work: StepWork, rates: GpuRates, computed: float) -> float:
    """Return the seconds of a step's gathers and sums that the computation does not hide.

    Weights are gathered and gradients scattered in each micro-batch, among the ranks of a copy. Copies sum their
    gradients once, in the last backward. computed: seconds of a micro-batch.
    """
    ranks = work.ranks
    shards = ranks.shards
    gradients = work.states.gradients
    if ranks.world_size == 1:
        return 0.0
    exchanged = (1 + ranks.reshards) * work.states.gathered + shards * gradients if shards > 1 else 0
    of_shards = (shards - 1) / shards * exchanged / ranks.bandwidth(shards)
    # each rank sums its part of the gradients, and the ranks of a node share its network
    summed = gradients if ranks.nodes == 1 else shards * gradients
    of_copies = 2 * (ranks.copies - 1) / ranks.copies * summed / ranks.bandwidth(ranks.world_size)
    hidden = HIDDEN * computed
    hidden_sums = min(BACKWARD * hidden, max(0.0, hidden - of_shards))
    waited = work.accumulation * max(0.0, of_shards - hidden) + max(0.0, of_copies - hidden_sums)
    # FSDP2 copies what it exchanges, and DDP each gradient into its bucket: one read and one write
    copied = work.accumulation * exchanged if shards > 1 else gradients
    return waited + 2 * copied / rates.copy


def _update(work: StepWork, rates: GpuRates) -> float:
    """Return the seconds of clipping, of the optimizer, and of adding gradients of further micro-batches."""
    states = work.states
    bytes_of_step = 4 * states.gradients + 2 * states.trained + 2 * states.optimizer
    added = 3 * (work.accumulation - 1) * states.gradients
    return bytes_of_step / rates.optimizer + added / rates.copy
