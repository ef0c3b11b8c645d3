"""An output head with a LoRA adapter, whose loss is still computed without logits: A and B are its low-rank term.

Where peft does more to the head's output than add s B A x (DoRA, dropout while training, an adapter switched off or
merged, several adapters), the logits are made.
"""

from __future__ import annotations

from typing import Any

from ligertune_kernels import linear_cross_entropy
from torch import Tensor, nn

from ligertune.models.fused_lora import why_not_low_rank
from ligertune.patching.deferred_logits import count_fused, count_materialised
from ligertune.patching.fused_loss import LossHead, loss_of_dense


class LoraLossHead(LossHead):
    """Mixin of peft's LoRA layer around an output head: (..., E) -> (..., V), or -> the loss when labels come along."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (len(args) == 1 and isinstance(args[0], tuple)):
            return super(LossHead, self).forward(x, *args, **kwargs)
        labels, options = args[0]
        hidden = x.reshape(-1, x.shape[-1])  # (N, E)
        labels = labels.reshape(-1).to(hidden.device)  # (N,)
        base, reason = self.base_layer, self._why_dense()
        if reason is not None:
            count_materialised(self, reason)
            return loss_of_dense(super(LossHead, self).forward(hidden), labels, **options)
        count_fused(self)
        name = self.active_adapters[0]
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return linear_cross_entropy(
            hidden, base.weight, labels, base.bias, lora_a=a, lora_b=b, lora_scale=self.scaling[name], **options
        )

    def _why_dense(self) -> str | None:
        """What keeps the adapter from being a low-rank term of the loss, or None."""
        if (more := why_not_low_rank(self)) is not None:
            return f"the head's adapter {more}"
        if type(self.base_layer) is not nn.Linear:
            return f"the head is a {type(self.base_layer).__name__}"
        return None
