"""The plan: every decision of a run, resolved once, as values. It is printed and stored with each checkpoint."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ligertune.errors import format_bytes, plural
from ligertune.files.base_model import CarriedTensors, TrainedBase
from ligertune.hardware import Machine
from ligertune.planning.batch_layout import Batching, BatchShape, DataSummary, Rows
from ligertune.planning.memory.estimate import MemoryEstimate, MemoryPeak
from ligertune.planning.memory.model_shape import FrozenModelShape, ModelShape
from ligertune.planning.memory.states import SHARDED_WEIGHTS, StateBytes, Strategy, shards_of
from ligertune.planning.optimization import Cadence, Optimizer, TrainSchedule
from ligertune.planning.options import RunOptions
from ligertune.planning.precision import Dtype, Precision
from ligertune.planning.time.step_time import PredictedTime
from ligertune.recipe.document import leaf
from ligertune.recipe.plain_yaml import dump

# Kernels that compute a loss in the output head, so that the logits are never stored.
LOSS_KERNELS = ("linear_cross_entropy", "multi_head_linear_cross_entropy", "linear_jsd", "linear_log_probs")


@dataclass(frozen=True)
class KernelLine:
    """One kernel on this model: how many modules run it, how many do not, and why."""

    kernel: str
    applied: int
    left: int
    note: str


@dataclass(frozen=True)
class BuiltModel:
    """The model of a run without its weights: sizes, attention, and what our kernels patch."""

    shape: ModelShape
    attn_implementation: str
    attn_why: str
    kernels_backend: str
    kernels: tuple[KernelLine, ...]
    frozen_model: FrozenModelShape | None = None  # a teacher or a reference, if the run holds one
    notes: tuple[str, ...] = ()
    carried: CarriedTensors | None = None  # None: the base's files are not on this machine yet

    @property
    def applied_kernels(self) -> set[str]:
        return {line.kernel for line in self.kernels if line.applied}


@dataclass(frozen=True)
class TriedSettings:
    """Values in place of `auto` that fit on the device, with the predicted time and memory of a step."""

    values: dict[str, Any]  # by key
    seconds: float
    peak: int  # bytes

    def __str__(self) -> str:
        values = ", ".join(f"{leaf(key)}: {str(value).lower()}" for key, value in self.values.items())
        return f"{values} ({self.seconds:.3g} s a step, {format_bytes(self.peak)})"


@dataclass(frozen=True)
class TeacherPlan:
    """A second, frozen model. attn_implementation: for packed rows; None lets transformers choose."""

    name: str
    dtype: Dtype
    shape: FrozenModelShape
    n_parameters: int
    notes: tuple[str, ...] = ()
    attn_implementation: str | None = None
    multiple_of: int = 1  # tokens of a batch, as its attention needs them


# plan.json leaves out the options, which resolved_recipe.yaml holds, and keeps the key that `memory` had before.
NOT_IN_JSON = {*(field.name for field in dataclasses.fields(RunOptions)), "settings", "num_train_epochs"}
JSON_KEYS = {"memory": "budget"}


@dataclass(frozen=True, repr=False)
class Plan(RunOptions):
    """Every decision of a run. `make_plan` returns it."""

    settings: dict[str, Any]  # the recipe as plain JSON values, for trackers
    num_train_epochs: float | None  # None if max_steps ends the run
    machine: Machine
    strategy: Strategy
    strategy_why: str
    precision: Precision
    attn_implementation: str
    attn_why: str
    model_family: str
    context: int | None  # max_position_embeddings
    n_parameters: int
    n_trainable: int
    bytes: StateBytes
    memory: MemoryEstimate | None  # None if the model's layers are not understood
    kernels_backend: str
    kernels: tuple[KernelLine, ...]
    batching: Batching
    largest_batch: BatchShape  # of the run, on one device
    tile: int  # tokens per tile of tiled layers (train.tiled_mlp); 0: they are not tiled
    rows: Rows
    schedule: TrainSchedule
    optimizer: Optimizer
    data: DataSummary
    save: Cadence
    evaluate: Cadence
    notes: tuple[str, ...]
    time: PredictedTime | None = None  # of a step; None where it is not predicted
    settings_tried: tuple[TriedSettings, ...] = ()  # in place of `auto`, the chosen ones first; none: nothing was open
    teacher: TeacherPlan | None = None
    n_active: int | None = None  # parameters that one token uses, of a mixture of experts; None: all
    base: TrainedBase | None = None  # None before the model is loaded
    carried: CarriedTensors | None = None  # None: the base's files are not on this machine yet

    @cached_property
    def recipe_text(self) -> str:
        """The recipe as YAML with every default. Files and the report of a run hold it."""
        return _recipe_text(json.dumps(self.settings))

    @property
    def output_dir(self) -> Path:
        return Path(self.checkpoint.output_dir)

    @property
    def shares_weights(self) -> bool:
        """Whether each process holds a part of the model's weights only."""
        return self.strategy in SHARDED_WEIGHTS

    @property
    def shards(self) -> int:
        """Number of parts into which each copy of the model states is cut."""
        return shards_of(self.parallel.dp_replicate_size, self.strategy, self.batching.world_size)

    @property
    def row_length(self) -> int:
        """Token slots of the longest row."""
        return self.rows.longest_row(self.data.longest)

    @property
    def sequence_length(self) -> int:
        """Token slots of the longest row for each sequence of an example: a pair has two."""
        return self.row_length // self.rows.documents

    @property
    def peak(self) -> MemoryPeak | None:
        """Predicted peak memory of a step on one device; None if no memory is predicted."""
        if self.memory is None:
            return None
        accumulates = self.batching.accumulation > 1
        memory = self.machine.memory_bytes
        batch = self.largest_batch
        return self.memory.peak(
            batch.rows, batch.row_length, accumulates=accumulates, memory=memory, labels=batch.labels
        )

    @property
    def checkpointed_layers(self) -> int | None:
        """Number of checkpointed layers if it is not all; None otherwise."""
        if self.memory is None or not self.memory.policy.checkpointing or not self.memory.policy.not_checkpointed:
            return None
        return self.memory.layers - self.memory.policy.not_checkpointed

    @property
    def choice(self) -> dict[str, str]:
        """What was chosen in place of `auto`, and the next best settings, as words."""
        return dict(zip(("chosen", "next best"), map(str, self.settings_tried), strict=False))

    @property
    def loss_in_head(self) -> bool:
        """Whether a fused loss runs in the output head. Batches then carry an index of the labelled rows."""
        return any(line.kernel in LOSS_KERNELS and line.applied for line in self.kernels)

    def due(self, cadence: Cadence, step: int) -> bool:
        """Whether `cadence` is due after `step` steps of this run."""
        return cadence.due(step, rows_per_epoch=self.rows.count, global_batch_size=self.batching.global_batch_size)

    def times(self, cadence: Cadence) -> int:
        """Return how often `cadence` is due in this run."""
        total = self.schedule.total_steps
        rows_per_step = {"steps": 1, "epoch": self.batching.global_batch_size, "no": 0}[cadence.strategy]
        return total * rows_per_step // (self.rows.count if cadence.strategy == "epoch" else cadence.every)

    def __str__(self) -> str:
        """Return the plan in a few lines; `as_dict` has all of it."""
        batching = self.batching
        peak = "not predicted" if self.peak is None else f"{format_bytes(self.peak.total)} on each device"
        lines = [
            f"{self.model_family}, {self.n_parameters:,} parameters, {self.n_trainable:,} trained",
            f"{self.machine.name} x {batching.world_size}, {self.strategy}, {self.precision.weights}",
            f"{plural(self.data.examples, self.rows.example_noun)}, {self.data.tokens:,} tokens",
            f"{plural(self.schedule.total_steps, 'step')} of {plural(batching.global_batch_size, 'row')}",
            f"peak memory {peak}",
            *([f"{self.time.total:.3g} s a step, predicted"] if self.time is not None else []),
            f"output {self.output_dir}",
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__  # what a notebook or a Python prompt shows

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain values for plan.json."""
        values = dataclasses.asdict(self).items()
        plain = {JSON_KEYS.get(name, name): value for name, value in values if name not in NOT_IN_JSON}
        plain["batching"]["global_batch_size"] = self.batching.global_batch_size
        plain["peak"] = self.peak and {**self.peak.parts(), "total": self.peak.total, "at": self.peak.phase.name}
        return plain


@lru_cache(maxsize=4)
def _recipe_text(settings: str) -> str:
    """Return a recipe as YAML. settings: as JSON. Files and report of a run ask for the same text several times."""
    return dump(json.loads(settings))
