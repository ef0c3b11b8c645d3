"""LoRA adapters with peft: W x + (alpha / R) B A x, W frozen.

Adapters are added after `patch`. In a model with a tower only the language model gets adapters. Experts get theirs as
parameters (`expert_lora`). An adapter on the output head becomes a low-rank term of the fused loss. Adapters are
float32, because bfloat16 would lose their small updates, and compute in the model's dtype (autocast).
"""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import peft
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from ligertune.any_types import AnyModule
from ligertune.errors import UserError, plural
from ligertune.files.model_files import ModelOrigin, loading
from ligertune.models.adapters.adapter_files import check_adapter, fitted_config
from ligertune.models.adapters.adapter_targets import find_targets
from ligertune.models.adapters.initial_lora import remember_initial
from ligertune.models.adapters.token_rows import (
    compute_in_dtype_of_base,
    patch_token_rows,
    token_layers,
    train_in_float32,
    trained_layers,
)
from ligertune.models.quantised_bases.load_packed import make_dense
from ligertune.models.score_head import SEQ_CLS, gives_scores
from ligertune.patching.experts.expert_lora import merge_parameters, split_adapters
from ligertune.patching.lora.fused_lora import move_loss_heads
from ligertune.patching.recompute import has_recompute, recompute_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ligertune.planning.options import MethodOptions

# Starts of `init_lora_weights` with which PEFT changes the weights of the base, when it loads an adapter, too.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


def add_adapter(model: PreTrainedModel, spec: MethodOptions) -> peft.PeftModel:
    """Return `model` with a LoRA adapter; its own weights are frozen except for `lora_modules_to_save`.

    Raises UserError for names that the model does not have, for an adapter on a tied head, and for DoRA of experts.
    """
    targets = find_targets(model, spec)
    is_meta = model.device.type == "meta"
    # A plan's model has no weights that PiSSA or OLoRA could decompose. Those before a quantisation to 4 bits are
    # decomposed later, by `four_bit_residual.py` and `loftq.py`.
    is_later = is_meta or (spec.type == "qlora" and spec.init_from_weights)
    initial = True if is_later or spec.init_lora_weights == "default" else spec.init_lora_weights
    config = peft.LoraConfig(
        r=spec.lora_r,
        lora_alpha=spec.lora_alpha,  # type: ignore[arg-type]  # PEFT declares int, and divides it by the rank
        lora_dropout=0.0 if targets.parameters else spec.lora_dropout,
        target_modules=targets.modules,
        layers_to_transform=[*targets.layers] or None,
        layers_pattern=[*spec.layers_pattern] or None if targets.layers else None,
        target_parameters=targets.parameters or None,
        exclude_modules=targets.excluded or None,
        trainable_token_indices=token_layers(model, spec),
        **trained_layers(model, spec),
        use_dora=spec.use_dora,
        use_rslora=spec.use_rslora,
        init_lora_weights=initial,  # type: ignore[arg-type]  # PEFT declares pissa_niter_N without its numbers
        task_type=SEQ_CLS if gives_scores(model.config) else "CAUSAL_LM",
    )
    adapted = _wrapped(model, config)
    if spec.init_from_weights:
        _check_initial(adapted, spec)
        if not is_later:
            remember_initial(adapted)
    model.disable_input_require_grads()  # as `checkpoint_layers` does: peft has requested them again
    own_dropout = spec.lora_dropout if targets.parameters else 0.0
    _adjust_layers(adapted, recomputes=has_recompute(model), own_dropout=own_dropout)
    train_in_float32(adapted)
    patch_token_rows(adapted)
    split_adapters(adapted)
    return adapted


def _wrapped(model: PreTrainedModel, config: peft.LoraConfig) -> peft.PeftModel:
    """Return PEFT's wrapper of a model. Raises UserError for layers that PEFT does not adapt."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads attributes of transformers by their old names
        try:
            # a plan's model is on the meta device: its adapters need no memory either
            return peft.get_peft_model(model, config, low_cpu_mem_usage=model.device.type == "meta")
        except ValueError as error:  # such as the projections inside of a Mamba layer
            block = re.match(r"Target module (\w+)\(\n", str(error))  # PEFT prints all layers inside
            why = f"{block[1]} is no linear layer, but holds others." if block else str(error)
            raise UserError(
                f"method.lora_target_modules: {why}", hint="Name other layers in method.lora_target_modules."
            ) from error


def _adjust_layers(adapted: peft.PeftModel, *, recomputes: bool, own_dropout: float) -> None:
    """Let the adapters compute in the dtype of autocast, recompute their inputs, and use the fused loss.

    own_dropout: of each adapted layer, where PEFT's configuration has none.
    """
    for module in adapted.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.cast_input_dtype_enabled = False  # autocast casts, without a copy of the input in fp32
            if recomputes:  # lora_A saves the same input as its layer for the backward
                recompute_inputs(module.lora_A)
            if own_dropout and not isinstance(module, ParamWrapper):
                # PEFT has one dropout for all targets, and refuses it for parameters, also when it loads an adapter.
                module.lora_dropout["default"] = nn.Dropout(own_dropout)
    move_loss_heads(adapted)


def _check_initial(adapted: peft.PeftModel, spec: MethodOptions) -> None:
    """Raise UserError if a layer is adapted whose initial adapter PEFT does not subtract from its weight."""
    other = next((m for m in adapted.modules() if isinstance(m, ParamWrapper | peft.tuners.lora.Embedding)), None)
    if other is not None:
        base = type(other.get_base_layer()).__name__
        raise UserError(
            f"method.init_lora_weights: {spec.init_lora_weights} is for linear layers, and {base} is adapted, too.",
            hint="Write init_lora_weights: default, or leave it out of lora_target_modules and lora_target_parameters.",
        )


def merged_model(adapted: AnyModule) -> PreTrainedModel:
    """Return a PEFT model's base with the adapter added to its weights: s B A in float32, the sum rounded once.

    A weight that an adapted layer shares with others, such as a tied embedding, becomes its own. Raises UserError if
    the class ties it again.
    """
    make_dense(adapted)
    is_untied = _untie(adapted)
    merge_parameters(adapted)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged")  # parameters, by the line above
        warnings.filterwarnings("ignore", "Model with `tie_word_embeddings=True`|Input and output embeddings")
        merged: AnyModule = adapted.merge_and_unload()  # sets tie_word_embeddings to what the weights are
    if is_untied:
        weights = {name: id(p) for name, p in merged.named_parameters()}
        merged.tie_weights()  # as `from_pretrained` does
        if weights != {name: id(p) for name, p in merged.named_parameters()}:
            raise UserError(
                f"The adapter changes one of several layers that share a weight, and {type(merged).__name__} ties them"
                " in any case, so it cannot be merged.",
                hint="Load the adapter with PEFT instead.",
            )
    return merged


def _untie(adapted: AnyModule) -> bool:
    """Give all layers their own weights if an adapter is on a shared one, and return whether it is.

    PEFT adds s B A to the shared matrix, and with it to layers without the adapter. Trained token rows stay shared.
    """
    parameters = [(module, *item) for module in adapted.modules() for item in module.named_parameters(recurse=False)]
    uses = Counter(id(p) for _, _, p in parameters)
    layers = [m for m in adapted.modules() if isinstance(m, BaseTunerLayer) and not isinstance(m, TrainableTokensLayer)]
    if not any(uses[id(p)] > 1 for layer in layers for p in layer.get_base_layer().parameters(recurse=False)):
        return False
    for module, name, parameter in parameters:
        if uses[id(parameter)] > 1:
            setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    return True


def load_adapter(model: PreTrainedModel, folder: str, origin: ModelOrigin) -> peft.PeftModel:
    """Load the adapter saved in `folder` onto `model`. Raises UserError if it does not fit."""
    stored = check_adapter(Path(folder), origin)
    config = fitted_config(model, Path(folder), origin)
    if str(getattr(config, "init_lora_weights", "")).lower().startswith(CHANGES_BASE):
        model, config = _with_changed_base(model, config, folder, origin)
    with loading(origin, f"{folder} holds no adapter of this model"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FutureWarning as in `add_adapter`; missing weights are refused below
        # low_cpu_mem_usage: no memory before the weights of the file, so that those it lacks stay on the meta device
        # torch_device: without it PEFT loads modules that train in full to the GPU, even if the model is on the CPU
        device = str(model.device)
        adapted = peft.PeftModel.from_pretrained(
            model, folder, config=config, low_cpu_mem_usage=True, torch_device=device
        )
    missing = [name for name, parameter in adapted.named_parameters() if parameter.is_meta]
    if missing:
        raise origin.error(
            f"the adapter in {folder} lacks {plural(len(missing), 'weight')} ({', '.join(missing[:3])}).",
            hint="Missing weights would start random. Is it complete, and of this model?",
        )
    # low_cpu_mem_usage has rounded the adapter to the dtype of the base (peft 0.21), before it became float32 again.
    with loading(origin, f"{folder} holds no adapter of this model"):
        peft.set_peft_model_state_dict(adapted, peft.load_peft_weights(folder, device=device))
    used = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    unused = sorted(name for name in stored - set(used) if ".lora_" in name)
    if unused:
        raise origin.error(
            f"the adapter in {folder} holds {plural(len(unused), 'weight')} for layers that the model does not have"
            f" ({', '.join(unused[:3])}).",
            hint="They would be dropped. Is it an adapter of this model?",
        )
    patch_token_rows(adapted)
    split_adapters(adapted)
    compute_in_dtype_of_base(adapted, model.dtype)
    return adapted


def adapter_on_meta(model: PreTrainedModel, folder: Path, origin: ModelOrigin) -> AnyModule:
    """Return a model on the meta device with the adapter of `folder` in its layers. Raises UserError."""
    check_adapter(folder, origin)
    config: AnyModule = fitted_config(model, folder, origin)
    config.init_lora_weights = True  # others are computed from weights
    with loading(origin, f"{folder} holds no adapter of this model"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FutureWarning as in `add_adapter`
        return peft.get_peft_model(model, config)


def _with_changed_base(
    model: PreTrainedModel, config: AnyModule, folder: str, origin: ModelOrigin
) -> tuple[PreTrainedModel, AnyModule]:
    """Return the base with the weights on which the adapter in `folder` works, and a configuration for plain LoRA.

    An adapter that PEFT has saved without conversion works on W - s B0 A0 (or on W in 4 bits). B0 and A0 are in no
    file: PEFT computes them from W whenever it loads the adapter.
    """
    start = copy.deepcopy(config)
    start.modules_to_save = start.trainable_token_indices = None
    what = f"the adapter in {folder} has init_lora_weights: {config.init_lora_weights}, which cannot be computed"
    with loading(origin, what), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, start).unload()
    config.init_lora_weights = True
    return model, config


@contextlib.contextmanager
def adapter_off(model: peft.PeftModel) -> Iterator[None]:
    """Switch the adapter of a model off.

    A low-rank update is scaled by 0, so that its layers compute the same products in the same order: the outputs are
    the bits of an adapter with B = 0. PEFT would call the base layers, whose products may take other kernels, which
    round differently. DoRA, trained tokens and `lora_modules_to_save` have no such scale, and PEFT switches them off.
    """
    kinds = BaseTunerLayer | AuxiliaryTrainingWrapper
    switched: list[AnyModule] = [module for module in model.modules() if isinstance(module, kinds)]
    if not all(isinstance(module, LoraLayer) and not module.lora_variant for module in switched):
        # peft also freezes the adapter inside. A first forward under FSDP2 would keep that for the parameters it
        # gathers.
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with model.disable_adapter():
            for parameter in trained:
                parameter.requires_grad_(True)
            yield
        return
    scales = [(layer, layer.scaling) for layer in switched]
    for layer, scaling in scales:
        layer.scaling = dict.fromkeys(scaling, 0.0)
    try:
        yield
    finally:
        for layer, scaling in scales:
            layer.scaling = scaling
