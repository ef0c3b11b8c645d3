"""Float8 linear layers with our kernels: operands are quantised once, by rows and by columns, with delayed scales.

    y = x W^T        dx = dy W        dW = dy^T x        operands in float8, accumulated in float32

x and W are e4m3. dy is e5m2, which has a wider range: one scale holds for all tokens, whose gradients differ by orders
of magnitude, and it comes from earlier steps.

W is quantised once per optimizer step, and once for all if it is frozen; then the weight is kept in float8 only. x is
kept for the backward as its float8 columns. Layers that read the same x share one product for dx (`input_groups`). On a
CPU the products are emulated: the operands are float8, and PyTorch multiplies them in float32.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

import torch
from ligertune_kernels.autograd import autocast_dtype, no_double_backward
from ligertune_kernels.ops.float8.quantize_float8 import Output
from torch import Tensor, nn

from ligertune.models.float8.delayed_scales import DelayedScales, quantize_by_amax
from ligertune.models.float8.input_groups import InputGroup, JointCall
from ligertune.models.float8.quantized import GRADIENT, OPERAND, Quantized, float8_product
from ligertune.patching.module_patch import ModulePatch, patch_module

SLOTS = (OPERAND, OPERAND, GRADIENT)  # of each layer: x, W, dy


def dtype_of_product(x: Tensor) -> torch.dtype:
    """Return the dtype of a linear layer's output."""
    return autocast_dtype(x.device) or x.dtype


class _Float8Product(torch.autograd.Function):
    """x W^T + bias of quantised x and W; the gradients of x, W and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., E); or the token of the call's first layer
        weight: Tensor,  # (F, E)
        bias: Tensor | None,  # (F,)
        operands: tuple[Quantized, Quantized],  # x, W
        layer: Float8Linear,
        dtype: torch.dtype,
        call: JointCall | None,
    ) -> tuple[Tensor, Tensor | None]:  # (..., F), token
        quantized_x, quantized_weight = operands
        rows = quantized_x.rows.flatten(0, -2)
        y = float8_product(rows, quantized_weight.rows, quantized_x.inverse, quantized_weight.inverse, dtype, fast=True)
        if bias is not None:
            y += bias
        needs_dw = weight.requires_grad
        ctx.save_for_backward(*((quantized_x.by_columns, quantized_x.inverse) if needs_dw else ()))
        # The layer keeps these until the next step, so no hook has to save them.
        ctx.quantized_weight = quantized_weight
        ctx.layer = layer
        ctx.record = layer.training
        ctx.call = call
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.first = call is not None and call.first == layer.float8_slot
        return y.view(*quantized_x.rows.shape[:-1], y.shape[-1]), x.new_empty(0) if ctx.first else None

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        call = ctx.call
        layer = ctx.layer
        weight = ctx.quantized_weight
        dx = dw = db = None
        if needs_dx or needs_dw:
            rows = call.rows_for(layer.float8_slot, dy) if call is not None else needs_dx
            q = layer.quantize_gradient(dy, rows=rows, columns=needs_dw, record=ctx.record)
        if call is not None:
            call.leave(layer.float8_slot, q, weight)
            dx = call.input_gradient(x_dtype) if ctx.first else None
        elif needs_dx:
            dx = float8_product(q.rows.flatten(0, -2), weight.columns, q.inverse, weight.inverse, x_dtype, fast=False)
        if dx is not None:
            dx = dx.view(*dy.shape[:-1], dx.shape[-1])
        if needs_dw:
            columns, inverse = ctx.saved_tensors
            dw = float8_product(q.columns, columns, q.inverse, inverse, weight_dtype, fast=False)
        if needs_db:
            db = dy.flatten(0, -2).sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None, None, None


class Float8Linear(ModulePatch):
    """Mixin of an nn.Linear that multiplies in float8. Name, weight and bias stay those of the layer."""

    weight: Tensor  # (F, E)
    float8_scales: DelayedScales  # of all layers of the model
    float8_slot: int  # the first of the layer's SLOTS
    float8_weight: tuple[Hashable, Quantized] | None  # version of the weight, and its copies
    float8_frozen: Quantized | None

    def forward(self, input: Tensor) -> Tensor:
        weight = self.quantized_weight()
        q = self.quantized_input(input)
        group = self.input_group
        dtype = dtype_of_product(input)
        call = token = None
        if group is not None and weight.whole is not None:
            call, token = group.call_of(self.float8_slot, input)
        read = input if token is None else token
        y, token = _Float8Product.apply(read, self.weight, self.bias, (q, weight), self, dtype, call)
        if call is not None and token is not None:
            call.group.open(call, input, token)
        return y

    @property
    def input_group(self) -> InputGroup | None:
        """The layers that read the same tensor, from the second step on."""
        return self.float8_scales.groups.get(self.float8_slot)

    def quantized_input(self, x: Tensor) -> Quantized:
        """Return the layer's input in float8; by columns only if the weight's gradient needs them."""
        columns = self.weight.requires_grad and torch.is_grad_enabled()
        return self.float8_scales.quantize_input(self.float8_slot, x, columns=columns, record=self.training)

    def quantize_gradient(self, dy: Tensor, *, rows: Output, columns: bool, record: bool) -> Quantized:
        return self.float8_scales.quantize(self.gradient_slot, dy, rows=rows, columns=columns, record=record)

    @property
    def gradient_slot(self) -> int:
        return self.float8_slot + 2

    def quantized_weight(self) -> Quantized:
        """Return the weight in float8, quantised anew if it has changed."""
        if self.float8_frozen is not None:
            return self.float8_frozen
        # Our AdamW kernel steps without raising the version, and loading does not count as a step.
        scales = self.float8_scales
        version = (scales.steps, scales.forgotten, self.weight._version, self.weight.data_ptr())
        if self.float8_weight is None or self.float8_weight[0] != version:
            self.float8_weight = None  # free the old copies before the new ones are made
            self.float8_weight = version, self._quantize_weight(version)
        return self.float8_weight[1]

    def _quantize_weight(self, version: Hashable) -> Quantized:
        weight = self.weight.detach()
        slot = self.float8_slot
        group = self.input_group
        if group is None:
            return self.float8_scales.quantize(slot + 1, weight)
        columns, whole = group.columns_for(slot, version, weight)
        return self.float8_scales.quantize(slot + 1, weight, columns=columns)._replace(whole=whole)

    def hold_in_float8(self) -> None:
        """Keep the frozen weight in float8 only, in both memory orders, scaled by its own largest value."""
        self.float8_frozen = quantize_by_amax(self.weight.detach(), OPERAND)
        self.weight = nn.Parameter(self.float8_frozen.rows, requires_grad=False)


def to_float8_linears(
    layers: Sequence[nn.Linear], device: torch.device, *, ungrouped: Collection[nn.Module] = ()
) -> DelayedScales:
    """Make the layers multiply in float8 with scales that they share; call `update` after each optimizer step.

    ungrouped: layers that share no product with others that read the same input.
    """
    sizes = {
        i * len(SLOTS): (layer.out_features, layer.in_features)
        for i, layer in enumerate(layers)
        if layer not in ungrouped
    }
    scales = DelayedScales(list(SLOTS) * len(layers), device, sizes)
    for i, layer in enumerate(layers):
        patch_module(layer, Float8Linear)
        assert isinstance(layer, Float8Linear)  # by the line above
        layer.float8_scales = scales
        layer.float8_slot = i * len(SLOTS)
        layer.float8_weight = None
        layer.float8_frozen = None
    return scales


def hold_frozen_weights(model: nn.Module) -> int:
    """Keep the frozen weights of float8 layers in float8 only; return their number."""
    frozen = [m for m in model.modules() if isinstance(m, Float8Linear) and not m.weight.requires_grad]
    for layer in frozen:
        layer.hold_in_float8()
    return len(frozen)


def scales_of(model: nn.Module) -> DelayedScales | None:
    """Return the delayed scales of a model's float8 layers, None if it has none."""
    return next((module.float8_scales for module in model.modules() if isinstance(module, Float8Linear)), None)
