"""Gradients of one tensor that several linear layers read, added up by the products that make them.

Queries, keys and values read one norm's output, gate and up another's. Each owes that tensor (T, E) a gradient, and
autograd adds them in passes of their own, 6 T E bytes each at 16 bits and three in a decoder layer. Here a layer that
has read the tensor hands it on, as a second result. Whoever reads it later owes its gradient to that result, so the
layer's backward is given what the others owe, and its product is added to that by the product itself (`addmm_`: in
fp32, and then rounded, where autograd rounds the product and the sum: three roundings for queries, keys and values
instead of five).

The tensor stays the object it is, with its values and its version; only its history grows. What is asked of it later
(`torch.autograd.grad` of a norm's output, a hook on that) counts only what is read after that. `ligertune train` asks
nothing of the kind; in `patch` it is switched off.
"""

from __future__ import annotations

from typing import Any

import torch
from ligertune_kernels.autograd import no_double_backward
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as same_version

from ligertune.patching.module_patch import swap
from ligertune.patching.recompute import RebuildingLinear, is_whole

MANY = 1 << 24  # elements from which a tensor is handed on: adding as many is 34 µs at 3 TB/s, handing on is the host's
# Linear layers whose input others read too.
SHARING = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj")


class _HandOn(torch.autograd.Function):
    """(x W', x) -> the same two: the first's gradient goes back as it is, the second's with what x W' owes x.

    x: (..., E), W: (F, E). W comes in a tuple: its gradient is made where the product is.
    """

    @staticmethod
    def forward(ctx: Any, product: Tensor, x: Tensor, weights: tuple[Tensor]) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.mark_dirty(x)
        ctx.save_for_backward(*weights)
        return product.detach(), x

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, d_product: Tensor | None, owed: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_product is None:
            return None, owed, None
        (weight,) = ctx.saved_tensors
        if owed is None:
            dx = d_product @ weight
        else:
            # Only what another of these gave, and to this one alone, may be written over.
            dx = owed if hasattr(owed, "given_to_one") else owed.clone(memory_format=torch.contiguous_format)
            dx.flatten(0, -2).addmm_(d_product.flatten(0, -2), weight)
        dx.given_to_one = True
        return d_product, dx, None


class SummingLinear(RebuildingLinear):
    """Mixin of a plain nn.Linear that hands its input on."""

    def forward(self, input: Tensor) -> Tensor:
        if not _may_hand_on(input) or not is_whole(self.weight) or self.weight.dtype is not input.dtype:
            return super().forward(input)
        kept = input.detach()  # of this the product's own backward makes the parameters' gradients, and no more
        if hasattr(input, "rebuilt"):
            kept.rebuilt = input.rebuilt
        product = super().forward(kept)
        with same_version(input):  # to autograd it is written over, and could not be read by those that kept it
            return _HandOn.apply(product, input, (self.weight,))[0]


def _may_hand_on(x: Tensor) -> bool:
    """Is x large, does autograd record what is done with it, and does nobody wait for its gradient so far?"""
    if torch.compiler.is_compiling() or type(x) is not Tensor or not torch.is_grad_enabled():
        return False
    recorded = x.requires_grad and not x.is_leaf and not x._is_view()
    if not recorded or x.numel() < MANY or x.retains_grad or x._backward_hooks:
        return False
    return x.is_contiguous() and not torch.is_autocast_enabled(x.device.type)


def sum_in_products(model: nn.Module) -> int:
    """Let the plain linear layers inside `model` that share their input hand it on; how many do."""
    shared = [getattr(module, name, None) for module in model.modules() for name in SHARING]
    plain = [layer for layer in shared if type(layer) is nn.Linear and "forward" not in vars(layer)]
    for layer in plain:
        swap(layer, SummingLinear, None)
    return len(plain)
