"""Losses of causal language models by our kernels: inside the output head, or on the logits.

`DeferredLossModel` patches the model and `LossHead` its output head: together they compute the loss from deferred
logits (`deferred_logits`). `KernelLossModel` alone lets the model make its logits and computes their cross-entropy with
our kernel. `ChunkedHead` is the baseline without a kernel that `ligertune compare` measures.

Tasks compute other losses inside the output head of any model:

    with head_loss(loss_of_this_batch):
        model(**batch, labels=labels).loss

While the context is open, the patched head passes hidden states and its weight to `HeadLoss.fused`. Where the logits
are made, because kernels are off or a hook sees them, `HeadLoss.dense` receives them. Labels are those that a position
predicts, as for the cross-entropy.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from ligertune_kernels import cross_entropy, linear_cross_entropy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from ligertune.errors import UserError
from ligertune.patching.deferred_logits import (
    STATE,
    DeferredLogits,
    LabelledForward,
    count_elsewhere,
    count_fused,
    count_materialised,
    targets_of,
)
from ligertune.patching.host_copy import search_rows
from ligertune.patching.lazy_output import without_deferred
from ligertune.patching.module_patch import ModulePatch, names_in, observer_of, patch_module
from ligertune.patching.probe import Refusal
from ligertune.untraced_inputs import Untraced, reveal

# Rows whose logits `ChunkedHead` makes at a time. The product runs at 763 TFLOP/s with 1,024 rows and at 623 with 256,
# which read the weight four times as often; 2,048 gain 2 % and take twice the memory (H100, E = 4,096, V = 128,256).
CHUNK_ROWS = 1024


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


class LossHead(ModulePatch):
    """Mixin of the output head, a plain nn.Linear: returns logits (..., V), or the loss if labels are passed."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def linear_of(cls, head: nn.Module) -> nn.Module:
        """Return the layer that must be a plain nn.Linear: the head, or the layer that it adapts."""
        return head

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = STATE.forward
        if len(args) == 1 and not kwargs and running is not None and _is_head_of(running, self):
            observer = observer_of(self) or observer_of(running.head)
            if observer is None:
                return DeferredLogits(self, args[0])
            count_materialised(self, f"the output head is observed: {observer}")
        return super().__call__(*args, **kwargs)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (..., V) of hidden states (..., E), never deferred."""
        return super().__call__(hidden)

    def loss(self, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the loss of hidden states (..., E) and labels (...), through the hooks that gather the weight."""
        return super().__call__(hidden, (labels, options))

    def forward(self, input: Tensor, loss: tuple[Tensor, dict[str, Any]] | None = None, **kwargs: Any) -> Tensor:
        if loss is None:
            return super().forward(input, **kwargs)
        labels, options = loss
        # layers spread over devices leave the labels on the device of the inputs
        return self.compute_loss(input.reshape(-1, input.shape[-1]), labels.reshape(-1).to(input.device), options)

    def compute_loss(self, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        """Return the loss of hidden states (N, E) and labels (N,). options: keywords of `linear_cross_entropy`."""
        weight = self.weight  # once: a parametrization computes it
        if type(weight) not in (Tensor, nn.Parameter):  # a DTensor or a quantised weight: only its own ops know it
            return self.dense_loss(hidden, labels, options, f"lm_head.weight is a {type(weight).__name__}")
        count_fused(self)
        if STATE.head_loss is not None:
            return STATE.head_loss.fused(hidden, weight, self.bias, labels, options)
        return linear_cross_entropy(hidden, weight, labels, self.bias, **options)

    def dense_loss(self, hidden: Tensor, labels: Tensor, options: dict[str, Any], reason: str) -> Tensor:
        """Return the loss from logits, and count why it is not computed without them."""
        count_materialised(self, reason)
        return dense_loss(super().forward(hidden), labels, **options)


class ChunkedHead(LossHead):
    """Mixin of the output head: the loss in plain torch, a chunk of rows at a time.

    The logits of a chunk (CHUNK_ROWS, V) are made for its part of the loss, and once more in the backward.
    """

    def compute_loss(self, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        sums = options | {"num_items_in_batch": 1}
        total = torch.zeros((), device=hidden.device)
        for rows, targets in zip(torch.split(hidden, CHUNK_ROWS), torch.split(labels, CHUNK_ROWS), strict=True):
            total = total + checkpoint(self._sum, rows, targets, sums, use_reentrant=False)
        count = options["num_items_in_batch"]
        return total / ((labels != options["ignore_index"]).sum().clamp(min=1) if count is None else count)

    def _sum(self, hidden: Tensor, labels: Tensor, sums: dict[str, Any]) -> Tensor:
        return dense_loss(F.linear(hidden, self.weight, self.bias), labels, **sums)


def chunk_loss(model: PreTrainedModel) -> None:
    """Let `model` compute its loss in chunks of rows. Raises UserError if its loss or head is not a plain one."""
    refusal = defer_loss(model, ChunkedHead)
    if refusal is not None:
        raise UserError(f"--baseline hf-chunked: not with this model: {refusal.reason}.")


def defer_loss(model: nn.Module, head_patch: type[LossHead]) -> Refusal | None:
    """Let `model` compute its loss in its output head, by `head_patch`; return why it cannot, or None."""
    head = get_output_head(model)
    refusal = refuse_loss(model)
    if head is None or refusal is not None:  # a model without a head is refused
        return refusal
    refusal = _refuse_head(head_patch.linear_of(head))
    if refusal is not None:
        return refusal
    patch_module(head, head_patch)
    patch_module(model, DeferredLossModel)
    return None


def _is_head_of(running: LabelledForward, head: LossHead) -> bool:
    """Return whether `head` is the output head of the model whose forward runs, bare or wrapped (PEFT)."""
    return running.head is head or any(module is head for module in running.head.modules())


def dense_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    num_items_in_batch: int | Tensor | None,
    labelled_rows: Tensor | None,
) -> Tensor:
    """Return the loss that `linear_cross_entropy` computes after its product: logits (N, V), labels (N,)."""
    logits = logits.float() * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if STATE.head_loss is not None:
        return STATE.head_loss.dense(logits, labels, num_items_in_batch)
    total = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="sum")
    return total / ((labels != ignore_index).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)


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


def _on(device: torch.device, count: int | Tensor | None) -> int | Tensor | None:
    return count.to(device) if isinstance(count, Tensor) else count


def loss_in_head(
    logits: DeferredLogits | Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    labelled_rows: Tensor | Untraced | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute ForCausalLMLoss from deferred logits; a tensor of logits goes to ForCausalLMLoss itself.

    labelled_rows: `ligertune_kernels.labelled_rows` of the batch's labels, if the collator computed them. The head then
    skips the other rows. For labels on a GPU they are found while the forward runs (`host_copy`).
    """
    STATE.counted = True
    kwargs["shift_labels"] = shift_labels
    if not isinstance(logits, DeferredLogits):
        if STATE.forward is not None and not STATE.forward.materialised:
            count_materialised(STATE.forward.head, f"the output head is a {type(STATE.forward.head).__name__} now")
        return loss_from_logits(logits, labels, vocab_size, num_items_in_batch, ignore_index, **kwargs)
    is_whole = logits.dense is None and vocab_size == logits.head.out_features
    form = logits.scale_and_softcap() if is_whole else None
    if form is None:
        dense = logits.materialise("they are not scale * z or softcap * tanh(z / softcap) over all of V")
        return loss_from_logits(dense, labels, vocab_size, num_items_in_batch, ignore_index, **kwargs)
    target = targets_of(labels, shift_labels, ignore_index)
    options = {
        "logit_scale": form[0],
        "softcap": form[1],
        "ignore_index": ignore_index,
        "num_items_in_batch": _on(logits.device, num_items_in_batch),
        "labelled_rows": None,
    }
    # rows are places in the labels, which the hidden states must have too
    if target.numel() == logits.hidden.shape[:-1].numel():
        known, shift = (labels, 1) if shift_labels is None else (shift_labels, 0)
        found = _found_rows(known, ignore_index, shift) if labelled_rows is None else None
        options["labelled_rows"] = reveal(labelled_rows) if found is None else found
    return logits.head.loss(logits.hidden, target, options)


def _found_rows(labels: Tensor | None, ignore_index: int, shift: int) -> Tensor | None:
    """Return the rows that have a label, if the running forward looks for them."""
    search = STATE.forward.row_search if STATE.forward is not None else None
    return None if search is None else search.rows(labels, ignore_index=ignore_index, shift=shift)


def loss_of_logits(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: int | Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute ForCausalLMLoss with our `cross_entropy`, which upcasts in registers instead of in memory."""
    STATE.counted = True
    if STATE.head_loss is not None:
        return loss_from_logits(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels)
    target = targets_of(labels, shift_labels, ignore_index).reshape(-1)
    loss = cross_entropy(
        logits.reshape(-1, vocab_size),
        target.to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else loss / _on(loss.device, num_items_in_batch)


class KernelLossModel(ModulePatch):
    """Mixin of the model: its loss is our cross-entropy of the logits that it makes."""

    kernel = "cross_entropy"
    kernel_loss = staticmethod(loss_of_logits)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or kwargs.get("labels") is None:
            return super().__call__(*args, **kwargs)
        STATE.counted = False
        output = super().__call__(*args, **kwargs)
        if not STATE.counted:  # a trainer has replaced the forward on the instance, or the model has its own loss
            count_elsewhere(self, self.kernel)
        return output

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        # `super().loss_function` would do, but torch.compile cannot trace a property through super()
        chosen = getattr(self, "_loss_function", ForCausalLMLoss)  # transformers stores a user's function here
        return self.kernel_loss if chosen is ForCausalLMLoss else chosen

    @loss_function.setter
    def loss_function(self, value: Callable[..., Tensor]) -> None:
        self._loss_function = value


class DeferredLossModel(KernelLossModel):
    """Mixin of the model: a forward with labels defers its logits, and the head computes the loss."""

    kernel = "linear_cross_entropy"
    kernel_loss = staticmethod(loss_in_head)

    @classmethod
    def class_body(cls, original: type[PreTrainedModel], spec: Any) -> dict[str, Any]:
        position = list(inspect.signature(original.forward).parameters).index("labels") - 1  # without self

        @functools.wraps(original.forward)  # generate() and Trainer read the signature
        def forward(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
            labels = args[position] if len(args) > position else kwargs.get("labels")
            head = None if labels is None else get_output_head(self)
            if head is None:
                return original.forward(self, *args, **kwargs)
            ignored = kwargs.get("ignore_index", -100)
            search = search_rows(head, labels, kwargs.get("shift_labels"), kwargs.get("labelled_rows"), ignored)
            outer, STATE.forward = STATE.forward, LabelledForward(head, search)
            try:
                output = original.forward(self, *args, **kwargs)
            finally:
                STATE.forward = outer
            return without_deferred(
                output, compute=not (self.training or STATE.loss_only), readable=not STATE.loss_only
            )

        return {"forward": forward}


def get_output_head(model: nn.Module) -> nn.Module | None:
    """Return the output head of a transformers model; None for a model without one, and other modules."""
    if not isinstance(model, PreTrainedModel):
        return None
    return model.get_output_embeddings()


def refuse_loss(model: nn.Module) -> Refusal | None:
    """Return why our kernels cannot compute the loss of `model`, or None."""
    if not isinstance(model, PreTrainedModel) or get_output_head(model) is None:
        return Refusal(f"{type(model).__name__} is not a transformers model with an output head")
    if "labels" not in inspect.signature(type(model).forward).parameters:
        return Refusal("its forward takes no labels")
    if "forward" in vars(model):
        return Refusal("its forward was replaced on the instance")
    if not _calls_loss_function(type(model)):
        return Refusal("its forward computes the loss itself and not by its loss_function")
    if model.loss_function is not ForCausalLMLoss:
        return Refusal(f"its loss is {getattr(model.loss_function, '__name__', model.loss_function)}")
    return None


def _calls_loss_function(cls: type[PreTrainedModel]) -> bool:
    """Return whether a method of a model's class, or of a class that it extends, reads `loss_function`."""
    classes = cls.__mro__[: cls.__mro__.index(PreTrainedModel)]
    methods = (inspect.unwrap(value) for base in classes for value in vars(base).values() if callable(value))
    codes = (getattr(method, "__code__", None) for method in methods)
    return any(code is not None and "loss_function" in names_in(code) for code in codes)


def _refuse_head(head: nn.Module) -> Refusal | None:
    """Return why the loss cannot be computed inside this output head, or None."""
    if type(head) is not nn.Linear:
        return Refusal(f"its output head is a {type(head).__name__}, not a plain nn.Linear")
    if "forward" in vars(head):
        return Refusal("the forward of its output head was replaced on the instance")
    if tuple(head.weight.shape) != (head.out_features, head.in_features):
        return Refusal("its output head holds only a part of its weight")
    return None
