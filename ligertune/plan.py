"""The plan: every number of a run, resolved once. It is printed, stored with each checkpoint, and training reads it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ligertune.errors import UserError
from ligertune.machine import Machine
from ligertune.memory import StateBytes, state_bytes
from ligertune.recipe import Recipe

Strategy = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True)
class Precision:
    """The dtype of the weights, and the autocast that accelerate adds ("fp16": with a scaled loss).

    "bf16" is for adapters: their weights are float32 beside bfloat16 ones, and compute in bfloat16.
    """

    weights: str
    autocast: Literal["no", "fp16", "bf16"]


@dataclass(frozen=True)
class Batching:
    """`global_batch_size` rows make one step: micro_batch_size x accumulation x world_size."""

    micro_batch_size: int
    accumulation: int
    world_size: int
    eval_batch_size: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation * self.world_size


@dataclass(frozen=True)
class Rows:
    """What a batch counts: packs of examples, or examples, in groups of about one length or as they were shuffled."""

    kind: Literal["packed", "grouped", "shuffled"]
    count: int  # of an epoch
    length: int  # slots of a pack, and the longest an example may be
    multiple_of: int  # tokens of a batch are padded up to a multiple
    fill: float | None  # real tokens over the slots of all packs
    streamed: bool = False  # then nobody knows the rows of an epoch, and count is 0

    @property
    def packed(self) -> bool:
        return self.kind == "packed"


@dataclass(frozen=True)
class Schedule:
    """Length of the run in optimizer steps, and its learning rate."""

    total_steps: int
    warmup_steps: int
    learning_rate: float
    type: str
    min_lr_ratio: float


@dataclass(frozen=True)
class Optimizer:
    """The optimizer's table row and numbers."""

    name: str
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float
    in_backward: bool = False


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


@dataclass(frozen=True)
class KernelLine:
    """One kernel on this model: how many modules run it, how many were left alone, and why."""

    kernel: str
    applied: int
    left: int
    note: str


@dataclass(frozen=True)
class Plan:
    """All that a run is going to do. Made by `make_plan`; frozen."""

    recipe: Recipe
    machine: Machine
    strategy: Strategy
    precision: Precision
    attn_implementation: str
    attn_why: str
    model_family: str
    n_parameters: int
    n_trainable: int
    bytes: StateBytes
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
        return Path(self.recipe.checkpoint.output_dir)

    @property
    def loss_in_head(self) -> bool:
        """Whether the loss is computed in the head, which then takes an index of the rows that have a label."""
        return any(line.kernel == "linear_cross_entropy" and line.applied for line in self.kernels)

    def due(self, cadence: Cadence, step: int) -> bool:
        """Whether `cadence` falls due after `step` steps of this run."""
        return cadence.due(step, rows_per_epoch=self.rows.count, global_batch_size=self.batching.global_batch_size)

    def as_dict(self) -> dict:
        """For plan.json. The recipe stands beside it as resolved_recipe.yaml."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "recipe"}
        plain = {k: dataclasses.asdict(v) if dataclasses.is_dataclass(v) else v for k, v in fields.items()}
        plain["kernels"] = [dataclasses.asdict(line) for line in self.kernels]
        plain["batching"]["global_batch_size"] = self.batching.global_batch_size
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


def choose_strategy(strategy: str, *, world_size: int, launched_with_fsdp: bool) -> Strategy:
    """`parallel.strategy`: auto follows the launcher."""
    if world_size == 1:
        return "single"
    if strategy == "auto":
        return "fsdp" if launched_with_fsdp else "ddp"
    return strategy


def choose_batching(recipe: Recipe, world_size: int) -> Batching:
    """Accumulation from `global_batch_size` where that is given; it must divide."""
    micro = recipe.train.per_device_train_batch_size
    accumulation = recipe.train.gradient_accumulation_steps or 1
    wanted = recipe.train.global_batch_size
    if wanted is not None:
        accumulation, rest = divmod(wanted, micro * world_size)
        if rest or accumulation == 0:
            raise UserError(
                f"train.global_batch_size: {wanted} is not a multiple of per_device_train_batch_size x processes "
                f"= {micro} x {world_size} = {micro * world_size}.",
                hint=f"Write a multiple of {micro * world_size}, or another train.per_device_train_batch_size.",
            )
    return Batching(
        micro_batch_size=micro,
        accumulation=accumulation,
        world_size=world_size,
        eval_batch_size=recipe.eval.per_device_eval_batch_size,
    )


def make_schedule(recipe: Recipe, *, rows: int, global_batch_size: int) -> Schedule:
    """Total steps from `max_steps` or the epochs; the last step of the run may be a smaller batch."""
    train = recipe.train
    total = train.max_steps or math.ceil(round(train.num_train_epochs * rows) / global_batch_size)
    warmup = train.warmup_steps if train.warmup_steps is not None else math.ceil(train.warmup_ratio * total)
    if train.lr_scheduler_type == "constant":  # as in transformers: the one with a warm-up is constant_with_warmup
        warmup = 0
    return Schedule(
        total_steps=max(total, 1),
        warmup_steps=warmup,
        learning_rate=train.learning_rate,
        type=train.lr_scheduler_type,
        min_lr_ratio=train.min_lr_ratio,
    )


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
    strategy = choose_strategy(
        recipe.parallel.strategy, world_size=machine.world_size, launched_with_fsdp=launched_with_fsdp
    )
    batching = choose_batching(recipe, machine.world_size)
    check_context(recipe, data.longest, shape.context)
    train = recipe.train
    return Plan(
        recipe=recipe,
        machine=machine,
        strategy=strategy,
        precision=precision,
        attn_implementation=attn_implementation,
        attn_why=attn_why,
        model_family=shape.family,
        n_parameters=shape.n_parameters,
        n_trainable=shape.n_trainable,
        bytes=state_bytes(
            shape.parameters,
            weight_dtype=precision.weights,
            optim=train.optim,
            method=recipe.method.type,
            shards=machine.world_size if strategy == "fsdp" else 1,
        ),
        kernels_backend=kernels_backend,
        kernels=kernels,
        batching=batching,
        rows=rows,
        schedule=make_schedule(recipe, rows=rows.count, global_batch_size=batching.global_batch_size),
        optimizer=Optimizer(
            name=train.optim,
            weight_decay=train.weight_decay,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            max_grad_norm=train.max_grad_norm,
            in_backward=train.optim_in_backward,
        ),
        data=data,
        save=Cadence(recipe.checkpoint.save_strategy, recipe.checkpoint.save_steps),
        evaluate=Cadence(recipe.eval.eval_strategy if data.eval_examples else "no", recipe.eval.eval_steps),
        notes=notes,
    )
