"""Keep `A_log`, `dt_bias` and `D` of a recurrence in float32. They have a number per head, Kimi's dt_bias per channel.

bfloat16 would round A_log by up to 0.4 %, which a state multiplies up over hundreds of tokens, and lose small updates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

NAMES = ("A_log", "dt_bias", "D")  # in transformers' mixers


@contextlib.contextmanager
def decays_read_as_float32(skeleton: PreTrainedModel) -> Iterator[None]:
    """Let `from_pretrained` read the decays of a model as float32, meanwhile. skeleton: the model without weights."""
    model_class = type(skeleton)
    before = model_class.__dict__.get("_keep_in_fp32_modules_strict")
    patterns = {name.rpartition(".")[2] for name, _ in _decays(skeleton)}
    if not patterns:
        yield
        return
    inherited = set(model_class._keep_in_fp32_modules_strict or ())
    model_class._keep_in_fp32_modules_strict = inherited | patterns
    try:
        yield
    finally:
        if before is None:
            del model_class._keep_in_fp32_modules_strict
        else:
            model_class._keep_in_fp32_modules_strict = before


def make_decays_float32(model: nn.Module) -> None:
    """Convert the decays of a model with random weights."""
    for _, parameter in _decays(model):
        parameter.data = parameter.data.float()


def give_decays_the_dtype_of_weights(model: nn.Module) -> None:
    """Convert the decays that train back: a shard of FSDP2 and ZeRO has weights of one dtype."""
    decays = {id(parameter): parameter for _, parameter in _decays(model) if parameter.requires_grad}
    others = (p.dtype for p in model.parameters() if p.requires_grad and id(p) not in decays)
    dtype = next(others, torch.float32)
    for parameter in decays.values():
        parameter.data = parameter.data.to(dtype)


def _decays(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if name.rpartition(".")[2] in NAMES)
