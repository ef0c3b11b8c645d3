"""Fit a recipe to a base that is quantised already, before anything is planned, or refuse it in one sentence.

bitsandbytes' checkpoints are what `method.type: qlora` and `method.load_in_8bit` make of others, so the recipe becomes
that of such a run. On packed checkpoints LoRA trains on one device, or with DDP; what would read or train their weights
is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedConfig

from ligertune.errors import UserError, pip_install
from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin
from ligertune.models.quantised_bases.base_formats import (
    BaseFormat,
    format_of,
    layout_of,
    quant_method_of,
    quantization_settings,
)
from ligertune.planning.feature_spec import feature_of
from ligertune.planning.options import RunOptions
from ligertune.recipe.read import recipe_of
from ligertune.recipe.schema import Recipe

SIXTEEN_BITS = "give the checkpoint in 16 bits"
TRAINS_WEIGHTS = "method.type: {method}"
SHARDED = ("fsdp", "deepspeed_zero2", "deepspeed_zero3")

# what does not work on packed weights: (whether a recipe asks for it, key and value, why, what to write)
_NOT_ON_PACKED: tuple[tuple[Callable[[Recipe], bool], str, str, str], ...] = (
    (
        lambda recipe: recipe.method.type == "qlora",
        "method.type: qlora",
        "quantises weights in 16 or 32 bits",
        "Write method.type: lora, which leaves them packed",
    ),
    (
        lambda recipe: recipe.method.type in ("full", "freeze"),
        TRAINS_WEIGHTS,
        "trains weights, and packed ones have no gradient",
        "Write method.type: lora",
    ),
    (
        lambda recipe: recipe.method.load_in_8bit,
        "method.load_in_8bit: true",
        "quantises weights in 16 or 32 bits",
        "Leave it out",
    ),
    (
        lambda recipe: recipe.method.use_dora,
        "method.use_dora: true",
        "reads the norms of dense weights",
        "Write use_dora: false",
    ),
    (
        lambda recipe: recipe.method.init_from_weights,
        "method.init_lora_weights: {init}",
        "changes the weights, which stay packed",
        "Write init_lora_weights: default",
    ),
    (lambda recipe: bool(recipe.train.fp8), "train.fp8", "multiplies dense weights", "Leave it out"),
    (
        lambda recipe: recipe.train.torch_compile,
        "train.torch_compile: true",
        "was not tested with packed weights",
        "Leave it out",
    ),
    (
        lambda recipe: recipe.parallel.strategy in SHARDED,
        "parallel.strategy: {strategy}",
        "shards weights, and packed ones cannot be cut",
        "Write parallel.strategy: ddp",
    ),
)


def fit_to_base(recipe: Recipe, config: PreTrainedConfig) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe for a model's checkpoint, and notes for the plan. Raises UserError for what cannot train."""
    if recipe.model.init == "random":
        return recipe, ()
    found = check_base(recipe.model.model_name_or_path, config, RECIPE_MODEL)
    if found is None or found.training == "loader":
        return recipe, ()
    if found.training == "bitsandbytes":
        return _as_bitsandbytes(recipe, found, quantization_settings(config))
    return _on_packed(recipe, found)


def check_base(name: str, config: PreTrainedConfig, origin: ModelOrigin) -> BaseFormat | None:
    """Return the format of a checkpoint; None if it is not quantised. Raises UserError for one that is not read."""
    found = format_of(config)
    if found is None:
        return None
    if found.training == "refused":
        raise origin.error(
            f"{name} is quantised in {found.title}, which cannot be trained or exported here: {found.why}.",
            hint=found.instead,
        )
    if found.training == "bitsandbytes" and find_spec("bitsandbytes") is None:
        raise origin.error(
            f"{name} is quantised by bitsandbytes, which is not installed.",
            hint=f"Install it: {pip_install('bitsandbytes')}",
        )
    if found.training == "packed":
        try:
            layout_of(config)
        except ValueError as problem:
            raise origin.error(
                f"{name} is quantised in {found.title}, and {problem}.", hint="Give another checkpoint of it."
            ) from None
    return found


def _on_packed(recipe: Recipe, found: BaseFormat) -> tuple[Recipe, tuple[str, ...]]:
    name = recipe.model.model_name_or_path
    values = {
        "method": recipe.method.type,
        "init": recipe.method.init_lora_weights,
        "strategy": recipe.parallel.strategy,
    }
    for asks, key, why, instead in _NOT_ON_PACKED:
        if key == TRAINS_WEIGHTS and _is_frozen(recipe):
            continue
        if asks(recipe):
            raise UserError(
                f"{key.format_map(values)} {why}, and those of {name} are quantised already ({found.title}).",
                hint=f"{instead}, or {SIXTEEN_BITS}.",
            )
    if recipe.parallel.strategy == "auto":
        recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"strategy": "ddp"})})
    if recipe.kernels.lora == "auto":  # which takes what was measured on a GPU
        recipe = recipe.model_copy(update={"kernels": recipe.kernels.model_copy(update={"lora": False})})
    note = (
        f"the base is quantised ({found.title}) and stays packed; its layers compute their weights for each product, "
        "in 16 or 32 bits, and inputs are not quantised. Exports are in 16 or 32 bits"
    )
    return recipe, (note,)


def _is_frozen(recipe: Recipe) -> bool:
    """Return whether the model stays as it is, whatever its method: heads alone train."""
    return not feature_of(recipe.task).uses_method(RunOptions.of(recipe).build)


def _as_bitsandbytes(recipe: Recipe, found: BaseFormat, settings: Mapping[str, Any]) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe of QLoRA, or of LoRA with weights in 8 bits, in the format of the checkpoint."""
    name = recipe.model.model_name_or_path
    method = recipe.method
    eight = quant_method_of(settings) == "bitsandbytes_8bit"
    bits = 8 if eight else 4
    if _is_frozen(recipe):
        return recipe, (f"the base is stored in {bits} bits by bitsandbytes, and stays so",)
    wrong = method.type in ("full", "freeze") or (method.type == "qlora" if eight else method.load_in_8bit)
    if wrong:
        asked = "method.load_in_8bit: true" if method.load_in_8bit else f"method.type: {method.type}"
        raise UserError(
            f"{asked} does not fit {name}, whose weights are quantised already ({found.title}).",
            hint=f"Write method.type: lora{'' if eight else ' or qlora'}, or {SIXTEEN_BITS}.",
        )
    if recipe.parallel.strategy == "fsdp":
        raise UserError(
            f"parallel.strategy: fsdp shards weights, and the stored ones of {name} cannot be cut ({found.title}).",
            hint=f"Write parallel.strategy: ddp; or {SIXTEEN_BITS}, with method.type: qlora.",
        )
    if method.init_from_weights:
        raise UserError(
            f"method.init_lora_weights: {method.init_lora_weights} needs the weights before quantisation, and {name} is"
            " quantised already.",
            hint=f"Write init_lora_weights: default, or {SIXTEEN_BITS}.",
        )
    changes: dict[str, Any] = {"load_in_8bit": True}
    if not eight:
        changes = {
            "type": "qlora",
            "bnb_4bit_quant_type": settings.get("bnb_4bit_quant_type", "fp4"),  # transformers' default
            "bnb_4bit_use_double_quant": bool(settings.get("bnb_4bit_use_double_quant", False)),
        }
    if all(getattr(method, key) == value for key, value in changes.items()):
        return recipe, ()
    shown = ", ".join(f"{key}: {str(value).lower()}" for key, value in changes.items())
    written = [f"method.{key}={str(value).lower()}" for key, value in changes.items()]
    try:
        recipe_of(recipe, written)
    except UserError as problem:
        why = re.sub(r"--set \S+: ", "", problem.message)  # of the overrides above
        raise UserError(
            f"{name} is quantised already ({found.title}), which trains as method with {shown}: {why}",
            hint=problem.hint,
        ) from None
    changed = recipe.model_copy(update={"method": method.model_copy(update=changes)})
    return changed, (f"the base is stored in {bits} bits by bitsandbytes: the run is that of method with {shown}",)
