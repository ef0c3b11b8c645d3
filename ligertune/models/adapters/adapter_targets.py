"""Targets of an adapter: the linear layers and parameters that LoRA reaches, under names that PEFT finds again.

The weights of experts are 3-D parameters, not layers: PEFT adapts them as `target_parameters`. For models whose experts
were separate linear layers before transformers 5, PEFT takes names such as `down_proj` in `target_modules` for those of
the experts, and would not adapt the layers of that name (a shared expert, the first dense layers). The weights of these
layers are targeted as parameters, too: the adapter's tensors have the same names and values either way.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

import peft
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from ligertune.data.modalities.modality import modality_of
from ligertune.errors import UserError, plural
from ligertune.files.base_model import stored_bits
from ligertune.models.adapters.name_patterns import matching_names
from ligertune.models.adapters.numbered_layers import is_numbered, numbered_names
from ligertune.models.score_head import embedding_of, is_tied, lm_head_of, score_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from ligertune.patching.mixers.recognise_mixers import is_mixer
from ligertune.planning.options import MethodOptions

ALL_LINEAR = "all-linear"
# PEFT refuses the output projection of these models, whose mixer reads its weight alone where mamba-ssm is installed
MAMBA_MODELS = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
REFUSED_BY_PEFT = "out_proj"
LINEAR = (nn.Linear, Conv1D)  # GPT-2's layers are transformers' Conv1D, a linear layer with a transposed weight
NO_EXPERTS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class AdapterTargets:
    """PEFT's `target_modules`, `target_parameters` and `exclude_modules`. left: layers that get no adapter.

    layers: PEFT's `layers_to_transform`, which limits `modules` but no name in it that is the whole name of a layer.
    """

    modules: str | list[str]
    parameters: list[str]
    excluded: list[str]
    left: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()


def find_targets(model: PreTrainedModel, spec: MethodOptions) -> AdapterTargets:
    """Return the layers and parameters that `spec` adapts.

    Raises UserError for names and layers that the model does not have, for an adapter on a tied head, and for DoRA of
    parameters.
    """
    _check_names(model, spec)
    outside = _linears_outside_text(model)
    experts = expert_parameters(model)
    every = [name for name in _adapted_layers(model, spec) if name not in outside]
    layers = numbered_names(every, _names_of_text(model), spec)
    _refuse_convolutions(model, layers)
    renamed = {leaf for leaf in {_leaf(name) for name in layers} if _is_taken_for_experts(model, leaf)}
    # in a family of mixtures PEFT takes these names for those of experts, even in a model with dense layers only
    if not experts and not spec.lora_target_parameters and not renamed:
        _check_trained(model, spec, [])
        return AdapterTargets(_asked_layers(model, spec, every), [], outside, layers=spec.layers_to_transform)
    _check_experts(layers, experts)
    clashing = [name for name in layers if _leaf(name) in renamed]
    left = tuple(clashing) if spec.type == "qlora" else ()  # PEFT adapts no parameter that is a packed matrix
    as_parameters = [] if left else [f"{name}.weight" for name in clashing]
    parameters = [*as_parameters, *_adapted_parameters(model, spec, experts)]
    _check_trained(model, spec, parameters)
    if spec.use_dora and parameters:
        raise UserError(
            f"method.use_dora: PEFT has DoRA for layers only, and {_relative(parameters[0])} is a parameter.",
            hint="Write use_dora: false, or lora_target_parameters: [] and the layers in lora_target_modules.",
        )
    every_layer = [name for name, module in model.named_modules() if _is_leaf_layer(module)]
    every_parameter = [name for name, _ in model.named_parameters()]
    return AdapterTargets(
        shortest_names([name for name in layers if _leaf(name) not in renamed], every_layer),
        shortest_names(parameters, every_parameter),
        [],
        left,
    )


def adapter_notes(model: PreTrainedModel, spec: MethodOptions) -> tuple[str, ...]:
    """Return what an adapter does not reach, for the plan. Raises UserError as `find_targets`."""
    targets = find_targets(model, spec)
    notes = []
    if spec.layers_to_transform and spec.lora_target_parameters:
        notes.append(
            "method.layers_to_transform does not limit method.lora_target_parameters, as in PEFT: they are adapted in"
            " all layers"
        )
    notes += _missing_notes(model, spec)
    if targets.parameters and spec.lora_dropout:
        notes.append("method.lora_dropout is that of layers; adapters of experts have none, because PEFT refuses it")
    if targets.left:
        shown = ", ".join(sorted({_relative(name) for name in targets.left}))
        notes.append(
            f"method.type: qlora: {plural(len(targets.left), 'layer')} ({shown}) get no adapter, because PEFT takes"
            " their names for those of experts"
        )
    return tuple(notes)


def expert_parameters(model: nn.Module) -> list[str]:
    """Return the names of the 3-D weights (X, ..., ...) of all experts of a mixture."""
    return [
        f"{name}.{parameter_name}"
        for name, module in model.named_modules()
        if hasattr(module, "_is_expert_parallel") or "expert" in type(module).__name__.lower()
        for parameter_name, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def shortest_names(wanted: Iterable[str], every: Iterable[str]) -> list[str]:
    """Return names that match, as the end of a name, all of `wanted` and nothing else of `every`.

    A name starts after the number of its layer, if that is enough.
    """
    wanted = set(wanted)
    found = set()
    others = set(every) - wanted
    for name in wanted:
        short = _relative(name)
        clashes = any(other == short or other.endswith(f".{short}") for other in others)
        found.add(name if clashes else short)
    return sorted(found)


def _relative(name: str) -> str:
    """Return a name without what comes before and with the number of its layer."""
    return re.split(r"(?:^|\.)\d+\.", name)[-1]


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _endings(name: str) -> set[str]:
    """Return a.b.c, b.c and c of a.b.c. PEFT takes other words of `modules_to_save` for regular expressions."""
    parts = name.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}


def _is_leaf_layer(module: nn.Module) -> bool:
    return next(module.children(), None) is None


def _missing_notes(model: PreTrainedModel, spec: MethodOptions) -> list[str]:
    """Return a note on names of `lora_target_modules` that are in none of the layers of `layers_to_transform`."""
    wanted = spec.lora_target_modules
    if isinstance(wanted, str) or not spec.layers_to_transform:
        return []
    adapted = [name for name in _adapted_layers(model, spec) if is_numbered(name, spec)]
    lost = [end for end in wanted if not any(name == end or name.endswith(f".{end}") for name in adapted)]
    if not lost:
        return []
    return [f"method.layers_to_transform: {', '.join(lost)} is in none of these layers, and gets no adapter"]


def _adapted_layers(model: PreTrainedModel, spec: MethodOptions) -> list[str]:
    """Return the full names of the layers of `lora_target_modules`.

    all-linear: all but output head and routers, and the layer that PEFT refuses in some models.
    """
    wanted = spec.lora_target_modules
    if not isinstance(wanted, str):
        return [
            name for name, _ in model.named_modules() if any(name == end or name.endswith(f".{end}") for end in wanted)
        ]
    if wanted != ALL_LINEAR:
        return _matching_layers(model, wanted)
    head = score_head(model) or lm_head_of(model)
    routers = _linear_routers(model)
    refused = _refused_layer(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, LINEAR) and module is not head and name not in routers and _leaf(name) != refused
    ]


def _matching_layers(model: PreTrainedModel, expression: str) -> list[str]:
    """Return the full names of the layers that a regular expression matches as a whole. Raises UserError for none.

    PEFT matches it with `re`, which has no time limit.
    """
    names = [name for name, _ in model.named_modules() if name]
    found = matching_names(expression, names, key="method.lora_target_modules", whole=True)
    if not found:
        leaf_names = sorted({_leaf(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)})
        instead = expression if expression in leaf_names else leaf_names[0]
        raise UserError(
            f"method.lora_target_modules: {expression!r} matches no whole name of a layer, such as {names[-1]}.",
            hint=f"Write a list of names, such as [{instead}], or an expression such as '.*{instead}'.",
        )
    return [name for name in names if name in found]


def _linear_routers(model: nn.Module) -> set[str]:
    """Return the names of the linear layers that choose experts: next to the experts, with one output for each."""
    found = set()
    modules = dict(model.named_modules())
    for name in expert_parameters(model):
        experts = name.rpartition(".")[0]
        block = experts.rpartition(".")[0]
        n_experts = len(model.get_parameter(name))
        found |= {
            f"{block}.{inner}"
            for inner, module in modules[block].named_modules()
            if isinstance(module, nn.Linear) and module.out_features == n_experts
        }
    return found


def _adapted_parameters(model: PreTrainedModel, spec: MethodOptions, experts: list[str]) -> list[str]:
    """Return the full names of `lora_target_parameters`; null stands for the experts with all-linear, else for none."""
    ends = spec.lora_target_parameters
    if ends is None:
        numbered = [name for name in experts if is_numbered(name, spec)]
        return numbered if spec.lora_target_modules == ALL_LINEAR else []
    found = []
    for end in ends:
        names = [name for name, _ in model.named_parameters() if name == end or name.endswith(f".{end}")]
        if not names:
            known = sorted({_relative(name) for name in experts})
            close = get_close_matches(end, known, n=1)
            raise UserError(
                f"method.lora_target_parameters: the model has no parameter called {end}."
                + (f" Did you mean {close[0]}?" if close else ""),
                hint=f"The weights of its experts are {', '.join(known)}." if known else "It has no experts.",
            )
        found += names
    for name in found:
        layer = model.get_submodule(name.rpartition(".")[0])
        if model.get_parameter(name).ndim not in (2, 3) or isinstance(layer, NO_EXPERTS):
            raise UserError(
                f"method.lora_target_parameters: {_relative(name)} is not a weight of experts or of a router.",
                hint="Name layers in method.lora_target_modules.",
            )
    return found


def _is_taken_for_experts(model: PreTrainedModel, leaf: str) -> bool:
    """Return whether PEFT replaces this name in `target_modules` by the weights of experts."""
    config = peft.LoraConfig(target_modules=[leaf])
    try:
        convert_peft_config_for_transformers(config, model, conversions=None)
    except ValueError:  # gate_proj without up_proj, which are one weight in the experts
        return True
    return leaf not in (config.target_modules or ())


def _asked_layers(model: PreTrainedModel, spec: MethodOptions, layers: list[str]) -> str | list[str]:
    """Return the layers as PEFT takes them. An expression becomes names: PEFT would match it without a time limit."""
    wanted = spec.lora_target_modules
    if wanted == ALL_LINEAR and _refused_layer(model) is None and not spec.layers_to_transform:
        return wanted
    if not isinstance(wanted, str):
        return [*wanted]
    names = [name for name, _ in model.named_modules()]
    return [name for name in shortest_names(layers, names) if name not in names or is_numbered(name, spec)]


def _refuse_convolutions(model: PreTrainedModel, layers: Sequence[str]) -> None:
    """Raise UserError for the convolution of a mixer, whose adapter would train nothing."""
    for name in layers:
        mixer = model.get_submodule(name.rpartition(".")[0])
        if isinstance(model.get_submodule(name), nn.Conv1d) and is_mixer(mixer):
            raise UserError(
                f"method.lora_target_modules: {_relative(name)} is the convolution of a {type(mixer).__name__}, which "
                "reads its weight alone: an adapter would train nothing.",
                hint="Name other layers in method.lora_target_modules.",
            )


def _refused_layer(model: PreTrainedModel) -> str | None:
    """Return the name of the layer that PEFT refuses to adapt in such a model."""
    return REFUSED_BY_PEFT if model.config.model_type in MAMBA_MODELS else None


def _check_names(model: PreTrainedModel, spec: MethodOptions) -> None:
    leaves = {_leaf(name) for name, _ in model.named_modules() if name}
    linear = {_leaf(name) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    wanted = spec.lora_target_modules
    targets: Sequence[str]
    if wanted == ALL_LINEAR:
        targets = ()
    elif isinstance(wanted, str):
        targets = _matching_layers(model, wanted)
    else:
        targets = wanted
    endings = {end for name, _ in model.named_modules() for end in _endings(name)}
    for key, names in (("lora_target_modules", targets), ("lora_modules_to_save", spec.lora_modules_to_save)):
        for name in names:
            if _leaf(name) not in leaves or (key == "lora_modules_to_save" and name not in endings):
                close = get_close_matches(name, leaves, n=1)
                meant = f" Did you mean {close[0]}?" if close else ""
                raise UserError(
                    f"method.{key}: the model has no layer called {name}.{meant}",
                    hint=f"Its linear layers are {', '.join(sorted(linear))}.{_about_experts(model, key)}",
                )
    _check_tied_names(model, targets, spec.lora_modules_to_save)
    _check_frozen_formats(model, spec.lora_modules_to_save)


def _check_frozen_formats(model: PreTrainedModel, saved: Iterable[str]) -> None:
    """Raise UserError for a layer to train in full whose weight stays in a block-scaled format, which cannot train."""
    frozen = {name.rpartition(".")[0] for name, p in model.named_parameters() if isinstance(p, QuantisedWeight)}
    for end in saved:
        names = [name for name, _ in model.named_modules() if name == end or name.endswith(f".{end}")]
        for name in names:
            if any(layer == name or layer.startswith(f"{name}.") for layer in frozen):
                raise UserError(
                    f"method.lora_modules_to_save: {name} stays in the block-scaled format of the base's files (MXFP4"
                    " or float8), in which it cannot train.",
                    hint="Name it in lora_target_modules, or give a copy of the base in bfloat16.",
                )


def _check_tied_names(model: PreTrainedModel, targets: Iterable[str], saved: Iterable[str]) -> None:
    """Raise UserError for a tied weight that would get an adapter, or that PEFT would train apart from the other."""
    if not is_tied(model):
        return
    head = lm_head_of(model)
    embedding = embedding_of(model)
    embedding_name = next(name for name, module in model.named_modules() if module is embedding)
    tied = {_leaf(name) for name, module in model.named_modules() if module in (head, embedding)}
    for name in targets:
        if _leaf(name) in tied:
            raise UserError(
                f"method: {name} shares its weight (tie_word_embeddings: embedding and output head are one matrix), "
                "so an adapter on it could not be merged.",
                hint=f"Leave {name} out of lora_target_modules. lora_modules_to_save: [{name}] trains all of it.",
            )
    for name in saved:
        if _leaf(name) in tied and _leaf(embedding_name) not in EMBEDDING_LAYER_NAMES:
            raise UserError(
                f"method.lora_modules_to_save: {name} shares its weight (tie_word_embeddings), and PEFT keeps embedding"
                f" and output head together only where they are called {' and '.join(EMBEDDING_LAYER_NAMES)}.",
                hint=f"Leave {name} out, or write method.type: freeze.",
            )


def _check_experts(layers: list[str], experts: list[str]) -> None:
    """Raise UserError for a module in lora_target_modules that holds the weights of experts: it is no layer."""
    for name in layers:
        inside = sorted({_relative(expert) for expert in experts if expert.rpartition(".")[0] == name})
        if inside:
            raise UserError(
                f"method.lora_target_modules: {_relative(name)} is no layer: it holds the weights of experts.",
                hint=f"Write lora_target_parameters: [{', '.join(inside)}].",
            )


def _check_trained(model: PreTrainedModel, spec: MethodOptions, parameters: list[str]) -> None:
    """Raise UserError for a module in lora_modules_to_save that cannot be trained in full.

    PEFT refuses a module whose parameters have an adapter; weights in 4 or 8 bits have no gradient.
    """
    head = score_head(model) or lm_head_of(model)
    experts = set(expert_parameters(model))
    bits = stored_bits(spec.stored_as)
    for wanted in spec.lora_modules_to_save:
        for name, module in model.named_modules():
            if name != wanted and not name.endswith(f".{wanted}"):
                continue
            inside = [one for one in parameters if one.startswith(f"{name}.")]
            if inside:
                raise UserError(
                    f"method.lora_modules_to_save: {wanted} trains in full, and its {_relative(inside[0])} has an"
                    " adapter, too.",
                    hint=f"Leave {wanted} out, or {_relative(inside[0])} out of method.lora_target_parameters"
                    " (with all-linear, write []).",
                )
            linear = any(isinstance(inner, nn.Linear) and inner is not head for inner in module.modules())
            packed = bits == 4 and any(one.startswith(f"{name}.") for one in experts)
            if bits and (linear or packed):
                raise UserError(
                    f"method.lora_modules_to_save: {wanted} is stored in {bits} bits, and cannot train in full.",
                    hint=f"Leave {wanted} out, or write method.type: lora without load_in_8bit.",
                )


def _about_experts(model: nn.Module, key: str) -> str:
    experts = sorted({_relative(name) for name in expert_parameters(model)})
    if not experts or key != "lora_target_modules":
        return ""
    return f" The weights of its experts belong to lora_target_parameters: [{', '.join(experts)}]."


def _names_of_text(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules of the language model."""
    modality = modality_of(model.config)
    return [name for name, _ in model.named_modules() if modality.in_language_model(f"{name}.weight")]


def _linears_outside_text(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers outside the language model, in towers, which get no adapter."""
    modality = modality_of(model.config)
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in linear if not modality.in_language_model(f"{name}.weight")]
