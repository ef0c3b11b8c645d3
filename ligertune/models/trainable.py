"""Fine-tuning methods: train all parameters, the named ones, or a LoRA adapter.

full     all parameters                  freeze   the parameters whose names match a pattern of `trainable`
lora     W x + (alpha / R) B A x         qlora    lora on weights in 4 bits (NF4, bitsandbytes)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ligertune.errors import UserError
from ligertune.models.adapters.name_patterns import MATCH_SECONDS, matching_names
from ligertune.models.score_head import score_head

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ligertune.planning.options import MethodOptions


def apply_method(
    model: PreTrainedModel,
    spec: MethodOptions,
    *,
    seed: int = 0,
    fused: bool = False,
    original: Callable[[], nn.Module] | None = None,
) -> PreTrainedModel | PeftModel:
    """Return the model with only the parameters trainable that `spec` selects.

    seed: of the adapter's initial weights, the same on every rank. fused: use `fused_lora`. original: loads the model
    before it was quantised; None: QLoRA adapters that start from its weights are loaded later, from files.
    Raises UserError if `spec` names layers or parameters that the model does not have.
    """
    if spec.type == "full":
        return model
    if spec.type == "freeze":
        freeze(model, spec.trainable)
        if (head := score_head(model)) is not None:  # without training, a new one would stay random
            head.requires_grad_(True)
        return model
    # peft imports torchao; only runs with adapters wait for both.
    from ligertune.models.adapters.lora import add_adapter
    from ligertune.patching.lora.fused_lora import fuse_adapters

    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        adapted = add_adapter(model, spec)
        if original is not None and spec.type == "qlora" and spec.init_from_weights:
            torch.manual_seed(seed)  # of PiSSA's fast SVD
            _start_from_weights(adapted, spec.init_lora_weights, original)
    if fused:
        fuse_adapters(adapted)
    return adapted


def _start_from_weights(adapted: PeftModel, init: str, original: Callable[[], nn.Module]) -> None:
    if init == "loftq":
        from ligertune.models.adapters.loftq import start_from_error  # imports peft, which takes seconds

        start_from_error(adapted, original())
        return
    from ligertune.models.adapters.four_bit_residual import start_from_original  # as above

    start_from_original(adapted, original, init=init)


def freeze(model: nn.Module, trainable: tuple[str, ...]) -> None:
    """Freeze all parameters whose names match no pattern. Raises UserError for a pattern that matches none."""
    names = [name for name, _ in model.named_parameters()]
    trained = set()
    for expression in trainable:
        trained |= named_parameters(expression, names, key="method.trainable")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)


def named_parameters(expression: str, names: Sequence[str], *, key: str) -> set[str]:
    """Return the names that an expression of a recipe's key matches. Raises UserError if there are none."""
    matching = matching_names(expression, names, key=key, seconds=MATCH_SECONDS)
    if not matching:
        raise UserError(
            f"{key}: {expression!r} matches no parameter's name.",
            hint=f"Names are like {', '.join((*names[:1], *names[-2:]))}.",
        )
    return matching
