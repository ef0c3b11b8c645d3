"""Read the sizes of a built model, which may be on the meta device, for FLOPs and memory estimates."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.planning.memory.model_shape import (
    DTYPE_BYTES,
    FrozenModelShape,
    HeadShape,
    LayerShape,
    ModelShape,
    ParameterKind,
    TowerShape,
)
from ligertune.planning.memory.states import NF4_BYTES
from ligertune.vision.families import Family, family_of, part_of

# Linear layers by the input they save for the backward. Attention itself saves o_proj's input.
ATTENTION_IN = {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_a_proj", "kv_a_proj_with_mqa"}
MLP_IN = {"gate_proj", "up_proj", "gate_up_proj", "fc1"}
MLP_OUT = {"down_proj", "fc2"}


def read_shape(model: PreTrainedModel) -> ModelShape:
    """Return the sizes of a model, with or without adapters."""
    config = model.config.get_text_config()
    matmul, in_front = _matmul_sizes(model), _layers_without_backward(model)
    in_front_ids = {id(p) for layer in in_front for p in layer.parameters()}
    return ModelShape(
        family=type(next(module for module in model.modules() if isinstance(module, PreTrainedModel))).__name__,
        n_parameters=sum(p.numel() for p in model.parameters()),
        n_trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        n_matmul=sum(size for size, _ in matmul),
        n_matmul_trainable=sum(size for size, p in matmul if p.requires_grad),
        n_matmul_in_front=sum(size for size, p in matmul if id(p) in in_front_ids),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        attention_width=config.num_attention_heads * _head_dim(config),
        vocab_size=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None),
        parameters=parameter_kinds(model),
        layer=_layer_shape(model),
        head=_head_shape(model),
        tower=_tower_shape(model),
        in_front=len(in_front),
    )


def read_frozen_shape(
    model: PreTrainedModel,
    dtype: str,
    *,
    gives_hidden_states: bool = False,
    four_bits: bool = False,
    offloaded: bool = False,
) -> FrozenModelShape:
    """Return the sizes of a model that only runs forward, as `dtype`. gives_hidden_states: as of FrozenModelShape.

    four_bits: the layers' linear weights are NF4. offloaded: the layers are in host memory, but for one.
    """
    config, layer, itemsize = model.config.get_text_config(), _layer_shape(model), DTYPE_BYTES[dtype]
    mlp = getattr(config, "intermediate_size", 4 * config.hidden_size) if layer is None else layer.mlp
    method = "qlora" if four_bits else "full"
    inside = outside = 0.0
    for kind, count in parameter_kinds(model):
        size = count * kind.elements * (NF4_BYTES if kind.quantised(method) else itemsize)
        inside, outside = (inside + size, outside) if kind.inside else (inside, outside + size)
    return FrozenModelShape(
        weights=round(outside + (inside / config.num_hidden_layers if offloaded else inside)),
        hidden=config.hidden_size,
        # a layer's input, attention's output, their sum, that normed; gate, up, their product
        widest=4 * config.hidden_size + 3 * mlp,
        itemsize=itemsize,
        gives_hidden_states=gives_hidden_states,
        in_host_memory=round(inside) if offloaded else 0,
    )


def copied_shape(shape: ModelShape, dtype: str) -> FrozenModelShape:
    """Return the sizes of a frozen copy of a model in `dtype`. The copy computes losses only, no logits."""
    itemsize, hidden = DTYPE_BYTES[dtype], shape.head.hidden if shape.head else 0
    widest = 4 * hidden + 3 * (shape.layer.mlp if shape.layer else 0)  # as of read_frozen_shape
    return FrozenModelShape(weights=itemsize * shape.n_parameters, hidden=hidden, widest=widest, itemsize=itemsize)


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def parameter_kinds(model: PreTrainedModel) -> tuple[tuple[ParameterKind, int], ...]:
    """Return (kind, number of parameters) for each kind of parameter. Tied parameters are counted once."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {id(p) for module in ends if module is not None for p in module.parameters()}
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    kinds = Counter(
        ParameterKind(
            shape=tuple(p.shape),
            trains=p.requires_grad,
            inside=id(p) not in outside,
            linear=id(p) in linear,
            adapter=".lora_" in name or ".modules_to_save." in name,
        )
        for name, p in model.named_parameters()
    )
    return tuple(kinds.items())


def _matmul_sizes(model: PreTrainedModel) -> list[tuple[int, nn.Parameter]]:
    """Return (elements that multiply a token, parameter) of every weight matrix. Inactive experts do not count."""
    config = model.config.get_text_config()
    n_experts = next(
        (n for k in ("num_local_experts", "num_experts", "n_routed_experts") if (n := getattr(config, k, None))), 1
    )
    active = (getattr(config, "num_experts_per_tok", None) or n_experts) / n_experts
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    sizes = []
    family = family_of(model.config)
    for name, parameter in model.named_parameters():
        if family is not None and part_of(family, name) != "language_model":
            continue  # it multiplies patches, not tokens
        if parameter.ndim == 2 and parameter is not embedding.weight:
            full = getattr(parameter, "quant_state", parameter).shape  # 4-bit weights are stored packed
            sizes.append((math.prod(full), parameter))
        elif parameter.ndim == 3:
            sizes.append((int(parameter.numel() * active), parameter))
    if head is not None and head.weight is embedding.weight:
        sizes.append((head.weight.numel(), head.weight))
    return sizes


def text_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """Return the decoder layers of the language model; None if they are not in one ModuleList."""
    depth, family = model.config.get_text_config().num_hidden_layers, family_of(model.config)
    for name, module in model.named_modules():
        in_tower = family is not None and part_of(family, f"{name}.") != "language_model"
        if isinstance(module, nn.ModuleList) and len(module) == depth and not in_tower:
            return module
    return None


def _layers_without_backward(model: PreTrainedModel) -> list[nn.Module]:
    """Return the first decoder layers that have no backward: neither they nor anything before them trains."""
    layers, embedding, head = text_layers(model), model.get_input_embeddings(), model.get_output_embeddings()
    if layers is None:
        return []
    siblings = next([*m.children()] for m in model.modules() if any(child is layers for child in m.children()))
    rest = [*layers, *siblings[siblings.index(layers) + 1 :], *filter(None, [head])]
    after = {id(p) for module in rest for p in module.parameters()} - {id(p) for p in embedding.parameters()}
    if any(p.requires_grad and id(p) not in after for p in model.parameters()):
        return []
    return [*itertools.takewhile(lambda layer: not any(p.requires_grad for p in layer.parameters()), layers)]


def _layer_shape(model: PreTrainedModel) -> LayerShape | None:
    """Return the sizes of the last layer (in some mixtures of experts the first is dense); None if unknown."""
    config, layers = model.config.get_text_config(), text_layers(model)
    if layers is None or not getattr(config, "num_attention_heads", None):
        return None
    layer, heads = layers[-1], config.num_attention_heads
    query = heads * _head_dim(config)
    key = (getattr(config, "num_key_value_heads", None) or heads) * _head_dim(config)
    mlp, routed = _mlp_width(config, layer)
    trained = [name.split(".") for name, p in layer.named_parameters() if p.requires_grad and p.ndim >= 2]
    return LayerShape(
        hidden=config.hidden_size,
        query=query,
        key=key,
        heads=heads,
        mlp=mlp,
        norms=_norm_inputs(layer, config.hidden_size, query, key),
        attn_in=any(ATTENTION_IN & set(parts) for parts in trained),
        mlp_in=any(MLP_IN & set(parts) for parts in trained),
        mlp_out=any(MLP_OUT & set(parts) for parts in trained),
        adapters=sum(p.shape[0] for name, p in layer.named_parameters() if ".lora_A." in name),
        routed=routed,
        norms_train=any(p.requires_grad and p.ndim == 1 for p in layer.parameters()),
        # OLMo 2 normalises the outputs of attention and MLP, not their inputs.
        normed="post_feedforward_layernorm" not in dict(layer.named_children()) or hasattr(layer, "input_layernorm"),
    )


def _mlp_width(config: PreTrainedConfig, layer: nn.Module) -> tuple[int, int]:
    """Return (width of gate and up per token, copies of a token that are sent to experts)."""
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if not any(p.ndim == 3 for p in layer.parameters()):
        return dense, 0
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return chosen * (getattr(config, "moe_intermediate_size", None) or dense) + shared, chosen


def _norm_inputs(layer: nn.Module, hidden: int, query: int, key: int) -> int:
    """Return the elements per token that the layer's norms save. q_norm and k_norm, per head, read all heads."""
    total = 0
    for name, parameter in layer.named_parameters():
        module = name.split(".")[-2]
        if parameter.ndim == 1 and "norm" in module and name.endswith("weight"):
            total += query if "q_norm" in module else key if "k_norm" in module else hidden
    return total


def _head_shape(model: PreTrainedModel) -> HeadShape | None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None:
        return None
    weights = [p for p in head.parameters() if p.ndim == 2]
    return HeadShape(
        vocab=embedding.weight.shape[0],
        hidden=embedding.weight.shape[1],
        head_trains=any(p.requires_grad and p.shape == embedding.weight.shape for p in weights),
        embedding_trains=any(p.requires_grad for p in embedding.parameters()),
        tied=any(p is embedding.weight for p in weights),
    )


def _tower_shape(model: PreTrainedModel) -> TowerShape | None:
    """Return the sizes of the vision tower; None for a text model, and for tiles, whose number tokens do not tell."""
    family = family_of(model.config)
    if family is None or family.layout == "tiles":
        return None
    trains = {part_of(family, name) for name, p in model.named_parameters() if p.requires_grad}
    prefix = family.vision_tower[0]
    lists = [m for name, m in model.named_modules() if name.startswith(prefix) and isinstance(m, nn.ModuleList)]
    layers = max(lists, key=len, default=None)
    if not layers:
        return None
    weights = [(name, p.shape) for name, p in layers[0].named_parameters() if p.ndim == 2]
    hidden = min(min(shape) for _, shape in weights)
    mlp = max(shape[1] for _, shape in weights)
    gated = any("gate" in name for name, _ in weights)
    # Attention saves v as a view of the packed projection's output, which holds q and k too.
    packed = any(sorted(shape) == [hidden, 3 * hidden] for _, shape in weights)
    per_token = _patches_per_token(model.config, family)
    merged = round(per_token) if family.layout == "patches" else 1  # patches that the projector reads as one
    # quick_gelu saves input, sigmoid and product; a gated MLP saves gate, up and product
    in_mlp = 3 if gated or getattr(model.config.vision_config, "hidden_act", "") == "quick_gelu" else 2
    return TowerShape(
        layers=len(layers),
        hidden=hidden,
        # two norms' inputs and outputs, queries, keys, values, attention's output
        kept=(8 + 2 * packed) * hidden + in_mlp * mlp,
        patches_per_token=per_token,
        trains="vision_tower" in trains,
        projector=_saved_by_projector(model, family, hidden * merged) if trains & {"vision_tower", "projector"} else 0,
    )


def _saved_by_projector(model: PreTrainedModel, family: Family, width_in: int) -> int:
    """Return the elements per token that the projectors save. Each projector's first input has `width_in` elements."""
    saved = width = 0
    for name, parameter in model.named_parameters():
        if part_of(family, name) != "projector":
            continue
        if parameter.ndim == 2:
            is_first = width not in parameter.shape
            saved += width_in if is_first else 2 * width  # an activation's input and output
            width = sum(parameter.shape) - (width_in if is_first else width)
        elif re.search(r"(norm|ln_)\w*\.weight$", name):
            saved += width_in
    return saved


def _patches_per_token(config: PreTrainedConfig, family: Family) -> float:
    """Return the patches that the tower reads per image token of the language model."""
    vision = config.vision_config
    if family.layout == "patches":
        return float(getattr(vision, "spatial_merge_size", 2) ** 2)
    patches = (vision.image_size // vision.patch_size) ** 2
    return patches / (getattr(config, "mm_tokens_per_image", None) or patches)
