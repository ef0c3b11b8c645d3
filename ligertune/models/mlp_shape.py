"""Sizes of dense MLPs: their width, and what the activation of one without a gate saves for the backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ligertune.any_types import AnyModule
from ligertune.models.read_config import config_value

# Linear layers by the input they save for the backward.
MLP_IN = {"gate_proj", "up_proj", "gate_up_proj", "fc1", "w1", "w3", "Wi", "wi", "wi_0", "wi_1", "c_fc", "fc_in",
          "dense_h_to_4h"}  # fmt: skip
MLP_OUT = {"down_proj", "fc2", "w2", "Wo", "wo", "fc_out", "dense_4h_to_h", "mlp.c_proj"}
FIRST = ("gate_proj", "w1", "up_proj", "fc1", "fc_in", "dense_h_to_4h")  # names of layers of the MLP's width
ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")  # modules that define them
TRIED = 8  # numbers that an activation is tried on


def reads_product(parts: Sequence[str]) -> bool:
    """Return whether a parameter, by the parts of its name, is of an MLP's last linear layer."""
    return bool(MLP_OUT & {*parts, ".".join(parts[-3:-1])})


def mlp_width(config: PreTrainedConfig, layer: nn.Module) -> int:
    """Return F of a dense MLP: as built, since LFM2 changes the configured one, else as configured."""
    first = (module for name, module in layer.named_modules() if name.rpartition(".")[2] in FIRST)
    built = next((module.out_features for module in first if isinstance(module, nn.Linear)), 0)
    # null in GPT-2, whose MLP is four times as wide as its hidden states then
    return built or config_value(config, "intermediate_size") or 4 * config_value(config, "hidden_size")


def saved_without_gate(layer: nn.Module, hidden: int, width: int) -> tuple[int, bool] | None:
    """Return the elements of its width that the activation of an MLP saves, and whether its output is one of them.

    None: the MLP has a gate, or is not understood.
    """
    activations = {id(module): module for module in layer.modules() if type(module).__module__ in ACTIVATIONS}
    if len(activations) != 1 or _matrices(layer, hidden, width) != 2:
        return None
    return _saved_by(*activations.values())


def _matrices(layer: nn.Module, hidden: int, width: int) -> int:
    """Return how many matrices between hidden states and MLP a layer has: three with a gate, also if it is in one."""
    found = ((name.split("."), p) for name, p in layer.named_parameters() if p.ndim == 2 and ".lora_" not in name)
    total = sum(p.numel() for parts, p in found if MLP_IN & set(parts) or reads_product(parts))
    return round(total / (hidden * width))


def _saved_by(activation: AnyModule) -> tuple[int, bool]:
    device = next((p.device for p in activation.parameters()), torch.device("cpu"))
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.numel() == TRIED:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = activation(torch.zeros(TRIED, device=device, requires_grad=True))
    return len(saved), out.untyped_storage()._cdata in saved
