"""Adapters that peft puts beside a model's layers: W x + (alpha / R) B A x, W frozen.

Adapters come after `patch`, so that layers are recognised as what they are, and of a model that sees only its language
model gets them. An adapter on the output head is computed in the loss as its low-rank term. Adapters are float32 and
compute in the model's dtype (autocast): they are small, and their updates would be lost in bfloat16.
"""

from __future__ import annotations

import warnings
from difflib import get_close_matches
from typing import TYPE_CHECKING

import peft
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from ligertune.activations.checkpointing import let_inputs_be
from ligertune.errors import UserError
from ligertune.models.lora_head import LoraLossHead
from ligertune.patching.fused_loss import LossHead
from ligertune.patching.module_patch import swap, unswap
from ligertune.patching.recompute import is_rebuilding, rebuild_inputs
from ligertune.vision.families import family_of, part_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ligertune.planning.options import MethodOptions


def add_adapter(model: PreTrainedModel, spec: MethodOptions) -> peft.PeftModel:
    """`model` with a LoRA adapter; its own weights are frozen, but for `lora_modules_to_save`."""
    targets = spec.lora_target_modules
    _check_names(model, spec)
    config = peft.LoraConfig(
        r=spec.lora_r,
        lora_alpha=spec.lora_alpha,
        lora_dropout=spec.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=_layers_that_see(model) or None,
        modules_to_save=list(spec.lora_modules_to_save) or None,
        use_dora=spec.use_dora,
        use_rslora=spec.use_rslora,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for attributes by their former names
        adapted = peft.get_peft_model(model, config)
    let_inputs_be(model)
    rebuilds = is_rebuilding(model)
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.cast_input_dtype_enabled = False  # autocast does, without a copy of the input in fp32
            if rebuilds:  # an adapter reads what its layer reads, and keeps it
                rebuild_inputs(module.lora_A)
    _adapt_head(adapted)
    return adapted


def _check_names(model: PreTrainedModel, spec: MethodOptions) -> None:
    """A UserError for layers that the model does not have, and for an adapter on a head that shares its weight."""
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules() if name}
    listed = () if isinstance(spec.lora_target_modules, str) else spec.lora_target_modules
    for key, names in (("lora_target_modules", listed), ("lora_modules_to_save", spec.lora_modules_to_save)):
        for name in names:
            if name.rpartition(".")[2] not in leaves:
                close = get_close_matches(name, leaves, n=1)
                meant = f" Did you mean {close[0]}?" if close else ""
                raise UserError(
                    f"method.{key}: the model has no layer called {name}.{meant}",
                    hint=f"Its linear layers are {', '.join(sorted(_linear_leaves(model)))}.",
                )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        ends = {name.rpartition(".")[2] for name, module in model.named_modules() if module in (head, embedding)}
        for name in (*listed, *spec.lora_modules_to_save):
            if name.rpartition(".")[2] in ends:
                raise UserError(
                    f"method: {name} shares its weight with the other end of the model (tie_word_embeddings), "
                    "and an adapter on one of them could not be merged.",
                    hint=f"Leave {name} out of lora_target_modules and lora_modules_to_save.",
                )


def _layers_that_see(model: PreTrainedModel) -> list[str]:
    """Linear layers of a vision tower and its projector, which an adapter leaves alone."""
    family = family_of(model.config)
    if family is None:
        return []
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if part_of(family, f"{name}.weight") in ("vision_tower", "projector")]


def _linear_leaves(model: nn.Module) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}


def _adapt_head(model: peft.PeftModel) -> None:
    """An adapter on a head that computes the loss takes that over."""
    for module in model.modules():
        if type(module) is LoraLinear and isinstance(module.base_layer, LossHead):
            unswap(module.base_layer)
            swap(module, LoraLossHead, None)


def is_adapter(model: nn.Module) -> bool:
    """Whether only an adapter is to be saved of it."""
    return isinstance(model, peft.PeftModel)


def load_adapter(model: PreTrainedModel, folder: str) -> peft.PeftModel:
    """`model` with the adapter that a run left in `folder`."""
    try:
        return peft.PeftModel.from_pretrained(model, folder)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{folder} holds no adapter of this model: {str(error).splitlines()[0]}") from error


def merged(model: peft.PeftModel) -> PreTrainedModel:
    """The model alone, with the adapter added to its weights."""
    return model.merge_and_unload()
