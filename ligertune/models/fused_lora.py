"""LoRA layers whose low-rank term is added by the product that makes it, and not by passes over their output.

    y = x W^T + s (x A^T) B^T        x: (T, E), W: (F, E) frozen, A: (R, E), B: (F, R)

peft writes the second term, scales it and adds it: beside its product 5 passes over (T, F) in the forward and 2 in the
backward, and 3 over (T, E) to add up what goes back to x. Here cuBLAS adds each product to what is there (`addmm_`), in
fp32 and rounded once. Seven such layers of Llama-3-8B are 43,000 columns for 218 M weights: at 16-bit some 20 % of the
time of the frozen products went into these passes, by their bytes.

Where peft does more than that (DoRA, dropout, several adapters or one that is merged), it does it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.nn import functional as F

from ligertune.patching.aliasing import is_watched
from ligertune.patching.module_patch import Patch, swap
from ligertune.patching.recompute import is_linear, is_whole, rebuilt_of


class _LowRank(torch.autograd.Function):
    """base + s (x A^T) B^T in memory of its own. base: (..., F) or None, which is then x W^T + bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        scale: float,
        base: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        rows, narrow_a, scaled_b = x.flatten(0, -2), a.to(x.dtype), (scale * b).to(x.dtype)
        low = rows @ narrow_a.t()  # (T, R)
        if base is None:
            y = F.linear(rows, weight, bias).addmm_(low, scaled_b.t())
        else:
            y = torch.addmm(base.flatten(0, -2), low, scaled_b.t())
        ctx.save_for_backward(x, narrow_a, scaled_b, low, weight if base is None else None)
        ctx.scale, ctx.adapter_dtypes = scale, (a.dtype, b.dtype)
        return y.view(*x.shape[:-1], len(b))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow_a, scaled_b, low, weight = ctx.saved_tensors
        needs_dx, needs_da, needs_db, _, needs_base, *_ = ctx.needs_input_grad
        d_rows = dy.flatten(0, -2)
        d_low = d_rows @ scaled_b if needs_dx or needs_da else None  # (T, R)
        dx = da = db = None
        if needs_dx:
            dx = d_low @ narrow_a if weight is None else (d_rows @ weight).addmm_(d_low, narrow_a)
            dx = dx.view(x.shape)
        if needs_da:
            da = (d_low.t() @ x.flatten(0, -2)).to(ctx.adapter_dtypes[0])
        if needs_db:
            db = (d_rows.t() @ low).to(ctx.adapter_dtypes[1]).mul_(ctx.scale)
        return dx, da, db, None, dy if needs_base else None, None, None


class FusedLora(Patch):
    """Mixin of peft's LoRA layer around a linear one: (..., E) -> (..., F)."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or why_not_low_rank(self) is not None or _is_seen(self) or not _computes_in(x, self):
            return super().forward(x, *args, **kwargs)
        name, base = self.active_adapters[0], self.base_layer
        adapter = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        rebuilt = rebuilt_of(x)
        with rebuilt.standing_for(x) if rebuilt is not None else contextlib.nullcontext():
            if _is_frozen_linear(base):
                return _LowRank.apply(x, *adapter, None, base.weight, base.bias)
            return _LowRank.apply(x, *adapter, base(x), base.weight, None)


def why_not_low_rank(layer: LoraLinear) -> str | None:
    """What the layer's adapters are or have now that s B A x is not; None of one that is just that."""
    name = layer.active_adapters[0] if len(layer.active_adapters) == 1 else None
    if layer.disable_adapters or layer.merged or name not in layer.lora_A:
        return "is switched off, merged, or one of several"
    if name in layer.lora_variant or layer.lora_bias.get(name):
        return "is more than a low-rank term"
    if layer.training and not isinstance(layer.lora_dropout[name], nn.Identity):
        return "has dropout"
    return None


def _is_seen(layer: LoraLinear) -> bool:
    """Does a hook want to see what a part of it gives?"""
    name = layer.active_adapters[0]
    return any(is_watched(part) for part in (layer.lora_A[name], layer.lora_B[name], layer.base_layer))


def _computes_in(x: Tensor, module: LoraLinear) -> bool:
    """Will all products be in x's dtype, on plain tensors? Under a compiler peft's own code makes a better graph."""
    kind, name = x.device.type, module.active_adapters[0]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if torch.compiler.is_compiling() or dtype != x.dtype or not x.is_floating_point():
        return False
    weights = module.base_layer.weight, module.lora_A[name].weight, module.lora_B[name].weight
    return all(map(is_whole, weights)) and weights[0].dtype == x.dtype


def _is_frozen_linear(base: nn.Module) -> bool:
    frozen = not any(p.requires_grad for p in base.parameters(recurse=False))
    return is_linear(base) and frozen and not hasattr(base, "parametrizations")


def fuse_adapters(model: nn.Module) -> int:
    """Let every plain LoRA layer inside `model` add its term in its products; how many do."""
    layers = [module for module in model.modules() if type(module) is LoraLinear]
    for layer in layers:
        swap(layer, FusedLora, None)
    return len(layers)
