"""The plan: every number of a run, resolved once. It is printed, stored with each checkpoint, and training reads it."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ligertune.errors import UserError
from ligertune.hardware import Machine
from ligertune.planning.memory.activation_bytes import WORKSPACE, Kept
from ligertune.planning.memory.activation_policy import kept_with, layers_notes, with_checkpointed_layers
from ligertune.planning.memory.estimate import Budget, Peak
from ligertune.planning.memory.sharded_states import states_of
from ligertune.planning.memory.states import StateBytes
from ligertune.planning.micro_batch import Batching, choose_batching
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
    SHARING_WEIGHTS,
    Strategy,
    check_pictures,
    check_strategy,
    shards_of,
    shared_by,
)
from ligertune.planning.precision import float8_notes
from ligertune.recipe import Recipe
from ligertune.recipe.optimizer_table import OPTIMIZERS


@dataclass(frozen=True)
class Precision:
    """The dtype of the weights, and the autocast that accelerate adds ("fp16": with a scaled loss).

    "bf16" is for adapters: their weights are float32 beside bfloat16 ones, and compute in bfloat16.
    """

    weights: str
    autocast: Literal["no", "fp16", "bf16"]

    @property
    def half(self) -> bool:
        """Whether attention and matrix products are computed in bfloat16 or float16."""
        return self.weights != "float32" or self.autocast != "no"


@dataclass(frozen=True)
class Rows:
    """What a batch counts: packs of examples, or examples, in groups of about one length or as they were shuffled."""

    kind: Literal["packed", "grouped", "shuffled"]
    count: int  # of an epoch
    length: int  # slots of a pack, and the longest an example may be
    multiple_of: int  # tokens of a batch are padded up to a multiple
    fill: float | None  # real tokens over the slots of all packs
    streamed: bool = False  # then nobody knows the rows of an epoch, and count is 0
    padding_free: bool = False  # the examples of a micro batch lie one behind another, and none is padded

    @property
    def packed(self) -> bool:
        return self.kind == "packed"

    @property
    def joined(self) -> bool:
        """Whether a micro batch is one row of several documents, (1, T), and not a rectangle."""
        return self.packed or self.padding_free


@dataclass(frozen=True)
class Schedule:
    """Length of the run in optimizer steps, and its learning rate."""

    total_steps: int
    warmup_steps: int
    learning_rate: float
    type: str
    min_lr_ratio: float


@dataclass(frozen=True)
class Galore:
    """What galore_adamw projects gradients to, how often it chooses where to, and its own share of the rate."""

    rank: int = 128
    update_proj_gap: int = 200
    scale: float = 0.25


@dataclass(frozen=True)
class Optimizer:
    """The optimizer's table row and numbers."""

    name: str
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float
    heads_lr_multiplier: float = 1.0  # Medusa heads that train beside the model
    in_backward: bool = False
    offload: bool = False
    galore: Galore = Galore()

    @property
    def matrices_only(self) -> bool:
        """Whether the optimizer steps only the matrices inside the layers; fused AdamW steps the rest."""
        return OPTIMIZERS[self.name].matrices_only


@dataclass(frozen=True)
class Cadence:
    """When something happens: every `every` steps, at the end of each epoch, or never."""

    strategy: Literal["no", "steps", "epoch"]
    every: int

    def due(self, step: int, *, rows_per_epoch: int, global_batch_size: int) -> bool:
        """Whether it happens after `step` steps. An epoch may end inside a step: then after that step."""
        if self.strategy == "steps":
            return step % self.every == 0
        if self.strategy == "epoch":
            epochs = [(s * global_batch_size) // rows_per_epoch for s in (step - 1, step)]
            return epochs[1] > epochs[0]
        return False


@dataclass(frozen=True)
class DataNumbers:
    """What the data sets came to after rendering."""

    examples: int
    eval_examples: int
    tokens: int
    trained_tokens: int
    longest: int
    dropped: dict[str, int]
    truncated: int
    template: str
    fingerprint: str
    image_share: float = 0.0  # of the tokens of the example that has the largest


@dataclass(frozen=True)
class KernelLine:
    """One kernel on this model: how many modules run it, how many were left alone, and why."""

    kernel: str
    applied: int
    left: int
    note: str


NOT_IN_JSON = (
    "build", "data_options", "parallel", "checkpoint", "evaluation", "logging", "measurement", "settings",
    "num_train_epochs",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """All that a run is going to do. Made by `make_plan`; frozen."""

    build: BuildOptions
    data_options: DataOptions
    parallel: ParallelOptions
    checkpoint: CheckpointOptions
    evaluation: EvaluationOptions
    logging: LoggingOptions
    measurement: MeasurementOptions
    settings: dict[str, Any]  # the recipe as plain JSON values, for trackers
    num_train_epochs: float | None  # None: the run ends after schedule.total_steps, wherever an epoch ends
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
    budget: Budget | None  # of a model whose layers are not understood there is none
    kernels_backend: str
    kernels: tuple[KernelLine, ...]
    batching: Batching
    rows: Rows
    schedule: Schedule
    optimizer: Optimizer
    data: DataNumbers
    save: Cadence
    evaluate: Cadence
    notes: tuple[str, ...]

    @property
    def output_dir(self) -> Path:
        return Path(self.checkpoint.output_dir)

    @property
    def shares_weights(self) -> bool:
        """Whether each process holds a part of the model's weights only."""
        return self.strategy in SHARING_WEIGHTS

    @property
    def shards(self) -> int:
        """Into how many parts each copy of the states is cut."""
        return shards_of(self.parallel.dp_replicate_size, self.strategy, self.batching.world_size)

    @property
    def peak(self) -> Peak | None:
        """What a step is predicted to allocate on a device at its highest moment; None where nobody knows."""
        if self.budget is None:
            return None
        batching, length = self.batching, row_length(self.rows, self.data)
        accumulates, memory = batching.accumulation > 1, self.machine.memory_bytes
        return self.budget.peak(batching.micro_batch_size, length, accumulates=accumulates, memory=memory)

    @property
    def checkpointed_layers(self) -> int | None:
        """How many layers are run again in the backward, if any is; None: all there are."""
        if self.budget is None or not self.budget.kept.checkpointing or not self.budget.kept.not_checkpointed:
            return None
        return self.budget.layers - self.budget.kept.not_checkpointed

    @property
    def loss_in_head(self) -> bool:
        """Whether the loss is computed in the head, which then takes an index of the rows that have a label."""
        return any(line.kernel.endswith("linear_cross_entropy") and line.applied for line in self.kernels)

    def due(self, cadence: Cadence, step: int) -> bool:
        """Whether `cadence` falls due after `step` steps of this run."""
        return cadence.due(step, rows_per_epoch=self.rows.count, global_batch_size=self.batching.global_batch_size)

    def as_dict(self) -> dict:
        """Return the plan as plain values for plan.json, without the options, which resolved_recipe.yaml holds."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in NOT_IN_JSON}
        plain = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in fields.items()}
        plain["kernels"] = [dataclasses.asdict(line) for line in self.kernels]
        plain["batching"]["global_batch_size"] = self.batching.global_batch_size
        plain["peak"] = self.peak and {**self.peak.parts(), "total": self.peak.total, "at": self.peak.moment.name}
        return plain


def choose_precision(dtype: str, machine: Machine, *, method: str = "full") -> Precision:
    """`model.dtype` on this machine for a method; a UserError where the device lacks it."""
    if dtype == "auto":
        on_gpu = "bfloat16" if machine.has_bfloat16 else "float16"
        dtype = "float32" if machine.vendor == "cpu" else on_gpu
    if dtype == "bfloat16" and not machine.has_bfloat16:
        raise UserError(
            f"model.dtype: bfloat16 is not supported by {machine.name} ({machine.arch}).",
            hint="Write model.dtype: float16 (mixed precision with a scaled loss) or float32.",
        )
    if dtype == "float16" and machine.vendor == "cpu":
        raise UserError(
            "model.dtype: float16 trains on a GPU only, and this machine has none.",
            hint="Write model.dtype: float32 or bfloat16.",
        )
    if dtype == "float16":
        return Precision(weights="float32", autocast="fp16")
    adapted = dtype == "bfloat16" and method in ("lora", "qlora")
    return Precision(weights=dtype, autocast="bf16" if adapted else "no")


def make_budget(
    recipe: Recipe,
    shape: object,
    *,
    states: StateBytes,
    kept: Kept,
    itemsize: int,
    data: DataNumbers,
    workspace: int,
    shards: int = 1,
) -> Budget | None:
    """All that decides the memory of a step; None for a model whose layers are not understood.

    Nor is there a formula for Medusa heads whose logits are made all at once, or that several ranks share.
    """
    if shape.layer is None or shape.head is None or (shape.heads and (shards > 1 or not kept.in_head)):
        return None
    return Budget(
        states=states,
        layer=shape.layer,
        head=shape.head,
        kept=kept,
        layers=shape.num_hidden_layers,
        itemsize=itemsize,
        step_bytes=states.step,
        labelled=data.trained_tokens / data.tokens if data.tokens else 1.0,
        workspace=workspace,
        in_backward=recipe.train.optim_in_backward,
        tower=shape.tower,
        image_share=data.image_share,
        shards=shards,
        cp_size=recipe.parallel.cp_size,
        longest=data.longest,
        offloaded=recipe.parallel.cpu_offload,
        in_front=shape.in_front,
        heads=shape.heads,
    )


def total_steps(rows: int, global_batch_size: int, *, epochs: float | None, max_steps: int | None) -> int:
    """Return the number of optimizer steps, from `max_steps` or the epochs; the last step may be a smaller batch."""
    return max(max_steps or math.ceil(round(epochs * rows) / global_batch_size), 1)


def make_schedule(recipe: Recipe, *, rows: int, global_batch_size: int) -> Schedule:
    """Total steps from `max_steps` or the epochs; the last step of the run may be a smaller batch."""
    train = recipe.train
    total = total_steps(rows, global_batch_size, epochs=train.num_train_epochs, max_steps=train.max_steps)
    warmup = train.warmup_steps if train.warmup_steps is not None else math.ceil(train.warmup_ratio * total)
    if train.lr_scheduler_type == "constant":  # as in transformers: the one with a warm-up is constant_with_warmup
        warmup = 0
    return Schedule(
        total_steps=total,
        warmup_steps=warmup,
        learning_rate=train.learning_rate,
        type=train.lr_scheduler_type,
        min_lr_ratio=train.min_lr_ratio,
    )


def make_optimizer(recipe: Recipe) -> Optimizer:
    """The optimizer's numbers; heads that train beside the model have a rate of their own."""
    train, beside = recipe.train, recipe.task == "medusa" and recipe.medusa.stage == 2
    return Optimizer(
        name=train.optim,
        weight_decay=train.weight_decay,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        max_grad_norm=train.max_grad_norm,
        heads_lr_multiplier=recipe.medusa.lr_multiplier if beside else 1.0,
        in_backward=train.optim_in_backward,
        offload=train.optim_offload,
        galore=Galore(**train.galore.model_dump()),
    )


def row_length(rows: Rows, data: DataNumbers) -> int:
    """Token slots of the longest row."""
    longest = rows.length if rows.packed else min(rows.length, data.longest)
    return -(-longest // rows.multiple_of) * rows.multiple_of


def _fits(budget: Budget, length: int, machine: Machine, micro: int, accumulates: bool) -> bool:
    return budget.fits(micro, length, accumulates=accumulates, memory=machine.memory_bytes)


def check_context(recipe: Recipe, longest: int, context: int | None) -> None:
    """A UserError where an example is longer than the model's positions reach."""
    if context is not None and longest > context:
        raise UserError(
            f"data.max_length: {recipe.data.max_length} lets an example of {longest} tokens through, "
            f"but the model's context (max_position_embeddings) is {context}.",
            hint=f"Write data.max_length: {context}.",
        )


def make_plan(
    recipe: Recipe,
    machine: Machine,
    *,
    shape: object,
    attn_implementation: str,
    attn_why: str,
    kernels_backend: str,
    kernels: tuple[KernelLine, ...],
    data: DataNumbers,
    rows: Rows,
    launched_with_fsdp: bool,
    notes: tuple[str, ...] = (),
) -> Plan:
    """Resolve a recipe on this machine. `shape`: the model's ModelShape."""
    precision = choose_precision(recipe.model.dtype, machine, method=recipe.method.type)
    length = row_length(rows, data)
    budget_of = functools.partial(
        make_budget,
        recipe,
        shape,
        kept=kept_with(recipe, attn_implementation, kernels),
        itemsize=2 if precision.weights == "bfloat16" or precision.autocast == "fp16" else 4,
        data=data,
        workspace=WORKSPACE if machine.device == "cuda" else 0,
    )
    strategy, strategy_why = shared_by(
        recipe,
        machine,
        states_of(recipe, shape, precision.weights),
        budget_of,
        length,
        launched_with_fsdp=launched_with_fsdp,
    )
    check_strategy(recipe, strategy, autocast=precision.autocast)
    states = states_of(recipe, shape, precision.weights, strategy=strategy, world_size=machine.world_size)
    shards = (
        shards_of(recipe.parallel.dp_replicate_size, strategy, machine.world_size) if strategy in SHARING_WEIGHTS else 1
    )
    budget = budget_of(states=states, shards=shards)
    batching = choose_batching(recipe, machine.world_size, budget and functools.partial(_fits, budget, length, machine))
    budget = with_checkpointed_layers(recipe, budget, batching, length, machine)
    check_context(recipe, data.longest, shape.context)
    if shape.tower is not None:
        check_pictures(recipe, batching.accumulation)
    options = RunOptions.of(recipe)
    return Plan(
        build=options.build,
        data_options=options.data,
        parallel=options.parallel,
        checkpoint=options.checkpoint,
        evaluation=options.evaluation,
        logging=options.logging,
        measurement=options.measurement,
        settings=recipe.model_dump(mode="json"),
        num_train_epochs=None if recipe.train.max_steps else recipe.train.num_train_epochs,
        machine=machine,
        strategy=strategy,
        strategy_why=strategy_why,
        precision=precision,
        attn_implementation=attn_implementation,
        attn_why=attn_why,
        model_family=shape.family,
        n_parameters=shape.n_parameters,
        n_trainable=shape.n_trainable,
        bytes=states,
        budget=budget,
        kernels_backend=kernels_backend,
        kernels=kernels,
        batching=batching,
        rows=rows,
        schedule=make_schedule(recipe, rows=rows.count, global_batch_size=batching.global_batch_size),
        optimizer=make_optimizer(recipe),
        data=data,
        save=Cadence(recipe.checkpoint.save_strategy, recipe.checkpoint.save_steps),
        evaluate=Cadence(recipe.eval.eval_strategy if data.eval_examples else "no", recipe.eval.eval_steps),
        notes=(
            *notes,
            *float8_notes(recipe, machine),
            *layers_notes(recipe, budget, batching, length, machine),
            *(budget.host_notes(batching.micro_batch_size, length) if budget and machine.device == "cuda" else ()),
        ),
    )
