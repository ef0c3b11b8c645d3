"""Read the experts and the router of a mixture from a built model, which may be on the meta device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedConfig

from ligertune.planning.memory.model_shape import ExpertsShape

# transformers' names of how many experts a token uses
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k", "top_k")


class ExpertStack(NamedTuple):
    """A module that holds the weights of X experts as 3-D parameters."""

    module: nn.Module
    number: int  # X
    chosen: int  # K

    @property
    def active_share(self) -> float:
        return self.chosen / self.number


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of a weight; 4-bit weights are stored packed."""
    return getattr(parameter, "quant_state", parameter).shape


def expert_stacks(root: nn.Module, config: PreTrainedConfig) -> dict[str, ExpertStack]:
    """Return the modules of `root` that hold experts, by the prefix of their parameters, which adapters have too."""
    stacks = {}
    for name, module in root.named_modules():
        shapes = [full_shape(p) for p in module.parameters(recurse=False)]
        numbers = {shape[0] for shape in shapes if len(shape) == 3}
        if sum(len(shape) == 3 for shape in shapes) < 2 or len(numbers) != 1:  # a convolution has one 3-D weight
            continue
        (number,) = numbers
        while name.endswith(".base_layer"):  # of an adapter
            name = name.removesuffix(".base_layer")
        stacks[f"{name}."] = ExpertStack(module, number, min(_chosen(config) or number, number))
    return stacks


def _chosen(config: PreTrainedConfig) -> int | None:
    for holder in (config, getattr(config, "ffn_config", None)):
        found = next((value for name in CHOSEN if (value := getattr(holder, name, None))), None)
        if found:
            return max(found) if isinstance(found, list) else found
    return None


def read_experts(config: PreTrainedConfig, layer: nn.Module) -> ExpertsShape | None:
    """Return the sizes of the experts of a decoder layer; None for a layer without."""
    stacks = expert_stacks(layer, config)
    if not stacks:
        return None
    prefix, stack = next(iter(stacks.items()))
    hidden = config.hidden_size
    own = list(stack.module.parameters(recurse=False))
    adapters = [(name, p) for name, p in layer.named_parameters() if name.startswith(prefix) and ".lora_" in name]
    shared = [
        full_shape(p)
        for name, p in layer.named_parameters()
        if "shared" in name and ".lora_" not in name and len(full_shape(p)) == 2
    ]
    products = [math.prod(full_shape(p)) for p in own if len(full_shape(p)) == 3]
    widths = [math.prod(shape) // hidden for shape in shared]
    return ExpertsShape(
        number=stack.number,
        chosen=stack.chosen,
        mlp=min(products) // (stack.number * hidden),
        shared=min((width for width in widths if width > 1), default=0),
        parameters=sum(math.prod(full_shape(p)) for p in own),
        trained=sum(p.numel() for p in own if p.requires_grad),
        adapter=sum(p.numel() for _, p in adapters),
        lora=sum(p.shape[0] // stack.number for name, p in adapters if ".lora_A." in name),
        router=_saved_by_router(layer, prefix, stack.number, _norm_dtype(layer), hidden),
        gates_shared=1 in widths,
        activation=_saved_by_activation(stack.module, min(products) // (stack.number * hidden)),
    )


def _norm_dtype(layer: nn.Module) -> torch.dtype:
    """Return the dtype of the layer's norms, whose output the router reads. Its own weight may be float32."""
    vectors = [(name, p.dtype) for name, p in layer.named_parameters() if p.ndim == 1 and p.is_floating_point()]
    # the decays of a recurrence are float32, and are vectors, too
    return next((dtype for name, dtype in vectors if "norm" in name), vectors[0][1])


def _saved_by_router(layer: nn.Module, prefix: str, number: int, dtype: torch.dtype, hidden: int) -> int:
    """Return the bytes per token that the router saves besides its input, counted as torch saves them.

    Some routers compute in float32, and save a copy of their input if their weight trains.
    """
    block = prefix.removesuffix(".").rpartition(".")[0]
    for name, module in layer.named_modules():
        inside = name.startswith(block) and not f"{name}.".startswith(prefix) and "attn" not in name
        if inside and any(p.shape == (number, hidden) for p in module.parameters(recurse=False)):
            try:
                return _saved_per_row(copy.deepcopy(module).to_empty(device="cpu"), hidden, dtype)
            except TypeError:  # it takes more than hidden states (MiniMax-M2), or a bias that is set later (LFM2-MoE)
                return 0
            except RuntimeError:  # its products are in float32, of a copy of its input (HunYuan-MoE, DeepSeek-V4)
                return 4 * hidden
    return 0


def _saved_by_activation(module: nn.Module, mlp: int) -> int:
    """Return the elements per row that transformers' activation code saves besides its input (rows, 2F)."""
    gate = getattr(module, "_apply_gate", None)
    return mlp if gate is None else _saved_per_row(gate, 2 * mlp, torch.float32) // 4


def _saved_per_row(function: Callable[[torch.Tensor], object], width: int, dtype: torch.dtype) -> int:
    """Return the bytes per row that autograd saves in a call with (rows, width), without the rows themselves."""
    # in the difference of two calls, what does not depend on the rows, such as a copy of a weight, drops out
    few, many = (_saved_bytes(function, rows, width, dtype) for rows in (8, 16))
    return (many - few) // 8


def _saved_bytes(function: Callable[[torch.Tensor], object], rows: int, width: int, dtype: torch.dtype) -> int:
    x = torch.zeros(rows, width, dtype=dtype, device="cpu", requires_grad=True)
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    # the caller may build models on the meta device
    with torch.device("cpu"), torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = function(x)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
