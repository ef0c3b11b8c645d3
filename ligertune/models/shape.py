"""Read the sizes of a built model, which may be on the meta device, for FLOPs and memory estimates."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.any_types import AnyModule
from ligertune.data.modalities.modality import modality_of
from ligertune.models.experts.experts_shape import expert_stacks, full_shape, read_experts
from ligertune.models.mixers.layer_parts import ATTENTION_IN, MIXER_OUT, LayerParts, parts_of_layers, with_mixer
from ligertune.models.mlp_shape import MLP_IN, mlp_width, reads_product, saved_without_gate
from ligertune.models.read_config import LINEAR_LAYERS, config_value
from ligertune.models.score_head import embedding_of, lm_head_of, score_head
from ligertune.planning.memory.model_shape import (
    DTYPE_BYTES,
    FrozenModelShape,
    HeadShape,
    LayerShape,
    ModelShape,
    ParameterKind,
)
from ligertune.planning.memory.states import NF4_BYTES


def read_shape(model: AnyModule, kind: type[ModelShape] = ModelShape) -> ModelShape:
    """Return the sizes of a transformers model, with or without PEFT's wrapper, as a `kind`."""
    config = model.config.get_text_config()
    matmul = _matmul_sizes(model)
    in_front = _layers_without_backward(model)
    layer, other_layers = _layer_shapes(model, len(in_front))
    parts = parts_of_layers(text_layers(model) or ())
    types = getattr(config, "layer_types", None) or [""] * len(parts)
    without = [not has.attention or kind in LINEAR_LAYERS for has, kind in zip(parts, types, strict=False)]
    mixing = [has.mixer is not None for has in parts]
    in_front_ids = {id(p) for layer in in_front for p in layer.parameters()}
    return kind(
        family=type(next(module for module in model.modules() if isinstance(module, PreTrainedModel))).__name__,
        n_parameters=sum(p.numel() for p in model.parameters()),
        n_trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        n_matmul=sum(size for size, _ in matmul),
        n_matmul_trainable=sum(size for size, p in matmul if p.requires_grad),
        n_matmul_in_front=sum(size for size, p in matmul if id(p) in in_front_ids),
        hidden_size=_hidden_size(model),
        num_hidden_layers=depth_of(config),
        attention_width=attention_widths(config)[0] if config_value(config, "num_attention_heads") else 0,
        vocab_size=config.vocab_size,
        context=config_value(config, "max_position_embeddings"),
        parameters=parameter_kinds(model),
        layer=layer,
        head=_head_shape(model),
        tower=modality_of(model.config).tower_shape(model),
        in_front=len(in_front),
        n_active=_active_parameters(model),
        other_layers=other_layers,
        linear_layers=sum(without),
        linear_in_front=sum(without[: len(in_front)]),
        mixers=sum(mixing),
        mixers_in_front=sum(mixing[: len(in_front)]),
    )


def read_frozen_shape(
    model: PreTrainedModel, dtype: str, *, four_bits: bool = False, offloaded: bool = False
) -> FrozenModelShape:
    """Return the sizes of a teacher, which only runs forward, as `dtype`; the loss reads its hidden states.

    four_bits: the layers' linear weights are NF4. offloaded: the layers are in host memory, but for one.
    """
    config = model.config.get_text_config()
    layer = _layer_shapes(model)[0]
    itemsize = DTYPE_BYTES[dtype]
    hidden = _hidden_size(model)
    gathered = layer.experts.chosen * hidden if layer and layer.experts else 0
    mlp = config_value(config, "intermediate_size", 4 * hidden) if layer is None else layer.mlp
    method = "qlora" if four_bits else "full"
    inside = outside = 0.0
    for kind, count in parameter_kinds(model):
        size = count * kind.elements * (NF4_BYTES if kind.quantised(method) else itemsize)
        inside, outside = (inside + size, outside) if kind.inside else (inside, outside + size)
    return FrozenModelShape(
        weights=round(outside + (inside / max(depth_of(config), 1) if offloaded else inside)),
        hidden=hidden,
        # a layer's input, attention's output, their sum, that normed; gate, up, their product; tokens sent to experts
        widest=4 * hidden + 3 * mlp + gathered,
        itemsize=itemsize,
        gives_hidden_states=True,
        in_host_memory=round(inside) if offloaded else 0,
    )


def copied_shape(shape: ModelShape, dtype: str) -> FrozenModelShape:
    """Return the sizes of a frozen copy of a model in `dtype`. The copy computes losses only, no logits."""
    itemsize = DTYPE_BYTES[dtype]
    hidden = shape.head.hidden if shape.head else 0
    widest = 4 * hidden + 3 * (shape.layer.mlp if shape.layer else 0)  # as of read_frozen_shape
    return FrozenModelShape(weights=itemsize * shape.n_parameters, hidden=hidden, widest=widest, itemsize=itemsize)


def _head_dim(config: PreTrainedConfig) -> int:
    heads = config_value(config, "num_attention_heads", 1)
    return config_value(config, "head_dim") or config_value(config, "hidden_size", 0) // heads


def depth_of(config: PreTrainedConfig) -> int:
    """Return the number of decoder layers; 0 for a configuration that does not say it (Blt)."""
    return config_value(config, "num_hidden_layers", 0)


def _hidden_size(model: PreTrainedModel) -> int:
    """Return the width of the hidden states: that of the configuration, or of the embedding."""
    embedding = embedding_of(model)
    return config_value(model.config.get_text_config(), "hidden_size") or _table(embedding).shape[1]


def base_of(model: AnyModule) -> PreTrainedModel:
    """Return the transformers model inside a PEFT model; any other model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def output_head(model: PreTrainedModel) -> nn.Module | None:
    """Return the output head, or the score head of a model that has none."""
    return lm_head_of(model) or score_head(base_of(model))


def parameter_kinds(model: AnyModule) -> tuple[tuple[ParameterKind, int], ...]:
    """Return (kind, number of parameters) for each kind of parameter. Tied parameters are counted once."""
    ends = [embedding_of(model), output_head(model)]
    outside = {id(p) for module in ends if module is not None for p in module.parameters()}
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    stacks = expert_stacks(model, model.config.get_text_config()).values()
    experts = {id(p) for stack in stacks for p in stack.module.parameters(recurse=False) if p.ndim == 3}
    kinds = Counter(
        ParameterKind(
            shape=tuple(p.shape),
            trains=p.requires_grad,
            inside=id(p) not in outside,
            linear=id(p) in linear,
            adapter=".lora_" in name or ".modules_to_save." in name or ".trainable_tokens_delta." in name,
            experts=id(p) in experts,
            stored_size=p.stored_bytes / p.numel() if isinstance(p, QuantisedWeight) else 0.0,
        )
        for name, p in model.named_parameters()
    )
    return tuple(kinds.items())


def _matmul_sizes(model: PreTrainedModel) -> list[tuple[int, nn.Parameter]]:
    """Return (elements that multiply a token, parameter) of every weight matrix. Inactive experts do not count."""
    embedding = embedding_of(model)
    head = lm_head_of(model)
    scores = score_head(base_of(model))
    stacks = expert_stacks(model, model.config.get_text_config())
    sizes = []
    modality = modality_of(model.config)
    for name, parameter in model.named_parameters():
        if not modality.in_language_model(name):
            continue  # it multiplies patches, not tokens
        stack = next((stack for prefix, stack in stacks.items() if name.startswith(prefix)), None)
        full = full_shape(parameter)
        if len(full) < 2 or parameter is _table(embedding) or (stack and name.endswith("bias")):
            continue
        if scores is not None and parameter is scores.weight:
            continue  # it multiplies one token of each text
        sizes.append((math.prod(full) if stack is None else round(math.prod(full) * stack.active_share), parameter))
    if head is not None and _table(head) is _table(embedding):
        sizes.append((_table(head).numel(), _table(head)))
    return sizes


def _active_parameters(model: PreTrainedModel) -> int | None:
    """Return the number of parameters that one token uses; None if that is all of them."""
    stacks = expert_stacks(model, model.config.get_text_config())
    if not stacks:
        return None
    idle = sum(
        parameter.numel() * (1 - stack.active_share)
        for name, parameter in model.named_parameters()
        for prefix, stack in stacks.items()
        if name.startswith(prefix)
    )
    return sum(p.numel() for p in model.parameters()) - round(idle)


def text_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the decoder layers of the language model; None if they are not in one ModuleList."""
    depth = depth_of(model.config.get_text_config())
    modality = modality_of(model.config)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth and modality.in_language_model(f"{name}."):
            return module
    return None


def _layers_without_backward(model: PreTrainedModel) -> list[nn.Module]:
    """Return the first decoder layers that have no backward: neither they nor anything before them trains."""
    layers = text_layers(model)
    embedding = embedding_of(model)
    head = output_head(model)
    if layers is None:
        return []
    siblings = next([*m.children()] for m in model.modules() if any(child is layers for child in m.children()))
    rest = [*layers, *siblings[siblings.index(layers) + 1 :], *filter(None, [head])]
    after = {id(p) for module in rest for p in module.parameters()} - {id(p) for p in embedding.parameters()}
    if any(p.requires_grad and id(p) not in after for p in model.parameters()):
        return []
    return [*itertools.takewhile(lambda layer: not any(p.requires_grad for p in layer.parameters()), layers)]


def _layer_shapes(
    model: PreTrainedModel, in_front: int = 0
) -> tuple[LayerShape | None, tuple[tuple[LayerShape, int], ...]]:
    """Return the sizes of the last layer, and of each other kind of layers with a backward with their number.

    A kind has experts or not, attention or not, a mixer or not, an MLP or not, and parameters that train or not. The
    first is that of the last layer with experts and attention that trains, as far as there are such layers. None: the
    layers are not understood. in_front: number of the first layers without a backward.
    """
    config = model.config.get_text_config()
    layers = text_layers(model)
    if layers is None:
        return None, ()
    parts = parts_of_layers(layers)
    if not config_value(config, "num_attention_heads") and any(has.attention for has in parts):
        return None, ()
    kinds: dict[tuple[bool, ...], list[tuple[nn.Module, LayerParts]]] = {}
    first_with_backward = min(in_front, len(layers) - 1)  # at least one layer has sizes
    for layer, has in [*zip(layers, parts, strict=True)][first_with_backward:]:
        trains = any(p.requires_grad for p in layer.parameters())
        kind = bool(expert_stacks(layer, config)), has.attention, has.mixer is None, has.mlp, trains
        kinds.setdefault(kind, []).append((layer, has))
    first, *others = sorted(kinds, reverse=True)
    shapes = ((_layer_shape(config, *kinds[kind][-1]), len(kinds[kind])) for kind in others)
    return _layer_shape(config, *kinds[first][-1]), tuple(shapes)


def _layer_shape(config: PreTrainedConfig, layer: nn.Module, has: LayerParts) -> LayerShape:
    query, key = attention_widths(config) if has.attention else (0, 0)
    experts = read_experts(config, layer)
    hidden = config_value(config, "hidden_size")
    mlp = mlp_width(config, layer) if has.mlp else 0
    if experts is not None:
        mlp = experts.chosen * experts.mlp + experts.shared
    of_experts = tuple(expert_stacks(layer, config))
    trained = [name.split(".") for name, p in layer.named_parameters() if p.requires_grad and p.ndim >= 2]
    reads_input = experts is not None and experts.reads_input
    shape = LayerShape(
        hidden=hidden,
        query=query,
        key=key,
        heads=config_value(config, "num_attention_heads") if has.attention else 0,
        mlp=mlp,
        norms=_norm_inputs(layer, query, key),
        attn_in=any(ATTENTION_IN & set(parts) for parts in trained),
        mlp_in=reads_input or any(MLP_IN & set(parts) for parts in trained),
        mlp_out=any(map(reads_product, trained)),
        experts=experts,
        norms_train=any(p.requires_grad and p.ndim == 1 for p in layer.parameters()),
        # OLMo 2 normalises the outputs of attention and MLP, not their inputs.
        normed="post_feedforward_layernorm" not in dict(layer.named_children()) or hasattr(layer, "input_layernorm"),
        attn_out=any(MIXER_OUT & set(parts) for parts in trained),
        gated=any(
            name.endswith("q_proj") and getattr(module, "out_features", 0) == 2 * query
            for name, module in layer.named_modules()
        ),
    )
    shape = _with_activation(_with_adapters(shape, layer, of_experts), layer)
    return shape if has.mixer is None else with_mixer(shape, has.mixer)


def _with_adapters(shape: LayerShape, layer: nn.Module, of_experts: tuple[str, ...]) -> LayerShape:
    """Return the sizes of a layer with those of its adapters. of_experts: starts of the names of experts' weights."""
    named = [(name, p) for name, p in layer.named_parameters() if not name.startswith(of_experts)]
    factors = [p.shape for name, p in named if ".lora_A." in name]
    return replace(
        shape,
        adapters=sum(size[0] for size in factors),
        adapter_inputs=sum(size[1] for size in factors),
        widest_adapter=max((size[1] for size in factors), default=0),
        adapter_outputs=sum(p.shape[0] for name, p in named if ".lora_B." in name),
        adapter_elements=sum(p.numel() for name, p in named if ".lora_" in name),
    )


def _with_activation(shape: LayerShape, layer: nn.Module) -> LayerShape:
    """Return the sizes of a layer with what the activation of its dense MLP saves, if that has no gate."""
    if shape.experts is not None or not shape.mlp:
        return shape
    return replace(shape, ungated=saved_without_gate(layer, shape.hidden, shape.mlp))


def attention_widths(config: PreTrainedConfig) -> tuple[int, int]:
    """Return the widths of queries and of keys: half of queries and outputs, and half of keys and values.

    Multi-head latent attention (DeepSeek-V3) expands keys and values to all heads, and pads values to the keys' width.
    """
    heads = config_value(config, "num_attention_heads")
    if config_value(config, "kv_lora_rank") and config_value(config, "qk_nope_head_dim"):
        width = heads * (config_value(config, "qk_nope_head_dim") + config_value(config, "qk_rope_head_dim", 0))
        return width, width
    return heads * _head_dim(config), config_value(config, "num_key_value_heads", heads) * _head_dim(config)


def _norm_inputs(layer: nn.Module, query: int, key: int) -> int:
    """Return the elements per token that the layer's norms save. q_norm and k_norm, per head, read all heads."""
    total = 0
    for name, parameter in layer.named_parameters():
        module = name.rpartition(".")[0].rpartition(".")[2]  # empty for a parameter of the layer itself
        if parameter.ndim == 1 and "norm" in module and name.endswith("weight"):
            total += query if "q_norm" in module else key if "k_norm" in module else parameter.numel()
    return total


def _head_shape(model: PreTrainedModel) -> HeadShape | None:
    head = lm_head_of(model)
    embedding = embedding_of(model)
    if head is None and score_head(base_of(model)) is not None:
        trains = any(p.requires_grad for p in embedding.parameters())
        vocab, hidden = embedding.weight.shape
        return HeadShape(vocab, hidden, head_trains=False, embedding_trains=trains, gives_scores=True)
    if head is None:
        return None
    weights = [p for p in head.parameters() if p.ndim == 2]
    table = _table(embedding)
    return HeadShape(
        vocab=table.shape[0],
        hidden=table.shape[1],
        head_trains=any(p.requires_grad and p.shape == table.shape for p in weights),
        embedding_trains=any(p.requires_grad for p in embedding.parameters()),
        tied=any(p is table for p in weights),
        token_rows=hasattr(head, "token_adapter"),
    )


def _table(layer: AnyModule) -> nn.Parameter:
    """Return the (V, E) weight of an embedding or output head. `weight` of PEFT's trainable tokens is a copy."""
    return layer.token_adapter.base_layer.weight if hasattr(layer, "token_adapter") else layer.weight
