"""The numbers of a model that plans and reports need: parameters, sizes, FLOPs a token."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ligertune.models.layer_shape import head_shape, layer_shape, layers_in_front, tower_shape
from ligertune.planning.memory.activation_bytes import HeadShape, LayerShape, TowerShape
from ligertune.planning.memory.heads_bytes import Heads
from ligertune.planning.memory.states import ParameterKind
from ligertune.vision.families import family_of, part_of


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model; tied weights are counted once in `n_parameters`."""

    family: str
    n_parameters: int
    n_trainable: int
    n_matmul: int  # parameters that multiply every token: all 2-D weights but the input embedding, the head always
    n_matmul_trainable: int
    hidden_size: int
    num_hidden_layers: int
    attention_width: int  # heads x head size: the width of attention's two products
    vocab_size: int
    context: int | None
    parameters: tuple[tuple[ParameterKind, int], ...] = ()  # and how many there are of each kind
    layer: LayerShape | None = None
    head: HeadShape | None = None
    tower: TowerShape | None = None
    in_front: int = 0  # first layers that no gradient goes back through
    n_matmul_in_front: int = 0  # of n_matmul, in those
    heads: Heads | None = None  # Medusa's

    @staticmethod
    def of(model: PreTrainedModel) -> ModelShape:
        """Read from a built model; one on the meta device does."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        matmul, in_front = _matmul_sizes(model), layers_in_front(model)
        spared = {id(p) for layer in in_front for p in layer.parameters()}
        return ModelShape(
            family=type(_inside(model)).__name__,
            n_parameters=sum(p.numel() for p in model.parameters()),
            n_trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
            n_matmul=sum(size for size, _ in matmul),
            n_matmul_trainable=sum(size for size, p in matmul if p.requires_grad),
            n_matmul_in_front=sum(size for size, p in matmul if id(p) in spared),
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

    def flops(self, *, tokens: int, squared_lengths: int) -> float:
        """Model FLOPs of forward and backward over documents, no recomputation.

        tokens: their lengths summed; squared_lengths: their squared lengths summed. A weight costs 2 FLOPs a token
        forward, 2 for its input's gradient and, where it trains, 2 for its own (Kaplan et al. 2020, section 2.1);
        causal attention 2 * T^2 * width a layer forward (half of the square, two products) and twice that backward.
        Frozen layers in front of all that trains have no backward.
        """
        weights = (4 * self.n_matmul - 2 * self.n_matmul_in_front + 2 * self.n_matmul_trainable) * tokens
        passes = 3 * self.num_hidden_layers - 2 * self.in_front  # through a layer's attention
        return float(weights + 2 * passes * self.attention_width * squared_lengths)


def _inside(model: nn.Module) -> PreTrainedModel:
    """The transformers model that an adapter may be wrapped around."""
    return next(module for module in model.modules() if isinstance(module, PreTrainedModel))


def parameter_kinds(model: PreTrainedModel) -> tuple[tuple[ParameterKind, int], ...]:
    """Each kind of parameter and how many there are; tied ones are counted once."""
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
    """(elements used for each token, parameter) of every weight matrix; experts count by those active."""
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
            continue  # multiplies patches, not tokens
        if parameter.ndim == 2 and parameter is not embedding.weight:
            whole = getattr(parameter, "quant_state", parameter).shape  # four bits lie packed in a (bytes, 1)
            sizes.append((math.prod(whole), parameter))
        elif parameter.ndim == 3:
            sizes.append((int(parameter.numel() * active), parameter))
    if head is not None and head.weight is embedding.weight:
        sizes.append((head.weight.numel(), head.weight))
    return sizes
