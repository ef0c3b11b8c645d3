"""A model's output head outside its own forward: a linear layer, and the scale and soft cap of its logits.

Added heads may share the output head W, and a teacher's logits are computed from its hidden states, so a loss must
apply the model's own scale and soft cap to W h. To support every model family without a list, `logit_transform` runs
the model on two tokens with a `DeferredLogits` in place of the logits, which records what the model does to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligertune.any_types import AnyModule
from ligertune.files.model_files import RECIPE_MODEL, ModelOrigin
from ligertune.models.score_head import lm_head_of
from ligertune.models.shape import base_of
from ligertune.patching.deferred_logits import DeferredLogits
from ligertune.patching.fused_loss import KernelLossModel, let_head_losses_run

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBED_TOKENS = (1, 2)  # ids in every vocabulary
HINT = "The loss needs a linear output head without a bias on the last hidden state, as in Llama."


@dataclass(frozen=True)
class LogitTransform:
    """logits = softcap * tanh(z * logit_scale / softcap), or z * logit_scale without a soft cap, where z = W h."""

    logit_scale: float = 1.0
    softcap: float | None = None

    def logits(self, z: Tensor) -> Tensor:
        """Return the logits (..., V) of z (..., V), in fp32 or fp64."""
        z = z.to(torch.promote_types(z.dtype, torch.float32)) * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of the model that computes the last hidden state."""
    whole: AnyModule = base_of(model)
    return whole.base_model


def check_plain_head(model: PreTrainedModel, origin: ModelOrigin = RECIPE_MODEL, hint: str = HINT) -> nn.Linear:
    """Return the output head. Raises UserError if it is not a linear layer without bias. Works on the meta device."""
    head = lm_head_of(model)
    name = type(model).__name__
    if head is None or backbone_of(model) is model:
        problem = f"this {name} has no separate output head"
    elif not isinstance(head, nn.Linear):
        problem = f"the output head of this {name} is a {type(head).__name__}, not a plain linear layer"
    elif head.bias is not None:
        problem = f"the output head of this {name} has a bias"
    else:
        return head
    raise origin.error(f"{problem}.", hint=hint)


class _PlainHead:
    """An output head that computes its logits for an operation that DeferredLogits does not record."""

    def __init__(self, head: nn.Linear) -> None:
        self._head = head

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head.weight)


@torch.no_grad()
def logit_transform(model: PreTrainedModel, origin: ModelOrigin = RECIPE_MODEL, hint: str = HINT) -> LogitTransform:
    """Return how `model` computes logits from its last hidden state. Raises UserError if it does anything else."""
    head = check_plain_head(model, origin, hint)
    seen = {}

    def keep_hidden(module: nn.Module, args: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        seen["backbone"] = output[0]

    def defer(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> DeferredLogits:
        seen["head"] = args[0]
        return DeferredLogits(_PlainHead(head), args[0])

    hooks = [backbone_of(model).register_forward_hook(keep_hidden), head.register_forward_hook(defer)]
    was_training = model.training
    model.eval()
    try:
        tokens = torch.tensor([PROBED_TOKENS], device=head.weight.device)
        logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    found = logits.scale_and_softcap() if isinstance(logits, DeferredLogits) and logits.dense is None else None
    if found is None or "backbone" not in seen or not torch.equal(seen["head"], seen["backbone"]):
        what = "does more to its logits than scale or soft-cap them" if found is None else "changes h before the head"
        raise origin.error(f"this {type(model).__name__} {what}.", hint=hint)
    return LogitTransform(*found)


def open_loss(model: nn.Module, task: str) -> None:
    """Let a model without our loss kernels compute the loss of a task. Raises UserError if it cannot."""
    inner = base_of(model)
    if not isinstance(inner, KernelLossModel):
        let_head_losses_run(inner, task)
