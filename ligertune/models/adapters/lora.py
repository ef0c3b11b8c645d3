"""LoRA adapters with peft: W x + (alpha / R) B A x, W frozen.

Adapters are added after `patch`, which recognises only plain layers. In a vision-language model only the language
model gets adapters. An adapter on the output head becomes a low-rank term of the fused loss. Adapters are float32,
because bfloat16 would lose their small updates, and compute in the model's dtype (autocast).
"""

from __future__ import annotations

import warnings
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import peft
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from ligertune.errors import UserError, plural
from ligertune.models.adapters.fused_lora import LoraLossHead
from ligertune.models.model_files import ModelOrigin, check_adapter, loading
from ligertune.patching.fused_loss import LossHead
from ligertune.patching.module_patch import patch_module, unpatch_module
from ligertune.patching.recompute import has_recompute, recompute_inputs
from ligertune.vision.families import family_of, part_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ligertune.planning.options import MethodOptions


def add_adapter(model: PreTrainedModel, spec: MethodOptions) -> peft.PeftModel:
    """Return `model` with a LoRA adapter; its own weights are frozen except for `lora_modules_to_save`.

    Raises UserError for module names that the model does not have, and for an adapter on a tied head.
    """
    targets = spec.lora_target_modules
    _check_names(model, spec)
    config = peft.LoraConfig(
        r=spec.lora_r,
        lora_alpha=spec.lora_alpha,
        lora_dropout=spec.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules=_vision_linears(model) or None,
        modules_to_save=list(spec.lora_modules_to_save) or None,
        use_dora=spec.use_dora,
        use_rslora=spec.use_rslora,
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads attributes of transformers by their old names
        # a plan's model is on the meta device: its adapters need no memory either
        adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=model.device.type == "meta")
    model.disable_input_require_grads()  # as `checkpoint_layers` does: peft has requested them again
    recomputes = has_recompute(model)
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.cast_input_dtype_enabled = False  # autocast casts, without a copy of the input in fp32
            if recomputes:  # lora_A saves the same input as its layer for the backward
                recompute_inputs(module.lora_A)
    for module in adapted.modules():
        if type(module) is LoraLinear and isinstance(module.base_layer, LossHead):
            unpatch_module(module.base_layer)
            patch_module(module, LoraLossHead)
    return adapted


def _check_names(model: PreTrainedModel, spec: MethodOptions) -> None:
    leaves = {name.rpartition(".")[2] for name, _ in model.named_modules() if name}
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    targets = () if isinstance(spec.lora_target_modules, str) else spec.lora_target_modules
    for key, names in (("lora_target_modules", targets), ("lora_modules_to_save", spec.lora_modules_to_save)):
        for name in names:
            if name.rpartition(".")[2] not in leaves:
                close = get_close_matches(name, leaves, n=1)
                meant = f" Did you mean {close[0]}?" if close else ""
                raise UserError(
                    f"method.{key}: the model has no layer called {name}.{meant}",
                    hint=f"Its linear layers are {', '.join(sorted(linear))}.",
                )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    tied = {name.rpartition(".")[2] for name, module in model.named_modules() if module in (head, embedding)}
    for name in (*targets, *spec.lora_modules_to_save):
        if name.rpartition(".")[2] in tied:
            raise UserError(
                f"method: {name} shares its weight (tie_word_embeddings: embedding and output head are one matrix), "
                "so an adapter on it could not be merged.",
                hint=f"Leave {name} out of lora_target_modules and lora_modules_to_save.",
            )


def _vision_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers in the vision tower and the projector, which get no adapter."""
    family = family_of(model.config)
    if family is None:
        return []
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if part_of(family, f"{name}.weight") in ("vision_tower", "projector")]


def load_adapter(model: PreTrainedModel, folder: str, origin: ModelOrigin) -> peft.PeftModel:
    """Load the adapter saved in `folder` onto `model`. Raises UserError if it does not fit."""
    stored = check_adapter(Path(folder), origin)
    with loading(origin, f"{folder} holds no adapter of this model"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FutureWarning as in `add_adapter`; missing weights are refused below
        # low_cpu_mem_usage: no memory before the weights of the file, so that those it lacks stay on the meta device
        adapted = peft.PeftModel.from_pretrained(model, folder, low_cpu_mem_usage=True)
    missing = [name for name, parameter in adapted.named_parameters() if parameter.is_meta]
    if missing:
        raise origin.error(
            f"the adapter in {folder} lacks {plural(len(missing), 'weight')} ({', '.join(missing[:3])}).",
            hint="Missing weights would start random. Is it complete, and of this model?",
        )
    used = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    unused = sorted(name for name in stored - set(used) if ".lora_" in name)
    if unused:
        raise origin.error(
            f"the adapter in {folder} holds {plural(len(unused), 'weight')} for layers that the model does not have"
            f" ({', '.join(unused[:3])}).",
            hint="They would be dropped. Is it an adapter of this model?",
        )
    return adapted
