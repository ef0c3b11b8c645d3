"""Memory estimate: predicted peak of a training step on one device, and whether a micro-batch fits.

Heads on top of the model (AddedHeadsShape): K heads of L residual blocks on M labelled rows save K (2 L - 1) M E
elements in their blocks and read M E. The loss of heads that share the output head holds their hidden states and the
gradients of those: 2 K M E. Heads with their own output weight are computed one after the other.

A frozen model next to the trained one (a teacher or a reference) adds its weights to every phase, and one phase: its
forward, which comes first, when no activations exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ligertune.planning.memory.activation_bytes import (
    CUDA_CONTEXT,
    ActivationPolicy,
    LayerStack,
    MicroBatch,
    StepBytes,
    StepPhase,
    chunked_loss_bytes,
    divergence_bytes,
    loss_workspace,
    result_bytes,
    step_phases,
)
from ligertune.planning.memory.layer_bytes import float8_copies
from ligertune.planning.memory.model_shape import (
    AddedHeadsShape,
    AddedLayerBytes,
    FrozenModelShape,
    HeadShape,
    LayerShape,
    ModelShape,
    TowerShape,
)
from ligertune.planning.memory.states import StateBytes
from ligertune.planning.memory.tiled_bytes import tiled_phases

# Share of allocated memory that torch's allocator loses to fragmentation.
FRAGMENTATION = 0.04
# With some layers checkpointed: a step of Qwen3.5-4B that allocates 74.7 GiB ran out of 80 on an H200, and one of
# Llama-3.2-1B that allocates 22.2 ran in 24.
FRAGMENTATION_IN_PART = 0.06
# Share of the peak that is not counted, such as temporaries of small kernels and the allocator's rounding. Without it
# the lowest prediction of 114 steps of `scripts/bench choice` on an H200 was 0.4 % too low.
UNCOUNTED = 0.004
# With a gated delta rule: without it the lowest prediction of 23 steps of Qwen3.5-4B was 0.7 % too low.
UNCOUNTED_WITH_MIXERS = 0.008
UNCOUNTED_SHARDED = 0.005  # under FSDP2, whose buffers are not all counted; from 3 runs on two H200
# A token slot of a packed batch on the device: ids, labels, positions, rows with labels (int64), documents (two int32).
INPUT_BYTES = 40

# Bytes for each element of a weight while its initial adapter is computed: copies in float32 and float64, and the
# singular vectors. The sum of the tensors that exist together, and not measured: a library's own workspace is extra.
INITIAL_BYTES = 24


def uncounted(shards: int, mixers: int) -> float:
    """Return the share of a GPU's peak that no formula counts. shards: ranks that share the weights."""
    of_model = UNCOUNTED_WITH_MIXERS if mixers else UNCOUNTED
    return of_model if shards == 1 else max(of_model, UNCOUNTED_SHARDED)


@dataclass(frozen=True)
class MemoryEstimate:
    """All sizes that determine the memory of a step."""

    states: StateBytes
    layer: LayerShape
    head: HeadShape
    policy: ActivationPolicy
    layers: int
    itemsize: int
    labelled: float  # share of a batch's token slots that have a label
    workspace: int = 0
    # of it, what the loss does not have: a recorded step has a dequantised weight only while its product is computed
    recorded_buffer: int = 0
    input_copies: int = 1  # of a batch on the device
    optim_in_backward: bool = False
    tower: TowerShape | None = None
    image_share: float = 0.0  # largest share of a row's slots that are image tokens
    shards: int = 1  # ranks that share the states; FSDP2 gathers one layer at a time
    reshards: bool = True  # FSDP2 frees a layer's gathered weights after its forward
    keeps_gradients: bool = False  # between steps: DDP's buckets. Micro-batches accumulate outside of them.
    cp_size: int = 1  # ranks that share a row
    longest_document: int = 0
    cpu_offload: bool = False  # the states are in host memory; the device holds what FSDP2 gathers
    in_front: int = 0  # first layers without a backward, which save nothing
    heads: AddedHeadsShape | None = None
    frozen_model: FrozenModelShape | None = None
    other_layers: tuple[tuple[LayerShape, int], ...] = ()  # with a backward, those unlike `layer`; how many
    loss_chunk: int = 0  # tokens whose logits a loss in plain torch makes at a time; 0: a kernel computes the loss
    uncounted: float = 0.0  # share of the peak
    loading: int = 0  # temporaries before the first step, while initial adapters are made from the weights

    @property
    def has_mixers(self) -> bool:
        """Whether any layer has a recurrence."""
        layers = (self.layer, *(layer for layer, _ in self.other_layers))
        return any(layer.mixer is not None for layer in layers)

    def peak(
        self, rows: int, row_length: int, *, accumulates: bool, memory: int | None = None, labels: int | None = None
    ) -> MemoryPeak:
        """Return the phase with the most memory of a micro-batch (rows, row_length).

        memory: bytes of the device; the loss uses what is free of them. labels: number of labels in the micro-batch;
        None: the share of labels in the data decides.
        """
        weights, optimizer = (0, 0) if self.cpu_offload else (self.states.weights, self.states.optimizer)
        weights += self.float8_copies
        slots = rows * row_length
        buckets = self.states.gradients if self.keeps_gradients and accumulates else 0
        accumulates = accumulates or self.keeps_gradients
        phases = self._phases(slots, row_length, accumulates=accumulates, memory=memory, labels=labels)
        phases = (*phases, StepPhase("loading", 0, 0, 0, self.loading))
        phases = tuple(replace(phase, gradients=phase.gradients + buckets) for phase in phases)
        frozen = 0 if self.frozen_model is None else self.frozen_model.weights
        found = MemoryPeak(weights, optimizer, max(phases, key=lambda phase: phase.total), frozen)
        working = found.phase.working + round(self.uncounted * found.total)
        return replace(found, phase=replace(found.phase, working=working))

    def _phases(
        self, slots: int, row_length: int, *, accumulates: bool, memory: int | None, labels: int | None = None
    ) -> tuple[StepPhase, ...]:
        tokens = -(-slots // self.cp_size)
        labels = round(tokens * self.labelled) if labels is None else min(labels, tokens)
        keys = self.visible_keys(tokens)
        # at most one slot of a row has no label; the share is rounded
        full_rows = (1 - self.labelled) * row_length < 1.001
        batch = MicroBatch(tokens, max(1, labels), row_length, accumulates, full_rows)
        inputs = INPUT_BYTES * tokens * self.input_copies
        step = self._step_bytes(self.workspace + inputs + self.gathered_keys_bytes(slots, keys), memory)
        if self.heads is not None and not self.heads.joint:
            return self.frozen_model_phases(self.heads, batch, step)
        image_tokens = tokens * self.image_share
        tower = tower_bytes(self.tower, image_tokens, self.policy, self.itemsize) if self.tower else 0
        layers = self.layers_with_backward
        stack = LayerStack(
            layers,
            tower=tower,
            weights=self.layer_weights() if self.shards > 1 else 0,
            shards=self.shards,
            stay_gathered=0 if self.reshards else self.layers,
            others=self.other_layers,
        )
        if self.policy.tile:
            phases = tiled_phases(self.layer, self.head, self.policy, batch, step, stack)
        else:
            policy = replace(self.policy, keys_per_token=keys / tokens)
            phases = step_phases(self.layer, self.head, policy, batch, step, stack)
        if self.frozen_model is not None:
            return self._with_frozen_model(self.frozen_model, phases, batch, step)
        if self.heads is None and not (self.loss_chunk and self.policy.fused_loss):
            return phases
        if self.heads is None:
            held = 0
            loss = chunked_loss_bytes(self.head, batch, step.itemsize, self.loss_chunk)
        else:
            held, loss = self._heads_loss(self.heads, batch, step.free)
        return tuple(
            replace(phase, activations=phase.activations + held, loss=loss) if phase.name == "loss" else phase
            for phase in phases
        )

    def frozen_model_phases(self, heads: AddedHeadsShape, batch: MicroBatch, step: StepBytes) -> tuple[StepPhase, ...]:
        """Return the phases of a step that trains heads on a frozen model."""
        layer = self.layer
        row = self.head.hidden * step.itemsize
        hidden_states = batch.tokens * row
        before = step.gradients if batch.accumulates else 0
        # widest point of a frozen layer: its input, attention's output, their sum, that normed; gate, up, their product
        elements = 4 * layer.hidden + (3 + (not self.policy.fused_mlp)) * layer.mlp
        own = heads.layer_bytes(batch.tokens, batch.labels, step.itemsize)
        if own is None:
            held, loss = self._heads_loss(heads, batch, step.free)
            own = AddedLayerBytes(0, held, loss, backward=2 * heads.number * batch.labels * row)
        widest = batch.tokens * elements * step.itemsize
        if self.shards > 1:
            return self._sharded_heads_phases(own, batch, step, widest)
        kept = hidden_states + own.held
        return (
            StepPhase("frozen model", own.captured, before, 0, widest + step.workspace),
            StepPhase("loss", kept, before, own.loss, step.workspace),
            StepPhase("backward", kept, step.gradients, own.backward, step.workspace),
            StepPhase("step", 0, step.gradients, 0, step.workspace + step.optimizer_step),
        )

    def _sharded_heads_phases(
        self, own: AddedLayerBytes, batch: MicroBatch, step: StepBytes, widest: int
    ) -> tuple[StepPhase, ...]:
        """Return the phases of `frozen_model_phases` under FSDP2. widest: bytes of a layer's widest point.

        Embedding, output head and added heads are gathered together, before the first layer and again before the
        backward. Each gather has a buffer as large as what it gathers, which lives until the next one.
        """
        hidden_states = batch.tokens * self.head.hidden * step.itemsize
        before = step.gradients if batch.accumulates else 0
        whole_gradients = self.states.trained * self.shards
        layer = self.layer_weights()
        root = self.states.gathered - self.layers * layer
        stay = 0 if self.reshards else self.layers * layer
        held = hidden_states + own.held
        return (
            StepPhase("gather", 0, before, 0, step.workspace + 2 * (root + layer)),
            StepPhase("frozen model", own.captured, before, 0, step.workspace + widest + root + 2 * layer + stay),
            StepPhase("loss", held, before, own.loss, step.workspace + root + layer + stay),
            StepPhase("gather again", held, before, 0, step.workspace + root * (1 + self.reshards) + stay),
            StepPhase("backward", held, before + whole_gradients, own.backward, step.workspace + root + stay),
            # the copy that is reduced and scattered
            StepPhase("gradients", 0, step.gradients + whole_gradients, 0, step.workspace + whole_gradients),
            StepPhase("step", 0, step.gradients, 0, step.workspace + step.optimizer_step),
        )

    def _with_frozen_model(
        self, frozen: FrozenModelShape, phases: tuple[StepPhase, ...], batch: MicroBatch, step: StepBytes
    ) -> tuple[StepPhase, ...]:
        """Return the phases with the forward of the frozen model, and with the loss that reads its hidden states."""
        working = batch.tokens * frozen.widest * frozen.itemsize + step.workspace
        forward = StepPhase("frozen model", 0, step.gradients if batch.accumulates else 0, 0, working)
        if not frozen.gives_hidden_states:
            return (forward, *phases)
        loss = divergence_bytes(self.head, frozen, self.policy, batch, step.itemsize)
        return (forward, *(replace(phase, loss=loss) if phase.name == "loss" else phase for phase in phases))

    def _heads_loss(self, heads: AddedHeadsShape, batch: MicroBatch, free: int | None) -> tuple[int, int]:
        """Return (bytes that the heads' blocks read and save, additional peak bytes of the loss)."""
        head = self.head
        itemsize = self.itemsize
        row = batch.labels * head.hidden * itemsize
        number = heads.number + heads.joint
        blocks = row + heads.number * (2 * heads.blocks - 1) * row
        if not heads.own_projection:
            needs_dw = head.head_trains
            workspace = loss_workspace(number * batch.labels, head, itemsize, needs_dw=needs_dw, free=free)
            return blocks, 2 * number * row + workspace + needs_dw * head.elements * itemsize
        workspace = loss_workspace(batch.labels, head, itemsize, needs_dw=True, free=free)
        gradients = number * (row + head.elements * itemsize)  # the gradients of all heads exist until the backward
        return blocks + heads.number * row, gradients + workspace

    def _step_bytes(self, workspace: int, memory: int | None) -> StepBytes:
        always = 0 if self.cpu_offload else self.states.weights + self.states.optimizer
        always += self.float8_copies
        always += 0 if self.frozen_model is None else self.frozen_model.weights
        gradients = 0 if self.optim_in_backward or self.cpu_offload else self.states.gradients
        return StepBytes(
            itemsize=self.itemsize,
            gradients=gradients,
            optimizer_step=0 if self.cpu_offload else self.states.step,
            workspace=workspace,
            # the first step is not recorded, and has no optimizer states yet
            recorded_buffer=min(self.recorded_buffer, self.states.optimizer),
            free=None if memory is None else max(0, memory - CUDA_CONTEXT - always - gradients),
            in_backward=self.optim_in_backward,
        )

    @property
    def float8_copies(self) -> int:
        """Bytes of the float8 copies of all layers' weights."""
        kind = self.policy.float8
        usual = self.layers - sum(number for _, number in self.other_layers)
        others = sum(number * float8_copies(layer, kind) for layer, number in self.other_layers)
        return usual * float8_copies(self.layer, kind) + others

    @property
    def layers_with_backward(self) -> int:
        """Layers that save tensors; at least 1, since a frozen layer needs as much while it computes."""
        return max(1, self.layers - self.in_front)

    def visible_keys(self, tokens: int) -> int:
        """Return the most keys that a rank's tokens attend to. Context parallel gives each rank two pieces of a row."""
        if self.cp_size == 1:
            return tokens
        return min(round(tokens * (self.cp_size + 0.5)), tokens + 2 * self.longest_document)

    def gathered_keys_bytes(self, slots: int, keys: int) -> int:
        """Return the bytes of keys and values (or their gradients) that context parallel gathers for one layer."""
        return 0 if self.cp_size == 1 else 2 * self.layer.key * (slots + keys) * self.itemsize

    def fits(self, rows: int, row_length: int, *, accumulates: bool, memory: int, labels: int | None = None) -> bool:
        """Whether a device with `memory` bytes has room for a step."""
        peak = self.peak(rows, row_length, accumulates=accumulates, memory=memory, labels=labels)
        in_part = 0 < self.policy.not_checkpointed < self.layers
        lost = FRAGMENTATION_IN_PART if in_part else FRAGMENTATION
        return peak.total * (1 + lost) + CUDA_CONTEXT <= memory

    def layer_weights(self) -> int:
        """Return the bytes of one layer's gathered weights. Layers of a tower count as layers."""
        ends = self.head.elements * self.itemsize * self.head.weights
        if self.heads is not None and not self.heads.joint:
            ends += self.states.trained * self.shards  # the added heads are gathered with them
        layers = self.layers + (self.tower.layers if self.tower else 0)
        return max(0, self.states.gathered - ends) // layers

    def without_checkpointing(self) -> MemoryEstimate:
        return replace(self.untiled(), policy=self.policy.without_checkpointing())

    def tiled(self, tile: int) -> MemoryEstimate:
        """Return the estimate with all layers checkpointed and tiled, `tile` tokens at a time."""
        return replace(self, policy=replace(self.policy, tile=tile, not_checkpointed=0))

    def untiled(self) -> MemoryEstimate:
        """Return the estimate without tiles."""
        return replace(self, policy=replace(self.policy, tile=0)) if self.policy.tile else self

    def checkpointed(self, how: bool | str) -> MemoryEstimate:
        """Return the estimate with all layers checkpointed in this way, and without tiles."""
        policy = replace(self.policy, checkpointing=how, not_checkpointed=0, recompute=False, tile=0)
        return replace(self.untiled(), policy=policy)

    def with_checkpointing(self, *, not_checkpointed: int = 0) -> MemoryEstimate:
        """Return the estimate with all layers checkpointed but the last `not_checkpointed`."""
        how = self.policy.checkpointing or True
        return replace(self, policy=replace(self.policy, checkpointing=how, not_checkpointed=not_checkpointed))

    def host_bytes(self, rows: int, row_length: int) -> int:
        """Return the bytes of a micro-batch that checkpointing must offload to host memory, per process."""
        tokens = -(-rows * row_length // self.cp_size)
        if self.heads is not None and not self.heads.joint:
            return 0  # the frozen model has no graph
        width = self.layer.hidden * self.policy.offloads_inputs
        width += self.layer.mlp * (self.policy.offloads_gates and self.layer.experts is None)
        return max(0, self.layers_with_backward - self.policy.not_checkpointed) * tokens * width * self.itemsize

    def host_notes(self, rows: int, row_length: int) -> tuple[str, ...]:
        """Return a note about offloaded activations, if there are any."""
        size = self.host_bytes(rows, row_length)
        how = self.policy.checkpointing
        what = {"offload": "inputs", "offload_gate": "gates"}.get(str(how), "inputs and gates")
        note = f"each process offloads the layers' {what} to {size / 2**30:.2f} GiB of pinned host memory"
        results = size // self.layer.hidden * result_bytes(self.layer, self.policy, 1)
        if results:
            note += (
                f", and attention's results to {results / 2**30:.2f} GiB more, or to a quarter of the free memory if "
                "that is less"
            )
        return (f"train.gradient_checkpointing: {how}: {note}",) if size else ()


@dataclass(frozen=True)
class MemoryPeak:
    """Bytes allocated in the phase of a step that needs the most."""

    weights: int
    optimizer: int
    phase: StepPhase
    frozen_model: int = 0  # weights of a teacher or a reference

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.frozen_model + self.phase.total

    def parts(self) -> dict[str, int]:
        """Return the bytes by kind. They add up to `total`."""
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "frozen_model": self.frozen_model,
            "gradients": self.phase.gradients,
            "activations": self.phase.activations,
            "loss": self.phase.loss,
            "working": self.phase.working,
        }


def tower_bytes(tower: TowerShape, image_tokens: float, policy: ActivationPolicy, itemsize: int) -> int:
    """Return the bytes that tower and projector save for the files of a micro-batch."""
    projector = math.ceil(image_tokens) * tower.projector * itemsize
    if not tower.trains or policy.offloads_inputs:
        return projector
    patches = math.ceil(image_tokens * tower.patches_per_token)
    return projector + tower.layers * patches * (tower.hidden if policy.checkpointing else tower.kept) * itemsize


def largest(fits: Callable[[int], bool], *, limit: int) -> int:
    """Return the largest n in 1..limit for which `fits(n)` holds, or 0. `fits` must be monotonic."""
    if not fits(1):
        return 0
    low = 1
    high = 2
    while high <= limit and fits(high):
        low = high
        high = high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def initial_adapter_bytes(shape: ModelShape) -> int:
    """Return the bytes that the largest weight takes while an initial adapter is made from it."""
    linear = (kind.elements for kind, _ in shape.parameters if kind.linear and kind.inside and not kind.adapter)
    return INITIAL_BYTES * max(linear, default=0)
