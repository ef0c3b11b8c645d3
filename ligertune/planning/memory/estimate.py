"""The memory plan: the predicted peak of a run on one device, by kind, and the largest batch or row that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ligertune.planning.memory.activation_bytes import (
    CONTEXT,
    Batch,
    HeadShape,
    Kept,
    LayerShape,
    Moment,
    TowerShape,
    moments,
)
from ligertune.planning.memory.heads_bytes import Heads, alone, beside
from ligertune.planning.memory.states import StateBytes

# Of a device's memory: blocks that do not fit together again leave holes between them.
FRAGMENTS = 0.04


@dataclass(frozen=True)
class Budget:
    """All that decides a step's memory. `labelled`: share of a batch's slots that have a label."""

    states: StateBytes
    layer: LayerShape
    head: HeadShape
    kept: Kept
    layers: int
    itemsize: int
    step_bytes: int
    labelled: float
    workspace: int = 0
    in_backward: bool = False
    tower: TowerShape | None = None
    image_share: float = 0.0  # of a row's slots, at most, those that stand for pictures
    shards: int = 1  # ranks that share the states, of which FSDP2 gathers a layer's when it computes
    cp_size: int = 1  # ranks that share a row
    longest: int = 0  # document
    offloaded: bool = False  # the states are in host memory, and the device has what is gathered of them
    in_front: int = 0  # first layers that no gradient goes back through, and which keep nothing
    heads: Heads | None = None  # Medusa's

    def peak(self, micro_batch_size: int, row_length: int, *, accumulates: bool, memory: int | None = None) -> Peak:
        """The highest moment of a step with this micro batch. memory: the device's, which the loss may make use of."""
        slots = micro_batch_size * row_length
        tokens = -(-slots // self.cp_size)
        keys = self.keys_of(tokens)
        batch = Batch(tokens, max(1, round(tokens * self.labelled)), row_length, accumulates)
        always = 0 if self.offloaded else self.states.weights + self.states.optimizer
        gradients = 0 if self.in_backward or self.offloaded else self.states.gradients
        shared = {
            "itemsize": self.itemsize,
            "gradients": gradients,
            "step_bytes": 0 if self.offloaded else self.step_bytes,
            "workspace": self.workspace + self.gathered_bytes(slots, keys),
            "free": None if memory is None else max(0, memory - CONTEXT - always - gradients),
        }
        if self.heads is not None and not self.heads.beside_model:
            found = alone(self.heads, self.layer, self.head, self.kept, batch, **shared)
        else:
            found = moments(
                self.layer,
                self.head,
                replace(self.kept, keys=keys / tokens),
                batch,
                **shared,
                layers=self.layers_of_graph,
                tower=self.tower.held_bytes(tokens * self.image_share, self.kept, self.itemsize) if self.tower else 0,
                unit=self.layer_weights() if self.shards > 1 else 0,
                shards=self.shards,
            )
        if self.heads is not None and self.heads.beside_model:
            found = beside(self.heads, self.head, batch, found, itemsize=self.itemsize, free=shared["free"])
        weights, optimizer = (0, 0) if self.offloaded else (self.states.weights, self.states.optimizer)
        return Peak(weights, optimizer, max(found, key=lambda moment: moment.total))

    @property
    def layers_of_graph(self) -> int:
        """Those that keep something for the backward; of one that keeps nothing as much is there when it computes."""
        return max(1, self.layers - self.in_front)

    def keys_of(self, tokens: int) -> int:
        """How many keys a rank's tokens see at most: of its two pieces, the documents' tokens before each, too."""
        if self.cp_size == 1:
            return tokens
        return min(round(tokens * (self.cp_size + 0.5)), tokens + 2 * self.longest)

    def gathered_bytes(self, slots: int, keys: int) -> int:
        """What a layer has of others' keys and values for a moment, or of their gradients: all, and those it sees."""
        return 0 if self.cp_size == 1 else 2 * self.layer.key * (slots + keys) * self.itemsize

    def fits(self, micro_batch_size: int, row_length: int, *, accumulates: bool, memory: int) -> bool:
        """Whether a device with `memory` bytes has room for it."""
        peak = self.peak(micro_batch_size, row_length, accumulates=accumulates, memory=memory)
        return peak.total * (1 + FRAGMENTS) + CONTEXT <= memory

    def layer_weights(self) -> int:
        """Bytes of one layer's weights on all ranks; where a tower is beside the layers, it counts among them."""
        ends = self.head.elements * self.itemsize * (1 if self.head.tied else 2)
        return max(0, self.states.weights * self.shards - ends) // (
            self.layers + (self.tower.layers if self.tower else 0)
        )

    def without_checkpointing(self) -> Budget:
        return replace(self, kept=self.kept.without_checkpointing())

    def with_checkpointing(self) -> Budget:
        """Of every layer."""
        return replace(self, kept=replace(self.kept, checkpointing=self.kept.checkpointing or True, not_checkpointed=0))

    def host_bytes(self, micro_batch_size: int, row_length: int) -> int:
        """What checkpointing leaves in the host's memory of a micro batch, for each process."""
        tokens = -(-micro_batch_size * row_length // self.cp_size)
        if self.heads is not None and not self.heads.beside_model:
            return 0  # the model has no graph
        width = self.layer.hidden * self.kept.inputs_wait
        width += self.layer.mlp * (self.kept.gates_wait and not self.layer.routed)
        return max(0, self.layers_of_graph - self.kept.not_checkpointed) * tokens * width * self.itemsize

    def host_notes(self, micro_batch_size: int, row_length: int) -> tuple[str, ...]:
        """That in words, if it is anything."""
        taken, what = self.host_bytes(micro_batch_size, row_length), self.kept.checkpointing
        waiting = {"offload": "inputs", "offload_gate": "gates"}.get(what, "inputs and gates")
        said = f"the layers' {waiting} wait in {taken / 2**30:.2f} GiB of pinned host memory for each process"
        return (f"train.gradient_checkpointing: {what}: {said}",) if taken else ()


@dataclass(frozen=True)
class Peak:
    """Bytes allocated at the highest moment of a step."""

    weights: int
    optimizer: int
    moment: Moment

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.moment.total

    def parts(self) -> dict[str, int]:
        """By kind; they add up to the total."""
        return {
            "weights": self.weights,
            "optimizer": self.optimizer,
            "gradients": self.moment.gradients,
            "activations": self.moment.activations,
            "loss": self.moment.loss,
            "working": self.moment.working,
        }


def largest(fits: Callable[[int], bool], *, limit: int) -> int:
    """The largest n from 1 to `limit` of which `fits(n)` holds, which holds of all smaller ones too; 0 if of none."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
