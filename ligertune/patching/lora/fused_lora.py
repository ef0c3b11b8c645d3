"""Fused LoRA layers: the low-rank update is added inside the matrix multiplications, and inside the head's loss.

    y = x W^T + s (x A^T) B^T        x: (N, E), W: (F, E) frozen, A: (R, E), B: (F, R)

peft computes the second term, scales it and adds it. Besides the products that takes 5 passes over (N, F) in the
forward and 2 in the backward, and 3 passes over (N, E) to sum the gradients of x. Here cuBLAS accumulates each product
into the other one (`addmm_`), in fp32 and rounded once. Seven such layers of Llama-3-8B have 43,000 output columns for
218 M weights: in 16 bits, peft's passes move as many bytes as 20 % of the time of the frozen products.

`joint_lora.py` computes layers with the same input (q, k, v; gate, up) together.

With dropout the adapter reads x with elements dropped, by a seed from torch's generator. peft keeps such a copy of x
for each layer, and a mask; here both directions drop the same elements again.

peft's own code runs wherever it does more than this (DoRA, several adapters, a merged adapter), and where it multiplies
by the adapter in another dtype than the layer's input.

Quantised weights (QLoRA, block float8) are dequantised for each product, by one kernel instead of bitsandbytes' three,
into a buffer as large as the largest weight. The weight in the buffer is not dequantised again: a checkpointed layer
that ends with a norm multiplies by its last weight twice in a row. What bitsandbytes keeps in its state objects is read
once per layer, not once per product.
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from ligertune_kernels import LinearLora, linear_cross_entropy
from ligertune_kernels.autograd import autocast_dtype, no_double_backward
from ligertune_kernels.ops.moe.dequantize_nf4 import SCALE_BLOCK, TABLES, Nf4
from ligertune_kernels.ops.moe.quantised_weight import QuantisedWeight, Stored, versions_of
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer as AdaptedLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from ligertune.any_types import AnyModule
from ligertune.patching.deferred_logits import STATE, count_fused
from ligertune.patching.fused_loss import LossHead
from ligertune.patching.lora.joint_lora import (
    DroppedInputs,
    LoraTerms,
    join_siblings,
    joint_update,
    known_of,
    rows_of,
    siblings_of,
)
from ligertune.patching.module_patch import ModulePatch, has_own_hooks, patch_module, unpatch_module
from ligertune.patching.recompute import is_linear, is_whole, recomputation_of

LoraLayer: TypeAlias = AnyModule  # peft's LoRA layer around a linear one, or a `FusedLora` or `LoraLossHead` made of it


@dataclass(frozen=True)
class StoredLinear:
    """A frozen weight (F, E) of a linear layer in a few bits. parameter: the layer's, with the bytes of stored."""

    parameter: Tensor
    stored: Stored
    shape: tuple[int, int]
    dtype: torch.dtype

    def dequantize(self) -> Tensor:
        """Return the weight. Use it at once: the next call for any weight overwrites it."""
        device = self.parameter.device
        buffer = _BUFFERS.get(device)
        if buffer is None:
            buffer = _BUFFERS[device] = _DequantisedBuffer()
        return buffer.read(self)


class _DequantisedBuffer:
    """The memory of a device for one dequantised weight. It grows to the largest weight."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._dense: Tensor | None = None  # the weight in the memory
        # parameter, address and versions of its bytes and scales, dtype
        self._key: tuple[weakref.ref[Tensor], int, tuple[int, ...], torch.dtype] | None = None

    def read(self, weight: StoredLinear) -> Tensor:
        parameter = weight.parameter
        if parameter.is_cuda and torch.cuda.is_current_stream_capturing():
            # The graph dequantises into its own memory pool, and does not use the buffer.
            self._memory = None
            self._dense = None
            self._key = None
            return weight.stored.dequantize((1, *weight.shape), weight.dtype)[0]
        now = weight.stored.tensors[0].data_ptr(), versions_of(weight.stored), weight.dtype
        if self._dense is None or self._key is None or self._key[0]() is not parameter or self._key[1:] != now:
            self._key = None
            with torch.inference_mode(False):  # the next training step may read it, too
                self._dense = self._room(weight)
                weight.stored.write(self._dense[None])
            self._key = (weakref.ref(parameter), *now)
        return self._dense

    def _room(self, weight: StoredLinear) -> Tensor:
        """Return the beginning of the memory as a tensor with the weight's shape and dtype."""
        size = math.prod(weight.shape) * weight.dtype.itemsize
        if self._memory is None or self._memory.numel() < size:
            self._memory = None  # freed before the larger one is allocated
            self._dense = None
            self._memory = torch.empty(size, dtype=torch.uint8, device=weight.parameter.device)
        return self._memory[:size].view(weight.dtype).view(weight.shape)


_BUFFERS: dict[torch.device, _DequantisedBuffer] = {}


class _KnownStored(NamedTuple):
    """What was read from a layer of bitsandbytes, and from what."""

    parameter: Tensor
    state: Any
    address: int  # of the bytes
    weight: StoredLinear | None


def stored_linear(layer: nn.Module) -> StoredLinear | None:
    """Return the quantised weight of a layer; None for any other layer, and for other formats of bitsandbytes' 4 bits.

    Under FSDP2 the weight is one that it has gathered, without the scales, which the layer keeps. A layer of
    bitsandbytes keeps what was read. A table of layers would free none of them: a parameter refers to its layer.
    """
    parameter: Any = getattr(layer, "weight", None)
    if isinstance(parameter, QuantisedWeight):
        if type(layer) is not nn.Linear or parameter.transposed:
            return None
        rows, columns = parameter.shape
        return StoredLinear(parameter, parameter.stored, (rows, columns), parameter.dtype)
    state = getattr(parameter, "quant_state", None)
    if state is None and parameter is not None and is_whole(parameter):
        state = getattr(layer, "quant_state", None)
    if state is None:
        return None
    address = parameter.data_ptr()
    known: _KnownStored | None = vars(layer).get("_stored_linear")
    if known is None or known.parameter is not parameter or known.state is not state or known.address != address:
        known = _KnownStored(parameter, state, address, _read_state(parameter, state))
        vars(layer)["_stored_linear"] = known
    return known.weight


def packed_weight(layer: nn.Module) -> Any:
    """Return what computes a layer's frozen weight, with `dequantize` and `dtype`; None for a layer with a dense one.

    That is the weight of few bits that our kernels read, or a layer that dequantises its own.
    """
    return layer if isinstance(layer, nn.Linear) and hasattr(layer, "dequantize") else stored_linear(layer)


def _read_state(parameter: Any, state: Any) -> StoredLinear | None:
    """Return the weight as our kernel reads it; None for a format that it does not read."""
    if state.quant_type not in TABLES:
        return None
    if getattr(state, "packing_format_for_cpu", False):
        return None
    if state.nested and state.state2.blocksize != SCALE_BLOCK:
        return None
    absmax = state.absmax.view(1, -1)
    empty = absmax.new_empty(1, 0, dtype=torch.float32)
    nf4 = Nf4(
        packed=parameter.detach().view(-1).view(torch.uint8).view(1, -1),
        scales=absmax,
        block_scales=state.state2.absmax.view(1, -1) if state.nested else empty,
        offset=state.offset.view(1) if state.nested else empty,
        quant_type=state.quant_type,
        block=state.blocksize,
    )
    return StoredLinear(parameter, nf4, tuple(state.shape), state.dtype)


class _LowRankUpdate(torch.autograd.Function):
    """base + s (drop(x) A^T) B^T in a new tensor. base: (..., F)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (..., E)
        a: Tensor,  # (R, E)
        b: Tensor,  # (F, R)
        scale: float,
        base: Tensor,
        dropout: float,
    ) -> Tensor:  # (..., F)
        drops = DroppedInputs.of(x, [dropout])
        rows = rows_of(x) if drops is None else drops.applied(0, rows_of(x))
        narrow_a = a.to(x.dtype)
        scaled_b = (scale * b).to(x.dtype)
        low = rows @ narrow_a.t()  # (N, R)
        y = x.new_empty(*x.shape[:-1], len(b))  # no view: its reader may write over it
        torch.addmm(rows_of(base), low, scaled_b.t(), out=rows_of(y))
        ctx.save_for_backward(x, narrow_a, scaled_b, low)
        ctx.scale = scale
        ctx.drops = drops
        ctx.adapter_dtypes = (a.dtype, b.dtype)
        return y

    @staticmethod
    @no_double_backward
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow_a, scaled_b, low = ctx.saved_tensors
        needs_dx, needs_da, needs_db, _, needs_base, _ = ctx.needs_input_grad
        d_rows = rows_of(dy)
        dx = da = db = None
        if needs_dx or needs_da:
            d_low = d_rows @ scaled_b  # (N, R)
            rows = rows_of(x) if ctx.drops is None else ctx.drops.applied(0, rows_of(x))
            da = (d_low.t() @ rows).to(ctx.adapter_dtypes[0]) if needs_da else None
            d_read = d_low @ narrow_a
            dx = (d_read if ctx.drops is None else ctx.drops.applied(0, d_read)).view(x.shape) if needs_dx else None
        if needs_db:
            db = (d_rows.t() @ low).to(ctx.adapter_dtypes[1]).mul_(ctx.scale)
        return dx, da, db, None, dy if needs_base else None, None


class FusedLora(ModulePatch):
    """Mixin of peft's LoRA layer around an nn.Linear or bitsandbytes' Linear4bit: (..., E) -> (..., F)."""

    def forward(self: LoraLayer, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or torch.compiler.is_compiling():  # torch.compile optimises peft's code better
            return super().forward(x, *args, **kwargs)
        recomputation = recomputation_of(x)
        siblings = siblings_of(self)
        with recomputation.replacing(x) if recomputation is not None else contextlib.nullcontext():
            y = None if siblings is None else siblings.output(self, x, _terms_of)
            if y is not None:
                return y
            if (terms := _terms_of(self, x)) is not None:
                return joint_update(x, (terms,), known_of(self))[0]
            if _is_plain(self, x, None):
                name = self.active_adapters[0]
                adapter = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
                return _LowRankUpdate.apply(x, *adapter, self.base_layer(x), _dropout_of(self))
        return super().forward(x)

    def gives_new_output(self: LoraLayer, x: Tensor) -> bool:
        return _is_plain(self, x, packed_weight(self.base_layer))


class LoraLossHead(LossHead):
    """Mixin of peft's LoRA layer around an output head: (..., E) -> (..., V), or -> the loss if labels are passed.

    A and B enter `linear_cross_entropy`, so no logits are made unless peft does more than add s B A x.
    """

    @classmethod
    def linear_of(cls, head: LoraLayer) -> nn.Module:
        return head.base_layer

    def compute_loss(self: LoraLayer, hidden: Tensor, labels: Tensor, options: dict[str, Any]) -> Tensor:
        base = self.base_layer
        reason = why_not_low_rank(self)
        if reason is None and _dropout_of(self):
            reason = "has dropout"
        if reason is None and _casts_input(self, hidden):
            reason = "has another dtype"
        is_off = self.disable_adapters and not self.merged  # for a reference; then the head is its base
        if reason is not None and not is_off:
            return self.dense_loss(hidden, labels, options, f"the head's adapter {reason}")
        if type(base) is not nn.Linear:
            return self.dense_loss(hidden, labels, options, f"the head is a {type(base).__name__}")
        count_fused(self)
        if not is_off:
            name = self.active_adapters[0]
            a = self.lora_A[name].weight
            b = self.lora_B[name].weight
            options = {**options, "lora": LinearLora(a, b, self.scaling[name])}
        if STATE.head_loss is not None:
            return STATE.head_loss.fused(hidden, base.weight, base.bias, labels, options)
        return linear_cross_entropy(hidden, base.weight, labels, base.bias, **options)


def why_not_low_rank(layer: LoraLayer) -> str | None:
    """Return why the layer's output is more than x W^T + s drop(x) A^T B^T, or None if it is exactly that."""
    name = layer.active_adapters[0] if len(layer.active_adapters) == 1 else None
    if layer.disable_adapters or layer.merged or name not in layer.lora_A:
        return "is switched off, merged, or one of several"
    if name in layer.lora_variant or layer.lora_bias.get(name):
        return "is more than a low-rank term"
    if type(layer.lora_dropout[name]) not in (nn.Identity, nn.Dropout):
        return "has another dropout than torch's"
    # FSDP1 wraps A and B by peft's policy, and gathers their weights only when the wrapper is called
    if not (is_linear(layer.lora_A[name]) and is_linear(layer.lora_B[name])):
        return "consists of wrapped layers"
    return None


def _dropout_of(layer: LoraLayer) -> float:
    """Return the probability with which the adapter's input loses an element now: 0 in evaluations."""
    dropout = layer.lora_dropout[layer.active_adapters[0]]
    return dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0


def _may_drop(layer: LoraLayer) -> bool:
    """Return whether the adapter's input loses elements in training."""
    return isinstance(layer.lora_dropout[layer.active_adapters[0]], nn.Dropout)


def _terms_of(layer: LoraLayer, x: Tensor) -> LoraTerms | None:
    """Return what a layer computes from x, if that is the sum of a frozen weight's product and of a low-rank one."""
    base = layer.base_layer
    packed = packed_weight(base)
    if not _is_plain(layer, x, packed) or not (packed is not None or _is_frozen_linear(base)):
        return None
    name = layer.active_adapters[0]
    bias = base.bias if base.bias is None or packed is None else base.bias.to(x.dtype)
    weight = base.weight if packed is None else packed
    adapter = layer.lora_A[name].weight, layer.lora_B[name].weight
    return LoraTerms(*adapter, layer.scaling[name], weight, bias, _dropout_of(layer))


def _is_plain(layer: LoraLayer, x: Tensor, packed: StoredLinear | None) -> bool:
    return why_not_low_rank(layer) is None and not _has_hooks(layer) and _uses_one_dtype(x, layer, packed)


def _has_hooks(layer: LoraLayer) -> bool:
    name = layer.active_adapters[0]
    parts = (layer.lora_A[name], layer.lora_B[name], layer.lora_dropout[name], layer.base_layer)
    return nn.modules.module._has_any_global_hook() or any(map(has_own_hooks, parts))


def _uses_one_dtype(x: Tensor, module: LoraLayer, packed: StoredLinear | None) -> bool:
    """Return whether all products run in x's dtype on plain tensors.

    packed: the base layer's weight, if it is quantised.
    """
    name = module.active_adapters[0]
    dtype = autocast_dtype(x.device) or x.dtype
    if dtype != x.dtype or not x.is_floating_point():
        return False
    if _casts_input(module, x):
        return False
    weights = [module.lora_A[name].weight, module.lora_B[name].weight]
    if packed is not None:
        computed = getattr(module.base_layer, "compute_dtype", None) or x.dtype
        return all(map(is_whole, weights)) and packed.dtype == computed == x.dtype
    base_weight = module.base_layer.weight
    # The products of a float8 weight have x's dtype.
    return all(map(is_whole, [base_weight, *weights])) and base_weight.dtype in (x.dtype, torch.float8_e4m3fn)


def _casts_input(layer: LoraLayer, x: Tensor) -> bool:
    """Return whether peft multiplies by the adapter in the adapter's dtype, and that is not x's.

    Autocast gives both one dtype. Recipes switch the cast off (`cast_input_dtype_enabled`), since they train under it.
    """
    if autocast_dtype(x.device) is not None or not layer.cast_input_dtype_enabled:
        return False
    name = layer.active_adapters[0]
    return any(part[name].weight.dtype != x.dtype for part in (layer.lora_A, layer.lora_B))


def _is_frozen_linear(base: nn.Module) -> bool:
    frozen = not any(p.requires_grad for p in base.parameters(recurse=False))
    return is_linear(base) and frozen and not hasattr(base, "parametrizations")


def fuse_adapters(model: nn.Module) -> int:
    """Replace the forward of every plain LoRA layer of `model` by the fused one; return the number of layers."""
    # peft has loaded this module if the model has a layer of it; importing it would import bitsandbytes
    four_bit = getattr(sys.modules.get("peft.tuners.lora.bnb"), "Linear4bit", LoraLinear)
    layers = [module for module in model.modules() if type(module) in (LoraLinear, four_bit)]
    for layer in layers:
        patch_module(layer, FusedLora)
    join_siblings(model, FusedLora)
    return len(layers)


def move_loss_heads(model: nn.Module) -> None:
    """Let an adapted output head compute the loss that the layer inside it computed before peft wrapped it."""
    for module in model.modules():
        if type(module) is LoraLinear and isinstance(module.base_layer, LossHead):
            unpatch_module(module.base_layer)
            patch_module(module, LoraLossHead)


def loss_head_patch(head: nn.Module | None) -> type[LossHead]:
    """Return the patch with which an output head, adapted or not, computes the loss."""
    return LoraLossHead if type(head) is LoraLinear else LossHead


def adapted_layers(model: nn.Module) -> list[LoraLayer]:
    """Return peft's LoRA layers in `model`, fused or not. Adapters of parameters are others (`expert_lora`)."""
    return [m for m in model.modules() if isinstance(m, AdaptedLayer) and not isinstance(m, ParamWrapper)]


def why_peft_computes(layer: LoraLayer) -> str | None:
    """Return why peft's own code trains a LoRA layer, or None if the fused one does."""
    if not isinstance(layer, FusedLora | LoraLossHead):
        return "not a linear layer, or one in another format"
    reason = why_not_low_rank(layer)
    if reason is None and isinstance(layer, LoraLossHead) and _may_drop(layer):
        reason = "has dropout"
    return None if reason is None else f"its adapter {reason}, so PEFT computes it"
