"""What the memory plan needs to know of a model's layers and head, read from a built one (on the meta device)."""

from __future__ import annotations

import itertools
import re

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ligertune.planning.memory.model_shape import HeadShape, LayerShape, TowerShape
from ligertune.vision.families import Family, family_of, part_of

# Products by what goes into them. Attention's output, into o_proj, is kept by attention anyway.
ATTENTION_IN = {"q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_a_proj", "kv_a_proj_with_mqa"}
MLP_IN = {"gate_proj", "up_proj", "gate_up_proj", "fc1"}
MLP_OUT = {"down_proj", "fc2"}


def layer_shape(model: PreTrainedModel) -> LayerShape | None:
    """The model's last layer (the first may be dense where the others are mixtures); None if it has no list of them."""
    config, layers = model.config.get_text_config(), text_layers(model)
    if layers is None or not getattr(config, "num_attention_heads", None):
        return None
    layer, heads = layers[-1], config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    query = heads * width
    key = (getattr(config, "num_key_value_heads", None) or heads) * width
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
        # OLMo 2 norms what its attention and MLP give, instead of what they get
        normed="post_feedforward_layernorm" not in dict(layer.named_children()) or hasattr(layer, "input_layernorm"),
    )


def text_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The layers of the language model; None if it has no list of them."""
    depth, family = model.config.get_text_config().num_hidden_layers, family_of(model.config)
    for name, module in model.named_modules():
        seen = family is not None and part_of(family, f"{name}.") != "language_model"
        if isinstance(module, nn.ModuleList) and len(module) == depth and not seen:
            return module
    return None


def layers_in_front(model: PreTrainedModel) -> list[nn.Module]:
    """The language model's first layers that no gradient goes back through, and which keep nothing.

    Neither they nor what is before them trains.
    """
    layers, embedding, head = text_layers(model), model.get_input_embeddings(), model.get_output_embeddings()
    if layers is None:
        return []
    beside = next([*m.children()] for m in model.modules() if any(child is layers for child in m.children()))
    rest = [*layers, *beside[beside.index(layers) + 1 :], *filter(None, [head])]
    behind = {id(p) for module in rest for p in module.parameters()} - {id(p) for p in embedding.parameters()}
    if any(p.requires_grad and id(p) not in behind for p in model.parameters()):
        return []
    return [*itertools.takewhile(lambda layer: not any(p.requires_grad for p in layer.parameters()), layers)]


def _mlp_width(config: PreTrainedConfig, layer: nn.Module) -> tuple[int, int]:
    """(elements of gate, up or the product between them, copies of a token that go to experts)."""
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    if not any(p.ndim == 3 for p in layer.parameters()):
        return dense, 0
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return chosen * (getattr(config, "moe_intermediate_size", None) or dense) + shared, chosen


def _norm_inputs(layer: nn.Module, hidden: int, query: int, key: int) -> int:
    """Elements a token that the layer's norms keep; those of single heads see all heads."""
    total = 0
    for name, parameter in layer.named_parameters():
        module = name.split(".")[-2]
        if parameter.ndim == 1 and "norm" in module and name.endswith("weight"):
            total += query if "q_norm" in module else key if "k_norm" in module else hidden
    return total


def head_shape(model: PreTrainedModel) -> HeadShape | None:
    """The output head's and the embedding's sizes, and whether they train; None without a head."""
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


def tower_shape(model: PreTrainedModel) -> TowerShape | None:
    """The layers of a model that sees; None for text, and where a picture's size does not follow from its tokens."""
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
    fused = any(sorted(shape) == [hidden, 3 * hidden] for _, shape in weights)  # v is a view of what q and k came from
    per_token = _patches_per_token(model.config, family)
    merged = round(per_token) if family.layout == "patches" else 1  # patches that the projector is given as one
    # a sigmoid's result beside the input and the product; gate, up and their product
    in_mlp = 3 if gated or getattr(model.config.vision_config, "hidden_act", "") == "quick_gelu" else 2
    return TowerShape(
        layers=len(layers),
        hidden=hidden,
        # two norms' inputs and outputs, queries, keys, values, attention's output
        kept=(8 + 2 * fused) * hidden + in_mlp * mlp,
        patches_per_token=per_token,
        trains="vision_tower" in trains,
        projector=_kept_by_projector(model, family, hidden * merged) if trains & {"vision_tower", "projector"} else 0,
    )


def _kept_by_projector(model: PreTrainedModel, family: Family, given: int) -> int:
    """Elements a token that norms, products and activations between tower and text keep: what each is given.

    given: the first's. Of several projectors each begins with it again.
    """
    kept = width = 0
    for name, parameter in model.named_parameters():
        if part_of(family, name) != "projector":
            continue
        if parameter.ndim == 2:
            begins = width not in parameter.shape
            kept += given if begins else 2 * width  # an activation's input and output
            width = sum(parameter.shape) - (given if begins else width)
        elif re.search(r"(norm|ln_)\w*\.weight$", name):
            kept += given
    return kept


def _patches_per_token(config: PreTrainedConfig, family: Family) -> float:
    """How many patches the tower sees for each token that the language model is given."""
    vision = config.vision_config
    if family.layout == "patches":
        return float(getattr(vision, "spatial_merge_size", 2) ** 2)
    patches = (vision.image_size // vision.patch_size) ** 2
    return patches / (getattr(config, "mm_tokens_per_image", None) or patches)
