"""Losses of tasks that are not the model's own cross-entropy, computed inside the output head of any model.

    with head_loss(loss_of_this_batch):
        model(**batch, labels=labels).loss

While the context is open, the patched head (fused_loss.py) passes hidden states and its weight to `fused`; where the
logits are made, because kernels are off or a hook sees them, `dense` receives them. Labels are those that a position
predicts, as for the cross-entropy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ligertune.errors import UserError
from ligertune.patching.deferred_logits import STATE, targets_of


class HeadLoss(Protocol):
    """A loss () of N positions."""

    def fused(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Return the loss of hidden states (N, E), the head's weight (V, E) and bias (V,), and labels (N,).

        options: logit_scale, softcap, ignore_index and labelled_rows of `linear_log_probs`, and num_items_in_batch.
        """
        ...

    def dense(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        """Return the loss of logits (N, V), scaled and capped, and labels (N,)."""
        ...


@contextlib.contextmanager
def head_loss(loss: HeadLoss) -> Iterator[None]:
    """Let forwards with labels in this thread compute `loss` instead of the cross-entropy."""
    before = STATE.head_loss
    STATE.head_loss = loss
    try:
        yield
    finally:
        STATE.head_loss = before


def loss_from_logits(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute ForCausalLMLoss, or the loss of an open `head_loss`."""
    if STATE.head_loss is None:
        loss: Any = ForCausalLMLoss  # it takes an int for num_items_in_batch, too, which its annotation leaves out
        return loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs)
    target = targets_of(labels, shift_labels, ignore_index).reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1])
    return STATE.head_loss.dense(flat, target.to(flat.device), num_items_in_batch)


def let_head_losses_run(model: PreTrainedModel, task: str) -> None:
    """Make `head_loss` work on a model whose loss our kernels do not compute. Raises UserError if it cannot."""
    if model.loss_function is ForCausalLMLoss:
        model.loss_function = loss_from_logits
        return
    chosen = getattr(model.loss_function, "__name__", "another one")
    raise UserError(
        f"task: {task} needs a causal language model's loss, and that of this {type(model).__name__} is {chosen}.",
        hint="Choose a model that transformers lists for causal language modelling.",
    )
