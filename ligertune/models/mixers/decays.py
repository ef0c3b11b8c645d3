"""Keep `A_log`, `dt_bias` and `D` of a recurrence in float32. They have a number per head, Kimi's dt_bias per channel.

bfloat16 would round A_log by up to 0.4 %, which a state multiplies up over hundreds of tokens, and lose small updates.
"""

from __future__ import annotations

import contextlib
from collections import Counter
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


def give_weights_one_dtype(model: nn.Module) -> None:
    """Convert what trains to the dtype of most of it: a shard of FSDP2 and ZeRO has weights of one dtype.

    These are decays, and weights that transformers keeps in float32, as those of some routers.
    """
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel() * parameter.requires_grad
    dtype = max(sizes, key=sizes.__getitem__, default=torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _decays(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if name.rpartition(".")[2] in NAMES)
