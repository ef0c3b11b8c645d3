"""What a model does with its output head: whether it is a plain one, and what becomes of its logits.

Heads are trained against W h, times a scale or under a soft cap as the model has them. So that no family has to be
listed, the model is asked: on two tokens its output head hands back a `DeferredLogits`, on which the model itself
writes down what it does to logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ligertune.errors import UserError
from ligertune.patching.deferred_logits import DeferredLogits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HINT = "Medusa heads stand on the last hidden state and a linear output head without a bias, as Llama has them."


@dataclass(frozen=True)
class HeadForm:
    """logits = softcap * tanh(z * logit_scale / softcap), or z * logit_scale, where z = W h."""

    logit_scale: float = 1.0
    softcap: float | None = None

    def logits(self, z: Tensor) -> Tensor:
        """z (..., V) -> logits (..., V), fp32 at least."""
        z = z.to(torch.promote_types(z.dtype, torch.float32)) * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def adapted_model(model: PreTrainedModel) -> PreTrainedModel:
    """The model that a PEFT model adapts; any other is that itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part that gives the last hidden state."""
    return adapted_model(model).base_model


def check_plain_head(model: PreTrainedModel) -> nn.Linear:
    """The output head; a UserError where it is none that Medusa heads can share. Looks at shapes only."""
    head, name = model.get_output_embeddings(), type(model).__name__
    if head is None or backbone_of(model) is model:
        raise UserError(f"model.model_name_or_path: this {name} has no output head of its own.", hint=HINT)
    if not isinstance(head, nn.Linear):
        raise UserError(
            f"model.model_name_or_path: the output head of this {name} is a {type(head).__name__}, "
            "not a plain linear layer.",
            hint=HINT,
        )
    if head.bias is not None:
        raise UserError(f"model.model_name_or_path: the output head of this {name} has a bias.", hint=HINT)
    return head


@torch.no_grad()
def head_form(model: PreTrainedModel) -> HeadForm:
    """How `model` makes logits of its last hidden state; a UserError where it does something else to them."""
    head, seen = check_plain_head(model), {}

    def keep_hidden(module: nn.Module, args: tuple, output: object) -> None:
        seen["backbone"] = output[0]

    def defer(module: nn.Module, args: tuple, output: Tensor) -> DeferredLogits:
        seen["head"] = args[0]
        return DeferredLogits(module, args[0])

    hooks = [backbone_of(model).register_forward_hook(keep_hidden), head.register_forward_hook(defer)]
    was_training = model.training
    model.eval()
    try:
        tokens = torch.tensor([[1, 2]], device=head.weight.device)
        logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    form = logits.scale_and_softcap() if isinstance(logits, DeferredLogits) and logits.dense is None else None
    if form is None or not torch.equal(seen["head"], seen["backbone"]):
        what = "does more to its logits than to scale or soft-cap them" if form is None else "changes h before the head"
        raise UserError(f"model.model_name_or_path: this {type(model).__name__} {what}.", hint=HINT)
    return HeadForm(*form)
