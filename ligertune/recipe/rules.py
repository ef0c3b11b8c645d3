"""Keys that contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ligertune.recipe.document import Document
from ligertune.recipe.keys import KeyPath, split
from ligertune.recipe.schema import EITHER_OR, Recipe, TrainSpec


@dataclass(frozen=True)
class Rule:
    """`keys` contradict each other where `broken`; `says` names them as {0}, {1} and may quote the recipe."""

    keys: tuple[str, ...]
    broken: Callable[[Recipe], bool]
    says: str


def _either_or(key: str, rival: str) -> tuple[Rule, Rule]:
    names = (f"train.{rival}", f"train.{key}")

    def given(recipe: Recipe) -> int:
        return sum(getattr(recipe.train, name) is not None for name in (key, rival))

    return (
        Rule(names, lambda recipe: given(recipe) == 2, "{0} and {1} are both given. Keep one of them."),
        Rule(names[::-1], lambda recipe: given(recipe) == 0, "{0} is null and {1} is not given. Give one of them."),
    )


def _at(recipe: Recipe, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


def _evaluates_nothing(recipe: Recipe) -> bool:
    return recipe.eval.eval_strategy != "no" and not (recipe.data.val_split or recipe.data.eval_datasets)


def _warms_up_a_constant(recipe: Recipe) -> bool:
    """A warm-up was asked for, by more than the ratio's default, and `constant` has none."""
    train = recipe.train
    default = TrainSpec.model_fields["warmup_ratio"].default
    return train.lr_scheduler_type == "constant" and bool(
        train.warmup_steps or (train.warmup_ratio and train.warmup_ratio != default)
    )


def _splits_a_micro_batch(recipe: Recipe) -> bool:
    train = recipe.train
    return train.global_batch_size is not None and train.global_batch_size % train.per_device_train_batch_size != 0


RULES = (
    *(rule for key, rival in EITHER_OR.items() for rule in _either_or(key, rival)),
    Rule(
        ("kernels.optimizer", "train.optim"),
        lambda recipe: recipe.kernels.optimizer and recipe.train.optim != "adamw_torch_fused",
        "{0} is the step of adamw_torch_fused, and {1} is another. Leave {0} out, or change {1}.",
    ),
    Rule(
        ("data.val_split", "data.eval_datasets"),
        lambda recipe: recipe.data.val_split > 0 and bool(recipe.data.eval_datasets),
        "{0} and {1} are both given. Keep one of them.",
    ),
    Rule(
        ("data.eval_datasets",),
        lambda recipe: any(dataset.weight != 1 for dataset in recipe.data.eval_datasets),
        "{0} gives a weight; every example is evaluated once. Leave the weight out.",
    ),
    Rule(
        ("data.streaming", "train.max_steps"),
        lambda recipe: recipe.data.streaming and recipe.train.max_steps is None,
        "{0} reads data whose length is not known. Give {1}.",
    ),
    Rule(
        ("data.streaming", "data.val_split", "data.eval_datasets"),
        lambda recipe: recipe.data.streaming and recipe.data.val_split > 0,
        "{0} cannot draw {1} from what it has not read. Give {2}.",
    ),
    *(
        Rule(
            (key, "data.streaming"),
            lambda recipe, key=key: recipe.data.streaming and _at(recipe, key) == "epoch",
            "{0} is epoch, and with {1} no epoch has a known end. Write steps.",
        )
        for key in ("eval.eval_strategy", "checkpoint.save_strategy")
    ),
    Rule(
        ("eval.eval_strategy", "data.val_split", "data.eval_datasets"),
        _evaluates_nothing,
        "{0} asks for an evaluation, and there is nothing to evaluate on. Give {1} or {2}.",
    ),
    Rule(
        ("model.num_hidden_layers", "model.init"),
        lambda recipe: recipe.model.num_hidden_layers is not None and recipe.model.init == "pretrained",
        "{0} cuts random models only, and {1} is pretrained. Write model.init: random, or leave the depth alone.",
    ),
    Rule(
        ("checkpoint.overwrite", "checkpoint.resume_from_checkpoint"),
        lambda recipe: recipe.checkpoint.overwrite and recipe.checkpoint.resume_from_checkpoint != "never",
        "{0} would remove the run that {1} continues. Keep one of them.",
    ),
    Rule(
        ("train.warmup_steps", "train.warmup_ratio", "train.lr_scheduler_type"),
        _warms_up_a_constant,
        "{2} is constant, which has no warm-up. Write train.lr_scheduler_type: constant_with_warmup.",
    ),
    Rule(
        ("train.global_batch_size", "train.per_device_train_batch_size"),
        _splits_a_micro_batch,
        "{0} is {recipe.train.global_batch_size}, and no multiple of {1}, "
        "which is {recipe.train.per_device_train_batch_size}.",
    ),
)


def check_rules(recipe: Recipe, document: Document, faults: Sequence[KeyPath]) -> None:
    """A complaint for each broken rule, unless one of its keys has a complaint already."""
    for rule in RULES:
        paths = [split(key) for key in rule.keys]
        in_doubt = any(fault[: len(path)] == path[: len(fault)] for fault in faults for path in paths)
        if not in_doubt and rule.broken(recipe):
            lead = next((path for path in paths if document.has(path)), paths[0])
            mentions = [document.name(path) if path == lead else document.mention(path) for path in paths]
            document.complain(lead, rule.says.format(*mentions, recipe=recipe))
