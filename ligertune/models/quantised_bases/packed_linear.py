"""A frozen linear layer that holds the tensors of a quantised checkpoint, and computes its weight for each product.

    y = x W^T + b        dx = dy W        W = dequantised(parts), in each direction again

No dense weight is kept for the backward. LoRA layers around it are those around any linear layer: PEFT's, or ours
(`kernels.lora`), which call `dequantize`.
"""

from __future__ import annotations

from typing import Any

import torch
from ligertune_kernels.autograd import autocast_dtype, no_double_backward
from torch import Tensor, nn

from ligertune.models.quantised_bases.base_formats import PackedLayout
from ligertune.models.quantised_bases.dequantise import (
    awq_weight,
    compressed_weight,
    gptq_weight,
    group_index,
    hqq_weight,
)

# the tensors of a checkpoint that `dequantise.py` reads; others describe activations or how the weight was quantised
PARTS = {
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
    "hqq": ("W_q", "scale", "zero"),
    "compressed-tensors": ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}
GROUP_OF_COLUMN = ("g_idx", "weight_g_idx")
PREFIX = "packed_"  # of the parts' names once they are loaded: a stored tensor may be called weight


class PackedLinear(nn.Linear):
    """nn.Linear (..., E) -> (..., F) without a dense weight.

    Its parts are parameters without gradient. While a checkpoint is loaded they have the checkpoint's names; `seal`
    renames them, so that `weight` is what integrations look at: an empty tensor with the device and dtype of a product.
    """

    def __init__(self, outputs: int, inputs: int, bias: nn.Parameter | None, layout: PackedLayout, dtype: torch.dtype):
        nn.Module.__init__(self)  # nn.Linear's own makes a dense weight
        self.in_features = inputs
        self.out_features = outputs
        self.register_parameter("bias", bias)
        self.has_bias = bias is not None  # in the model: GPTQ's files can have one of zeros where it has none
        self.layout = layout
        self.dtype = dtype  # of the weight that `dequantize` returns
        self.sealed: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.sealed:
            part = self.get_parameter(f"{PREFIX}{self.sealed[0]}")
            return torch.empty(0, dtype=self.dtype, device=part.device)
        return super().__getattr__(name)

    def seal(self) -> None:
        """Finish loading: rename the parts that are read, and leave out an index of groups that are in order.

        Raises ValueError for a bias that the model does not have.
        """
        used = PARTS[self.layout.method]
        parts = {name: part for name, part in self._parameters.items() if name in used and part is not None}
        for name in GROUP_OF_COLUMN:
            if name in parts and self._is_in_order(parts[name]):
                del parts[name]
            elif name in parts:
                parts[name] = nn.Parameter(parts[name].to(torch.int64), requires_grad=False)
        bias: nn.Parameter | None = self.bias
        if not self.has_bias and bias is not None:
            if bool(bias.any()):
                raise ValueError("a packed layer has a bias, and the model of its config.json has none")
            bias = None
        self._parameters.clear()
        self.register_parameter("bias", bias)
        for name, part in parts.items():
            self.register_parameter(f"{PREFIX}{name}", part)
        self.sealed = tuple(parts)
        if not any(name in parts for name in GROUP_OF_COLUMN) and (index := self._uneven_groups()) is not None:
            self.register_parameter(f"{PREFIX}{GROUP_OF_COLUMN[0]}", nn.Parameter(index, requires_grad=False))
            self.sealed += GROUP_OF_COLUMN[:1]

    def parts(self) -> dict[str, Tensor]:
        """Return the stored tensors by their names in the checkpoint."""
        return {name: self._parameters[f"{PREFIX}{name}"] for name in self.sealed}  # type: ignore[misc]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight (F, E), rounded once to `dtype`, or to that of the model."""
        parts = self.parts()
        shape = self.out_features, self.in_features
        dtype = dtype or self.dtype
        with torch.no_grad():
            if self.layout.method == "gptq":
                return gptq_weight(parts, shape, dtype, stored_minus_one=self.layout.stored_minus_one)
            if self.layout.method == "awq":
                return awq_weight(parts, shape, dtype)
            if self.layout.method == "hqq":
                return hqq_weight(parts, shape, dtype, bits=self.layout.bits, axis=self.layout.axis)
            return compressed_weight(parts, shape, dtype)

    def forward(self, input: Tensor) -> Tensor:  # nn.Linear's name of the argument
        """Return x W^T + b in the dtype of autocast, or of x."""
        dtype = autocast_dtype(input.device) or input.dtype
        bias = None if self.bias is None else self.bias.to(dtype)
        product = _PackedProduct.apply(input.to(dtype), self)
        return product if bias is None else product + bias

    def dense(self) -> nn.Linear:
        """Return a linear layer with the weight in the dtype of the model."""
        layer = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        layer.weight = nn.Parameter(self.dequantize(), requires_grad=False)
        layer.bias = self.bias
        return layer

    def _groups(self) -> int:
        scale = self._parameters.get(f"{PREFIX}scales")
        if scale is not None:  # (G, F)
            return len(scale)
        scale = self._parameters.get(f"{PREFIX}weight_scale")  # (F, G) or one number
        return 1 if scale is None or scale.ndim < 2 else scale.shape[1]

    def _uneven_groups(self) -> Tensor | None:
        """Return the group of each column where the last group is smaller than the others; None if all are equal."""
        groups = self._groups()
        size = self.layout.group_size
        is_cut = groups > 1 and size > 0 and -(-self.in_features // size) == groups and self.in_features % size != 0
        if not is_cut and self.in_features % groups == 0:
            return None
        device = self.get_parameter(f"{PREFIX}{self.sealed[0]}").device
        return group_index(self.in_features, groups, size if is_cut else 0).to(device)

    def _is_in_order(self, index: Tensor) -> bool:
        """Return whether columns are in the order of equal groups; llm-compressor writes -1 where it has no order."""
        if int(index.min()) < 0:
            return True
        groups = int(index.max()) + 1
        if self.in_features % groups:
            return False
        expected = group_index(self.in_features, groups).to(index.device)
        return bool((index == expected).all())


class _PackedProduct(torch.autograd.Function):
    """x W^T of a PackedLinear, whose weight is computed again for dx."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear) -> Tensor:  # (..., E) -> (..., F)
        ctx.layer = layer
        return nn.functional.linear(x, layer.dequantize(x.dtype))

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ ctx.layer.dequantize(dy.dtype), None
