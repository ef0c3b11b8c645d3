"""What of a model trains: everything, named parameters, or an adapter beside its layers.

    full     all parameters                         freeze   those in whose name an expression of `trainable` is found
    lora     W x + (alpha / R) B A x, W frozen      qlora    the same on weights in 4 bits (NF4, bitsandbytes)

peft is imported for adapters alone: each process of a run would wait for it, and for torchao, which it imports.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import nn

from ligertune.errors import UserError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ligertune.planning.options import MethodOptions


def apply_method(
    model: PreTrainedModel, spec: MethodOptions, *, seed: int = 0, fused: bool = False
) -> PreTrainedModel | PeftModel:
    """The model of which `spec` says what trains; a UserError where it names what the model does not have.

    seed: of an adapter's first weights, so that every rank and every run has the same. fused: adapters add their term
    in their products (`fused_lora`).
    """
    if spec.type == "full":
        return model
    if spec.type == "freeze":
        freeze(model, spec.trainable)
        return model
    from ligertune.models.fused_lora import fuse_adapters
    from ligertune.models.lora import add_adapter

    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        adapted = add_adapter(model, spec)
    if fused:
        fuse_adapters(adapted)
    return adapted


def freeze(model: nn.Module, trainable: tuple[str, ...]) -> None:
    """Only parameters in whose name one of the expressions is found keep training. Each must find some."""
    names = [name for name, _ in model.named_parameters()]
    for expression in trainable:
        if not any(re.search(expression, name) for name in names):
            raise UserError(
                f"method.trainable: {expression!r} is found in no parameter's name.",
                hint=f"Names are like {', '.join(names[:1] + names[-2:])}.",
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(re.search(expression, name) for expression in trainable))
