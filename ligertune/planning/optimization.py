"""Optimizer settings, learning-rate schedule, and the cadence of saves and evaluations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ligertune.errors import UserError, plural
from ligertune.planning.memory.model_shape import ModelShape
from ligertune.recipe.optimizer_table import OPTIMIZERS
from ligertune.recipe.schema import Recipe
from ligertune.recipe.train_sections import FOLLOW_EVALUATIONS, TrainSpec

FEW_STEPS = 10  # optimizer steps below which a run of whole epochs hardly trains: warm-up and decay share them


@dataclass(frozen=True)
class TrainSchedule:
    """Length of the run in optimizer steps, and its learning rate."""

    total_steps: int
    warmup_steps: int
    learning_rate: float
    type: str
    min_lr_ratio: float
    kwargs: tuple[tuple[str, float | int | str], ...] = ()  # of the schedule in transformers

    @property
    def follows_evaluations(self) -> bool:
        """Whether the losses of evaluations decide on the rate."""
        return self.type in FOLLOW_EVALUATIONS


@dataclass(frozen=True)
class Galore:
    """GaLore's settings (Zhao et al. 2024): rank of the projection, steps between updates of it, and update scale."""

    rank: int = 128
    update_proj_gap: int = 200
    scale: float = 0.25


@dataclass(frozen=True)
class LrGroup:
    """An entry of train.lr_groups. lr_multiplier: of the run's rate. weight_decay: None for that of the run."""

    parameters: str
    lr_multiplier: float
    weight_decay: float | None


@dataclass(frozen=True)
class LoraPlus:
    """Rates of LoRA+ (Hayou et al. 2024), relative to the run's: of B, and of adapters of embeddings."""

    b_multiplier: float
    embedding_multiplier: float


@dataclass(frozen=True)
class Optimizer:
    """The optimizer's name and settings."""

    name: str
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    max_grad_norm: float
    heads_lr_multiplier: float = 1.0  # for heads that train together with the model
    in_backward: bool = False
    offload: bool = False
    galore: Galore = Galore()
    lr_groups: tuple[LrGroup, ...] = ()
    lora_plus: LoraPlus | None = None

    @property
    def matrices_only(self) -> bool:
        """Whether it steps only the matrices inside the layers. Fused AdamW steps the other parameters then."""
        return OPTIMIZERS[self.name].matrices_only


@dataclass(frozen=True)
class Cadence:
    """When something happens: every `every` steps, at the end of each epoch, or never."""

    strategy: Literal["no", "steps", "epoch"]
    every: int

    def due(self, step: int, *, rows_per_epoch: int, global_batch_size: int) -> bool:
        """Whether it happens after `step` steps. If an epoch ends inside a step, it happens after that step."""
        if self.strategy == "steps":
            return step % self.every == 0
        if self.strategy == "epoch":
            epochs = [(s * global_batch_size) // rows_per_epoch for s in (step - 1, step)]
            return epochs[1] > epochs[0]
        return False


def interval(steps: float, total: int) -> int:
    """Return an interval in steps. As in TrainingArguments, a number below 1 is a share of all `total` steps."""
    return steps if isinstance(steps, int) else max(1, math.ceil(round(steps * total, 6)))


def total_steps(rows: int, global_batch_size: int, *, epochs: float | None, max_steps: int | None) -> int:
    """Return the number of optimizer steps, from `max_steps` or the epochs. The last step may be a smaller batch."""
    if max_steps:
        return max_steps
    assert epochs is not None  # the schema requires one of the two
    return max(math.ceil(round(epochs * rows) / global_batch_size), 1)


def total_rows(rows: int, global_batch_size: int, *, epochs: float | None, max_steps: int | None) -> int:
    """Return the number of rows that a run trains on, each as often as it does. rows: of an epoch."""
    return max_steps * global_batch_size if max_steps else round((epochs or 0) * rows)


def _warmup_steps(train: TrainSpec, total: int) -> int:
    if train.warmup_steps is not None:
        return train.warmup_steps
    assert train.warmup_ratio is not None  # the schema requires one of the two
    return math.ceil(train.warmup_ratio * total)


def make_schedule(recipe: Recipe, *, rows: int, global_batch_size: int) -> TrainSchedule:
    """Resolve total steps and warm-up steps. `rows`: rows of an epoch."""
    train = recipe.train
    total = total_steps(rows, global_batch_size, epochs=train.num_train_epochs, max_steps=train.max_steps)
    warmup = _warmup_steps(train, total)
    # as in transformers: constant_with_warmup has the warm-up
    if train.lr_scheduler_type in ("constant", *FOLLOW_EVALUATIONS):
        warmup = 0
    kwargs = train.lr_scheduler_kwargs
    decay = int(kwargs.get("num_decay_steps", 0))
    if warmup > total:
        raise UserError(
            f"train.warmup_steps: {warmup}, and the run has {plural(total, 'step')}.",
            hint=f"Write train.warmup_steps: {total} or less, or train.warmup_ratio.",
        )
    if warmup + decay > total:
        raise UserError(
            f"train.lr_scheduler_kwargs: num_decay_steps is {decay}, and the run has {plural(total, 'step')}, "
            f"{warmup} of them warm-up.",
            hint=f"Write num_decay_steps: {max(total - warmup, 0)} or less.",
        )
    return TrainSchedule(
        total, warmup, train.learning_rate, train.lr_scheduler_type, train.min_lr_ratio, tuple(kwargs.items())
    )


def make_optimizer(recipe: Recipe, *, heads_lr_multiplier: float = 1.0) -> Optimizer:
    """Copy the optimizer's settings out of a recipe. heads_lr_multiplier: of heads that a feature adds."""
    train = recipe.train
    rate = train.learning_rate
    ratio = recipe.method.loraplus_lr_ratio
    return Optimizer(
        name=train.optim,
        weight_decay=train.weight_decay,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
        max_grad_norm=train.max_grad_norm,
        heads_lr_multiplier=heads_lr_multiplier,
        in_backward=train.optim_in_backward,
        offload=train.optim_offload,
        galore=Galore(**train.galore.model_dump()),
        lr_groups=tuple(
            LrGroup(group.parameters, (group.learning_rate or rate) / rate, group.weight_decay)
            for group in train.lr_groups
        ),
        lora_plus=None if ratio is None else LoraPlus(ratio, recipe.method.loraplus_lr_embedding / rate),
    )


def optimizer_notes(optim: str, shape: ModelShape) -> tuple[str, ...]:
    """Return a note if a matrix optimizer leaves the 3-D weights of experts, most of a mixture, to AdamW."""
    trained = [(kind.elements * count, kind.experts) for kind, count in shape.parameters if kind.trains]
    experts = sum(size for size, is_experts in trained if is_experts)
    total = sum(size for size, _ in trained)
    if not OPTIMIZERS[optim].matrices_only or not experts:
        return ()
    share = f"{experts / total:.0%} of what trains"
    return (f"train.optim: {optim} updates matrices; weights of experts are 3-D ({share}), and AdamW updates them",)
