"""The plan: every decision of a run, resolved once, as values. It is printed and stored with each checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.batch_layout import Rows
from ligertune.planning.memory.activation_bytes import CUBLAS_WORKSPACE, ActivationPolicy
from ligertune.planning.memory.activation_policy import checkpointing_notes, choose_policy, with_checkpointed_layers
from ligertune.planning.memory.estimate import MemoryEstimate, Peak
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.planning.memory.states import SHARDED_WEIGHTS, StateBytes, Strategy, shards_of, states_of
from ligertune.planning.micro_batch import Batching, choose_batching
from ligertune.planning.optimization import Cadence, Optimizer, Schedule, make_optimizer, make_schedule
from ligertune.planning.options import (
    BuildOptions,
    CheckpointOptions,
    DataOptions,
    EvaluationOptions,
    LoggingOptions,
    MeasurementOptions,
    ParallelOptions,
    RunOptions,
)
from ligertune.planning.parallelism import (
    DeviceNeed,
    check_image_accumulation,
    check_strategy,
    choose_strategy,
    unsharded_need,
)
from ligertune.planning.precision import Precision, choose_precision, float8_notes
from ligertune.recipe import Recipe


@dataclass(frozen=True)
class DataSummary:
    """Totals of the prepared data sets."""

    examples: int
    eval_examples: int
    tokens: int
    trained_tokens: int
    longest: int
    dropped: dict[str, int]
    truncated: int
    template: str
    fingerprint: str
    image_share: float = 0.0  # share of image tokens in the example that has the largest


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

    @property
    def applied_kernels(self) -> set[str]:
        return {line.kernel for line in self.kernels if line.applied}


@dataclass(frozen=True)
class Resources:
    """How a run uses its devices: strategy, model states, memory estimate and batch sizes."""

    strategy: Strategy
    strategy_why: str
    bytes: StateBytes
    memory: MemoryEstimate | None
    batching: Batching


# plan.json leaves out the options, which resolved_recipe.yaml holds, and keeps the key that `memory` had before.
NOT_IN_JSON = (
    "build", "data_options", "parallel", "checkpoint", "evaluation", "logging", "measurement", "settings",
    "num_train_epochs",
)  # fmt: skip
JSON_KEYS = {"memory": "budget"}


@dataclass(frozen=True)
class Plan:
    """Every decision of a run. `make_plan` returns it."""

    build: BuildOptions
    data_options: DataOptions
    parallel: ParallelOptions
    checkpoint: CheckpointOptions
    evaluation: EvaluationOptions
    logging: LoggingOptions
    measurement: MeasurementOptions
    settings: dict[str, Any]  # the recipe as plain JSON values, for trackers
    num_train_epochs: float | None  # None if max_steps ends the run
    machine: Machine
    strategy: Strategy
    strategy_why: str
    precision: Precision
    attn_implementation: str
    attn_why: str
    model_family: str
    n_parameters: int
    n_trainable: int
    bytes: StateBytes
    memory: MemoryEstimate | None  # None if the model's layers are not understood
    kernels_backend: str
    kernels: tuple[KernelLine, ...]
    batching: Batching
    rows: Rows
    schedule: Schedule
    optimizer: Optimizer
    data: DataSummary
    save: Cadence
    evaluate: Cadence
    notes: tuple[str, ...]

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
    def peak(self) -> Peak | None:
        """Predicted peak memory of a step on one device; None if no memory is predicted."""
        if self.memory is None:
            return None
        accumulates, memory = self.batching.accumulation > 1, self.machine.memory_bytes
        micro = self.batching.micro_batch_size
        return self.memory.peak(micro, self.row_length, accumulates=accumulates, memory=memory)

    @property
    def checkpointed_layers(self) -> int | None:
        """Number of checkpointed layers if it is not all; None otherwise."""
        if self.memory is None or not self.memory.policy.checkpointing or not self.memory.policy.not_checkpointed:
            return None
        return self.memory.layers - self.memory.policy.not_checkpointed

    @property
    def loss_in_head(self) -> bool:
        """Whether a fused loss runs in the output head. Batches then carry an index of the labelled rows."""
        return any(line.kernel.endswith("linear_cross_entropy") and line.applied for line in self.kernels)

    def due(self, cadence: Cadence, step: int) -> bool:
        """Whether `cadence` is due after `step` steps of this run."""
        return cadence.due(step, rows_per_epoch=self.rows.count, global_batch_size=self.batching.global_batch_size)

    def as_dict(self) -> dict:
        """Return the plan as plain values for plan.json."""
        names = [f.name for f in dataclasses.fields(self) if f.name not in NOT_IN_JSON]
        values = {name: getattr(self, name) for name in names}
        plain = {
            JSON_KEYS.get(name, name): dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
            for name, value in values.items()
        }
        plain["kernels"] = [dataclasses.asdict(line) for line in self.kernels]
        plain["batching"]["global_batch_size"] = self.batching.global_batch_size
        plain["peak"] = self.peak and {**self.peak.parts(), "total": self.peak.total, "at": self.peak.phase.name}
        return plain


def make_plan(
    recipe: Recipe,
    machine: Machine,
    *,
    model: BuiltModel,
    data: DataSummary,
    rows: Rows,
    launched_with_fsdp: bool,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Resolve a recipe for a machine, a built model and prepared data. Raises UserError for what cannot be trained."""
    precision = choose_precision(recipe.model.dtype, machine, method=recipe.method.type)
    check_context(recipe, data.longest, model.shape.context)
    resources = choose_resources(
        recipe, machine, model, precision, data=data, rows=rows, launched_with_fsdp=launched_with_fsdp
    )
    batching, options = resources.batching, RunOptions.of(recipe)
    if model.shape.tower is not None:
        check_image_accumulation(recipe, batching.accumulation)
    return Plan(
        **_fields(options, leave_out="data"),
        **_fields(resources),
        **_fields(model, leave_out="shape"),
        data_options=options.data,
        settings=recipe.model_dump(mode="json"),
        num_train_epochs=None if recipe.train.max_steps else recipe.train.num_train_epochs,
        machine=machine,
        precision=precision,
        model_family=model.shape.family,
        n_parameters=model.shape.n_parameters,
        n_trainable=model.shape.n_trainable,
        rows=rows,
        schedule=make_schedule(recipe, rows=rows.count, global_batch_size=batching.global_batch_size),
        optimizer=make_optimizer(recipe),
        data=data,
        save=Cadence(recipe.checkpoint.save_strategy, recipe.checkpoint.save_steps),
        evaluate=Cadence(recipe.eval.eval_strategy if data.eval_examples else "no", recipe.eval.eval_steps),
        notes=(*notes, *float8_notes(recipe, machine), *_memory_notes(recipe, machine, resources, rows, data)),
    )


def choose_resources(
    recipe: Recipe,
    machine: Machine,
    model: BuiltModel,
    precision: Precision,
    *,
    data: DataSummary,
    rows: Rows,
    launched_with_fsdp: bool,
) -> Resources:
    """Choose strategy, micro-batch and checkpointed layers, all of which depend on the memory estimate."""
    length, shape, world_size = rows.longest_row(data.longest), model.shape, machine.world_size
    policy = choose_policy(recipe, model.attn_implementation, model.applied_kernels)

    def estimate(states: StateBytes, shards: int = 1) -> MemoryEstimate | None:
        return estimate_memory(recipe, machine, shape, policy, precision, states=states, data=data, shards=shards)

    def need(micro: int) -> DeviceNeed:
        unsharded = states_of(recipe, shape, precision.weights)
        return unsharded_need(unsharded, estimate(unsharded), machine, micro=micro, row_length=length)

    strategy, why = choose_strategy(recipe, machine, launched_with_fsdp=launched_with_fsdp, need=need)
    check_strategy(recipe, strategy, autocast=precision.autocast)
    states = states_of(recipe, shape, precision.weights, strategy=strategy, world_size=world_size)
    shards = shards_of(recipe.parallel.dp_replicate_size, strategy, world_size) if strategy in SHARDED_WEIGHTS else 1
    memory = estimate(states, shards)
    batching = choose_batching(recipe, world_size, memory and _fits(memory, length, machine))
    memory = with_checkpointed_layers(recipe, memory, batching, length, machine)
    return Resources(strategy, why, states, memory, batching)


def estimate_memory(
    recipe: Recipe,
    machine: Machine,
    shape: ModelShape,
    policy: ActivationPolicy,
    precision: Precision,
    *,
    states: StateBytes,
    data: DataSummary,
    shards: int = 1,
) -> MemoryEstimate | None:
    """Return the memory estimate of a step, or None for a model whose layers are not understood.

    There is also none for Medusa heads whose logits are materialised, and for heads that several ranks share.
    """
    if shape.layer is None or shape.head is None or (shape.heads and (shards > 1 or not policy.fused_loss)):
        return None
    return MemoryEstimate(
        states=states,
        layer=shape.layer,
        head=shape.head,
        policy=policy,
        layers=shape.num_hidden_layers,
        itemsize=2 if precision.weights == "bfloat16" or precision.autocast == "fp16" else 4,
        step_bytes=states.step,
        labelled=data.trained_tokens / data.tokens if data.tokens else 1.0,
        workspace=CUBLAS_WORKSPACE if machine.device == "cuda" else 0,
        optim_in_backward=recipe.train.optim_in_backward,
        tower=shape.tower,
        image_share=data.image_share,
        shards=shards,
        cp_size=recipe.parallel.cp_size,
        longest_document=data.longest,
        cpu_offload=recipe.parallel.cpu_offload,
        in_front=shape.in_front,
        heads=shape.heads,
    )


def check_context(recipe: Recipe, longest: int, context: int | None) -> None:
    """Raise UserError if an example is longer than the model's context."""
    if context is not None and longest > context:
        raise UserError(
            f"data.max_length: {recipe.data.max_length} allows an example of {longest} tokens, "
            f"but the model's context (max_position_embeddings) is {context}.",
            hint=f"Write data.max_length: {context}.",
        )


def _fits(memory: MemoryEstimate, length: int, machine: Machine) -> Callable[[int, bool], bool]:
    return lambda micro, accumulates: memory.fits(micro, length, accumulates=accumulates, memory=machine.memory_bytes)


def _memory_notes(
    recipe: Recipe, machine: Machine, resources: Resources, rows: Rows, data: DataSummary
) -> tuple[str, ...]:
    memory, batching, length = resources.memory, resources.batching, rows.longest_row(data.longest)
    notes = checkpointing_notes(recipe, memory, batching, length, machine)
    if memory is None or machine.device != "cuda":
        return notes
    return (*notes, *memory.host_notes(batching.micro_batch_size, length))


def _fields(value: RunOptions | Resources | BuiltModel, *, leave_out: str = "") -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name != leave_out}
