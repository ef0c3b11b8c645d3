"""Read the sizes of a built model: parameters by kind, layer widths, and the weights that multiply each token."""

from __future__ import annotations

import math
from collections import Counter

from torch import nn
from transformers import PreTrainedModel

from ligertune.models.layer_shape import head_shape, layer_shape, layers_in_front, tower_shape
from ligertune.planning.memory.model_shape import ModelShape, ParameterKind
from ligertune.vision.families import family_of, part_of


def read_shape(model: PreTrainedModel) -> ModelShape:
    """Return the sizes of a model, which may be on the meta device and wrapped by adapters."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    matmul, in_front = _matmul_sizes(model), layers_in_front(model)
    in_front_ids = {id(p) for layer in in_front for p in layer.parameters()}
    return ModelShape(
        family=type(_inside(model)).__name__,
        n_parameters=sum(p.numel() for p in model.parameters()),
        n_trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        n_matmul=sum(size for size, _ in matmul),
        n_matmul_trainable=sum(size for size, p in matmul if p.requires_grad),
        n_matmul_in_front=sum(size for size, p in matmul if id(p) in in_front_ids),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        attention_width=heads * (getattr(config, "head_dim", None) or config.hidden_size // heads),
        vocab_size=config.vocab_size,
        context=getattr(config, "max_position_embeddings", None),
        parameters=parameter_kinds(model),
        layer=layer_shape(model),
        head=head_shape(model),
        tower=tower_shape(model),
        in_front=len(in_front),
    )


def _inside(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside an adapter wrapper."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def parameter_kinds(model: PreTrainedModel) -> tuple[tuple[ParameterKind, int], ...]:
    """Return (kind, number of parameters) for each kind of parameter. Tied parameters are counted once."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    outside = {id(p) for module in ends if module is not None for p in module.parameters()}
    products = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    kinds: Counter[ParameterKind] = Counter()
    for name, p in model.named_parameters():
        kind = ParameterKind(
            shape=tuple(p.shape),
            trains=p.requires_grad,
            inside=id(p) not in outside,
            linear=id(p) in products,
            adapter=".lora_" in name or ".modules_to_save." in name,
        )
        kinds[kind] += 1
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
            whole = getattr(parameter, "quant_state", parameter).shape  # 4-bit weights are packed
            sizes.append((math.prod(whole), parameter))
        elif parameter.ndim == 3:
            sizes.append((int(parameter.numel() * active), parameter))
    if head is not None and head.weight is embedding.weight:
        sizes.append((head.weight.numel(), head.weight))
    return sizes
