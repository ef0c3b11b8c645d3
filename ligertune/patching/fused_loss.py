"""The loss of a causal language model through our kernels: in the output head, or on the logits.

`LossInHead` and `LossHead` are the two ends of the deferred logits (`deferred`): the model's forward and its output
head. `OwnLoss` alone leaves the logits as they are and computes their cross entropy with our kernel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ligertune_kernels import cross_entropy, linear_cross_entropy
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ligertune.attention.untraced_inputs import Unseen, look
from ligertune.patching.deferred_logits import THREAD, DeferredLogits, LabelledForward, count_fused, count_materialised
from ligertune.patching.module_patch import Patch
from ligertune.patching.probe import Refusal


class LossHead(Patch):
    """Mixin of the output head, a plain nn.Linear: (..., E) -> (..., V), or -> the loss when labels come along."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and _defers(self):
            return DeferredLogits(self, args[0])
        return super().__call__(*args, **kwargs)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., E) -> (..., V), never deferred."""
        return super().__call__(hidden)

    def loss(self, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """The loss of hidden (..., E) against labels (...), through every hook: they gather the weight."""
        return super().__call__(hidden, (labels, options))

    def forward(self, input: Tensor, loss: tuple[Tensor, dict[str, Any]] | None = None) -> Tensor:
        if loss is None:
            return super().forward(input)
        labels, options = loss
        hidden = input.reshape(-1, input.shape[-1])  # (N, E)
        labels = labels.reshape(-1).to(hidden.device)  # (N,)
        if type(self.weight) not in (Tensor, nn.Parameter):  # DTensor, a quantised weight: only its own ops know it
            count_materialised(self, f"lm_head.weight is a {type(self.weight).__name__}")
            return loss_of_dense(super().forward(hidden), labels, **options)
        count_fused(self)
        return linear_cross_entropy(hidden, self.weight, labels, self.bias, **options)


def _defers(head: LossHead) -> bool:
    """Is `head` the output head of the model whose labelled forward runs, or inside the wrapper that is?"""
    running = THREAD.forward
    return running is not None and (running.head is head or any(module is head for module in running.head.modules()))


def loss_of_dense(
    logits: Tensor,
    labels: Tensor,
    *,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    num_items_in_batch: int | Tensor | None,
    labelled_rows: Tensor | None,
) -> Tensor:
    """`linear_cross_entropy` from its second step on, in torch: logits (N, V), labels (N,)."""
    logits = logits.float() * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    total = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    return total / ((labels != ignore_index).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


def _next_tokens(labels: Tensor, ignore_index: int) -> Tensor:
    """labels (B, T) -> what each position predicts (B, T); the last predicts nothing."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def _on(device: torch.device, count: int | Tensor | None) -> int | Tensor | None:
    return count.to(device) if isinstance(count, Tensor) else count


def loss_in_head(
    logits: DeferredLogits | Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    labelled_rows: Tensor | Unseen | None = None,
    **kwargs: Any,
) -> Tensor:
    """ForCausalLMLoss for deferred logits; real ones go to ForCausalLMLoss itself.

    labelled_rows: `ligertune_kernels.labelled_rows` of the batch's labels, if whoever made the batch knows them. The
    other rows then never meet the head.
    """
    form = None
    if isinstance(logits, DeferredLogits):
        if logits.dense is None and vocab_size == logits.head.out_features:
            form = logits.scale_and_softcap()
        if form is None:
            logits = logits.materialise("they are not scale * z or softcap * tanh(z / softcap) over all of V")
    elif THREAD.forward is not None and not THREAD.forward.materialised:
        count_materialised(THREAD.forward.head, f"the output head is a {type(THREAD.forward.head).__name__} now")
    if form is None:
        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs
        )
    target = _next_tokens(labels, ignore_index) if shift_labels is None else shift_labels
    options = {
        "logit_scale": form[0],
        "softcap": form[1],
        "ignore_index": ignore_index,
        "num_items_in_batch": _on(logits.device, num_items_in_batch),
        "labelled_rows": look(labelled_rows) if target.numel() == logits.hidden.shape[:-1].numel() else None,
    }
    return logits.head.loss(logits.hidden, target, options)


def loss_of_logits(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """ForCausalLMLoss on our `cross_entropy`, which upcasts in registers instead of in memory."""
    target = (_next_tokens(labels, ignore_index) if shift_labels is None else shift_labels).reshape(-1)
    loss = cross_entropy(
        logits.reshape(-1, vocab_size),
        target.to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else loss / _on(loss.device, num_items_in_batch)


class OwnLoss(Patch):
    """Mixin of the model: its causal language model loss is our cross entropy, on logits made as ever."""

    own_loss = staticmethod(loss_of_logits)

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        # `super().loss_function` would do, but torch.compile cannot trace a property through super()
        chosen = getattr(self, "_loss_function", ForCausalLMLoss)  # where transformers keeps one that a user sets
        return self.own_loss if chosen is ForCausalLMLoss else chosen

    @loss_function.setter
    def loss_function(self, value: Callable[..., Tensor]) -> None:
        self._loss_function = value


class LossInHead(OwnLoss):
    """Mixin of the model: a forward with labels defers its logits, and the loss is computed in the head."""

    own_loss = staticmethod(loss_in_head)

    @classmethod
    def class_body(cls, original: type[PreTrainedModel], spec: None) -> dict[str, Any]:
        theirs = original.forward
        position = list(inspect.signature(theirs).parameters).index("labels") - 1  # without self

        @functools.wraps(theirs)  # generate() and Trainer read the signature
        def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            labels = args[position] if len(args) > position else kwargs.get("labels")
            if labels is None:
                return theirs(self, *args, **kwargs)
            outer, THREAD.forward = THREAD.forward, LabelledForward(self.get_output_embeddings())
            try:
                output = theirs(self, *args, **kwargs)
            finally:
                THREAD.forward = outer
            return _settled(output, keep=not (self.training or THREAD.loss_only))

        return {"forward": forward}


def _settled(output: Any, *, keep: bool) -> Any:
    """A model's output with logits in place of deferred ones, or with None: no recipe leaves the forward."""
    if isinstance(output, tuple):
        return tuple(_settle(value, keep=keep) for value in output)
    # rebuilt, since setting an attribute of a ModelOutput to None leaves its item in place
    return type(output)(**{name: _settle(value, keep=keep) for name, value in output.items()})


def _settle(value: Any, *, keep: bool) -> Any:
    if not isinstance(value, DeferredLogits):
        return value
    return value.compute() if keep else None


def refuse_loss(model: nn.Module) -> Refusal | None:
    """Why the loss of `model` cannot be ours, or None."""
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        return Refusal(f"{type(model).__name__} is not a transformers model with an output head")
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return Refusal("its forward takes no labels")
    if "forward" in vars(model):
        return Refusal("its forward was replaced on the instance")
    if model.loss_function is not ForCausalLMLoss:
        return Refusal(f"its loss is {getattr(model.loss_function, '__name__', model.loss_function)}")
    return None


def refuse_head(head: nn.Module) -> Refusal | None:
    """Why the loss cannot be computed inside this output head, or None."""
    if type(head) is not nn.Linear:
        return Refusal(f"its output head is a {type(head).__name__}, not a plain nn.Linear")
    if "forward" in vars(head):
        return Refusal("the forward of its output head was replaced on the instance")
    if tuple(head.weight.shape) != (head.out_features, head.in_features):
        return Refusal("its output head holds only a part of its weight")
    return None
